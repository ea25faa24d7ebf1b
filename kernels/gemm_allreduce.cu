// gemm_allreduce: every rank gets the whole sum over ranks of A @ B; a rank has its own A (M, K_r) and B (K_r, N).
//   movers   tell the peers that this rank has entered the call, and see them enter it; then they store the sums of the
//            peers' rows as these come in (the compute agents do so in the end, where the plan has no movers)
//   compute  takes the columns stripe by stripe. It multiplies the rows of rank + 1, rank + 2, ... first, and pushes each
//            finished tile to the owner of its rows; in own rows, the last, it adds what the peers have pushed, the next
//            rank's first, and pushes the sum to all while the next stripe is multiplied
#include "mkernel/engine/engine.cuh"

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

MK_KERNEL(gemm_allreduce, GemmAllReduceParams, p) {
    const GemmAllReducePlan& plan = *p.plan;
    const GemmReduceScatterPlan& reduction = plan.reduction;
    Launch launch(p.world, reduction.split);
    const u64 rank = launch.rank(), size = launch.size();
    const bool movers = reduction.split.movers > 0;
    const Store<OutType> store(p.c, reduction.row_start, size);

    auto grid = [&](Range stripe) {
        return RingTiles::Grid{rank, size, reduction.row_start, stripe, reduction.tile};
    };
    auto greet = [&](Launch self) { return self.member() > 0 || self.greet(p.message); };
    auto collect = [&] {
        const Sums<OutType> sums(plan);
        RingTiles::Grid parts = grid({0, 0});
        parts.tile.rows = reduction.part_rows;
        for (Range stripe : Blocks(reduction.n, plan.stripe)) {
            parts.columns = stripe;
            for (Tile part : RingTiles(parts, {1, size}, launch.member(), launch.members()))
                sums.collect(launch, part, store);
        }
    };

    if (launch.is(Role::mover)) {
        if (!greet(launch)) launch.drop();
        collect();
    }

    if (launch.is(Role::compute)) {
        auto multiply = [&](const RingTiles& tiles, auto sink, auto meanwhile) {
            engine::gemm<Type>(
                launch, tiles, reduction.tile, reduction.k,
                /* source */ [&](Tile t) -> Rows { return {p.a, reduction.row_start[t.source] + t.rows.begin}; }, p.b,
                /* gate   */ [](const Agent&, Tile, Range) { return true; }, sink, meanwhile);
        };
        const u64 agent = launch.member() / engine::cluster, agents = launch.members() / engine::cluster;
        const Push<PartialType> push(reduction);
        const SumForAll<OutType, Accumulator<Type>, PartialType> sum(plan, store);

        u64 before = 0;  // tiles of what is done
        i64 next = 0;
        do {  // also where there are no columns: the peers wait to be greeted
            const Range stripe = block(next++, plan.stripe, reduction.n);
            const RingTiles of_peers(grid(stripe), {1, size}, agent, agents, before);
            const RingTiles own(grid(stripe), {0, 1}, agent, agents, before + of_peers.count());
            multiply(of_peers, push, [&](Launch self, Scratch) { return movers || stripe.begin > 0 || greet(self); });
            multiply(own, sum, [](Launch self, Scratch) { return self.live(); });
            before += of_peers.count() + own.count();
        } while (next * plan.stripe < reduction.n);
        if (!movers) collect();
    }

    launch.finish();
}

}  // namespace mk
