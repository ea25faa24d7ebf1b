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

// rank + 1, rank + 2, ...: at any time all ranks read from different peers.
class RingOrder {
public:
    MK_DEVICE RingOrder(u64 rank, u64 size) : rank_(rank), size_(size) {}

    struct Iterator {
        u64 step, rank, size;
        MK_DEVICE u64 operator*() const { return (rank + step) % size; }
        MK_DEVICE Iterator& operator++() { return ++step, *this; }
        MK_DEVICE bool operator!=(const Iterator& other) const { return step != other.step; }
    };
    MK_DEVICE Iterator begin() const { return {1, rank_, size_}; }
    MK_DEVICE Iterator end() const { return {size_, rank_, size_}; }

private:
    u64 rank_, size_;
};

// Rows of one rank (counted within it) by columns of the product.
struct Tile {
    u64 source;
    Range rows;
    Range columns;
};

// The tiles of one agent out of `agents`, in the order in which their rows are expected: own ones, then those of rank + 1,
// ... Within a rank a group of row blocks, whose rows arrive together, comes with all its columns before the next group.
class OwnRowsFirst {
public:
    static constexpr u32 group = 8;  // row blocks that are worked on together: the columns of B stay in the L2 cache

    struct Grid {
        u64 rank, size;
        const i64* row_start;
        i64 n;
        TileShape tile;
    };

    MK_DEVICE OwnRowsFirst(Grid grid, u64 agent, u64 agents) : grid_(grid), agent_(agent), agents_(agents) {}

    class Iterator {
    public:
        MK_DEVICE Iterator(const Grid& grid, u64 agent, u64 agents, u64 ring)
            : grid_(grid), columns_(u32(ceil_div(grid.n, grid.tile.columns))), index_(i32(agent)),
              forth_(2 * i32(agents - agent) - 1), back_(2 * i32(agent) + 1), ring_(ring) {
            if (ring_ < grid_.size) enter(), settle();
        }
        MK_DEVICE Tile operator*() const {
            u32 index = u32(index_), first = index / (group * columns_) * group, rest = index - first * columns_;
            u32 blocks = u32(ceil_div(rows_, grid_.tile.rows)), height = blocks - first < group ? blocks - first : group;
            return {source_, block(first + rest % height, grid_.tile.rows, rows_),
                    block(rest / height, grid_.tile.columns, grid_.n)};
        }
        // There and back: whoever got the first tile of one wave gets the last of the next, which may be a smaller one.
        MK_DEVICE Iterator& operator++() {
            index_ += forth_;
            i32 swap = forth_;
            forth_ = back_;
            back_ = swap;
            settle();
            return *this;
        }
        MK_DEVICE bool operator!=(const Iterator& other) const { return ring_ != other.ring_; }

    private:
        MK_DEVICE i32 tiles() const { return i32(ceil_div(rows_, grid_.tile.rows) * columns_); }
        MK_DEVICE void enter() {
            source_ = grid_.rank + ring_ < grid_.size ? grid_.rank + ring_ : grid_.rank + ring_ - grid_.size;
            rows_ = grid_.row_start[source_ + 1] - grid_.row_start[source_];
        }
        MK_DEVICE void settle() {
            while (index_ >= tiles()) {
                index_ -= tiles();
                if (++ring_ == grid_.size) return;
                enter();
            }
        }
        const Grid& grid_;
        u32 columns_;
        i32 index_, forth_, back_;
        i64 rows_ = 0;
        u64 ring_, source_ = 0;
    };
    MK_DEVICE Iterator begin() const { return {grid_, agent_, agents_, 0}; }
    MK_DEVICE Iterator end() const { return {grid_, agent_, agents_, grid_.size}; }

private:
    Grid grid_;
    u64 agent_, agents_;
};

}  // namespace mk
