// Reductions: partial sums of a tile come to a slot at whoever adds them, pushed or pulled, and are added there in one order.
#pragma once

#include "roles.cuh"
#include "sink.cuh"

namespace mk {

// Numbered slots in the segments of all ranks, and the signals that say which are filled.
class Zone {
public:
    MK_DEVICE Zone(const Peers& launch, const ZonePlan& plan) : launch_(launch), plan_(plan) {}

    MK_DEVICE Place place(i64 number) const {
        return {plan_.slots.segment, plan_.slots.offset + u64(number * plan_.slot_bytes)};
    }
    MK_DEVICE u8* slot(u64 rank, i64 number) const {
        return static_cast<u8*>(launch_.at(rank, plan_.slots)) + number * plan_.slot_bytes;
    }
    MK_DEVICE u64* signal(u64 rank, i64 number) const {
        return static_cast<u64*>(launch_.at(rank, plan_.signals)) + number;
    }

private:
    const Peers& launch_;
    const ZonePlan& plan_;
};

template <class T>
MK_DEVICE u64 bytes_of(const Tile& part) { return u64(part.rows.size() * part.columns.size()) * sizeof(T); }

// The rows of all ranks, in tiles or in parts of them. Those of other nodes' ranks have further to go.
MK_DEVICE RingTiles::Grid rows_of_all(const Launch& launch, const GemmReduceScatterPlan& plan, TileShape shape,
                                      bool far_first) {
    return {launch.rank(), launch.size(), plan.row_start, plan.n, shape, launch.node(), far_first};
}

// The parts of each rank's tiles, by number, and the places in a part: as a slot holds it, piece behind piece, each row by
// row, all without gaps. So what is delivered together lies together, and a part is one run of bytes.
class Parts {
public:
    MK_DEVICE Parts(const GemmReduceScatterPlan& plan) : plan_(&plan) {}

    // Of the rows of one rank.
    MK_DEVICE i64 count(u64 owner) const { return plan_->part_start[owner + 1] - plan_->part_start[owner]; }
    MK_DEVICE i64 within_owner(const Tile& piece) const {
        return i64(u32(piece.rows.begin) / u32(plan_->part_rows)) * across() +
               u32(piece.columns.begin) / u32(plan_->part_columns);
    }
    MK_DEVICE i64 over_all(const Tile& piece) const { return plan_->part_start[piece.source] + within_owner(piece); }

    // Of those that a rank adds.
    MK_DEVICE i64 where_added(const Tile& piece) const {
        return plan_->added_start[piece.source] + within_owner(piece);
    }
    // Of what comes to who adds it from the rank so many steps further, and of what that rank has for all others.
    MK_DEVICE i64 coming(u64 steps, const Tile& piece) const {
        return i64(steps - 1) * plan_->most_added + where_added(piece);
    }

    MK_DEVICE u32 place(const Tile& piece) const {
        const u32 rows = u32(plan_->part_rows), columns = u32(plan_->part_columns);
        const u32 row = u32(piece.rows.begin) % rows;
        const u32 left = u32(plan_->row_start[piece.source + 1] - plan_->row_start[piece.source]) -
                         (u32(piece.rows.begin) - row);
        return u32(piece.columns.begin) % columns * (left < rows ? left : rows) + row * u32(piece.columns.size());
    }

    template <class Visit>
    MK_DEVICE void each_piece(const Tile& part, Visit visit) const {
        const i64 first = part.columns.begin;
        for (Range columns : Blocks(part.columns.size(), plan_->piece_columns))
            visit(Tile{part.source, part.rows, {first + columns.begin, first + columns.end}});
    }

    // visit(piece, number) for the strips of a part, by which a slot may hold it: whole ones, all that a whole part has.
    template <class T, class Visit>
    MK_DEVICE void each_strip(const Tile& part, Visit visit) const {
        const u32 across = u32(plan_->part_columns) / Strip<T>::columns;
        u32 before = 0;
        for (Range rows : Blocks(part.rows.size(), Strip<T>::rows)) {
            u32 number = before;
            for (Range columns : Blocks(part.columns.size(), Strip<T>::columns))
                visit(Tile{part.source, within(part.rows, rows), within(part.columns, columns)}, number++);
            before += across;
        }
    }

private:
    static MK_DEVICE Range within(const Range& whole, const Range& some) {
        return {whole.begin + some.begin, whole.begin + some.end};
    }

    // In 32 bits: division of more takes registers from those who still hold sums.
    MK_DEVICE u32 across() const { return (u32(plan_->n) + u32(plan_->part_columns) - 1) / u32(plan_->part_columns); }

    const GemmReduceScatterPlan* plan_;
};

// Elements that are loaded and stored together.
template <class T, u32 width>
struct alignas(width * sizeof(T)) Elements {
    T values[width];
    MK_DEVICE static Elements& at(T* place) { return *reinterpret_cast<Elements*>(place); }
    MK_DEVICE static const Elements& at(const T* place) { return *reinterpret_cast<const Elements*>(place); }
};

// As many sums as make 16 bytes.
template <class Acc>
constexpr u32 run_width = 16 / sizeof(Acc);

// Whether sums that are staged, and what is to be loaded or stored for them in lines `pitch` apart, are whole runs.
template <class Acc, class T, class View>
MK_DEVICE bool in_runs(const Tile& piece, const View& staged, const T* place, i64 pitch) {
    constexpr u32 width = run_width<Acc>;
    return (u64(piece.columns.size()) | u64(pitch)) % width == 0 &&
           reinterpret_cast<u64>(place) % sizeof(Elements<T, width>) == 0 && staged.in_words();
}

// Stores the sums of a piece, narrowed, in lines `pitch` apart.
template <class Acc, class T, class View>
MK_DEVICE void store_sums(const Agent& agent, const Tile& piece, const View& staged, T* to, i64 pitch) {
    constexpr u32 width = run_width<Acc>;
    if (in_runs<Acc>(piece, staged, to, pitch))
        spread(agent, piece.rows.size(), piece.columns.size() / width, [&](u32 row, u32 run) {
            const auto& sums = Elements<Acc, width>::at(staged(row, run * width));
            auto& there = Elements<T, width>::at(to + row * pitch + run * width);
            Elements<T, width> result;
            MK_UNROLL
            for (u32 i = 0; i < width; ++i) result.values[i] = narrow<T>(sums.values[i]);
            there = result;
        });
    else
        spread(agent, piece.rows.size(), piece.columns.size(),
               [&](u32 row, u32 column) { to[row * pitch + column] = narrow<T>(*staged(row, column)); });
}

// Hands a part over to whoever adds it: the owner of its rows, or, for those of other nodes, its gateway, which keeps what
// it adds itself as it is. It is pushed there, or offered here, to be pulled. One zone is enough, and nothing is reset: a
// rank that has entered this call, with this digest, has no use any more for what its arena held in an earlier one, of
// whatever operator.
template <class Acc, class Partial>
class Push {
public:
    using Type = Partial;
    MK_DEVICE Push(const GemmReduceScatterPlan& plan) : plan_(&plan), parts_(plan) {}

    MK_DEVICE bool begin(Launch& launch, const Tile& part) const {
        return is_kept(launch, part) ? launch.live() : launch.await_call(launch.holder(part.source), plan_->digest);
    }

    // Where a part goes, if not kept.
    MK_DEVICE u8* slot(const Launch& launch, const Tile& part) const {
        const u64 where = plan_->pulled ? launch.rank() : launch.holder(part.source);
        return Zone(launch, plan_->offered).slot(where, number(launch, part));
    }

    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& piece, View staged) const {
        const Agent& agent = launch.agent();
        if (launch.live()) {
            if (is_kept(launch, piece)) {
                u8* slot = Zone(launch, plan_->nodes.products).slot(launch.rank(), parts_.where_added(piece));
                store_sums<Acc>(agent, piece, staged, reinterpret_cast<Acc*>(slot) + parts_.place(piece),
                                piece.columns.size());
            } else {
                Partial* to = reinterpret_cast<Partial*>(slot(launch, piece)) + parts_.place(piece);
                store_sums<Acc>(agent, piece, staged, to, piece.columns.size());
            }
        }
        return Writes().complete(agent);
    }

    MK_DEVICE void end(Launch& launch, const Tile& part, Completed sent) const {
        if (is_kept(launch, part)) {
            u64* kept = Zone(launch, plan_->nodes.products).signal(launch.rank(), parts_.where_added(part));
            return launch.raise<Scope::device>(kept, 1, sent);
        }
        u64* there = Zone(launch, plan_->offered).signal(launch.holder(part.source), number(launch, part));
        launch.raise<Scope::system>(there, 1, sent);
    }

private:
    static MK_DEVICE bool is_kept(const Launch& launch, const Tile& piece) {
        return several_nodes && launch.holder(piece.source) == launch.rank();
    }
    MK_DEVICE i64 number(const Launch& launch, const Tile& piece) const {
        const Node node = launch.node();
        const u64 adds = launch.holder(piece.source), back = node.size - (adds - node.begin);
        return parts_.coming(around(launch.rank() - node.begin, back, node.size), piece);
    }

    const GemmReduceScatterPlan* plan_;
    Parts parts_;
};

// Brings this agent's share of what peers offer to this rank, in the order in which it is added.
template <bool aligned>
MK_DEVICE bool pull_partials(Launch& launch, const GemmReduceScatterPlan& plan, Scratch scratch) {
    const Parts parts(plan);
    const Zone offered(launch, plan.offered), partials(launch, plan.partials);
    const u64 rank = launch.rank(), size = launch.size();
    const i64 bytes = plan.partials.slot_bytes;
    const TileShape part{plan.part_rows, plan.part_columns, 0};
    Courier<aligned> courier(launch, scratch);
    for (Tile own : RingTiles(rows_of_all(launch, plan, part, true), {size, size + 1}, plan.stripe, launch.member(),
                              launch.members()))
        for (u64 steps = 1; steps < size; ++steps) {
            const i64 number = parts.coming(steps, own);
            const u64 peer = launch.neighbour(steps), *signal = offered.signal(rank, number);
            launch.stand_by([&] {
                const bool is_there = launch.sees(signal, 1);
                if (!is_there) courier.go_on();
                return is_there;
            });
            if (!launch.wait(launch.agent(), signal, 1, {Awaited::partial, peer, u64(number)})) break;
            const Span span(launch, launch.agent().lane() == 0, Traced::copy, peer, u64(bytes), u64(number));
            courier.send({partials.slot(rank, number), bytes}, {offered.slot(peer, number), bytes}, 1, bytes,
                         partials.signal(rank, number));
        }
    courier.finish();
    for (u64 i = 1; i < launch.node().size; ++i)
        launch.have_read(launch.neighbour(i), launch.greeters() + launch.readers());
    return launch.live();
}

// What the other ranks of this node have handed over to this one. It is added to sums of this rank's: that of the next
// rank, and so on around the ring. A lane has `batch` loads under way.
template <class Acc, class Partial, u32 batch>
class Pushed {
public:
    MK_DEVICE Pushed(const GemmReduceScatterPlan& plan) : plan_(&plan), parts_(plan) {}

    MK_DEVICE bool await(Launch& launch, const Tile& part) const {
        const u64 rank = launch.rank(), others = count(launch);
        const Zone partials(launch, plan_->partials);
        for (u64 steps = 1; steps <= others; ++steps) {
            const i64 number = parts_.coming(steps, part);
            const Subject partial{Awaited::partial, launch.neighbour(steps), u64(number)};
            if (!launch.wait(launch.agent(), partials.signal(rank, number), 1, partial)) return false;
        }
        if (launch.agent().lane() == 0) fetch_add(launch.world().bytes_from_peers, others * bytes_of<Partial>(part));
        return launch.live();
    }

    // Ranks that have something for this one.
    static MK_DEVICE u32 count(const Launch& launch) { return u32(launch.node().size - 1); }

    // The slots of a part, that of the next rank first.
    MK_DEVICE Addends slots(const Launch& launch, const Tile& part) const {
        const u64 rank = launch.rank();
        return {Zone(launch, plan_->partials).slot(rank, parts_.where_added(part)),
                plan_->most_added * plan_->partials.slot_bytes, count(launch)};
    }

    // Lanes may have added up what others are to store.
    template <class View>
    MK_DEVICE void add(Launch& launch, const Tile& piece, View staged) const {
        const Addends all = slots(launch, piece);
        const Partial* pushed = reinterpret_cast<const Partial*>(all.first) + parts_.place(piece);
        if (in_runs<Acc>(piece, staged, pushed, piece.columns.size()))
            add<run_width<Acc>>(launch, piece, staged, pushed, all);
        else
            add<1>(launch, piece, staged, pushed, all);
    }

private:
    template <u32 width, class View>
    MK_DEVICE void add(Launch& launch, const Tile& piece, View staged, const Partial* pushed, const Addends& all) const {
        const u32 lanes = launch.agent().lanes(), peers = all.count;
        const u32 length = u32(piece.columns.size()) / width, count = u32(piece.rows.size()) * length;
        const i64 to_next = all.apart / i64(sizeof(Partial));
        for (u32 first = launch.agent().lane(); first < count; first += batch * lanes) {
            const Partial* from = pushed;
            MK_NO_UNROLL
            for (u32 peer = 0; peer < peers; ++peer, from += to_next) {
                Elements<Partial, width> terms[batch];
                MK_UNROLL
                for (u32 i = 0; i < batch; ++i)
                    if (const u32 run = first + i * lanes; run < count)
                        terms[i] = Elements<Partial, width>::at(from + run * width);
                MK_UNROLL
                for (u32 i = 0; i < batch; ++i)
                    if (const u32 run = first + i * lanes; run < count) {
                        auto& sums = Elements<Acc, width>::at(staged(run / length, run % length * width));
                        MK_UNROLL
                        for (u32 j = 0; j < width; ++j) sums.values[j] += widen(terms[i].values[j]);
                    }
            }
        }
    }

    const GemmReduceScatterPlan* plan_;
    Parts parts_;
};

// What the other nodes have sent of the rows that this rank owns: the sum over each. With that over this node they are
// added in the order of nodes.
template <class Acc, class Partial>
class OtherNodes {
public:
    MK_DEVICE OtherNodes(const GemmReduceScatterPlan& plan) : plan_(&plan), parts_(plan) {}

    MK_DEVICE bool await(Launch& launch, const Tile& part) const {
        const Network& network = *launch.world().network;
        for (u64 i = 0; i < network.gateway_count; ++i) {
            const u64 chunk = i * u64(parts_.count(launch.rank())) + u64(parts_.within_owner(part));
            const Subject sum{Awaited::network, network.gateways[i], chunk};
            if (!launch.wait(launch.agent(), &network.arrived[2 * launch.size() + chunk], 1, sum)) return false;
        }
        return launch.live();
    }

    template <class View>
    MK_DEVICE void add(Launch& launch, const Tile& piece, View staged) const {
        const u8* slot = Zone(launch, plan_->nodes.arriving).slot(launch.rank(), parts_.within_owner(piece));
        const Partial* came = reinterpret_cast<const Partial*>(slot) + parts_.place(piece);
        if (in_runs<Acc>(piece, staged, came, piece.columns.size())) add<run_width<Acc>>(launch, piece, staged, came);
        else add<1>(launch, piece, staged, came);
    }

private:
    template <u32 width, class View>
    MK_DEVICE void add(Launch& launch, const Tile& piece, View staged, const Partial* came) const {
        const Network& network = *launch.world().network;
        const u32 length = u32(piece.columns.size()) / width, own = u32(network.node);
        const i64 to_next = parts_.count(launch.rank()) * (plan_->nodes.arriving.slot_bytes / i64(sizeof(Partial)));
        spread(launch.agent(), piece.rows.size(), length, [&](u32 row, u32 run) {
            auto& sums = Elements<Acc, width>::at(staged(row, run * width));
            const Partial* from = came + (row * length + run) * width;
            Elements<Acc, width> total{};
            for (u32 node = 0; node <= network.gateway_count; ++node) {
                Elements<Acc, width> term = sums;
                if (node != own) {
                    const auto& there = Elements<Partial, width>::at(from);
                    for (u32 i = 0; i < width; ++i) term.values[i] = widen(there.values[i]);
                    from += to_next;
                }
                for (u32 i = 0; i < width; ++i) total.values[i] = node ? total.values[i] + term.values[i] : term.values[i];
            }
            sums = total;
        });
    }

    const GemmReduceScatterPlan* plan_;
    Parts parts_;
};

// Adds to an own part what the peers have for it, and then other nodes have sent; the result is stored.
template <class Acc, class Partial, class T, u32 batch>
class Sum : public Store<T> {
public:
    MK_DEVICE Sum(const GemmReduceScatterPlan& plan, Store<T> store)
        : Store<T>(store), parts_(plan), pushed_(plan), others_(plan) {}

    MK_DEVICE bool begin(Launch& launch, const Tile& part) const {
        return pushed_.await(launch, part) && (!several_nodes || others_.await(launch, part));
    }

    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& piece, View staged) const {
        const Agent& agent = launch.agent();
        if (!launch.live()) {
            this->fill(agent, piece, not_a_number<T>());
        } else {
            pushed_.add(launch, piece, staged);
            agent.sync();  // what one lane has added up another may go on with
            if (several_nodes) others_.add(launch, piece, staged), agent.sync();
            store(agent, piece, staged);
        }
        return Writes().complete(agent);
    }

    MK_DEVICE void end(Launch&, const Tile&, Completed) const {}

    MK_DEVICE u32 addends(const Launch& launch) const { return pushed_.count(launch); }
    MK_DEVICE Addends addends(const Launch& launch, const Tile& part) const { return pushed_.slots(launch, part); }

    // Peers that get the result, and where.
    MK_DEVICE u64 receivers(const Launch&) const { return 0; }
    MK_DEVICE u8* slot(const Launch&, const Tile&, u64) const { return nullptr; }

protected:
    Parts parts_;

private:
    template <class View>
    MK_DEVICE void store(const Agent& agent, const Tile& piece, View staged) const {
        const i64 rows = piece.rows.size(), columns = piece.columns.size(), step = this->to_->column_stride;
        T* to = this->place_of(piece);
        if (step == 1) store_sums<Acc>(agent, piece, staged, to, this->to_->row_stride);
        else spread(agent, columns, rows, [&](u32 column, u32 row) {
            to[row * this->to_->row_stride + column * step] = narrow<T>(*staged(row, column));
        });
    }

    Pushed<Acc, Partial, batch> pushed_;
    OtherNodes<Acc, Partial> others_;
};

// The same, and the result goes to all of this node, and to where this rank sends it from to others. They have entered this
// call, since their partial sums are in it.
template <class Acc, class Partial, class T, u32 batch>
class SumForAll : public Sum<Acc, Partial, T, batch> {
public:
    MK_DEVICE SumForAll(const GemmAllReducePlan& plan, Store<T> store)
        : Sum<Acc, Partial, T, batch>(plan.reduction, store), plan_(&plan) {}

    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& piece, View staged) const {
        const Completed stored = Sum<Acc, Partial, T, batch>::deliver(launch, piece, staged);
        if (!launch.live()) return stored;
        for (u64 i = 0; i < receivers(launch); ++i) {
            T* to = reinterpret_cast<T*>(slot(launch, piece, i)) + this->parts_.place(piece);
            store_sums<Acc>(launch.agent(), piece, staged, to, piece.columns.size());
        }
        return Writes().complete(launch.agent());
    }

    MK_DEVICE void end(Launch& launch, const Tile& part, Completed sent) const {
        const Zone sums(launch, plan_->sums);
        const i64 number = this->parts_.over_all(part);
        launch.raise_all<Scope::system>(
            receivers(launch), 1, [&](u64 i) { return sums.signal(launch.neighbour(nearest + i), number); }, sent);
    }

    MK_DEVICE u64 receivers(const Launch& launch) const { return launch.node().size - nearest; }
    MK_DEVICE u8* slot(const Launch& launch, const Tile& part, u64 i) const {
        return Zone(launch, plan_->sums).slot(launch.neighbour(nearest + i), this->parts_.over_all(part));
    }

private:
    static constexpr u64 nearest = several_nodes ? 0 : 1;  // neighbour: this rank itself, if it sends

    const GemmAllReducePlan* plan_;
};

// What becomes of finished tiles, staged as they were summed: peers' rows are handed over, own rows are added up.
template <class Acc, class Push, class Sum>
class PushOrSum {
public:
    using Type = Acc;
    MK_DEVICE PushOrSum(Push push, Sum sum) : push_(push), sum_(sum) {}

    MK_DEVICE Acc transform(Acc sum) const { return sum; }

    MK_DEVICE const TensorMap* map(const Tile&, u32) const { return nullptr; }
    MK_DEVICE i64 first_row(const Tile& piece) const { return piece.rows.begin; }

    MK_DEVICE bool begin(Launch& launch, const Tile& part) const {
        return is_own(launch, part) ? sum_.begin(launch, part) : push_.begin(launch, part);
    }
    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& piece, View staged) const {
        return is_own(launch, piece) ? sum_.deliver(launch, piece, staged) : push_.deliver(launch, piece, staged);
    }
    MK_DEVICE void end(Launch& launch, const Tile& part, Completed done) const {
        if (is_own(launch, part)) sum_.end(launch, part, done);
        else push_.end(launch, part, done);
    }

    // For engines that hand over fragments.
    using Partial = typename Push::Type;
    using Result = typename Sum::Type;
    static MK_DEVICE bool is_own(const Launch& launch, const Tile& part) { return part.source == launch.rank(); }
    MK_DEVICE bool may_wait(const Launch& launch, const Tile& part) const {
        return is_own(launch, part) || !launch.has_called(part.source);
    }
    MK_DEVICE const Store<Result>& results() const { return sum_; }
    MK_DEVICE u32 addends(const Launch& launch) const { return sum_.addends(launch); }
    MK_DEVICE Addends addends(const Launch& launch, const Tile& part) const { return sum_.addends(launch, part); }
    MK_DEVICE u64 receivers(const Launch& launch, const Tile& part) const {
        return is_own(launch, part) ? sum_.receivers(launch) : 1;
    }
    MK_DEVICE u8* slot(const Launch& launch, const Tile& part, u64 receiver) const {
        return is_own(launch, part) ? sum_.slot(launch, part, receiver) : push_.slot(launch, part);
    }

private:
    Push push_;
    Sum sum_;
};
template <class Acc, class Push, class Sum>
constexpr bool takes_fragments<PushOrSum<Acc, Push, Sum>> = true;

}  // namespace mk
