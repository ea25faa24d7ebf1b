// Signals: a 64-bit word with one writer, whose value only grows: generation << 32 | progress. A wait is `value >= target`,
// so nothing is ever reset, and a word left by an earlier call or another operator is simply too small.
// Every wait ends: with the signal, at a deadline, or because another rank or agent has failed.
#pragma once

#include "trace.cuh"

namespace mk {

// Progress of HostPage::called.
enum class Called : u64 {
    announced = 1,  // the digest is there; the hosts agree on something
    ready = 2,      // the rank has what it needs to agree
    refused = 3,    // the rank has raised an error instead of calling
};

// What was waited for, and why in vain: the codes of Record.
enum class Awaited : u64 {
    call = 1,
    arrival = 2,
    read = 3,
    turn = 4,
    partial = 6,
    sum = 7,
    room = 8,
    routes = 9,
    rows = 10,
    queue = 11,  // room in the queue to the proxy
    sent = 12,
    network = 13,  // a chunk from another node
    receipt = 14,  // of what was sent there
    credit = 15,   // that a unit is needed no more
    slot = 16,     // of host memory, at a rank that something is sent to
};
enum class Reason : u64 {
    entry_timeout = 1,
    progress_timeout = 2,
    mismatch = 3,
    refused = 4,
    closed = 5,
    concurrent = 6,
    lost = 7,     // as a watcher sees it
    network = 8,  // as a proxy sees it
    no_operand = 9,
};

constexpr u64 everyone = ~u64(0);

// The subject of a wait, for the record. `peer` may be `everyone`: a local signal that depends on all of them.
struct Subject {
    Awaited awaited;
    u64 peer;
    u64 index;
};

enum class Poll { pending, done, refused, mismatch };

template <bool>
class Courier;
template <class>
class Window;
template <class>
class Internode;
template <class>
class NodeWindow;
class NodeMirrors;
template <class, class>
class NodeSums;
class Stager;

// Proof that bytes are where they were to go, or that all have read what may now be overwritten: only those who copy,
// or keep a window, make one, and raise() takes nothing less.
class Completed {
    MK_DEVICE Completed() {}
    friend class Pending;
    friend class Writes;
    template <bool>
    friend class Courier;
    template <class>
    friend class Window;
    template <class>
    friend class Internode;
    template <class>
    friend class NodeWindow;
    friend class NodeMirrors;
    template <class, class>
    friend class NodeSums;
    friend class Stager;
};

// What a launch reads first, on its way: a kernel that needs more of memory asks for that before it waits.
struct Start {
    template <class Plan>
    MK_DEVICE Start(World* world, const Plan& plan) : Start(fetched(world, plan)) {}
    MK_DEVICE Start(World* world)
        : world(*world), agent(Agent::current()), leads(agent.lane() == 0),
          // The first agent marks that a launch is under way. Graphs that are replayed at once would share a generation.
          other(leads && agent.index() == 0 ? exchange(&world->running, 1) : 0),
          failures(leads ? load_relaxed(&world->failures) : 0),  // past the cache: not by all lanes of all agents at once
          generation(u32(world->generation) + 1), rank(world->rank), size(world->size) {}

    World& world;
    Agent agent;
    bool leads;
    u64 other, failures;
    u32 generation;
    u64 rank, size;

private:
    template <class Plan>
    static MK_DEVICE World* fetched(World* world, const Plan& plan) {
        fetch_ahead(&plan, sizeof plan);
        fetch_ahead(world, sizeof *world);
        return world;
    }
};

// One launch as one agent sees it: who waits, for which generation, and whether something has already failed.
class Context {
public:
    MK_DEVICE Context(const Start& start, u64 role)
        : world_(start.world), generation_(start.generation), role_(u32(role)), agent_(start.agent) {
        const Span span(*this, start.leads, Traced::enter, rank());
        const u64 other = start.other;
        auto refuse = [other](Context& self) {
            return self.fail(Reason::concurrent, {Awaited::turn, self.rank(), 0}, 0, other, 0);
        };
        live_ = agent_.broadcast(start.failures == 0 && (other == 0 || aside(*this, refuse)));
    }

    MK_DEVICE World& world() const { return world_; }
    MK_DEVICE const Agent& agent() const { return agent_; }
    MK_DEVICE u64 rank() const { return world_.rank; }
    MK_DEVICE u64 size() const { return world_.size; }
    MK_DEVICE u64 role() const { return role_; }
    MK_DEVICE u64 generation() const { return generation_; }
    MK_DEVICE u64 target(u64 progress) const { return generation() << 32 | progress; }

    // False once a wait of this agent has failed, or any of an earlier launch, behind which this one was queued: it
    // raises nothing any more, and what it still stores is NaN.
    MK_DEVICE bool live() const { return live_; }

    // For an agent, a part of which has failed.
    MK_DEVICE void drop() { live_ = false; }

    // Waits until the signal has reached `progress` in this generation. All lanes of `who` call it and get one verdict.
    MK_DEVICE bool wait(const Agent& who, const u64* signal, u64 progress, Subject subject) {
        u64 goal = target(progress);
        return poll(
            who, subject, goal, signal, [&](u64 seen) { return seen >= goal ? Poll::done : Poll::pending; },
            [] { return Poll::pending; });
    }

    // The same by one lane among others, each of which waits for a signal of its own.
    MK_DEVICE bool wait_alone(const u64* signal, u64 progress, Subject subject) {
        return wait_alone(signal, target(progress), subject, [this, progress](u64 seen) { return seen >= target(progress); });
    }

    // For a word of data (low_latency.cuh), which is no signal of a generation, but 0 as long as it has not come.
    MK_DEVICE bool wait_word(const u64* word, Subject subject) {
        return wait_alone(word, 0, subject, [](u64 seen) { return seen != 0; });
    }

    // Waits for signal_of(i) of so many, at which the lanes look side by side; all get one verdict.
    template <class Signal, class About>
    MK_DEVICE bool wait_all(const Agent& who, u64 count, u64 progress, Signal signal_of, About subject_of) {
        const Subject about = subject_of(0);
        Span span(*this, who.lane() == 0, Traced::wait, about.peer, u64(about.awaited), about.index);
        for (u64 i = who.lane(); i < count; i += who.lanes())
            if (!wait_alone(signal_of(i), progress, subject_of(i))) break;
        live_ = !who.any(!live_);
        span.succeeded(live_);
        return live_;
    }
    template <class Signal, class About>
    MK_DEVICE bool wait_all(u64 count, u64 progress, Signal signal_of, About subject_of) {
        return wait_all(agent_, count, progress, signal_of, subject_of);
    }

    // Whether all of so many signals have reached `progress`: one look, of the lanes side by side.
    template <class Signal>
    MK_DEVICE bool all_there(const Agent& who, u64 count, u64 progress, Signal signal_of) const {
        const u64 goal = target(progress);
        bool all = true;
        for (u64 i = who.lane(); i < count; i += who.lanes()) all = load_acquire(signal_of(i)) >= goal && all;
        return !who.any(!all);
    }

    // How many of so many signals of this GPU have reached `progress`, before one that has not: one look, at a few of them.
    template <class Signal>
    MK_DEVICE u64 there(const Agent& who, u64 count, u64 progress, Signal signal_of) const {
        constexpr u32 ahead = 8;  // that one lane looks at
        const u64 goal = target(progress);
        if (who.lanes() > 1) {
            const u64 lane = who.lane(), seen = who.leading(lane >= count || load_acquire(signal_of(lane)) >= goal);
            return seen < count ? seen : count;
        }
        bool here[ahead];
        MK_UNROLL
        for (u32 i = 0; i < ahead; ++i) here[i] = i < count && load_ahead(signal_of(i)) >= goal;
        u32 seen = 0;
        MK_UNROLL
        for (u32 i = 0; i < ahead; ++i) seen += seen == i && here[i];
        if (seen > 0) acquire_seen();
        return seen;
    }

    // As wait(), with a condition of the caller's on the signal's value, and one that is looked at now and then.
    template <class Check, class Look>
    MK_DEVICE bool poll(const Agent& who, Subject subject, u64 goal, const u64* signal, Check check, Look look) {
        return poll_each(who, subject, goal, signal, 1, [&](u64, u64 seen) { return check(seen); }, look);
    }

    // The same of `count` neighbouring words, which the lanes look at side by side: check(i, value of that one).
    template <class Check, class Look>
    MK_DEVICE bool poll_each(const Agent& who, Subject subject, u64 goal, const u64* words, u64 count, Check check,
                             Look look) {
        Span span(*this, who.lane() == 0, Traced::wait, subject.peer, u64(subject.awaited), subject.index);
        for (u64 i = who.lane(); live_ && i < count; i += who.lanes())
            live_ = poll_alone(subject, goal, words + i, [&](u64 seen) { return check(i, seen); }, look);
        live_ = !who.any(!live_);
        span.succeeded(live_);
        return live_;
    }

    // Waits until ready(), which one lane asks, for as long as nothing has failed: others wait for this agent, or for those that
    // it waits for, and they have deadlines. All lanes get one verdict.
    template <class Ready>
    MK_DEVICE bool stand_by(Ready ready) {
        live_ = agent_.broadcast(live_ && agent_.lane() == 0 && stand_by_alone(ready));
        return live_;
    }

    // Whether a signal of this GPU is seen to have reached `progress`; what it stands for may be read after acquire_seen().
    MK_DEVICE bool sees(const u64* signal, u64 progress) const { return load_ahead(signal) >= target(progress); }

    // All lanes call it; the bytes that Completed stands for are seen by whoever sees the signal.
    template <Scope scope>
    MK_DEVICE void raise(u64* signal, u64 progress, Completed) {
        raise<scope>(signal, progress);
    }

    // The same for signal_of(i) of so many signals, by a lane each: the lanes wait for their fences together.
    template <Scope scope, class Signal>
    MK_DEVICE void raise_all(u64 count, u64 progress, Signal signal_of, Completed) {
        for (u64 i = agent_.lane(); i < count; i += agent_.lanes()) raise_alone<scope>(signal_of(i), progress);
    }

    // Tells this rank's host what is wrong with the data of this call, unless it has yet to take note of an earlier fault.
    MK_DEVICE void report(const DataFault& fault) const {
        DataFault& told = world_.pages[rank()]->fault;
        if (load_relaxed(&told.problem)) return;
        told.generation = fault.generation;
        told.rank = fault.rank;
        for (u32 i = 0; i < 3; ++i) told.values[i] = fault.values[i];
        store_release<Scope::system>(&told.problem, fault.problem);
    }

protected:
    template <Scope scope>
    MK_DEVICE void raise(u64* signal, u64 progress) {
        if (agent_.lane() == 0) raise_alone<scope>(signal, progress);
    }

    // Does what is rare in a function of its own, with a launch of its own, so that what runs is near what runs next. Not beside
    // what multiplies, which keeps more registers than a call leaves it.
    template <class Work>
    static MK_DEVICE_APART bool aside(Context self, Work work) {
        return work(self);
    }

    // By one lane among others, each of which raises a signal of its own.
    template <Scope scope>
    MK_DEVICE void raise_alone(u64* signal, u64 progress) {
        interleave();
        if (live_) store_release<scope>(signal, target(progress));
        interleave();
    }

private:
    template <class Reached>
    MK_DEVICE bool wait_alone(const u64* signal, u64 goal, Subject subject, Reached reached) {
        live_ = live_ && poll_alone(
                             subject, goal, signal, [&](u64 seen) { return reached(seen) ? Poll::done : Poll::pending; },
                             [] { return Poll::pending; });
        return live_;
    }

    static constexpr u64 first_look_ns = 20 * nanoseconds_per_microsecond;
    static constexpr u64 look_every_ns = 10 * nanoseconds_per_microsecond;
    static constexpr u32 spins_per_look = 8;

    template <class Check, class Look>
    MK_DEVICE bool poll_alone(Subject subject, u64 goal, const u64* signal, Check check, Look look) {
        interleave();
        const u64 start = now_ns();
        u64 next_look = start + first_look_ns, seen = load_acquire(signal);
        Poll verdict = check(seen);
        Clock clock{Phase::outside, start};
        for (u32 spins = 0; verdict == Poll::pending; ++spins) {
            pause(spins);
            // An acquire costs more than a load: only for what is new.
            if (load_relaxed(signal) != seen) {
                verdict = check(seen = load_acquire(signal));
                clock.since = now_ns();  // it goes on
                continue;
            }
            if (spins % spins_per_look) continue;
            const u64 now = now_ns();
            if (now < next_look) continue;
            next_look = now + look_every_ns;
            if (load_relaxed(&world_.failures)) return give_up();
            if (!my_look(now)) continue;
            if (load_relaxed(&world_.pages[rank()]->abort)) return give_up();
            // Everything once more, now that a peer is known to have closed: it may have spoken before that.
            const bool alone = closed(subject.peer);
            verdict = check(seen = load_acquire(signal));
            if (verdict == Poll::pending) verdict = look();
            if (verdict != Poll::pending) break;
            if (alone) return adopt(subject.peer) ? give_up() : fail(Reason::closed, subject, goal, seen, now - start);
            const u64 last = last_of_all(subject.peer);
            const Phase phase = phase_of(last);
            if (phase != clock.phase) clock = {phase, now};
            const bool entered = phase == Phase::entered;
            const u64 limit = entered ? world_.progress_timeout_ns : world_.entry_timeout_ns;
            if (limit && now - clock.since > limit)
                return fail(entered ? Reason::progress_timeout : Reason::entry_timeout,
                            {entered ? subject.awaited : Awaited::call, last, subject.index}, goal, seen, now - start);
        }
        if (verdict == Poll::done) return true;
        return fail(verdict == Poll::refused ? Reason::refused : Reason::mismatch, subject, goal, seen, now_ns() - start);
    }

    template <class Ready>
    MK_DEVICE bool stand_by_alone(Ready ready) {
        interleave();
        for (u32 spins = 0; !ready(); ++spins) {
            pause(spins);
            if (spins % spins_per_look) continue;
            if (load_relaxed(&world_.failures)) return give_up();
            if (my_look(now_ns()) && load_relaxed(&world_.pages[rank()]->abort)) return give_up();
        }
        return true;
    }

    // Reads of host memory by all who wait, at once, would slow down the links: one looks for all of this rank.
    MK_DEVICE bool my_look(u64 now) const {
        const u64 last = load_relaxed(world_.looked);
        return now - last >= look_every_ns && compare_exchange(world_.looked, last, now);
    }

    // A deadline counts anew when the peer gets further: a rank that plans has not entered, but is there.
    enum class Phase { outside, announced, entered };
    struct Clock {
        Phase phase;
        u64 since;
    };

    MK_DEVICE Phase phase_of(u64 peer) const {
        if (peer == rank()) return Phase::entered;
        if (load_relaxed(world_.inbox[peer].message) >= target(0)) return Phase::entered;
        u64 host = load_relaxed(&world_.pages[peer]->called);
        return host >= target(u64(Called::announced)) ? Phase::announced : Phase::outside;
    }

    // Who is awaited, or whoever has got less far: those who have entered may wait for that one themselves.
    MK_DEVICE u64 last_of_all(u64 awaited) const {
        u64 last = awaited == everyone ? rank() : awaited;
        MK_NO_UNROLL
        for (u32 peer = 0; peer < u32(size()) && phase_of(last) > Phase::outside; ++peer)
            if (phase_of(peer) < phase_of(last)) last = peer;
        // One of another node shows by way of its gateway here, which may be who has not come.
        if (several_nodes && phase_of(world_.network->holders[last]) < Phase::entered) return world_.network->holders[last];
        return last;
    }

    // Whether nothing can come any more: of a launch that has ended well all comes, though the network may tell it later.
    MK_DEVICE bool closed(u64 peer) const {
        return peer != everyone && load_acquire(&world_.pages[peer]->closed) - 1 < generation_;
    }

    // Another rank or agent has failed: it has written why.
    MK_DEVICE bool give_up() {
        fetch_add(&world_.failures, 1);
        return false;
    }

    // A peer that has closed because of a failure says more than that it has closed. False if it has met none.
    MK_DEVICE bool adopt(u64 peer) const {
        u64 why = load_acquire(&world_.pages[peer]->abort);
        u64* own = &world_.pages[rank()]->abort;
        if (why && load_relaxed(own) == 0) store_release<Scope::system>(own, why);
        return why != 0;
    }

protected:
    // Writes this rank's record, if it is the first, and then the abort words of all ranks. Always false.
    MK_DEVICE bool fail(Reason reason, Subject subject, u64 expected, u64 seen, u64 waited_ns) {
        HostPage* own = world_.pages[rank()];
        if (load_acquire(&own->abort)) return false;  // another's failure, perhaps the cause of this one
        if (fetch_add(&world_.failures, 1) == 0) {
            Record& record = own->by_kernel;
            record.reason = u64(reason);
            record.generation = generation_;
            record.role = role_;
            record.awaited = u64(subject.awaited);
            record.index = subject.index;
            record.peer = subject.peer;
            record.expected = expected;
            record.seen = seen;
            record.waited_ns = waited_ns;
            store_release<Scope::system>(&record.written, 1);
            for (u64 i = 0; i < size(); ++i) {
                u64* abort = &world_.pages[(rank() + i) % size()]->abort;
                if (load_relaxed(abort) == 0) store_release<Scope::system>(abort, 1 + rank());
            }
        }
        return false;
    }

private:
    World& world_;
    u32 generation_, role_;  // signals have 32 bits for the one
    bool live_ = false;

protected:
    Agent agent_;
};

}  // namespace mk
