// Sinks: what becomes of a finished tile.
#pragma once

#include "schedule.cuh"

namespace mk {

// Stores the tile into a matrix whose rows are numbered over all ranks.
template <class T>
class Store {
public:
    using Type = T;
    MK_DEVICE Store(Matrix to, const i64* row_start) : to_(to), row_start_(row_start) {}

    template <class Acc>
    MK_DEVICE T transform(Acc sum) const { return narrow<T>(sum); }

    // For the rows of the tile's rank; null where an engine is to call deliver().
    MK_DEVICE const TensorMap* map(const Tile& tile) const { return to_.map ? to_.map + tile.source : nullptr; }

    MK_DEVICE void deliver(const Agent& agent, const Tile& tile, const T* staged, i64 pitch) const {
        const i64 rows = tile.rows.size(), columns = tile.columns.size();
        T* to = static_cast<T*>(to_.data) + (row_start_[tile.source] + tile.rows.begin) * to_.row_stride +
                tile.columns.begin * to_.column_stride;
        const i64 per_word = i64(sizeof(Word) / sizeof(T));
        const u64 shape = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(staged) |
                          u64(to_.row_stride | columns | pitch) * sizeof(T);
        if (to_.column_stride == 1 && shape % sizeof(Word) == 0)
            spread(agent, rows, columns / per_word, [&](i64 i, i64 j) {
                *reinterpret_cast<Word*>(to + i * to_.row_stride + j * per_word) =
                    *reinterpret_cast<const Word*>(staged + i * pitch + j * per_word);
            });
        else if (to_.row_stride == 1)
            spread(agent, columns, rows, [&](i64 j, i64 i) { to[i + j * to_.column_stride] = staged[i * pitch + j]; });
        else
            spread(agent, rows, columns, [&](i64 i, i64 j) {
                to[i * to_.row_stride + j * to_.column_stride] = staged[i * pitch + j];
            });
    }

private:
    struct alignas(16) Word { u64 halves[2]; };

    // visit(line, place) for all places of all lines; neighbouring lanes get neighbouring places.
    template <class Visit>
    static MK_DEVICE void spread(const Agent& agent, i64 lines, i64 run, Visit visit) {
        const u32 count = u32(lines), length = u32(run);
        if (length == 0) return;
        const u32 lines_on = agent.lanes() / length, places_on = agent.lanes() % length;
        for (u32 line = agent.lane() / length, place = agent.lane() % length; line < count;) {
            visit(line, place);
            line += lines_on;
            place += places_on;
            if (place >= length) place -= length, ++line;
        }
    }

    Matrix to_;
    const i64* row_start_;
};

}  // namespace mk
