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

// By all threads of each of `parts` blocks. One thread's release covers what the others stored before the barrier (PTX
// ISA, memory consistency model: causality order); they read what other blocks stored past L1.
static __device__ __forceinline__ bool last_arriving_block(unsigned *counter, unsigned parts) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) last = last_arriving(counter, parts);
    __syncthreads();
    return last;
}
