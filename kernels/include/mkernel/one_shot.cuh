// Sums of few rows, where a message more costs more than its bytes: every rank tells its product to those who add its
// rows, their owners or all, and adds up what it is told. Words carry data and their own signal: generation << 32 | 32
// bits. Whoever sees one of this generation has the bits: no fence, no second word. As signals they lie among signals,
// where nothing else looks like one of a later generation.
#pragma once

#include "roles.cuh"
#include "sink.cuh"

namespace mk {

// Who adds which rows, and where words of them lie there: [source][row][group of columns]. A row has room for sums; what
// is shorter fills its beginning.
template <class Acc>
class ToldGroups {
public:
    static constexpr u32 columns = 4, words = columns * sizeof(Acc) / sizeof(u32);

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

    // Whose product the others are added to. Its loads do not wait for each other.
    MK_DEVICE u64 owner(i64 row) const {
        u64 rank = 0;
        for (u64 other = 1; other < launch_.size(); ++other) rank += row >= plan_.reduction.row_start[other];
        return rank;
    }

    // Who adds the rows of an owner: it alone, or all, this rank first.
    MK_DEVICE u64 receivers() const { return plan_.scattered ? 1 : launch_.size(); }
    MK_DEVICE u64 receiver(u64 owner, u64 step) const {
        return plan_.scattered ? owner : around(launch_.rank(), step, launch_.size());
    }

    // Where words of a row of a rank's product begin among those that a receiver is told; the same with all its receivers.
    MK_DEVICE u64 place(u64 receiver, u64 source, i64 row) const {
        const Range rows = added_by(receiver);
        return (source * u64(rows.size()) + u64(row - rows.begin)) * across_ * words;
    }
    MK_DEVICE u64* words_of(u64 receiver) const {
        return static_cast<u64*>(launch_.at(receiver, plan_.reduction.partials.signals));
    }

private:
    const OneShotPlan& plan_;
    const Launch& launch_;
    u32 across_;
};

// A group's values, two words at a time.
template <class T, u32 columns>
struct alignas(8) Told {
    static constexpr u32 pairs = columns * sizeof(T) / 8, words = 2 * pairs;
    T values[columns];

    // `generation`: of the words, as a target.
    MK_DEVICE void tell(u64 generation, u64* words) const {
        u64 halves[pairs];
        memcpy(halves, values, sizeof values);
        MK_UNROLL
        for (u32 i = 0; i < pairs; ++i)
            store_pair(words + 2 * i, generation | u32(halves[i]), generation | halves[i] >> 32);
    }
};

// The same on its way: what has been asked for need not have come.
template <class T, u32 columns>
class Asked {
public:
    MK_DEVICE void ask(const u64* words) {
        MK_UNROLL
        for (u32 i = 0; i < pairs; ++i) load_pair(words + 2 * i, words_[2 * i], words_[2 * i + 1]);
    }

    // Waits until all have come; false if that is in vain.
    MK_DEVICE bool hear(Launch& launch, const u64* words, Subject subject) {
        const u64 goal = launch.target(0);
        bool come = true;
        MK_UNROLL
        for (u32 i = 0; i < 2 * pairs; ++i) come = words_[i] >= goal && come;
        if (come) return true;
        launch.apart([words, subject](Launch& self) {
            for (u32 i = 0; i < 2 * pairs; ++i)
                if (!self.wait_alone(words + i, 0, subject)) return;
        });
        ask(words);
        return launch.live();
    }

    MK_DEVICE Told<T, columns> told() const {
        u64 halves[pairs];
        MK_UNROLL
        for (u32 i = 0; i < pairs; ++i) halves[i] = u32(words_[2 * i]) | words_[2 * i + 1] << 32;
        Told<T, columns> told;
        memcpy(told.values, halves, sizeof halves);
        return told;
    }

private:
    static constexpr u32 pairs = Told<T, columns>::pairs;
    u64 words_[2 * pairs];
};

// Tells the sums of a tile to all who add them, this rank too. Those of a row's owner are told as they are, and the others'
// as what they travel as: so all ranks get the bits that its owner would get if it alone added them.
template <class Acc, class Partial>
class Tell {
public:
    using Type = Acc;
    MK_DEVICE Tell(const OneShotPlan& plan) : plan_(&plan) {}

    MK_DEVICE Acc transform(Acc sum) const { return sum; }
    MK_DEVICE const TensorMap* map(const Tile&, u32) const { return nullptr; }
    MK_DEVICE i64 first_row(const Tile& piece) const { return piece.rows.begin; }

    // Who gets nothing of a tile may have ended this call.
    MK_DEVICE bool begin(Launch& launch, const Tile& part) const {
        const Groups groups(*plan_, launch);
        for (u64 peer : RingOrder(launch.rank(), launch.size()))
            if (groups.adds(peer, part.rows) && !launch.await_call(peer, plan_->reduction.digest)) return false;
        return launch.live();
    }

    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& piece, View staged) const {
        const Agent& agent = launch.agent();
        Owner owner{};
        if (launch.live())
            spread(agent, piece.rows.size(), ceil_div(piece.columns.size(), Groups::columns), [&](u32 i, u32 j) {
                const u32 left = u32(piece.columns.size()) - j * Groups::columns;
                const Acc* staged_sums = staged(i, j * Groups::columns);
                Acc sums[Groups::columns];
                MK_UNROLL
                for (u32 c = 0; c < Groups::columns; ++c) sums[c] = c < left ? staged_sums[c] : Acc(0);
                const Range columns{piece.columns.begin + j * Groups::columns, piece.columns.end};
                tell<Groups::columns>(launch, owner, piece.rows.begin + i, columns, sums);
            });
        return Writes().complete(agent);
    }

    MK_DEVICE void end(Launch&, const Tile&, Completed) const {}

    // Whose rows some are: who tells rows one after the other looks up few.
    struct Owner {
        u64 rank;
        Range rows{0, 0};
    };

    // Groups of a row, each `apart` columns from the one before; those behind the end of the columns are none.
    template <u32 apart, u32 count>
    MK_DEVICE void tell(const Launch& launch, Owner& owner, i64 row, const Range& columns, const Acc (&sums)[count]) const {
        const Groups groups(*plan_, launch);
        if (row < owner.rows.begin || row >= owner.rows.end) {
            owner.rank = groups.owner(row);
            owner.rows = groups.owned_by(owner.rank);
        }
        const bool exact = sizeof(Partial) == sizeof(Acc) || owner.rank == launch.rank();  // no code for the same twice
        if (exact) tell_as<Acc, apart>(launch, groups, owner.rank, row, columns, sums);
        else tell_as<Partial, apart>(launch, groups, owner.rank, row, columns, sums);
    }

private:
    using Groups = ToldGroups<Acc>;

    template <class T, u32 apart, u32 count>
    static MK_DEVICE void tell_as(const Launch& launch, const Groups& groups, u64 owner, i64 row, const Range& columns,
                                  const Acc (&sums)[count]) {
        constexpr u32 together = count / Groups::columns;
        const u64 generation = launch.target(0);
        const i32 left = i32(columns.size());  // may be none
        Told<T, Groups::columns> told[together];
        MK_UNROLL
        for (u32 i = 0; i < count; ++i) told[i / Groups::columns].values[i % Groups::columns] = narrow<T>(sums[i]);
        constexpr u32 words = Told<T, Groups::columns>::words;  // without gaps: links carry them together
        const u64 place = groups.place(owner, launch.rank(), row) + u32(columns.begin) / Groups::columns * words;
        MK_NO_UNROLL
        for (u64 step = 0; step < groups.receivers(); ++step) {
            u64* to = groups.words_of(groups.receiver(owner, step)) + place;
            MK_UNROLL
            for (u32 i = 0; i < together; ++i)
                if (left > i32(i * apart)) told[i].tell(generation, to + i * apart / Groups::columns * words);
        }
    }

    const OneShotPlan* plan_;
};
template <class Acc, class Partial> constexpr bool tells_sums<Tell<Acc, Partial>> = true;

// Adds up what this rank has been told: to the product of a row's owner that of the next rank, and so on around the ring.
// All agents of the role have a share. Of a group several ranks' words are on their way at once.
template <class Acc, class Partial, class T>
MK_DEVICE void add_told(Launch& launch, const OneShotPlan& plan, const Matrix& to) {
    using Groups = ToldGroups<Acc>;
    constexpr u32 columns = Groups::columns, batch = 4;
    const Groups groups(plan, launch);
    const Agent& agent = launch.agent();
    const u64 rank = launch.rank(), size = launch.size(), n = u64(plan.reduction.n);
    const Range rows = groups.added_by(rank);
    const u32 across = groups.across(), count = u32(rows.size()) * across;
    const u32 lanes = u32(launch.members()) * agent.lanes();
    const u64* words = groups.words_of(rank);
    const bool scattered = plan.scattered;
    bool all = launch.live();
    for (u32 index = u32(launch.member()) * agent.lanes() + agent.lane(); index < count; index += lanes) {
        const u32 line = index / across, group = index % across, column = group * columns;
        const u64 owner = scattered ? rank : groups.owner(rows.begin + line);
        Asked<Acc, columns> product;
        Asked<Partial, columns> terms[batch];
        auto row_of = [&](u64 source) { return words + (source * count + line * across) * Groups::words; };
        auto from = [&](u64 peer) { return row_of(peer) + group * Told<Partial, columns>::words; };
        auto peer_at = [&](u64 step) { return around(owner, step, size); };
        auto ask = [&](u64 first) {
            MK_UNROLL
            for (u32 i = 0; i < batch; ++i)
                if (first + i < size) terms[i].ask(from(peer_at(first + i)));
        };
        const u64* exact = row_of(owner) + group * Groups::words;
        product.ask(exact);
        ask(1);
        all = all && product.hear(launch, exact, {Awaited::partial, owner, index});
        Told<Acc, columns> sums = product.told();
        for (u64 first = 1; all && first < size; first += batch) {
            if (first > 1) ask(first);
            MK_UNROLL
            for (u32 i = 0; i < batch; ++i) {
                if (first + i >= size) break;
                const u64 peer = peer_at(first + i);
                all = all && terms[i].hear(launch, from(peer), {Awaited::partial, peer, index});
                const Told<Partial, columns> term = terms[i].told();
                MK_UNROLL
                for (u32 c = 0; c < columns; ++c) sums.values[c] += widen(term.values[c]);
            }
        }
        T* place = static_cast<T*>(to.data) + line * to.row_stride + column * to.column_stride;
        MK_UNROLL
        for (u32 c = 0; c < columns; ++c)
            if (column + c < n) place[c * to.column_stride] = all ? narrow<T>(sums.values[c]) : not_a_number<T>();
    }
    if (agent.any(!all)) return launch.drop();
    if (launch.member() == 0 && agent.lane() == 0) {
        u64 bytes = 0;  // twice the data
        for (u64 peer : RingOrder(rank, size)) {
            const u64 exact = plan.scattered ? 0 : u64(groups.owned_by(peer).size());
            bytes += 2 * (exact * sizeof(Acc) + (u64(rows.size()) - exact) * sizeof(Partial)) * across * columns;
        }
        fetch_add(launch.world().bytes_from_peers, bytes);
    }
}

}  // namespace mk
