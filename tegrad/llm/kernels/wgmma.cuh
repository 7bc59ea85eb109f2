// Hopper's asynchronous product of a warpgroup (PTX ISA: wgmma.mma_async): d += a b, a 64 x 16 in registers or shared
// memory, b 16 x N in shared memory, N / 2 sums a thread. Of each warp's 16 rows a thread has those of mma.m16n8k16;
// d[4j .. 4j + 3] are its rows g and g + 8, columns 8j + 2t and 8j + 2t + 1. Both in shared memory: rows of 64 halves,
// of which a swizzle of 128 bytes is taken.
#pragma once

// Sums are made before this, and read after it: the compiler may not move what writes or reads them across.
template <int N> static __device__ __forceinline__ void settle(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

static __device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Sums and fragments that are written are the products' from here on, until the wait.
template <int N, int S> static __device__ __forceinline__ void warpgroup_begin(float (&d)[N], unsigned (&a)[S][4]) {
    settle(d);
#pragma unroll
    for (int s = 0; s < S; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[s][i])::"memory");
    warpgroup_fence();
}

static __device__ __forceinline__ void warpgroup_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all products but the newest KEEP groups; `d` are sums of those.
template <int KEEP = 0, int N> static __device__ __forceinline__ void warpgroup_wait(float (&d)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(KEEP) : "memory");
    settle(d);
}

// What ordinary and asynchronous copies stored in shared memory is seen by the products that follow.
static __device__ __forceinline__ void show_to_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The descriptor of a matrix at an address that is a multiple of 1024, or 32 bytes on for each 16 columns: bits 0-13
// address, 16-29 leading offset (unused where rows are swizzled, but of a matrix that is read transposed: bytes from 64
// columns to the next), 32-45 bytes from eight rows to the next, all in units of 16; 62-63: 1, a swizzle of 128 bytes.
static __device__ __forceinline__ unsigned long long described(unsigned at, unsigned leading = 16) {
    return (unsigned long long)(at >> 4 & 0x3fff) | (unsigned long long)(leading >> 4) << 16 |
        (unsigned long long)(1024 >> 4) << 32 | 1ull << 62;
}

// The operands of 16 to 128 sums, by name and by number.
#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_64(d, i) SUMS_16(d, i), SUMS_16(d, i + 16), SUMS_16(d, i + 32), SUMS_16(d, i + 48)
#define SUMS_32(d, i) SUMS_16(d, i), SUMS_16(d, i + 16)
#define SUMS_128(d, i) SUMS_64(d, i), SUMS_64(d, i + 64)
#define NUMBERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NUMBERS_32 \
    NUMBERS_16 \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_64 \
    NUMBERS_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NUMBERS_128 \
    NUMBERS_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// run: a in registers; TRANSPOSED: rows of b are steps of 16. shared: a in shared memory; d = a b unless ACCUMULATE.
template <int N> struct Product;
#define PRODUCT(N, COUNT, A0, A1, A2, A3, A4, A5) \
    template <> struct Product<N> { \
        template <int TRANSPOSED = 0> \
        static __device__ __forceinline__ void run(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b) { \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NUMBERS_##COUNT \
                         "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " A4 ", 1, 1, 1, " A5 ";" \
                         : SUMS_##COUNT(d, 0) \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED)); \
        } \
        template <int ACCUMULATE> static __device__ __forceinline__ void shared( \
            float (&d)[COUNT], unsigned long long a, unsigned long long b \
        ) { \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NUMBERS_##COUNT \
                         "}, " A0 ", " A1 ", " A2 ", 1, 1, 0, 0;" \
                         : SUMS_##COUNT(d, 0) : "l"(a), "l"(b), "n"(ACCUMULATE)); \
        } \
    };
PRODUCT(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
PRODUCT(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
PRODUCT(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
PRODUCT(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")
#undef PRODUCT
