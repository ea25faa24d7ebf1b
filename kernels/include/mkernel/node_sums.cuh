// Sums between nodes. Of the rows of another node's rank, its gateway here adds what this node has, and sends it as one.
#pragma once

#include "internode.cuh"
#include "reduction.cuh"

namespace mk {

template <class Acc, class Partial>
class NodeSums {
public:
    MK_DEVICE NodeSums(Launch& launch, const GemmReduceScatterPlan& plan)
        : launch_(launch), plan_(plan), parts_(plan), pushed_(plan), mail_(launch) {}

    // For inter-send: tells the other nodes what this rank calls, sends them more when they make the same call, and stays
    // until they have it.
    template <class More>
    MK_DEVICE void send(const CallMessage& message, More send_more) {
        const Network& network = *launch_.world().network;
        mail_.announce(message, plan_.nodes.writes, plan_.nodes.chunks);
        for (u64 i = 0; i < network.gateway_count; ++i)
            if (!launch_.await_call(network.gateways[i], plan_.digest)) return;
        for (u64 i = 1; i < launch_.node().size; ++i) launch_.have_read(launch_.neighbour(i), launch_.greeters());
        send_more(*this);
        mail_.channel().flush();
        for (u64 i = 0; i < network.gateway_count; ++i) mail_.await_receipt(network.gateways[i]);
    }

    // For inter-receive: tells this node what its sources call, and what more comes from them.
    template <class More>
    MK_DEVICE void receive(More receive_more) {
        const Network& network = *launch_.world().network;
        for (u64 i = 0; i < network.source_count; ++i)
            mail_.pass_on_call(network.sources[i], plan_.digest, [](CallMessage&) {});
        receive_more(*this);
        for (u64 i = 0; i < network.source_count; ++i) mail_.send_receipt(network.sources[i], Completed());
        mail_.channel().flush();
    }

    // For inter-reduce: adds to what this rank has of others' rows what its node has, the next rank's first, and sends it
    // to their owner.
    MK_DEVICE void add_and_send() {
        const u64 rank = launch_.rank();
        const Zone products(launch_, plan_.nodes.products), leaving(launch_, plan_.nodes.leaving);
        for (Tile part : far_parts(launch_.member(), launch_.members())) {
            if (launch_.holder(part.source) != rank) continue;
            const i64 number = parts_.where_added(part);
            const Subject product{Awaited::partial, rank, u64(number)};
            if (!launch_.wait(launch_.agent(), products.signal(rank, number), 1, product)) return;
            if (!pushed_.await(launch_, part)) return;
            parts_.each_piece(part, [&](const Tile& piece) {
                Acc* own = reinterpret_cast<Acc*>(products.slot(rank, number)) + parts_.place(piece);
                const Staged<Acc> sums{own, piece.columns.size()};
                pushed_.add(launch_, piece, sums);
                launch_.agent().sync();
                Partial* to = reinterpret_cast<Partial*>(leaving.slot(rank, number)) + parts_.place(piece);
                store_sums<Acc>(launch_.agent(), piece, sums, to, piece.columns.size());
            });
            const Completed added = Writes().complete(launch_.agent());
            if (!launch_.await_call(part.source, plan_.digest)) return;
            // As its owner counts them, this node is one of the others.
            const bool before = part.source < launch_.node().begin;
            const u64 others = launch_.world().network->node - (before ? 1 : 0);
            const i64 chunk = i64(others) * parts_.count(part.source) + parts_.within_owner(part);
            post(part.source, u64(chunk), leaving.place(number), Zone(launch_, plan_.nodes.arriving).place(chunk),
                 bytes_of<Partial>(part), added);
        }
        mail_.channel().flush();
    }

    // Sends the sums over all ranks of own rows, which lie where node peers have theirs, once to each other node.
    template <class T>
    MK_DEVICE void send_totals(const GemmAllReducePlan& plan) {
        const u64 rank = launch_.rank(), size = launch_.size();
        const Network& network = *launch_.world().network;
        const Zone totals(launch_, plan.sums);
        for (Tile part : RingTiles(grid(), {size, size + 1}, plan_.stripe, 0, 1)) {
            const i64 number = parts_.over_all(part);
            const Subject sum{Awaited::sum, rank, u64(number)};
            if (!launch_.wait(launch_.agent(), totals.signal(rank, number), 1, sum)) return;
            for (u64 i = 0; i < network.gateway_count; ++i)
                post(network.gateways[i], plan_.nodes.first_total + u64(number), totals.place(number), totals.place(number),
                     bytes_of<T>(part), Completed());
        }
    }

    // Pushes to this node those that come here from ranks of others, whose gateway this is.
    template <class T>
    MK_DEVICE void pass_on_totals(const GemmAllReducePlan& plan) {
        const u64 rank = launch_.rank();
        const Zone totals(launch_, plan.sums);
        for (Tile part : far_parts(0, 1)) {
            if (launch_.holder(part.source) != rank) continue;
            const i64 number = parts_.over_all(part), bytes = i64(bytes_of<T>(part));
            const u64 chunk = plan_.nodes.first_total + u64(number);
            const u64* arrived = &launch_.world().network->arrived[2 * launch_.size() + chunk];
            if (!launch_.wait(launch_.agent(), arrived, 1, {Awaited::network, part.source, chunk})) return;
            launch_.template raise<Scope::device>(totals.signal(rank, number), 1, Completed());
            for (u64 i = 1; i < launch_.node().size; ++i) {
                const Lines here{totals.slot(rank, number), bytes}, there{totals.slot(launch_.neighbour(i), number), bytes};
                const Completed passed = copy(launch_.agent(), there, here, 1, bytes).complete();
                launch_.template raise<Scope::system>(totals.signal(launch_.neighbour(i), number), 1, passed);
            }
        }
    }

private:
    MK_DEVICE RingTiles::Grid grid() const {
        return rows_of_all(launch_, plan_, {plan_.part_rows, plan_.part_columns, 0}, true);
    }

    // Of the rows of other nodes' ranks, an agent's share out of `agents`.
    MK_DEVICE RingTiles far_parts(u64 agent, u64 agents) const {
        return {grid(), {1, 1 + launch_.size() - launch_.node().size}, plan_.stripe, agent, agents};
    }

    MK_DEVICE void post(u64 peer, u64 chunk, Place from, Place to, u64 bytes, Completed written) {
        mail_.channel().post({peer, 2 * launch_.size() + chunk, {from.segment, from.offset}, {to.segment, to.offset}, bytes,
                              bytes, 1, bytes},
                             written);
    }

    Launch& launch_;
    const GemmReduceScatterPlan& plan_;
    Parts parts_;
    Pushed<Acc, Partial, 1> pushed_;
    Mail mail_;
};

}  // namespace mk
