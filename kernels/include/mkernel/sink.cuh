// Sources: where the rows of a tile lie. Sinks: what becomes of a finished one.
#pragma once

#include "schedule.cuh"

namespace mk {

// Rows of a matrix from `first` on.
struct Rows {
    const Matrix& matrix;
    i64 first;
};

// Makes the element of a tile from a sum, and nothing else.
template <class T>
struct Rounding {
    bool ready;
    template <class Acc>
    MK_DEVICE T operator()(u32, Acc sum) const { return narrow<T>(sum); }
};

// Stores the tile into a matrix whose rows are numbered over all ranks, or are those of one rank.
template <class T>
class Store {
public:
    using Type = T;
    MK_DEVICE Store(const Matrix& to, const i64* row_start, u64 ranks)
        : to_(&to), row_start_(row_start), rows_(row_start[ranks]) {}
    MK_DEVICE Store(const Matrix& to, i64 rows) : to_(&to), row_start_(nullptr), rows_(rows) {}

    MK_DEVICE Rounding<T> finishing(const Agent&, const Tile&) const { return {true}; }

    // Where a box of rows may be stored through a map; its last rows may be others than the tile's, so not everywhere.
    MK_DEVICE const TensorMap* map(const Tile& tile, i64 box_rows) const {
        bool whole = tile.rows.size() == box_rows || first_row(tile) + tile.rows.size() == rows_;
        return to_->mapped && whole ? &to_->map : nullptr;
    }
    MK_DEVICE i64 first_row(const Tile& tile) const {
        return (row_start_ ? row_start_[tile.source] : 0) + tile.rows.begin;
    }

    MK_DEVICE void deliver(const Agent& agent, const Tile& tile, const T* staged, i64 pitch) const {
        const i64 rows = tile.rows.size(), columns = tile.columns.size();
        T* to = place_of(tile);
        const i64 per_word = i64(sizeof(Word) / sizeof(T));
        const u64 shape = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(staged) |
                          u64(to_->row_stride | columns | pitch) * sizeof(T);
        if (to_->column_stride == 1 && shape % sizeof(Word) == 0)
            spread(agent, rows, columns / per_word, [&](i64 i, i64 j) {
                *reinterpret_cast<Word*>(to + i * to_->row_stride + j * per_word) =
                    *reinterpret_cast<const Word*>(staged + i * pitch + j * per_word);
            });
        else if (to_->row_stride == 1)
            spread(agent, columns, rows, [&](i64 j, i64 i) { to[i + j * to_->column_stride] = staged[i * pitch + j]; });
        else
            spread(agent, rows, columns, [&](i64 i, i64 j) {
                to[i * to_->row_stride + j * to_->column_stride] = staged[i * pitch + j];
            });
    }

    // What did not come.
    MK_DEVICE void fill(const Agent& agent, const Tile& tile, T value) const {
        T* to = place_of(tile);
        spread(agent, tile.rows.size(), tile.columns.size(),
               [&](i64 i, i64 j) { to[i * to_->row_stride + j * to_->column_stride] = value; });
    }

private:
    struct alignas(16) Word { u64 halves[2]; };

    MK_DEVICE T* place_of(const Tile& tile) const {
        return static_cast<T*>(to_->data) + first_row(tile) * to_->row_stride + tile.columns.begin * to_->column_stride;
    }

    // visit(line, place) for all places of all lines; neighbouring lanes get neighbouring places.
    template <class Visit>
    static MK_DEVICE void spread(const Agent& agent, i64 lines, i64 run, Visit visit) {
        const u32 count = u32(lines * run), length = u32(run);
        for (u32 at = agent.lane(); at < count; at += agent.lanes()) visit(at / length, at % length);
    }

    const Matrix* to_;
    const i64* row_start_;
    i64 rows_;
};

}  // namespace mk
