// gemm_allreduce: every rank gets the whole sum over ranks of A @ B; a rank has its own A (M, K_r) and B (K_r, N).
//   movers   tell the peers that this rank has entered the call, and see them enter it; then they store the sums of the
//            peers' rows as these come in (the compute agents do so in the end, where the plan has no movers)
//   compute  takes the columns stripe by stripe. It multiplies the rows of rank + 1, rank + 2, ... first, and pushes each
//            finished tile to the owner of its rows; in own rows, the last, it adds what the peers have pushed, the next
//            rank's first, and pushes the sum to all while the next stripe is multiplied
// Where there is more than one node, sums are made as in gemm_reduce_scatter, and that of a row goes once to each other node:
//   inter-receive  of a rank's gateway pushes it to the others of its node
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

// The product of this rank's operands, for some tiles.
template <class Sink, class Meanwhile>
MK_DEVICE void multiply(Launch& launch, const GemmReduceScatterPlan& plan, const GemmAllReduceParams& p,
                        const RingTiles& tiles, Sink sink, Meanwhile meanwhile) {
    engine::gemm<Type>(
        launch, tiles, plan.tile, plan.k,
        /* source */ [&](Tile t) -> Rows { return {p.a, plan.row_start[t.source] + t.rows.begin}; }, p.b,
        /* gate   */ [](const Agent&, Tile, Range) { return true; }, sink, meanwhile);
}

MK_KERNEL(gemm_allreduce, GemmAllReduceParams, p) {
    const GemmAllReducePlan& plan = *p.plan;
    const GemmReduceScatterPlan& reduction = plan.reduction;
    Launch launch(p.world, reduction.split);

    // The tiles of some columns, or the parts in which they are handed out. Made anew for each use: nothing stays in
    // registers while tiles are multiplied.
    auto tiles = [&](Range stripe, TileShape tile, RingTiles::Steps steps, u64 agent, u64 agents, u64 before) {
        const u64* order = several_nodes ? reduction.nodes->order : nullptr;
        const RingTiles::Grid grid{launch.rank(), launch.size(), reduction.row_start, stripe, tile, {0, 0}, order};
        return RingTiles(grid, steps, agent, agents, before);
    };
    auto store = [&] { return Store<OutType>(p.c, reduction.row_start, launch.size()); };
    auto greet = [&](Launch self) { return self.member() > 0 || self.greet(p.message); };
    const TileShape shape{reduction.part_rows, reduction.part_columns, 0};
    auto collect = [&] {
        const u64 agent = launch.member(), agents = launch.members();
        for (Range stripe : Blocks(reduction.n, plan.stripe))
            for (Tile part : tiles(stripe, shape, {1, launch.size()}, agent, agents, 0))
                Sums<OutType>(plan).collect(launch, part, store());
    };

    if (launch.is(Role::mover)) {
        if (!greet(launch)) launch.drop();
        collect();
    }

    const u64 pushed = several_nodes ? reduction.nodes->pushed : launch.size();
    const Network* network = launch.world().network;
    if (several_nodes && launch.is(Role::inter_send))
        send_node_sums(launch, reduction, p.message, plan.chunks, {network->links, network->link_count});
    if (several_nodes && launch.is(Role::inter_receive))
        receive_node_sums(launch, reduction, {network->links, network->link_count}, [&] {
            for (Range stripe : Blocks(reduction.n, plan.stripe))
                for (Tile part : tiles(stripe, shape, {pushed, launch.size()}, 0, 1, 0))
                    pass_on_sum<OutType>(launch, plan, part);
        });

    if (launch.is(Role::compute)) {
        auto share = [&](Range stripe, RingTiles::Steps steps, u64 before) {
            return tiles(stripe, reduction.tile, steps, launch.member() / engine::cluster,
                         launch.members() / engine::cluster, before);
        };
        u64 before = 0;  // tiles of what is done
        i64 next = 0;
        do {  // also where there are no columns: the peers wait to be greeted
            const Range stripe = block(next, plan.stripe, reduction.n);
            multiply(launch, reduction, p, share(stripe, {1, pushed}, before), Push<PartialType>(reduction),
                     [&](Launch self, Scratch) { return reduction.split.movers > 0 || next > 0 || greet(self); });
            before += share(stripe, {1, pushed}, 0).count();
            if (several_nodes)
                multiply(launch, reduction, p, share(stripe, {pushed, launch.size()}, before),
                         NodeSum<PartialType, Accumulator<Type>>(reduction),
                         [](Launch self, Scratch) { return self.live(); });
            before += share(stripe, {pushed, launch.size()}, 0).count();
            multiply(launch, reduction, p, share(stripe, {0, 1}, before),
                     SumForNodes<OutType, Accumulator<Type>, PartialType>(plan, store()),
                     [](Launch self, Scratch) { return self.live(); });
            before += share(stripe, {0, 1}, 0).count();
        } while (++next * plan.stripe < reduction.n);
        if (reduction.split.movers == 0) collect();
    }

    launch.finish();
}

}  // namespace mk
