// Attention over a sequence that is sharded over ranks: the order of work, what a query sees, and the window through
// which the peers' keys and values pass.
#pragma once

#include "sink.cuh"

namespace mk {

// The keys and values of one head in one batch entry, which a group of query heads shares.
struct Unit { u32 index, batch, head; };

class Units {
public:
    explicit MK_DEVICE Units(const RingAttentionPlan& plan) : plan_(plan) {}

    struct Iterator {
        u32 index;
        const RingAttentionPlan& plan;
        MK_DEVICE Unit operator*() const {
            const u32 heads = u32(plan.kv_heads);
            return {index, index / heads, index % heads};
        }
        MK_DEVICE Iterator& operator++() { return ++index, *this; }
        MK_DEVICE bool operator!=(const Iterator& other) const { return index != other.index; }
    };
    MK_DEVICE Iterator begin() const { return {0, plan_}; }
    MK_DEVICE Iterator end() const { return {u32(plan_.batches * plan_.kv_heads), plan_}; }

private:
    const RingAttentionPlan& plan_;
};

// The keys that this rank's queries see, in the order in which every query tile takes them: own ones, then those of
// rank - 1, rank - 2, ..., so that at any time all ranks read from different peers.
class Walk {
public:
    explicit MK_DEVICE Walk(const RingAttentionPlan& plan) : begin_(plan.walk), end_(plan.walk + plan.walk_runs) {}
    MK_DEVICE const Run* begin() const { return begin_; }
    MK_DEVICE const Run* end() const { return end_; }

private:
    const Run *begin_, *end_;
};

// Queries of one head that are worked on together; they never cross the border of a run.
struct QueryTile {
    i64 head;
    Range rows;    // of this rank's positions
    i64 position;  // of the first, in the sequence
};

// The query tiles of a unit, of all its heads, that are one agent's. All tiles of all units are dealt out in rounds, from
// the first agent to the last and then from the last to the first: tiles of later positions may see more keys, and agents
// are to have equal work.
class QueryTiles {
public:
    MK_DEVICE QueryTiles(const RingAttentionPlan& plan, Unit unit, u64 agent, u64 agents)
        : plan_(plan), unit_(unit), agent_(u32(agent)), agents_(u32(agents)) {
        for (u64 i = 0; i < plan.query_runs; ++i) tiles_ += u32(plan.group * blocks(plan.queries[i]));
        before_ = unit.index * tiles_;
    }

    struct Iterator {
        const QueryTiles& tiles;
        u32 round;
        MK_DEVICE QueryTile operator*() const { return tiles.at(tiles.dealt(round) - tiles.before_); }
        MK_DEVICE Iterator& operator++() { return ++round, *this; }
        MK_DEVICE bool operator!=(const Iterator&) const { return tiles.dealt(round) < tiles.before_ + tiles.tiles_; }
    };
    MK_DEVICE Iterator begin() const {
        const u32 round = before_ / agents_;
        return {*this, dealt(round) < before_ ? round + 1 : round};
    }
    MK_DEVICE Iterator end() const { return {*this, 0}; }

private:
    MK_DEVICE i64 blocks(const Run& run) const { return ceil_div(run.count, plan_.tile.rows); }
    MK_DEVICE u32 dealt(u32 round) const { return round * agents_ + (round % 2 ? agents_ - 1 - agent_ : agent_); }

    MK_DEVICE QueryTile at(i64 index) const {
        const Run* run = plan_.queries;
        i64 number = index / plan_.group;
        for (; number >= blocks(*run); ++run) number -= blocks(*run);
        const Range rows = block(number, plan_.tile.rows, run->count);
        return {unit_.head * plan_.group + index % plan_.group, {run->first + rows.begin, run->first + rows.end},
                run->position + rows.begin};
    }

    const RingAttentionPlan& plan_;
    Unit unit_;
    u32 agent_, agents_, tiles_ = 0, before_;
};

// What queries see of a run of keys: all, or those up to their own position.
class Mask {
public:
    explicit MK_DEVICE Mask(const RingAttentionPlan& plan) : causal_(plan.causal) {}

    // How many keys of a run that has no end, or (negative) how many positions before it.
    MK_DEVICE i64 reach(i64 query, const Run& keys) const {
        if (!causal_) return keys.count;
        return query - keys.position + 1;
    }

    MK_DEVICE i64 visible(i64 query, const Run& keys) const {
        const i64 count = reach(query, keys);
        return count < 0 ? 0 : count < keys.count ? count : keys.count;
    }

private:
    bool causal_;
};

enum class Part : u64 { keys = 0, values = 1 };

// Rows of keys or values, one a position; strides in elements. The first one's place in the map: position, and which
// head and batch entry, or in a window which part and slot.
struct Panel {
    void* data;
    i64 position_stride, column_stride;
    const TensorMap* map;
    i32 position, inner, outer;
};

template <class T>
MK_DEVICE Panel panel_of(const Heads& heads, i64 batch, i64 head, i64 position) {
    return {static_cast<T*>(heads.data) + batch * heads.batch_stride + head * heads.head_stride +
                position * heads.position_stride,
            heads.position_stride, heads.column_stride, &heads.map, i32(position), i32(head), i32(batch)};
}

// Movers bring units here in order, each when its slot is free; that is when every compute agent has left the unit that
// it held. No wait goes round in a circle: agents leave units in order, a gate of unit u needs nothing but chunks of u,
// and movers, which compute nothing, bring all chunks of u before they wait for room for a later unit.
template <class T>
class Window {
public:
    MK_DEVICE Window(Launch& launch, const RingAttentionPlan& plan)
        : launch_(launch), plan_(plan.window), columns_(plan.tile.k), agents_(plan.split.compute) {}

    // Waits until the slot of a unit is free. What was sent so far is completed first: others may need it to free one.
    template <bool aligned>
    MK_DEVICE bool await_room(Courier<aligned>& courier, Unit unit) {
        if (u64(unit.index) < plan_.slots) return launch_.live();
        courier.finish();
        return await_left(u64(unit.index) - plan_.slots);
    }

    // Waits until all compute agents need nothing of a unit any more: so all of it had come.
    MK_DEVICE bool await_left(u64 unit) {
        return launch_.wait_all(
            agents_, unit + 1, [&](u64 agent) { return &plan_.left[agent]; },
            [](u64 agent) { return Subject{Awaited::room, everyone, agent}; });
    }

    // The compute agent, all of it that has to do with this, needs nothing of this unit any more, nor of those before.
    MK_DEVICE void leave(const Agent& who, Unit unit) {
        who.sync();
        launch_.as(who).template raise<Scope::device>(&plan_.left[launch_.member()], u64(unit.index) + 1, Completed());
    }

    // Has this mover's share of a run of a peer brought here; each chunk of keys or of values raises its signal.
    // from(positions of the run, part, signal): Lines, whose data are null to end it all.
    template <bool aligned, class From>
    MK_DEVICE void pull(Courier<aligned>& courier, Unit unit, const Run& run, From from) {
        keep_in_memory(launch_);  // registers are for what is copied
        keep_in_memory(from);
        const i64 line = columns_ * i64(sizeof(T));
        const bool leads = launch_.agent().lane() == 0;
        each_chunk(unit, run, launch_.member(), launch_.members(), [&](Range positions, Part part, u64 index) {
            const Lines theirs = from(positions, part, index);
            if (theirs.data == nullptr) return false;
            u8* to = static_cast<u8*>(panel(unit, run, part).data) + positions.begin * line;
            const Span span(launch_, leads, Traced::copy, run.source, u64(positions.size() * line), index);
            courier.send({to, line}, theirs, positions.size(), line, &plan_.arrived[index]);
            pulled_ += u64(positions.size() * line);
            return true;
        });
    }

    // visit(positions of the run, part, signal) for one agent's share of a run's chunks, until it returns false. They are
    // dealt on from where the last run ended, so that all agents are busy however few there are at a time.
    template <class Visit>
    MK_DEVICE void each_chunk(Unit unit, const Run& run, u64 agent, u64 agents, Visit visit) {
        const u32 members = u32(agents), all = 2 * u32(ceil_div(run.count, plan_.chunk_positions));
        u32 i = (u32(agent) + members - next_) % members;
        next_ = (next_ + all) % members;
        for (; i < all; i += members) {
            const i64 chunk = i / 2;
            const Part part = i % 2 ? Part::values : Part::keys;
            if (!visit(block(chunk, plan_.chunk_positions, run.count), part, signal_of(unit, run, chunk, part))) return;
        }
    }

    // Where a rank has positions of a run.
    MK_DEVICE Lines shown(const KeysAndValues& by, Unit unit, const Run& run, Range positions, Part part) const {
        const SharedHeads& heads = part == Part::keys ? by.keys : by.values;
        return {static_cast<u8*>(launch_.at(run.source, heads.place)) + unit.batch * heads.batch_stride +
                    unit.head * heads.head_stride + (run.first + positions.begin) * heads.position_stride,
                heads.position_stride};
    }

    // The end of all pulling of this agent.
    template <bool aligned>
    MK_DEVICE void finish(Courier<aligned>& courier) {
        courier.finish();
        if (launch_.agent().lane() == 0) fetch_add(launch_.world().bytes_from_peers, pulled_);
    }

    // Where a run lands.
    MK_DEVICE Panel panel(Unit unit, const Run& run, Part part) const {
        const u64 slot = u64(unit.index) % plan_.slots;
        const i64 half = i64(slot * 2 + u64(part));
        return {static_cast<T*>(plan_.data) + (half * plan_.slot_positions + run.place) * columns_, columns_, 1,
                &plan_.map, i32(run.place), i32(part), i32(slot)};
    }

    // Waits until these positions of a run are here. Returns how many of the run are: a look takes as long as many keys do,
    // so it is at what comes behind, too. None after a failure.
    MK_DEVICE i64 wait(const Agent& who, Unit unit, const Run& run, Range positions, Part part) const {
        const u32 length = u32(plan_.chunk_positions);  // a division of 32 bits takes a fraction of the time
        const u32 first = u32(positions.begin) / length, chunks = u32(ceil_div(u32(run.count), length));
        const u64 index = signal_of(unit, run, first, part);
        const auto signal = [arrived = plan_.arrived + index](u64 chunk) { return arrived + 2 * chunk; };
        u64 here = launch_.there(who, chunks - first, 1, signal);
        for (; i64((first + here) * length) < positions.end; ++here)
            if (!launch_.wait(who, signal(here), 1, {Awaited::arrival, everyone, index + 2 * here})) break;
        return launch_.live() ? i64((first + here) * length) : 0;
    }

private:
    MK_DEVICE u64 signal_of(Unit unit, const Run& run, i64 chunk, Part part) const {
        return (u64(unit.index) * plan_.chunks + u64(run.first_chunk + chunk)) * 2 + u64(part);
    }

    Launch& launch_;
    const WindowPlan& plan_;
    i64 columns_;
    u64 agents_;
    u64 pulled_ = 0;  // bytes
    u32 next_ = 0;    // the agent that gets the first chunk of the next run
};

// Stores the rows of a query tile, and the logarithm of the sum of exponentials that each was divided by.
template <class T>
class StoreHeads {
public:
    using Type = T;
    MK_DEVICE StoreHeads(const Heads& to, const Heads& lse) : to_(to), lse_(lse) {}

    template <class Acc>
    MK_DEVICE T transform(Acc mean) const { return narrow<T>(mean); }

    // `staged`: T* of a row and a column.
    template <class Acc, class View>
    MK_DEVICE void deliver(const Agent& agent, Unit unit, const QueryTile& tile, View staged, const Acc* lse,
                           i64 columns) const {
        const Panel rows = panel_of<T>(to_, unit.batch, tile.head, tile.rows.begin);
        T* to = static_cast<T*>(rows.data);
        const i64 per_word = i64(sizeof(Word) / sizeof(T));
        const u64 shape = reinterpret_cast<u64>(to) | u64(rows.position_stride | columns) * sizeof(T);
        if (rows.column_stride == 1 && shape % sizeof(Word) == 0 && staged.in_words())
            spread(agent, tile.rows.size(), columns / per_word, [&](i64 i, i64 j) {
                *reinterpret_cast<Word*>(to + i * rows.position_stride + j * per_word) =
                    *reinterpret_cast<const Word*>(staged(i, j * per_word));
            });
        else
            spread(agent, tile.rows.size(), columns, [&](i64 i, i64 j) {
                to[i * rows.position_stride + j * rows.column_stride] = *staged(i, j);
            });
        if (lse_.data == nullptr) return;
        const Panel sums = panel_of<Acc>(lse_, unit.batch, tile.head, tile.rows.begin);
        for (i64 i = agent.lane(); i < tile.rows.size(); i += agent.lanes())
            static_cast<Acc*>(sums.data)[i * sums.position_stride] = lse[i];
    }

private:
    const Heads &to_, &lse_;
};

}  // namespace mk
