// The engine of sm_90a, for bfloat16, float16 and tfloat32. A block is three warpgroups that meet in shared memory:
//   producer   warp 0: asks the gate, and has tensor copies fill one stage after another with a panel of A and of B; behind
//              those of an own tile of a sum over ranks with what peers have pushed, when the storers say that it is here
//   consumers  two warpgroups: multiply the panels, half of the tile's rows each, add what peers have pushed, and put the
//              tile into strips; or exchange it with peers before
//   storers    warps 1 and 2, one for each consumer: store its strips, or send them to peers, while the next tile is
//              multiplied
//   warp 3     does what the operator wants done meanwhile
// Where rows of A lie apart, warp 1 asks the gate and finds them, a tile ahead of what it stores; warps 0 and 3 copy them,
// 16 bytes a thread at a time, and have every other panel each.
// Each walks the schedule by itself. In a cluster of two, the blocks have the upper and the lower half of a tile: each
// loads its own rows of A, and half of B to both.
// Where tiles may be of fewer rows (MK_FLEXIBLE), consumers multiply the transposed operands, half of the tile's columns
// each: its rows are then the columns of matrix instructions, of which there may be any multiple of 16.
#pragma once

#include "../landing.cuh"
#include "../ptx.cuh"
#include "../reduction.cuh"
#include "hopper_panels.cuh"
#include "ring.cuh"

// What is compiled in; a plan's TileShape has the same rows and columns.
#ifndef MK_TILE_ROWS
#define MK_TILE_ROWS 128
#endif
#ifndef MK_TILE_COLUMNS
#define MK_TILE_COLUMNS 256
#endif
#ifndef MK_STAGES
#define MK_STAGES 4
#endif
// Whether a tile of fewer rows takes less time.
#ifndef MK_FLEXIBLE
#define MK_FLEXIBLE 0
#endif
// Strips that wait to be stored, of each consumer: 64 rows of 128 bytes.
#ifndef MK_STRIPS
#define MK_STRIPS 2
#endif
// Whether a warp of each block brings what peers have; else movers do.
#ifndef MK_COURIERS
#define MK_COURIERS 1
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

constexpr bool aligned_rows = true;  // of 16 bytes, as tensor copies want them
constexpr bool flexible = MK_FLEXIBLE, halves_tiles = !flexible;  // a tile of half as many columns takes about half the time
constexpr bool has_time = true;      // a warp does meanwhile() beside the tiles
constexpr bool couriers = MK_COURIERS, movers = !couriers;
constexpr bool pairs_columns = true;  // it takes a PairedStack
constexpr u32 sink_loads = 6;  // that a lane of a sink may have under way: registers for so many are there
constexpr u32 told_columns = 32;  // that are exchanged together
constexpr bool sends_strips = !several_nodes;  // sums for peers lie in their slots as strips
constexpr u32 consumers = 2, spare_warp = 1 + consumers;
constexpr u32 strip_rows = Strip<u8>::rows;  // of one matrix instruction
constexpr u32 pushed_bytes = 2048;  // to a peer at once: behind what a busy link does not take yet wait the next panels
constexpr u32 early_panels = 16;  // of a tile, that are left when others hear that it is nearly loaded
constexpr u32 row_step = 16, row_box = 32;  // flexible rows of a tile are multiplied, and loaded, so many at a time

// Registers of a thread: what one warpgroup gives up the others get, and a block waits for ever for more than it has.
constexpr u32 launch_registers = 65536 / MK_THREADS / 8 * 8;
template <class Sink> constexpr u32 consumer_registers = exchanges_sums<Sink> ? 208 : 192;  // which takes a few
template <class Sink>
constexpr u32 producer_registers = (1 + consumers) * launch_registers - consumers * consumer_registers<Sink>;

static_assert(MK_THREADS == 128 * (1 + consumers), "one warpgroup loads and stores, the others multiply");
static_assert((flexible ? MK_TILE_COLUMNS : MK_TILE_ROWS) % (cluster * consumers * strip_rows) == 0, "equal shares");
static_assert(!flexible || (cluster == 1 && MK_TILE_ROWS % strip_rows == 0 && MK_TILE_ROWS <= 128), "see MK_FLEXIBLE");
static_assert(cluster == 1 || cluster == 2, "pairs at most");

// 16 bytes of what a thread has of a tile, in the order of its sums.
template <class T>
struct alignas(16) Fragment {
    static constexpr u32 width = 16 / sizeof(T);
    u32 words[4];

    static MK_DEVICE Fragment of(const float* sums) {
        Fragment made;
        MK_UNROLL
        for (u32 i = 0; i < 4; ++i)
            if constexpr (sizeof(T) == 2) made.words[i] = ptx::pack<T>(sums[2 * i], sums[2 * i + 1]);
            else made.words[i] = bits_of(sums[i]);
        return made;
    }
    MK_DEVICE float operator[](u32 i) const {
        if constexpr (sizeof(T) == 2) return widen(T{u16(words[i / 2] >> i % 2 * 16)});
        else return float_of(words[i]);
    }
};

template <class T, class Schedule, class From, class Factor, class Sink>
class Hopper {
public:
    using Out = typename Sink::Type;
    static constexpr u32 rows = MK_TILE_ROWS / cluster, columns = MK_TILE_COLUMNS, k = line_bytes / sizeof(T);
    static constexpr u32 stages = MK_STAGES, strips = MK_STRIPS;
    // A consumer multiplies in blocks of 64 of its rows, or if they are flexible of its columns, by all of the others.
    static constexpr u32 consumer_rows = flexible ? rows : rows / consumers, strips_down = consumer_rows / strip_rows;
    static constexpr u32 blocks = flexible ? columns / consumers / strip_rows : strips_down;
    static constexpr u32 sums_of_block = (flexible ? rows : columns) / 2;  // of a thread
    static constexpr bool fragments = sends_strips && takes_fragments<Sink>, exchanges = exchanges_sums<Sink>;
    static constexpr bool halves = Schedule::halving && columns % 128 == 0;  // narrow tiles take half the work
    static constexpr bool gathers = lies_apart<From>;
    static constexpr u32 sides = Sides<Factor>::count, side = columns / sides;
    static constexpr u32 consumer_columns = flexible ? side / consumers : side;  // of the result
    using A = Panel<T, rows, MK_A_BY_COLUMNS, 1, flexible ? row_box : 0>;
    using B = Panel<T, side, !MK_B_BY_COLUMNS, cluster>;
    static constexpr u32 block_bytes = strip_rows * line_bytes;  // of a panel
    static constexpr u32 panel_bytes = stages * (A::bytes + sides * B::bytes);
    static constexpr u32 strip_bytes = consumers * strips * Strip<u8>::bytes;
    static_assert(flexible || !(gathers || sides == 2), "what experts need, whose last tiles are of few rows");
    static_assert(stages >= 2, "one panel is multiplied while the next one comes");
    static_assert(sides == 1 || (!halves && consumer_columns % Strip<Out>::columns == 0), "a side is whole strips");
    static_assert(!flexible || (!fragments && !exchanges), "sums are handed over as they lie otherwise");
    static_assert(!fragments || (sides == 1 && !halves && strips_down == 1), "what is handed over is whole tiles");
    static_assert(!exchanges || columns <= 128, "what is exchanged takes registers");
    // Behind the panels of an own tile comes, by the same ring, what is to be added: so many strips for each consumer at a
    // time, in the larger one of a stage's panels.
    static constexpr u32 together = B::bytes < 2 * consumers * Strip<u8>::bytes ? 1 : 2;

    // The block's dynamic shared memory. Barriers come in pairs: one says that a slot is full, one that it is free.
    struct alignas(128) Shared {
        u8 a[stages][A::bytes];
        u8 b[stages][sides * B::bytes];
        u8 staged[consumers][strips][Strip<u8>::bytes];
        u64 loaded[stages], used[stages];
        u64 ready[consumers][strips], stored[consumers][strips];
        u64 awaited[consumers];  // what is to be added to a part is there, or peers may be told it
        Addends addends[consumers];
        bool failed;        // a gate did not open: what is delivered from now on is NaN
        Schedule schedule;  // here, not in the registers of all threads
        Sink sink;
        Found<gathers, rows> next;
    };
    // What plans take for all but panels and strips.
    static constexpr u32 beside_bytes = 2048;

    // By a thread of each warp but the producer's: what initialises a barrier takes its address from a uniform register.
    static MK_DEVICE void init(Shared& shared, u32 warp, const Schedule& schedule, const Sink& sink, bool live) {
        constexpr u32 first = gathers ? 0 : 1;
        if (ptx::elect()) {
            each_barrier(shared, warp - first, MK_THREADS / 32 - first,
                         [](u64* barrier, u32 arrivals) { ptx::barrier_init(barrier, arrivals); });
            ptx::fence_barrier_init();
            ptx::fence_shared_to_async();  // what threads wrote here before
        }
        if (threadIdx.x == MK_THREADS - 1) {
            shared.failed = !live;
            shared.schedule = schedule;
            shared.sink = sink;
        }
    }

    // The memory may be used again: by tensor copies, too, of what threads wrote there.
    static MK_DEVICE void retire(Shared& shared) {
        ptx::fence_shared_to_async();
        each_barrier(shared, threadIdx.x, MK_THREADS, [](u64* barrier, u32) { ptx::barrier_invalidate(barrier); });
    }

    // One of so many visitors, which take turns: one alone takes long.
    template <class Visit>
    static MK_DEVICE void each_barrier(Shared& shared, u32 visitor, u32 visitors, Visit visit) {
        u32 i = visitor;  // among those that are left
        auto some = [&](u64* barriers, u32 count, u32 arrivals) {
            MK_NO_UNROLL
            for (; i < count; i += visitors) visit(barriers + i, arrivals);
            i -= count;
        };
        some(shared.loaded, stages, 1 + (gathers ? 32 : 0));
        some(shared.used, stages, cluster * consumers * 4);  // each of their warps
        some(shared.ready[0], consumers * strips, 4);
        some(shared.stored[0], consumers * strips, 1);
        some(shared.awaited, consumers, 1);
        if constexpr (gathers) some(&shared.next.found, 1, 1), some(&shared.next.taken, 1, copiers / 32);
    }

    static MK_DEVICE void fail(Shared& shared) { *const_cast<volatile bool*>(&shared.failed) = true; }
    static MK_DEVICE bool has_failed(const Shared& shared) { return *const_cast<const volatile bool*>(&shared.failed); }

    static MK_DEVICE void sync() {
        __syncwarp();
        if (cluster > 1) ptx::cluster_sync();
        else __syncthreads();
    }

    // What of a tile is this block's; it may end before the block's rows begin.
    static MK_DEVICE Tile share(Tile tile) {
        if (cluster > 1) tile.rows.begin += ptx::cluster_rank() * rows;
        if (tile.rows.end > tile.rows.begin + rows) tile.rows.end = tile.rows.begin + rows;
        return tile;
    }

    // Columns that are worked on.
    static MK_DEVICE u32 width(const Tile& tile) {
        return halves && tile.columns.size() <= columns / 2 ? columns / 2 : columns;
    }

    // The tile ends before this consumer's part of it.
    static MK_DEVICE bool idle(const Tile& tile, u32 consumer) {
        return flexible ? tile.columns.size() <= consumer * consumer_columns : tile.rows.size() <= consumer * consumer_rows;
    }

    static MK_DEVICE Tile half(const Tile& tile, u32 consumer) {
        if (flexible) return {tile.source, tile.rows, part_of(tile.columns, consumer * consumer_columns, consumer_columns)};
        return {tile.source, part_of(tile.rows, consumer * consumer_rows, consumer_rows), tile.columns};
    }

    // Others' tiles are handed over to them as fragments.
    static MK_DEVICE bool is_own(const Sink& sink, const Launch& launch, const Tile& tile) {
        if constexpr (fragments) return sink.is_own(launch, tile);
        else return false;
    }

    // Where a panel of B is, as all threads of a warp know it, one of which loads it.
    struct Columns {
        const TensorMap* map;
        u32 lines, source, column, wanted;  // columns

        MK_DEVICE Columns(const Factor& b, const Tile& tile)
            : map(ptx::uniform(&mapped_of(b).map)), lines(ptx::uniform(u32(mapped_of(b).box_lines))),
              source(ptx::uniform(u32(tile.source))), column(ptx::uniform(u32(tile.columns.begin))),
              wanted(halves ? ptx::uniform(width(tile)) : columns) {}
    };
    static MK_DEVICE void load_b(Shared& shared, u32 slot, u32 rank, const Factor& b, const Columns& from, u32 k) {
        MK_UNROLL
        for (u32 i = 0; i < sides; ++i)
            B::load(
                shared.b[slot] + i * B::bytes, rank, from.column + i * Sides<Factor>::apart(b), k,
                [&](u8* to, i32 x, i32 y) {
                    load_factor(b, from.map, from.source, to, &shared.loaded[slot], x, y);
                },
                from.wanted / sides);
    }
    static MK_DEVICE u32 bytes_of_b(const Columns& from) { return sides * B::bytes_of(from.wanted / sides, from.lines); }

    // Finds rows that lie apart, a tile ahead of who stores: looking for them takes long. Of no depth it finds none.
    template <class Source, class Gate>
    class Scout {
    public:
        MK_DEVICE Scout(Shared& shared, const Launch& launch, i64 depth, const Source& source, const Gate& gate)
            : shared_(shared), who_(launch.agent().warp()), depth_(depth), source_(source), gate_(gate),
              next_(shared.schedule.begin()), more_(depth > 0), here_(launch.live()) {}

        // Waits until the rows of the next tile are here, and the one before has been taken; tells copiers.
        MK_DEVICE void go_on() {
            if (!more_) return;
            Found<gathers, rows>& next = shared_.next;
            ptx::wait(&next.taken, turn_.parity ^ 1);
            more_ = next_ != shared_.schedule.end();
            if (more_) {
                const Tile tile = *next_;
                here_ = here_ && gate_(who_, tile, Range{0, depth_});
                const ListedRows found = source_(tile);
                for (u32 i = who_.lane(); here_ && i < tile.rows.size(); i += 32) next.places[i] = found.places[i];
                if (who_.lane() == 0) next.tile = tile;
                ++next_;
            }
            if (who_.lane() == 0) {
                next.more = more_, next.here = here_;
                if (!here_) fail(shared_);
            }
            __syncwarp();
            if (who_.lane() == 0) ptx::arrive(&next.found);
            turn_.advance();
        }

    private:
        Shared& shared_;
        const Agent who_;
        const i64 depth_;
        const Source& source_;
        const Gate& gate_;
        typename Schedule::Iterator next_;
        Turn<1> turn_;
        bool more_, here_;
    };

    // Both warps of copiers call it, and take turns. After a failure all goes on, with nothing in it. Nobody waits for
    // copies here: each lane's arrive at the barrier when they are there. Tiles of fewer rows take less time, and agents that
    // drift apart no longer find in the L2 cache what others have just loaded of B: each tells when it has nearly loaded a tile,
    // and none begins the next before all have.
    static MK_DEVICE void gather(Shared& shared, Launch self, i64 depth, const Factor& b) {
        const bool paces = threadIdx.x < 32;
        const i64 nearly = depth > early_panels * i64(k) ? (ceil_div(depth, i64(k)) - early_panels) * i64(k) : 0;
        u64 begun = 0;  // tiles
        bool mine = paces;  // the next panel
        Gathered<T, rows> lines;
        Turn<stages> turn;
        if (ptx::elect()) ptx::acquire_map(&mapped_of(b).map);
        for (Turn<1> tiles;; tiles.advance()) {
            ptx::wait(&shared.next.found, tiles.parity);
            if (!shared.next.more) break;
            const bool here = shared.next.here;
            const Columns from(b, shared.next.tile);
            lines.look_up(shared.next.places, here ? u32(shared.next.tile.rows.size()) : 0, mine ? 0 : line_bytes);
            __syncwarp();
            if (threadIdx.x % 32 == 0) ptx::arrive(&shared.next.taken);
            if (paces) self.await_steps(begun++ * self.members());
#pragma unroll 1
            for (i64 at = 0; at < depth; at += k, turn.advance(), mine = !mine) {
                if (paces && at == nearly) self.has_stepped();
                if (!mine) continue;
                const u32 slot = ptx::uniform(turn.slot), first = ptx::uniform(u32(at));
                u64* const loaded = &shared.loaded[slot];
                ptx::wait(&shared.used[slot], turn.parity ^ 1);
                if (ptx::elect()) {
                    ptx::arrive_expect(loaded, here ? bytes_of_b(from) : 0);
                    if (here) load_b(shared, slot, 0, b, from, first);
                }
                lines.copy(shared.a[slot], depth - at);
                ptx::arrive_when_copied(loaded);
            }
        }
    }

    // Waits for a panel. Copiers write as threads do, for instructions that read as tensor copies do: the fence between is
    // the reader's, as in a copier it would wait for all copies that are under way.
    static MK_DEVICE void await_panel(Shared& shared, u32 slot, u32 parity) {
        ptx::wait(&shared.loaded[slot], parity);
        if (gathers) ptx::fence_shared_to_async();
    }

    // All wait for the first panel: its tile is looked up by a schedule in registers, while others make the barriers.
    template <class Source, class Gate>
    static MK_DEVICE void produce(Shared& shared, Launch& launch, const Schedule& schedule, i64 depth, i64 gate_k,
                                  const Source& source, const Factor& b, const Gate& gate) {
        const Agent warp = launch.agent().warp();
        const bool leads = warp.lane() == 0;
        const u32 rank = cluster > 1 ? ptx::cluster_rank() : 0;
        const TensorMap* a_map = nullptr;
        bool arrived = launch.live(), ready = false;
        Turn<stages> turn;
        Turn<1> awaited[consumers];
        if (ptx::elect()) ptx::acquire_map(&mapped_of(b).map);
        for (Tile whole : schedule) {
            const Tile tile = share(whole);
            const Rows rows_of_a = source(tile);
            const TensorMap* map = ptx::uniform(&rows_of_a.matrix.map);
            if (map != a_map && ptx::elect()) ptx::acquire_map(map);
            a_map = map;
            const u32 first_row = ptx::uniform(u32(rows_of_a.first));
            const u32 height = tile.rows.size() > 0 ? ptx::uniform(u32(tile.rows.size())) : 0;
            const u32 lines = ptx::uniform(u32(rows_of_a.matrix.box_lines));
            const Columns from(b, tile);
            if (!ready) sync();
            ready = true;
            for (Range piece : Blocks(depth, gate_k)) {
                arrived = arrived && (tile.rows.size() <= 0 || gate(warp, tile, piece));
                if (arrived) ptx::fence_global_to_async();
                else if (leads) fail(shared);  // all goes on, as the neighbour needs its B
                u32 first = ptx::uniform(u32(piece.begin));
                turn.go_on(u32(ceil_div(piece.size(), k)), [&](u32 slot) {
                    u64* const loaded = &shared.loaded[slot];
                    ptx::wait(&shared.used[slot], turn.parity ^ 1);
                    if (ptx::elect()) {
                        ptx::arrive_expect(loaded, A::bytes_of(height, lines) + bytes_of_b(from));
                        A::load(shared.a[slot], 0, first_row, first,
                                [&](u8* to, i32 x, i32 y) { ptx::load_box(to, map, loaded, x, y); }, height);
                        load_b(shared, slot, rank, b, from, first);
                    }
                    first += k;
                });
            }
            if constexpr (fragments)
                if (is_own(shared.sink, launch, tile)) load_addends(shared, launch, tile, turn, awaited);
        }
        if (!ready) sync();
    }

    // How often the ring brings strips of one peer.
    template <class Element>
    static constexpr u32 times = (consumer_columns / Strip<Element>::columns + together - 1) / together;
    static MK_DEVICE u8* addends_at(Shared& shared, u32 slot, u32 consumer) {
        return (together == 1 ? shared.a[slot] : shared.b[slot]) + consumer * together * Strip<u8>::bytes;
    }

    // What peers have pushed of an own tile, when it is there: of one after the other. A block without rows of it lets
    // as many slots pass as its neighbour fills.
    static MK_DEVICE void load_addends(Shared& shared, const Launch& launch, const Tile& tile, Turn<stages>& turn,
                                       Turn<1> (&awaited)[consumers]) {
        constexpr u32 strips = consumer_columns / Strip<typename Sink::Partial>::columns;
        u32 wanting = 0;  // consumers
        MK_UNROLL
        for (u32 consumer = 0; consumer < consumers; ++consumer) {
            if (idle(tile, consumer)) break;
            ptx::wait(&shared.awaited[consumer], awaited[consumer].parity);
            awaited[consumer].advance(), ++wanting;
        }
        const bool here = !has_failed(shared);
        if (here) ptx::fence_global_to_async();
        const u32 peers = shared.sink.addends(launch);
#pragma unroll 1
        for (u32 peer = 0; peer < peers; ++peer)
#pragma unroll 1
            for (u32 first = 0; first < strips; first += together, turn.advance()) {
                const u32 slot = ptx::uniform(turn.slot), some = strips - first < together ? strips - first : together;
                u64* const loaded = &shared.loaded[slot];
                ptx::wait(&shared.used[slot], turn.parity ^ 1);
                if (!ptx::elect()) continue;
                ptx::arrive_expect(loaded, here ? wanting * some * Strip<u8>::bytes : 0);
                MK_NO_UNROLL
                for (u32 consumer = 0; here && consumer < wanting; ++consumer) {
                    const Addends& from = shared.addends[consumer];
                    ptx::load_bulk(addends_at(shared, slot, consumer),
                                   from.first + peer * from.apart + first * Strip<u8>::bytes, some * Strip<u8>::bytes, loaded);
                }
            }
    }

    static MK_DEVICE void consume(Shared& shared, const Launch& launch, u32 consumer, i64 depth) {
        const u32 lane = threadIdx.x % 32, panels = u32(ceil_div(depth, k));
        const u64 a_first = A::descriptor(shared.a[0] + (flexible ? 0 : consumer * consumer_rows * line_bytes));
        const u64 b_first = B::descriptor(shared.b[0] + (flexible ? consumer * (blocks / sides) * block_bytes : 0));
        Turn<stages> turn;
        Turn<strips> strip;
        Turn<1> awaited;  // of those who are told
        u32 peers = 0;    // who have pushed what is to be added
        if constexpr (fragments) peers = shared.sink.addends(launch);
        auto release = [&](u32 slot) {
            if (lane < cluster) ptx::arrive_at(&shared.used[slot], lane);
        };

        for (Tile whole : shared.schedule) {
            const bool own = is_own(shared.sink, launch, whole);  // looked up while others load
            if (idle(share(whole), consumer)) {  // the other one multiplies twice as fast
                u32 passing = panels;
                if constexpr (fragments) passing += own ? peers * times<typename Sink::Partial> : 0;
                for (u32 panel = 0; panel < passing; ++panel, turn.advance()) {
                    ptx::wait(&shared.loaded[turn.slot], turn.parity);
                    release(turn.slot);
                }
                continue;
            }
            float sums[blocks][sums_of_block];
            Span computed(launch, threadIdx.x % 128 == 0, Traced::compute, half(share(whole), consumer));
            const u32 wanted = width(whole), height = u32(whole.rows.size());
            if (fragments || exchanges) clear(sums);  // there may be no terms
            Whereabouts there{};
            if constexpr (exchanges) there = look_up(shared, launch, half(share(whole), consumer));
            if (panels > 0) ptx::wait(&shared.loaded[turn.slot], turn.parity);
            computed.begin();
            if constexpr (flexible) multiply_rows<row_step>(height, sums, shared, turn, panels, a_first, b_first, release);
            else if (wanted == columns) multiply<columns>(sums, shared, turn, panels, a_first, b_first, release);
            else if constexpr (halves)
                multiply<columns / 2>(sums, shared, turn, panels, a_first, b_first, release);

            MK_UNROLL
            for (u32 i = 0; i < blocks; ++i) ptx::results_are_there(sums[i]);
            if constexpr (exchanges) {
                computed.end();
                exchange(shared, launch.as(Agent::warp()), half(share(whole), consumer), there, consumer, awaited, sums[0]);
                stage_totals(shared, consumer, strip, sums);
            } else if constexpr (!fragments) {
                stage_results(shared, consumer, strip, height, wanted, sums, panels == 0);
            } else {
                if (own) add<typename Sink::Partial>(sums, shared, turn, consumer, peers, release);
                if (own) stage_totals(shared, consumer, strip, sums);
                else stage_partials(shared, consumer, strip, sums);
            }
        }
    }

    // Of a thread's sums: whose rows they are, and where these begin among what is exchanged. In 32 bits, as there are
    // few registers, and few rows: elements of whole tiles, which plans keep far below that.
    struct Whereabouts {
        u32 owner[2], place;
    };
    static MK_DEVICE Whereabouts look_up(const Shared& shared, const Launch& launch, const Tile& part) {
        const Sink& sink = shared.sink;
        const u32 lane = threadIdx.x % 32, line = threadIdx.x / 32 % 4 * 16;
        const i64 row = part.rows.begin + line + lane / 4;
        return {{u32(sink.owner(launch, row)), u32(sink.owner(launch, row + 8))},
                u32(sink.place_of(part)) + line * columns + lane * Sink::together};
    }

    // Has the sink make of a part's sums what they are over all ranks, when the storer says that it may begin. Of each 32
    // columns of a row a thread has 8, of which those of a warp lie together: links carry long runs in fewer packets.
    static MK_DEVICE void exchange(Shared& shared, Launch self, const Tile& part, const Whereabouts& there, u32 consumer,
                                   Turn<1>& awaited, float (&sums)[sums_of_block]) {
        constexpr u32 groups = columns / told_columns, apart = 32 * Sink::together;
        // Groups that are asked for together: beside the sums there are registers for so many.
        constexpr u32 at_once = Sink::partial_bytes * columns < 256 ? 2 : 1, some_sums = at_once * Sink::together;
        const Sink& sink = shared.sink;
        const i64 row = part.rows.begin + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        ptx::wait(&shared.awaited[consumer], awaited.parity);
        awaited.advance();
        if (has_failed(shared)) self.drop();
        const Span exchanged(self, threadIdx.x % 128 == 0, Traced::store, part);
        const u32 wanted = u32(ceil_div(part.columns.size(), told_columns));
        float some[some_sums];
        MK_UNROLL
        for (u32 step = 0; step < 3; ++step)
            MK_UNROLL
            for (u32 second = 0; second < 2; ++second)
                MK_UNROLL
                for (u32 first = 0; first < groups; first += at_once) {
                    if (row + 8 * second >= part.rows.end) break;
                    const u32 at = there.place + (second * groups + first) * apart;
                    const u32 count = wanted > first ? wanted - first : 0;
                    float* const own = sums + told_columns / 2 * first + 2 * second;
                    MK_UNROLL
                    for (u32 i = 0; i < some_sums; ++i) some[i] = own[i / 2 * 4 + i % 2];
                    if (step == 0) sink.template give<apart>(self, there.owner[second], at, count, some);
                    else if (step == 1 ? sink.template add<apart>(self, there.owner[second], at, count, some)
                                       : sink.template take<apart>(self, there.owner[second], at, count, some)) {
                        MK_UNROLL
                        for (u32 i = 0; i < some_sums; ++i) own[i / 2 * 4 + i % 2] = some[i];
                    }
                }
        __syncwarp();
        if (self.agent().any(!self.live())) fail(shared);
    }

    // Puts into strips what the sink makes of the rows and columns of a tile that are wanted, or of nothing.
    static MK_DEVICE void stage_results(Shared& shared, u32 consumer, Turn<strips>& strip, u32 height, u32 wanted,
                                        const float (&sums)[blocks][sums_of_block], bool nothing) {
        const bool failed = has_failed(shared), replaced = failed || nothing;
        const Out replacement = failed ? not_a_number<Out>() : result(shared.sink, 0.0f, 0.0f);
        fill_strips<Out>(shared, consumer, strip, height, wanted, [&](u8* to, u32 i, u32 column) {
            if (replaced) {
                fill(to, replacement);
            } else if constexpr (flexible) {
                const u32 block = column / strip_rows, first = i * (strip_rows / 2);
                const float *some = &sums[block][first], *second = &sums[sides == 2 ? 1 : block][first];
                stage_turned<Out>(to, column % strip_rows, [&](u32 j) { return result(shared.sink, some[j], second[j]); });
            } else {
                const float* some = &sums[i][column / 2];
                stage<Out>(to, [&](u32 j) { return result(shared.sink, some[j], some[j]); });
            }
        });
    }

    // The same of another's tile, as fragments, which its owner adds. After a failure nothing is sent.
    static MK_DEVICE void stage_partials(Shared& shared, u32 consumer, Turn<strips>& strip,
                                         const float (&sums)[blocks][sums_of_block]) {
        using Partial = typename Sink::Partial;
        fill_strips<Partial>(shared, consumer, strip, consumer_rows, columns,
                             [&](u8* to, u32 i, u32 column) { hold<Partial>(to, &sums[i][column / 2]); });
    }

    // The same of an own tile, to which such fragments have been added.
    static MK_DEVICE void stage_totals(Shared& shared, u32 consumer, Turn<strips>& strip,
                                       const float (&sums)[blocks][sums_of_block]) {
        using Result = typename Sink::Result;
        const bool failed = has_failed(shared);
        fill_strips<Result>(shared, consumer, strip, consumer_rows, columns, [&](u8* to, u32 i, u32 column) {
            if (failed) fill(to, not_a_number<Result>());
            else stage<Result>(to, [&](u32 j) { return narrow<Result>(sums[i][column / 2 + j]); });
        });
    }

    // Has a consumer's part put into strips, one after the other: put(strip, number of 64 rows, first column).
    template <class Element, class Put>
    static MK_DEVICE void fill_strips(Shared& shared, u32 consumer, Turn<strips>& strip, u32 height, u32 wanted,
                                      const Put& put) {
        static_assert(consumer_columns % Strip<Element>::columns == 0, "whole strips");
        MK_UNROLL
        for (u32 i = 0; i < strips_down; ++i)
            MK_UNROLL
            for (u32 column = 0; column < consumer_columns; column += Strip<Element>::columns) {
                if (column >= wanted || (flexible && i * strip_rows >= height)) break;
                ptx::wait(&shared.stored[consumer][strip.slot], strip.parity ^ 1);
                put(shared.staged[consumer][strip.slot], i, column);
                ptx::fence_shared_to_async();
                __syncwarp();
                if (threadIdx.x % 32 == 0) ptx::arrive(&shared.ready[consumer][strip.slot]);
                strip.advance();
            }
    }

    // Puts a thread's sums of a strip there as fragments: 16 bytes of each thread of the warpgroup, and so on.
    template <class Element>
    static MK_DEVICE void hold(u8* strip, const float* sums) {
        using Some = Fragment<Element>;
        Some* to = reinterpret_cast<Some*>(strip) + threadIdx.x % 128;
        MK_UNROLL
        for (u32 i = 0; i < Strip<Element>::columns / 2 / Some::width; ++i) to[i * 128] = Some::of(sums + i * Some::width);
    }

    // Adds what the ring brings in strips like that, those of one peer after those of another.
    template <class Element, class Release>
    static MK_DEVICE void add(float (&sums)[blocks][sums_of_block], Shared& shared, Turn<stages>& turn, u32 consumer,
                              u32 peers, const Release& release) {
        using Some = Fragment<Element>;
        constexpr u32 count = Strip<Element>::columns / 2 / Some::width, all = columns / 2 / Some::width;
        MK_NO_UNROLL
        for (u32 peer = 0; peer < peers; ++peer)
            MK_UNROLL
            for (u32 first = 0; first < all; first += together * count, turn.advance()) {
                ptx::wait(&shared.loaded[turn.slot], turn.parity);
                const Some* from = reinterpret_cast<const Some*>(addends_at(shared, turn.slot, consumer)) + threadIdx.x % 128;
                MK_UNROLL
                for (u32 i = 0; i < together * count; ++i) {
                    if (first + i >= all) break;
                    const Some terms = from[i * 128];
                    MK_UNROLL
                    for (u32 e = 0; e < Some::width; ++e) sums[0][(first + i) * Some::width + e] += terms[e];
                }
                __syncwarp();
                release(turn.slot);
            }
    }

    static MK_DEVICE void clear(float (&sums)[blocks][sums_of_block]) {
        MK_UNROLL
        for (u32 i = 0; i < blocks; ++i)
            MK_UNROLL
            for (u32 j = 0; j < sums_of_block; ++j) sums[i][j] = 0;
    }

    // All panels of a tile by as few of its rows as matrix instructions may take.
    template <u32 some, class Release>
    static MK_DEVICE void multiply_rows(u32 height, float (&sums)[blocks][sums_of_block], Shared& shared, Turn<stages>& turn,
                                        u32 panels, u64 a_first, u64 b_first, const Release& release) {
        if constexpr (some < rows)
            if (height > some)
                return multiply_rows<some + row_step>(height, sums, shared, turn, panels, a_first, b_first, release);
        multiply<some>(sums, shared, turn, panels, a_first, b_first, release);
    }

    // The panels of a tile, of whose columns, or flexible rows, the first `some` are wanted.
    template <u32 some, class Release>
    static MK_DEVICE void multiply(float (&sums)[blocks][sums_of_block], Shared& shared, Turn<stages>& turn, u32 panels,
                                   u64 a_first, u64 b_first, const Release& release) {
        bool add = false;
        turn.go_on(panels, [&](u32 slot) {
            // Else the compiler keeps the descriptors of all slots, and has no registers for them.
            const u64 a_panel = ptx::opaque_place(a_first), b_panel = ptx::opaque_place(b_first);
            await_panel(shared, slot, turn.parity);
            ptx::multiply_fence();
            MK_UNROLL
            for (u32 step = 0; step < steps; ++step)
                MK_UNROLL
                for (u32 i = 0; i < blocks; ++i) {
                    auto& those = reinterpret_cast<float(&)[some / 2]>(sums[i]);
                    const u32 beside = i * (sides == 2 ? B::bytes : block_bytes);
                    const u64 a = ptx::further(a_panel, slot * A::bytes + step * A::step + (flexible ? 0 : beside));
                    const u64 b = ptx::further(b_panel, slot * sides * B::bytes + step * B::step + (flexible ? beside : 0));
                    if constexpr (flexible)
                        ptx::multiply<T, some, !MK_B_BY_COLUMNS, MK_A_BY_COLUMNS>(those, b, a, add || step > 0);
                    else
                        ptx::multiply<T, some, MK_A_BY_COLUMNS, !MK_B_BY_COLUMNS>(those, a, b, add || step > 0);
                }
            ptx::multiply_commit();
            ptx::multiply_wait<1>();  // the panel before is through, this one goes on
            if (add) release(before(slot));
            add = true;
        });
        ptx::multiply_wait<0>();
        if (add) release(before(turn.slot));
    }
    static MK_DEVICE u32 before(u32 slot) { return (slot + stages - 1) % stages; }

    // What the sink makes of a sum, or of two that belong together.
    static MK_DEVICE Out result(const Sink& sink, float sum, float second) {
        if constexpr (sides == 2) return sink.transform(sum, second);
        else return sink.transform(sum);
    }

    // A warp's 16 lines of a strip.
    static MK_DEVICE u8* own_lines(u8* strip) { return strip + threadIdx.x / 32 % 4 * 16 * line_bytes; }

    // Puts there what is made of sums in the layout of matrix instructions. Tensor copies swizzle: the 16 bytes that belong
    // at place i of a line are at i ^ line % 8.
    template <class Element, class Made>
    static MK_DEVICE void stage(u8* strip, const Made& made) {
        const u32 lane = threadIdx.x % 32;
        u8* lines = own_lines(strip);
        if constexpr (sizeof(Element) == 2) {
            auto pair = [&](u32 i) { return u32(made(i).bits) | u32(made(i + 1).bits) << 16; };
            const u32 line = ptx::shared_address(lines) + lane % 16 * line_bytes;
            MK_UNROLL
            for (u32 i = 0; i < Strip<Element>::columns / 16; ++i)
                ptx::store_matrices(line + ((2 * i + lane / 16) ^ lane % 8) * 16, pair(8 * i), pair(8 * i + 2),
                                    pair(8 * i + 4), pair(8 * i + 6));
        } else {
            u8* line = lines + lane / 4 * line_bytes + lane % 2 * 8;
            MK_UNROLL
            for (u32 i = 0; i < Strip<Element>::columns / 8; ++i) {
                u8* at = line + ((2 * i + lane % 4 / 2) ^ lane / 4) * 16;
                *reinterpret_cast<float2*>(at) = {made(4 * i), made(4 * i + 1)};
                *reinterpret_cast<float2*>(at + 8 * line_bytes) = {made(4 * i + 2), made(4 * i + 3)};
            }
        }
    }

    // The same of sums whose rows are columns of the strip, from one of a block's on: all warps have some of every line.
    template <class Element, class Made>
    static MK_DEVICE void stage_turned(u8* strip, u32 first, const Made& made) {
        const u32 lane = threadIdx.x % 32, column = threadIdx.x / 32 % 4 * 16;  // of the warp's first
        if constexpr (sizeof(Element) == 2) {
            auto pair = [&](u32 i) { return u32(made(i).bits) | u32(made(i + 1).bits) << 16; };
            const u32 line = ptx::shared_address(strip) + (lane / 16 * 8 + lane % 8) * line_bytes;
            const u32 at = line + ((column / 8 + lane / 8 % 2) ^ lane % 8) * 16;
            MK_UNROLL
            for (u32 i = 0; i < strip_rows / 16; ++i)
                ptx::store_matrices_turned(at + i * 16 * line_bytes, pair(8 * i), pair(8 * i + 2), pair(8 * i + 4),
                                           pair(8 * i + 6));
        } else {
            if (column / Strip<Element>::columns != first / Strip<Element>::columns) return;
            MK_UNROLL
            for (u32 i = 0; i < strip_rows / 2; ++i)
                *Strip<Element>{strip}(i / 4 * 8 + lane % 4 * 2 + i % 2, column - first + lane / 4 + i / 2 % 2 * 8) = made(i);
        }
    }

    // One value, everywhere there.
    template <class Element>
    static MK_DEVICE void fill(u8* strip, Element value) {
        Element* to = reinterpret_cast<Element*>(own_lines(strip));
#pragma unroll 1
        for (u32 i = threadIdx.x % 32; i < 16 * Strip<Element>::columns; i += 32) to[i] = value;
    }

    // Waits until, but for the last `left` groups, what this thread stores has been read, or is complete.
    template <bool complete, u32 some = 0>
    static MK_DEVICE void wait_stores(u32 left) {
        if constexpr (some < strips)
            if (left > some) return wait_stores<complete, some + 1>(left);
        if (complete) ptx::wait_stores<some>();
        else ptx::wait_stores_read<some>();
    }

    // What a strip holds of a part, as offsets in 32 bits: the last strips of a launch are stored one after the other, and
    // nothing hides how long that takes.
    struct Piece {
        const Tile& part;
        u32 row, column, wide;
        MK_DEVICE Tile tile() const {
            return {part.source, part_of(part.rows, row, strip_rows), part_of(part.columns, column, wide)};
        }
    };

    // What a storer keeps account of. Templates, not lambdas of any type, which not every NVRTC takes.
    struct Storer {
        Shared& shared;
        Launch& self;
        u32 consumer;
        Turn<strips> turn, oldest;
        u32 unread = 0;  // strips that are being stored
        // A signal waits until its part is there; meanwhile the next one is on its way, so that links are not idle.
        Tile sent{};
        bool unsaid = false;
        u32 behind = 0;  // strips since
        const TensorMap *map = nullptr, *acquired = nullptr;  // of a part, if there is one, and the last one
        u32 first_row = 0;  // of the part, there

        MK_DEVICE void free_oldest() {
            wait_stores<false>(--unread);
            __syncwarp();
            if (self.agent().lane() == 0) ptx::arrive(&shared.stored[consumer][oldest.slot]);
            oldest.advance();
            if (fragments && unsaid && unread <= behind) {
                wait_stores<true>(behind);  // each lane for what it has sent: it raises the signal of the same receiver
                shared.sink.end(self, sent, Writes().complete(self.agent()));
                unsaid = false;
            }
        }

        // How many strips are below each other.
        static MK_DEVICE u32 down(const Tile& part) {
            return flexible ? u32(part.rows.size() + strip_rows - 1) / strip_rows : strips_down;
        }

        // begin(piece, its strip, its number) stores it, or starts to.
        template <class Begin>
        MK_DEVICE void each_strip(const Tile& part, u32 across, u32 wide, Begin begin) {
            const u32 rows_there = u32(part.rows.size()), columns_there = u32(part.columns.size());
            Piece piece{part, 0, 0, wide};
#pragma unroll 1
            for (u32 i = 0; i < down(part) * across; ++i, turn.advance()) {
                u64* ready = &shared.ready[consumer][turn.slot];
                // Behind the first strip of a part the next one comes soon, if there is room for it.
                while (unread > (i == 0 ? 0 : strips - 1) && !self.agent().any(ptx::completed(ready, turn.parity)))
                    free_oldest();
                ptx::wait(ready, turn.parity);
                if (piece.row < rows_there && piece.column < columns_there)
                    begin(piece, shared.staged[consumer][ptx::uniform(turn.slot)], i);
                __syncwarp();
                ptx::commit_stores();
                ++unread, ++behind;
                if (flexible) free_oldest();  // warps have read it
                piece.column += wide;
                if (piece.column == across * wide) piece.column = 0, piece.row += strip_rows;
            }
        }

        // Whether the pieces of a part are stored through a map, before they are there.
        template <class To>
        MK_DEVICE void look_up(const To& to, const Tile& part) {
            map = to.map(part, strip_rows);
            if (!map) return;
            map = ptx::uniform(map);
            first_row = u32(to.first_row(part));
            if (map == acquired) return;
            if (ptx::elect()) ptx::acquire_map(map);
            acquired = map;
        }

        // Starts to store a piece through it.
        MK_DEVICE bool store_mapped(const Piece& piece, const u8* staged) const {
            if (!map) return false;
            const u32 x = ptx::uniform(u32(piece.part.columns.begin) + piece.column), y = ptx::uniform(first_row + piece.row);
            if (ptx::elect()) ptx::store_box(map, staged, i32(x), i32(y));
            return true;
        }
    };

    static MK_DEVICE Completed deliver(const Sink& sink, Launch& self, const Tile& piece, Strip<Out> staged) {
        if constexpr (flexible) return sink.deliver_strip(self, piece, staged);
        else return sink.deliver(self, piece, staged);
    }

    // Before each part, and once more, it calls ahead().
    template <class Ahead>
    static MK_DEVICE void store(Shared& shared, Launch self, u32 consumer, Ahead ahead) {
        const Sink& sink = shared.sink;
        const u32 lane = self.agent().lane();
        Storer storer{shared, self, consumer};

        ahead();
        for (Tile whole : shared.schedule) {
            ahead();
            const Tile tile = share(whole);
            if (idle(tile, consumer)) continue;
            const Tile part = half(tile, consumer);
            Span stored(self, lane == 0, Traced::store, part);

            if constexpr (fragments)
                if (storer.unsaid && self.agent().any(sink.may_wait(self, part)))  // for peers who wait for that signal
                    while (storer.unread > 0) storer.free_oldest();
            if (!sink.begin(self, part)) fail(shared);
            if constexpr (exchanges) {
                using Results = Strip<typename Sink::Result>;
                if (lane == 0) ptx::arrive(&shared.awaited[consumer]);
                storer.look_up(sink.results(), part);
                storer.each_strip(part, columns / Results::columns, Results::columns, [&](const Piece& piece, u8* staged, u32 i) {
                    if (i == 0) stored.begin();
                    if (!storer.store_mapped(piece, staged)) sink.results().deliver(self, piece.tile(), Results{staged});
                });
            } else if constexpr (fragments) {
                using Results = Strip<typename Sink::Result>;
                const bool own = is_own(sink, self, part);
                const u64 receivers = sink.receivers(self, part);
                u8* const nearest = lane < receivers ? sink.slot(self, part, lane) : nullptr;
                if (own && lane == 0) {
                    shared.addends[consumer] = sink.addends(self, part);
                    ptx::arrive(&shared.awaited[consumer]);
                }
                if (own) storer.look_up(sink.results(), part);
                const u32 wide = own ? Results::columns : Strip<typename Sink::Partial>::columns;
                storer.each_strip(part, width(tile) / wide, wide, [&](const Piece& piece, u8* staged, u32 i) {
                    if (i == 0) stored.begin();
                    if (has_failed(shared)) self.drop();
                    for (u32 at = 0; at < Results::bytes; at += pushed_bytes) {
                        for (u64 to = lane; self.live() && to < receivers; to += self.agent().lanes())
                            ptx::store_bulk((to == lane ? nearest : sink.slot(self, part, to)) + i * Results::bytes + at,
                                            staged + at, pushed_bytes);
                        ptx::commit_stores();
                        ptx::wait_stores_read<0>();
                    }
                    if (own && !storer.store_mapped(piece, staged))
                        sink.results().deliver(self, piece.tile(), Results{staged});
                });
                while (storer.unsaid) storer.free_oldest();
                storer.sent = part, storer.unsaid = receivers > 0, storer.behind = 0;
            } else {
                if constexpr (!flexible) storer.look_up(sink, part);  // a part of any number of rows is no whole boxes
                const u32 wide = Strip<Out>::columns, across = (halves ? width(tile) : consumer_columns) / wide;
                const u32 last = u32(ceil_div(part.rows.size(), strip_rows) - 1) * across +
                                 u32(ceil_div(part.columns.size(), wide) - 1);
                storer.each_strip(part, across, wide, [&](const Piece& piece, u8* staged, u32 i) {
                    if (i == 0) stored.begin();
                    if (storer.store_mapped(piece, staged)) return;
                    if (has_failed(shared)) self.drop();
                    const Completed done = deliver(sink, self, piece.tile(), {staged});
                    if (i == last) sink.end(self, part, done);
                });
            }
        }
        while (storer.unread > 0) storer.free_oldest();  // the end of the kernel completes what is still being written
    }

    // `length` of a range, from an offset on; of no or negative size behind its end.
    static MK_DEVICE Range part_of(Range range, u32 offset, u32 length) {
        i64 begin = range.begin + offset, end = begin + length;
        return {begin, end < range.end ? end : range.end};
    }
};

// Has the maps of matrices fetched that are needed soon, if they have some.
template <class... Matrices>
MK_DEVICE void expect(const Matrices&... matrices) {
    if (threadIdx.x != 0) return;
    const Matrix* const all[] = {&matrices...};
    MK_UNROLL
    for (const Matrix* matrix : all)
        if (matrix->box_lines) ptx::prefetch_map(&matrix->map);
}

// The interface is that of host.cuh. What this engine needs beyond it:
//   schedule   the same for all blocks of a cluster: made of index / engine::cluster and count / engine::cluster.
//              `halving`: whether there may be tiles of half as many columns
//   shape.k    what the gate is asked for at a time: a multiple of 64; where rows lie apart, for all of k
//   source, b  are mapped: lines that are 16 bytes aligned, and tiles in them: boxes of 128 contiguous bytes by 64 lines,
//              or (if k is contiguous, as 32 bits must be) by all lines of Panel::box; swizzled by 128 bytes, zeros
//              beyond the edges; of tfloat32, copies round. A stack is one array of three dimensions. Rows that lie apart
//              have no map, but are 16 bytes aligned
//   sink       map(part, 64), by which the pieces of a part are stored from row first_row(part) on: boxes of 128 bytes by
//              64 rows, swizzled by 128 bytes; null where deliver() is to. Where rows are flexible deliver_strip() does, always.
//              Parts are a consumer's rows, or columns if rows are flexible; pieces 64 rows of 128 bytes, of which a warp
//              delivers what is there
//   sink       with takes_fragments<Sink>, and ranks of one node, strips of a part go to slot(launch, part, i), one behind
//              the other, of each of its receivers(launch, part); end() then tells those. Others' parts, not is_own(launch,
//              part), are strips of Fragments of Sink::Partial. To own ones consumers add those at addends(launch, part), of
//              addends(launch) peers, which are there when begin() returns (may_wait(launch, part): not at once); they become
//              Sink::Result, for which results() has map, first_row and deliver
//   sink       with exchanges_sums<Sink>, the threads that have multiplied call give() for what they have of a part, once begin()
//              has returned true, then add(), then take(). What their sums are then, made Sink::Result, goes where results()
//              has it, as above. There is no end()
// May be called again and again. The gate is asked for this block's rows only, by one warp; where they lie apart, while
// tiles before are not finished: it may not wait for those.
template <class T, bool more_follows = false, class Schedule, class Source, class Factor, class Gate, class Sink,
          class Meanwhile>
MK_DEVICE void gemm(Launch& launch, const Schedule& schedule, TileShape shape, i64 depth, Source source,
                    const Factor& b, Gate gate, Sink sink, Meanwhile meanwhile) {
    using Engine = Hopper<T, Schedule, decltype(source(Tile{})), Factor, Sink>;
    static_assert(sizeof(T) == 2 || ptx::is_tfloat32<T>, "what there are matrix instructions for");
    static_assert(sizeof(typename Engine::Shared) <= Engine::panel_bytes + Engine::strip_bytes + Engine::beside_bytes,
                  "what plans take");
    const Scratch scratch = launch.agent().scratch();
    auto& shared = *reinterpret_cast<typename Engine::Shared*>(scratch.data);
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;

    if constexpr (Engine::gathers) {  // what consumers have no use for is not to take registers from them
        keep_in_memory(launch);
        keep_in_memory(source);
        keep_in_memory(gate);
    }
    const bool produces = !Engine::gathers && warp == 0;
    if (!produces) Engine::init(shared, warp, schedule, sink, launch.live());
    if (!produces) Engine::sync();
    if (warpgroup == 0) {
        ptx::shrink_registers<producer_registers<Sink>>();
        if constexpr (!Engine::gathers)
            if (produces) Engine::produce(shared, launch, schedule, depth, shape.k, source, b, gate);
        if (warp > 0 && warp <= consumers) {
            const Launch self = launch.as(launch.agent().warp());
            if constexpr (Engine::gathers) {
                const i64 searched = warp == 1 ? depth : 0;
                typename Engine::template Scout<Source, Gate> scout(shared, launch, searched, source, gate);
                Engine::store(shared, self, warp - 1, [&] { scout.go_on(); });
            } else {
                Engine::store(shared, self, warp - 1, [] {});
            }
        }
        const Scratch rest{scratch.data + sizeof(shared), scratch.bytes - sizeof(shared)};
        if (warp == spare_warp && !meanwhile(launch.as(launch.agent().warp()), rest)) Engine::fail(shared);
        if constexpr (Engine::gathers)
            if ((warp == 0 || warp == spare_warp) && depth > 0)
                Engine::gather(shared, launch.as(launch.agent().warp()), depth, b);
        __syncwarp();
        ptx::grow_registers<launch_registers>();  // what follows is written for all threads
    } else {
        ptx::grow_registers<consumer_registers<Sink>>();
        Engine::consume(shared, launch, warpgroup - 1, depth);
        ptx::shrink_registers<launch_registers>();
    }
    Engine::sync();  // no block leaves while its neighbour may still write to it
    if (shared.failed) launch.drop();
    if (!more_follows) return;
    Engine::retire(shared);
    __syncthreads();
}

}  // namespace engine
}  // namespace mk
