// moe_combine: every rank has rows that its experts have made of tokens, and gets what all experts have made of its own
// tokens, weighted and added up.
//   compute  notes which row is made of what, and with which weight; then, for one peer after the other, adds up the rows
//            of each of its tokens
//   all      add up this rank's own tokens as soon as the peers' sums are there, rank by rank: movers from the start, the
//            others in the end
// Where there is more than one node:
//   inter-reduce   adds up what this node has for tokens of other nodes, and sends that to their ranks
//   inter-send     shows the other nodes the weights of this rank's tokens
//   inter-receive  tells its node what they show
#include "mkernel/node_experts.cuh"

#ifndef MK_TYPE
#define MK_TYPE bfloat16
#endif
// Of sums on their way.
#ifndef MK_TRANSFER_TYPE
#define MK_TRANSFER_TYPE MK_TYPE
#endif

namespace mk {

using Type = MK_TYPE;
using PartialType = MK_TRANSFER_TYPE;

MK_KERNEL(moe_combine, MoeCombineParams, p) {
    const MoeCombinePlan& plan = *p.plan;
    Launch launch({p.world, plan}, plan.split);
    Combination<Type, PartialType> combination(launch, plan.combine, p.rows, p.row_count);
    CallMessage message = p.message;
    message.digest += *p.origins.dispatch;  // ranks whose layouts are of different dispatches disagree

    if (launch.agent().index() == 0) launch.announce(message);

    auto nodes = [&] { return NodeCombine<Type, PartialType>(launch, plan.combine); };
    if (several_nodes && launch.is(Role::inter_reduce)) nodes().add_and_send(combination);
    if (several_nodes && launch.is(Role::inter_send)) nodes().send(message, p.tokens);
    if (several_nodes && launch.is(Role::inter_receive)) nodes().receive(message.digest, combination);

    const RingOrder peers(launch.rank(), launch.size(), launch.node());
    if (launch.is(Role::compute)) {
        Shown shown(launch, plan.combine.mirror);
        for (u64 peer : peers)
            if (!launch.await_call(peer, message.digest) || !shown.await(peer, Crossing::heads)) break;
        if (launch.live()) combination.note(p.origins, p.origins.expert_offsets[plan.experts]);
        combination.computed();
        for (u64 peer : peers) combination.sum_for(peer);
    }

    combination.collect(p.tokens, p.out);

    for (u64 i = 1; i < launch.node().size; ++i) launch.have_read(launch.neighbour(i), launch.agent().count());
    launch.finish();  // peers have read our weights and sums: inputs are free, outputs complete
}

}  // namespace mk
