// moe_dispatch_gemm: every rank has tokens, and some of the experts that they choose. A rank gets the rows of its experts,
// in order of expert, source rank, token and slot, each times the weights of its expert.
//   all      sort this rank's tokens by expert
//   movers   show that to the peers with the call; when all have called, it is known who gets what. They bring the tokens
//            here, each once, in the order in which the experts need them
//   compute  brings some of the first tokens, which all wait for; then takes the experts in order, and multiplies a tile as
//            soon as its rows have arrived
// Where there is more than one node:
//   inter-send     sends tokens once to each other node that needs them, to a gateway there, with tables that say to whom
//   inter-receive  tells its node what has come to this rank as a gateway: from here the others bring it
// Wrong ids, and more tokens or rows than there is room for, are seen by all ranks before anything is written: then the
// call does nothing else, and says why.
#include "mkernel/engine/engine.cuh"
#include "mkernel/node_experts.cuh"

#ifndef MK_TYPE
#define MK_TYPE bfloat16
#endif
#ifndef MK_OUT_TYPE
#define MK_OUT_TYPE MK_TYPE
#endif

namespace mk {

using Type = MK_TYPE;
using OutType = MK_OUT_TYPE;

MK_KERNEL(moe_dispatch_gemm, MoeDispatchGemmParams, p) {
    const MoeDispatchGemmPlan& plan = *p.plan;
    engine::expect(p.w);
    Launch launch({p.world, plan}, plan.split, Agent::warps);
    const Lines own{static_cast<u8*>(p.x.data), p.x.row_stride * i64(sizeof(Type))};

    if (launch.agent().index() == 0 && launch.agent().lane() == 0) *p.origins.dispatch = launch.generation();
    Routing(launch, plan.routing).sort(p.choice, p.tokens, launch.agent().scratch(), p.origins.expert_offsets);

    auto let_go = [&](Launch& self) {
        const u64 readers = self.readers() + (plan.landing.first_chunks > 0 ? plan.split.compute : 0);
        for (u64 i = 1; i < self.node().size; ++i) self.have_read(self.neighbour(i), readers);
    };
    auto bring_tokens = [&](Launch self, Scratch scratch) {
        Routing routing(self, plan.routing);
        if (routing.await() && !routing.refused()) {
            Courier<> courier(self, scratch);
            TokenLanding landing(self, plan.routing, plan.landing, p.origins.expert_offsets);
            landing.bring(courier, own, [&](i64 row, u64 source, const Route& route) {
                p.origins.source_rank[row] = i32(source);
                p.origins.source_token[row] = i32(route.token);
                p.origins.source_slot[row] = i32(route.slot);
            });
            landing.finish(courier);
        }
        let_go(self);
        return self.live();
    };
    auto nodes = [&](Launch& self) { return NodeDispatch(self, plan.routing, plan.landing, plan.nodes); };

    if (launch.is(Role::mover) || (launch.is(Role::compute) && plan.split.movers == 0))
        launch.apart([&](Launch& self) {
            Routing(self, plan.routing).meet(p.message, p.origins.expert_offsets);
            if (!self.by_warps(bring_tokens, !self.is(Role::mover))) self.drop();
        });
    if (several_nodes && launch.is(Role::inter_send))
        launch.apart([&](Launch& self) { nodes(self).send(p.message, p.choice, own), let_go(self); });
    if (several_nodes && launch.is(Role::inter_receive))
        launch.apart([&](Launch& self) { nodes(self).receive(plan.digest, [] {}); });

    if (launch.is(Role::compute)) {
        Routing routing(launch, plan.routing);
        TokenLanding landing(launch, plan.routing, plan.landing, p.origins.expert_offsets);
        // Who never learns where the experts' rows are leaves NaN everywhere. Of a refused call there are none.
        const bool known = routing.await();
        if (plan.landing.first_chunks > 0)
            launch.apart([&](Launch& self) {
                if (known && !Routing(self, plan.routing).refused())
                    bring_first_tokens(self, plan.routing, plan.landing, p.origins.expert_offsets);
                let_go(self);
            });
        const i64* offsets = known ? p.origins.expert_offsets : plan.whole;
        const u64 experts = known ? plan.experts : 1;
        const ExpertTiles in_order(offsets, experts, plan.n, plan.tile, known ? launch.member() : 0,
                                   known ? launch.members() : 1);
        engine::gemm<Type>(
            launch, in_order, plan.tile, plan.h,
            /* source */ [&](Tile t) { return landing.rows(t); }, MatrixStack{p.w, p.w_stride},
            /* gate   */ [&](const Agent& who, Tile t, Range) { return landing.wait(who, t); },
            /* sink   */ Store<OutType>(p.rows, plan.whole[1], offsets),
            /* meanwhile */ [](Launch self, Scratch) { return self.live(); });
    }

    launch.finish();  // peers have read our tokens: inputs are free, outputs complete
}

}  // namespace mk
