// Which of those that share a piece of work through global memory arrives last. A counter is 0 before and afterwards;
// what was stored before an arrival is seen by the last-arriving one.
#pragma once

// By one thread of each of `parts`: one count up, with wrap to 0.
static __device__ __forceinline__ bool last_arriving(unsigned *counter, int parts) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(counter), "r"(parts - 1) : "memory");
    return before == (unsigned)(parts - 1);
}

// By all threads of each of `parts` blocks.
static __device__ __forceinline__ bool last_arriving_block(unsigned *counter, unsigned parts) {
    __shared__ unsigned order;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) order = atomicAdd(counter, 1);
    __syncthreads();
    if (order != parts - 1) return false;
    __threadfence();
    if (threadIdx.x == 0) *counter = 0;
    return true;
}
