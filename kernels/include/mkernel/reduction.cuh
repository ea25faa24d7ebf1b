// Reductions: partial sums of a tile are pushed to a slot at whoever owns its rows, and added there in one order.
#pragma once

#include "roles.cuh"
#include "sink.cuh"

namespace mk {

// Numbered slots in the segments of all ranks, and the signals that say which are filled.
class Zone {
public:
    MK_DEVICE Zone(const Peers& launch, const ZonePlan& plan) : launch_(launch), plan_(plan) {}

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

// The parts of each rank's tiles, by number, and the places in a part.
class PartNumbers {
public:
    MK_DEVICE PartNumbers(const GemmReduceScatterPlan& plan) : plan_(&plan) {}

    MK_DEVICE i64 count(u64 owner) const {
        return ceil_div(plan_->row_start[owner + 1] - plan_->row_start[owner], plan_->part_rows) * across();
    }
    MK_DEVICE i64 within_owner(const Tile& piece) const {
        return piece.rows.begin / plan_->part_rows * across() + piece.columns.begin / columns();
    }
    MK_DEVICE i64 over_all(const Tile& piece) const {
        i64 before = 0;
        for (u64 owner = 0; owner < piece.source; ++owner) before += count(owner);
        return before + within_owner(piece);
    }

    // Slots hold parts row by row, without gaps.
    MK_DEVICE i64 columns() const { return plan_->part_columns; }
    MK_DEVICE i64 place(const Tile& piece) const {
        return piece.rows.begin % plan_->part_rows * columns() + piece.columns.begin % columns();
    }

private:
    MK_DEVICE i64 across() const { return ceil_div(plan_->n, columns()); }
    const GemmReduceScatterPlan* plan_;
};

// Where a rank's rows are added within this node: by itself, or by its gateway, which then sends the sum.
class Adders {
public:
    MK_DEVICE Adders(const Launch& launch, const GemmReduceScatterPlan& plan)
        : launch_(launch), nodes_(plan.nodes), parts_(plan) {}

    // In the zone of who adds: the slot of a part that comes from `distance` steps further around the ring of the node; for
    // own rows, also of one that comes from another node.
    MK_DEVICE i64 slot(const Tile& piece, u64 distance) const {
        const i64 first = several_nodes ? nodes_->first_slot[piece.source] : 0;
        return first + i64(distance - 1) * parts_.count(piece.source) + parts_.within_owner(piece);
    }
    MK_DEVICE u64 peers() const { return launch_.node().size - 1; }
    MK_DEVICE u64 nodes(const Tile& piece) const {
        return several_nodes && piece.source == launch_.rank() ? launch_.world().network->gateway_count : 0;
    }
    // The chunk in which another node sends its sum of a part of own rows.
    MK_DEVICE u64 chunk(const Tile& piece, u64 node) const {
        return nodes_->first_chunk + node * u64(parts_.count(piece.source)) + u64(parts_.within_owner(piece));
    }

private:
    const Launch& launch_;
    const NodeSumsPlan* nodes_;
    PartNumbers parts_;
};

// Pushes a part to its owner, or to whom adds it in this node. One zone is enough, and nothing is reset: an owner that has entered this call, with this
// digest, has no use any more for what its arena held in an earlier one, of whatever operator.
template <class T>
class Push {
public:
    using Type = T;
    MK_DEVICE Push(const GemmReduceScatterPlan& plan) : plan_(&plan), parts_(plan) {}

    template <class Acc>
    MK_DEVICE T transform(Acc sum) const { return narrow<T>(sum); }

    MK_DEVICE const TensorMap* map(const Tile&, i64) const { return nullptr; }
    MK_DEVICE i64 first_row(const Tile& piece) const { return piece.rows.begin; }

    MK_DEVICE bool begin(Launch& launch, const Tile& part) const {
        return launch.await_call(launch.holder(part.source), plan_->digest);
    }

    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& piece, View staged) const {
        if (!launch.live()) return Writes().complete(launch.agent());
        const Zone partials(launch, plan_->partials);
        T* slot = reinterpret_cast<T*>(partials.slot(launch.holder(piece.source), number(launch, piece)));
        const Lines to{reinterpret_cast<u8*>(slot + parts_.place(piece)), parts_.columns() * i64(sizeof(T))};
        return staged.send(launch.agent(), to, piece.rows.size(), piece.columns.size());
    }

    MK_DEVICE void end(Launch& launch, const Tile& part, Completed sent) const {
        u64* pushed = Zone(launch, plan_->partials).signal(launch.holder(part.source), number(launch, part));
        launch.raise<Scope::system>(pushed, 1, sent);
    }

private:
    MK_DEVICE i64 number(const Launch& launch, const Tile& piece) const {
        const u64 size = launch.node().size;
        return Adders(launch, *plan_).slot(piece, (launch.rank() + size - launch.holder(piece.source)) % size);
    }

    const GemmReduceScatterPlan* plan_;
    PartNumbers parts_;
};

// Adds what the peers have pushed to a part: to this rank's sums those of the next rank, and so on around the ring; to own
// rows, then those of the other nodes. The result is stored.
template <class T, class Acc, class Partial>
class Sum : public Store<T> {
public:
    using Type = Acc;
    MK_DEVICE Sum(const GemmReduceScatterPlan& plan, Store<T> store) : Store<T>(store), parts_(plan), plan_(&plan) {}

    MK_DEVICE Acc transform(Acc sum) const { return sum; }

    MK_DEVICE const TensorMap* map(const Tile&, i64) const { return nullptr; }

    MK_DEVICE bool begin(Launch& launch, const Tile& part) const {
        const Adders adders(launch, *plan_);
        const Zone partials(launch, plan_->partials);
        for (u64 step = 1; step <= adders.peers(); ++step) {
            const Subject partial{Awaited::partial, launch.neighbour(step), u64(parts_.within_owner(part))};
            if (!launch.wait(launch.agent(), partials.signal(launch.rank(), adders.slot(part, step)), 1, partial))
                return false;
        }
        for (u64 node = 0; node < adders.nodes(part); ++node) {
            const u64 chunk = adders.chunk(part, node);
            const u64* arrived = &launch.world().network->arrived[2 * launch.size() + chunk];
            if (!launch.wait(launch.agent(), arrived, 1, {Awaited::network, everyone, chunk})) return false;
        }
        if (launch.agent().lane() == 0)
            fetch_add(launch.world().bytes_from_peers, adders.peers() * bytes_of<Partial>(part));
        return launch.live();
    }

    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& piece, View staged) const {
        return add(launch, piece, staged, Nothing());
    }

    MK_DEVICE void end(Launch&, const Tile&, Completed) const {}

protected:
    // Elements that are added together.
    template <class Element, u32 width>
    struct alignas(width * sizeof(Element)) Run {
        Element values[width];
        MK_DEVICE static const Run& at(const Element* from) { return *reinterpret_cast<const Run*>(from); }
        MK_DEVICE void store(Element* to) const { *reinterpret_cast<Run*>(to) = *this; }
    };

    // also(row, column, run) with every run of the result besides.
    template <class View, class Also>
    MK_DEVICE Completed add(Launch& launch, const Tile& piece, View staged, Also also) const {
        const Agent& agent = launch.agent();
        constexpr u32 width = 16 / sizeof(Acc);
        const i64 place = parts_.place(piece);
        if (!launch.live()) this->fill(agent, piece, not_a_number<T>());
        else if ((piece.columns.size() | place | parts_.columns()) % width == 0 && staged.in_words())
            add_runs<width>(launch, piece, staged, also);
        else
            add_runs<1>(launch, piece, staged, also);
        return Writes().complete(agent);
    }

    PartNumbers parts_;

private:
    static constexpr u32 batch = 2;  // runs of a lane that are loaded together

    struct Nothing {
        template <class Any>
        MK_DEVICE void operator()(i64, i64, const Any&) const {}
    };

    // A lane's runs, from `first` on and `step` apart, out of `count` that make lines of `length`.
    template <u32 width>
    struct Batch {
        u32 first, step, count, length;

        template <class Visit>
        MK_DEVICE void visit(Visit visit) const {
            MK_UNROLL
            for (u32 i = 0; i < batch; ++i)
                if (const u32 run = first + i * step; run < count) visit(i, run / length, run % length * width);
        }
    };

    template <u32 width, class View, class Also>
    MK_DEVICE void add_runs(Launch& launch, const Tile& piece, View staged, Also also) const {
        const u32 lane = launch.agent().lane(), lanes = launch.agent().lanes();
        const u32 length = u32(piece.columns.size()) / width, count = u32(piece.rows.size()) * length;
        const Adders adders(launch, *plan_);
        const u32 peers = u32(adders.peers() + adders.nodes(piece)), pitch = u32(parts_.columns());
        const i64 to_next = parts_.count(piece.source) * plan_->partials.slot_bytes;
        const u8* first = Zone(launch, plan_->partials).slot(launch.rank(), adders.slot(piece, 1)) +
                          parts_.place(piece) * i64(sizeof(Partial));

        for (u32 at = lane; at < count; at += batch * lanes) {
            Run<Acc, width> sums[batch];
            const Batch<width> each{at, lanes, count, length};
            each.visit([&](u32 i, u32 row, u32 column) { sums[i] = Run<Acc, width>::at(staged(row, column)); });
            const u8* from = first;
            MK_NO_UNROLL
            for (u32 peer = 0; peer < peers; ++peer, from += to_next) {
                Run<Partial, width> terms[batch];
                each.visit([&](u32 i, u32 row, u32 column) {
                    terms[i] = Run<Partial, width>::at(reinterpret_cast<const Partial*>(from) + row * pitch + column);
                });
                each.visit([&](u32 i, u32, u32) {
                    MK_UNROLL
                    for (u32 j = 0; j < width; ++j) sums[i].values[j] += widen(terms[i].values[j]);
                });
            }
            each.visit([&](u32 i, u32 row, u32 column) {
                Run<T, width> result;
                MK_UNROLL
                for (u32 j = 0; j < width; ++j) result.values[j] = narrow<T>(sums[i].values[j]);
                this->store_run(piece, row, column, result);
                also(row, column, result);
            });
        }
    }

    template <u32 width>
    MK_DEVICE void store_run(const Tile& piece, u32 row, u32 column, const Run<T, width>& run) const {
        const i64 step = this->to_->column_stride;
        T* to = this->place_of(piece) + row * this->to_->row_stride + column * step;
        if (step == 1 && reinterpret_cast<u64>(to) % sizeof(run) == 0) run.store(to);
        else
            for (u32 j = 0; j < width; ++j) to[j * step] = run.values[j];
    }

    const GemmReduceScatterPlan* plan_;
};

// The same, and the result goes to all. They have entered this call, since their partial sums are in it.
template <class T, class Acc, class Partial>
class SumForAll : public Sum<T, Acc, Partial> {
public:
    MK_DEVICE SumForAll(const GemmAllReducePlan& plan, Store<T> store)
        : Sum<T, Acc, Partial>(plan.reduction, store), plan_(&plan) {}

    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& piece, View staged) const {
        const HandOut to_all{launch, Zone(launch, plan_->sums), this->parts_.over_all(piece), this->parts_.place(piece),
                             this->parts_.columns()};
        return this->add(launch, piece, staged, to_all);
    }

    MK_DEVICE void end(Launch& launch, const Tile& part, Completed sent) const {
        const Zone sums(launch, plan_->sums);
        for (u64 i = 1; i < launch.node().size; ++i)
            launch.raise<Scope::system>(sums.signal(launch.neighbour(i), this->parts_.over_all(part)), 1, sent);
    }

protected:
    const GemmAllReducePlan* plan_;

private:
    // Stores a run of a part's sums at every peer of this node; where there are others, also here, from where it is sent.
    struct HandOut {
        const Launch& launch;
        Zone sums;
        i64 number, place, pitch;

        template <class Run>
        MK_DEVICE void operator()(i64 row, i64 column, const Run& run) const {
            for (u64 i = several_nodes ? 0 : 1; i < launch.node().size; ++i)
                run.store(reinterpret_cast<T*>(sums.slot(launch.neighbour(i), number)) + place + row * pitch + column);
        }
    };
};

// The sums that the peers have pushed here.
template <class T>
class Sums {
public:
    MK_DEVICE Sums(const GemmAllReducePlan& plan) : plan_(&plan), parts_(plan.reduction) {}

    // Waits for a part of a peer's and stores it.
    MK_DEVICE void collect(Launch& launch, const Tile& part, const Store<T>& store) const {
        const Agent& agent = launch.agent();
        const Zone sums(launch, plan_->sums);
        const i64 number = parts_.over_all(part);
        const Subject sum{Awaited::sum, part.source, u64(number)};
        if (!launch.wait(agent, sums.signal(launch.rank(), number), 1, sum))
            return store.fill(agent, part, not_a_number<T>());
        const T* landed = reinterpret_cast<const T*>(sums.slot(launch.rank(), number));
        store.deliver(launch, part, Staged<T>{landed, parts_.columns()});
        if (agent.lane() == 0) fetch_add(launch.world().bytes_from_peers, bytes_of<T>(part));
    }

private:
    const GemmAllReducePlan* plan_;
    PartNumbers parts_;
};

}  // namespace mk
