// moe_layer: every rank has tokens, and some of the experts that they choose. Each expert is two products with an
// activation between; a token gets the weighted sum of what its experts make of it.
//   all      sort this rank's tokens, as in moe_dispatch_gemm
//   movers   bring those that the experts here want, but for the first ones, which compute agents bring
//   compute  multiplies with the first weights, expert by expert, as soon as the tokens have come, and with the second as
//            soon as the tiles of the first product are finished; then adds up the rows of each token for the peers
//            (and what movers do, before that, where the plan has none)
//   all      add up this rank's own tokens in the end, as in moe_combine
// Where there is more than one node, inter-send, inter-receive and inter-reduce do what they do in those two.
#include "mkernel/activation.cuh"
#include "mkernel/engine/engine.cuh"
#include "mkernel/node_experts.cuh"

#ifndef MK_TYPE
#define MK_TYPE bfloat16
#endif
// Of sums on their way.
#ifndef MK_TRANSFER_TYPE
#define MK_TRANSFER_TYPE MK_TYPE
#endif
#ifndef MK_ACTIVATION
#define MK_ACTIVATION swiglu
#endif

namespace mk {

using Type = MK_TYPE;
using PartialType = MK_TRANSFER_TYPE;
constexpr Activation activation = Activation::MK_ACTIVATION;
// Whether a column of the first product meets its gate in the engine, or in the sink.
constexpr bool gated = activation == Activation::swiglu, paired = gated && engine::pairs_columns;
constexpr bool in_turn = gated && !paired;

MK_KERNEL(moe_layer, MoeLayerParams, p) {
    const MoeLayerPlan& plan = *p.plan;
    engine::expect(p.w1, p.w2);
    Launch launch({p.world, plan}, plan.split, Agent::warps);
    const Lines own{static_cast<u8*>(p.x.data), p.x.row_stride * i64(sizeof(Type))};
    auto combination = [&](Launch& self) {
        return Combination<Type, PartialType>(self, plan.combine, *plan.made, plan.capacity);
    };

    Routing(launch, plan.routing).sort(p.choice, p.tokens, launch.agent().scratch(), plan.expert_offsets);

    auto bring_tokens = [&](Launch self, Scratch scratch) {
        Routing routing(self, plan.routing);
        if (routing.await() && !routing.refused()) {
            Courier<> courier(self, scratch);
            TokenLanding landing(self, plan.routing, plan.landing, plan.expert_offsets);
            landing.bring(courier, own, [&](i64 row, u64 source, const Route& route) {
                combination(self).note(row, source, route.token, route.slot);
            });
            landing.finish(courier);
        }
        return self.live();
    };

    if (launch.is(Role::mover) || (launch.is(Role::compute) && plan.split.movers == 0))
        launch.apart([&](Launch& self) {
            Routing(self, plan.routing).meet(p.message, plan.expert_offsets);
            if (!self.by_warps(bring_tokens, !self.is(Role::mover))) self.drop();
        });

    auto nodes = [&](Launch& self) { return NodeCombine<Type, PartialType>(self, plan.combine); };
    auto tokens = [&](Launch& self) { return NodeDispatch(self, plan.routing, plan.landing, plan.nodes); };
    if (several_nodes && launch.is(Role::inter_send))
        launch.apart([&](Launch& self) { tokens(self).send(p.message, p.choice, own); });
    if (several_nodes && launch.is(Role::inter_receive))
        launch.apart([&](Launch& self) {
            tokens(self).receive(plan.digest, [&] { nodes(self).await_sums(combination(self)); });
        });

    Routing routing(launch, plan.routing);
    const bool known = routing.await(), refused = known && routing.refused();
    if (launch.is(Role::compute) && known && !refused) {
        if (plan.landing.first_chunks > 0)
            launch.apart([&](Launch& self) {
                bring_first_tokens(self, plan.routing, plan.landing, plan.expert_offsets);
            });
        TokenLanding landing(launch, plan.routing, plan.landing, plan.expert_offsets);
        FinishedParts hidden(launch, plan);
        auto tiles = [&](i64 columns, i64 tile_columns, bool pairs = false) {
            TileShape tile = plan.tile;
            tile.columns = tile_columns;
            return ExpertTiles(plan.expert_offsets, plan.experts, columns, tile, launch.member(), launch.members(), pairs);
        };
        auto store = [&](const Matrix& to) { return Store<Type>(to, plan.capacity, plan.expert_offsets); };
        auto nothing = [](Launch self, Scratch) { return self.live(); };
        constexpr bool more_follows = true;
        const MatrixStack w1{p.w1, p.w1_stride};
        const Activate<Type, activation> activate(store(*plan.hidden), plan);
        engine::gemm<Type, more_follows>(
            launch, tiles(plan.inner, paired ? plan.tile.columns / 2 : plan.tile.columns, in_turn), plan.tile, plan.h,
            /* source */ [&](Tile t) { return landing.rows(t); }, either<paired>(PairedStack{w1, plan.inner}, w1),
            /* gate   */ [&](const Agent& who, Tile t, Range) { return landing.wait(who, t); },
            /* sink   */ either<in_turn>(ActivateInTurn<Type, activation>(activate, launch.member()), activate), nothing);
        engine::gemm<Type, more_follows>(
            launch, tiles(plan.n, plan.tile.columns), plan.tile, plan.inner,
            /* source */
            [&](Tile t) -> Rows { return {*plan.hidden, plan.expert_offsets[t.source] + t.rows.begin}; },
            MatrixStack{p.w2, p.w2_stride},
            /* gate   */ [&](const Agent& who, Tile t, Range k) { return hidden.wait(who, t, k); },
            /* sink   */ store(*plan.made), nothing);
        combination(launch).computed();
        for (u64 peer : RingOrder(launch.rank(), launch.size(), launch.node())) combination(launch).sum_for(peer);
    }
    if (several_nodes && launch.is(Role::inter_reduce) && known && !refused)
        launch.apart([&](Launch& self) { nodes(self).add_and_send(combination(self)); });

    if (!refused) combination(launch).collect(p.tokens, p.out);

    for (u64 i = 1; i < launch.node().size; ++i) launch.have_read(launch.neighbour(i), launch.agent().count());
    launch.finish();  // peers have read our tokens, weights and sums: inputs are free, outputs complete
}

}  // namespace mk
