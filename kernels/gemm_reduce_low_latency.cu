// gemm_reduce_scatter and gemm_allreduce for few rows: the sum over ranks of A @ B, of which every rank gets its rows or
// all; a rank has its own A (M, K_r), B (K_r, N).
//   movers   tell the peers that this rank has entered the call, and see them enter it
//            (a part of a compute agent, where the plan has no agents for it)
//   compute  multiplies a tile, and tells it to the owners of its rows, in words that are their own signals; adds up its own
//            rows, around the ring, and tells the sums to all who want them; and goes on with the next tile. So all ranks
//            get the same bits, and those that gemm_reduce_scatter.cu and gemm_allreduce.cu give
#include "mkernel/engine/engine.cuh"
#include "mkernel/low_latency.cuh"

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

MK_KERNEL(gemm_reduce_low_latency, LowLatencyParams, p) {
    const GemmReduceScatterPlan& plan = p.plan->reduction;
    engine::expect(p.a, p.b, p.c);
    const Start start(p.world, *p.plan);
    fetch_ahead(plan.row_start, u32(start.size + 1) * sizeof(i64));
    Launch launch(start, plan.split);
    auto greet = [&](Launch& self) { return self.member() > 0 || self.greet(p.message); };

    if (launch.is(Role::mover)) greet(launch);

    if (launch.is(Role::compute)) {
        const RingTiles of_all_rows({0, 1, p.plan->all_rows, plan.n, plan.tile}, {0, 1}, RingTiles::one_stripe,
                                    launch.member() / engine::cluster, launch.members() / engine::cluster);
        engine::gemm<Type>(
            launch, of_all_rows, plan.tile, plan.k,
            /* source */ [&](Tile t) -> Rows { return {p.a, t.rows.begin}; }, p.b,
            /* gate   */ [](const Agent&, Tile, Range) { return true; },
            /* sink   */ Exchange<SumType, PartialType, OutType>(*p.plan, p.c),
            /* meanwhile */ [&](Launch self, Scratch) { return plan.split.movers > 0 || greet(self); });
        count_told<PartialType, OutType>(launch, *p.plan, engine::told_columns);
    }

    launch.finish();
}

}  // namespace mk
