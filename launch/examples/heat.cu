// One step of the heat equation on a plate whose rows are spread over the ranks: halo exchange and stencil in one launch.
//   mover    tells the neighbours where this rank's rows are, and brings the one above the first and the one below the
//            last of them here
//   compute  the inner rows at once, the first and the last one as soon as their neighbours' rows are here
#include <mkernel/roles.cuh>

namespace mk {

struct HeatParams {
    World* world;
    CallMessage message;
    double* field;  // (rows, columns), this rank's; peers read it
    double* next;   // the same after the step
    double* halo;   // (2, columns): the rows above and below; zero at the plate's rim
    u64* arrived;   // [2], signals
    i64 rows, columns;
    i64 rows_above;  // of the rank above
    double rate;
};

MK_KERNEL(heat, HeatParams, p) {
    const u64 movers = 1;
    Launch launch(p.world, {movers, Agent::current().count() - movers});
    const Agent& agent = launch.agent();
    const u64 rank = launch.rank(), size = launch.size(), above = rank - 1, below = rank + 1;
    const i64 bytes = p.columns * i64(sizeof(double));

    if (launch.is(Role::mover)) {
        launch.announce(p.message);
        for (u64 peer : RingOrder(rank, size)) {
            if (peer == above || peer == below) {
                if (!launch.await_call(peer, p.message.digest)) break;
                double* theirs = static_cast<double*>(launch.operand_of(peer));
                if (!theirs) break;
                if (peer == above) theirs += (p.rows_above - 1) * p.columns;
                const i64 side = peer == above ? 0 : 1;
                Lines to{reinterpret_cast<u8*>(p.halo + side * p.columns), bytes};
                Pending row = copy(agent, to, {reinterpret_cast<u8*>(theirs), bytes}, 1, bytes);
                launch.raise<Scope::device>(&p.arrived[side], 1, row.complete());
            }
            launch.have_read(peer, movers);
        }
    }

    if (launch.is(Role::compute)) {
        auto gate = [&](i64 row) {
            bool top = row > 0 || rank == 0 || launch.wait(agent, &p.arrived[0], 1, {Awaited::arrival, above, 0});
            bool bottom = row + 1 < p.rows || below == size ||
                          launch.wait(agent, &p.arrived[1], 1, {Awaited::arrival, below, 1});
            return top && bottom;
        };
        for (i64 i = i64(launch.member()); i < p.rows; i += i64(launch.members())) {
            const i64 row = (i + 1) % p.rows;  // the first row last
            const bool arrived = gate(row);
            const double* here = p.field + row * p.columns;
            const double* up = row > 0 ? here - p.columns : p.halo;
            const double* down = row + 1 < p.rows ? here + p.columns : p.halo + p.columns;
            for (i64 j = agent.lane(); j < p.columns; j += agent.lanes()) {
                double left = j > 0 ? here[j - 1] : 0, right = j + 1 < p.columns ? here[j + 1] : 0;
                double change = up[j] + down[j] + left + right - 4 * here[j];
                p.next[row * p.columns + j] = arrived ? here[j] + p.rate * change : not_a_number<double>();
            }
        }
    }

    launch.finish();
}

}  // namespace mk
