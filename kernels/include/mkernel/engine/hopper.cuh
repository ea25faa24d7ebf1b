// The engine for sm_90a. A block is three warpgroups that meet in shared memory:
//   producer   warp 0, one lane: asks the gate, then lets the tensor memory accelerator fill one stage after another
//   consumers  two warpgroups: multiply what a stage holds, each half of the tile's rows, and stage the result
//   storers    warps 1 and 2, one for each consumer: store what it has staged while the next tile is multiplied
// Each walks the schedule by itself. In a cluster of two, the blocks compute the upper and the lower half of a tile; each
// loads its rows of A, and half of what both need of B, to both.
#pragma once

#include "../landing.cuh"
#include "../ptx_hopper_draft.cuh"
#include "../sink.cuh"

// Of one block; shape.rows of a plan is MK_CLUSTER times MK_TILE_ROWS.
#ifndef MK_TILE_ROWS
#define MK_TILE_ROWS 128
#endif
#ifndef MK_TILE_COLUMNS
#define MK_TILE_COLUMNS 256
#endif
#ifndef MK_CLUSTER
#define MK_CLUSTER 2
#endif
#ifndef MK_STAGES
#define MK_STAGES 4
#endif
// Strips of 64 rows by 128 bytes that each consumer may have staged.
#ifndef MK_STRIPS
#define MK_STRIPS 2
#endif
// Memory order of the operands: 1 where columns are contiguous.
#ifndef MK_A_BY_COLUMNS
#define MK_A_BY_COLUMNS 0
#endif
#ifndef MK_B_BY_COLUMNS
#define MK_B_BY_COLUMNS 0
#endif

namespace mk {
namespace engine {

constexpr u32 cluster = MK_CLUSTER;  // blocks that share a tile
constexpr u32 consumers = 2;
constexpr u32 line_bytes = 128;      // what tensor copies swizzle, and how much of k a stage holds
constexpr u32 strip_rows = 64;       // of one matrix instruction

static_assert(MK_THREADS == 128 * (1 + consumers), "one warpgroup loads and stores, the others multiply");
static_assert(MK_TILE_ROWS % (consumers * strip_rows) == 0, "consumers have equal shares of the rows");
static_assert(cluster == 1 || cluster == 2, "pairs at most");

// One operand of a stage, `extent` rows of A or columns of B by tile_k of k, as tensor copies of `parts` blocks write it.
// `across`: lines are along the extent, 64 elements each, in blocks of tile_k lines; else each line is along k.
template <class T, u32 extent, bool across, u32 parts>
struct Operand {
    static constexpr u32 line = line_bytes / sizeof(T);
    static constexpr u32 bytes = extent * line_bytes;
    static constexpr u32 part = extent / parts;             // what one block loads,
    static constexpr u32 box = across ? line : part;        // so much of it at a time
    static constexpr u32 block_bytes = across ? line * line_bytes : 0;
    static constexpr u32 step = across ? 16 * line_bytes : 16 * sizeof(T);  // bytes to the next 16 of k
    static_assert(part % box == 0 && box <= 256, "a stage holds whole boxes");

    static MK_DEVICE void load(u8* to, u32 which, const TensorMap* map, u64* barrier, i64 first, i64 k) {
        MK_UNROLL
        for (u32 i = which * part; i < (which + 1) * part; i += box) {
            i32 x = i32(across ? first + i : k), y = i32(across ? k : first + i);
            if (parts == 1) ptx::load_box(to + i * line_bytes, map, barrier, x, y);
            else ptx::load_box_to((1 << parts) - 1, to + i * line_bytes, map, barrier, x, y);
        }
    }
    static MK_DEVICE u64 descriptor(const u8* from) {
        return ptx::operand_descriptor(ptx::shared_address(from), block_bytes);
    }
};

// A ring of slots as one of its users sees it; it runs on from tile to tile.
template <u32 slots>
struct Turn {
    u32 slot = 0, parity = 0;
    MK_DEVICE void advance() {
        if (++slot == slots) slot = 0, parity ^= 1;
    }
};

template <class T, class Out>
class Hopper {
public:
    static constexpr u32 rows = MK_TILE_ROWS, columns = MK_TILE_COLUMNS, k = line_bytes / sizeof(T);
    static constexpr u32 stages = MK_STAGES, strips = MK_STRIPS;
    static constexpr u32 blocks = rows / consumers / strip_rows;  // of 64 rows that a consumer has
    static constexpr u32 strip_columns = line_bytes / sizeof(Out);
    using A = Operand<T, rows, MK_A_BY_COLUMNS, 1>;
    using B = Operand<T, columns, !MK_B_BY_COLUMNS, cluster>;

    // The block's dynamic shared memory. Barriers come in pairs: what fills a slot, and what frees it again.
    struct Shared {
        u8 a[stages][A::bytes];
        u8 b[stages][B::bytes];
        u8 staged[consumers][strips][strip_rows * line_bytes];
        u64 loaded[stages], used[stages];
        u64 ready[consumers][strips], stored[consumers][strips];
        bool failed;  // a gate was closed: what is delivered from now on is NaN
    };

    static MK_DEVICE void init(Shared& shared, bool live) {
        if (threadIdx.x == 0) {
            for (u32 i = 0; i < stages; ++i) {
                ptx::barrier_init(&shared.loaded[i], 1);
                ptx::barrier_init(&shared.used[i], cluster * consumers * 4);  // each of their warps
            }
            for (u32 i = 0; i < consumers; ++i)
                for (u32 j = 0; j < strips; ++j) {
                    ptx::barrier_init(&shared.ready[i][j], 4);
                    ptx::barrier_init(&shared.stored[i][j], 1);
                }
            ptx::fence_barrier_init();
            shared.failed = !live;
        }
        sync();
    }

    static MK_DEVICE void sync() {
        __syncwarp();
        if (cluster > 1) ptx::cluster_sync();
        else __syncthreads();
    }

    // The rows of the tile that are this block's; none, if the tile ends before.
    static MK_DEVICE Tile share(Tile tile) {
        if (cluster > 1) tile.rows.begin += ptx::cluster_rank() * rows;
        if (tile.rows.end > tile.rows.begin + rows) tile.rows.end = tile.rows.begin + rows;
        return tile;
    }

    template <class Schedule, class Source, class Right, class Gate>
    static MK_DEVICE void produce(Shared& shared, Launch& launch, const Schedule& schedule, i64 depth, i64 panel_k,
                                  const Source& source, const Right& b, const Gate& gate) {
        const Agent alone = launch.agent().alone();
        const u32 rank = cluster > 1 ? ptx::cluster_rank() : 0;
        const TensorMap* a_map = nullptr;
        bool arrived = launch.live();
        Turn<stages> turn;
        if (depth == 0) return;
        ptx::acquire_map(b.map);
        for (Tile whole : schedule) {
            const Tile tile = share(whole);
            if (source(tile).map != a_map) ptx::acquire_map(a_map = source(tile).map);
            for (Range panel : Blocks(depth, panel_k)) {
                arrived = arrived && (tile.rows.size() <= 0 || gate(alone, tile, panel));
                if (arrived) ptx::fence_global_to_async();
                else *const_cast<volatile bool*>(&shared.failed) = true;  // what is loaded now, is only to end well
                for (i64 at = panel.begin; at < panel.end; at += k) {
                    u64* loaded = &shared.loaded[turn.slot];
                    ptx::wait(&shared.used[turn.slot], turn.parity ^ 1);
                    ptx::arrive_expect(loaded, A::bytes + B::bytes);
                    A::load(shared.a[turn.slot], 0, a_map, loaded, tile.rows.begin, at);
                    B::load(shared.b[turn.slot], rank, b.map, loaded, tile.columns.begin, at);
                    turn.advance();
                }
            }
        }
    }

    template <class Schedule, class Sink>
    static MK_DEVICE void consume(Shared& shared, u32 consumer, const Schedule& schedule, i64 depth, const Sink& sink) {
        const u32 lane = threadIdx.x % 32;
        const u32 panels = u32(ceil_div(depth, k));
        const u64 a_first = A::descriptor(shared.a[0] + consumer * (rows / consumers) * line_bytes);
        const u64 b_first = B::descriptor(shared.b[0]);
        Turn<stages> turn;
        Turn<strips> strip;
        float sums[blocks][columns / 2];
        MK_UNROLL
        for (u32 i = 0; i < blocks * columns / 2; ++i) sums[i / (columns / 2)][i % (columns / 2)] = 0;  // for depth 0

        auto release = [&](u32 slot) {
            if (lane < cluster) ptx::arrive_at(&shared.used[slot], lane);
        };

        for (auto tile = schedule.begin(); tile != schedule.end(); ++tile) {
            u32 previous = 0;
#pragma unroll 1
            for (u32 panel = 0; panel < panels; ++panel) {
                ptx::wait(&shared.loaded[turn.slot], turn.parity);
                ptx::multiply_fence();
                MK_UNROLL
                for (u32 step = 0; step < k / 16; ++step)
                    MK_UNROLL
                    for (u32 i = 0; i < blocks; ++i)
                        ptx::multiply<T, columns, MK_A_BY_COLUMNS, !MK_B_BY_COLUMNS>(
                            sums[i],
                            a_first + (turn.slot * A::bytes + i * strip_rows * line_bytes + step * A::step) / 16,
                            b_first + (turn.slot * B::bytes + step * B::step) / 16, panel > 0 || step > 0);
                ptx::multiply_commit();
                ptx::multiply_wait<1>();  // the panel before is through, this one goes on
                if (panel > 0) release(previous);
                previous = turn.slot;
                turn.advance();
            }
            ptx::multiply_wait<0>();
            if (panels > 0) release(previous);

            const bool failed = *const_cast<volatile bool*>(&shared.failed);
            MK_UNROLL
            for (u32 i = 0; i < blocks; ++i) {
                ptx::results_are_there(sums[i]);
                MK_UNROLL
                for (u32 column = 0; column < columns; column += strip_columns) {
                    ptx::wait(&shared.stored[consumer][strip.slot], strip.parity ^ 1);
                    stage(shared.staged[consumer][strip.slot], &sums[i][column / 2], failed, sink);
                    ptx::fence_shared_to_async();
                    __syncwarp();
                    if (lane == 0) ptx::arrive(&shared.ready[consumer][strip.slot]);
                    strip.advance();
                }
            }
        }
    }

    // This warp's 16 rows of a strip, in the layout of matrix instructions, into lines that are swizzled as tensor copies
    // expect it: 16 bytes at a time, their place exclusive-or the line modulo 8.
    template <class Sink>
    static MK_DEVICE void stage(u8* strip, const float* sums, bool failed, const Sink& sink) {
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        auto value = [&](u32 i) { return failed ? not_a_number<Out>() : sink.transform(sums[i]); };
        if constexpr (sizeof(Out) == 2) {
            auto pair = [&](u32 i) { return u32(value(i).bits) | u32(value(i + 1).bits) << 16; };
            const u32 line = ptx::shared_address(strip) + (warp * 16 + lane % 16) * line_bytes;
            MK_UNROLL
            for (u32 i = 0; i < strip_columns / 16; ++i)
                ptx::store_matrices(line + ((2 * i + lane / 16) ^ lane % 8) * 16, pair(8 * i), pair(8 * i + 2),
                                    pair(8 * i + 4), pair(8 * i + 6));
        } else {
            u8* line = strip + (warp * 16 + lane / 4) * line_bytes + lane % 2 * 8;
            MK_UNROLL
            for (u32 i = 0; i < strip_columns / 8; ++i) {
                u8* at = line + ((2 * i + lane % 4 / 2) ^ lane / 4) * 16;
                *reinterpret_cast<float2*>(at) = {value(4 * i), value(4 * i + 1)};
                *reinterpret_cast<float2*>(at + 8 * line_bytes) = {value(4 * i + 2), value(4 * i + 3)};
            }
        }
    }

    template <class Schedule, class Sink>
    static MK_DEVICE void store(Shared& shared, const Agent& alone, u32 consumer, const Schedule& schedule,
                                const Sink& sink) {
        const u32 lane = threadIdx.x % 32;
        const TensorMap* map = nullptr;
        Turn<strips> turn, oldest;
        u32 unread = 0;  // strips that are being stored, lane 0's

        auto free_all_but = [&](u32 left) {
            if (left == 0) ptx::wait_stores_read<0>();
            else ptx::wait_stores_read<strips - 1>();
            for (; unread > left; --unread, oldest.advance()) ptx::arrive(&shared.stored[consumer][oldest.slot]);
        };

        for (Tile whole : schedule) {
            const Tile tile = share(whole);
            if (sink.map(tile) != map && (map = sink.map(tile))) ptx::acquire_map(map);
            for (u32 i = 0; i < blocks; ++i)
                for (u32 column = 0; column < columns; column += strip_columns, turn.advance()) {
                    Tile part{tile.source,
                              block_in(tile.rows, (consumer * blocks + i) * strip_rows, strip_rows),
                              block_in(tile.columns, column, strip_columns)};
                    const u8* staged = shared.staged[consumer][turn.slot];
                    const bool empty = part.rows.size() <= 0 || part.columns.size() <= 0;
                    ptx::wait(&shared.ready[consumer][turn.slot], turn.parity);
                    if (!empty && map && lane == 0)
                        ptx::store_box(map, staged, i32(part.columns.begin), i32(part.rows.begin));
                    if (!empty && !map) deliver_elements(alone, part, staged, sink);
                    __syncwarp();
                    if (lane == 0) {
                        ++unread;
                        free_all_but(!empty && map ? strips - 1 : 0);
                    }
                }
        }
        if (lane == 0) {
            free_all_but(0);
            ptx::wait_stores<0>();
        }
        __syncwarp();
    }

    // What tensor copies cannot store: 16 bytes, which the swizzle leaves together, at a time.
    template <class Sink>
    static MK_DEVICE void deliver_elements(const Agent& alone, const Tile& part, const u8* staged, const Sink& sink) {
        constexpr u32 run = 16 / sizeof(Out);
        for (u32 i = threadIdx.x % 32; i < strip_rows * line_bytes / 16; i += 32) {
            u32 line = i / 8, chunk = i % 8;
            Tile piece{part.source, block_in(part.rows, line, 1), block_in(part.columns, chunk * run, run)};
            if (piece.rows.size() > 0 && piece.columns.size() > 0)
                sink.deliver(alone, piece, reinterpret_cast<const Out*>(staged + line * line_bytes + (chunk ^ line % 8) * 16),
                             run);
        }
    }

    // `length` of a range from an offset on; of no or negative size behind its end.
    static MK_DEVICE Range block_in(Range range, u32 offset, u32 length) {
        i64 begin = range.begin + offset, end = begin + length;
        return {begin, end < range.end ? end : range.end};
    }
};

// Multiplies the tiles of a schedule as host.cuh's gemm() does. What it needs beyond that:
//   schedule   is the same for the blocks of a cluster: made of index / engine::cluster and count / engine::cluster
//   shape      rows, columns: MK_CLUSTER * MK_TILE_ROWS, MK_TILE_COLUMNS; k: what the gate is asked for at a time, a
//              multiple of 128 bytes
//   source, b  have a map: boxes of A::box, B::box by Hopper::k, swizzled by 128 bytes, zeros beyond the edges
//   sink       map(tile): boxes of 64 rows by 128 bytes, swizzled by 128 bytes, of the rows of the tile's source; null
//              where deliver() is to store single pieces instead, called by one lane for each
// The gate is asked by lane 0 of the block, for the rows of this block only.
template <class T, class Schedule, class Source, class Right, class Gate, class Sink>
MK_DEVICE void gemm(Launch& launch, const Schedule& schedule, TileShape shape, i64 depth, Source source,
                    const Right& b, Gate gate, Sink sink) {
    using Engine = Hopper<T, typename Sink::Type>;
    auto& shared = *reinterpret_cast<typename Engine::Shared*>(launch.agent().shared());
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;

    Engine::init(shared, launch.live());
    if (warpgroup == 0) {
        ptx::shrink_registers<40>();
        if (warp == 0) {
            if (threadIdx.x == 0) Engine::produce(shared, launch, schedule, depth, shape.k, source, b, gate);
        } else if (warp <= consumers) {
            Engine::store(shared, launch.agent().alone(), warp - 1, schedule, sink);
        }
    } else {
        ptx::grow_registers<232>();
        Engine::consume(shared, warpgroup - 1, schedule, depth, sink);
    }
    Engine::sync();  // no block leaves while its neighbour may still write to it
}

}  // namespace engine
}  // namespace mk
