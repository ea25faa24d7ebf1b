// Attention on sm_90a, for bfloat16 and float16. A block is three warpgroups that meet in shared memory:
//   producer   warp 0: walks over the keys, asks the gate, and has tensor copies fill one slot of a ring after another
//              with a panel of keys or of their values; those of the next tile follow at once
//              warp 1: has a consumer's queries of the next tile loaded when it has multiplied its last ones
//   consumers  two warpgroups, each with 64 rows of a tile of queries: online softmax in registers, and the finished
//              rows, which pass through the slots that end a tile
// A consumer has the scores of the next keys multiplied while it weighs: the values of the last ones are added meanwhile.
// And consumers take turns to ask for products, so that one's weigh while the other's are multiplied.
#pragma once

#include "../attention.cuh"
#include "../ptx.cuh"
#include "ring.cuh"

namespace mk {
namespace engine {

// What is compiled in; a plan's HopperAttentionTile says the same.
//   MK_TILE_K  columns of a head, or more
//   MK_STAGES  slots of the ring: what is in use of keys, of values, and what comes next of both
#ifndef MK_TILE_K
#define MK_TILE_ROWS 128
#define MK_TILE_COLUMNS 128
#define MK_TILE_K 128
#define MK_STAGES 6
#endif

constexpr u32 consumers = 2, strip_rows = 64, line_bytes = 128;

// Registers of a thread: what one warpgroup gives up the others get, and a block waits for ever for more than it has.
constexpr u32 launch_registers = 65536 / MK_THREADS / 8 * 8;
constexpr u32 producer_registers = MK_TILE_K > 128 ? 72 : 88, consumer_registers = MK_TILE_K > 128 ? 216 : 208;

static_assert(producer_registers + consumers * consumer_registers <= (1 + consumers) * launch_registers, "registers");
static_assert(MK_THREADS == 128 * (1 + consumers), "one warpgroup loads, the others multiply");
static_assert(MK_TILE_ROWS == consumers * strip_rows, "each consumer has the rows of one matrix instruction");
static_assert(MK_STAGES >= 4, "of keys and of values two panels each");

template <class T>
class HopperAttention {
public:
    static_assert(sizeof(T) == 2, "bfloat16 or float16");
    static constexpr u32 rows = MK_TILE_ROWS, keys = MK_TILE_COLUMNS, slots = MK_STAGES;
    // Boxes of 64 columns, of which the last may have more than a head has: zeros.
    static constexpr u32 box_columns = line_bytes / sizeof(T), boxes = (MK_TILE_K + box_columns - 1) / box_columns;
    static constexpr u32 columns = boxes * box_columns;
    static constexpr u32 strip_box = strip_rows * line_bytes, panel_box = keys * line_bytes;
    static constexpr u32 strip_bytes = boxes * strip_box, panel_bytes = boxes * panel_box;
    static constexpr u32 strips_in_slot = keys / strip_rows, ends = consumers / strips_in_slot;
    static_assert(strips_in_slot * ends == consumers, "the slots that end a tile hold its rows");

    // What the queries of a tile see of a panel of keys.
    struct Order {
        i32 lines;  // the keys that any of them sees; 0: the tile needs no more, and this is no panel
        i32 first;  // those that row 0 sees; each row sees one more than the row before, but not more than there are

        MK_DEVICE i32 seen(u32 row) const {
            const i32 count = first + i32(row);
            return count < lines ? count : lines;
        }
    };

    // A consumer's rows of a tile.
    struct Strip {
        Unit unit;
        QueryTile tile;  // may have no rows
        bool more;       // false: this is none, and there are no more
    };

    // The block's dynamic shared memory. Of each pair of barriers one says that it is full, one that it is free.
    struct alignas(1024) Shared {
        u8 queries[consumers][strip_bytes];
        u8 panels[slots][panel_bytes];
        float log_sums[rows];
        Order order[slots];
        u64 loaded[slots], used[slots];
        u64 begun[consumers], ended[consumers];  // the use of a strip's queries
        Strip strips[consumers][2];              // by parity: while one is stored the next has begun
        float scale;                             // of scores, as exponents of two; never negative
        bool negate;
        bool failed;  // a gate did not open: what is delivered from now on is NaN
        u32 columns;  // of a head
    };
    static_assert(sizeof(Shared) <= consumers * strip_bytes + slots * panel_bytes + 1024, "Python asks for so much");

    static MK_DEVICE void init(Shared& shared, const RingAttentionPlan& plan, bool live) {
        each_barrier(shared, [](u64* barrier, u32 arrivals) { ptx::barrier_init(barrier, arrivals); });
        ptx::fence_barrier_init();
        const float scale = float(plan.scale * 1.4426950408889634), size = scale < 0 ? -scale : scale;
        shared.negate = scale < 0;
        shared.scale = size < smallest ? smallest : size;  // times minus infinity it is minus infinity
        shared.columns = u32(plan.tile.k);
        shared.failed = !live;
    }

    // The memory may be used again.
    static MK_DEVICE void retire(Shared& shared) {
        each_barrier(shared, [](u64* barrier, u32) { ptx::barrier_invalidate(barrier); });
    }

    static MK_DEVICE bool has_failed(const Shared& shared) { return *const_cast<const volatile bool*>(&shared.failed); }

    template <class Source, class Gate, class Leave>
    static MK_DEVICE void produce(Shared& shared, const Launch& launch, const RingAttentionPlan& plan,
                                  const Source& source, const Gate& gate, const Leave& leave) {
        const Agent warp = launch.agent().warp();
        const Mask mask(plan);
        Turn<slots> turn;
        if (ptx::elect()) ptx::acquire_map(&plan.window.map);
        auto leave_read = [&](Unit unit) {
            for (u32 slot = 0; slot < slots; ++slot)  // all that was asked for has been read
                ptx::wait(&shared.loaded[slot], slot < turn.slot ? turn.parity : turn.parity ^ 1);
            leave(warp, unit);
        };
        Unit before{};
        bool stays = false;  // in that unit, and in those without a tile before it
        keep_in_memory(before);
        for (Unit unit : Units(plan)) {
            QueryTiles own(plan, unit, launch.member(), launch.members());
            keep_in_memory(unit);
            keep_in_memory(own);
            for (QueryTile tile : own) {
                keep_in_memory(tile);
                if (stays) leave_read(before);
                stays = false;
                if (!has_failed(shared)) walk(shared, plan, mask, turn, unit, tile, warp, source, gate);
                for (u32 i = 0; i < ends; ++i) give_nothing(shared, turn);
            }
            before = unit, stays = true;
        }
        if (stays) leave_read(before);
    }

    // Gives each consumer its rows of a tile of queries, when it needs those before no more.
    static MK_DEVICE void load_queries(Shared& shared, const Launch& launch, const RingAttentionPlan& plan,
                                       const Heads& q) {
        Turn<1> tiles;
        for (Unit unit : Units(plan)) {
            QueryTiles own(plan, unit, launch.member(), launch.members());
            for (QueryTile tile : own) {
                const Boxes queries(panel_of<T>(q, unit.batch, tile.head, tile.rows.begin));
                for (u32 consumer = 0; consumer < consumers; ++consumer) {
                    const u32 first_row = consumer * strip_rows;
                    u64* const begun = &shared.begun[consumer];
                    ptx::wait(&shared.ended[consumer], tiles.parity ^ 1);
                    if (ptx::elect()) {
                        shared.strips[consumer][tiles.parity] = {unit, part_of(tile, first_row, strip_rows), true};
                        ptx::arrive_expect(begun, strip_bytes);
                        queries.template load<strip_box>(shared.queries[consumer], first_row, begun);
                    }
                    __syncwarp();
                }
                tiles.advance();
            }
        }
        for (u32 consumer = 0; consumer < consumers; ++consumer) {
            ptx::wait(&shared.ended[consumer], tiles.parity ^ 1);
            if (ptx::elect()) {
                shared.strips[consumer][tiles.parity].more = false;
                ptx::arrive(&shared.begun[consumer]);
            }
            __syncwarp();
        }
    }

    template <class Sink>
    static MK_DEVICE void consume(Shared& shared, const Launch& launch, const Sink& sink) {
        const u32 consumer = own_consumer(), warp_row = threadIdx.x / 32 % 4 * 16;
        const bool leads = threadIdx.x % 128 == 0;
        Turn<slots> turn;
        Turn<1> tiles;
        if (consumer == consumers - 1) pass_turn();
        for (;; tiles.advance()) {
            ptx::wait(&shared.begun[consumer], tiles.parity);
            const Strip& own = shared.strips[consumer][tiles.parity];
            if (!own.more) break;
            if (own.tile.rows.size() <= 0) {
                release(shared, idle(shared, turn));
                continue;
            }
            const Tile traced{launch.rank(), own.tile.rows, {own.tile.head, own.tile.head + 1}};
            Kept kept;
            Span computed(launch, leads, Traced::compute, traced);
            const Turn<slots> end = attend(shared, kept, turn);
            computed.end();
            const Span stored(launch, leads, Traced::store, traced);
            u8* const lines = shared.panels[end.slot] + consumer % strips_in_slot * strip_bytes + warp_row * line_bytes;
            float* const log_sums = shared.log_sums + consumer * strip_rows + warp_row;
            stage(shared, kept, lines, log_sums, sink);
            __syncwarp();
            const QueryTile part = part_of(own.tile, warp_row, 16);
            if (part.rows.size() > 0)
                sink.deliver(Agent::warp(), own.unit, part, Rows{lines}, log_sums, shared.columns);
            ptx::fence_shared_to_async();
            release(shared, end);
        }
    }

private:
    static constexpr float smallest = 1.17549435e-38f;

    // What a thread keeps of a tile, of two rows: sums of weighted values, relative to the highest score so far; of the
    // weights only those of its own keys.
    struct Kept {
        float sums[columns / 2];
        float highest[2], total[2];
    };
    using Scores = float[keys / 2];
    using Weights = u32[keys / 16][4];

    // Which of its two rows one of a thread's sums or scores is of, and which of 16 columns or keys.
    static MK_DEVICE constexpr u32 row_of(u32 i) { return i / 2 % 2; }
    static MK_DEVICE u32 own_consumer() { return ptx::opaque(threadIdx.x) / 128 - 1; }
    static MK_DEVICE u32 own_row(u32 which) { return threadIdx.x / 32 % 4 * 16 + which * 8 + threadIdx.x % 32 / 4; }
    static MK_DEVICE u32 column_of(u32 i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
    static MK_DEVICE float infinity() { return float_of(0x7f800000); }

    // A warp's finished rows: lines of 128 bytes, box after box, in which the 16 bytes that belong at place i are at
    // i ^ line % 8.
    struct Rows {
        u8* lines;
        MK_DEVICE T* operator()(i64 row, i64 column) const {
            const u32 line = u32(row), at = u32(column) % box_columns * u32(sizeof(T));
            return reinterpret_cast<T*>(lines + u32(column) / box_columns * strip_box + line * line_bytes +
                                        ((at / 16) ^ line % 8) * 16 + at % 16);
        }
        MK_DEVICE bool in_words() const { return true; }
    };

    template <class Visit>
    static MK_DEVICE void each_barrier(Shared& shared, Visit visit) {
        for (u32 i = 0; i < slots; ++i) {
            visit(&shared.loaded[i], 1);
            visit(&shared.used[i], consumers * 4);  // each of their warps
        }
        for (u32 consumer = 0; consumer < consumers; ++consumer) {
            visit(&shared.begun[consumer], 1);
            visit(&shared.ended[consumer], 4);
        }
    }

    static MK_DEVICE QueryTile part_of(const QueryTile& tile, u32 offset, u32 length) {
        const i64 begin = tile.rows.begin + offset, end = begin + length;
        return {tile.head, {begin, end < tile.rows.end ? end : tile.rows.end}, tile.position + offset};
    }

    // --- the producer

    // Where a panel comes from, as all threads of a warp know it, one of which loads it.
    struct Boxes {
        const TensorMap* map;
        u32 position, inner, outer;

        explicit MK_DEVICE Boxes(const mk::Panel& from)
            : map(ptx::uniform(from.map)), position(ptx::uniform(u32(from.position))),
              inner(ptx::uniform(u32(from.inner))), outer(ptx::uniform(u32(from.outer))) {}

        template <u32 box_bytes>
        MK_DEVICE void load(u8* to, u32 further, u64* barrier) const {
            MK_UNROLL
            for (u32 i = 0; i < boxes; ++i)
                ptx::load_box(to + i * box_bytes, map, barrier, i32(i * box_columns), i32(position + further),
                              i32(inner), i32(outer));
        }
    };

    // When the next slot is free, one thread says what comes there, and has it come: fill(slot).
    template <class Fill>
    static MK_DEVICE void give(Shared& shared, Turn<slots>& turn, Order order, const Fill& fill) {
        ptx::wait(&shared.used[turn.slot], turn.parity ^ 1);
        const u32 slot = ptx::uniform(turn.slot);
        if (ptx::elect()) {
            shared.order[slot] = order;
            fill(slot);
        }
        turn.advance();
    }

    template <class Source, class Gate>
    static MK_DEVICE void walk(Shared& shared, const RingAttentionPlan& plan, const Mask& mask, Turn<slots>& turn,
                               const Unit& unit, const QueryTile& tile, const Agent& warp, const Source& source,
                               const Gate& gate) {
        const i64 last = tile.position + tile.rows.size() - 1;
        for (const Run& run : Walk(plan)) {
            const Boxes from[] = {Boxes(source(unit, run, Part::keys)), Boxes(source(unit, run, Part::values))};
            // Places in a run fit into 32 bits, as a map's do.
            const i64 reach = mask.reach(tile.position, run);
            const i32 visible = i32(ptx::uniform(u32(mask.visible(last, run))));
            const i32 first = reach < visible ? i32(reach) : visible;
            i32 arrived[] = {0, 0};
#pragma unroll 1
            for (i32 begin = 0; begin < visible; begin += i32(keys)) {
                const i32 left = visible - begin, end = begin + (left < i32(keys) ? left : i32(keys));
                const Order order{end - begin, first - begin};
                MK_UNROLL
                for (u32 part = 0; part < 2; ++part) {
                    if (arrived[part] < end) {
                        arrived[part] = i32(gate(warp, unit, run, {begin, end}, Part(part)));
                        ptx::fence_global_to_async();
                    }
                    if (arrived[part] < end) {
                        if (ptx::elect()) *const_cast<volatile bool*>(&shared.failed) = true;
                        __syncwarp();  // all of them see it
                        if (Part(part) == Part::values) give_nothing(shared, turn);  // this goes with the keys
                        return;
                    }
                    give(shared, turn, order, [&](u32 slot) {
                        ptx::arrive_expect(&shared.loaded[slot], panel_bytes);
                        from[part].template load<panel_box>(shared.panels[slot], u32(begin), &shared.loaded[slot]);
                    });
                }
            }
        }
    }

    // Ends a tile, or stands for values that do not come.
    static MK_DEVICE void give_nothing(Shared& shared, Turn<slots>& turn) {
        give(shared, turn, {0, 0}, [&](u32 slot) { ptx::arrive(&shared.loaded[slot]); });
    }

    // --- consumers

    static MK_DEVICE void take_turn() { ptx::sync_warps(1 + consumers + own_consumer(), 256); }
    static MK_DEVICE void pass_turn() {
        ptx::arrive_for_warps(1 + consumers + (own_consumer() + 1) % consumers, 256);
    }

    static MK_DEVICE void release(Shared& shared, const Turn<slots>& turn) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::arrive(&shared.used[turn.slot]);
    }

    static MK_DEVICE Turn<slots> next(Turn<slots>& turn) {
        const Turn<slots> now = turn;
        turn.advance();
        return now;
    }

    // Takes all panels of a tile that ends before this consumer's rows. Returns what attend() does.
    static MK_DEVICE Turn<slots> idle(Shared& shared, Turn<slots>& turn) {
        Turn<slots> key;
        while (begin(shared, turn, key)) {
            release(shared, key);
            take_turn();
            pass_turn();
            const Turn<slots> value = next(turn);
            ptx::wait(&shared.loaded[value.slot], value.parity);
            release(shared, value);
        }
        return own_end(shared, turn, key);
    }

    // Returns the slot for this consumer's finished rows.
    static MK_DEVICE Turn<slots> attend(Shared& shared, Kept& kept, Turn<slots>& turn) {
        Weights weights;
        MK_UNROLL
        for (u32 i = 0; i < columns / 2; ++i) kept.sums[i] = 0;
        MK_UNROLL
        for (u32 which = 0; which < 2; ++which) kept.highest[which] = -infinity(), kept.total[which] = 0;
        Turn<slots> key, value;
#pragma unroll 1
        while (begin(shared, turn, key)) {
            if (!step<false>(shared, kept, weights, key, value, turn)) continue;
            bool more;
#pragma unroll 1
            while ((more = begin(shared, turn, key)))
                if (!step<true>(shared, kept, weights, key, value, turn)) break;
            if (more) continue;
            ptx::wait(&shared.loaded[value.slot], value.parity);
            ptx::multiply_fence();
            multiply_values(kept, weights, shared, value);
            ptx::multiply_commit();
            ptx::multiply_wait<0>();
            ptx::results_are_there(kept.sums);
            release(shared, value);
            break;
        }
        return own_end(shared, turn, key);
    }

    // The next keys are there; false: the tile needs no more, nor the queries, and this is the first slot of its end.
    static MK_DEVICE bool begin(Shared& shared, Turn<slots>& turn, Turn<slots>& key) {
        key = next(turn);
        ptx::wait(&shared.loaded[key.slot], key.parity);
        if (shared.order[key.slot].lines > 0) return true;
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::arrive(&shared.ended[own_consumer()]);
        return false;
    }

    // Takes the other slots that end a tile, and keeps the one that has room for this consumer's rows.
    static MK_DEVICE Turn<slots> own_end(Shared& shared, Turn<slots>& turn, Turn<slots> end) {
        MK_UNROLL
        for (u32 i = 1; i < ends; ++i) {
            Turn<slots> other = next(turn);
            ptx::wait(&shared.loaded[other.slot], other.parity);
            if (i <= own_consumer() / strips_in_slot) {
                const Turn<slots> later = other;
                other = end, end = later;
            }
            release(shared, other);
        }
        return end;
    }

    // Weighs some keys; meanwhile `adds` the values of those before. False if their own values are added already.
    template <bool adds>
    static MK_DEVICE bool step(Shared& shared, Kept& kept, Weights& weights, const Turn<slots>& key, Turn<slots>& value,
                               Turn<slots>& turn) {
        const u32 first_row = own_consumer() * strip_rows;
        const Order order = shared.order[key.slot];
        Scores scores;
        float part[2];
        // All that can be done before is: nothing is multiplied from when the other's products end until these begin.
        if (adds) ptx::wait(&shared.loaded[value.slot], value.parity);
        const u32 queries = ptx::opaque(ptx::shared_address(shared.queries[own_consumer()]));
        const u32 panel = ptx::opaque(ptx::shared_address(shared.panels[key.slot]));
        ptx::multiply_fence();
        take_turn();
        multiply_keys(scores, queries, panel);
        ptx::multiply_commit();
        if (adds) multiply_values(kept, weights, shared, value);
        ptx::multiply_commit();
        pass_turn();
        const bool masked = order.seen(first_row) < i32(keys), negative = shared.negate;
        ptx::multiply_wait<1>();
        ptx::results_are_there(scores);
        release(shared, key);
        if (negative) negate(scores);
        if (masked) mask(scores, order, first_row);
        weigh(kept, scores, part, shared.scale);
        const bool rescale = __any_sync(~0u, part[0] != 1 || part[1] != 1);  // the rarer, the more keys have been seen
        ptx::settle(kept.total[0] + kept.total[1]);
        ptx::multiply_wait<0>();
        ptx::results_are_there(kept.sums);
        if (adds) release(shared, value);
        if (rescale) {
            MK_UNROLL
            for (u32 i = 0; i < columns / 2; ++i) kept.sums[i] *= part[row_of(i)];
        }
        pack(weights, scores);

        value = next(turn);
        if (!masked) return true;
        ptx::wait(&shared.loaded[value.slot], value.parity);
        u8* values = shared.panels[value.slot];
        clear(values, order.lines);
        if (!any_special(values, order.seen(first_row), order.lines)) return true;
        add_special_values(kept, weights, values, order, first_row);
        release(shared, value);
        return false;
    }

    static MK_DEVICE void multiply_keys(Scores& scores, u32 query_address, u32 panel_address) {
        const u64 queries = ptx::operand_descriptor(query_address, 0);
        const u64 panel = ptx::operand_descriptor(panel_address, 0);
        MK_UNROLL
        for (u32 k = 0; k < MK_TILE_K; k += 16) {
            const u32 box = k / box_columns, within = k % box_columns * sizeof(T);
            ptx::multiply<T, keys, false, false>(scores, ptx::further(queries, box * strip_box + within),
                                                 ptx::further(panel, box * panel_box + within), k > 0);
        }
    }

    static MK_DEVICE void multiply_values(Kept& kept, const Weights& weights, const Shared& shared,
                                          const Turn<slots>& value) {
        const u32 address = ptx::opaque(ptx::shared_address(shared.panels[value.slot]));
        const u64 panel = ptx::operand_descriptor(address, panel_box);
        MK_UNROLL
        for (u32 i = 0; i < keys / 16; ++i)
            ptx::multiply<T, columns, true>(kept.sums, weights[i], ptx::further(panel, i * 16 * line_bytes), true);
    }

    static MK_DEVICE void negate(Scores& scores) {
        MK_UNROLL
        for (u32 i = 0; i < keys / 2; ++i) scores[i] = -scores[i];
    }

    static MK_DEVICE void mask(Scores& scores, const Order& order, u32 first_row) {
        MK_UNROLL
        for (u32 which = 0; which < 2; ++which) {
            const i32 end = order.seen(first_row + own_row(which));
            MK_UNROLL
            for (u32 i = 0; i < keys / 2; ++i)
                if (row_of(i) == which) scores[i] = i32(column_of(i)) < end ? scores[i] : -infinity();
        }
    }

    // Online softmax (Milakov and Gimelshein 2018): scores become weights relative to the highest score so far, and what
    // was summed before is to be scaled by `part`.
    static MK_DEVICE void weigh(Kept& kept, Scores& scores, float (&part)[2], float scale) {
        MK_UNROLL
        for (u32 which = 0; which < 2; ++which) {
            float highest[2] = {kept.highest[which], kept.highest[which]};
            MK_UNROLL
            for (u32 i = 0; i < keys / 2; ++i)
                if (row_of(i) == which) highest[i % 2] = fmaxf(highest[i % 2], scores[i]);
            highest[0] = fmaxf(highest[0], highest[1]);
            MK_UNROLL
            for (u32 far = 1; far < 4; far *= 2) highest[0] = fmaxf(highest[0], __shfl_xor_sync(~0u, highest[0], far));
            const float base = highest[0] == -infinity() ? 0 : highest[0] * scale;
            const bool same = highest[0] == kept.highest[which];  // a fused product is not quite its rounded self
            part[which] = same ? 1 : ptx::power_of_two(kept.highest[which] * scale - base);
            kept.highest[which] = highest[0];
            float total[2] = {kept.total[which] * part[which], 0};
            MK_UNROLL
            for (u32 i = 0; i < keys / 2; ++i)
                if (row_of(i) == which) total[i % 2] += scores[i] = ptx::power_of_two(scores[i] * scale - base);
            kept.total[which] = total[0] + total[1];
        }
    }

    static MK_DEVICE void pack(Weights& weights, const Scores& scores) {
        MK_UNROLL
        for (u32 i = 0; i < keys / 4; ++i) weights[i / 4][i % 4] = ptx::pack<T>(scores[2 * i], scores[2 * i + 1]);
    }

    // --- values that a row does not see have no influence, not even NaN

    // What lies behind those that the tile sees is of another run, or has not come: it has no influence on the bits either.
    // The other consumer may write the same.
    static MK_DEVICE void clear(u8* values, i32 line) {
        if (u32(line) * line_bytes >= panel_box) return;
#pragma unroll 1
        for (u32 box = 0; box < boxes; ++box)
#pragma unroll 1
            for (u32 at = u32(line) * line_bytes + threadIdx.x % 128 * 16; at < panel_box; at += 128 * 16)
                *reinterpret_cast<uint4*>(values + box * panel_box + at) = uint4{};
        ptx::fence_shared_to_async();
    }

    // Whether any of those of some lines is infinite or NaN.
    static MK_DEVICE bool any_special(const u8* values, i32 line, i32 end) {
        const u32 exponent = narrow<T>(infinity()).bits, lowest = exponent & (0 - exponent);
        const u32 begin = line > 0 ? u32(line) * line_bytes : 0, behind = u32(end) * line_bytes;
        bool any = false;
#pragma unroll 1
        for (u32 box = 0; box < boxes; ++box)
#pragma unroll 1
            for (u32 at = begin + threadIdx.x % 128 * 16; at < behind; at += 128 * 16) {
                const uint4 some = *reinterpret_cast<const uint4*>(values + box * panel_box + at);
                for (u32 word : {some.x, some.y, some.z, some.w})
                    any = any || ((word & exponent * 0x10001) + lowest * 0x10001) & 0x80008000;
            }
        return ptx::any_of_warps(1 + own_consumer(), 128, any);
    }
    static MK_DEVICE bool is_special(float value) { return !(value - value == 0); }

    // In a product of matrices the weight 0 does not keep them out. So they are left out, and then counted for the rows
    // that see them: what adds infinity, and what takes it away, of which NaN does both.
    static MK_DEVICE void add_special_values(Kept& kept, const Weights& weights, const u8* values, const Order& order,
                                             u32 first_row) {
        const u32 lane = threadIdx.x % 32, line = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll 1
        for (u32 block = 0; block < columns / 16; ++block)
#pragma unroll 1
            for (i32 sign = -1; sign <= 1; ++sign) {
                float sums[8] = {};
                const u32 piece = block * 2 % 8 + lane / 16;
                const u32 at = ptx::shared_address(values) + block / 4 * panel_box + line * line_bytes +
                               (piece ^ line % 8) * 16;
                MK_UNROLL
                for (u32 i = 0; i < keys / 16; ++i) {
                    u32 factor[4], some[4];
                    ptx::load_matrices<true>(some, at + i * 16 * line_bytes);
                    MK_UNROLL
                    for (u32 j = 0; j < 4; ++j) {
                        const i32 key = i32(i * 16 + column_of(2 * j)), end = order.seen(first_row + own_row(j % 2));
                        factor[j] = sign == 0 ? weights[i][j] : ptx::pack<T>(key < end, key + 1 < end);
                        some[j] = changed(some[j] & 0xffff, sign) | changed(some[j] >> 16, sign) << 16;
                    }
                    ptx::mma<T>(sums, factor, some);
                    ptx::mma<T>(sums + 4, factor, some + 2);
                }
                MK_UNROLL
                for (u32 i = 0; i < 8; ++i) {
                    const float more = sign == 0 ? sums[i] : sums[i] > 0 ? sign * infinity() : 0.0f;
                    MK_UNROLL
                    for (u32 j = 0; j < columns / 16; ++j)
                        if (j == block) kept.sums[j * 8 + i] += more;  // registers have no index
                }
            }
    }
    static MK_DEVICE u32 changed(u32 bits, i32 sign) {
        const float x = widen(T{u16(bits)});
        return narrow<T>(sign == 0 ? (is_special(x) ? 0.0f : x) : float(is_special(x) && !(x * sign < 0))).bits;
    }

    // --- the finished tile: NaN if not all that it sees has arrived

    // sum / total, rounded once: a division has branches, and of many each would wait for the one before.
    static MK_DEVICE float quotient(float sum, float total, float inverse) {
        const float about = sum * inverse, closer = fmaf(fmaf(-about, total, sum), inverse, about);
        return closer == closer ? closer : about;  // infinity stays
    }

    template <class Sink>
    static MK_DEVICE void stage(const Shared& shared, Kept& kept, u8* lines, float* log_sums, const Sink& sink) {
        const u32 lane = threadIdx.x % 32;
        const bool failed = has_failed(shared);
        float inverse[2];
        MK_UNROLL
        for (u32 which = 0; which < 2; ++which) {
            float& total = kept.total[which];
            MK_UNROLL
            for (u32 far = 1; far < 4; far *= 2) total += __shfl_xor_sync(~0u, total, far);
            if (failed) total = not_a_number<float>();
            inverse[which] = 1 / total;
            if (lane % 4 == 0)
                log_sums[which * 8 + lane / 4] = kept.highest[which] * shared.scale * 0.693147181f + logf(total);
        }
        auto finished = [&](u32 i) {
            return u32(sink.transform(quotient(kept.sums[i], kept.total[row_of(i)], inverse[row_of(i)])).bits);
        };
        auto pair = [&](u32 i) { return finished(i) | finished(i + 1) << 16; };
        const u32 line = ptx::shared_address(lines) + lane % 16 * line_bytes;
        MK_UNROLL
        for (u32 i = 0; i < columns / 16; ++i)
            ptx::store_matrices(line + i / 4 * strip_box + ((2 * i % 8 + lane / 16) ^ lane % 8) * 16, pair(8 * i),
                                pair(8 * i + 2), pair(8 * i + 4), pair(8 * i + 6));
    }
};

// The interface is that of attention_host.cuh. What this engine needs beyond it:
//   q, source  are mapped: boxes of 64 columns by a consumer's rows, or by all keys of a panel; swizzled by 128 bytes,
//              zeros beyond the edges
// The tile of the plan is that which is compiled in, but for its columns. The gate is asked in order and ahead of the
// arithmetic, by warp 0, which also leaves units.
template <class T, class Source, class Gate, class Sink, class Leave>
MK_DEVICE void attention(Launch& launch, const RingAttentionPlan& plan, const Heads& q, Source source, Gate gate,
                         Sink sink, Leave leave) {
    using Engine = HopperAttention<T>;
    auto& shared = *reinterpret_cast<typename Engine::Shared*>(launch.agent().scratch().data);
    const u32 warpgroup = threadIdx.x / 128;

    // What few threads have use for is not to take registers from sums.
    keep_in_memory(launch);
    keep_in_memory(source);
    keep_in_memory(gate);
    keep_in_memory(sink);
    keep_in_memory(leave);
    if (threadIdx.x == 0) Engine::init(shared, plan, launch.live());
    __syncthreads();
    if (warpgroup == 0) {
        ptx::shrink_registers<producer_registers>();
        const u32 warp = threadIdx.x / 32;
        if (warp == 0) Engine::produce(shared, launch, plan, source, gate, leave);
        if (warp == 1) Engine::load_queries(shared, launch, plan, q);
        __syncwarp();
    } else {
        ptx::grow_registers<consumer_registers>();
        Engine::consume(shared, launch, sink);
    }
    __syncthreads();
    // What follows is written for all threads. Where the paths have met: before, consumers would multiply with so few.
    if (warpgroup == 0) ptx::grow_registers<launch_registers>();
    else ptx::shrink_registers<launch_registers>();
    if (threadIdx.x == 0) Engine::retire(shared);
    if (shared.failed) launch.drop();
}

}  // namespace engine
}  // namespace mk
