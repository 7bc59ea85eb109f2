// The likeliest token of each sequence whose settings ask for no more, from all of its logits, and the end of the step.
// Grid (CUTS, sequences), 512 threads: the last of the blocks that share a sequence ends it.
//   logits    float32 (sequences, VOCAB)
//   tops      Ranked (sequences, CUTS): work space; counters: uint32 (sequences), zeros, and zeros again afterwards
#include "sampling.cuh"

constexpr int BLOCK = 512, SPAN = ((VOCAB + CUTS - 1) / CUTS + 3) / 4 * 4;
static_assert(CUTS <= 32, "a warp ends a sequence");

static __device__ __forceinline__ sampling::Ranked warp_largest(sampling::Ranked found) {
#pragma unroll
    for (int step = 16; step; step /= 2)
        found = sampling::larger(found, __shfl_xor_sync(sampling::ALL, found, step));
    return found;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
greedy_rows(State *states, Entry *rings, int *histories, const int *ends, const sampling::Settings *settings,
            const float *logits, sampling::Ranked *tops, unsigned *counters) {
    using namespace sampling;
    __shared__ Ranked winners[BLOCK / 32];
    __shared__ int last;
    const int slot = blockIdx.y, lane = threadIdx.x % 32;
    State *state = states + slot;
    if (!state->active || state->stop || !settings[slot].greedy()) return;
    const int end = min((int)(blockIdx.x + 1) * SPAN, VOCAB);
    Ranked found = 0;
#pragma unroll 4
    for (int at = blockIdx.x * SPAN + 4 * threadIdx.x; at < end; at += 4 * BLOCK) {
        float values[4];
        load_chunk(logits + (size_t)slot * VOCAB, at, values);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (VOCAB % 4 == 0 || at + i < VOCAB) found = larger(found, ranked(values[i], at + i));
    }
    found = warp_largest(found);
    if (lane == 0) winners[threadIdx.x / 32] = found;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    found = warp_largest(lane < BLOCK / 32 ? winners[lane] : 0);
    if (lane == 0) {
        tops[slot * CUTS + blockIdx.x] = found;
        last = last_arriving(counters + slot, CUTS);
    }
    __syncwarp();
    if (!last) return;
    found = warp_largest(lane < CUTS ? __ldcg(tops + slot * CUTS + lane) : 0);
    if (lane == 0) finish(state, rings + slot * RING, histories + slot * HISTORY, ends, taken(found));
}
