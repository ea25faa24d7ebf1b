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

// The tiles of one agent out of `agents`, rank by rank around the ring: those of rank + first step, of the step after it,
// ... Within a rank a group of row blocks, whose rows arrive together, comes with all its columns before the next group.
class RingTiles {
public:
    static constexpr u32 group = 8;  // row blocks that are worked on together: the columns of B stay in the L2 cache

    struct Grid {
        u64 rank, size;
        const i64* row_start;
        Range columns;
        TileShape tile;
        Node node{0, 0};             // whose ranks come first
        const u64* order = nullptr;  // [step]: another order of the ranks
    };
    struct Steps {
        u64 first, end;  // in [0, size]; 0 is the rank itself
    };

    // `before`: tiles that these agents have shared out already, so that those with one less go on.
    MK_DEVICE RingTiles(Grid grid, Steps steps, u64 agent, u64 agents, u64 before = 0)
        : grid_(grid), steps_(steps), agent_(agent), agents_(agents), before_(before) {}

    class Iterator {
    public:
        MK_DEVICE Iterator(const RingTiles& tiles, u64 step)
            : tiles_(tiles), columns_(u32(ceil_div(tiles.grid_.columns.size(), tiles.grid_.tile.columns))),
              ring_(step) {
            const i32 agents = i32(tiles.agents_), agent = i32(tiles.agent_), before = i32(tiles.before_);
            const i32 wave = before / agents;
            index_ = wave * agents + (wave % 2 ? agents - 1 - agent : agent) - before;
            forth_ = 2 * (wave % 2 ? agent : agents - 1 - agent) + 1;
            back_ = 2 * agents - forth_;
            if (ring_ == tiles.steps_.end) return;
            enter();
            if (index_ < 0) turn();
            settle();
        }
        MK_DEVICE Tile operator*() const {
            u32 index = u32(index_), first = index / (group * columns_) * group, rest = index - first * columns_;
            u32 blocks = u32(ceil_div(rows_, tile().rows)), height = blocks - first < group ? blocks - first : group;
            Range columns = block(rest / height, tile().columns, tiles_.grid_.columns.size());
            return {source_, block(first + rest % height, tile().rows, rows_),
                    {tiles_.grid_.columns.begin + columns.begin, tiles_.grid_.columns.begin + columns.end}};
        }
        // There and back: whoever got the first tile of one wave gets the last of the next, which may be a smaller one.
        MK_DEVICE Iterator& operator++() { return turn(), settle(), *this; }
        MK_DEVICE bool operator!=(const Iterator& other) const { return ring_ != other.ring_; }

    private:
        MK_DEVICE const TileShape& tile() const { return tiles_.grid_.tile; }
        MK_DEVICE i32 count() const { return i32(ceil_div(rows_, tile().rows) * columns_); }
        MK_DEVICE void turn() {
            index_ += forth_;
            i32 swap = forth_;
            forth_ = back_;
            back_ = swap;
        }
        MK_DEVICE void enter() {
            source_ = tiles_.source(ring_);
            rows_ = tiles_.rows(source_);
        }
        MK_DEVICE void settle() {
            while (index_ >= count()) {
                index_ -= count();
                if (++ring_ == tiles_.steps_.end) return;
                enter();
            }
        }
        const RingTiles& tiles_;
        u32 columns_;
        i32 index_, forth_, back_;
        i64 rows_ = 0;
        u64 ring_, source_ = 0;
    };
    MK_DEVICE Iterator begin() const { return {*this, steps_.first}; }
    MK_DEVICE Iterator end() const { return {*this, steps_.end}; }

    // Of all agents together.
    MK_DEVICE u64 count() const {
        i64 blocks = 0;
        for (u64 step = steps_.first; step != steps_.end; ++step)
            blocks += ceil_div(rows(source(step)), grid_.tile.rows);
        return u64(blocks * ceil_div(grid_.columns.size(), grid_.tile.columns));
    }

private:
    MK_DEVICE u64 source(u64 step) const {
        if (several_nodes && grid_.order) return grid_.order[step];
        return ring_rank(grid_.rank, step, grid_.size, grid_.node);
    }
    MK_DEVICE i64 rows(u64 source) const { return grid_.row_start[source + 1] - grid_.row_start[source]; }

    Grid grid_;
    Steps steps_;
    u64 agent_, agents_, before_;
};

}  // namespace mk
