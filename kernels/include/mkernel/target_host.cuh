// The host half of target.cuh: what a kernel sees. How its lanes get to run is the business of host_runtime.cuh.
#pragma once

#include <cmath>
#include <cstring>

#include "host_lanes.cuh"

#define MK_DEVICE inline
#define MK_DEVICE_APART inline __attribute__((noinline))
#define MK_UNROLL
#define MK_NO_UNROLL

#define MK_EXPORT extern "C" __attribute__((visibility("default")))

// Exports NAME_entry, for a lane to run, and NAME_attach: to be called before, with the runtime. It returns the size of the
// parameters, for the check that Python means the same struct.
#define MK_KERNEL(NAME, PARAMS, p)                                                                       \
    static void NAME##_body(const PARAMS& p);                                                            \
    MK_EXPORT void NAME##_entry(const void* params) { NAME##_body(*static_cast<const PARAMS*>(params)); } \
    MK_EXPORT mk::u64 NAME##_attach(const mk::host::Runtime* runtime) {                                  \
        return mk::host::attach(runtime), sizeof(PARAMS);                                                \
    }                                                                                                    \
    static void NAME##_body(const PARAMS& p)

namespace mk {

// The lanes that act as one: those of a team, or (alone()) a single one of them.
class Agent {
public:
    static Agent current() { return Agent(host::here(), host::here().team->lanes); }
    static constexpr u32 warps = 1;
    static Agent warp() { return current(); }
    Agent alone() const { return Agent(*self_, 1); }

    u32 index() const { return self_->team->index; }
    u32 count() const { return self_->team->count; }
    u32 part() const { return 0; }
    u32 lane() const { return lanes_ == 1 ? 0 : self_->index; }
    u32 lanes() const { return lanes_; }
    Scratch scratch() const { return self_->team->scratch; }

    void sync() const {
        if (lanes_ > 1) host::runtime().meet(*self_->team);
    }

    // Lane 0's verdict, to all lanes; also orders what lane 0 acquired before what they read next.
    bool broadcast(bool verdict) const {
        if (lanes_ == 1) return verdict;
        if (lane() == 0) self_->team->verdict = verdict;
        sync();
        bool result = self_->team->verdict;
        sync();
        return result;
    }

    // Whether any lane says so.
    bool any(bool verdict) const {
        if (lanes_ == 1) return verdict;
        if (lane() == 0) self_->team->verdict = false;
        sync();
        if (verdict) __atomic_store_n(&self_->team->verdict, true, __ATOMIC_RELAXED);
        sync();
        bool result = self_->team->verdict;
        sync();
        return result;
    }

    // How many lanes say so, from the first one on, before one does not: all or none.
    u32 leading(bool verdict) const { return any(!verdict) ? 0 : lanes(); }

private:
    Agent(host::Lane& self, u32 lanes) : self_(&self), lanes_(lanes) {}
    host::Lane* self_;
    u32 lanes_;
};

inline void fetch_ahead(const void*, u32) {}

inline u64 load_acquire(const u64* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline u64 load_relaxed(const u64* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
// ThreadSanitizer knows no fences, so each load is an acquire by itself.
inline u64 load_ahead(const u64* word) { return load_acquire(word); }
inline void acquire_seen() {}

template <Scope>
inline void store_release(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
// Each store is a release by itself, for the same reason.
inline void release_ahead() {}
inline void store_released(u64* word, u64 value) { store_release<Scope::system>(word, value); }
inline void store_relaxed(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
// Two neighbouring words, each of them whole.
inline void store_pair(u64* words, u64 first, u64 second) {
    store_relaxed(words, first);
    host::interleave();
    store_relaxed(words + 1, second);
}
inline void load_pair(const u64* words, u64& first, u64& second) {
    host::interleave();
    first = load_relaxed(words);
    second = load_relaxed(words + 1);
}
inline u64 fetch_add(u64* word, u64 value) { return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL); }
// Relaxed on a GPU, where what was read before is known to have been read: ThreadSanitizer goes by order alone.
inline u64 count_up(u64* word) { return fetch_add(word, 1); }
inline u64 exchange(u64* word, u64 value) { return __atomic_exchange_n(word, value, __ATOMIC_RELAXED); }
inline bool compare_exchange(u64* word, u64 expected, u64 value) {
    return __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

// Of scratch memory, by any lanes.
inline void set_bits(u32* word, u32 bits) { __atomic_fetch_or(word, bits, __ATOMIC_RELAXED); }
inline u32 lowest_bit(u32 bits) { return u32(__builtin_ctz(bits)); }

// Of use where registers are scarce.
template <class Object>
void keep_in_memory(Object&) {}

inline u64 now_ns() { return host::now_ns(); }
inline void pause(u32 spins) { host::pause(spins); }
inline void interleave() { host::interleave(); }

// A copy of `lines` runs of `bytes`, of which a list may say where they come from, by the lanes of an agent. As a GPU's copy engine does, it moves the bytes at any
// time until finish(): here at finish, or at once if the seed says so. So a reader that does not wait is caught.
class Transfer {
public:
    Transfer(const Agent& agent, void* to, i64 to_pitch, const void* from, i64 from_pitch, i64 lines, i64 bytes,
             const u32* list = nullptr)
        : to_(static_cast<u8*>(to)), from_(static_cast<const u8*>(from)), to_pitch_(to_pitch), from_pitch_(from_pitch),
          lines_(lines), bytes_(bytes), list_(list) {
        if (host::chance(2)) run(agent);
    }

    // When it returns, what all lanes copied is done.
    void finish(const Agent& agent) {
        host::stay_away(16);
        run(agent);
        agent.sync();
    }

private:
    void run(const Agent& agent) {
        bool dense = to_pitch_ == bytes_ && from_pitch_ == bytes_ && !list_;
        if (dense && agent.lanes() == 1 && lines_ > 0) std::memcpy(to_, from_, bytes_ * lines_);
        else
            for (i64 line = agent.lane(); line < lines_; line += agent.lanes())
                std::memcpy(to_ + line * to_pitch_, from_ + (list_ ? list_[line] : line) * from_pitch_, bytes_);
        lines_ = 0;
    }

    u8* to_;
    const u8* from_;
    i64 to_pitch_, from_pitch_, lines_, bytes_;
    const u32* list_;
};

inline u32 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(u32 bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// By integer operations: compilers do not agree on a half type, and these vectorise.
inline float float_from_half(u16 half) {
    u32 magnitude = u32(half & 0x7fff) << 13;
    u32 sign = u32(half & 0x8000) << 16;
    bool special = (half & 0x7c00) == 0x7c00;
    float scaled = float_of(magnitude) * 0x1p112f;  // moves the exponent bias, and makes subnormals normal
    return float_of(sign | (special ? magnitude | 0x7f800000 : bits_of(scaled)));
}

inline u16 bfloat16_from_float(float value) {
    u32 bits = bits_of(value);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return u16(nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float exponential(float a) { return expf(a); }
inline double exponential(double a) { return exp(a); }
template <class Number>
Number quotient(Number a, Number b) { return a / b; }

// To nearest, ties away from zero.
inline float tfloat32_from_float(float value) {
    u32 bits = bits_of(value);
    bool special = (bits & 0x7f800000) == 0x7f800000;
    return float_of(special ? bits : (bits + 0x1000) & 0xffffe000);
}

inline u16 half_from_float(float value) {
    u32 magnitude = bits_of(value) & 0x7fffffff;
    u16 sign = u16(bits_of(value) >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;                                      // 65520 and above
    if (magnitude < 0x38800000)                                                             // subnormal as half
        return sign | u16(bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));             // the addition rounds
    return sign | u16((magnitude + 0xc8000fff + (magnitude >> 13 & 1)) >> 13);              // to nearest, ties to even
}

}  // namespace mk
