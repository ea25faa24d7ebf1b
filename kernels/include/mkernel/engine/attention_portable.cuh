// Attention on GPUs from sm_80 on: mma.sync for bfloat16, float16 and float64, fused multiply-adds for float32. A block
// is four warps, each with some rows of a tile of queries. Panels of keys and of values go in turn through a ring in
// shared memory: all threads have asynchronous copies fill one slot while they multiply what is in others. Thread 0
// walks over the keys ahead of all: it asks the gate, and says which panel comes next.
#pragma once

#include "../attention.cuh"
#include "fragments.cuh"

namespace mk {
namespace engine {

static_assert(MK_THREADS == loaders, "all threads bring panels, and multiply");

// What is compiled in. A plan passes these macros, or none, and the tile that they say: Python sees to that.
//   MK_TILE_K  columns of a head, or more: 64, 128 or 256
//   MK_STAGES  panels in the ring, 2 or more
template <class T>
struct AttentionTiling {
#ifdef MK_TILE_K
    static constexpr u32 columns = MK_TILE_K, stages = MK_STAGES;
#else
    static constexpr u32 columns = 128, stages = 4;
#endif
    static_assert(columns == 64 || columns == 128 || columns == 256, "lines of panels are permuted");
    static_assert(stages >= 2, "one panel is used while another is fetched");

    static constexpr u32 line_bytes = columns * sizeof(T);
    static constexpr u32 keys = sizeof(T) == 2 ? 64 : line_bytes <= 512 ? 32 : 16;  // of a panel

    // What of a tile is a warp's: `down` blocks of 16 rows. Where registers do not hold all columns of the sums of so
    // many rows, `across` warps have the same rows, and each some of the columns.
    static constexpr u32 down = sizeof(T) == 2 && columns <= 128 ? 2 : 1;
    static constexpr u32 across = sizeof(T) == 8 && columns > 128 ? 4 : 1;
    static constexpr u32 warps_down = MK_THREADS / warp_size / across;
    static constexpr u32 warp_rows = 16 * down, warp_columns = columns / across;
    static constexpr u32 rows = warps_down * warp_rows;

    // Dynamic shared memory of a block: queries, the ring, and what else there is; it starts at a multiple of 1024.
    static constexpr u32 control_bytes = 2048;
    static constexpr u32 shared_bytes = rows * line_bytes + stages * keys * line_bytes + control_bytes;
#ifdef MK_TILE_ROWS
    static_assert(rows == MK_TILE_ROWS && keys == MK_TILE_COLUMNS, "the plan has the same tile");
#endif
};

template <class Block, class Acc>
MK_DEVICE Block all_of(const Acc (&values)[8]) {
    Block block;
    MK_UNROLL
    for (u32 i = 0; i < 8; ++i) block.values[i] = values[i];
    return block;
}

// How the threads of a warp go on with a block of 16 x 16 scores in the layout of Lane<T>: each has some of `rows`
// rows, shared with `sharers` lanes. Scores become exponents of two, or of e; weights become the factors of values,
// some keys at a `step`.
template <class T>
struct Scores {  // bfloat16 and float16
    using Factor = typename Lane<T>::Factor;
    static constexpr u32 rows = 2, sharers = 4, steps = 1;

    static MK_DEVICE float scale(double scale) { return float(scale * 1.4426950408889634); }
    static MK_DEVICE float power(float exponent) { return ptx::power_of_two(exponent); }
    static MK_DEVICE float log_sum(float highest, float total) { return highest * 0.693147181f + logf(total); }
    static MK_DEVICE float larger(float a, float b) { return fmaxf(a, b); }

    static MK_DEVICE constexpr u32 row(u32 score) { return score / 2 % 2; }
    static MK_DEVICE constexpr u32 first_of(u32 row) { return 2 * row; }

    // Which keys a step takes: this thread's part, and the step's.
    static MK_DEVICE u32 own_key(u32 own_k) { return own_k; }
    static MK_DEVICE constexpr u32 key(u32) { return 0; }
    using Weights = Factor;  // what is kept of a block of them
    static MK_DEVICE Weights keep(const float (&weights)[8]) {
        return {{ptx::pack<T>(weights[0], weights[1]), ptx::pack<T>(weights[2], weights[3]),
                 ptx::pack<T>(weights[4], weights[5]), ptx::pack<T>(weights[6], weights[7])}};
    }
    static MK_DEVICE Factor factor(const Weights& weights, u32) { return weights; }

    template <class Change>
    static MK_DEVICE void each(Factor& factor, Change change) {
        auto changed = [&](u32 bits) { return u32(narrow<T>(change(widen(T{u16(bits)}))).bits); };
        MK_UNROLL
        for (u32& word : factor.words) word = changed(word & 0xffff) | changed(word >> 16) << 16;
    }
};

template <>
struct Scores<double> {
    using Factor = Lane<double>::Factor;
    static constexpr u32 rows = 2, sharers = 4, steps = 4;

    static MK_DEVICE double scale(double scale) { return scale; }
    static MK_DEVICE double power(double exponent) { return exp(exponent); }
    static MK_DEVICE double log_sum(double highest, double total) { return highest + log(total); }
    static MK_DEVICE double larger(double a, double b) { return fmax(a, b); }

    static MK_DEVICE constexpr u32 row(u32 score) { return score / 4; }
    static MK_DEVICE constexpr u32 first_of(u32 row) { return 4 * row; }

    // Keys may come in any order: here a thread has the weights that its factor takes.
    static MK_DEVICE u32 own_key(u32 own_k) { return own_k * 4; }
    static MK_DEVICE constexpr u32 key(u32 step) { return step; }
    struct Weights { double values[8]; };
    static MK_DEVICE Weights keep(const double (&weights)[8]) { return all_of<Weights>(weights); }
    static MK_DEVICE Factor factor(const Weights& weights, u32 step) {
        return {{weights.values[step], weights.values[4 + step]}};
    }

    template <class Change>
    static MK_DEVICE void each(Factor& factor, Change change) {
        MK_UNROLL
        for (double& value : factor.values) value = change(value);
    }
};

template <>
struct Scores<float> {
    using Factor = Lane<float>::Factor;
    static constexpr u32 rows = 4, sharers = 8, steps = 8;

    static MK_DEVICE float scale(double scale) { return float(scale); }
    static MK_DEVICE float power(float exponent) { return expf(exponent); }
    static MK_DEVICE float log_sum(float highest, float total) { return highest + logf(total); }
    static MK_DEVICE float larger(float a, float b) { return fmaxf(a, b); }

    static MK_DEVICE constexpr u32 row(u32 score) { return score / 2; }
    static MK_DEVICE constexpr u32 first_of(u32 row) { return 2 * row; }

    static MK_DEVICE u32 own_key(u32 own_k) { return own_k; }
    static MK_DEVICE constexpr u32 key(u32 step) { return step * Lane<float>::depth; }
    // The lane that has the weights of these keys gives them to its neighbours.
    struct Weights { float values[8]; };
    static MK_DEVICE Weights keep(const float (&weights)[8]) { return all_of<Weights>(weights); }
    static MK_DEVICE Factor factor(const Weights& weights, u32 step) {
        const u32 giver = threadIdx.x % warp_size / 8 * 8 + step;
        Factor factor;
        MK_UNROLL
        for (u32 i = 0; i < 8; ++i) factor.values[i / 2][i % 2] = __shfl_sync(~0u, weights.values[i], giver);
        return factor;
    }

    template <class Change>
    static MK_DEVICE void each(Factor& factor, Change change) {
        MK_UNROLL
        for (u32 i = 0; i < 2; ++i)  // of values there are two columns
            MK_UNROLL
            for (float& value : factor.values[i]) value = change(value);
    }
};

template <class T>
class PortableAttention {
public:
    using Acc = Accumulator<T>;
    using Shape = AttentionTiling<T>;
    using Place = Lane<T>;
    using Factor = typename Place::Factor;
    using S = Scores<T>;
    // Lines are positions.
    using Queries = Panel<T, Shape::rows, Shape::columns, true>;
    using Keys = Panel<T, Shape::keys, Shape::columns, true>;
    using Values = Panel<T, Shape::columns, Shape::keys, false>;
    static constexpr u32 stages = Shape::stages, orders = 2 * stages;
    static constexpr u32 panel_bytes = Shape::keys * Shape::line_bytes;
    static constexpr u32 key_blocks = Shape::keys / 16, column_blocks = Shape::warp_columns / 16;

    // A panel to be brought and used: some keys of a run, or their values.
    struct Order {
        bool any;  // false: the tile needs no more, or a gate did not open
        Run run;
        Range positions;
        const T* from;
        i64 position_stride, column_stride;
        bool in_pieces;
    };

    // The block's dynamic shared memory; much that could be in registers is here, for them to hold sums.
    struct Shared {
        u8 queries[Shape::rows * Shape::line_bytes];  // in the end the finished tile
        u8 panels[stages][panel_bytes];
        Acc log_sums[Shape::rows];
        Order order[orders];
        Walk walk;
        Mask mask;
        Acc scale;
        u32 columns;  // of a head
        Unit unit;
        QueryTile tile;
        // Thread 0's place in the walk.
        const Run* run;
        i64 begin;
        Part part;
        i64 arrived[2];  // positions of the run, of each part
        bool failed;  // a gate did not open: what is delivered from now on is NaN
    };
    static constexpr u32 alignment = Shape::line_bytes > 1024 ? Shape::line_bytes : 1024;
    static_assert(sizeof(Shared) + alignment - 1024 <= Shape::shared_bytes, "Python asks for so much");

    static MK_DEVICE Shared& shared(Scratch scratch) {
        const u32 beyond = ptx::shared_address(scratch.data) % alignment;
        return *reinterpret_cast<Shared*>(scratch.data + (beyond ? alignment - beyond : 0));
    }

    static MK_DEVICE void init(Shared& shared, const RingAttentionPlan& plan, bool live) {
        shared.walk = Walk(plan);
        shared.mask = Mask(plan);
        shared.scale = S::scale(plan.scale);
        shared.columns = u32(plan.tile.k);
        shared.failed = !live;
    }

    // Works through a tile of queries; leaves it, and its sums of weights, in shared memory.
    template <class Source, class Gate, class Sink>
    static MK_DEVICE void work(Shared& shared, const Heads& q, const Unit& unit, const QueryTile& tile,
                               const Agent& alone, const Source& source, const Gate& gate, const Sink& sink) {
        const bool leads = threadIdx.x == 0;
        Kept kept;
        Weights weights;
        if (leads) {
            shared.unit = unit, shared.tile = tile;
            begin_run(shared, shared.walk.begin());
            shared.part = Part::keys;
            for (u32 number = 0; number + 1 < stages; ++number) give(shared, number, alone, source, gate);
        }
        __syncthreads();
        bring_queries(shared, q);
#pragma unroll 1
        for (u32 number = 0; number + 1 < stages; ++number) bring(shared, number);
        begin(kept);
#pragma unroll 1
        for (u32 number = 0;; number += 2) {
            if (leads) {
                give(shared, number + stages - 1, alone, source, gate);
                give(shared, number + stages, alone, source, gate);
            }
            if (!advance(shared, number)) break;
            meet(kept, weights, shared, number);
            if (!advance(shared, number + 1)) break;
            add(kept, weights, shared, number + 1);
        }
        ptx::wait_copies<0>();
        end(kept, shared, sink);
        __syncthreads();
    }

private:
    // What a thread keeps of a tile while it walks over the keys: sums of weighted values, relative to the highest
    // score so far; of the weights only those of its own keys.
    struct Kept {
        Acc sums[Shape::down][column_blocks][8];
        Acc highest[Shape::down][S::rows], total[Shape::down][S::rows];
    };
    using Weights = typename S::Weights[Shape::down][key_blocks];
    using Block = Acc[Shape::down][key_blocks][8];

    static MK_DEVICE u32 own_thread() { return ptx::opaque(threadIdx.x); }
    static MK_DEVICE Place own_lane() { return {own_thread() % warp_size}; }
    static MK_DEVICE u32 first_row() { return own_thread() / warp_size % Shape::warps_down * Shape::warp_rows; }
    static MK_DEVICE u32 first_column() { return own_thread() / warp_size / Shape::warps_down * Shape::warp_columns; }
    static MK_DEVICE Acc infinity() { return Acc(float_of(0x7f800000)); }

    // Thread 0 gives the next panel of the walk, once it has arrived.
    template <class Source, class Gate>
    static MK_DEVICE void give(Shared& shared, u32 number, const Agent& alone, const Source& source, const Gate& gate) {
        const i64 last = shared.tile.position + shared.tile.rows.size() - 1;
        Order& order = shared.order[number % orders];
        order.any = false;
        while (shared.run != shared.walk.end() && shared.begin >= shared.mask.visible(last, *shared.run))
            begin_run(shared, shared.run + 1);
        if (shared.run == shared.walk.end() || shared.failed) return;
        const Run& run = *shared.run;
        const Range positions = block(shared.begin / Shape::keys, Shape::keys, shared.mask.visible(last, run));
        i64& arrived = shared.arrived[u64(shared.part)];
        if (arrived < positions.end) arrived = gate(alone, shared.unit, run, positions, shared.part);
        if (arrived < positions.end) {
            shared.failed = true;
            return;
        }
        const auto panel = source(shared.unit, run, shared.part);
        const T* from = static_cast<const T*>(panel.data) + positions.begin * panel.position_stride;
        order = {true, run, positions, from, panel.position_stride, panel.column_stride,
                 in_pieces(from, panel.position_stride, panel.column_stride)};
        if (shared.part == Part::values) shared.begin = positions.end;
        shared.part = shared.part == Part::keys ? Part::values : Part::keys;
    }

    static MK_DEVICE void begin_run(Shared& shared, const Run* run) {
        shared.run = run, shared.begin = 0;
        shared.arrived[0] = shared.arrived[1] = 0;
    }

    static MK_DEVICE bool in_pieces(const T* from, i64 position_stride, i64 column_stride) {
        return column_stride == 1 && (position_stride * i64(sizeof(T)) | i64(from)) % 16 == 0;
    }

    static MK_DEVICE void bring_queries(Shared& shared, const Heads& q) {
        const QueryTile& tile = shared.tile;
        const auto rows = panel_of<T>(q, shared.unit.batch, tile.head, tile.rows.begin);
        const T* from = static_cast<const T*>(rows.data);
        Fetch<Queries>{from, rows.position_stride, rows.column_stride, u32(tile.rows.size()), shared.columns}.start(
            shared.queries, in_pieces(from, rows.position_stride, rows.column_stride));
    }

    // Starts to bring a panel, and closes a group of copies in any case: so all have the same number of them.
    static MK_DEVICE void bring(Shared& shared, u32 number) {
        const Order& order = shared.order[number % orders];
        if (order.any)
            Fetch<Keys>{order.from, order.position_stride, order.column_stride, u32(order.positions.size()),
                        shared.columns}
                .start(shared.panels[number % stages], order.in_pieces);
        ptx::commit_copies();
    }

    // The panel is there for all threads, and all have used the one before, whose slot is filled again; false: there is
    // none.
    static MK_DEVICE bool advance(Shared& shared, u32 number) {
        ptx::wait_copies<stages - 2>();
        __syncthreads();
        bring(shared, number + stages - 1);
        return shared.order[number % orders].any;
    }

    static MK_DEVICE void begin(Kept& kept) {
        MK_UNROLL
        for (u32 i = 0; i < Shape::down; ++i) {
            MK_UNROLL
            for (u32 j = 0; j < column_blocks; ++j)
                MK_UNROLL
                for (Acc& sum : kept.sums[i][j]) sum = 0;
            MK_UNROLL
            for (u32 row = 0; row < S::rows; ++row) kept.highest[i][row] = -infinity(), kept.total[i][row] = 0;
        }
    }

    // Online softmax (Milakov and Gimelshein 2018) over the keys of a panel.
    static MK_DEVICE void meet(Kept& kept, Weights& weights, const Shared& shared, u32 number) {
        Block scores = {};
        multiply_keys(scores, shared, number);
        // Whether all of this warp's queries see a whole panel.
        if (seen(shared, number, first_row()) >= i32(Shape::keys)) weigh<false>(kept, scores, shared, number);
        else weigh<true>(kept, scores, shared, number);
        MK_UNROLL
        for (u32 i = 0; i < Shape::down; ++i)
            MK_UNROLL
            for (u32 j = 0; j < key_blocks; ++j) weights[i][j] = S::keep(scores[i][j]);
    }

    // Their values, of which those that a row does not see have no influence, not even NaN.
    static MK_DEVICE void add(Kept& kept, const Weights& weights, const Shared& shared, u32 number) {
        const u8* panel = shared.panels[number % stages];
        const u32 at = ptx::shared_address(panel) +
                       Values::place_of(first_column() + own_lane().template own_outer<false, Values>(),
                                        S::own_key(own_lane().template own_k<false, Values>()));
        const i32 lines = i32(shared.order[number % orders].positions.size());
        const i32 all_see = seen(shared, number, first_row());
        if (all_see < lines && any_special(panel + all_see * Shape::line_bytes, (lines - all_see) * Shape::line_bytes))
            add_special_values(kept, weights, shared, number, at);
        else
            add_values(kept, weights, at);
    }

    // The tile as it is to be stored: NaN if not all that it sees has arrived.
    template <class Sink>
    static MK_DEVICE void end(Kept& kept, Shared& shared, const Sink& sink) {
        const Place lane = own_lane();
        const bool failed = shared.failed;
        const u32 rows = u32(shared.tile.rows.size()), columns = shared.columns;
        T* staged = reinterpret_cast<T*>(shared.queries);
        MK_UNROLL
        for (u32 i = 0; i < Shape::down; ++i)
            MK_UNROLL
            for (u32 which = 0; which < S::rows; ++which) {
                const u32 row = first_row() + i * 16 + lane.row_of(S::first_of(which));
                Acc total = kept.total[i][which];
                MK_UNROLL
                for (u32 far = 1; far < S::sharers; far *= 2) total += __shfl_xor_sync(~0u, total, far);
                if (row >= rows) continue;
                shared.log_sums[row] = failed ? not_a_number<Acc>() : S::log_sum(kept.highest[i][which], total);
                MK_UNROLL
                for (u32 j = 0; j < column_blocks; ++j)
                    MK_UNROLL
                    for (u32 sum = 0; sum < 8; ++sum) {
                        const u32 column = first_column() + j * 16 + lane.column_of(sum);
                        if (S::row(sum) == which && column < columns)
                            staged[row * columns + column] =
                                failed ? not_a_number<T>() : sink.transform(kept.sums[i][j][sum] / total);
                    }
            }
    }

    // How many keys of a panel a row of the tile sees.
    static MK_DEVICE i32 seen(const Shared& shared, u32 number, u32 row) {
        const Order& order = shared.order[number % orders];
        const i64 end = shared.mask.visible(shared.tile.position + row, order.run) - order.positions.begin;
        return end < 0 ? 0 : end < Shape::keys ? i32(end) : i32(Shape::keys);
    }

    // The scores of this warp's queries and a panel of keys.
    static MK_DEVICE void multiply_keys(Block& scores, const Shared& shared, u32 number) {
        constexpr u32 unroll = sizeof(T) == 2 ? 16 : 4;
        const Place lane = own_lane();
        const u32 queries = ptx::shared_address(shared.queries) +
                            Queries::place_of(first_row() + lane.template own_outer<true, Queries>(),
                                              lane.template own_k<true, Queries>());
        const u32 keys = ptx::shared_address(shared.panels[number % stages]) +
                         Keys::place_of(lane.template own_outer<false, Keys>(), lane.template own_k<false, Keys>());
#pragma unroll(unroll)
        for (u32 k = 0; k < Shape::columns; k += Place::depth) {
            Factor query[Shape::down];
            MK_UNROLL
            for (u32 i = 0; i < Shape::down; ++i) query[i] = Place::template load<true, Queries>(queries, i * 16, k);
            MK_UNROLL
            for (u32 j = 0; j < key_blocks; ++j) {
                const Factor key = Place::template load<false, Keys>(keys, j * 16, k);
                MK_UNROLL
                for (u32 i = 0; i < Shape::down; ++i) Place::multiply_add(scores[i][j], query[i], key);
            }
        }
    }

    // Scores become weights relative to the highest score so far, and what was summed before is scaled to that.
    template <bool masked>
    static MK_DEVICE void weigh(Kept& kept, Block& scores, const Shared& shared, u32 number) {
        const Place lane = own_lane();
        const Acc scale = shared.scale;
        MK_UNROLL
        for (u32 i = 0; i < Shape::down; ++i)
            MK_UNROLL
            for (u32 row = 0; row < S::rows; ++row) {
                const u32 own_row = first_row() + i * 16 + lane.row_of(S::first_of(row));
                const i32 end = masked ? seen(shared, number, own_row) : 0;
                Acc highest = kept.highest[i][row];
                MK_UNROLL
                for (u32 j = 0; j < key_blocks; ++j)
                    MK_UNROLL
                    for (u32 k = 0; k < 8; ++k)
                        if (S::row(k) == row) {
                            Acc& score = scores[i][j][k];
                            score *= scale;
                            if (masked && i32(j * 16 + lane.column_of(k)) >= end) score = -infinity();
                            highest = S::larger(highest, score);
                        }
                MK_UNROLL
                for (u32 far = 1; far < S::sharers; far *= 2)
                    highest = S::larger(highest, __shfl_xor_sync(~0u, highest, far));
                const Acc base = highest == -infinity() ? Acc(0) : highest;
                const Acc part = S::power(kept.highest[i][row] - base);
                kept.highest[i][row] = highest;
                Acc total = kept.total[i][row] * part;
                MK_UNROLL
                for (u32 j = 0; j < key_blocks; ++j)
                    MK_UNROLL
                    for (u32 k = 0; k < 8; ++k)
                        if (S::row(k) == row) total += scores[i][j][k] = S::power(scores[i][j][k] - base);
                kept.total[i][row] = total;
                MK_UNROLL
                for (u32 j = 0; j < column_blocks; ++j)
                    MK_UNROLL
                    for (u32 k = 0; k < 8; ++k)
                        if (S::row(k) == row) kept.sums[i][j][k] *= part;
            }
    }

    static MK_DEVICE void add_values(Kept& kept, const Weights& weights, u32 at) {
        MK_UNROLL
        for (u32 j = 0; j < key_blocks; ++j)
            MK_UNROLL
            for (u32 step = 0; step < S::steps; ++step) {
                Factor weight[Shape::down];
                MK_UNROLL
                for (u32 i = 0; i < Shape::down; ++i) weight[i] = S::factor(weights[i][j], step);
                MK_UNROLL
                for (u32 column = 0; column < column_blocks; ++column) {
                    const Factor value = Place::template load<false, Values>(at, column * 16, j * 16 + S::key(step));
                    MK_UNROLL
                    for (u32 i = 0; i < Shape::down; ++i) Place::multiply_add(kept.sums[i][column], weight[i], value);
                }
            }
    }

    // Whether any of these values is infinite or NaN.
    static MK_DEVICE bool any_special(const u8* values, u32 bytes) {
        struct alignas(16) Piece { T elements[piece<T>]; };
        bool any = false;
#pragma unroll 1
        for (u32 i = own_lane().lane * 16; i < bytes; i += warp_size * 16) {
            const Piece some = *reinterpret_cast<const Piece*>(values + i);
            MK_UNROLL
            for (T element : some.elements) any = any || is_special(widen(element));
        }
        return __any_sync(~0u, any);
    }
    static MK_DEVICE bool is_special(Acc value) { return !(value - value == 0); }

    // In a product of matrices the weight 0 does not keep them out. So they are left out, and then counted for the rows
    // that see them: what adds infinity, and what takes it away, of which NaN does both.
    static MK_DEVICE void add_special_values(Kept& kept, const Weights& weights, const Shared& shared, u32 number,
                                             u32 at) {
#pragma unroll 1
        for (u32 column = 0; column < column_blocks; ++column)
#pragma unroll 1
            for (i32 sign = -1; sign <= 1; ++sign)
                MK_UNROLL
                for (u32 i = 0; i < Shape::down; ++i) {
                    Acc sums[8] = {};
                    MK_UNROLL
                    for (u32 j = 0; j < key_blocks; ++j) {
                        Acc seen[8];
                        MK_UNROLL
                        for (u32 k = 0; k < 8; ++k) seen[k] = sees(shared, number, i, j, k);
                        const typename S::Weights factors = sign == 0 ? weights[i][j] : S::keep(seen);
                        MK_UNROLL
                        for (u32 step = 0; step < S::steps; ++step) {
                            Factor value =
                                Place::template load<false, Values>(at, column * 16, j * 16 + S::key(step));
                            S::each(value, [&](Acc x) {
                                return sign == 0 ? (is_special(x) ? Acc(0) : x) : Acc(is_special(x) && !(x * sign < 0));
                            });
                            Place::multiply_add(sums, S::factor(factors, step), value);
                        }
                    }
                    MK_UNROLL
                    for (u32 k = 0; k < 8; ++k) {
                        const Acc more = sign == 0 ? sums[k] : sums[k] > 0 ? sign * infinity() : Acc(0);
                        MK_UNROLL
                        for (u32 j = 0; j < column_blocks; ++j)
                            if (j == column) kept.sums[i][j][k] += more;  // registers have no index
                    }
                }
    }

    static MK_DEVICE bool sees(const Shared& shared, u32 number, u32 i, u32 j, u32 score) {
        const Place lane = own_lane();
        return i32(j * 16 + lane.column_of(score)) < seen(shared, number, first_row() + i * 16 + lane.row_of(score));
    }
};

// The interface is that of attention_host.cuh. The tile of the plan is that of AttentionTiling, but for its columns.
// The gate is asked in order and ahead of the arithmetic, by thread 0.
template <class T, class Source, class Gate, class Sink, class Leave>
MK_DEVICE void attention(Launch& launch, const RingAttentionPlan& plan, const Heads& q, Source source, Gate gate,
                         Sink sink, Leave leave) {
    using Engine = PortableAttention<T>;
    auto& shared = Engine::shared(launch.agent().scratch());
    const bool leads = threadIdx.x == 0;

    // What few threads have use for is not to take registers from sums.
    keep_in_memory(launch);
    keep_in_memory(source);
    keep_in_memory(gate);
    keep_in_memory(sink);
    keep_in_memory(leave);
    if (leads) Engine::init(shared, plan, launch.live());
    __syncthreads();
    for (Unit unit : Units(plan)) {
        QueryTiles tiles(plan, unit, launch.member(), launch.members());
        keep_in_memory(unit);
        keep_in_memory(tiles);
        for (QueryTile tile : tiles) {
            keep_in_memory(tile);
            const Tile traced{launch.rank(), tile.rows, {tile.head, tile.head + 1}};
            Span computed(launch, leads, Traced::compute, traced);
            Engine::work(shared, q, unit, tile, launch.agent().alone(), source, gate, sink);
            computed.end();
            const Span stored(launch, leads, Traced::store, traced);
            sink.deliver(launch.agent(), unit, tile, Staged<T>{reinterpret_cast<T*>(shared.queries), plan.tile.k},
                         shared.log_sums, plan.tile.k);
            __syncthreads();  // the staged tile is stored
        }
        leave(launch.agent(), unit);
    }
    if (shared.failed) launch.drop();
}

}  // namespace engine
}  // namespace mk
