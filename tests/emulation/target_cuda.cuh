// Stands in for target_cuda.cuh: kernels for GPUs on threads of the CPU, so that engines run where there is no GPU. An
// agent's thread runs the threads of its block in turn, warp by warp in an order drawn from a seed; each goes on until
// it waits for others. What a GPU does meanwhile (copies, products of warpgroups) happens when it must, or at some time
// before. It shows what an engine computes, and a missing barrier or wait; nothing of a GPU's memory model or speed.
#pragma once

#define Agent HostAgent
#define Transfer HostTransfer
#define pause host_pause
#include "target_host.cuh"
#undef Agent
#undef Transfer
#undef pause

#include "fiber.cuh"

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#undef MK_KERNEL
#ifndef MK_BULK_COPIES
#define MK_BULK_COPIES 0
#endif
#ifndef MK_THREADS
#define MK_THREADS 384
#endif
#ifndef MK_CLUSTER
#define MK_CLUSTER 1
#endif

#define MK_KERNEL(NAME, PARAMS, p)                                                                                     \
    static void NAME##_body(const PARAMS& p);                                                                          \
    MK_EXPORT void NAME##_entry(const void* params) {                                                                  \
        mk::emulation::Block(MK_THREADS, MK_CLUSTER).run([=] { NAME##_body(*static_cast<const PARAMS*>(params)); });  \
    }                                                                                                                  \
    MK_EXPORT mk::u64 NAME##_attach(const mk::host::Runtime* runtime) {                                                \
        return mk::host::attach(runtime), sizeof(PARAMS);                                                              \
    }                                                                                                                  \
    static void NAME##_body(const PARAMS& p)

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };

namespace mk {
namespace emulation {

[[noreturn]] inline void stop(const char* why) {
    std::fprintf(stderr, "emulated block: %s\n", why);
    std::abort();
}

using Work = std::function<void()>;

// Some threads that wait for each other.
struct Meeting {
    u32 arrived = 0, phase = 0;
    bool verdict = false, next_verdict = false;
};

// What the threads of a warp show each other, in turn in two places: nobody is two meetings ahead.
struct Warp {
    Meeting meeting;
    u64 shown[2][32][4];
};

// What a thread has asked for, in groups, of which the last is still open: done when it is waited for, or earlier.
class Groups {
public:
    void add(Work work) { groups_.back().push_back(std::move(work)); }
    void commit() { groups_.push_back({}); }
    // Does all but the last `left` groups.
    void complete(u32 left) {
        for (; groups_.size() > left + 1; groups_.erase(groups_.begin()))
            for (const Work& work : groups_.front()) work();
    }
    // What is in the open group, for somebody else to do.
    std::vector<Work> take() {
        std::vector<Work> open;
        open.swap(groups_.back());
        return open;
    }

private:
    std::vector<std::vector<Work>> groups_ = {{}};
};

// A barrier in 8 bytes of shared memory: a phase is over when so many have arrived, and the bytes that were announced
// have come. Blocks of a cluster, which are threads of the CPU, arrive at each other's.
class Barrier {
public:
    static Barrier& at(u64* word) { return *reinterpret_cast<Barrier*>(word); }
    void init(u32 arrivals) { expected_ = left_ = arrivals, phase_ = 0, bytes_ = 0; }
    void invalidate() { init(0); }
    void arrive(u32 bytes = 0) { change(1, i32(bytes)); }
    void deliver(u32 bytes) { change(0, -i32(bytes)); }
    bool completed(u32 parity) const {
        std::lock_guard<std::mutex> lock(mutex());
        return phase_ != parity;
    }

private:
    static std::mutex& mutex() {
        static std::mutex one;
        return one;
    }
    void change(u32 arrivals, i32 bytes) {
        std::lock_guard<std::mutex> lock(mutex());
        if (left_ < arrivals || expected_ == 0) stop("more threads arrive at a barrier than it expects");
        left_ -= arrivals, bytes_ += bytes;
        if (left_ == 0 && bytes_ == 0) left_ = expected_, phase_ ^= 1;
    }

    u32 expected_ : 12, left_ : 12, phase_ : 8;
    i32 bytes_;
};

struct Thread {
    std::unique_ptr<host::Fiber> fiber;
    // Into shared memory; of a warpgroup; out of shared memory, in two steps.
    Groups copies, products, reads, stores;
};

class Block;

// Blocks that load for each other and wait for each other; the last of them forgets it.
struct Cluster {
    std::map<u32, Block*> blocks;  // by rank, of those that have begun
    std::atomic<u64> met{0}, busy_ns{0};

    // Of the blocks of a launch from `first` on.
    static std::shared_ptr<Cluster> of(const host::Team* first) {
        static std::map<const host::Team*, std::weak_ptr<Cluster>> all;
        std::lock_guard<std::mutex> lock(mutex());
        auto found = all[first].lock();
        if (!found) all[first] = found = std::make_shared<Cluster>();
        return found;
    }
    static std::mutex& mutex() {
        static std::mutex one;
        return one;
    }
};

class Block {
public:
    Block(u32 threads, u32 size)
        : threads_(threads), warps_(threads / 32), cluster_size_(size),
          cluster_(Cluster::of(host::here().team - host::here().team->index % size)) {
        const Scratch scratch = host::here().team->scratch;
        shared_bytes_ = scratch.bytes;
        memory_.reset(new u8[scratch.bytes + 8192]);
        std::memset(memory_.get(), 0xff, scratch.bytes + 8192);
        // Not at a multiple of more than Python may expect.
        shared_ = memory_.get() + (4096 - u64(memory_.get()) % 4096) % 4096 + 1024;
        cluster_->busy_ns = host::now_ns();
        std::lock_guard<std::mutex> lock(Cluster::mutex());
        cluster_->blocks[rank()] = this;
    }

    void run(Work body) {
        body_ = std::move(body);
        current() = this;
        for (Thread& thread : threads_) thread.fiber = std::make_unique<host::Fiber>([this] { body_(); }, stack_bytes);
        u64 idle = 0;
        for (u64 left = threads_.size(); left > 0;) {
            const u64 before = events_;
            const u32 warp = random(u32(warps_.size()));
            for (thread_ = warp * 32; thread_ < warp * 32 + 32; ++thread_) {
                host::Fiber& fiber = *own().fiber;
                if (fiber.done()) continue;
                fiber.resume();
                if (fiber.done()) --left, ++events_;
            }
            idle = events_ == before ? idle + 1 : 0;
            if (idle == 0) cluster_->busy_ns = host::now_ns();
            // Many rounds without any event: all wait for the copies, or for a neighbour in the cluster.
            const bool stuck = idle > 4 * warps_.size();
            if (!under_way_.empty() && (random(8) == 0 || stuck)) do_one(under_way_);
            else if (!late_.empty() && stuck) do_one(late_);
            else if (idle > 100 * warps_.size()) {
                const u64 busy = cluster_->busy_ns;  // read first: the neighbour goes on writing it
                if (host::now_ns() - busy > longest_wait_ns) stop("its threads wait for each other");
                host::host_pause(u32(idle));
            }
        }
        while (!under_way_.empty()) do_one(under_way_);
        while (!late_.empty()) do_one(late_);
        for (Thread& thread : threads_) thread.reads.complete(0), thread.stores.complete(0);
        current() = nullptr;
    }

    static Block*& current() {
        static thread_local Block* block = nullptr;
        return block;
    }

    u32 thread() const { return thread_; }
    u32 size() const { return u32(threads_.size()); }
    u8* shared() const { return shared_; }
    u64 shared_bytes() const { return shared_bytes_; }
    Thread& own() { return threads_[thread_]; }

    // Until `threads` have come; whether any of them says so.
    bool meet(Meeting& meeting, u32 threads, bool verdict) {
        const u32 phase = meeting.phase;
        meeting.next_verdict |= verdict;
        ++events_;
        if (++meeting.arrived == threads) {
            meeting.arrived = 0, ++meeting.phase;
            meeting.verdict = meeting.next_verdict, meeting.next_verdict = false;
        } else {
            while (meeting.phase == phase) yield();
        }
        return meeting.verdict;
    }
    bool sync(bool verdict = false) { return meet(all_, size(), verdict); }
    bool sync(u32 id, u32 threads, bool verdict) { return meet(named_[id], threads, verdict); }

    // Only says that the thread has come.
    void arrive(u32 id, u32 threads) {
        Meeting& meeting = named_[id];
        ++events_;
        if (++meeting.arrived == threads) meeting.arrived = 0, ++meeting.phase;
    }

    // Until something happens here.
    template <class Condition>
    void wait(Condition condition) {
        while (!condition()) yield();
        ++events_;
    }

    // Of a wait for something outside, which has a deadline: the others go on, or if none can, threads of other blocks. It
    // is no event: what is done only when all wait may be what others here wait for.
    void pause() {
        pauses_ = events_ == paused_ ? pauses_ + 1 : 0;
        if (pauses_ > 0) host::host_pause(pauses_);
        paused_ = events_;
        cluster_->busy_ns = host::now_ns();
        yield();
    }

    // Shows the other threads of the warp some words; returns what all have shown.
    u64 (*show(const void* words, u32 bytes))[4] {
        Warp& warp = warps_[thread_ / 32];
        auto& shown = warp.shown[warp.meeting.phase % 2];
        std::memset(shown[thread_ % 32], 0, sizeof shown[0]);
        std::memcpy(shown[thread_ % 32], words, bytes);
        meet(warp.meeting, 32, false);
        return shown;
    }

    Groups unfenced;  // what has been copied to shared memory, as matrix instructions of warpgroups do not see it yet

    // Has something done at any time from now on; at times only when all wait.
    void later(Work work) { (random(4) ? under_way_ : late_).push_back(std::move(work)), ++events_; }

    // --- clusters: blocks whose indices follow each other

    u32 rank() const { return host::here().team->index % cluster_size_; }
    Block& neighbour(u32 rank) const {
        std::lock_guard<std::mutex> lock(Cluster::mutex());
        return *cluster_->blocks.at(rank);
    }
    // The same place in the neighbour's shared memory.
    template <class Value>
    Value* in(u32 rank, Value* here) const {
        return reinterpret_cast<Value*>(neighbour(rank).shared_ + (reinterpret_cast<u8*>(here) - shared_));
    }
    void sync_cluster() {
        sync();
        if (cluster_size_ == 1) return;
        if (thread_ == 0) {
            const u64 goal = (cluster_->met++ / cluster_size_ + 1) * cluster_size_;
            wait([&] { return cluster_->met >= goal; });
        }
        sync();
    }

private:
    static constexpr u64 stack_bytes = 1 << 16, longest_wait_ns = 10'000'000'000;

    u32 random(u32 n) { return u32(host::next_random(order_) % n); }
    void do_one(std::vector<Work>& some) {
        std::swap(some[random(u32(some.size()))], some.back());
        const Work work = std::move(some.back());
        some.pop_back();
        work();
        ++events_;
    }
    void yield() { own().fiber->yield(); }

    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    u32 cluster_size_;
    std::shared_ptr<Cluster> cluster_;
    Meeting all_, named_[16];
    std::vector<Work> under_way_, late_;
    Work body_;
    std::unique_ptr<u8[]> memory_;
    u8* shared_;
    u64 shared_bytes_, events_ = 0, paused_ = 0, order_ = host::here().random + 1;
    u32 thread_ = 0, pauses_ = 0;  // since anything happened
};

inline Block& block() { return *Block::current(); }

struct Index { u32 x; };

}  // namespace emulation

inline void pause(u32) { emulation::block().pause(); }

// The threads that act as one: a whole block, or of it the caller's warp or a single thread.
class Agent {
public:
    static Agent current() { return Agent(emulation::block().thread(), emulation::block().size()); }
    static constexpr u32 warps = MK_THREADS / 32;
    static Agent warp() { return Agent(emulation::block().thread() % 32, 32); }
    Agent alone() const { return Agent(0, 1); }

    u32 index() const { return host::here().team->index; }
    u32 count() const { return host::here().team->count; }
    u32 part() const { return emulation::block().thread() / 32; }
    u32 lane() const { return lane_; }
    u32 lanes() const { return lanes_; }
    Scratch scratch() const { return {emulation::block().shared(), emulation::block().shared_bytes()}; }

    void sync() const { broadcast(false); }
    bool broadcast(bool verdict) const {
        if (lanes_ == 1) return verdict;
        if (lanes_ != 32) return emulation::block().sync(lane_ == 0 && verdict);
        return emulation::block().show(&verdict, sizeof verdict)[0][0];
    }
    bool any(bool verdict) const {
        if (lanes_ == 1) return verdict;
        if (lanes_ != 32) return emulation::block().sync(verdict);
        auto shown = emulation::block().show(&verdict, sizeof verdict);
        bool some = false;
        for (u32 i = 0; i < 32; ++i) some = some || shown[i][0];
        return some;
    }
    u32 leading(bool verdict) const {
        if (lanes_ != 32) return any(!verdict) ? 0 : lanes_;
        auto shown = emulation::block().show(&verdict, sizeof verdict);
        u32 those = 0;
        while (those < 32 && shown[those][0]) ++those;
        return those;
    }

private:
    Agent(u32 lane, u32 lanes) : lane_(lane), lanes_(lanes) {}
    u32 lane_, lanes_;
};

class Transfer {
public:
    Transfer(const Agent& agent, void* to, i64 to_pitch, const void* from, i64 from_pitch, i64 lines, i64 bytes,
             const u32* list = nullptr) {
        u8* target = static_cast<u8*>(to);
        const u8* source = static_cast<const u8*>(from);
        for (i64 line = agent.lane(); line < lines; line += agent.lanes())
            std::memcpy(target + line * to_pitch, source + (list ? list[line] : line) * from_pitch, bytes);
    }
    void finish(const Agent& agent) { agent.sync(); }
};

}  // namespace mk

#define threadIdx (mk::emulation::Index{mk::emulation::block().thread()})

inline void __syncthreads() { mk::emulation::block().sync(); }
inline void __syncwarp() { mk::emulation::block().show("", 1); }
inline bool __any_sync(unsigned, bool verdict) {
    bool any = false;
    auto shown = mk::emulation::block().show(&verdict, sizeof verdict);
    for (mk::u32 i = 0; i < 32; ++i) any = any || shown[i][0];
    return any;
}
template <class T>
T __shfl_sync(unsigned, T value, mk::u32 lane) {
    std::memcpy(&value, mk::emulation::block().show(&value, sizeof value)[lane], sizeof value);
    return value;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, mk::u32 mask) {
    return __shfl_sync(~0u, value, mk::emulation::block().thread() % 32 ^ mask);
}
