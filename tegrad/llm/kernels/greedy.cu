// The likeliest token of each sequence, from the best of every 32 logits, and the end of the step. Grid (sequences),
// 1024 threads.
//   best, best_row  float32 and int32 (sequences, ENTRIES): the largest of some logits, and its token
#include "sampling.cuh"

constexpr int ENTRIES = (VOCAB + 31) / 32;

extern "C" __global__ void __launch_bounds__(1024)
greedy(State *states, Entry *rings, int *histories, const int *ends, const float *best, const int *best_row) {
    using namespace sampling;
    __shared__ Ranked winners[32];
    const int slot = blockIdx.x;
    State *state = states + slot;
    if (!state->active || state->stop) return;
    Ranked found = 0;
#pragma unroll 4
    for (int at = threadIdx.x; at < ENTRIES; at += 1024)
        found = larger(found, ranked(best[slot * ENTRIES + at], best_row[slot * ENTRIES + at]));
#pragma unroll
    for (int step = 16; step; step /= 2) found = larger(found, __shfl_xor_sync(ALL, found, step));
    if (threadIdx.x % 32 == 0) winners[threadIdx.x / 32] = found;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    found = winners[threadIdx.x];
#pragma unroll
    for (int step = 16; step; step /= 2) found = larger(found, __shfl_xor_sync(ALL, found, step));
    if (threadIdx.x == 0) finish(state, rings + slot * RING, histories + slot * HISTORY, ends, taken(found));
}
