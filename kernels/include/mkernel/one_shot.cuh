// Sums of few rows, where a message more costs more than its bytes: every rank tells every other all of its product, and
// adds up what it is told. Words carry data and their own signal: generation << 32 | 32 bits. Whoever sees one of this
// generation has the bits: no fence, no second word. As signals they lie among signals, where nothing else looks like one
// of a later generation.
#pragma once

#include "roles.cuh"
#include "sink.cuh"

namespace mk {

// Where words lie at every rank: [source][row][group of columns]. A group has room for sums; what is shorter fills less.
template <class Acc>
class ToldGroups {
public:
    static constexpr u32 columns = 4;

    MK_DEVICE ToldGroups(const GemmReduceScatterPlan& plan, const Launch& launch)
        : plan_(plan), launch_(launch), across_(u32(ceil_div(plan.n, columns))) {}

    MK_DEVICE u32 rows() const { return u32(plan_.row_start[launch_.size()]); }
    MK_DEVICE u32 across() const { return across_; }

    MK_DEVICE u64* at(u64 rank, u64 source, u32 row, u32 group) const {
        const u64 index = (source * rows() + row) * across_ + group, words = columns * sizeof(Acc) / sizeof(u32);
        return static_cast<u64*>(launch_.at(rank, plan_.partials.signals)) + index * words;
    }

    // Whose product the others are added to.
    MK_DEVICE u64 owner(u32 row) const {
        u64 rank = 0;
        while (row >= u64(plan_.row_start[rank + 1])) ++rank;
        return rank;
    }

private:
    const GemmReduceScatterPlan& plan_;
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

// Tells all ranks, this one too, the sums of a tile. Those of a row's owner are told as they are, and the others' as what
// they travel as: so all ranks get the bits that its owner would get if it alone added them.
template <class Acc, class Partial>
class TellAll {
public:
    using Type = Acc;
    MK_DEVICE TellAll(const GemmReduceScatterPlan& plan) : plan_(&plan) {}

    MK_DEVICE Acc transform(Acc sum) const { return sum; }
    MK_DEVICE const TensorMap* map(const Tile&, i64) const { return nullptr; }
    MK_DEVICE i64 first_row(const Tile& piece) const { return piece.rows.begin; }

    MK_DEVICE bool begin(Launch& launch, const Tile&) const {
        for (u64 peer : RingOrder(launch.rank(), launch.size()))
            if (!launch.await_call(peer, plan_->digest)) return false;
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
                if (groups.owner(row) == launch.rank()) tell<Acc>(launch, groups, row, group, left, sums);
                else tell<Partial>(launch, groups, row, group, left, sums);
            });
        return Writes().complete(agent);
    }

    MK_DEVICE void end(Launch&, const Tile&, Completed) const {}

private:
    template <class T>
    MK_DEVICE void tell(const Launch& launch, const ToldGroups<Acc>& groups, u32 row, u32 group, u32 left,
                        const Acc* sums) const {
        Told<T, ToldGroups<Acc>::columns> told;
        MK_UNROLL
        for (u32 i = 0; i < groups.columns; ++i) told.values[i] = narrow<T>(i < left ? sums[i] : Acc(0));
        for (u64 step = 0; step < launch.size(); ++step)
            told.tell(launch, groups.at(around(launch.rank(), step, launch.size()), launch.rank(), row, group));
    }

    const GemmReduceScatterPlan* plan_;
};

// Adds up what this rank has been told: to the product of a row's owner that of the next rank, and so on around the ring.
// All agents of the role have a share.
template <class Acc, class Partial, class T>
MK_DEVICE void add_told(Launch& launch, const GemmReduceScatterPlan& plan, const Matrix& to) {
    const ToldGroups<Acc> groups(plan, launch);
    constexpr u32 columns = ToldGroups<Acc>::columns;
    const Agent& agent = launch.agent();
    const u64 rank = launch.rank(), size = launch.size(), n = u64(plan.n);
    const u32 lanes = u32(launch.members()) * agent.lanes(), count = groups.rows() * groups.across();
    bool all = launch.live();
    for (u32 index = u32(launch.member()) * agent.lanes() + agent.lane(); index < count; index += lanes) {
        const u32 row = index / groups.across(), group = index % groups.across();
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
        T* place = static_cast<T*>(to.data) + row * to.row_stride + group * columns * to.column_stride;
        MK_UNROLL
        for (u32 i = 0; i < columns; ++i)
            if (group * columns + i < n)
                place[i * to.column_stride] = all ? narrow<T>(sums.values[i]) : not_a_number<T>();
    }
    if (agent.any(!all)) return launch.drop();
    if (launch.member() == 0 && agent.lane() == 0) {
        u64 bytes = 0;  // twice the data
        for (u64 peer : RingOrder(rank, size)) {
            const u64 rows = u64(plan.row_start[peer + 1] - plan.row_start[peer]);
            bytes += 2 * (rows * sizeof(Acc) + (groups.rows() - rows) * sizeof(Partial)) * groups.across() * columns;
        }
        fetch_add(launch.world().bytes_from_peers, bytes);
    }
}

}  // namespace mk
