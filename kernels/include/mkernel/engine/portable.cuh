// The engine of GPUs from sm_80 on: mma.sync for bfloat16, float16 and float64, fused multiply-adds for float32.
// Operands come through a ring of panels in shared memory, several panels ahead of the arithmetic.
#pragma once

#include "../landing.cuh"
#include "../ptx.cuh"
#include "../reduction.cuh"

namespace mk {
namespace engine {

constexpr bool aligned_rows = false;
constexpr u32 cluster = 1;  // blocks that share a tile

// What is compiled in. A plan passes all four macros, or none, and the TileShape that they say: Python sees to that.
//   rows, columns  128 bytes or more, powers of two; rows at least 32, columns at least MK_THREADS / 4
//   k              128 bytes or more, a power of two
//   stages         panels in the ring, 2 or more
template <class T>
struct Tiling {
#ifdef MK_TILE_ROWS
    static constexpr u32 rows = MK_TILE_ROWS, columns = MK_TILE_COLUMNS, k = MK_TILE_K, stages = MK_STAGES;
#else
    static constexpr u32 rows = 128, columns = sizeof(T) == 8 ? 128 : 256, k = 128 / sizeof(T), stages = 3;
#endif
    static constexpr u32 warps = MK_THREADS / 32, warps_down = 2, warps_across = warps / 2;
    template <u32 extent>
    static constexpr bool fits = (extent & (extent - 1)) == 0 && extent * sizeof(T) >= 128 &&
                                 extent * sizeof(T) <= 16 * MK_THREADS;
    static_assert(fits<rows> && fits<columns> && fits<k>, "all threads fetch a panel's lines in whole rounds");
    static_assert(rows % 32 == 0 && columns % (16 * warps_across) == 0, "warps share a tile evenly, in blocks of 16");
    static_assert(stages >= 2, "one panel is used while another is fetched");

    static constexpr u32 a_bytes = rows * k * sizeof(T), panel_bytes = (rows + columns) * k * sizeof(T);
    // Of a staged row: the gap of 8 spreads the rows that a warp writes at once over the banks.
    static constexpr u32 staged_pitch = columns + 8;

    // Dynamic shared memory of a block: the ring, and in its place, when a tile is done, the tile.
    static constexpr u32 ring_bytes = stages * panel_bytes;
    template <class Out>
    static constexpr u32 staged_bytes = rows * staged_pitch * sizeof(Out);
    template <class Out>
    static constexpr u32 shared_bytes = ring_bytes > staged_bytes<Out> ? ring_bytes : staged_bytes<Out>;
};

// Shared memory is read and written in pieces of 16 bytes.
template <class T>
constexpr u32 piece = 16 / sizeof(T);

// Where a line keeps its pieces: those that one access reads from neighbouring lines lie in different banks. It reads
// one piece of each of 8 lines, or, of double, two of each of 4.
template <class T>
MK_DEVICE u32 permuted(u32 line, u32 index) {
    return index ^ (sizeof(T) == 8 ? line % 4 * 2 : line % 8);
}

// One operand's part of a panel: `extent` rows of A or columns of B, by `depth` terms. Lines run along k or across it.
template <class T, u32 extent, u32 depth, bool along_k>
struct Panel {
    static constexpr bool lines_along_k = along_k;
    const u8* data;

    MK_DEVICE const T* at(u32 outer, u32 k) const {
        u32 line = along_k ? outer : k, run = along_k ? k : outer;
        u32 line_bytes = (along_k ? depth : extent) * sizeof(T);
        return reinterpret_cast<const T*>(data + line * line_bytes + permuted<T>(line, run / piece<T>) * 16) +
               run % piece<T>;
    }
};

// One operand of a tile in global memory. Lines are what is contiguous there, or nearly so.
template <class T>
struct Operand {
    const T* data;
    i64 outer_stride, k_stride;  // outer: rows of A, columns of B
    u32 extent;
    bool along_k;
    bool in_pieces;  // whole pieces are contiguous and aligned

    static MK_DEVICE Operand of(const void* base, i64 outer_stride, i64 k_stride, Range outer) {
        const T* data = static_cast<const T*>(base) + outer.begin * outer_stride;
        auto in_pieces = [&](i64 run_stride, i64 line_stride) {
            return run_stride == 1 && (line_stride * i64(sizeof(T)) | i64(data)) % 16 == 0;
        };
        auto magnitude = [](i64 stride) { return stride < 0 ? -stride : stride; };
        bool along_k = in_pieces(k_stride, outer_stride), across = in_pieces(outer_stride, k_stride);
        return {data, outer_stride, k_stride, u32(outer.size()),
                along_k || (!across && magnitude(k_stride) < magnitude(outer_stride)), along_k || across};
    }
};

// Starts to bring the terms `k` of an operand to a panel, and zeros where it has none.
template <class T, u32 extent, u32 depth>
MK_DEVICE void fetch(const Agent& agent, u8* panel, Operand<T> from, Range k) {
    const u32 line_pieces = (from.along_k ? depth : extent) / piece<T>, lines_at_once = MK_THREADS / line_pieces;
    const u32 lines = from.along_k ? from.extent : u32(k.size()), run = from.along_k ? u32(k.size()) : from.extent;
    const i64 line_stride = from.along_k ? from.outer_stride : from.k_stride;
    const i64 run_stride = from.along_k ? from.k_stride : from.outer_stride;
    const u32 in_line = agent.lane() % line_pieces, first = in_line * piece<T>;
    const u32 count = first < run ? (run - first < piece<T> ? run - first : piece<T>) : 0;
    u32 line = agent.lane() / line_pieces;
    const T* source = from.data + k.begin * from.k_stride + line * line_stride + first * run_stride;
    constexpr u32 rounds = extent * depth / piece<T> / MK_THREADS;
    auto target = [&] { return panel + (line * line_pieces + permuted<T>(line, in_line)) * 16; };
    auto advance = [&] { line += lines_at_once, source += lines_at_once * line_stride; };
    if (from.in_pieces) {
        MK_UNROLL
        for (u32 i = 0; i < rounds; ++i, advance())
            ptx::copy_async(target(), source, line < lines ? count * u32(sizeof(T)) : 0);
    } else {
#pragma unroll 1
        for (u32 i = 0; i < rounds; ++i, advance()) {
            alignas(16) T elements[piece<T>] = {};
            MK_UNROLL
            for (u32 j = 0; j < piece<T>; ++j)
                if (line < lines && j < count) elements[j] = source[j * run_stride];
            *reinterpret_cast<uint4*>(target()) = *reinterpret_cast<const uint4*>(elements);
        }
    }
}

// The threads of a warp share a block of 16 x 16 sums, 8 each, and add to it `depth` products at a time. Each loads its
// share of the factors.
template <class T>
struct Lane {  // bfloat16 and float16
    static constexpr u32 depth = 16, unroll = 4;
    struct Factor { u32 words[4]; };
    u32 lane;

    template <bool is_a, class Panel>
    MK_DEVICE Factor load(const Panel& panel, u32 outer, u32 k) const {
        const u32 line = lane % 8, second = lane / 8 % 2 * 8, last = lane / 16 * 8;  // of four matrices of 8 x 8
        outer += (is_a ? second : last) + (Panel::lines_along_k ? line : 0);
        k += (is_a ? last : second) + (Panel::lines_along_k ? 0 : line);
        Factor factor;
        ptx::load_matrices<!Panel::lines_along_k>(factor.words, panel.at(outer, k));
        return factor;
    }
    static MK_DEVICE void multiply_add(float (&sums)[8], const Factor& a, const Factor& b) {
        ptx::mma<T>(&sums[0], a.words, &b.words[0]);
        ptx::mma<T>(&sums[4], a.words, &b.words[2]);
    }
    MK_DEVICE u32 row_of(u32 sum) const { return lane / 4 + sum / 2 % 2 * 8; }
    MK_DEVICE u32 column_of(u32 sum) const { return lane % 4 * 2 + sum % 2 + sum / 4 * 8; }
};

template <>
struct Lane<double> {
    static constexpr u32 depth = 16, unroll = 1;
    struct Factor { double values[8]; };
    u32 lane;

    template <bool is_a, class Panel>
    MK_DEVICE Factor load(const Panel& panel, u32 outer, u32 k) const {
        Factor factor;
        MK_UNROLL
        for (u32 half = 0; half < 2; ++half)
            MK_UNROLL
            for (u32 step = 0; step < 4; ++step)
                factor.values[is_a ? step * 2 + half : half * 4 + step] =
                    *panel.at(outer + half * 8 + lane / 4, k + step * 4 + lane % 4);
        return factor;
    }
    static MK_DEVICE void multiply_add(double (&sums)[8], const Factor& a, const Factor& b) {
        ptx::mma(&sums[0], a.values, &b.values[0]);
        ptx::mma(&sums[4], a.values, &b.values[4]);
    }
    MK_DEVICE u32 row_of(u32 sum) const { return lane / 4 + sum / 2 % 2 * 8; }
    MK_DEVICE u32 column_of(u32 sum) const { return lane % 4 * 2 + sum % 2 + sum / 4 * 8; }
};

template <>
struct Lane<float> {
    static constexpr u32 depth = 4, unroll = 1;
    struct Factor { float values[4][4]; };  // of A [row][k], 4 rows; of B [column][k], 2 columns
    u32 lane;

    template <bool is_a, class Panel>
    MK_DEVICE Factor load(const Panel& panel, u32 outer, u32 k) const {
        Factor factor;
        MK_UNROLL
        for (u32 i = 0; i < 4; ++i)
            if (Panel::lines_along_k) {
                if (!is_a && i >= 2) continue;
                const u32 line = outer + (is_a ? row_of(2 * i) : column_of(i));
                float4 run = *reinterpret_cast<const float4*>(panel.at(line, k));
                factor.values[i][0] = run.x, factor.values[i][1] = run.y;
                factor.values[i][2] = run.z, factor.values[i][3] = run.w;
            } else if (is_a) {
                float4 run = *reinterpret_cast<const float4*>(panel.at(outer + row_of(0), k + i));
                factor.values[0][i] = run.x, factor.values[1][i] = run.y;
                factor.values[2][i] = run.z, factor.values[3][i] = run.w;
            } else {
                factor.values[0][i] = *panel.at(outer + column_of(0), k + i);
                factor.values[1][i] = *panel.at(outer + column_of(1), k + i);
            }
        return factor;
    }
    static MK_DEVICE void multiply_add(float (&sums)[8], const Factor& a, const Factor& b) {
        MK_UNROLL
        for (u32 k = 0; k < depth; ++k)
            MK_UNROLL
            for (u32 i = 0; i < 8; ++i) sums[i] = fmaf(a.values[i / 2][k], b.values[i % 2][k], sums[i]);
    }
    MK_DEVICE u32 row_of(u32 sum) const { return lane / 8 * 4 + sum / 2; }
    MK_DEVICE u32 column_of(u32 sum) const { return lane % 8 + sum % 2 * 8; }
};

// A warp's part of a tile, summed in registers.
template <class T>
class Product {
public:
    using Shape = Tiling<T>;

    template <bool a_along_k, bool b_along_k>
    MK_DEVICE void add(const u8* panel) {
        const Panel<T, Shape::rows, Shape::k, a_along_k> a{panel};
        const Panel<T, Shape::columns, Shape::k, b_along_k> b{panel + Shape::a_bytes};
        // Opaque: what each of the four add()s derives from it is not to stay in registers between panels.
        const u32 thread = ptx::opaque(threadIdx.x);
        const Lane<T> lane{thread % 32};
#pragma unroll(Lane<T>::unroll)
        for (u32 k = 0; k < Shape::k; k += Lane<T>::depth) {
            typename Lane<T>::Factor factors[blocks_across];
            MK_UNROLL
            for (u32 j = 0; j < blocks_across; ++j)
                factors[j] = lane.template load<false>(b, first_column(thread) + j * 16, k);
            MK_UNROLL
            for (u32 i = 0; i < blocks_down; ++i) {
                typename Lane<T>::Factor factor = lane.template load<true>(a, first_row(thread) + i * 16, k);
                MK_UNROLL
                for (u32 j = 0; j < blocks_across; ++j) lane.multiply_add(sums_[i][j], factor, factors[j]);
            }
        }
    }

    // visit(row, column, sum) for each sum of this thread, counted within the tile.
    template <class Visit>
    MK_DEVICE void each(Visit visit) const {
        const u32 thread = threadIdx.x;
        const Lane<T> lane{thread % 32};
        MK_UNROLL
        for (u32 i = 0; i < blocks_down; ++i)
            MK_UNROLL
            for (u32 j = 0; j < blocks_across; ++j)
                MK_UNROLL
                for (u32 sum = 0; sum < 8; ++sum)
                    visit(first_row(thread) + i * 16 + lane.row_of(sum),
                          first_column(thread) + j * 16 + lane.column_of(sum), sums_[i][j][sum]);
    }

private:
    static constexpr u32 rows = Shape::rows / Shape::warps_down, columns = Shape::columns / Shape::warps_across;
    static constexpr u32 blocks_down = rows / 16, blocks_across = columns / 16;

    static MK_DEVICE u32 first_row(u32 thread) { return thread / 32 % Shape::warps_down * rows; }
    static MK_DEVICE u32 first_column(u32 thread) { return thread / 32 / Shape::warps_down * columns; }

    Accumulator<T> sums_[blocks_down][blocks_across][8] = {};
};

// The tile at hand, in shared memory: registers are for sums.
template <class T>
struct Task {
    Tile tile;
    Operand<T> a, b;
};

// The interface is that of host.cuh. gate() is called by lane 0 alone, once for each panel and in order, `stages`
// panels ahead of the arithmetic; the barrier that each panel needs anyway carries the verdict to the others.
template <class T, class Schedule, class Source, class Gate, class Sink, class Meanwhile>
MK_DEVICE void gemm(Launch& launch, const Schedule& schedule, TileShape, i64 depth, Source source,
                    const Matrix& b, Gate gate, Sink sink, Meanwhile meanwhile) {
    using Shape = Tiling<T>;
    using Out = typename Sink::Type;
    constexpr i32 stages = Shape::stages;
    __shared__ Task<T> task;
    const Agent& agent = launch.agent();
    u8* ring = agent.scratch().data;
    const i32 panels = i32(ceil_div(depth, Shape::k));
    if (!meanwhile(launch, agent.scratch())) launch.drop();
    bool live = agent.broadcast(launch.live());

    for (Tile tile : schedule) {
        if (agent.lane() == 0) {
            const Rows from = source(tile);
            const Matrix& a = from.matrix;
            const Range rows{from.first, from.first + tile.rows.size()};
            task = {tile, Operand<T>::of(a.data, a.row_stride, a.column_stride, rows),
                    Operand<T>::of(b.data, b.column_stride, b.row_stride, tile.columns)};
        }
        Product<T> product;
        Span computed(launch, agent.lane() == 0, Traced::compute, tile);
        for (i32 panel = live ? -stages : panels; panel < panels; ++panel) {
            if (panel > -stages) {
                ptx::copy_async_wait<stages - 2>();
                live = agent.broadcast(live);  // also: this panel is here, the one before has been used
                if (!live) break;
                const i32 next = panel + stages - 1;
                if (next < panels) {
                    u8* slot = ring + next % stages * Shape::panel_bytes;
                    const Range k = block(next, Shape::k, depth);
                    fetch<T, Shape::rows, Shape::k>(agent, slot, task.a, k);
                    fetch<T, Shape::columns, Shape::k>(agent, slot + Shape::a_bytes, task.b, k);
                }
                ptx::copy_async_commit();
            }
            if (agent.lane() == 0 && panel + stages < panels)
                live = gate(agent.alone(), task.tile, block(panel + stages, Shape::k, depth));
            __syncwarp();
            if (panel >= 0) {
                const u8* slot = ring + panel % stages * Shape::panel_bytes;
                if (task.a.along_k)
                    task.b.along_k ? product.template add<true, true>(slot) : product.template add<true, false>(slot);
                else
                    task.b.along_k ? product.template add<false, true>(slot) : product.template add<false, false>(slot);
            }
        }
        ptx::copy_async_wait<0>();
        agent.sync();

        Out* staged = reinterpret_cast<Out*>(ring);
        product.each([&](u32 row, u32 column, Accumulator<T> sum) {
            staged[row * Shape::staged_pitch + column] = live ? sink.transform(sum) : not_a_number<Out>();
        });
        agent.sync();
        computed.end();
        const Span stored(launch, agent.lane() == 0, Traced::store, task.tile);
        if (!live) launch.drop();
        live = sink.begin(launch, task.tile);
        sink.end(launch, task.tile, sink.deliver(launch, task.tile, Staged<Out>{staged, Shape::staged_pitch}));
    }
}

}  // namespace engine
}  // namespace mk
