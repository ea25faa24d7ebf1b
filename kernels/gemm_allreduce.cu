// gemm_allreduce: every rank gets the whole sum over ranks of A @ B; a rank has its own A (M, K_r) and B (K_r, N).
//   movers   tell the peers that this rank has entered the call, and see them enter it; then all their warps store the
//            sums of the peers' rows as these come in
//            (where the plan has none, a warp of each compute agent does so, or all of them when it has multiplied)
//   compute  takes the columns stripe by stripe. It multiplies the rows of rank + 1, rank + 2, ... first, and pushes each
//            finished tile to the owner of its rows; in own rows, the last, it adds what the peers have pushed, the next
//            rank's first, and pushes the sum to all while the next stripe is multiplied
//   both     store the peers' sums of the last stripe, behind which nothing is multiplied
// Where there is more than one node, the rows of others come first, and each node sends one sum of them:
//   inter-reduce   adds what its node has of such rows, pushed to one rank of it, and sends that to their owner; there it
//                  is added to the sum over the owner's node, in the order of nodes
//   inter-send     tells the other nodes that this rank has entered the call, and sends the sums of its rows once to each
//   inter-receive  passes on what they say, and pushes to its node the sums that they send
#include "mkernel/engine/engine.cuh"
#include "mkernel/node_sums.cuh"
#include "mkernel/sums.cuh"

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

MK_KERNEL(gemm_allreduce, GemmAllReduceParams, p) {
    const GemmAllReducePlan& plan = *p.plan;
    const GemmReduceScatterPlan& reduction = plan.reduction;
    engine::expect(p.a, p.b, p.c);
    const Start start(p.world, plan);
    const u64 size = start.size;
    const i64 rows = reduction.row_start[size];
    Launch launch(start, reduction.split, Agent::warps);

    auto store = [&] { return Store<OutType>(p.c, rows, reduction.row_start); };
    auto greet = [&](Launch& self) { return self.member() > 0 || self.greet(p.message); };
    auto collect = [&](Launch& self, Scratch scratch, bool last_stripe, u64 member, u64 members) {
        self.apart([&](Launch& launch) {
            const TileShape part{reduction.part_rows, reduction.part_columns, 0};
            const RingTiles of_peers(rows_of_all(launch, reduction, part, false), {1, size}, reduction.stripe, member, members);
            const i64 last = (ceil_div(reduction.n, reduction.stripe) - 1) * reduction.stripe;
            Sums<OutType, engine::sends_strips> sums(launch, plan, scratch);
            for (Tile of_peer : of_peers)
                if ((of_peer.columns.begin >= last) == last_stripe) sums.collect(of_peer, store());
            sums.finish();
        });
        return self.live();
    };
    auto collect_early = [&](Launch self, Scratch scratch) {
        return collect(self, scratch, false, self.member(), self.members());
    };

    using Nodes = NodeSums<SumType, PartialType>;

    if (launch.is(Role::mover)) {
        greet(launch);
        if (!launch.by_warps(collect_early)) launch.drop();
    }
    if (several_nodes && launch.is(Role::inter_reduce))
        launch.apart([&](Launch& self) { Nodes(self, reduction).add_and_send(); });
    if (several_nodes && launch.is(Role::inter_send))
        launch.apart([&](Launch& self) {
            Nodes(self, reduction).send(p.message, [&](Nodes& nodes) { nodes.send_totals<OutType>(plan); });
        });
    if (several_nodes && launch.is(Role::inter_receive))
        launch.apart([&](Launch& self) {
            Nodes(self, reduction).receive([&](Nodes& nodes) { nodes.pass_on_totals<OutType>(plan); });
        });

    if (launch.is(Role::compute)) {
        constexpr bool more_follows = true;
        const bool moves = reduction.split.movers == 0;
        const RingTiles own_rows_last(rows_of_all(launch, reduction, reduction.tile, true), {1, size + 1}, reduction.stripe,
                                      launch.member() / engine::cluster, launch.members() / engine::cluster);
        engine::gemm<Type, more_follows>(
            launch, own_rows_last, reduction.tile, reduction.k,
            /* source */ [&](Tile t) -> Rows { return {p.a, reduction.row_start[t.source] + t.rows.begin}; }, p.b,
            /* gate   */ [](const Agent&, Tile, Range) { return true; },
            /* sink   */
            PushOrSum<SumType, Push<SumType, PartialType>, SumForAll<SumType, PartialType, OutType, engine::sink_loads>>(
                reduction, {plan, store()}),
            /* meanwhile */
            [&](Launch self, Scratch scratch) {
                if (moves) greet(self);
                if (moves && engine::has_time) collect_early(self, scratch);
                return self.live();
            });
        if (moves && !engine::has_time) collect_early(launch, launch.agent().scratch());
    }
    // What no multiplication hides is shared out among the warps of all agents of both roles.
    const u64 all = reduction.split.movers + reduction.split.compute, index = launch.agent().index();
    auto collect_rest = [&](Launch self, Scratch scratch) {
        return collect(self, scratch, true, self.agent().part() * all + index, all * Agent::warps);
    };
    if (index < all && !launch.by_warps(collect_rest)) launch.drop();

    launch.finish();
}

}  // namespace mk
