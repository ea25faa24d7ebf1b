// Peers: the first message of a call, and where it says that their operands are. Only those of this node are reached by
// loads and stores; what others say comes to their gateway here, which passes it on (internode.cuh).
#pragma once

#include "signal.cuh"

namespace mk {

// The segment of an operand that a rank has not passed to its launch.
constexpr u64 nowhere = ~u64(0);

class Peers : public Context {
public:
    using Context::Context;

    // The ranks that this one reaches, and itself.
    MK_DEVICE Node node() const {
        return several_nodes ? Node{world().node_begin, world().node_size} : Node{0, size()};
    }

    // Tells every peer of this node what this rank calls and where its operand is. One agent of the launch does it.
    MK_DEVICE void announce(const CallMessage& message) {
        tell(node().size - 1, message, [&](u64 i) { return world().outbox[neighbour(1 + i)]; });
    }

    // A gateway tells it for a rank of another node, to which its node has no other way.
    MK_DEVICE void announce_for(u64 other, const CallMessage& message) {
        tell(node().size, message, [&](u64 i) { return world().outbox[neighbour(i)] + other - rank(); });
    }

    // Who of this node has what a rank shows: itself, or its gateway.
    MK_DEVICE u64 holder(u64 peer) const { return several_nodes ? world().network->holders[peer] : peer; }

    // Waits until the peer has made the same call. False also if it makes another one, or has refused.
    MK_DEVICE bool await_call(u64 peer, u64 digest) {
        const u64 goal = target(0), next = (generation() + 1) << 32;
        return poll_each(
            agent(), {Awaited::call, peer, 0}, goal, world().inbox[peer].message, halves,
            [&](u64 i, u64 seen) {
                if (seen < goal) return Poll::pending;
                if (seen >= next) return Poll::refused;  // it is already a call further
                return i < 2 && u32(seen) != u32(digest >> 32 * i) ? Poll::mismatch : Poll::done;
            },
            [&] { return what_its_host_does(peer, digest); });
    }

    // The same of a rank of another node, by its letter: whatever that says.
    MK_DEVICE bool await_letter(u64 peer, u64 digest) {
        const u64 goal = target(1);
        return poll(
            agent(), {Awaited::call, peer, 0}, goal, &world().network->arrived[peer],
            [&](u64 seen) { return seen >= goal ? Poll::done : Poll::pending; },
            [&] { return what_its_host_does(peer, digest); });
    }

    // Whether a peer of this node is seen to have called something: await_call() ends at once.
    MK_DEVICE bool has_called(u64 peer) const { return sees(world().inbox[peer].message, 0); }

    // For kernels whose peers read nothing here: tells them that this rank has entered, and sees all of them enter. A peer
    // that calls something else shows, whoever waits for whom later; and who has nothing to wait for does not overwrite
    // its message with the next before all have seen it. `readers`: agents that read what peers hold, which say so later.
    MK_DEVICE bool greet(const CallMessage& message, u64 readers = 0) {
        announce(message);
        for (u64 peer : RingOrder(rank(), size(), node()))
            if (!await_call(peer, message.digest)) return false;
        for (u64 i = 1; i < node().size; ++i) have_read(neighbour(i), greeters() + readers);
        return live();
    }

    // Agents that look at messages where one greets: inter-send too.
    MK_DEVICE u64 greeters() const { return several_nodes ? 2 : 1; }

    // The one that is i steps further around the ring of this node.
    MK_DEVICE u64 neighbour(u64 i) const { return ring_rank(rank(), i, size(), node()); }

    // Of a peer that is known to have called.
    MK_DEVICE CallMessage message_of(u64 peer) const {
        const u64* said = world().inbox[peer].message;
        auto word = [&](u32 i) { return u64(u32(said[2 * i])) | said[2 * i + 1] << 32; };
        return {word(0), {word(1), word(2)}, word(3)};
    }

    MK_DEVICE void* at(u64 peer, Place place) const {
        return static_cast<u8*>(world().segments[place.segment * size() + peer]) + place.offset;
    }

    // Where the operand of a peer is that has called. Null if it has passed none, which is a failure of all ranks.
    MK_DEVICE void* operand_of(u64 peer) {
        const Place operand = message_of(peer).operand;
        if (operand.segment != nowhere) return at(peer, operand);
        if (live() && agent().lane() == 0) fail(Reason::no_operand, {Awaited::call, peer, 0}, 0, 0, 0);
        drop();
        return nullptr;
    }

    // Called by each of `readers` agents when it has read the peer's message and its copies of the peer's operand are
    // complete: the last one tells it.
    MK_DEVICE void have_read(u64 peer, u64 readers) {
        if (live() && agent().lane() == 0 && fetch_add(counter(1 + peer), 1) + 1 == readers)
            store_release<Scope::system>(&world().outbox[peer]->read, target(1));
    }

    // For agents that are to go together, and have as many steps to go but for the last (with two more of one, it would wait for
    // ever): each says when it has done one, and waits until so many are done in all. No data come with it.
    MK_DEVICE void has_stepped() const {
        if (agent().lane() == 0) count_up(counter(steps()));
    }
    MK_DEVICE bool await_steps(u64 count) {
        return stand_by([&] { return load_relaxed(counter(steps())) >= count; });
    }

    // The end of a launch for one agent. The last of them waits until no peer needs this rank's message or operand any
    // more, so that both may be overwritten, and then makes the generation count. An agent that has failed is not counted.
    MK_DEVICE void finish() {
        const Span span(*this, agent().lane() == 0, Traced::finish, rank());
        agent().sync();
        if (!live() || agent().lane() != 0) return;
        u64* const next = bank(generation() + 1, 0);  // looked up first: it takes long
        // Agents that stage read, behind this count, what others have done. Nobody else does: whoever counts has already
        // read what is overwritten here, and the end of the launch publishes all results.
        const u64 before = several_nodes ? fetch_add(counter(0), 1) : count_up(counter(0));
        // One look at all peers, while that is under way: as a rule they have read. What they read is not read here, so no
        // more than seeing it is wanted.
        bool all_have_read = true;
        for (u64 i = 1; i < node().size; ++i) all_have_read = sees(&world().inbox[neighbour(i)].read, 1) && all_have_read;
        if (before + 1 != agent().count()) return;
        for (u64 i = all_have_read ? node().size : 1; i < node().size; ++i) {
            u64 peer = neighbour(i);
            Subject read{Awaited::read, peer, 0};
            if (!wait(agent().alone(), &world().inbox[peer].read, 1, read)) return;
        }
        for (u64 i = 0; i < counters(); ++i) next[i] = 0;  // the next launch finds its bank clear
        world().running = 0;
        world().generation = generation();
    }

    // Whether all agents have finished but so many.
    MK_DEVICE bool finished_but(u64 agents) const { return load_acquire(counter(0)) + agents >= agent().count(); }

private:
    static constexpr u64 halves = 2 * sizeof(CallMessage) / sizeof(u64);

    // Each word says by itself that it is of this call, so none waits for another to be there: only what was written
    // before is ordered, once for all.
    template <class To>
    MK_DEVICE void tell(u64 count, const CallMessage& message, To inbox) {
        agent().sync();  // what any lane has written before is known with it
        const u64* said = reinterpret_cast<const u64*>(&message);
        if (!live() || agent().lane() >= count * halves) return;
        release_ahead();
        for (u64 i = agent().lane(); i < count * halves; i += agent().lanes()) {
            const u64 half = i % halves;
            interleave();
            store_released(&inbox(i / halves)->message[half], target(u32(said[half / 2] >> half % 2 * 32)));
        }
        interleave();
    }

    // In place of a launch; nothing, if there may still be one.
    MK_DEVICE Poll what_its_host_does(u64 peer, u64 digest) const {
        const HostPage& page = *world().pages[peer];
        const u64 seen = load_acquire(&page.called);
        if (seen < target(u64(Called::announced))) return Poll::pending;
        if (seen >= target(u64(Called::refused))) return Poll::refused;
        return load_relaxed(&page.digest) == digest ? Poll::pending : Poll::mismatch;
    }

    // Counters have many writers, all of this GPU: of agents that have finished, of readers of each peer, of steps. Each launch
    // has its own bank of them.
    MK_DEVICE u64 steps() const { return 1 + size(); }
    MK_DEVICE u64 counters() const { return 2 + size(); }
    MK_DEVICE u64* bank(u64 generation, u64 index) const {
        return &world().counters[(generation & 1) * counters() + index];
    }
    MK_DEVICE u64* counter(u64 index) const { return bank(generation(), index); }
};

}  // namespace mk
