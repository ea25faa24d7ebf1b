// gemm_reduce_scatter: every rank gets its rows of the sum over ranks of A @ B; a rank has its own A (M, K_r), B (K_r, N).
//   movers   tell the peers that this rank has entered the call, and see them enter it; where storing at peers would hold up
//            who multiplies, they then bring the peers' tiles of own rows here
//            (all their warps, or one of each compute agent, where the plan has no agents for it)
//   compute  takes the columns stripe by stripe, so that links always have something to do. It multiplies the rows of
//            rank + 1, rank + 2, ... first, and pushes each finished tile to the owner of its rows, or offers it here; own
//            rows last: by then the peers' tiles have come, and are added, the next rank's first
// Where there is more than one node, the rows of others come first, and each node sends one sum of them:
//   inter-reduce   adds what its node has of such rows, pushed to one rank of it, and sends that to their owner; there it
//                  is added to the sum over the owner's node, in the order of nodes
//   inter-send     tells the other nodes that this rank has entered the call
//   inter-receive  passes on what they say
// One landing zone instead of two halves: who pushes has seen its owner enter this call, so nothing of an earlier call is
// in use there. What is offered stays: the call ends when all have read it.
#include "mkernel/engine/engine.cuh"
#include "mkernel/node_sums.cuh"

#ifndef MK_TYPE
#define MK_TYPE bfloat16
#endif
#ifndef MK_OUT_TYPE
#define MK_OUT_TYPE MK_TYPE
#endif
// Of partial sums on their way.
#ifndef MK_TRANSFER_TYPE
#define MK_TRANSFER_TYPE MK_TYPE
#endif

namespace mk {

using Type = MK_TYPE;
using OutType = MK_OUT_TYPE;
using PartialType = MK_TRANSFER_TYPE;
using SumType = Accumulator<Type>;

MK_KERNEL(gemm_reduce_scatter, GemmReduceScatterParams, p) {
    const GemmReduceScatterPlan& plan = *p.plan;
    engine::expect(p.a, p.b, p.c);
    const Start start(p.world, plan);
    const u64 rank = start.rank, size = start.size;
    const i64 own_rows = plan.row_start[rank + 1] - plan.row_start[rank];
    Launch launch(start, plan.split, Agent::warps);
    auto greet_and_pull = [&](Launch self, Scratch scratch) {
        if (self.member() == 0 && !self.greet(p.message, plan.pulled ? self.readers() : 0)) return false;
        return !plan.pulled || pull_partials<engine::aligned_rows>(self, plan, scratch);
    };
    using Nodes = NodeSums<SumType, PartialType>;

    if (launch.is(Role::mover) && !launch.by_warps(greet_and_pull)) launch.drop();
    if (several_nodes && launch.is(Role::inter_reduce))
        launch.apart([&](Launch& self) { Nodes(self, plan).add_and_send(); });
    if (several_nodes && launch.is(Role::inter_send))
        launch.apart([&](Launch& self) { Nodes(self, plan).send(p.message, [](Nodes&) {}); });
    if (several_nodes && launch.is(Role::inter_receive))
        launch.apart([&](Launch& self) { Nodes(self, plan).receive([](Nodes&) {}); });

    if (launch.is(Role::compute)) {
        const RingTiles own_rows_last(rows_of_all(launch, plan, plan.tile, true), {1, size + 1}, plan.stripe,
                                      launch.member() / engine::cluster, launch.members() / engine::cluster);
        engine::gemm<Type>(
            launch, own_rows_last, plan.tile, plan.k,
            /* source */ [&](Tile t) -> Rows { return {p.a, plan.row_start[t.source] + t.rows.begin}; }, p.b,
            /* gate   */ [](const Agent&, Tile, Range) { return true; },
            /* sink   */
            PushOrSum<SumType, Push<SumType, PartialType>, Sum<SumType, PartialType, OutType, engine::sink_loads>>(
                plan, {plan, {p.c, own_rows}}),
            /* meanwhile */
            [&](Launch self, Scratch scratch) { return plan.split.movers > 0 || greet_and_pull(self, scratch); });
    }

    launch.finish();
}

}  // namespace mk
