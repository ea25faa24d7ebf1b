// ring_attention: softmax(Q K^T) V, where every rank holds some positions of the sequence.
//   movers   tell the peers where this rank's keys and values are, and all their warps bring the peers' here, a head (a
//            unit) after the other, each from rank - 1 first, into a window of a few units
//   compute  keeps a tile of queries, walks over all keys and values that it sees, own ones first, as soon as they have
//            arrived (online softmax), and stores the tile once
// Where there is more than one node:
//   inter-send     sends this rank's keys and values once to each other node, into the window of its gateway there
//   inter-receive  tells its node what has come to this rank as a gateway: from here the others bring it; and the senders,
//                  when nobody of this node needs a unit any more
#include "mkernel/engine/attention.cuh"
#include "mkernel/node_window.cuh"

#ifndef MK_TYPE
#define MK_TYPE bfloat16
#endif

namespace mk {

using Type = MK_TYPE;

MK_KERNEL(ring_attention, RingAttentionParams, p) {
    const RingAttentionPlan& plan = *p.plan;
    Launch launch({p.world, plan}, plan.split, Agent::warps);
    const u64 rank = launch.rank();
    Window<Type> window(launch, plan);

    auto bring_heads = [&](Launch self, Scratch scratch) {
        Window<Type> window(self, plan);
        Courier<> courier(self, scratch);
        if (self.member() == 0) {
            if (self.agent().lane() == 0) *p.shown = p.own;
            self.announce(p.message);
        }
        for (Unit unit : Units(plan)) {
            if (!window.await_room(courier, unit)) break;
            for (const Run& run : Walk(plan)) {
                const u64 holder = self.holder(run.source);  // itself, or its gateway
                if (holder == rank) continue;
                if (unit.index == 0 && !self.await_call(run.source, plan.digest)) break;
                KeysAndValues theirs{};
                if (holder == run.source)
                    theirs = *static_cast<KeysAndValues*>(self.at(holder, self.message_of(holder).operand));
                window.pull(courier, unit, run, [&](Range positions, Part part, u64 index) {
                    if (several_nodes && holder != run.source)
                        return NodeWindow<Type>(self, plan).await(unit, run, positions, part, index);
                    return window.shown(theirs, unit, run, positions, part);
                });
            }
        }
        window.finish(courier);
        for (u64 peer : RingOrder(rank, self.size(), self.node())) self.await_call(peer, plan.digest);
        for (u64 i = 1; i < self.node().size; ++i) self.have_read(self.neighbour(i), self.readers());
        return self.live();
    };
    if (launch.is(Role::mover) && !launch.by_warps(bring_heads)) launch.drop();
    if (several_nodes && launch.is(Role::inter_send))
        launch.apart([&](Launch& self) { NodeWindow<Type>(self, plan).send(p.message, p.own); });
    if (several_nodes && launch.is(Role::inter_receive))
        launch.apart([&](Launch& self) { NodeWindow<Type>(self, plan).receive(plan.digest); });

    if (launch.is(Role::compute))
        engine::attention<Type>(
            launch, plan, p.q,
            /* source */
            [&](Unit unit, const Run& run, Part part) {
                const Heads& own = part == Part::keys ? p.k : p.v;
                return run.source == rank ? panel_of<Type>(own, unit.batch, unit.head, run.first)
                                          : window.panel(unit, run, part);
            },
            /* gate   */
            [&](const Agent& who, Unit unit, const Run& run, Range positions, Part part) {
                return run.source == rank ? run.count : window.wait(who, unit, run, positions, part);
            },
            /* sink   */ StoreHeads<Type>(p.out, p.lse),
            /* leave  */ [&](const Agent& who, Unit unit) { window.leave(who, unit); });

    launch.finish();  // peers have read our keys and values: inputs are free, outputs complete
}

}  // namespace mk
