// The engine of GPUs from sm_80 on: mma.sync for bfloat16, float16, tfloat32 and float64, fused multiply-adds for
// float32.
// A block is twelve warps that meet in shared memory:
//   producers  four warps: have asynchronous copies fill one slot of a ring after another with a panel of A and of B.
//              Thread 0 asks the gate, and tells the consumers which tile comes next
//   consumers  eight warps: multiply the panels, each its part of the tile, and store that strip by strip, while the
//              producers already fetch the next tile
#pragma once

#include "../landing.cuh"
#include "../reduction.cuh"
#include "fragments.cuh"
#include "ring.cuh"

namespace mk {
namespace engine {

constexpr bool aligned_rows = false;
constexpr u32 cluster = 1;  // blocks that share a tile
constexpr bool halves_tiles = false;
constexpr bool has_time = false;  // nobody does anything beside the tiles
constexpr bool couriers = false, movers = true;
constexpr bool pairs_columns = false;
constexpr u32 sink_loads = 1;  // that a lane of a sink may have under way: registers for so many are there
constexpr u32 told_columns = 8;
constexpr bool sends_strips = false;  // sums for peers lie in their slots as strips
constexpr u32 producers = loaders / warp_size, consumers = 8;

static_assert(MK_THREADS == loaders + consumers * warp_size, "some warps fetch, the others multiply");

// Registers of a thread, where warps can have different numbers of them.
constexpr u32 launch_registers = 168, producer_registers = 104, consumer_registers = 200;

// What is compiled in. A plan passes all four macros, or none, and the TileShape that they say: Python sees to that.
//   rows, columns  128 to 1024 bytes, powers of two; rows at least 32, columns at least 64
//   k              128 to 1024 bytes, a power of two
//   stages         panels in the ring, 2 or more
template <class T>
struct Tiling {
#ifdef MK_TILE_ROWS
    static constexpr u32 rows = MK_TILE_ROWS, columns = MK_TILE_COLUMNS, k = MK_TILE_K, stages = MK_STAGES;
#else
    static constexpr u32 rows = 128, columns = sizeof(T) == 8 ? 128 : 256;
    static constexpr u32 k = sizeof(T) == 2 ? 128 : 128 / sizeof(T), stages = sizeof(T) == 2 ? 2 : 4;
#endif
    static constexpr u32 line_most = 1024;
    template <u32 extent>
    static constexpr bool fits = (extent & (extent - 1)) == 0 && extent * sizeof(T) >= 128 &&
                                 extent * sizeof(T) <= line_most;
    static_assert(fits<rows> && fits<columns> && fits<k>, "lines of panels are whole pieces, and permuted");
    static_assert(stages >= 2, "one panel is used while another is fetched");

    // What of a tile is a consumer's: `down` by `across` blocks of 16 x 16.
    static constexpr u32 warps_down = 2, warps_across = consumers / warps_down;
    static constexpr u32 warp_rows = rows / warps_down, warp_columns = columns / warps_across;
    static constexpr u32 down = warp_rows / 16, across = warp_columns / 16;
    static_assert(down > 0 && across > 0, "consumers have equal shares, in blocks of 16");

    static constexpr u32 a_bytes = rows * k * sizeof(T), b_bytes = columns * k * sizeof(T);

    // A finished tile is stored in strips of 16 lines. The gap behind each line spreads over the banks what a warp
    // writes at once.
    static constexpr u32 strip_line = 128, strip_pitch = strip_line + 16, strip_bytes = 16 * strip_pitch;

    // Dynamic shared memory of a block: the ring, a strip for each consumer, and barriers and the like.
    static constexpr u32 control_bytes = 1024;
    static constexpr u32 shared_bytes = stages * (a_bytes + b_bytes) + consumers * strip_bytes + control_bytes;
};

// --- the producers' part ---------------------------------------------------------------------------------------------

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

// Rows of A that lie apart, each along k.
template <class T>
struct ListedOperand {
    static constexpr bool along_k = true;
    u8* const* places;
    u32 extent;
};

template <class T>
MK_DEVICE Operand<T> operand_of(const Rows& from, i64 rows) {
    const Matrix& a = from.matrix;
    return Operand<T>::of(a.data, a.row_stride, a.column_stride, {from.first, from.first + rows});
}
template <class T>
MK_DEVICE ListedOperand<T> operand_of(const ListedRows& from, i64 rows) { return {from.places, u32(rows)}; }

// Starts to bring the terms `k` of an operand to a panel.
template <class T, u32 extent, u32 depth>
MK_DEVICE void fetch(u8* panel, const Operand<T>& operand, Range k) {
    const T* from = operand.data + k.begin * operand.k_stride;
    const u32 terms = u32(k.size());
    if (operand.along_k) {
        Fetch<Panel<T, extent, depth, true>> lines{from, operand.outer_stride, operand.k_stride, operand.extent, terms};
        lines.start(panel, operand.in_pieces);
    } else {
        Fetch<Panel<T, extent, depth, false>> lines{from, operand.k_stride, operand.outer_stride, terms,
                                                    operand.extent};
        lines.start(panel, operand.in_pieces);
    }
}

// The same for rows that lie apart; each thread looks up those that it brings pieces of.
template <class T, u32 extent, u32 depth>
MK_DEVICE void fetch(u8* panel, const ListedOperand<T>& operand, Range k) {
    using Lines = Panel<T, extent, depth, true>;
    constexpr u32 threads = Lines::line_pieces < loaders ? Lines::line_pieces : loaders;  // on a line
    const u32 thread = ptx::opaque(threadIdx.x), terms = u32(k.size());
#pragma unroll 2
    for (u32 line = thread / threads; line < extent; line += loaders / threads) {
        const bool there = line < operand.extent;
        const T* from = there ? reinterpret_cast<const T*>(operand.places[line]) + k.begin : nullptr;
        for (u32 at = thread % threads * piece<T>; at < depth; at += threads * piece<T>) {
            const u32 count = !there || at >= terms ? 0 : terms - at < piece<T> ? terms - at : piece<T>;
            u8* to = panel + Lines::place(line, at);
            if (reinterpret_cast<u64>(from) % 16 == 0) {
                ptx::copy_async(to, from + at, count * u32(sizeof(T)));
            } else {
                alignas(16) T elements[piece<T>] = {};
                MK_UNROLL
                for (u32 i = 0; i < piece<T>; ++i)
                    if (i < count) elements[i] = from[at + i];
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(elements);
            }
        }
    }
}

// --- the consumers' part ---------------------------------------------------------------------------------------------

template <class T, class OperandOfA, class Schedule, class Sink>
class Portable {
public:
    using Shape = Tiling<T>;
    using Out = typename Sink::Type;
    using Factor = typename Lane<T>::Factor;
    using Sums = Accumulator<T>[Shape::down][Shape::across][8];
    static constexpr u32 stages = Shape::stages;

    // A tile to be worked on.
    struct Order {
        bool any;  // false: there are no more
        Tile tile;
        OperandOfA a;
        Operand<T> b;
    };
    static constexpr u32 orders = 2;

    // The block's dynamic shared memory; much that could be in registers is here, for them to hold sums. Barriers come
    // in pairs: one says that a slot is full, one that it is free.
    struct Shared {
        u8 a[stages][Shape::a_bytes];
        u8 b[stages][Shape::b_bytes];
        u8 strips[consumers][Shape::strip_bytes];
        u64 loaded[stages], used[stages];
        u64 given[orders], done[orders];
        Order order[orders];
        Turn<orders> turn[consumers];
        Tile piece[consumers];  // that is being stored
        Schedule schedule;
        Sink sink;
        u32 panels;   // of a tile
        bool failed;  // a gate did not open: what is delivered from now on is NaN
    };
    static_assert(sizeof(Shared) <= Shape::shared_bytes, "Python asks for so much");

    static MK_DEVICE void init(Shared& shared, const Schedule& schedule, const Sink& sink, i64 depth, bool live) {
        shared.panels = u32(ceil_div(depth, Shape::k));
        for (u32 i = 0; i < stages; ++i) {
            ptx::barrier_init(&shared.loaded[i], loaders + producers);  // copies of each thread; stores of each warp
            ptx::barrier_init(&shared.used[i], consumers);
        }
        for (u32 i = 0; i < orders; ++i) {
            ptx::barrier_init(&shared.given[i], 1);
            ptx::barrier_init(&shared.done[i], consumers);
        }
        for (u32 i = 0; i < consumers; ++i) shared.turn[i] = {};
        shared.failed = !live;
        shared.schedule = schedule;
        shared.sink = sink;
    }

    template <class Source, class Factor, class Gate>
    static MK_DEVICE void produce(Shared& shared, Launch& launch, i64 depth, const Source& source, const Factor& factor,
                                  const Gate& gate) {
        const Agent warp = Agent::warp();
        const bool first = threadIdx.x == 0, asks = threadIdx.x < warp_size;
        bool arrived = launch.live();
        Turn<stages> turn;
        Turn<orders> at;
        for (Tile tile : shared.schedule) {
            const Order& order = shared.order[at.slot];
            if (first) {
                const Matrix& b = factor_of(factor, tile);
                give(shared, at, {true, tile, operand_of<T>(source(tile), tile.rows.size()),
                                  Operand<T>::of(b.data, b.column_stride, b.row_stride, tile.columns)});
            }
#pragma unroll 1
            for (Range k : Blocks(depth, Shape::k)) {
                arrived = ptx::any_of_warps(1, loaders, asks && arrived && gate(warp, tile, k));
                ptx::wait(&shared.used[turn.slot], turn.parity ^ 1);
                if (arrived) {
                    fetch<T, Shape::rows, Shape::k>(shared.a[turn.slot], order.a, k);
                    fetch<T, Shape::columns, Shape::k>(shared.b[turn.slot], order.b, k);
                } else if (first) {
                    fail(shared);  // all goes on, with nothing in it
                }
                ptx::arrive_when_copied(&shared.loaded[turn.slot]);
                warp.sync();
                if (warp.lane() == 0) ptx::arrive(&shared.loaded[turn.slot]);
                turn.advance();
            }
            at.advance();
        }
        if (first) give(shared, at, {});
    }

    static MK_DEVICE void consume(Shared& shared, const Launch& launch) {
        u32 count = 0;  // of panels
        for (;;) {
            const Turn<orders>& turn = shared.turn[own_consumer()];
            const Order& order = shared.order[turn.slot];
            ptx::wait(&shared.given[turn.slot], turn.parity);
            if (!order.any) return;
            const Tile part = part_of(order.tile, own_consumer());
            const bool some = part.rows.size() > 0 && part.columns.size() > 0;
            Span computed(launch, own_thread() % warp_size == 0 && some, Traced::compute, part);
            Sums sums = {};
            if (order.a.along_k)
                order.b.along_k ? multiply<true, true>(sums, shared, count)
                                : multiply<true, false>(sums, shared, count);
            else
                order.b.along_k ? multiply<false, true>(sums, shared, count)
                                : multiply<false, false>(sums, shared, count);
            computed.end();
            deliver(sums, shared, launch.as(Agent::warp()));
        }
    }

    static MK_DEVICE void fail(Shared& shared) { *const_cast<volatile bool*>(&shared.failed) = true; }

    // So that the memory may be used for something else.
    static MK_DEVICE void retire(Shared& shared) {
        for (u32 i = 0; i < stages; ++i)
            ptx::barrier_invalidate(&shared.loaded[i]), ptx::barrier_invalidate(&shared.used[i]);
        for (u32 i = 0; i < orders; ++i)
            ptx::barrier_invalidate(&shared.given[i]), ptx::barrier_invalidate(&shared.done[i]);
    }

private:
    static MK_DEVICE u32 own_thread() { return ptx::opaque(threadIdx.x); }
    static MK_DEVICE u32 own_consumer() { return own_thread() / warp_size - producers; }
    static MK_DEVICE u32 first_row(u32 consumer) { return consumer % Shape::warps_down * Shape::warp_rows; }
    static MK_DEVICE u32 first_column(u32 consumer) { return consumer / Shape::warps_down * Shape::warp_columns; }

    static MK_DEVICE void give(Shared& shared, const Turn<orders>& at, const Order& order) {
        ptx::wait(&shared.done[at.slot], at.parity ^ 1);
        shared.order[at.slot] = order;
        ptx::arrive(&shared.given[at.slot]);
    }

    // A consumer has read what is in a slot.
    static MK_DEVICE void release(u64* barrier) {
        __syncwarp();
        if (threadIdx.x % warp_size == 0) ptx::arrive(barrier);
    }

    // Adds up the panels of a tile; `count`: panels that this consumer has been through. Factors for the next terms are
    // loaded while the present ones are multiplied.
    template <bool a_along_k, bool b_along_k>
    static MK_DEVICE void multiply(Sums& sums, Shared& shared, u32& count) {
        using A = Panel<T, Shape::rows, Shape::k, a_along_k>;
        using B = Panel<T, Shape::columns, Shape::k, b_along_k>;
        using Lane = Lane<T>;
        constexpr bool roomy = ptx::registers_move;  // else there are none for a second factor of A, nor for many steps
        constexpr u32 last = Shape::k - Lane::depth, unroll = roomy ? Lane::unroll : 1;
        if (shared.panels == 0) return;

        const u32 consumer = own_consumer();
        const Lane lane{own_thread() % warp_size};
        // Where this thread's factors are in the panel in hand.
        u32 a_at = ptx::shared_address(shared.a[count % stages]) +
                   A::place_of(first_row(consumer) + lane.template own_outer<true, A>(),
                               lane.template own_k<true, A>());
        u32 b_at = ptx::shared_address(shared.b[count % stages]) +
                   B::place_of(first_column(consumer) + lane.template own_outer<false, B>(),
                               lane.template own_k<false, B>());
        auto load_a = [](u32 at, u32 i, u32 k) { return Lane::template load<true, A>(at, i * 16, k); };
        auto load_b = [](u32 at, u32 j, u32 k) { return Lane::template load<false, B>(at, j * 16, k); };

        ptx::wait(&shared.loaded[count % stages], count / stages % 2);
        Factor a = load_a(a_at, 0, 0), b[Shape::across];
        MK_UNROLL
        for (u32 j = 0; j < Shape::across; ++j) b[j] = load_b(b_at, j, 0);
        auto step = [&](u32 k, u32 next_a_at, u32 next_b_at, u32 next_k) {
            MK_UNROLL
            for (u32 i = 0; i < Shape::down; ++i) {
                if (!roomy) __syncwarp(), a = load_a(a_at, i, k);  // the compiler does not load it any earlier
                Factor next_a = a;
                if (roomy) next_a = i + 1 < Shape::down ? load_a(a_at, i + 1, k) : load_a(next_a_at, 0, next_k);
                MK_UNROLL
                for (u32 j = 0; j < Shape::across; ++j) {
                    Lane::multiply_add(sums[i][j], a, b[j]);
                    if (i + 1 == Shape::down) b[j] = load_b(next_b_at, j, next_k);
                }
                a = next_a;
            }
        };
#pragma unroll 1
        for (const u32 end = count + shared.panels; count != end;) {
            // Opaque: what is derived from each k is not to stay in registers.
#pragma unroll(unroll)
            for (u32 k = 0; k < last; k = (roomy ? k : ptx::opaque(k)) + Lane::depth)
                step(k, a_at, b_at, k + Lane::depth);
            const u32 slot = count++ % stages;
            if (count != end) ptx::wait(&shared.loaded[count % stages], count / stages % 2);
            const u32 on = count != end ? count % stages - slot : 0;  // behind the end, anything may be loaded
            const u32 next_a_at = a_at + on * Shape::a_bytes, next_b_at = b_at + on * Shape::b_bytes;
            step(last, next_a_at, next_b_at, 0);
            a_at = next_a_at, b_at = next_b_at;
            release(&shared.used[slot]);
        }
    }

    // Puts this consumer's part of a tile into strips, and has the sink take them.
    static MK_DEVICE void deliver(const Sums& sums, Shared& shared, Launch self) {
        constexpr u32 pitch = Shape::strip_pitch / sizeof(Out), line = Shape::strip_line / sizeof(Out);
        constexpr u32 columns = line < Shape::warp_columns ? line : Shape::warp_columns;
        constexpr u32 strips_across = Shape::warp_columns / columns, strips = Shape::down * strips_across;
        struct alignas(2 * sizeof(Out)) Pair { Out first, second; };
        const u32 consumer = own_consumer();
        const Agent& warp = self.agent();
        const Lane<T> lane{warp.lane()};
        const Sink& sink = shared.sink;
        const bool failed = warp.broadcast(*const_cast<volatile bool*>(&shared.failed));
        Turn<orders>& turn = shared.turn[consumer];
        Tile& piece = shared.piece[consumer];
        Out* strip = reinterpret_cast<Out*>(shared.strips[consumer]);
        auto stage = [&](u32 index) {
            MK_UNROLL
            for (u32 column = 0; column < columns; column += 16) {
                const auto& block = sums[index / strips_across][(index % strips_across * columns + column) / 16];
                MK_UNROLL
                for (u32 i = 0; i < 8; i += 2)
                    *reinterpret_cast<Pair*>(strip + lane.row_of(i) * pitch + column + lane.column_of(i)) = {
                        sink.transform(block[i]), sink.transform(block[i + 1])};
            }
        };
        const Tile part = part_of(shared.order[turn.slot].tile, consumer);
        const bool empty = part.rows.size() <= 0 || part.columns.size() <= 0;
        const Span stored(self, warp.lane() == 0 && !empty, Traced::store, part);
        if (failed) self.drop();
        if (!empty && !sink.begin(self, part)) fail(shared);
#pragma unroll 1
        for (u32 index = 0; index < strips; ++index) {
            if (failed)
                for (u32 i = warp.lane(); i < 16 * pitch; i += warp.lanes()) strip[i] = not_a_number<Out>();
            else
                MK_UNROLL
                for (u32 i = 0; i < strips; ++i)
                    if (i == index) stage(i);  // registers have no index
            if (warp.lane() == 0)
                piece = {part.source, piece_of(part.rows, index / strips_across * 16, 16),
                         piece_of(part.columns, index % strips_across * columns, columns)};
            warp.sync();
            if (piece.rows.size() > 0 && piece.columns.size() > 0) sink.deliver(self, piece, Staged<Out>{strip, pitch});
            warp.sync();  // the strip is stored
        }
        if (!empty) sink.end(self, part, Writes().complete(warp));
        if (!self.live()) fail(shared);
        if (warp.lane() == 0) {
            ptx::arrive(&shared.done[turn.slot]);
            turn.advance();
        }
        warp.sync();
    }

    // What of a tile is a consumer's; it may be empty.
    static MK_DEVICE Tile part_of(const Tile& tile, u32 consumer) {
        return {tile.source, piece_of(tile.rows, first_row(consumer), Shape::warp_rows),
                piece_of(tile.columns, first_column(consumer), Shape::warp_columns)};
    }

    // `length` of a range, from an offset on; of no or negative size behind its end.
    static MK_DEVICE Range piece_of(Range range, u32 offset, u32 length) {
        const i64 begin = range.begin + offset, end = begin + length;
        return {begin, end < range.end ? end : range.end};
    }
};

template <class... Matrices>
MK_DEVICE void expect(const Matrices&...) {}

// The interface is that of host.cuh, but nobody has time for anything meanwhile: a plan has movers. The gate is asked for
// each panel, in order and ahead of the arithmetic, by warp 0. May be called again and again.
template <class T, bool more_follows = false, class Schedule, class Source, class Factor, class Gate, class Sink,
          class Meanwhile>
MK_DEVICE void gemm(Launch& launch, const Schedule& schedule, TileShape, i64 depth, Source source, const Factor& b,
                    Gate gate, Sink sink, Meanwhile) {
    using OperandOfA = decltype(operand_of<T>(source(Tile{}), i64(0)));
    using Engine = Portable<T, OperandOfA, Schedule, Sink>;
    auto& shared = *reinterpret_cast<typename Engine::Shared*>(launch.agent().scratch().data);
    const u32 warp = __shfl_sync(~0u, threadIdx.x / warp_size, 0);

    // What consumers have no use for, but what follows has, is not to take registers from them.
    keep_in_memory(launch);
    keep_in_memory(source);
    keep_in_memory(gate);
    if (threadIdx.x == 0) Engine::init(shared, schedule, sink, depth, launch.live());
    __syncthreads();
    if (warp < producers) {
        ptx::shrink_registers<producer_registers>();
        Engine::produce(shared, launch, depth, source, b, gate);
        ptx::grow_registers<launch_registers>();  // what follows is written for all threads
    } else {
        ptx::grow_registers<consumer_registers>();
        Engine::consume(shared, launch);
        ptx::shrink_registers<launch_registers>();
    }
    __syncthreads();
    if (shared.failed) launch.drop();
    if (!more_follows) return;
    if (threadIdx.x == 0) Engine::retire(shared);
    __syncthreads();
}

}  // namespace engine
}  // namespace mk
