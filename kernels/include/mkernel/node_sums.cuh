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
        : Sum<Partial, Acc, Partial>(plan, Store<Partial>(*plan.nodes->sums, plan.nodes->row_start, 0)), plan_(plan) {}

    // The owner has entered this call: nothing of an earlier one is in use there any more.
    MK_DEVICE bool begin(Launch& launch, const Tile& part) const {
        return launch.await_call(part.source, plan_.digest) && Sum<Partial, Acc, Partial>::begin(launch, part);
    }

    MK_DEVICE void end(Launch& launch, const Tile& part, Completed sent) const {
        const NodeSumsPlan& nodes = *plan_.nodes;
        const u64 width = sizeof(Partial), ordinal = u64(nodes.ordinal[part.source]);
        const u64 parts = u64(this->parts_.count(part.source)), number = u64(this->parts_.within_owner(part));
        const u64 slot = (u64(nodes.beside[part.source]) + ordinal) * parts + number;
        const u64 row = u64(nodes.row_start[part.source] + part.rows.begin);
        const u64 from = (row * u64(plan_.n) + u64(part.columns.begin)) * width;
        const Place& zone = plan_.partials.slots;
        Channel(launch, launch.world().network->queue)
            .post({part.source, 2 * launch.size() + ordinal * parts + number,
                   {nodes.place.segment, nodes.place.offset + from},
                   {zone.segment, zone.offset + slot * u64(plan_.partials.slot_bytes)}, u64(plan_.n) * width,
                   u64(this->parts_.columns()) * width, u64(part.rows.size()), u64(part.columns.size()) * width},
                  sent);
    }

private:
    const GemmReduceScatterPlan& plan_;
};

// For inter-send: tells the other nodes of this rank's call. What compute agents have sent is read when receipts have come.
MK_DEVICE void send_node_sums(Launch& launch, const GemmReduceScatterPlan& plan, const CallMessage& message) {
    const Network& network = *launch.world().network;
    Mail mail(launch);
    mail.announce(message, plan.nodes->writes, plan.nodes->chunks);
    for (u64 i = 0; i < network.source_count; ++i) mail.await_receipt(network.sources[i]);
    mail.channel().flush();  // of the letters no receipt comes
}

// For inter-receive: tells this node of the calls of others, and lets them go when their sums are here, or when they have
// entered this call if they owe none.
MK_DEVICE void receive_node_sums(Launch& launch, const GemmReduceScatterPlan& plan) {
    const Network& network = *launch.world().network;
    Mail mail(launch);
    for (u64 i = 0; i < network.source_count; ++i)
        mail.pass_on_call(network.sources[i], plan.digest, [](CallMessage&) {});
    for (u64 chunk = 0; chunk < plan.nodes->chunks; ++chunk) {
        const u64* arrived = &network.arrived[2 * launch.size() + chunk];
        if (!launch.wait(launch.agent(), arrived, 1, {Awaited::network, everyone, chunk})) break;
    }
    const Completed here = Writes().complete(launch.agent());
    for (u64 i = 0; i < network.gateway_count; ++i)
        if (launch.await_call(network.gateways[i], plan.digest)) mail.send_receipt(network.gateways[i], here);
    mail.channel().flush();
    for (u64 i = 1; i < launch.node().size; ++i) launch.have_read(launch.neighbour(i), launch.greeters());
}

}  // namespace mk
