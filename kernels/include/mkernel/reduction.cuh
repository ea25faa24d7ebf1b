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

// The tiles of each rank's rows, by number.
class TileNumbers {
public:
    MK_DEVICE TileNumbers(const GemmReduceScatterPlan& plan) : plan_(plan) {}

    MK_DEVICE i64 count(u64 owner) const {
        return ceil_div(plan_.row_start[owner + 1] - plan_.row_start[owner], plan_.tile.rows) * across();
    }
    MK_DEVICE i64 within_owner(const Tile& tile) const {
        return tile.rows.begin / plan_.tile.rows * across() + tile.columns.begin / plan_.tile.columns;
    }
    MK_DEVICE i64 over_all(const Tile& tile) const {
        i64 before = 0;
        for (u64 owner = 0; owner < tile.source; ++owner) before += count(owner);
        return before + within_owner(tile);
    }

private:
    MK_DEVICE i64 across() const { return ceil_div(plan_.n, plan_.tile.columns); }
    const GemmReduceScatterPlan& plan_;
};

// Pushes a tile to its owner. One zone is enough, and nothing is reset: an owner that has entered this call, with this
// digest, has no use any more for what its arena held in an earlier one, of whatever operator.
template <class T>
class Push {
public:
    using Type = T;
    MK_DEVICE Push(Launch& launch, const GemmReduceScatterPlan& plan)
        : launch_(launch), plan_(plan), zone_(launch, plan.partials), tiles_(plan) {}

    MK_DEVICE Rounding<T> finishing(const Agent&, const Tile&) const { return {true}; }

    MK_DEVICE void deliver(const Agent& agent, const Tile& tile, const T* staged, i64 pitch) {
        const u64 owner = tile.source, size = launch_.size();
        if (!launch_.await_call(owner, plan_.digest)) return;
        const u64 distance = (launch_.rank() + size - owner) % size;
        const i64 number = i64(distance - 1) * tiles_.count(owner) + tiles_.within_owner(tile);
        const i64 bytes = i64(sizeof(T));
        Lines to{zone_.slot(owner, number), pitch * bytes};
        Lines from{reinterpret_cast<u8*>(const_cast<T*>(staged)), pitch * bytes};
        Pending tile_sent = copy(agent, to, from, tile.rows.size(), tile.columns.size() * bytes);
        launch_.raise<Scope::system>(zone_.signal(owner, number), 1, tile_sent.complete());
    }

private:
    Launch& launch_;
    const GemmReduceScatterPlan& plan_;
    Zone zone_;
    TileNumbers tiles_;
};

// Adds what the peers have pushed to an own tile: to this rank's sums those of the next rank, and so on around the ring.
// Then it is delivered as a stored tile.
template <class T, class Partial>
class Sum : public Store<T> {
public:
    MK_DEVICE Sum(Launch& launch, const GemmReduceScatterPlan& plan, Store<T> store)
        : Store<T>(store), launch_(launch), plan_(plan), zone_(launch, plan.partials), tiles_(plan) {}

    struct Addition {
        bool ready;
        u64 count;
        const u8* first;
        i64 stride;

        template <class Acc>
        MK_DEVICE T operator()(u32 place, Acc sum) const {
            for (u64 i = 0; i < count; ++i)
                sum += widen(reinterpret_cast<const Partial*>(first + i64(i) * stride)[place]);
            return narrow<T>(sum);
        }
    };

    MK_DEVICE Addition finishing(const Agent& who, const Tile& tile) {
        const u64 rank = launch_.rank(), size = launch_.size();
        const i64 tiles = tiles_.count(rank), number = tiles_.within_owner(tile);
        bool ready = launch_.live();
        for (u64 distance = 1; ready && distance < size; ++distance) {
            const Subject partial{Awaited::partial, (rank + distance) % size, u64(number)};
            ready = launch_.wait(who, zone_.signal(rank, i64(distance - 1) * tiles + number), 1, partial);
        }
        if (ready && who.lane() == 0)
            fetch_add(launch_.world().bytes_from_peers,
                      (size - 1) * u64(tile.rows.size() * tile.columns.size()) * sizeof(Partial));
        return {ready, size - 1, zone_.slot(rank, number), tiles * plan_.partials.slot_bytes};
    }

protected:
    Launch& launch_;

private:
    const GemmReduceScatterPlan& plan_;
    Zone zone_;
    TileNumbers tiles_;
};

// The same, and then the sum goes to all. They have entered this call, since their partial sums are in it.
template <class T, class Partial>
class SumForAll : public Sum<T, Partial> {
public:
    MK_DEVICE SumForAll(Launch& launch, const GemmAllReducePlan& plan, Store<T> store)
        : Sum<T, Partial>(launch, plan.reduction, store), zone_(launch, plan.sums), tiles_(plan.reduction),
          slot_pitch_(plan.reduction.tile.columns * i64(sizeof(T))) {}

    MK_DEVICE void deliver(const Agent& agent, const Tile& tile, const T* staged, i64 pitch) const {
        Store<T>::deliver(agent, tile, staged, pitch);
        Launch& launch = this->launch_;
        if (!launch.live()) return;
        const i64 number = tiles_.over_all(tile), bytes = i64(sizeof(T));
        const Lines from{reinterpret_cast<u8*>(const_cast<T*>(staged)), pitch * bytes};
        for (u64 peer : RingOrder(launch.rank(), launch.size())) {
            const Lines to{zone_.slot(peer, number), slot_pitch_};
            Pending sent = copy(agent, to, from, tile.rows.size(), tile.columns.size() * bytes);
            launch.template raise<Scope::system>(zone_.signal(peer, number), 1, sent.complete());
        }
    }

private:
    Zone zone_;
    TileNumbers tiles_;
    i64 slot_pitch_;
};

// The sums that the peers have pushed here.
template <class T>
class Sums {
public:
    MK_DEVICE Sums(Launch& launch, const GemmAllReducePlan& plan)
        : launch_(launch), zone_(launch, plan.sums), tiles_(plan.reduction), pitch_(plan.reduction.tile.columns) {}

    // Waits for a peer's tile and stores it.
    MK_DEVICE void collect(const Tile& tile, const Store<T>& store) {
        const Agent& agent = launch_.agent();
        const u64 rank = launch_.rank();
        const i64 number = tiles_.over_all(tile);
        const Subject sum{Awaited::sum, tile.source, u64(number)};
        if (!launch_.wait(agent, zone_.signal(rank, number), 1, sum))
            return store.fill(agent, tile, not_a_number<T>());
        store.deliver(agent, tile, reinterpret_cast<const T*>(zone_.slot(rank, number)), pitch_);
        if (agent.lane() == 0)
            fetch_add(launch_.world().bytes_from_peers,
                      u64(tile.rows.size() * tile.columns.size()) * sizeof(T));
    }

private:
    Launch& launch_;
    Zone zone_;
    TileNumbers tiles_;
    i64 pitch_;
};

}  // namespace mk
