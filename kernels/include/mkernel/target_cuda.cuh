// The cuda half of target.cuh.
#pragma once

#define MK_DEVICE __device__ __forceinline__
#define MK_DEVICE_APART __device__ __noinline__
#define MK_UNROLL _Pragma("unroll")
#define MK_NO_UNROLL _Pragma("unroll 1")

// Threads of a block: what the portable engine wants, unless a kernel is compiled for another one.
#ifndef MK_THREADS
#define MK_THREADS 384
#endif

// Blocks that an engine lets work together.
#ifndef MK_CLUSTER
#define MK_CLUSTER 1
#endif
#if MK_CLUSTER > 1
#define MK_CLUSTER_DIMS __cluster_dims__(MK_CLUSTER, 1, 1)
#else
#define MK_CLUSTER_DIMS
#endif

#define MK_KERNEL(NAME, PARAMS, p) \
    extern "C" __global__ void MK_CLUSTER_DIMS __launch_bounds__(MK_THREADS, 1) NAME(const __grid_constant__ PARAMS p)

// Loads that a lane of a copy has under way.
#ifndef MK_LOADS
#define MK_LOADS 8
#endif

// Whether multiprocessors have an engine for copies of bytes.
#ifndef MK_BULK_COPIES
#define MK_BULK_COPIES (__CUDA_ARCH__ >= 900)
#endif

namespace mk {

extern __shared__ __align__(1024) u8 dynamic_shared[];

// The threads that act as one: a whole block, or of it the caller's warp (warp()) or a single thread (alone()).
class Agent {
public:
    static MK_DEVICE Agent current() { return Agent(threadIdx.x, MK_THREADS); }
    static constexpr u32 warps = MK_THREADS / 32;
    static MK_DEVICE Agent warp() { return Agent(threadIdx.x % 32, 32); }
    MK_DEVICE Agent alone() const { return Agent(0, 1); }

    MK_DEVICE u32 index() const { return blockIdx.x; }
    MK_DEVICE u32 count() const { return gridDim.x; }
    MK_DEVICE u32 part() const { return threadIdx.x / 32; }  // the warp
    MK_DEVICE u32 lane() const { return lane_; }
    MK_DEVICE u32 lanes() const { return lanes_; }
    MK_DEVICE Scratch scratch() const {
        u32 bytes;
        asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
        return {dynamic_shared, bytes};
    }

    MK_DEVICE void sync() const {
        if (lanes_ == 32) __syncwarp();
        else if (lanes_ > 1) __syncthreads();
    }

    // Lane 0's verdict, to all lanes; also orders what lane 0 acquired before what they read next.
    MK_DEVICE bool broadcast(bool verdict) const {
        if (lanes_ == 1) return verdict;
        if (lanes_ != 32) return __syncthreads_or(lane_ == 0 && verdict);
        verdict = __shfl_sync(~0u, verdict, 0);
        __syncwarp();  // a shuffle alone orders no memory
        return verdict;
    }

    // Whether any lane says so; also orders what any of them acquired before what all read next.
    MK_DEVICE bool any(bool verdict) const {
        if (lanes_ == 1) return verdict;
        if (lanes_ != 32) return __syncthreads_or(verdict);
        verdict = __any_sync(~0u, verdict);
        __syncwarp();  // a vote alone orders no memory
        return verdict;
    }

    // How many lanes say so, from the first one on, before one does not; of a whole block all or none. Orders like any().
    MK_DEVICE u32 leading(bool verdict) const {
        if (lanes_ != 32) return any(!verdict) ? 0 : lanes_;
        const u32 those = __ballot_sync(~0u, verdict);
        __syncwarp();
        return those == ~0u ? 32 : __ffs(~those) - 1;
    }

private:
    MK_DEVICE Agent(u32 lane, u32 lanes) : lane_(lane), lanes_(lanes) {}
    u32 lane_, lanes_;
};

// Has memory on its way to the cache of this multiprocessor, by a few of its threads: who reads it soon waits less.
MK_DEVICE void fetch_ahead(const void* from, u32 bytes) {
    constexpr u32 sector = 32;
    const u32 at = (MK_THREADS - 1 - threadIdx.x) * sector;  // not the first warp, which has most to do
    if (at < bytes) asm volatile("prefetch.L1 [%0];" ::"l"(static_cast<const u8*>(from) + at));
}

MK_DEVICE u64 load_acquire(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

MK_DEVICE u64 load_relaxed(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// A load of what this GPU has stored; acquire_seen() then makes all that was seen so far an acquire, at the price of one.
MK_DEVICE u64 load_ahead(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
MK_DEVICE void acquire_seen() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

template <Scope scope>
MK_DEVICE void store_release(u64* word, u64 value) {
    if (scope == Scope::device)
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
    else
        asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

MK_DEVICE void store_relaxed(u64* word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// What this thread stores so from here on is a release of all before, at the price of one.
MK_DEVICE void release_ahead() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
MK_DEVICE void store_released(u64* word, u64 value) { store_relaxed(word, value); }

// Two neighbouring words at once, the first of them aligned to 16 bytes; each of them whole.
MK_DEVICE void store_pair(u64* words, u64 first, u64 second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(words), "l"(first), "l"(second) : "memory");
}
MK_DEVICE void load_pair(const u64* words, u64& first, u64& second) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(words) : "memory");
}

// Only inside one GPU: acquire and release of all that its agents did before.
MK_DEVICE u64 fetch_add(u64* word, u64 value) {
    u64 old;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(value) : "memory");
    return old;
}

// These order nothing else.
MK_DEVICE u64 count_up(u64* word) {
    u64 old;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(old) : "l"(word) : "memory");
    return old;
}
MK_DEVICE u64 exchange(u64* word, u64 value) {
    u64 old;
    asm volatile("atom.relaxed.gpu.global.exch.b64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(value) : "memory");
    return old;
}

// Whether the word was `expected` and is now `value`.
MK_DEVICE bool compare_exchange(u64* word, u64 expected, u64 value) {
    u64 old;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(old)
                 : "l"(word), "l"(expected), "l"(value)
                 : "memory");
    return old == expected;
}

// Of scratch memory, by any lanes.
MK_DEVICE void set_bits(u32* word, u32 bits) { atomicOr(word, bits); }
MK_DEVICE u32 lowest_bit(u32 bits) { return u32(__ffs(int(bits))) - 1; }

MK_DEVICE u64 now_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// From here on the object, and what it refers to, is in memory: no registers are kept for it.
template <class Object>
MK_DEVICE void keep_in_memory(Object& object) { asm volatile("" ::"l"(&object) : "memory"); }

MK_DEVICE void pause(u32 spins) { __nanosleep(spins < 64 ? 20 : 100); }

// Where a test may make a thread lose its turn; the GPU's own scheduler needs no help.
MK_DEVICE void interleave() {}

// A copy of `lines` runs of `bytes`, of which a list may say where they come from, by the lanes of an agent.
class Transfer {
public:
    MK_DEVICE Transfer(const Agent& agent, void* to, i64 to_pitch, const void* from, i64 from_pitch, i64 lines,
                       i64 bytes)
        : Transfer(agent, to, to_pitch, from, from_pitch, lines, bytes, InOrder()) {}
    MK_DEVICE Transfer(const Agent& agent, void* to, i64 to_pitch, const void* from, i64 from_pitch, i64 lines,
                       i64 bytes, const u32* list)
        : Transfer(agent, to, to_pitch, from, from_pitch, lines, bytes, Listed{list}) {}

    // When it returns, what all lanes copied is done.
    MK_DEVICE void finish(const Agent& agent) { agent.sync(); }

private:
    struct InOrder {
        MK_DEVICE i64 operator[](i64 line) const { return line; }
    };
    struct Listed {
        const u32* list;
        MK_DEVICE i64 operator[](i64 line) const { return list[line]; }
    };

    template <class Order>
    struct Lines {
        u8* to;
        const u8* from;
        i64 to_pitch, from_pitch, count, bytes;
        Order order;
    };

    template <class Order>
    MK_DEVICE Transfer(const Agent& agent, void* to, i64 to_pitch, const void* from, i64 from_pitch, i64 lines,
                       i64 bytes, Order order) {
        Lines<Order> block{static_cast<u8*>(to), static_cast<const u8*>(from), to_pitch, from_pitch, lines, bytes,
                                 order};
        const u64 alignment = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | to_pitch | from_pitch;
        i64 done = 0;  // bytes of each line
        if (alignment % 16 == 0) done = run<uint4>(agent, block);
        else if (alignment % 4 == 0) done = run<u32>(agent, block);
        else if (alignment % 2 == 0) done = run<u16>(agent, block);
        block.to += done, block.from += done, block.bytes -= done;
        run<u8>(agent, block);
    }

    // A place in a block of lines of so many words, for one of the lanes that walk through it together.
    struct Place {
        i64 line;
        u32 word, words, lanes;

        MK_DEVICE Place(const Agent& agent, u32 words)
            : line(agent.lane() / words), word(agent.lane() % words), words(words), lanes(agent.lanes()) {}
        MK_DEVICE void advance() {
            line += lanes / words, word += lanes % words;
            if (word >= words) word -= words, ++line;
        }
    };

    // As many loads under way as the link's latency asks for, then their stores. Returns the bytes of a line that are
    // whole words.
    template <class Word, class Order>
    static MK_DEVICE i64 run(const Agent& agent, const Lines<Order>& lines) {
        constexpr u32 batch = MK_LOADS;
        const u32 words = u32(lines.bytes / i64(sizeof(Word)));
        if (words > 0) {
            Place from(agent, words), to = from;
            while (to.line < lines.count) {
                Word values[batch];
                MK_UNROLL
                for (u32 i = 0; i < batch; ++i, from.advance())
                    if (from.line < lines.count)
                        values[i] = reinterpret_cast<const Word*>(lines.from + lines.order[from.line] * lines.from_pitch)[from.word];
                MK_UNROLL
                for (u32 i = 0; i < batch; ++i, to.advance())
                    if (to.line < lines.count)
                        reinterpret_cast<Word*>(lines.to + to.line * lines.to_pitch)[to.word] = values[i];
            }
        }
        return words * i64(sizeof(Word));
    }
};

MK_DEVICE float float_from_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

MK_DEVICE u16 half_from_float(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

MK_DEVICE u16 bfloat16_from_float(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// To nearest, ties away from zero; the result is a float.
MK_DEVICE float tfloat32_from_float(float value) {
    u32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return __uint_as_float(bits);
}

// To a few units in the last place, and without branches: many of them can be under way.
MK_DEVICE float exponential(float a) { return __expf(a); }
MK_DEVICE float quotient(float a, float b) {
    float inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(b));
    return a * inverse;
}
MK_DEVICE double exponential(double a) { return exp(a); }
MK_DEVICE double quotient(double a, double b) { return a / b; }

MK_DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
MK_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

}  // namespace mk
