// Sums over ranks, between nodes: what a node has added of a rank's rows is sent to that rank, which adds the nodes.
#pragma once

#include "internode.cuh"
#include "reduction.cuh"

namespace mk {

// Adds what this node has of another node's rows, and has it sent.
template <class Partial, class Acc>
class NodeSum : public Sum<Partial, Acc, Partial> {
public:
    MK_DEVICE NodeSum(const GemmReduceScatterPlan& plan)
        : Sum<Partial, Acc, Partial>(plan, Store<Partial>(*plan.nodes->sums, plan.nodes->row_start, 0)), plan_(&plan) {}

    // The owner has entered this call: nothing of an earlier one is in use there any more.
    MK_DEVICE bool begin(Launch& launch, const Tile& part) const {
        return launch.await_call(part.source, plan_->digest) && Sum<Partial, Acc, Partial>::begin(launch, part);
    }

    MK_DEVICE void end(Launch& launch, const Tile& part, Completed sent) const {
        const NodeSumsPlan& nodes = *plan_->nodes;
        const u64 width = sizeof(Partial), ordinal = u64(nodes.ordinal[part.source]);
        const u64 parts = u64(this->parts_.count(part.source)), number = u64(this->parts_.within_owner(part));
        const u64 slot = (u64(nodes.beside[part.source]) + ordinal) * parts + number;
        const u64 row = u64(nodes.row_start[part.source] + part.rows.begin);
        const u64 from = (row * u64(plan_->n) + u64(part.columns.begin)) * width;
        const Place& zone = plan_->partials.slots;
        Channel(launch, launch.world().network->queue)
            .post({part.source, 2 * launch.size() + nodes.first_chunk + ordinal * parts + number,
                   {nodes.place.segment, nodes.place.offset + from},
                   {zone.segment, zone.offset + slot * u64(plan_->partials.slot_bytes)}, u64(plan_->n) * width,
                   u64(this->parts_.columns()) * width, u64(part.rows.size()), u64(part.columns.size()) * width},
                  sent);
    }

private:
    const GemmReduceScatterPlan* plan_;
};

// The same for own rows, and their sum goes to all: over the network to a gateway on each other node, which have entered
// this call, since their partial sums are in it.
template <class T, class Acc, class Partial>
class SumForNodes : public SumForAll<T, Acc, Partial> {
public:
    using SumForAll<T, Acc, Partial>::SumForAll;

    MK_DEVICE void end(Launch& launch, const Tile& part, Completed sent) const {
        SumForAll<T, Acc, Partial>::end(launch, part, sent);
        if (!several_nodes) return;
        const Network* network = launch.world().network;
        const ZonePlan& sums = this->plan_->sums;
        const u64 number = u64(this->parts_.over_all(part)), pitch = u64(this->parts_.columns()) * sizeof(T);
        const Registered place{sums.slots.segment, sums.slots.offset + number * u64(sums.slot_bytes)};
        for (u64 i = 0; i < network->gateway_count; ++i)
            Channel(launch, network->queue)
                .post({network->gateways[i], 2 * launch.size() + number, place, place,
                       pitch, pitch, u64(part.rows.size()), u64(part.columns.size()) * sizeof(T)},
                      sent);
    }
};

// For a gateway: a sum that comes over the network goes to all of this node.
template <class T>
MK_DEVICE void pass_on_sum(Launch& launch, const GemmAllReducePlan& plan, const Tile& part) {
    const PartNumbers parts(plan.reduction);
    const Zone sums(launch, plan.sums);
    const i64 number = parts.over_all(part), pitch = parts.columns() * i64(sizeof(T));
    const u64* arrived = &launch.world().network->arrived[2 * launch.size() + u64(number)];
    if (!launch.wait(launch.agent(), arrived, 1, {Awaited::network, part.source, u64(number)})) return;
    const Lines here{sums.slot(launch.rank(), number), pitch};
    for (u64 i = 1; i < launch.node().size; ++i) {
        const Lines there{sums.slot(launch.neighbour(i), number), pitch};
        const i64 bytes = part.columns.size() * i64(sizeof(T));
        launch.raise<Scope::system>(sums.signal(launch.neighbour(i), number), 1,
                                    copy(launch.agent(), there, here, part.rows.size(), bytes).complete());
    }
    launch.raise<Scope::device>(sums.signal(launch.rank(), number), 1, Writes().complete(launch.agent()));
}

// Ranks from which receipts are to come, or to which they go.
struct Receipts {
    const u64* ranks;
    u64 count;
};

// For inter-send: tells the other nodes of this rank's call. What compute agents have sent is read when receipts have come.
MK_DEVICE void send_node_sums(Launch& launch, const GemmReduceScatterPlan& plan, const CallMessage& message, u64 chunks,
                              Receipts from) {
    Mail mail(launch);
    mail.announce(message, plan.nodes->writes, chunks);
    for (u64 i = 0; i < from.count; ++i) mail.await_receipt(from.ranks[i]);
    mail.channel().flush();  // of letters there may be no receipt
}

// For inter-receive: tells this node of the calls of others, and lets them go when their sums are here, or when they have
// entered this call if they owe none. meanwhile() takes in what comes besides.
template <class Meanwhile>
MK_DEVICE void receive_node_sums(Launch& launch, const GemmReduceScatterPlan& plan, Receipts to, Meanwhile meanwhile) {
    const Network& network = *launch.world().network;
    Mail mail(launch);
    for (u64 i = 0; i < network.source_count; ++i)
        mail.pass_on_call(network.sources[i], plan.digest, [](CallMessage&) {});
    meanwhile();
    for (u64 i = 0; i < plan.nodes->chunks; ++i) {
        const u64 chunk = plan.nodes->first_chunk + i;
        const u64* arrived = &network.arrived[2 * launch.size() + chunk];
        if (!launch.wait(launch.agent(), arrived, 1, {Awaited::network, everyone, chunk})) break;
    }
    const Completed here = Writes().complete(launch.agent());
    for (u64 i = 0; i < to.count; ++i)
        if (launch.await_call(to.ranks[i], plan.digest)) mail.send_receipt(to.ranks[i], here);
    mail.channel().flush();
    for (u64 i = 1; i < launch.node().size; ++i) launch.have_read(launch.neighbour(i), launch.greeters());
}

}  // namespace mk
