// allgather_gemm: C = A @ B, where every rank holds some rows of A, and a B of its own.
//   movers   bring the peers' rows here chunk by chunk: each byte crosses the link once, from the next rank first
//            (all their warps, or one of each compute agent, where the plan has no agents for it)
//   compute  multiplies a tile as soon as the rows and the part of k that it needs have arrived, own rows first; or, where
//            there are so few rows that reading B again for those of each rank takes longer, all rows together, own ones
//            with them
// One of them tells the peers where this rank's rows are, before all else.
// Where there is more than one node:
//   inter-send     sends this rank's rows over the network once to each other node, to its gateway there
//   inter-receive  tells its node what has come to this rank as a gateway: from here the others bring it
#include "mkernel/engine/engine.cuh"
#include "mkernel/internode.cuh"

#ifndef MK_TYPE
#define MK_TYPE bfloat16
#endif
#ifndef MK_OUT_TYPE
#define MK_OUT_TYPE MK_TYPE
#endif

namespace mk {

using Type = MK_TYPE;
using OutType = MK_OUT_TYPE;

// Rows whose tiles are multiplied at about the same time: in whole groups.
MK_DEVICE i64 rows_together(const AllGatherGemmPlan& plan) {
    const u32 across = ceil_div(u32(plan.n), u32(plan.tile.columns));
    const u32 blocks = u32(plan.split.compute) / (across > 0 ? across : 1);
    return i64(blocks / RingTiles::group + 1) * RingTiles::group * plan.tile.rows;
}

// Brings what of the peers' rows, and perhaps own ones, is this member's share; returns whether all went well.
template <bool aligned>
MK_DEVICE bool bring_rows(Launch self, const AllGatherGemmPlan& plan, const Matrix& own, Scratch scratch) {
    Landing<Type> landing(self, plan.landing);
    Courier<aligned> courier(self, scratch);
    const i64 together = rows_together(plan);
    const u64 rank = self.rank();
    for (Range phase : landing.phases())
        for (u64 step = landing.takes_own(own) ? 0 : 1; step < self.size(); ++step) {
            const u64 peer = ring_rank(rank, step, self.size(), self.node());
            const u64 holder = self.holder(peer);  // itself, or its gateway
            if (!self.live()) break;
            typename Landing<Type>::Share share{};
            if ((holder != rank || step == 0) && plan.n > 0)
                share = landing.share_of(peer, phase, together, self.member(), self.members());
            auto rows = [&](bool some) -> Lines {
                if (step == 0) return {static_cast<u8*>(own.data), own.row_stride * i64(sizeof(Type))};
                if (phase.begin == 0) self.await_call(peer, plan.digest);
                if (!some || !self.live()) return {nullptr, 0};
                const CallMessage theirs = self.message_of(peer);
                return {static_cast<u8*>(self.at(holder, theirs.operand)), i64(theirs.operand_pitch)};
            };
            landing.pull(courier, peer, share, rows, [&](i64 chunk) {
                return !several_nodes || holder == peer || Internode<Type>(self, plan.landing, together).await(peer, chunk);
            });
        }
    landing.finish(courier);
    for (u64 i = 1; i < self.node().size; ++i) self.have_read(self.neighbour(i), self.readers());
    return self.live();
}

MK_KERNEL(allgather_gemm, AllGatherGemmParams, p) {
    const AllGatherGemmPlan& plan = *p.plan;
    engine::expect(p.a, p.b, p.c);
    const Start start(p.world, plan);
    const u64 rank = start.rank, size = start.size;
    const i64 rows = plan.landing.row_start[size];
    Launch launch(start, plan.split, Agent::warps);
    if (launch.speaks()) launch.announce(p.message);

    // Movers copy by registers, whose loads are not queued behind others: what all wait for first is there sooner.
    auto bring_by_registers = [&](Launch self, Scratch) { return bring_rows<false>(self, plan, p.a, Scratch{nullptr, 0}); };
    if (engine::movers && launch.is(Role::mover) && !launch.by_warps(bring_by_registers)) launch.drop();
    if (several_nodes && launch.is(Role::inter_send))
        launch.apart([&](Launch& self) { Internode<Type>(self, plan.landing, rows_together(plan)).send(p.message); });
    if (several_nodes && launch.is(Role::inter_receive))
        launch.apart([&](Launch& self) { Internode<Type>(self, plan.landing, rows_together(plan)).receive(plan.digest); });

    if (launch.is(Role::compute)) {
        Landing<Type> landing(launch, plan.landing);
        const bool gathered = plan.landing.gathered;
        using Tiles = RingTilesOf<engine::halves_tiles>;
        const Tiles tiles(
            gathered ? Tiles::Grid{0, 1, plan.landing.all_rows, plan.n, plan.tile}
                     : Tiles::Grid{rank, size, plan.landing.row_start, plan.n, plan.tile, launch.node()},
            {0, gathered ? 1 : size}, Tiles::one_stripe, launch.member() / engine::cluster,
            launch.members() / engine::cluster, plan.whole);
        engine::gemm<Type>(
            launch, tiles, plan.tile, plan.landing.k,
            /* source */
            [&](Tile t) -> Rows {
                return {gathered ? landing[size] : t.source == rank ? p.a : landing[t.source], t.rows.begin};
            },
            p.b,
            /* gate   */
            [&](const Agent& who, Tile t, Range k) { return landing.wait(who, t, k, p.a); },
            /* sink   */ Store<OutType>(p.c, rows, plan.landing.row_start),
            /* meanwhile */
            [&](Launch self, Scratch scratch) {
                return !engine::couriers || plan.split.movers > 0 ||
                       bring_rows<engine::aligned_rows>(self, plan, p.a, scratch);
            });
    }

    launch.finish();  // peers have read our rows: inputs are free, outputs complete
}

}  // namespace mk
