// PTX instructions that C++ has no word for, each wrapped once. Only engines of the cuda target include this; loads,
// stores, atomics and the clock, which all layers use, are in target_cuda.cuh.
#pragma once

#include "types.cuh"

namespace mk {
namespace ptx {

MK_DEVICE u32 shared_address(const void* shared) { return u32(__cvta_generic_to_shared(shared)); }

// The same value, from which the compiler concludes nothing.
MK_DEVICE u32 opaque(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// What a number that is never negative comes from is computed here, however late it is needed: the assembler moves waits
// ahead of arithmetic, but not ahead of a trap.
MK_DEVICE void settle(float number) {
    asm volatile("{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n@never trap;\n}" ::"f"(number) : "memory");
}

// --- registers

// Whether warps of a block can have different numbers of registers.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool registers_move = true;
#else
constexpr bool registers_move = false;
#endif

// Registers per thread of the calling warpgroup, a multiple of 8; as many as others have let go.
template <u32 count>
MK_DEVICE void grow_registers() {
    if constexpr (registers_move) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <u32 count>
MK_DEVICE void shrink_registers() {
    if constexpr (registers_move) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// --- sm_80: copies from global to shared memory, past the registers and the L1 cache ---------------------------------

// 16 bytes, both ends aligned to them.
MK_DEVICE void copy_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
MK_DEVICE void copy_async(void* to, const void* from) { copy_async(shared_address(to), from); }

// The same for the first `bytes` of `from`, and zeros behind.
MK_DEVICE void copy_async(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
MK_DEVICE void copy_async(void* to, const void* from, u32 bytes) { copy_async(shared_address(to), from, bytes); }

// Closes the group of the copies that this thread has started since the last one.
MK_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last `left` groups of this thread are there.
template <u32 left>
MK_DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory"); }

// --- a warp that acts as one: where compilers do not see that all its threads have the same value, or that one of them
// acts for it, what takes operands from uniform registers becomes a loop over the threads

MK_DEVICE u32 uniform(u32 value) { return __shfl_sync(~0u, value, 0); }
template <class Object>
MK_DEVICE Object* uniform(Object* object) {
    const u64 address = reinterpret_cast<u64>(object);
    return reinterpret_cast<Object*>(u64(uniform(u32(address >> 32))) << 32 | uniform(u32(address)));
}

// Whether this is the thread that acts for its warp, all of which calls it, or of it those lanes. From sm_90 on.
template <u32 lanes = ~0u>
MK_DEVICE bool elect() {
    u32 elected = 0;
    asm volatile(
        "{\n.reg .pred elected;\n"
        "elect.sync _|elected, %1;\n"
        "@elected mov.u32 %0, 1;\n}"
        : "+r"(elected)
        : "n"(lanes));
    return elected;
}

// --- sm_80: barriers -------------------------------------------------------------------------------------------------

// A barrier of some warps of a block, `threads` in all; `id` is 1 to 15.
MK_DEVICE void sync_warps(u32 id, u32 threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Only says that a warp has come to it.
MK_DEVICE void arrive_for_warps(u32 id, u32 threads) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Whether any of them says so.
MK_DEVICE bool any_of_warps(u32 id, u32 threads, bool verdict) {
    u32 any;
    asm volatile(
        "{\n.reg .pred verdict, any;\n"
        "setp.ne.b32 verdict, %1, 0;\n"
        "barrier.cta.red.or.pred any, %2, %3, verdict;\n"
        "selp.b32 %0, 1, 0, any;\n}"
        : "=r"(any)
        : "r"(u32(verdict)), "r"(id), "r"(threads)
        : "memory");
    return any;
}

// An mbarrier, in shared memory: it completes a phase with so many arrivals.

MK_DEVICE void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

MK_DEVICE void arrive(u64* barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
                 : "memory");
}

// Arrives when all copies that this thread has started so far are complete.
MK_DEVICE void arrive_when_copied(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Whether the phase of that parity is complete.
MK_DEVICE bool completed(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.b32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done;
}

// Waits until it is.
MK_DEVICE void wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
#if __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#else
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#endif
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// --- sm_80: matrix fragments -----------------------------------------------------------------------------------------
// A thread's place in a fragment: group = lane / 4, member = lane % 4. For a matrix of 8 x 8 it holds the elements
// (group, 2 member) and (group, 2 member + 1).

// Four matrices of 8 x 8 elements of 16 bits. Lane l passes the address of 8 contiguous elements: line l % 8 of matrix
// l / 8. Lines are rows, or columns if `transposed`.
template <bool transposed>
MK_DEVICE void load_matrices(u32 (&to)[4], u32 shared_line) {
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared_line)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared_line)
                     : "memory");
}

// The same for other elements: a thread's own ones, which are neighbours.
MK_DEVICE void load_shared(float2& to, u32 address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to.x), "=f"(to.y) : "r"(address) : "memory");
}
MK_DEVICE void load_shared(float4& to, u32 address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to.x), "=f"(to.y), "=f"(to.z), "=f"(to.w)
                 : "r"(address)
                 : "memory");
}
MK_DEVICE void load_shared(float& to, u32 address) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(to) : "r"(address) : "memory");
}
MK_DEVICE void load_shared(double& to, u32 address) {
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(to) : "r"(address) : "memory");
}
MK_DEVICE void load_shared(double2& to, u32 address) {
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(to.x), "=d"(to.y) : "r"(address) : "memory");
}

// c += a @ b, 16 x 8 x 16. c: rows group and group + 8, columns 2 member and 2 member + 1 of each.
template <class T>
MK_DEVICE void mma(float* c, const u32* a, const u32* b);

template <>
MK_DEVICE void mma<bfloat16>(float* c, const u32* a, const u32* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
MK_DEVICE void mma<float16>(float* c, const u32* a, const u32* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same for tfloat32, 16 x 8 x 8. a: rows group and group + 8 of column member, then of column member + 4; b: rows
// member and member + 4 of column group.
template <>
MK_DEVICE void mma<tfloat32>(float* c, const u32* a, const u32* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same for float64, 16 x 8 x 4. a: rows group and group + 8 of column member; b: row member of column group.
MK_DEVICE void mma(double* c, const double* a, double b) {
#if __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a[0]), "d"(a[1]), "d"(b));
#else
    MK_UNROLL
    for (u32 i = 0; i < 2; ++i)
        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+d"(c[2 * i]), "+d"(c[2 * i + 1])
            : "d"(a[i]), "d"(b));
#endif
}

// Two elements of 16 bits, as fragments have them.
template <class T>
MK_DEVICE u32 pack(float first, float second);

template <>
MK_DEVICE u32 pack<bfloat16>(float first, float second) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}

template <>
MK_DEVICE u32 pack<float16>(float first, float second) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}

// 2 to a power, to two units in the last place; what is subnormal is 0.
MK_DEVICE float power_of_two(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}

}  // namespace ptx

// --- sm_90a: tensor copies, mbarriers, warpgroup matrix instructions -------------------------------------------------

namespace ptx {

// --- clusters

MK_DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of all blocks of the cluster.
MK_DEVICE void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// --- mbarriers that reach further than a block

// Before its memory is used for anything else, or for another barrier.
MK_DEVICE void barrier_invalidate(u64* barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// After barrier_init: before the cluster or a bulk copy may use the barriers.
MK_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and lets the phase also wait for `bytes` of bulk copies.
MK_DEVICE void arrive_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Arrives at the barrier in the same place of another block of the cluster.
MK_DEVICE void arrive_at(u64* barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}

// --- tensor copies

// By each thread before it uses a map. Of those that are no kernel's parameters, a cached copy may be outdated. (Not by
// __isGridConstant: compilers take that for true of an address that may be one of several.)
MK_DEVICE void acquire_map(const TensorMap* map) {
    asm volatile(
        "{\n"
        ".reg .pred parameter;\n"
        "isspacep.param::entry parameter, %0;\n"
        "@!parameter fence.proxy.tensormap::generic.acquire.gpu [%0], 128;\n"
        "}" ::"l"(map) : "memory");
}

// Before it is used: the copy engine reads the map meanwhile.
MK_DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// What is known to have been written to global memory may be read by bulk and tensor copies.
MK_DEVICE void fence_global_to_async() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// What this thread wrote to shared memory may be read by tensor copies, once they are ordered behind this thread.
MK_DEVICE void fence_shared_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Loads the box at (x, y), x along what is contiguous, a multiple of 16 bytes, and completes its bytes at the barrier.
MK_DEVICE void load_box(void* to, const TensorMap* map, u64* barrier, i32 x, i32 y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
                 : "memory");
}

// The same of an array of three dimensions.
MK_DEVICE void load_box(void* to, const TensorMap* map, u64* barrier, i32 x, i32 y, i32 z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// The same of an array of four dimensions.
MK_DEVICE void load_box(void* to, const TensorMap* map, u64* barrier, i32 x, i32 y, i32 z, i32 w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// That of load_box(to, map, barrier, x, y) into, and with the barrier of, each block of the cluster whose bit is set.
MK_DEVICE void load_box_to(u16 blocks, void* to, const TensorMap* map, u64* barrier, i32 x, i32 y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(blocks)
                 : "memory");
}

// Stores a box at such an (x, y) of the matrix, clipped at its edges.
MK_DEVICE void store_box(const TensorMap* map, const void* from, i32 x, i32 y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y)
                 : "memory");
}

// --- copies of bytes, both ends and the count aligned to 16

MK_DEVICE void load_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

MK_DEVICE void store_bulk(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}

// Closes the group of this thread's stores since the last one.
MK_DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the last `left` groups of this thread are where they were to go.
template <u32 left>
MK_DEVICE void wait_stores() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(left) : "memory"); }

// Waits until all but the last `left` groups of this thread have read their shared memory.
template <u32 left>
MK_DEVICE void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(left) : "memory"); }

// Four 8x8 matrices of 16-bit elements, in the layout of matrix instructions, to rows of 16 bytes: lane i gives the
// address of row i % 8 of matrix i / 8.
MK_DEVICE void store_matrices(u32 shared_row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_row), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// The same of the transposed matrices.
MK_DEVICE void store_matrices_turned(u32 shared_row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_row), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// --- warpgroup matrix instructions

MK_DEVICE void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MK_DEVICE void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `left` committed groups are in flight.
template <u32 left>
MK_DEVICE void multiply_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory"); }

// After the wait: no use of the sums is moved before it.
template <u32 count>
MK_DEVICE void results_are_there(float (&sums)[count]) {
    MK_UNROLL
    for (u32 i = 0; i < count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// An operand in lines of 128 bytes, swizzled as tensor copies do, 1024 bytes aligned. Lines across k hold 64 of the
// extent each, and the next 64 are `box_bytes` further.
MK_DEVICE u64 operand_descriptor(u32 shared_address, u32 box_bytes) {
    return u64(1) << 62 | u64(1024 / 16) << 32 | u64(box_bytes / 16) << 16 |
           (shared_address & 0x3ffff) / 16;  // without the block's place in the cluster
}

// The descriptor of what is so many bytes further.
MK_DEVICE u64 further(u64 descriptor, u32 bytes) {
    return descriptor >> 32 << 32 | (u32(descriptor) + bytes / 16);  // 32 bits: no carry
}

// The same descriptor, of whose place the compiler concludes nothing.
MK_DEVICE u64 opaque_place(u64 descriptor) { return descriptor >> 32 << 32 | opaque(u32(descriptor)); }

// The accumulators are the first operands of an instruction: 8 more of them each time.
#define MK_ACCUMULATORS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MK_ACCUMULATORS_16 MK_ACCUMULATORS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MK_ACCUMULATORS_24 MK_ACCUMULATORS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MK_ACCUMULATORS_32 MK_ACCUMULATORS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MK_ACCUMULATORS_40 MK_ACCUMULATORS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MK_ACCUMULATORS_48 MK_ACCUMULATORS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MK_ACCUMULATORS_56 MK_ACCUMULATORS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MK_ACCUMULATORS_64 MK_ACCUMULATORS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MK_ACCUMULATORS_72 MK_ACCUMULATORS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MK_ACCUMULATORS_80 MK_ACCUMULATORS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define MK_ACCUMULATORS_88 MK_ACCUMULATORS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define MK_ACCUMULATORS_96 MK_ACCUMULATORS_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define MK_ACCUMULATORS_104 MK_ACCUMULATORS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define MK_ACCUMULATORS_112 MK_ACCUMULATORS_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define MK_ACCUMULATORS_120 MK_ACCUMULATORS_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define MK_ACCUMULATORS_128 MK_ACCUMULATORS_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define MK_IN_OUT_EIGHT(i)                                                                                           \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]),     \
        "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define MK_IN_OUT_8 MK_IN_OUT_EIGHT(0)
#define MK_IN_OUT_16 MK_IN_OUT_8, MK_IN_OUT_EIGHT(8)
#define MK_IN_OUT_24 MK_IN_OUT_16, MK_IN_OUT_EIGHT(16)
#define MK_IN_OUT_32 MK_IN_OUT_24, MK_IN_OUT_EIGHT(24)
#define MK_IN_OUT_40 MK_IN_OUT_32, MK_IN_OUT_EIGHT(32)
#define MK_IN_OUT_48 MK_IN_OUT_40, MK_IN_OUT_EIGHT(40)
#define MK_IN_OUT_56 MK_IN_OUT_48, MK_IN_OUT_EIGHT(48)
#define MK_IN_OUT_64 MK_IN_OUT_56, MK_IN_OUT_EIGHT(56)
#define MK_IN_OUT_72 MK_IN_OUT_64, MK_IN_OUT_EIGHT(64)
#define MK_IN_OUT_80 MK_IN_OUT_72, MK_IN_OUT_EIGHT(72)
#define MK_IN_OUT_88 MK_IN_OUT_80, MK_IN_OUT_EIGHT(80)
#define MK_IN_OUT_96 MK_IN_OUT_88, MK_IN_OUT_EIGHT(88)
#define MK_IN_OUT_104 MK_IN_OUT_96, MK_IN_OUT_EIGHT(96)
#define MK_IN_OUT_112 MK_IN_OUT_104, MK_IN_OUT_EIGHT(104)
#define MK_IN_OUT_120 MK_IN_OUT_112, MK_IN_OUT_EIGHT(112)
#define MK_IN_OUT_128 MK_IN_OUT_120, MK_IN_OUT_EIGHT(120)

// A, B, ...: the numbers of the operands behind the accumulators. ORDERS: how those are named that say `across`.
#define MK_MULTIPLY(COLUMNS, TERMS, ORDERS, ACCUMULATORS, IN_OUT, A, B, ADD, A_ACROSS, B_ACROSS)                      \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n" #COLUMNS TERMS " {" ACCUMULATORS "}, %" #A ", %" #B              \
                 ", add, 1, 1" ORDERS(A_ACROSS, B_ACROSS) ";\n}"                                                      \
                 : IN_OUT                                                                                             \
                 : "l"(a), "l"(b), "r"(u32(add)), "n"(int(a_across)), "n"(int(b_across)))
#define MK_EITHER_ORDER(A_ACROSS, B_ACROSS) ", %" #A_ACROSS ", %" #B_ACROSS
#define MK_ALONG_K(A_ACROSS, B_ACROSS)
#define MK_MULTIPLY_COLUMNS(TERMS, ORDERS)                                                                            \
    if constexpr (columns == 16)                                                                                      \
        MK_MULTIPLY(16, TERMS, ORDERS, MK_ACCUMULATORS_8, MK_IN_OUT_8, 8, 9, 10, 11, 12);                             \
    else if constexpr (columns == 32)                                                                                 \
        MK_MULTIPLY(32, TERMS, ORDERS, MK_ACCUMULATORS_16, MK_IN_OUT_16, 16, 17, 18, 19, 20);                         \
    else if constexpr (columns == 48)                                                                                 \
        MK_MULTIPLY(48, TERMS, ORDERS, MK_ACCUMULATORS_24, MK_IN_OUT_24, 24, 25, 26, 27, 28);                         \
    else if constexpr (columns == 64)                                                                                 \
        MK_MULTIPLY(64, TERMS, ORDERS, MK_ACCUMULATORS_32, MK_IN_OUT_32, 32, 33, 34, 35, 36);                         \
    else if constexpr (columns == 80)                                                                                 \
        MK_MULTIPLY(80, TERMS, ORDERS, MK_ACCUMULATORS_40, MK_IN_OUT_40, 40, 41, 42, 43, 44);                         \
    else if constexpr (columns == 96)                                                                                 \
        MK_MULTIPLY(96, TERMS, ORDERS, MK_ACCUMULATORS_48, MK_IN_OUT_48, 48, 49, 50, 51, 52);                         \
    else if constexpr (columns == 112)                                                                                \
        MK_MULTIPLY(112, TERMS, ORDERS, MK_ACCUMULATORS_56, MK_IN_OUT_56, 56, 57, 58, 59, 60);                        \
    else if constexpr (columns == 128)                                                                                \
        MK_MULTIPLY(128, TERMS, ORDERS, MK_ACCUMULATORS_64, MK_IN_OUT_64, 64, 65, 66, 67, 68);                        \
    else if constexpr (columns == 192)                                                                                \
        MK_MULTIPLY(192, TERMS, ORDERS, MK_ACCUMULATORS_96, MK_IN_OUT_96, 96, 97, 98, 99, 100);                       \
    else                                                                                                              \
        MK_MULTIPLY(256, TERMS, ORDERS, MK_ACCUMULATORS_128, MK_IN_OUT_128, 128, 129, 130, 131, 132)

template <class T> constexpr bool is_bfloat16 = false;
template <> constexpr bool is_bfloat16<bfloat16> = true;
template <class T> constexpr bool is_tfloat32 = false;
template <> constexpr bool is_tfloat32<tfloat32> = true;

// 64 x `columns` sums = or (add) += a 64 x 32-byte by a 32-byte x `columns` operand; `across`: lines run across k.
template <class T, u32 columns, bool a_across, bool b_across>
MK_DEVICE void multiply(float (&sums)[columns / 2], u64 a, u64 b, bool add) {
    static_assert(columns % 64 == 0 || (columns % 16 == 0 && columns < 128), "one of the instructions written out here");
    static_assert(!is_tfloat32<T> || !(a_across || b_across), "32 bits only along k");
    if constexpr (is_bfloat16<T>) { MK_MULTIPLY_COLUMNS("k16.f32.bf16.bf16", MK_EITHER_ORDER); }
    else if constexpr (is_tfloat32<T>) { MK_MULTIPLY_COLUMNS("k8.f32.tf32.tf32", MK_ALONG_K); }
    else { MK_MULTIPLY_COLUMNS("k16.f32.f16.f16", MK_EITHER_ORDER); }
}

// The same with the first operand in registers, as fragments have it: a warp's 16 rows, packed. These are the places of
// the sums of an earlier product: what was made of its columns 16 i to 16 i + 15 is the i-th operand.
#define MK_MULTIPLY_HELD(COLUMNS, TYPE, ACCUMULATORS, IN_OUT, A, A1, A2, A3, B, ADD, B_ACROSS)                        \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" ACCUMULATORS "}, {%" #A   \
                 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", add, 1, 1, %" #B_ACROSS ";\n}"                            \
                 : IN_OUT                                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(u32(add)), "n"(int(b_across)))
#define MK_MULTIPLY_HELD_COLUMNS(TYPE)                                                                                \
    if constexpr (columns == 64)                                                                                      \
        MK_MULTIPLY_HELD(64, TYPE, MK_ACCUMULATORS_32, MK_IN_OUT_32, 32, 33, 34, 35, 36, 37, 38);            \
    else if constexpr (columns == 128)                                                                                \
        MK_MULTIPLY_HELD(128, TYPE, MK_ACCUMULATORS_64, MK_IN_OUT_64, 64, 65, 66, 67, 68, 69, 70);              \
    else                                                                                                              \
        MK_MULTIPLY_HELD(256, TYPE, MK_ACCUMULATORS_128, MK_IN_OUT_128, 128, 129, 130, 131, 132, 133, 134)

template <class T, u32 columns, bool b_across>
MK_DEVICE void multiply(float (&sums)[columns / 2], const u32 (&a)[4], u64 b, bool add) {
    static_assert(columns == 64 || columns == 128 || columns == 256, "written out here");
    if constexpr (is_bfloat16<T>) { MK_MULTIPLY_HELD_COLUMNS("bf16"); }
    else { MK_MULTIPLY_HELD_COLUMNS("f16"); }
}

#undef MK_MULTIPLY_HELD_COLUMNS
#undef MK_MULTIPLY_HELD
#undef MK_MULTIPLY_COLUMNS
#undef MK_ALONG_K
#undef MK_EITHER_ORDER
#undef MK_MULTIPLY
#undef MK_IN_OUT_128
#undef MK_IN_OUT_120
#undef MK_IN_OUT_112
#undef MK_IN_OUT_104
#undef MK_IN_OUT_96
#undef MK_IN_OUT_88
#undef MK_IN_OUT_80
#undef MK_IN_OUT_72
#undef MK_IN_OUT_64
#undef MK_IN_OUT_56
#undef MK_IN_OUT_48
#undef MK_IN_OUT_40
#undef MK_IN_OUT_32
#undef MK_IN_OUT_24
#undef MK_IN_OUT_16
#undef MK_IN_OUT_8
#undef MK_IN_OUT_EIGHT
#undef MK_ACCUMULATORS_128
#undef MK_ACCUMULATORS_120
#undef MK_ACCUMULATORS_112
#undef MK_ACCUMULATORS_104
#undef MK_ACCUMULATORS_96
#undef MK_ACCUMULATORS_88
#undef MK_ACCUMULATORS_80
#undef MK_ACCUMULATORS_72
#undef MK_ACCUMULATORS_64
#undef MK_ACCUMULATORS_56
#undef MK_ACCUMULATORS_48
#undef MK_ACCUMULATORS_40
#undef MK_ACCUMULATORS_32
#undef MK_ACCUMULATORS_24
#undef MK_ACCUMULATORS_16
#undef MK_ACCUMULATORS_8

}  // namespace ptx

}  // namespace mk
