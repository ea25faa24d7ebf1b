// Orders of work: pure functions of (agent, step), so that whoever loads a tile, computes it and stores it can walk the
// same sequence separately. A tile or a chunk never crosses a rank's border.
#pragma once

#include "types.cuh"

namespace mk {

struct Range {
    i64 begin, end;
    MK_DEVICE i64 size() const { return end - begin; }
};

// A GPU divides numbers of 64 bits in a function of its own, which takes long: where it counts, extents have 32.
MK_DEVICE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
template <class Number>
MK_DEVICE Number ceil_div(Number a, Number b) { return (a + b - 1) / b; }

// `length` from `begin` on, up to `extent`.
MK_DEVICE Range stretch(i64 begin, i64 length, i64 extent) {
    const i64 end = begin + length;
    return {begin, end < extent ? end : extent};
}
MK_DEVICE Range block(i64 index, i64 length, i64 extent) { return stretch(index * length, length, extent); }

// The pieces of [0, extent), `length` at a time.
class Blocks {
public:
    MK_DEVICE Blocks(i64 extent, i64 length) : extent_(extent), length_(length) {}

    struct Iterator {
        i64 begin, length, extent;
        MK_DEVICE Range operator*() const { return stretch(begin, length, extent); }
        MK_DEVICE Iterator& operator++() { return begin += length, *this; }
        MK_DEVICE bool operator!=(const Iterator& other) const { return begin < other.begin; }
    };
    MK_DEVICE Iterator begin() const { return {0, length_, extent_}; }
    MK_DEVICE Iterator end() const { return {extent_, length_, extent_}; }

private:
    i64 extent_, length_;
};

// Ranks that reach each other's memory; an empty one stands for all.
struct Node {
    u64 begin, size;
};

// The rank that comes `step` steps after `rank`: around the ring of its node, and then around that of all others.
MK_DEVICE u64 ring_rank(u64 rank, u64 step, u64 size, Node node) {
    if (several_nodes && step < node.size) {
        const u64 place = rank - node.begin + step;
        return node.begin + (place < node.size ? place : place - node.size);
    }
    const u64 place = (several_nodes && node.size > 0 ? node.begin : rank) + step;
    return place < size ? place : place - size;
}

// Where a ring of ranks leads from one of them in so many steps, up to `size`. No division: they cost registers.
MK_DEVICE u64 around(u64 rank, u64 step, u64 size) { return rank + step < size ? rank + step : rank + step - size; }

// rank + 1, rank + 2, ...: at any time all ranks read from different peers.
class RingOrder {
public:
    MK_DEVICE RingOrder(u64 rank, u64 size, Node node = {0, 0}) : rank_(rank), size_(size), node_(node) {}

    struct Iterator {
        u64 step, rank, size;
        Node node;
        MK_DEVICE u64 operator*() const { return ring_rank(rank, step, size, node); }
        MK_DEVICE Iterator& operator++() { return ++step, *this; }
        MK_DEVICE bool operator!=(const Iterator& other) const { return step != other.step; }
    };
    MK_DEVICE Iterator begin() const { return {1, rank_, size_, node_}; }
    MK_DEVICE Iterator end() const { return {size_, rank_, size_, node_}; }

private:
    u64 rank_, size_;
    Node node_;
};

// Rows of one rank (counted within it) by columns of the product.
struct Tile {
    u64 source;
    Range rows;
    Range columns;
};

// The tiles of one agent out of `agents`, stripe by stripe of the columns, and in each rank by rank around the ring: those
// of rank + first step, of the step after it, ... Within a rank a group of row blocks, whose rows arrive together, comes
// with all its columns before the next group. The last tiles may be halved, so that all agents have some of them.
template <bool may_halve>
class RingTilesOf {
public:
    static constexpr u32 group = 8;  // row blocks that are worked on together: the columns of B stay in the L2 cache
    static constexpr u32 one_stripe = ~u32(0);  // of all columns
    static constexpr bool halving = may_halve;

    struct Grid {
        u64 rank, size;
        const i64* row_start;
        i64 columns;
        TileShape tile;
        Node node{0, 0};  // whose ranks come first
        bool far_first = false;  // or last, if there are others
    };
    struct Steps {
        u64 first, end;  // 0 and `size` are the rank itself
    };

    // `stripe`: its columns, whole tiles. `whole`: so many tiles of all agents are; those behind may be two each, of half as
    // many columns.
    MK_DEVICE RingTilesOf(Grid grid, Steps steps, i64 stripe, u64 agent, u64 agents, i64 whole = 0)
        : row_start_(grid.row_start), node_(grid.node), far_first_(grid.far_first), rank_(u32(grid.rank)),
          size_(u32(grid.size)), first_(u32(steps.first)), end_(u32(steps.end)), columns_(u32(grid.columns)),
          stripe_(u32(stripe)), tile_rows_(u32(grid.tile.rows)), tile_columns_(u32(grid.tile.columns)),
          agent_(i32(agent)), agents_(i32(agents)), whole_(i32(whole)) {}

    class Iterator {
    public:
        // At the first step of the stripe that begins at a column.
        MK_DEVICE Iterator(const RingTilesOf& tiles, u32 column)
            : tiles_(tiles), step_(tiles.first_), column_(column), index_(tiles.agent_) {
            if (column != tiles.columns_) settle(false);
        }
        MK_DEVICE Tile operator*() const {
            const i32 behind = index_ - whole();
            const u32 index = u32(behind < 0 ? index_ : whole() + behind / 2);
            const u32 first = index / (group * across_) * group, rest = index - first * across_;
            const u32 height = blocks_ - first < group ? blocks_ - first : group;
            const u32 width = tiles_.tile_columns_;
            const Range rows = block(first + rest % height, tiles_.tile_rows_, rows_);
            const Range columns = stretch(column_ + rest / height * width, width, tiles_.columns_);
            if (behind < 0) return {source_, rows, columns};
            const i64 half = columns.begin + width / 2, middle = half < columns.end ? half : columns.end;
            return {source_, rows, behind % 2 ? Range{middle, columns.end} : Range{columns.begin, middle}};
        }
        // Whoever got the first tile of a wave gets the first of the next: where rows of peers are awaited, its was an own one.
        MK_DEVICE Iterator& operator++() {
            index_ += tiles_.agents_;
            return settle(true), *this;
        }
        MK_DEVICE bool operator!=(const Iterator& other) const { return column_ != other.column_; }

    private:
        MK_DEVICE i32 tile_count() const { return i32(blocks_ * across_); }
        // Of this step's tiles; and what there is to do of them, with halves.
        MK_DEVICE i32 whole() const {
            if (!may_halve) return tile_count();
            const i32 left = tiles_.whole_ - passed_;
            return left < 0 ? 0 : left < tile_count() ? left : tile_count();
        }
        MK_DEVICE i32 count() const { return 2 * tile_count() - whole(); }
        MK_DEVICE u32 stripe() const {
            const u32 left = tiles_.columns_ - column_;
            return tiles_.stripe_ < left ? tiles_.stripe_ : left;
        }
        MK_DEVICE void enter() {
            source_ = u32(tiles_.source(step_));
            rows_ = tiles_.rows(source_);
            blocks_ = ceil_div(rows_, tiles_.tile_rows_);
            across_ = ceil_div(stripe(), tiles_.tile_columns_);
        }
        // Goes on to the step that has the tile, or to the end.
        MK_DEVICE void settle(bool entered) {
            for (;; entered = false) {
                if (!entered) enter();
                if (index_ < count()) return;
                index_ -= count();
                passed_ += tile_count();
                if (++step_ < tiles_.end_) continue;
                step_ = tiles_.first_;
                column_ += stripe();
                if (column_ == tiles_.columns_) return;
            }
        }
        const RingTilesOf& tiles_;
        u32 step_, column_;  // where the stripe begins
        i32 index_, passed_ = 0;  // tiles of the steps before
        u32 source_ = 0, rows_ = 0, blocks_ = 0, across_ = 0;  // of this step; the last two in tiles
    };
    MK_DEVICE Iterator begin() const { return {*this, first_ < end_ ? 0 : columns_}; }
    MK_DEVICE Iterator end() const { return {*this, columns_}; }

private:
    MK_DEVICE u64 source(u64 step) const {
        if (several_nodes && far_first_) {
            const u64 far = size_ - node_.size;
            step = step <= far ? step + node_.size - 1 : step == size_ ? 0 : step - far;
        }
        return ring_rank(rank_, step, size_, node_);
    }
    MK_DEVICE u32 rows(u32 source) const { return u32(row_start_[source + 1] - row_start_[source]); }

    const i64* row_start_;
    Node node_;
    bool far_first_;
    u32 rank_, size_, first_, end_;  // steps
    u32 columns_, stripe_, tile_rows_, tile_columns_;
    i32 agent_, agents_, whole_;
};
using RingTiles = RingTilesOf<false>;

}  // namespace mk
