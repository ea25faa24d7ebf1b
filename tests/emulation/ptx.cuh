// Stands in for ptx.cuh: the instructions that engines take from it, on emulated threads.
#pragma once

#include "types.cuh"

namespace mk {
namespace ptx {

using emulation::Barrier;
using emulation::block;

inline u32 opaque(u32 value) { return value; }
inline void settle(float) {}

#ifdef MK_ENGINE_HOPPER
constexpr bool registers_move = true;
#else
constexpr bool registers_move = false;
#endif
template <u32 count>
void grow_registers() {}
template <u32 count>
void shrink_registers() {}

// --- shared memory: at multiples of what its users ask for

inline u32 shared_address(const void* shared) { return u32(static_cast<const u8*>(shared) - block().shared()) + 1024; }
inline u8* at(u32 address) { return block().shared() + address - 1024; }
template <class Value>
void load_shared(Value& to, u32 address) {
    if (address % sizeof to) emulation::stop("a load from shared memory is not aligned");
    std::memcpy(&to, at(address), sizeof to);
}

// The 16 bytes that belong at a place lie elsewhere in its line of 128.
inline u64 swizzled(u64 address) { return address ^ address / 128 % 8 * 16; }

// --- a warp that acts as one

inline u32 uniform(u32 value) { return __shfl_sync(~0u, value, 0); }
template <class Object>
Object* uniform(Object* object) {
    const u64 address = u64(object);
    return reinterpret_cast<Object*>(u64(uniform(u32(address >> 32))) << 32 | uniform(u32(address)));
}
template <u32 lanes = ~0u>
bool elect() {
    static_assert(lanes % 2 == 1, "lane 0 is one of them");
    return threadIdx.x % 32 == 0;
}

// --- barriers

inline bool any_of_warps(u32 id, u32 threads, bool verdict) { return block().sync(id, threads, verdict); }
inline void sync_warps(u32 id, u32 threads) { block().sync(id, threads, false); }
inline void arrive_for_warps(u32 id, u32 threads) { block().arrive(id, threads); }

inline void prefetch_map(const TensorMap*) {}
inline void barrier_init(u64* barrier, u32 arrivals) { Barrier::at(barrier).init(arrivals); }
inline void barrier_invalidate(u64* barrier) { Barrier::at(barrier).invalidate(); }
inline void fence_barrier_init() {}
inline void arrive(u64* barrier) { Barrier::at(barrier).arrive(); }
inline void arrive_expect(u64* barrier, u32 bytes) { Barrier::at(barrier).arrive(bytes); }
inline void arrive_at(u64* barrier, u32 rank) { Barrier::at(block().in(rank, barrier)).arrive(); }
inline bool completed(u64* barrier, u32 parity) { return Barrier::at(barrier).completed(parity); }
inline void wait(u64* barrier, u32 parity) {
    block().wait([=] { return completed(barrier, parity); });
}
inline u32 cluster_rank() { return block().rank(); }
inline void cluster_sync() { block().sync_cluster(); }

// --- copies of 16 bytes into shared memory: there when waited for; for matrix instructions of warpgroups, when fenced

inline void copy_async(void* to, const void* from, u32 bytes) {
    if (u64(to) % 16 || (bytes && u64(from) % 16)) emulation::stop("a copy is not aligned");
    auto copy = [=] {
        std::memset(to, 0, 16);
        std::memcpy(to, from, bytes);
    };
    if (host::chance(2)) copy();  // and once more
    if (registers_move) block().own().copies.add([=] { block().unfenced.add(copy); });
    else block().own().copies.add(copy);
}
inline void copy_async(void* to, const void* from) { copy_async(to, from, 16); }
inline void copy_async(u32 to, const void* from, u32 bytes) { copy_async(at(to), from, bytes); }
inline void copy_async(u32 to, const void* from) { copy_async(to, from, 16); }
inline void commit_copies() {
    block().own().copies.commit();
    if (host::chance(2)) block().own().copies.complete(0);
}
template <u32 left>
void wait_copies() { block().own().copies.complete(left); }
inline void arrive_when_copied(u64* barrier) {
    block().later([barrier, copies = block().own().copies.take()] {
        for (const auto& copy : copies) copy();
        arrive(barrier);
    });
}

// --- bulk and tensor copies; the words of a map are those that emulated.py writes

inline void acquire_map(const TensorMap*) {}
inline void fence_global_to_async() {}
inline void fence_shared_to_async() {
    block().unfenced.commit();
    block().unfenced.complete(0);
}

inline void load_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
    if ((u64(to) | u64(from) | bytes) % 16) emulation::stop("a bulk copy is not aligned");
    block().later([=] {
        std::memcpy(to, from, bytes);
        Barrier::at(barrier).deliver(bytes);
    });
}

// What of an array is a box: in its lines, of 128 bytes in shared memory, and in up to three dimensions across.
struct Box {
    explicit Box(const TensorMap& map) : words(reinterpret_cast<const Words&>(map.opaque)) {}

    struct Words { u64 data, size, extents[4], pitches[3], box[4], tf32; };
    const Words& words;

    u32 bytes() const { return u32(words.box[1] * words.box[2] * words.box[3]) * 128; }

    void load(u8* to, const u8* from) const {
        std::memcpy(to, from, words.size);
        if (!words.tf32) return;
        float value;
        std::memcpy(&value, from, 4);
        value = widen(tfloat32{value});
        std::memcpy(to, &value, 4);
    }

    // visit(in shared memory, in global memory, bytes) for what of it is in the array; outside(in shared memory) else.
    template <class Visit, class Outside>
    void each_place(void* box, const i32 (&first)[4], Visit visit, Outside outside) const {
        const u64 shared = shared_address(box);
        if (shared % 128) emulation::stop("a box is not aligned");
        if (first[0] * i64(words.size) % 16) emulation::stop("a box begins at no multiple of 16 bytes of its lines");
        for (u64 line = 0; line < bytes() / 128; ++line)
            for (u64 place = 0; place < words.box[0]; ++place) {
                const u64 within[4] = {place, line % words.box[1], line / words.box[1] % words.box[2],
                                       line / words.box[1] / words.box[2]};
                u8* there = at(u32(swizzled(shared + line * 128 + place * words.size)));
                u64 from = words.data;
                bool inside = true;
                for (u32 i = 0; i < 4; ++i) {
                    const i64 index = first[i] + i64(within[i]);
                    inside = inside && index >= 0 && index < i64(words.extents[i]);
                    from += u64(index) * (i ? words.pitches[i - 1] : words.size);
                }
                if (inside) visit(there, reinterpret_cast<u8*>(from), words.size);
                else outside(there, words.size);
            }
    }
};

inline void load_box_to(u16 blocks, void* to, const TensorMap* map, u64* barrier, i32 x, i32 y, i32 z = 0, i32 w = 0) {
    const TensorMap words = *map;
    auto* const self = &block();
    block().later([=] {
        const Box box(words);
        for (u32 rank = 0; rank < MK_CLUSTER; ++rank) {
            if (!(blocks >> rank & 1)) continue;
            box.each_place(
                to, {x, y, z, w},
                [&](u8* there, const u8* from, u64) { box.load(self->in(rank, there), from); },
                [&](u8* there, u64 size) { std::memset(self->in(rank, there), 0, size); });
            Barrier::at(self->in(rank, barrier)).deliver(box.bytes());
        }
    });
}
inline void load_box(void* to, const TensorMap* map, u64* barrier, i32 x, i32 y, i32 z = 0, i32 w = 0) {
    load_box_to(u16(1 << block().rank()), to, map, barrier, x, y, z, w);
}

// Out of shared memory: it is read in one step, and written in another.
inline void store_bulk(void* to, const void* from, u32 bytes) {
    if ((u64(to) | u64(from) | bytes) % 16) emulation::stop("a bulk copy is not aligned");
    auto between = std::make_shared<std::vector<u8>>(bytes);
    block().own().reads.add([=] { std::memcpy(between->data(), from, bytes); });
    block().own().stores.add([=] { std::memcpy(to, between->data(), bytes); });
}
inline void store_box(const TensorMap* map, const void* from, i32 x, i32 y) {
    auto between = std::make_shared<std::vector<u8>>();
    const TensorMap words = *map;
    void* const box = const_cast<void*>(from);
    const u64* const extents = Box(words).words.extents;
    if (x < 0 || y < 0 || u64(x) >= extents[0] || u64(y) >= extents[1]) emulation::stop("a box begins outside its matrix");
    block().own().reads.add([=] {
        Box(words).each_place(
            box, {x, y, 0, 0}, [&](u8* there, u8*, u64 size) { between->insert(between->end(), there, there + size); },
            [](u8*, u64) {});
    });
    block().own().stores.add([=] {
        const u8* next = between->data();
        Box(words).each_place(
            box, {x, y, 0, 0}, [&](u8*, u8* to, u64 size) { std::memcpy(to, next, size), next += size; },
            [](u8*, u64) {});
    });
}
template <u32 left>
void wait_stores_read() { block().own().reads.complete(left); }
template <u32 left>
void wait_stores() {
    wait_stores_read<left>();
    block().own().stores.complete(left);
}
inline void commit_stores() {
    block().own().reads.commit();
    block().own().stores.commit();
    if (host::chance(2)) block().own().reads.complete(0);
    if (host::chance(4)) wait_stores<0>();
}

// --- fragments of matrices

// Lane l holds the elements (l / 4, 2 (l % 4)) and the next one of each matrix of 8 x 8.
template <bool transposed>
void load_matrices(u32 (&to)[4], u32 shared_line) {
    const u32 lane = block().thread() % 32;
    const auto lines = block().show(&shared_line, sizeof shared_line);
    for (u32 i = 0; i < 4; ++i) {
        to[i] = 0;
        for (u32 j = 0; j < 2; ++j) {
            const u32 row = lane / 4, column = lane % 4 * 2 + j;
            u16 element;
            load_shared(element, u32(lines[8 * i + (transposed ? column : row)][0]) + (transposed ? row : column) * 2);
            to[i] |= u32(element) << 16 * j;
        }
    }
}
inline void store_matrices(u32 shared_row, u32 a, u32 b, u32 c, u32 d) {
    const u32 lane = block().thread() % 32, words[4] = {a, b, c, d};
    const auto lines = block().show(&shared_row, sizeof shared_row);
    for (u32 i = 0; i < 4; ++i) std::memcpy(at(u32(lines[8 * i + lane / 4][0]) + lane % 4 * 4), &words[i], 4);
}
inline void store_matrices_turned(u32 shared_row, u32 a, u32 b, u32 c, u32 d) {
    const u32 lane = block().thread() % 32, words[4] = {a, b, c, d};
    const auto lines = block().show(&shared_row, sizeof shared_row);
    for (u32 i = 0; i < 4; ++i)
        for (u32 half = 0; half < 2; ++half) {
            const u16 bits = u16(words[i] >> 16 * half);
            std::memcpy(at(u32(lines[8 * i + lane % 4 * 2 + half][0]) + lane / 4 * 2), &bits, 2);
        }
}

template <class T>
u32 pack(float first, float second) { return u32(narrow<T>(first).bits) | u32(narrow<T>(second).bits) << 16; }

// c (16 x 8) += a (16 x depth) @ b (depth x 8). a_at(row, k), b_at(k, column)
template <class Acc, class A, class B>
void multiply_add(Acc* c, u32 depth, A a_at, B b_at) {
    const u32 lane = block().thread() % 32;
    for (u32 i = 0; i < 4; ++i)
        for (u32 k = 0; k < depth; ++k) c[i] += a_at(lane / 4 + i / 2 * 8, k) * b_at(k, lane % 4 * 2 + i % 2);
}

template <class T>
void mma(float* c, const u32* a, const u32* b) {
    const u32 own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    const auto shown = block().show(own, sizeof own);
    auto element = [&](u32 lane, u32 word, u32 half) {
        return widen(T{u16(shown[lane][word / 2] >> (word % 2 * 32 + half * 16))});
    };
    multiply_add(
        c, 16, [&](u32 row, u32 k) { return element(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2); },
        [&](u32 k, u32 column) { return element(column * 4 + k % 8 / 2, 4 + k / 8, k % 2); });
}

template <>
inline void mma<tfloat32>(float* c, const u32* a, const u32* b) {
    const u32 own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    const auto shown = block().show(own, sizeof own);
    auto element = [&](u32 lane, u32 word) {
        const u32 bits = u32(shown[lane][word / 2] >> word % 2 * 32);
        if (bits % (1 << 13)) emulation::stop("a factor is no tfloat32");
        return float_of(bits);
    };
    multiply_add(
        c, 8, [&](u32 row, u32 k) { return element(row % 8 * 4 + k % 4, row / 8 + k / 4 * 2); },
        [&](u32 k, u32 column) { return element(column * 4 + k % 4, 4 + k / 4); });
}

inline void mma(double* c, const double* a, double b) {
    const double own[3] = {a[0], a[1], b};
    const auto shown = block().show(own, sizeof own);
    auto element = [&](u32 lane, u32 word) {
        double value;
        std::memcpy(&value, &shown[lane][word], sizeof value);
        return value;
    };
    multiply_add(
        c, 4, [&](u32 row, u32 k) { return element(row % 8 * 4 + k, row / 8); },
        [&](u32 k, u32 column) { return element(column * 4 + k, 2); });
}

inline float power_of_two(float exponent) { return std::exp2(exponent); }

// --- products of warpgroups: at the latest when they are waited for

inline void multiply_fence() {}
inline void multiply_commit() {
    block().own().products.commit();
    if (host::chance(2)) block().own().products.complete(0);
}
template <u32 left>
void multiply_wait() {
    block().own().products.complete(left);
    __syncwarp();  // of all threads of the warp, before one of them tells the neighbour
}
template <u32 count>
void results_are_there(float (&)[count]) {}

inline u64 operand_descriptor(u32 shared_address, u32 box_bytes) {
    return u64(box_bytes / 16) << 16 | (shared_address & 0x3ffff) / 16;
}

inline u64 further(u64 descriptor, u32 bytes) { return descriptor + bytes / 16; }
inline u64 opaque_place(u64 descriptor) { return descriptor; }

// Lines run along k, one for each of the extent; or across it, 64 of the extent in each box.
template <class T> constexpr bool is_tfloat32 = false;
template <> constexpr bool is_tfloat32<tfloat32> = true;

template <class T, bool across>
float factor(u64 descriptor, u32 outer, u32 k) {
    const u64 base = descriptor % (1 << 14) * 16, box_bytes = (descriptor >> 16) * 16;
    const u64 place = across ? outer / 64 * box_bytes + k * 128 + outer % 64 * 2 : outer * 128 + k * sizeof(T);
    T element;
    load_shared(element, u32(swizzled(base + place)));
    if constexpr (is_tfloat32<T>) {
        static_assert(!across, "lines are along k");
        const u32 bits = bits_of(element.value);  // all ones where no copy has brought anything: not a number
        if (bits % (1 << 13) && bits != ~0u) emulation::stop("a factor is no tfloat32");
    }
    return widen(element);
}

// Of 32 bytes of k. first_at(row of those of the warp, k)
template <class T, u32 columns, bool b_across, class First>
void add_product(float (&sums)[columns / 2], First first_at, u64 b, bool add) {
    const u32 thread = block().thread(), first = thread % 32 / 4;
    constexpr u32 depth = 32 / sizeof(T);
    float* const to = sums;
    block().own().products.add([=] {
        float rows[2][depth], column[depth];
        for (u32 k = 0; k < depth; ++k)
            for (u32 i = 0; i < 2; ++i) rows[i][k] = first_at(first + 8 * i, k);
        for (u32 j = 0; j < columns / 4; ++j) {
            for (u32 k = 0; k < depth; ++k) column[k] = factor<T, b_across>(b, j / 2 * 8 + thread % 4 * 2 + j % 2, k);
            for (u32 i = 0; i < 2; ++i) {
                float& sum = to[j / 2 * 4 + i * 2 + j % 2];
                if (!add) sum = 0;
                for (u32 k = 0; k < depth; ++k) sum += rows[i][k] * column[k];
            }
        }
    });
}

template <class T, u32 columns, bool a_across, bool b_across>
void multiply(float (&sums)[columns / 2], u64 a, u64 b, bool add) {
    const u32 warp_row = block().thread() / 32 % 4 * 16;
    add_product<T, columns, b_across>(
        sums, [=](u32 row, u32 k) { return factor<T, a_across>(a, warp_row + row, k); }, b, add);
}

// Of an operand in registers each lane has what it shows; they are read when the product is made, not before.
template <class T, u32 columns, bool b_across>
void multiply(float (&sums)[columns / 2], const u32 (&a)[4], u64 b, bool add) {
    const u32* const own = a;
    std::vector<const u32*> held(32);
    const auto shown = block().show(&own, sizeof own);
    for (u32 lane = 0; lane < 32; ++lane) std::memcpy(&held[lane], shown[lane], sizeof own);
    add_product<T, columns, b_across>(
        sums,
        [=](u32 row, u32 k) {
            const u32 word = held[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            return widen(T{u16(word >> k % 2 * 16)});
        },
        b, add);
}

}  // namespace ptx
}  // namespace mk
