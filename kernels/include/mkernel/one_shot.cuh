// Sums of few rows, where a message more costs more than its bytes: every rank tells its product to those who add its
// rows, their owners or all, and adds up what it is told. Words carry data and their own signal: generation << 32 | 32
// bits. Whoever sees one of this generation has the bits: no fence, no second word. As signals they lie among signals,
// where nothing else looks like one of a later generation.
#pragma once

#include "roles.cuh"
#include "sink.cuh"

namespace mk {

// Who adds which rows, and where words of them lie there: [source][row][group of columns]. A group has room for sums; what
// is shorter fills less.
template <class Acc>
class ToldGroups {
public:
    static constexpr u32 columns = 4;

    MK_DEVICE ToldGroups(const OneShotPlan& plan, const Launch& launch)
        : plan_(plan), launch_(launch), across_(u32(ceil_div(plan.reduction.n, columns))) {}

    MK_DEVICE u32 across() const { return across_; }

    MK_DEVICE Range owned_by(u64 rank) const {
        return {plan_.reduction.row_start[rank], plan_.reduction.row_start[rank + 1]};
    }
    MK_DEVICE Range added_by(u64 rank) const {
        return plan_.scattered ? owned_by(rank) : Range{0, plan_.reduction.row_start[launch_.size()]};
    }

    MK_DEVICE bool adds(u64 rank, const Range& some) const {
        const Range rows = added_by(rank);
        return rows.size() > 0 && rows.begin < some.end && some.begin < rows.end;
    }

    // Whose product the others are added to.
    MK_DEVICE u64 owner(u32 row) const {
        u64 rank = 0;
        while (row >= u64(plan_.reduction.row_start[rank + 1])) ++rank;
        return rank;
    }

    // Who adds the rows of an owner: it alone, or all, this rank first.
    MK_DEVICE u64 receivers() const { return plan_.scattered ? 1 : launch_.size(); }
    MK_DEVICE u64 receiver(u64 owner, u64 step) const {
        return plan_.scattered ? owner : around(launch_.rank(), step, launch_.size());
    }

    MK_DEVICE u64* at(u64 rank, u64 source, u32 row, u32 group) const {
        const Range rows = added_by(rank);
        const u64 index = (source * u64(rows.size()) + (row - u64(rows.begin))) * across_ + group;
        return static_cast<u64*>(launch_.at(rank, plan_.reduction.partials.signals)) +
               index * (columns * sizeof(Acc) / sizeof(u32));
    }

private:
    const OneShotPlan& plan_;
    const Launch& launch_;
    u32 across_;
};

// A group's values, two words at a time.
template <class T, u32 columns>
struct alignas(8) Told {
    static constexpr u32 pairs = columns * sizeof(T) / 8;
    T values[columns];

    MK_DEVICE void tell(const Launch& launch, u64* words) const {
        u64 halves[pairs];
        memcpy(halves, values, sizeof values);
        MK_UNROLL
        for (u32 i = 0; i < pairs; ++i)
            store_pair(words + 2 * i, launch.target(u32(halves[i])), launch.target(u32(halves[i] >> 32)));
    }

    // Waits until all have come; false if that is in vain.
    MK_DEVICE bool hear(Launch& launch, const u64* words, Subject subject) {
        const u64 goal = launch.target(0);
        u64 halves[pairs];
        MK_UNROLL
        for (u32 i = 0; i < pairs; ++i) {
            u64 first, second;
            load_pair(words + 2 * i, first, second);
            if (first < goal && !launch.wait_alone(words + 2 * i, 0, subject)) return false;
            if (second < goal && !launch.wait_alone(words + 2 * i + 1, 0, subject)) return false;
            if (first < goal || second < goal) load_pair(words + 2 * i, first, second);
            halves[i] = u32(first) | second << 32;
        }
        memcpy(values, halves, sizeof values);
        return true;
    }
};

// Tells the sums of a tile to all who add them, this rank too. Those of a row's owner are told as they are, and the others'
// as what they travel as: so all ranks get the bits that its owner would get if it alone added them.
template <class Acc, class Partial>
class Tell {
public:
    using Type = Acc;
    MK_DEVICE Tell(const OneShotPlan& plan) : plan_(&plan) {}

    MK_DEVICE Acc transform(Acc sum) const { return sum; }
    MK_DEVICE const TensorMap* map(const Tile&, i64) const { return nullptr; }
    MK_DEVICE i64 first_row(const Tile& piece) const { return piece.rows.begin; }

    // Who gets nothing of a tile may have ended this call.
    MK_DEVICE bool begin(Launch& launch, const Tile& part) const {
        const ToldGroups<Acc> groups(*plan_, launch);
        for (u64 peer : RingOrder(launch.rank(), launch.size()))
            if (groups.adds(peer, part.rows) && !launch.await_call(peer, plan_->reduction.digest)) return false;
        return launch.live();
    }

    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& piece, View staged) const {
        const Agent& agent = launch.agent();
        const ToldGroups<Acc> groups(*plan_, launch);
        if (launch.live())
            spread(agent, piece.rows.size(), ceil_div(piece.columns.size(), groups.columns), [&](u32 i, u32 j) {
                const u32 row = u32(piece.rows.begin) + i, group = u32(piece.columns.begin) / groups.columns + j;
                const u32 left = u32(piece.columns.size()) - j * groups.columns;
                const Acc* sums = staged(i, j * groups.columns);
                const u64 owner = groups.owner(row);
                if (owner == launch.rank()) tell<Acc>(launch, groups, owner, row, group, left, sums);
                else tell<Partial>(launch, groups, owner, row, group, left, sums);
            });
        return Writes().complete(agent);
    }

    MK_DEVICE void end(Launch&, const Tile&, Completed) const {}

private:
    template <class T>
    MK_DEVICE void tell(const Launch& launch, const ToldGroups<Acc>& groups, u64 owner, u32 row, u32 group, u32 left,
                        const Acc* sums) const {
        Told<T, ToldGroups<Acc>::columns> told;
        MK_UNROLL
        for (u32 i = 0; i < groups.columns; ++i) told.values[i] = narrow<T>(i < left ? sums[i] : Acc(0));
        for (u64 step = 0; step < groups.receivers(); ++step)
            told.tell(launch, groups.at(groups.receiver(owner, step), launch.rank(), row, group));
    }

    const OneShotPlan* plan_;
};

// Adds up what this rank has been told: to the product of a row's owner that of the next rank, and so on around the ring.
// All agents of the role have a share.
template <class Acc, class Partial, class T>
MK_DEVICE void add_told(Launch& launch, const OneShotPlan& plan, const Matrix& to) {
    const ToldGroups<Acc> groups(plan, launch);
    constexpr u32 columns = ToldGroups<Acc>::columns;
    const Agent& agent = launch.agent();
    const u64 rank = launch.rank(), size = launch.size(), n = u64(plan.reduction.n);
    const Range rows = groups.added_by(rank);
    const u32 lanes = u32(launch.members()) * agent.lanes(), count = u32(rows.size()) * groups.across();
    bool all = launch.live();
    for (u32 index = u32(launch.member()) * agent.lanes() + agent.lane(); index < count; index += lanes) {
        const u32 line = index / groups.across(), row = u32(rows.begin) + line, group = index % groups.across();
        const u64 owner = groups.owner(row);
        Told<Acc, columns> sums;
        all = all && sums.hear(launch, groups.at(rank, owner, row, group), {Awaited::partial, owner, index});
        for (u64 step = 1; step < size; ++step) {
            const u64 peer = around(owner, step, size);
            Told<Partial, columns> terms;
            all = all && terms.hear(launch, groups.at(rank, peer, row, group), {Awaited::partial, peer, index});
            if (!all) break;
            MK_UNROLL
            for (u32 i = 0; i < columns; ++i) sums.values[i] += widen(terms.values[i]);
        }
        T* place = static_cast<T*>(to.data) + line * to.row_stride + group * columns * to.column_stride;
        MK_UNROLL
        for (u32 i = 0; i < columns; ++i)
            if (group * columns + i < n)
                place[i * to.column_stride] = all ? narrow<T>(sums.values[i]) : not_a_number<T>();
    }
    if (agent.any(!all)) return launch.drop();
    if (launch.member() == 0 && agent.lane() == 0) {
        u64 bytes = 0;  // twice the data
        for (u64 peer : RingOrder(rank, size)) {
            const u64 exact = plan.scattered ? 0 : u64(groups.owned_by(peer).size());
            bytes += 2 * (exact * sizeof(Acc) + (u64(rows.size()) - exact) * sizeof(Partial)) * groups.across() * columns;
        }
        fetch_add(launch.world().bytes_from_peers, bytes);
    }
}

}  // namespace mk
