// Roles: which agent does what. The split is the plan's: the first agents move, the others compute; where there is more than
// one node, some add up what leaves it, and two more serve the network.
#pragma once

#include "courier.cuh"
#include "schedule.cuh"
#include "staging.cuh"

namespace mk {

// Kernels do nothing for those that come behind inter_reduce.
enum class Role : u64 {
    mover = 0,
    compute = 1,
    inter_send = 2,
    inter_receive = 3,
    inter_reduce = 4,
    stage_out = 5,
    stage_in = 6,
    none = 7,
};

class Launch : public Peers {
public:
    // `mover_warps`: how many each mover consists of, where they act by themselves: see by_warps(). Those that stage do so
    // here, and nothing else: when they go on, all others have finished.
    MK_DEVICE Launch(const Start& start, Split split, u64 mover_warps = 1)
        : Peers(start, u64(role_of(start.world, split))), split_(split), mover_warps_(mover_warps) {
        delay();
        const bool out = is(Role::stage_out);
        if (several_nodes && (out || is(Role::stage_in)) && !Stager::serve(*this, out)) drop();
    }

    MK_DEVICE bool is(Role role) const { return role_of(world(), split_) == role; }

    // All agents but those that stage: the first ones.
    MK_DEVICE u64 workers() const { return workers_of(world()); }

    // One agent does what is to be done once, before all else: the last one, as no other has fewer tiles.
    MK_DEVICE bool speaks() const { return agent().index() + 1 == workers(); }

    // The launch as a part of this agent takes part in it, on its own.
    MK_DEVICE Launch as(const Agent& part) const {
        Launch launch = *this;
        launch.agent_ = part;
        return launch;
    }

    // Has work(launch, scratch) done by the warps of this mover, each a member by itself with its part of the scratch
    // memory: a warp that orders what it has brought before its signal, or starts many short copies, holds up no other.
    // `whole`: by the agent as one, after all. Returns whether all of them succeed.
    template <class Work>
    MK_DEVICE bool by_warps(Work work, bool whole = false) const {
        Scratch scratch = agent().scratch();
        Launch self = *this;
        if (!whole) {
            self.agent_ = Agent::warp();
            self.warp_ = agent().part();
            scratch.bytes = scratch.bytes / mover_warps_ / scratch_alignment * scratch_alignment;
            scratch.data += self.warp_ * scratch.bytes;
        }
        return !agent().any(!work(self, scratch));
    }

    // This agent, or warp of a mover, among those of its role. Neighbours are warps of different movers: what is wanted at
    // the same time all of them bring.
    MK_DEVICE u64 member() const {
        if (is(Role::mover)) return warp_ * split_.movers + agent().index();
        return agent().index() - split_.movers - (adds_up() ? split_.compute : 0);
    }
    MK_DEVICE u64 members() const {
        return adds_up() ? split_.inter_reduce : is(Role::mover) ? split_.movers * mover_warps_ : split_.compute;
    }

    // Those who read what peers say of their calls: movers, or compute agents where there are none, and inter-send.
    MK_DEVICE u64 readers() const {
        return (split_.movers > 0 ? split_.movers * mover_warps_ : split_.compute) + (several_nodes ? 1 : 0);
    }

    // Does something in a function of its own, with a launch of its own: work(launch). What multiplies keeps its
    // registers so.
    template <class Work>
    MK_DEVICE void apart(Work work) {
        if (!done(*this, work)) drop();
    }

private:
    template <class Work>
    static MK_DEVICE_APART bool done(Launch launch, Work work) {
        work(launch);
        return launch.live();
    }

    static MK_DEVICE Role role_of(const World& world, Split split) {
        const Agent agent = Agent::current();
        const u64 index = agent.index(), others = split.movers + split.compute;
        if (!several_nodes || index < others) return index < split.movers ? Role::mover : Role::compute;
        const u64 last = workers_of(world);
        if (index >= last) return index == last ? Role::stage_out : Role::stage_in;
        if (index < others + split.inter_reduce) return Role::inter_reduce;
        switch (index - others - split.inter_reduce) {
        case 0: return Role::inter_send;
        case 1: return Role::inter_receive;
        default: return Role::none;
        }
    }

    static MK_DEVICE u64 workers_of(const World& world) {
        return Agent::current().count() - (several_nodes ? Stager::agents_in(world) : 0);
    }

    MK_DEVICE bool adds_up() const { return several_nodes && is(Role::inter_reduce); }

    // Test hook: a role that starts late, by a time that differs from call to call and from agent to agent.
    MK_DEVICE void delay() const {
        if (world().delay_seed == 0) return;
        const u64 most = world().delay_ns[role()];
        if (most == 0) return;
        u64 mixed = (world().delay_seed + generation() * 0x9e3779b97f4a7c15 + agent().index()) * 0xbf58476d1ce4e5b9;
        u64 until = now_ns() + ((mixed >> 32) * most >> 32);
        for (u32 spins = 0; now_ns() < until; ++spins) pause(spins);
    }

    static constexpr u64 scratch_alignment = 128;

    Split split_;
    u64 mover_warps_, warp_ = 0;
};

}  // namespace mk
