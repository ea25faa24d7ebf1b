// How the lanes of a launch run on the host: on a pool of threads, or, for tests, one at a time in an order drawn from a
// seed and on a clock that only moves when all of them wait.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "fiber.cuh"
#include "host_lanes.cuh"

namespace mk {
namespace host {

using Entry = void (*)(const void* params);

// --- structs shared with Python --------------------------------------------------------------------------------------

// One launch, as Python asks for it.
struct Launch {
    const void* params;
    u64 agents;
    u64 lanes;
    u64 shared_bytes;
    u64 seed;  // 0: no random yields, copies as late as allowed
};

// What works beside the launches, as a thread of its own does elsewhere.
struct Helper {
    void* step;  // int (*)(void* of): does what there is to do; whether there was anything
    void* of;
};

// Several ranks, each with a row of launches that it runs one after the other.
struct Simulation {
    u64 seed;
    u64 ranks;
    u64 launches_per_rank;
    void* ended;       // int (*)(u64 rank, u64 launch): the host's turn after a launch; whether it makes the next one
    u64 stopped_rank;  // gets no turn any more after stop_step turns of all; a number beyond the last: none
    u64 stop_step;
    Helper* helpers;
    u64 helper_count;
    u64 steps;       // out
    u64 elapsed_ns;  // out, virtual
};

// --- end of the shared structs ---------------------------------------------------------------------------------------

class Simulator;

struct RunningLane : Lane {
    Simulator* simulator;
    Fiber* fiber;  // of who takes turns
    u64 idle_round;  // in which it has waited
};

inline RunningLane*& running() {
    static thread_local RunningLane* lane = nullptr;
    return lane;
}

// The memory of one launch: its teams, their shared memory, their lanes.
class Crew {
public:
    Crew(const Launch& launch, Simulator* simulator)
        : lanes_per_team_(u32(launch.lanes)), teams_(launch.agents), lanes_(launch.agents * launch.lanes),
          shared_pitch_((launch.shared_bytes + 63) / 64 * 64),
          shared_(new (std::align_val_t(64)) u8[shared_pitch_ * launch.agents]) {
        for (u64 i = 0; i < teams_.size(); ++i)
            teams_[i] = Team{u32(i), u32(launch.agents), lanes_per_team_,
                             {shared_.get() + i * shared_pitch_, launch.shared_bytes}, false, 0, 0};
        for (u64 i = 0; i < lanes_.size(); ++i) {
            RunningLane& lane = lanes_[i];
            u64 state = launch.seed + i;
            lane.team = &teams_[i / launch.lanes];
            lane.index = u32(i % launch.lanes);
            lane.random = launch.seed ? next_random(state) | 1 : 0;
            lane.simulator = simulator;
            lane.fiber = nullptr;
            lane.idle_round = 0;
        }
    }
    std::vector<RunningLane>& lanes() { return lanes_; }

private:
    struct Release {
        void operator()(u8* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    u32 lanes_per_team_;
    std::vector<Team> teams_;
    std::vector<RunningLane> lanes_;
    u64 shared_pitch_;
    std::unique_ptr<u8[], Release> shared_;
};

// Idle threads, kept for the next launch.
class Pool {
public:
    struct Worker {
        std::mutex mutex;
        std::condition_variable wake;
        RunningLane* lane = nullptr;
        Entry entry = nullptr;
        const void* params = nullptr;
        class Countdown* done = nullptr;
    };

    // Never destroyed: its threads sleep on it until the process ends. A forked child has none of the threads.
    static Pool& instance() {
        static Pool* pool = new Pool;
        if (pool->process_ != getpid()) pool = new Pool;
        return *pool;
    }

    // All of them or an exception: agents wait for each other, so some are as bad as none.
    std::vector<Worker*> acquire(u64 count) {
        std::lock_guard<std::mutex> lock(mutex_);
        while (idle_.size() < count) {
            auto worker = std::make_unique<Worker>();
            std::thread(&Pool::work, this, worker.get()).detach();
            idle_.push_back(worker.release());
        }
        std::vector<Worker*> workers(idle_.end() - count, idle_.end());
        idle_.resize(idle_.size() - count);
        return workers;
    }

private:
    void work(Worker* self);

    pid_t process_ = getpid();
    std::mutex mutex_;
    std::vector<Worker*> idle_;
};

class Countdown {
public:
    explicit Countdown(u64 count) : count_(count) {}
    void arrive() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (--count_ == 0) zero_.notify_all();
    }
    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        zero_.wait(lock, [&] { return count_ == 0; });
    }

private:
    std::mutex mutex_;
    std::condition_variable zero_;
    u64 count_;
};

inline void run_lane(RunningLane& lane, Entry entry, const void* params) {
    running() = &lane;
    entry(params);
    running() = nullptr;
}

inline void Pool::work(Worker* self) {
    for (;;) {
        Countdown* done;
        {
            std::unique_lock<std::mutex> lock(self->mutex);
            self->wake.wait(lock, [&] { return self->lane != nullptr; });
            run_lane(*self->lane, self->entry, self->params);
            done = self->done;
            self->lane = nullptr;
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            idle_.push_back(self);
        }
        done->arrive();
    }
}

// Returns 0, or the errno with which threads or memory were refused (nothing has run then).
inline int run_on_threads(Entry entry, const Launch& launch) try {
    Crew crew(launch, nullptr);
    std::vector<RunningLane>& lanes = crew.lanes();
    std::vector<Pool::Worker*> workers = Pool::instance().acquire(lanes.size() - 1);
    Countdown done(workers.size());
    for (u64 i = 0; i < workers.size(); ++i) {
        std::lock_guard<std::mutex> lock(workers[i]->mutex);
        workers[i]->entry = entry;
        workers[i]->params = launch.params;
        workers[i]->done = &done;
        workers[i]->lane = &lanes[i + 1];
        workers[i]->wake.notify_one();
    }
    run_lane(lanes[0], entry, launch.params);
    done.wait();
    return 0;
} catch (const std::system_error& error) {
    return error.code().value();
} catch (const std::bad_alloc&) {
    return ENOMEM;
}

// Runs the launches of several ranks in one thread, one lane at a time, each until it waits or reaches a point where
// threads could be interleaved. The clock moves a little with every turn, and far once all that is left is waiting: so
// a deadline of ten minutes passes at once, and the same seed gives the same run.
class Simulator {
public:
    Simulator(Entry entry, const Launch* launches, Simulation& simulation)
        : entry_(entry), launches_(launches), simulation_(simulation), random_(simulation.seed),
          ranks_(simulation.ranks), rested_in_(simulation.helper_count) {}

    // Returns 0, or ETIMEDOUT if all lanes waited for a virtual year: a wait without a deadline.
    int run() {
        for (u64 rank = 0; rank < simulation_.ranks; ++rank) start_launch(rank);
        simulation_.steps = 0;
        while (!runnable_.empty()) {
            u64 chosen = next_random(random_) % (runnable_.size() + rested_in_.size());
            if (chosen < runnable_.size()) give_turn(chosen);
            else help(chosen - runnable_.size());
            ++simulation_.steps;
            advance_clock();
            if (time_ns_ > u64(365) * 86400 * 1000000000) return ETIMEDOUT;
        }
        simulation_.elapsed_ns = time_ns_;
        return 0;
    }

    u64 now_ns() const { return time_ns_; }

    void take_turns(bool waiting) {
        if (!waiting) go_on();
        else rest(running()->idle_round);
        running()->fiber->yield();
    }

    // As a thread that gets no processor until all others have gone as far as they can without it.
    void stay_away() {
        for (const u64 leaps = leaps_; leaps == leaps_;) take_turns(true);
    }

private:
    static constexpr u64 stack_bytes = 128 * 1024;

    struct Member {
        Member(RunningLane* lane, u64 rank, std::function<void()> body)
            : lane(lane), rank(rank), fiber(std::move(body), stack_bytes) {
            lane->fiber = &fiber;
        }
        RunningLane* lane;
        u64 rank;
        Fiber fiber;
    };
    struct Rank {
        u64 launch = 0;
        u64 running = 0;
        std::unique_ptr<Crew> crew;
        std::vector<std::unique_ptr<Member>> members;
    };

    const Launch& launch_of(u64 rank) const {
        return launches_[rank * simulation_.launches_per_rank + ranks_[rank].launch];
    }

    void start_launch(u64 rank) {
        Rank& state = ranks_[rank];
        state.members.clear();
        state.crew = std::make_unique<Crew>(launch_of(rank), this);
        for (RunningLane& lane : state.crew->lanes()) {
            auto body = [this, rank] { entry_(launch_of(rank).params); };
            state.members.push_back(std::make_unique<Member>(&lane, rank, body));
            runnable_.push_back(state.members.back().get());
        }
        state.running = state.members.size();
    }

    void end_launch(u64 rank) {
        auto ended = reinterpret_cast<int (*)(u64, u64)>(simulation_.ended);
        bool goes_on = ended(rank, ranks_[rank].launch);
        if (goes_on && ++ranks_[rank].launch < simulation_.launches_per_rank) start_launch(rank);
    }

    void give_turn(u64 chosen) {
        const u64 rank = runnable_[chosen]->rank;
        const bool stopped = rank == simulation_.stopped_rank && simulation_.steps >= simulation_.stop_step;
        if (!stopped) resume(*runnable_[chosen]);
        if (!stopped && !runnable_[chosen]->fiber.done()) return;
        std::swap(runnable_[chosen], runnable_.back());
        runnable_.pop_back();
        go_on();
        if (!stopped && --ranks_[rank].running == 0) end_launch(rank);
    }

    void help(u64 number) {
        const Helper& helper = simulation_.helpers[number];
        if (reinterpret_cast<int (*)(void*)>(helper.step)(helper.of)) go_on();
        else rest(rested_in_[number]);
    }

    void resume(Member& member) {
        running() = member.lane;
        member.fiber.resume();
        running() = nullptr;
    }

    void go_on() { ++round_, idle_ = 0, leap_ns_ = 1000; }

    void rest(u64& idle_round) {
        if (idle_round != round_) idle_round = round_, ++idle_;
    }

    // It leaps when all have waited since the last one got any further, and then all have to wait again.
    void advance_clock() {
        time_ns_ += 100;
        if (idle_ < runnable_.size() + rested_in_.size()) return;
        time_ns_ += leap_ns_ = leap_ns_ < 1000000000 ? 2 * leap_ns_ : leap_ns_;
        ++round_, ++leaps_, idle_ = 0;
    }

    Entry entry_;
    const Launch* launches_;
    Simulation& simulation_;
    u64 random_;
    std::vector<Rank> ranks_;
    u64 time_ns_ = 1;
    u64 leap_ns_ = 1000;
    u64 round_ = 1, leaps_ = 0, idle_ = 0;  // lanes and helpers that have waited in this round
    std::vector<u64> rested_in_;            // of each helper, the last round in which it had nothing to do
    std::vector<Member*> runnable_;
};

// What kernels ask of it, for the lane that runs here.
struct Service {
    static Lane& here() { return *running(); }

    static u64 now_ns() {
        if (Simulator* simulator = running()->simulator) return simulator->now_ns();
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return u64(time.tv_sec) * 1000000000 + u64(time.tv_nsec);
    }

    // Yielding is the fastest wait while few threads share the cores, and burns them while a peer is late: so naps follow.
    // They get longer, about an eighth of the wait: else many who wait would leave hardly any time to those whom they wait
    // for.
    static void pause(u32 spins) {
        constexpr u32 yields = 64, naps_of_a_length = 8, most_doublings = 5;
        constexpr long first_nap_ns = 50000;
        if (Simulator* simulator = running()->simulator) return simulator->take_turns(true);
        if (spins < yields) return void(sched_yield());
        const u32 doublings = (spins - yields) / naps_of_a_length;
        const timespec nap{0, first_nap_ns << (doublings < most_doublings ? doublings : most_doublings)};
        nanosleep(&nap, nullptr);
    }

    static void interleave() {
        Simulator* simulator = running()->simulator;
        if (!simulator) {
            if (chance(here(), 4)) sched_yield();
            return;
        }
        simulator->take_turns(false);
        stay_away(64);
    }

    static void stay_away(u32 n) {
        Simulator* simulator = running()->simulator;
        if (simulator && chance(here(), n)) simulator->stay_away();
    }

    static void meet(Team& team) {
        interleave();  // an arrival is progress
        u32 before = __atomic_load_n(&team.phase, __ATOMIC_ACQUIRE);
        if (__atomic_fetch_add(&team.arrived, 1, __ATOMIC_ACQ_REL) + 1 == team.lanes) {
            __atomic_store_n(&team.arrived, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&team.phase, before + 1, __ATOMIC_RELEASE);
            return;
        }
        for (u32 spins = 0; __atomic_load_n(&team.phase, __ATOMIC_ACQUIRE) == before; ++spins) pause(spins);
    }
};

}  // namespace host
}  // namespace mk
