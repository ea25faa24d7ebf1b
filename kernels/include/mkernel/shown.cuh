// Tables that the operators on experts show peers, wherever those are.
#pragma once

#include "roles.cuh"

namespace mk {

// What comes from a rank of another node, to its gateway here; of tokens, the first chunk.
enum class Crossing : u64 { heads = 0, routes = 1, list = 2, tokens = 3 };

// What ranks show of their tokens. What those of other nodes show, their gateways here have.
class Shown {
public:
    MK_DEVICE Shown(Launch& launch, const MirrorPlan& plan) : launch_(launch), plan_(plan) {}

    template <class Entry>
    MK_DEVICE Entry* table(u64 rank, Place place) const {
        const u64 holder = launch_.holder(rank);
        return static_cast<Entry*>(launch_.at(holder, holder == rank ? place : mirrored(rank, place)));
    }

    // Where a gateway has a table of another node's rank.
    MK_DEVICE Place mirrored(u64 rank, Place place) const {
        return {place.segment, place.offset + u64(plan_.first + i64(rank) * plan_.bytes)};
    }

    // Waits until all that `part` of a rank says, or `part` beyond it, is there. At once in this node.
    MK_DEVICE bool await(u64 rank, Crossing part, u64 further = 0) {
        if (!several_nodes || in_node(rank)) return launch_.live();
        const u64* signal = heard(launch_.rank(), rank, u64(part) + further);
        return launch_.wait(launch_.agent(), signal, 1, {Awaited::network, rank, u64(part) + further});
    }

    MK_DEVICE bool in_node(u64 rank) const { return rank - launch_.node().begin < launch_.node().size; }

    // That the gateway of a rank has a part of what it sends, as it is known at `at`.
    MK_DEVICE u64* heard(u64 at, u64 rank, u64 part) const {
        return static_cast<u64*>(launch_.at(at, plan_.heard)) + rank * plan_.parts + part;
    }

private:
    Launch& launch_;
    const MirrorPlan& plan_;
};

}  // namespace mk
