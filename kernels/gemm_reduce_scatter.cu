// gemm_reduce_scatter: every rank gets its rows of the sum over ranks of A @ B; a rank has its own A (M, K_r), B (K_r, N).
//   movers   tell the peers that this rank has entered the call, and see them enter it
//            (a part of a compute agent, where the plan has no agents for it)
//   compute  multiplies the rows of rank + 1, rank + 2, ... first, and pushes each finished tile to the owner of its rows;
//            own rows last: by then the peers' tiles have come, and are added, the next rank's first
// One landing zone instead of two halves: who pushes has seen its owner enter this call, so nothing of an earlier call is
// in use there.
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

MK_KERNEL(gemm_reduce_scatter, GemmReduceScatterParams, p) {
    const GemmReduceScatterPlan& plan = *p.plan;
    Launch launch(p.world, plan.split);
    const u64 rank = launch.rank(), size = launch.size();

    auto greet = [&](Launch self) { return self.member() > 0 || self.greet(p.message); };

    if (launch.is(Role::mover) && !greet(launch)) launch.drop();

    if (launch.is(Role::compute)) {
        const RingTiles::Grid grid{rank, size, plan.row_start, {0, plan.n}, plan.tile};
        const u64 agent = launch.member() / engine::cluster, agents = launch.members() / engine::cluster;
        const RingTiles of_peers(grid, {1, size}, agent, agents);
        const RingTiles own(grid, {0, 1}, agent, agents, of_peers.count());
        const i64 own_rows = plan.row_start[rank + 1] - plan.row_start[rank];

        auto source = [&](Tile t) -> Rows { return {p.a, plan.row_start[t.source] + t.rows.begin}; };
        auto gate = [](const Agent&, Tile, Range) { return true; };
        auto nothing = [](Launch self, Scratch) { return self.live(); };

        engine::gemm<Type>(launch, of_peers, plan.tile, plan.k, source, p.b, gate, Push<PartialType>(plan),
                           [&](Launch self, Scratch) { return plan.split.movers > 0 || greet(self); });
        engine::gemm<Type>(launch, own, plan.tile, plan.k, source, p.b, gate,
                           Sum<OutType, Accumulator<Type>, PartialType>(plan, Store<OutType>(p.c, own_rows)), nothing);
    }

    launch.finish();
}

}  // namespace mk
