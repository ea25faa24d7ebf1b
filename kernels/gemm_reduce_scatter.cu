// gemm_reduce_scatter: every rank gets its rows of the sum over ranks of A @ B; a rank has its own A (M, K_r), B (K_r, N).
//   movers   tell the peers that this rank has entered the call, and see them enter it
//            (a part of a compute agent, where the plan has no agents for it)
//   compute  multiplies the rows of rank + 1, rank + 2, ... first, and pushes each finished tile to the owner of its rows;
//            own rows last: by then the peers' tiles have come, and are added, the next rank's first
// Where there is more than one node, a node sends one sum to the owner of a row, which adds the nodes:
//   compute        pushes other nodes' rows to the owner's gateway; of those whose gateway this rank is, it then adds what the
//                  peers have pushed, and has the sum sent
//   inter-send, inter-receive   tell of calls, and see that all has come
// One landing zone instead of two halves: who pushes has seen its owner enter this call, so nothing of an earlier call is
// in use there.
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
MK_DEVICE void multiply(Launch& launch, const GemmReduceScatterPlan& plan, const GemmReduceScatterParams& p,
                        const RingTiles& tiles, Sink sink, Meanwhile meanwhile) {
    engine::gemm<Type>(
        launch, tiles, plan.tile, plan.k,
        /* source */ [&](Tile t) -> Rows { return {p.a, plan.row_start[t.source] + t.rows.begin}; }, p.b,
        /* gate   */ [](const Agent&, Tile, Range) { return true; }, sink, meanwhile);
}

MK_KERNEL(gemm_reduce_scatter, GemmReduceScatterParams, p) {
    const GemmReduceScatterPlan& plan = *p.plan;
    Launch launch(p.world, plan.split);
    auto greet = [&](Launch self) { return self.member() > 0 || self.greet(p.message); };

    if (launch.is(Role::mover) && !greet(launch)) launch.drop();
    const Network* network = launch.world().network;
    if (several_nodes && launch.is(Role::inter_send))
        send_node_sums(launch, plan, p.message, plan.nodes->chunks, {network->sources, network->source_count});
    if (several_nodes && launch.is(Role::inter_receive))
        receive_node_sums(launch, plan, {network->gateways, network->gateway_count}, [] {});

    if (launch.is(Role::compute)) {
        // Made anew for each call: nothing stays in registers while tiles are multiplied.
        auto tiles = [&](RingTiles::Steps steps, u64 before) {
            const u64* order = several_nodes ? plan.nodes->order : nullptr;
            return RingTiles({launch.rank(), launch.size(), plan.row_start, {0, plan.n}, plan.tile, {0, 0}, order}, steps,
                             launch.member() / engine::cluster, launch.members() / engine::cluster, before);
        };
        const u64 pushed = several_nodes ? plan.nodes->pushed : launch.size();
        auto of_peers = [&] { return tiles({1, pushed}, 0); };
        auto of_nodes = [&] { return tiles({pushed, launch.size()}, of_peers().count()); };
        auto own = [&] { return tiles({0, 1}, of_peers().count() + of_nodes().count()); };
        auto store = [&] {
            const u64 rank = launch.rank();
            return Store<OutType>(p.c, plan.row_start[rank + 1] - plan.row_start[rank]);
        };
        multiply(launch, plan, p, of_peers(), Push<PartialType>(plan),
                 [&](Launch self, Scratch) { return plan.split.movers > 0 || greet(self); });
        if (several_nodes)
            multiply(launch, plan, p, of_nodes(), NodeSum<PartialType, Accumulator<Type>>(plan),
                     [](Launch self, Scratch) { return self.live(); });
        multiply(launch, plan, p, own(), Sum<OutType, Accumulator<Type>, PartialType>(plan, store()),
                 [](Launch self, Scratch) { return self.live(); });
    }

    launch.finish();
}

}  // namespace mk
