// Landing zones: where rows of other ranks are pulled to, in chunks, and which chunks have arrived.
#pragma once

#include "roles.cuh"

namespace mk {

struct Chunk {
    u64 source;
    Range rows;
    Range k;
    i64 index;  // in Landing's signals
};

template <class T>
class Landing {
public:
    MK_DEVICE Landing(Launch& launch, const LandingPlan& plan) : launch_(launch), plan_(plan) {}

    // The rows of a rank, and where they lie here.
    MK_DEVICE i64 rows_of(u64 source) const { return plan_.row_start[source + 1] - plan_.row_start[source]; }
    MK_DEVICE const Matrix& operator[](u64 source) const { return plan_.rows[source]; }

    // Has this agent's share of a rank's chunks brought here from `from`; each raises its signal.
    template <bool aligned>
    MK_DEVICE void pull(Courier<aligned>& courier, u64 source, Lines from) {
        i64 panels = ceil_div(plan_.k, plan_.chunk_k), chunks = ceil_div(rows_of(source), plan_.chunk_rows) * panels;
        const Matrix& rows = plan_.rows[source];
        const i64 stride = plan_.by_columns ? rows.column_stride : rows.row_stride;
        const Lines to{static_cast<u8*>(rows.data), stride * i64(sizeof(T))};
        const bool first = launch_.agent().lane() == 0;
        for (i64 i = i64(launch_.member()); i < chunks; i += i64(launch_.members())) {
            Chunk chunk{source, block(i / panels, plan_.chunk_rows, rows_of(source)),
                        block(i % panels, plan_.chunk_k, plan_.k), plan_.first_chunk[source] + i};
            Range lines = plan_.by_columns ? chunk.k : chunk.rows, run = plan_.by_columns ? chunk.rows : chunk.k;
            i64 bytes = run.size() * i64(sizeof(T));
            const Span span(launch_, first, Traced::copy, source, u64(lines.size() * bytes), u64(chunk.index));
            courier.send(part(to, lines, run), part(from, lines, run), lines.size(), bytes,
                         &plan_.arrived[chunk.index]);
            if (first) fetch_add(launch_.world().bytes_from_peers, u64(lines.size() * bytes));
        }
        courier.finish();
    }

    // Waits until the chunks that hold these rows and this part of k are here. Most panels lie in the chunks that were
    // waited for last.
    MK_DEVICE bool wait(const Agent& who, u64 source, Range rows, Range k) {
        if (source == known_.source && rows.begin == known_.first_row && rows.end <= known_.last_row &&
            k.begin >= known_.first_k && k.end <= known_.last_k)
            return true;
        i64 panels = ceil_div(plan_.k, plan_.chunk_k), last_k = k.begin;
        for (i64 j = k.begin / plan_.chunk_k; j * plan_.chunk_k < k.end; ++j) {
            for (i64 i = rows.begin / plan_.chunk_rows; i * plan_.chunk_rows < rows.end; ++i) {
                i64 index = plan_.first_chunk[source] + i * panels + j;
                Subject subject{Awaited::arrival, everyone, u64(index)};
                if (!launch_.wait(who, &plan_.arrived[index], 1, subject)) return false;
            }
            last_k = (j + 1) * plan_.chunk_k;
        }
        known_ = {u32(source), u32(rows.begin), u32(rows.end), u32(k.begin), u32(last_k)};
        return true;
    }

private:
    static MK_DEVICE Lines part(Lines lines, Range which, Range run) {
        return {lines.data + which.begin * lines.pitch + run.begin * i64(sizeof(T)), lines.pitch};
    }

    Launch& launch_;
    const LandingPlan& plan_;
    struct {
        u32 source, first_row, last_row, first_k, last_k;
    } known_ = {~u32(0), 0, 0, 0, 0};
};

}  // namespace mk
