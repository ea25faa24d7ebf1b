// What a kernel on the host knows of whoever runs it: its lanes, and what they ask of the runtime. That is compiled apart,
// once for all kernels.
#pragma once

#include "words.cuh"

namespace mk {
namespace host {

// What the lanes of one agent share.
struct Team {
    u32 index, count, lanes;
    Scratch scratch;
    bool verdict;
    u32 arrived, phase;
};

struct Lane {
    Team* team;
    u32 index;
    u64 random;  // 0: no random yields, copies as late as allowed
};

// What host_runtime.cuh does for them.
struct Runtime {
    Lane& (*here)();
    u64 (*now_ns)();
    void (*pause)(u32 spins);
    void (*interleave)();
    void (*stay_away)(u32 n);
    void (*meet)(Team& team);
};

// Of this library. A kernel may be attached while another one of it runs.
inline const Runtime* attached = nullptr;
inline void attach(const Runtime* runtime) { __atomic_store_n(&attached, runtime, __ATOMIC_RELAXED); }
inline const Runtime& runtime() { return *__atomic_load_n(&attached, __ATOMIC_RELAXED); }

inline Lane& here() { return runtime().here(); }
inline u64 now_ns() { return runtime().now_ns(); }
inline void pause(u32 spins) { runtime().pause(spins); }

// A point where another thread may come between; a launch with a seed makes that happen often.
inline void interleave() { runtime().interleave(); }

// One time in n, all others get as far as they can before this one goes on.
inline void stay_away(u32 n) { runtime().stay_away(n); }

// splitmix64 (Steele, Lea, Flood 2014): any seed gives a good sequence.
inline u64 next_random(u64& state) {
    u64 z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

inline bool chance(Lane& lane, u32 n) { return lane.random && next_random(lane.random) % n == 0; }
// One time in n, where the launch has a seed.
inline bool chance(u32 n) { return chance(here(), n); }

}  // namespace host
}  // namespace mk
