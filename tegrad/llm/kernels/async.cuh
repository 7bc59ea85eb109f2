// Asynchronous copies from global to shared memory, and the tensor cores' product (PTX ISA: cp.async, mma.m16n8k16).
#pragma once

static __device__ __forceinline__ unsigned shared_address(const void *at) {
    return (unsigned)__cvta_generic_to_shared(at);
}

// Copies of 16 bytes go past L1; the smaller ones cannot.
template <int BYTES> static __device__ __forceinline__ void copy_async(unsigned to, const void *from) {
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
}

// The same through L1, for those who will soon read what lies beside it in the same lines.
template <int BYTES> static __device__ __forceinline__ void copy_async_near(unsigned to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
}

// 16 bytes, or as many zeros where there is nothing to copy: then nothing is read.
static __device__ __forceinline__ void copy_async_or_zero(unsigned to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}

static __device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread's copies but the newest KEEP.
template <int KEEP> static __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(KEEP) : "memory");
}

// d += a b: a 16 x 16 (rows g and g + 8; columns 2t, 2t + 1, and the same + 8), b 16 x 8 (column g), g = lane / 4,
// t = lane % 4.
// d: rows g and g + 8, columns 2t, 2t + 1.
static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Activations that are halves lie in the order in which fragments take them: of each 16, the pairs 0, 2, 4, 6 and then
// the pairs 1, 3, 5, 7, so that thread t of a group of four gets columns 4t .. 4t + 3 of what ldmatrix loads.
static __host__ __device__ __forceinline__ constexpr int fragment_order(int column) {
    return (column & ~15) | (column & 2) << 2 | (column & 12) >> 1 | (column & 1);
}

// Four 8 x 8 matrices of halves, a row of 16 bytes at the address of each lane: lane 4g + t gets columns 2t, 2t + 1 of
// row g.
template <bool TRANSPOSED> static __device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned at) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

static __device__ __forceinline__ unsigned lds32(unsigned at) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

static __device__ __forceinline__ uint2 lds64(unsigned at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}

static __device__ __forceinline__ uint4 lds128(unsigned at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

// The load that the target's type asks for.
static __device__ __forceinline__ void lds(unsigned &to, unsigned at) { to = lds32(at); }
static __device__ __forceinline__ void lds(uint2 &to, unsigned at) { to = lds64(at); }
static __device__ __forceinline__ void lds(uint4 &to, unsigned at) { to = lds128(at); }
