// Barriers of some of a CTA's warps, by number; 0 is that of __syncthreads.
#pragma once

enum Barrier { INPUT_READY = 1, RESULTS_READY, EPILOGUE_WARPS, ATTENTION_WARPS_READY, CONSUMER_WARPS };

template <int Barrier> __device__ __forceinline__ void barrier_sync(int threads) {
    asm volatile("barrier.sync %0, %1;" ::"n"(Barrier), "r"(threads) : "memory");
}

// Arrive without waiting: what this thread did before is seen by those who sync.
template <int Barrier> __device__ __forceinline__ void barrier_arrive(int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"n"(Barrier), "r"(threads) : "memory");
}
