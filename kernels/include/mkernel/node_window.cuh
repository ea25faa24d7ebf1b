// Keys and values between nodes. A rank sends its own, unit after unit, into the windows of its gateways, each when all of
// that node need nothing any more of the unit that had the slot. There it is as if the gateway had brought them, and the
// others of the node bring them from its window.
#pragma once

#include "attention.cuh"
#include "internode.cuh"

namespace mk {

template <class T>
class NodeWindow {
public:
    MK_DEVICE NodeWindow(Launch& launch, const RingAttentionPlan& plan)
        : launch_(launch), network_(*launch.world().network), plan_(plan), nodes_(plan.nodes), window_(launch, plan),
          mail_(launch) {}

    // For inter-send.
    MK_DEVICE void send(const CallMessage& message, const KeysAndValues& own) {
        const Completed written = mail_.announce(message, nodes_.writes, nodes_.chunks);
        for (u64 i = 0; i < network_.gateway_count; ++i) launch_.await_call(network_.gateways[i], message.digest);
        for (Unit unit : Units(plan_)) {
            for (u64 i = 0; i < network_.gateway_count; ++i) await_credit(i, unit);
            for (u64 i = 0; i < nodes_.leaving_runs; ++i) send_run(unit, nodes_.leaving[i], own, written);
        }
        mail_.channel().flush();
        for (u64 i = 0; i < network_.gateway_count; ++i) mail_.await_receipt(network_.gateways[i]);
        for (u64 i = 1; i < launch_.node().size; ++i) launch_.have_read(launch_.neighbour(i), launch_.readers());
    }

    // For inter-receive. No wait goes round in a circle: what a unit waits for belongs to units before it, or is on its way.
    MK_DEVICE void receive(u64 digest) {
        for (u64 i = 0; i < network_.source_count; ++i)
            mail_.pass_on_call(network_.sources[i], digest, [](CallMessage&) {});
        for (Unit unit : Units(plan_)) {
            if (u64(unit.index) >= plan_.window.slots) free_slot(u64(unit.index) - plan_.window.slots);
            for (u64 i = 0; i < nodes_.arriving_runs; ++i) pass_on(unit, nodes_.arriving[i]);
        }
        for (u64 i = 0; i < network_.source_count; ++i) mail_.send_receipt(network_.sources[i], Completed());
        mail_.channel().flush();
    }

    // For movers: where a chunk of another node's run is in this node, when it is there.
    MK_DEVICE Lines await(Unit unit, const Run& run, Range positions, Part part, u64 index) {
        const u64 holder = launch_.holder(run.source);
        if (!launch_.wait(launch_.agent(), heard(launch_.rank(), index), 1, {Awaited::network, run.source, index}))
            return {nullptr, 0};
        const Place there{nodes_.zone.segment, offset_in_window(holder, unit, part, run.held + positions.begin)};
        return {static_cast<u8*>(launch_.at(holder, there)), line()};
    }

private:
    MK_DEVICE i64 line() const { return plan_.tile.k * i64(sizeof(T)); }

    // Where a position of a slot is in the window of a rank.
    MK_DEVICE u64 offset_in_window(u64 rank, Unit unit, Part part, i64 position) const {
        const u64 half = u64(unit.index) % plan_.window.slots * 2 + u64(part);
        return nodes_.zone.offset + (half * u64(nodes_.slot_positions[rank]) + u64(position)) * u64(line());
    }

    MK_DEVICE u64* heard(u64 rank, u64 index) const { return static_cast<u64*>(launch_.at(rank, nodes_.heard)) + index; }
    MK_DEVICE u64* freed(u64 at, u64 by) const { return static_cast<u64*>(launch_.at(at, nodes_.freed)) + by; }

    // The signals of what comes over the network lie behind those of letters and receipts.
    MK_DEVICE u64 number_of(u64 chunk) const { return 2 * launch_.size() + chunk; }
    MK_DEVICE u64 credit(u64 node, u64 unit) const {
        const u64 units = u64(plan_.batches * plan_.kv_heads);
        return number_of((plan_.window.chunks * 2 + node) * units + unit);
    }

    // Waits until a unit may be sent to the gateway on another node, which needs nothing more of the one that had the slot.
    MK_DEVICE void await_credit(u64 other, Unit unit) {
        if (u64(unit.index) < plan_.window.slots) return;
        const u64 before = u64(unit.index) - plan_.window.slots, node = other + (other >= network_.node ? 1 : 0);
        const u64* signal = &network_.arrived[credit(node, before)];
        launch_.wait(launch_.agent(), signal, 1, {Awaited::credit, network_.gateways[other], before});
    }

    // When nobody of this node needs any more of a unit, its slot here is free for others' writes.
    MK_DEVICE void free_slot(u64 unit) {
        window_.await_left(unit);
        for (u64 i = 1; i < launch_.node().size; ++i)
            launch_.template raise<Scope::system>(freed(launch_.neighbour(i), launch_.rank()), unit + 1, Completed());
        for (u64 i = 1; i < launch_.node().size; ++i) {
            const u64 peer = launch_.neighbour(i);
            launch_.wait(launch_.agent(), freed(launch_.rank(), peer), unit + 1, {Awaited::credit, peer, unit});
        }
        for (u64 i = 0; i < network_.source_count; ++i)
            mail_.notify(network_.sources[i], credit(network_.node, unit), Completed());
    }

    // Positions follow each other without gaps here and there: so each chunk is one write.
    MK_DEVICE void send_run(Unit unit, const Run& run, const KeysAndValues& own, Completed written) {
        window_.each_chunk(unit, run, 0, 1, [&](Range positions, Part part, u64 index) {
            const SharedHeads& heads = part == Part::keys ? own.keys : own.values;
            const u64 bytes = u64(positions.size() * line());
            const u64 from = heads.place.offset + u64(unit.batch * heads.batch_stride + unit.head * heads.head_stride +
                                                      (run.first + positions.begin) * heads.position_stride);
            const u64 to = offset_in_window(run.source, unit, part, run.place + positions.begin);
            return mail_.channel().post({run.source, number_of(index), {heads.place.segment, from},
                                         {nodes_.zone.segment, to}, bytes, bytes, 1, bytes},
                                        written);
        });
    }

    MK_DEVICE void pass_on(Unit unit, const Run& run) {
        window_.each_chunk(unit, run, 0, 1, [&](Range, Part, u64 index) {
            const u64* arrived = &network_.arrived[number_of(index)];
            if (!launch_.wait(launch_.agent(), arrived, 1, {Awaited::network, run.source, index})) return false;
            launch_.template raise<Scope::device>(&plan_.window.arrived[index], 1, Completed());
            for (u64 i = 1; i < launch_.node().size; ++i)
                launch_.template raise<Scope::system>(heard(launch_.neighbour(i), index), 1, Completed());
            return true;
        });
    }

    Launch& launch_;
    const Network& network_;
    const RingAttentionPlan& plan_;
    const NodeWindowPlan& nodes_;
    Window<T> window_;
    Mail mail_;
};

}  // namespace mk
