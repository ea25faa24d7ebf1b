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

    MK_DEVICE void deliver(const Agent& agent, const Tile& tile, const T* staged, i64 pitch) const {
        T* data = static_cast<T*>(to_.data);
        i64 first_row = row_start_[tile.source] + tile.rows.begin;
        i64 columns = tile.columns.size(), count = tile.rows.size() * columns;
        for (i64 at = agent.lane(); at < count; at += agent.lanes()) {
            i64 i = at / columns, j = at % columns;
            data[(first_row + i) * to_.row_stride + (tile.columns.begin + j) * to_.column_stride] =
                staged[i * pitch + j];
        }
    }

private:
    Matrix to_;
    const i64* row_start_;
};

}  // namespace mk
