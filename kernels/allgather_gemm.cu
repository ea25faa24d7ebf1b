// allgather_gemm: C = A @ B, where every rank holds some rows of A, and a B of its own.
//   movers   tell the peers where this rank's rows are, and bring the peers' rows here chunk by chunk: each byte crosses
//            the link once, from the next rank first
//            (a warp of each compute agent, where the plan has no agents for it)
//   compute  multiplies a tile as soon as the rows and the part of k that it needs have arrived, own rows first
#include "mkernel/engine/engine.cuh"

#ifndef MK_TYPE
#define MK_TYPE bfloat16
#endif
#ifndef MK_OUT_TYPE
#define MK_OUT_TYPE MK_TYPE
#endif

namespace mk {

using Type = MK_TYPE;
using OutType = MK_OUT_TYPE;

MK_KERNEL(allgather_gemm, AllGatherGemmParams, p) {
    const AllGatherGemmPlan& plan = *p.plan;
    Launch launch(p.world, plan.split);
    const u64 rank = launch.rank(), size = launch.size();

    auto bring_rows = [&](Launch self, Scratch scratch) {
        Landing<Type> landing(self, plan.landing);
        Courier<engine::aligned_rows> courier(self, scratch);
        if (self.member() == 0) self.announce(p.message);
        for (Range phase : landing.phases())
            for (u64 peer : RingOrder(rank, size)) {
                if (phase.begin == 0) self.await_call(peer, plan.digest);
                if (!self.live()) break;
                const CallMessage& theirs = self.message_of(peer);
                Lines rows{static_cast<u8*>(self.at(peer, theirs.operand)), i64(theirs.operand_pitch)};
                if (plan.n > 0) landing.pull(courier, peer, rows, phase, RingTiles::group * plan.tile.rows);
            }
        landing.finish(courier);
        for (u64 peer : RingOrder(rank, size)) self.have_read(peer, self.members());
        return self.live();
    };

    if (launch.is(Role::mover) && !bring_rows(launch, launch.agent().scratch())) launch.drop();

    if (launch.is(Role::compute)) {
        Landing<Type> landing(launch, plan.landing);
        const RingTiles own_rows_first({rank, size, plan.landing.row_start, plan.n, plan.tile}, {0, size},
                                       RingTiles::one_stripe, launch.member() / engine::cluster,
                                       launch.members() / engine::cluster);
        engine::gemm<Type>(
            launch, own_rows_first, plan.tile, plan.landing.k,
            /* source */
            [&](Tile t) -> Rows { return {t.source == rank ? p.a : landing[t.source], t.rows.begin}; }, p.b,
            /* gate   */
            [&](const Agent& who, Tile t, Range k) {
                return t.source == rank || landing.wait(who, t.source, t.rows, k);
            },
            /* sink   */ Store<OutType>(p.c, plan.landing.row_start, size),
            /* meanwhile */
            [&](Launch self, Scratch scratch) { return plan.split.movers > 0 || bring_rows(self, scratch); });
    }

    launch.finish();  // peers have read our rows: inputs are free, outputs complete
}

}  // namespace mk
