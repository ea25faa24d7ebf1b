// PTX instructions that C++ has no word for, each wrapped once. Only engines of the cuda target include this; loads,
// stores, atomics and the clock, which all layers use, are in target_cuda.cuh.
#pragma once

#include "types.cuh"

namespace mk {
namespace ptx {

MK_DEVICE u32 shared_address(const void* shared) { return u32(__cvta_generic_to_shared(shared)); }

// --- sm_80: copies from global to shared memory, past the registers and the L1 cache ----------------------------------

// 16 bytes, both ends aligned to them: the first `bytes` of `from`, and zeros behind.
MK_DEVICE void copy_async(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}

// Closes the group of this thread's copies since the last one.
MK_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until only the `newest` groups of this thread are under way.
template <u32 newest>
MK_DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(newest) : "memory");
}

// --- sm_80: matrix fragments ------------------------------------------------------------------------------------------
// A thread's place in a fragment: group = lane / 4, member = lane % 4. For a matrix of 8 x 8 it holds the elements
// (group, 2 member) and (group, 2 member + 1).

// Four matrices of 8 x 8 elements of 16 bits. Lane l passes the address of 8 contiguous elements: line l % 8 of matrix
// l / 8. Lines are rows, or columns if `transposed`.
template <bool transposed>
MK_DEVICE void load_matrices(u32 (&to)[4], const void* line) {
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared_address(line))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared_address(line))
                     : "memory");
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

// The same for float64. a[2 s], a[2 s + 1]: rows group and group + 8 of column 4 s + member; b[s]: row 4 s + member of
// column group.
MK_DEVICE void mma(double* c, const double* a, const double* b) {
#if __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
          "d"(b[2]), "d"(b[3]));
#else
    MK_UNROLL
    for (u32 i = 0; i < 8; ++i)
        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+d"(c[i % 2 * 2]), "+d"(c[i % 2 * 2 + 1])
            : "d"(a[i]), "d"(b[i / 2]));
#endif
}

}  // namespace ptx
}  // namespace mk
