// Orders of work: pure functions of (agent, step), so that whoever loads a tile, computes it and stores it can walk the
// same sequence separately. A tile or a chunk never crosses a rank's border.
#pragma once

#include "types.cuh"

namespace mk {

struct Range {
    i64 begin, end;
    MK_DEVICE i64 size() const { return end - begin; }
};

MK_DEVICE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

MK_DEVICE Range block(i64 index, i64 length, i64 extent) {
    i64 begin = index * length, end = begin + length;
    return {begin, end < extent ? end : extent};
}

// The pieces of [0, extent), `length` at a time.
class Blocks {
public:
    MK_DEVICE Blocks(i64 extent, i64 length) : extent_(extent), length_(length) {}

    struct Iterator {
        i64 index, length, extent;
        MK_DEVICE Range operator*() const { return block(index, length, extent); }
        MK_DEVICE Iterator& operator++() { return ++index, *this; }
        MK_DEVICE bool operator!=(const Iterator& other) const { return index != other.index; }
    };
    MK_DEVICE Iterator begin() const { return {0, length_, extent_}; }
    MK_DEVICE Iterator end() const { return {ceil_div(extent_, length_), length_, extent_}; }

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
    static constexpr i64 one_stripe = i64(1) << 40;  // of all columns
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

    // `whole`: so many tiles of all agents are; those behind may be two each, of half as many columns.
    MK_DEVICE RingTilesOf(Grid grid, Steps steps, i64 stripe, u64 agent, u64 agents, i64 whole = 0)
        : grid_(grid), steps_(steps), stripe_(stripe), whole_(whole), agent_(agent), agents_(agents) {}

    class Iterator {
    public:
        // At a step, counted over all stripes.
        MK_DEVICE Iterator(const RingTilesOf& tiles, u32 step, u32 end) : tiles_(tiles), step_(step), end_(end) {
            index_ = i32(tiles.agent_);
            if (step_ == end_) return;
            enter();
            settle();
        }
        MK_DEVICE Tile operator*() const {
            const i32 behind = index_ - whole();
            u32 index = u32(behind < 0 ? index_ : whole() + behind / 2);
            u32 first = index / (group * across_) * group, rest = index - first * across_;
            u32 height = blocks_ - first < group ? blocks_ - first : group;
            const Range rows = block(first + rest % height, tile().rows, rows_);
            const Range columns = block(before_ + rest / height, tile().columns, tiles_.grid_.columns);
            if (behind < 0) return {source_, rows, columns};
            const i64 half = columns.begin + tile().columns / 2, middle = half < columns.end ? half : columns.end;
            return {source_, rows, behind % 2 ? Range{middle, columns.end} : Range{columns.begin, middle}};
        }
        // Whoever got the first tile of a wave gets the first of the next: where rows of peers are awaited, its was an own one.
        MK_DEVICE Iterator& operator++() {
            index_ += i32(tiles_.agents_);
            return settle(), *this;
        }
        MK_DEVICE bool operator!=(const Iterator& other) const { return step_ != other.step_; }

    private:
        MK_DEVICE const TileShape& tile() const { return tiles_.grid_.tile; }
        MK_DEVICE i32 tile_count() const { return i32(blocks_ * across_); }
        // Of this step's tiles; and what there is to do of them, with halves.
        MK_DEVICE i32 whole() const {
            if (!may_halve) return tile_count();
            const i64 left = tiles_.whole_ - passed_;
            return left < 0 ? 0 : left < tile_count() ? i32(left) : tile_count();
        }
        MK_DEVICE i32 count() const { return 2 * tile_count() - whole(); }
        MK_DEVICE void enter() {
            const u32 steps = u32(tiles_.steps_.end - tiles_.steps_.first), stripe = step_ / steps;
            const Range columns = block(stripe, tiles_.stripe_, tiles_.grid_.columns);
            before_ = u32(columns.begin / tile().columns);
            across_ = u32(ceil_div(columns.size(), tile().columns));
            source_ = tiles_.source(tiles_.steps_.first + step_ % steps);
            rows_ = tiles_.rows(source_);
            blocks_ = u32(ceil_div(rows_, tile().rows));  // not at each tile: a division of 64 bits takes long
        }
        MK_DEVICE void settle() {
            while (index_ >= count()) {
                index_ -= count();
                passed_ += tile_count();
                if (++step_ == end_) return;
                enter();
            }
        }
        const RingTilesOf& tiles_;
        u32 step_, end_;
        u32 before_ = 0, across_ = 0;  // blocks of columns, before this stripe and in it
        u32 blocks_ = 0;  // of rows, in this step
        i32 index_;
        i64 rows_ = 0, passed_ = 0;  // tiles of the steps before
        u64 source_ = 0;
    };
    MK_DEVICE Iterator begin() const { return {*this, 0, steps()}; }
    MK_DEVICE Iterator end() const { return {*this, steps(), steps()}; }

private:
    MK_DEVICE u32 steps() const { return u32(ceil_div(grid_.columns, stripe_)) * u32(steps_.end - steps_.first); }
    MK_DEVICE u64 source(u64 step) const {
        if (several_nodes && grid_.far_first) {
            const u64 far = grid_.size - grid_.node.size;
            step = step <= far ? step + grid_.node.size - 1 : step == grid_.size ? 0 : step - far;
        }
        return ring_rank(grid_.rank, step, grid_.size, grid_.node);
    }
    MK_DEVICE i64 rows(u64 source) const { return grid_.row_start[source + 1] - grid_.row_start[source]; }

    Grid grid_;
    Steps steps_;
    i64 stripe_;  // columns, whole tiles; at least 1
    i64 whole_;
    u64 agent_, agents_;
};
using RingTiles = RingTilesOf<false>;

}  // namespace mk
