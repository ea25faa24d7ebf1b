// The engine of the host target: plain loops over any number of lanes.
#pragma once

#include "../landing.cuh"
#include "../reduction.cuh"

#if defined(__SANITIZE_THREAD__)
#define MK_NO_THREAD_SANITIZER __attribute__((no_sanitize("thread"), noinline))
extern "C" void __tsan_read_range(void* address, unsigned long bytes);
#else
#define MK_NO_THREAD_SANITIZER MK_DEVICE
#endif

namespace mk {
namespace engine {

constexpr bool aligned_rows = false;
constexpr u32 cluster = 1;  // agents that share a tile
constexpr bool halves_tiles = false;
constexpr bool has_time = false;  // meanwhile() is done before the tiles, not beside them
constexpr bool couriers = true, movers = true;  // who brings what peers have: a plan has either
constexpr bool pairs_columns = false;  // whether it takes a PairedStack
constexpr u32 sink_loads = 1;  // that a lane of a sink may have under way: registers for so many are there
constexpr u32 told_columns = 8;  // that are exchanged together: see Exchange
constexpr bool sends_strips = false;  // sums for peers lie in their slots as strips

// A part of a matrix.
struct Block {
    void* data;
    i64 row_stride, column_stride;
};

// Under ThreadSanitizer the arithmetic is not instrumented (it would be 100 times slower): its reads are announced here.
template <class T>
MK_DEVICE void announce_reads(Block m, i64 rows, i64 columns) {
#if defined(__SANITIZE_THREAD__)
    bool by_rows = m.column_stride == 1;
    for (i64 line = 0; line < (by_rows ? rows : columns); ++line)
        __tsan_read_range(static_cast<T*>(m.data) + line * (by_rows ? m.row_stride : m.column_stride),
                          sizeof(T) * (by_rows ? columns : rows));
#else
    (void)m, (void)rows, (void)columns;
#endif
}

// From (row, column) on.
template <class T>
MK_DEVICE Block block_of(const Matrix& m, i64 row, i64 column) {
    return {static_cast<T*>(m.data) + row * m.row_stride + column * m.column_stride, m.row_stride, m.column_stride};
}

// Widens the rows first, first + step, ... of a block into a dense one.
template <class T>
MK_NO_THREAD_SANITIZER void widen_block(Accumulator<T>* to, i64 pitch, Block from, i64 rows, i64 columns, i64 first,
                                        i64 step) {
    const T* data = static_cast<const T*>(from.data);
    for (i64 i = first; i < rows; i += step)
        for (i64 j = 0; j < columns; ++j)
            to[i * pitch + j] = widen(data[i * from.row_stride + j * from.column_stride]);
}

// Widens the terms `k` of a tile's rows into a dense panel; its reads are announced by one lane.
template <class T>
MK_DEVICE void widen_rows(const Agent& agent, Accumulator<T>* to, i64 pitch, const Rows& from, i64 rows, Range k) {
    const Block block = block_of<T>(from.matrix, from.first, k.begin);
    if (agent.lane() == 0) announce_reads<T>(block, rows, k.size());
    widen_block<T>(to, pitch, block, rows, k.size(), agent.lane(), agent.lanes());
}
template <class T>
MK_DEVICE void widen_rows(const Agent& agent, Accumulator<T>* to, i64 pitch, const ListedRows& from, i64 rows, Range k) {
    for (i64 i = agent.lane(); i < rows; i += agent.lanes()) {
        const Block row{reinterpret_cast<T*>(from.places[i]) + k.begin, 0, 1};
        announce_reads<T>(row, 1, k.size());
        widen_block<T>(to + i * pitch, pitch, row, 1, k.size(), 0, 1);
    }
}

// Rows first, first + step, ... of c += a @ b. The inner loop runs over columns: it vectorises, and sums in order of k.
template <class Acc>
MK_NO_THREAD_SANITIZER void multiply_add(Acc* c, const Acc* a, const Acc* b, i64 rows, i64 columns, i64 depth,
                                         i64 a_pitch, i64 pitch, i64 first, i64 step) {
    for (i64 i = first; i < rows; i += step)
        for (i64 k = 0; k < depth; ++k) {
            Acc factor = a[i * a_pitch + k];
            for (i64 j = 0; j < columns; ++j) c[i * pitch + j] += factor * b[k * pitch + j];
        }
}

// Says which matrices are needed soon, where an engine can do something about it.
template <class... Matrices>
MK_DEVICE void expect(const Matrices&...) {}

// Multiplies the tiles of a schedule, `depth` terms each.
//   source(tile)             Rows or ListedRows: those of A
//   b                        a Matrix, or a MatrixStack; of an engine that pairs columns, also a PairedStack, whose sums go
//                            to the sink as transform(sum, its partner)
//   gate(agent, tile, panel) bool: that piece has arrived; false: the launch is to end
//   sink                     transform(sum) -> Type, an element as it is staged. Then, for a tile or a part of one:
//                            begin(launch, part), which may wait; deliver(launch, piece, staged) for all pieces of it, with
//                            where they lie: staged(row, column) -> Type*, its own until it returns; end(launch, part,
//                            the proof that deliver() gave)
//   meanwhile(launch, scratch) bool: what a part of the agent does beside it, or, as here, the agent before; whether all
//                            went well
//   more_follows             whether what comes behind it uses the scratch memory, or is another one
// After a failure every tile that is left is delivered as NaN. Needs shared_bytes() of mkernel_cp/tiles.py.
template <class T, bool more_follows = false, class Schedule, class Source, class Factor, class Gate, class Sink,
          class Meanwhile>
MK_DEVICE void gemm(Launch& launch, const Schedule& schedule, TileShape shape, i64 depth, Source source,
                    const Factor& b, Gate gate, Sink sink, Meanwhile meanwhile) {
    using Acc = Accumulator<T>;
    using Out = typename Sink::Type;
    const Agent& agent = launch.agent();
    const i64 first = agent.lane(), step = agent.lanes(), pitch = shape.columns;
    Acc* sums = reinterpret_cast<Acc*>(agent.scratch().data);
    Acc* a_panel = sums + shape.rows * pitch;
    Acc* b_panel = a_panel + shape.rows * shape.k;
    Out* staged = reinterpret_cast<Out*>(b_panel + shape.k * pitch);

    if (!meanwhile(launch, agent.scratch())) launch.drop();
    for (Tile tile : schedule) {
        const i64 rows = tile.rows.size(), columns = tile.columns.size();
        for (i64 i = first; i < rows; i += step)
            for (i64 j = 0; j < columns; ++j) sums[i * pitch + j] = 0;
        bool arrived = launch.live();
        Span computed(launch, agent.lane() == 0, Traced::compute, tile);
        for (Range panel : Blocks(depth, shape.k)) {
            arrived = arrived && gate(agent, tile, panel);
            if (!arrived) break;
            if (panel.begin == 0) computed.begin();
            widen_rows<T>(agent, a_panel, shape.k, source(tile), rows, panel);
            Block b_block = block_of<T>(factor_of(b, tile), panel.begin, tile.columns.begin);
            if (agent.lane() == 0) announce_reads<T>(b_block, panel.size(), columns);
            widen_block<T>(b_panel, pitch, b_block, panel.size(), columns, first, step);
            agent.sync();
            multiply_add(sums, a_panel, b_panel, rows, columns, panel.size(), shape.k, pitch, first, step);
            agent.sync();  // all have used the panels
        }
        for (i64 i = first; i < rows; i += step)
            for (i64 j = 0; j < columns; ++j)
                staged[i * pitch + j] = arrived ? sink.transform(sums[i * pitch + j]) : not_a_number<Out>();
        agent.sync();
        computed.end();
        const Span stored(launch, agent.lane() == 0, Traced::store, tile);
        sink.begin(launch, tile);
        sink.end(launch, tile, sink.deliver(launch, tile, Staged<Out>{staged, pitch}));
    }
}

}  // namespace engine
}  // namespace mk
