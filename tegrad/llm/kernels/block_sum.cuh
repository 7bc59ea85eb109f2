// A sum over the THREADS of a block, in each of them.
#pragma once

static __device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[THREADS / 32];
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) value += sums[i];
    return value;
}
