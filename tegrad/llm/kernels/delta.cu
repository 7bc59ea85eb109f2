// A step of a gated delta net for each sequence: all of delta.cuh in one launch.
//
// Macros: those of delta.cuh and mixed.cuh, OVERLAP. Grid: (DELTA_HEADS, sequences), 4 * DELTA_WIDTH threads: a head of
// a sequence each; those of sequences that are not active leave at once.
//   kernel float32 (CHANNELS, DELTA_TAPS); bias, decay float32 (DELTA_HEADS); norm float32 (DELTA_WIDTH)
#include "delta.cuh"
#include "mixed.cuh"
#include "overlap.cuh"
#include "state.cuh"

using namespace deltas;

extern "C" __global__ void __launch_bounds__(4 * DELTA_WIDTH) delta(
    const State *sequences, const float *products, const float *kernel, const float *bias, const float *decay,
    const float *norm, float *kept, float *states, float *x, signed char *q, float *s
) {
    using OwnHead = HeadState<4 * DELTA_WIDTH>;
    __shared__ OwnHead::Sums sums;
    __shared__ alignas(16) float deltas[DELTA_WIDTH];
    __shared__ float found[4 * DELTA_WIDTH], room[4 * DELTA_WIDTH / 32];
    allow_next();
    const int head = blockIdx.x, row = blockIdx.y, thread = threadIdx.x, which = thread / DELTA_WIDTH;
    if (!sequences[row].active) return;
    // State, ring and weights are of no launch of this step: all but the products is read before the wait.
    const int position = sequences[row].position, own = head % DELTA_KEYS;
    const int channel = which < 2 ? (which * DELTA_KEYS + own) * DELTA_WIDTH + thread % DELTA_WIDTH
                                  : (2 * DELTA_KEYS + head) * DELTA_WIDTH + thread % DELTA_WIDTH;
    float *ring = kept + (size_t)row * DELTA_ROWS * CHANNELS + channel;
    float column[DELTA_TAPS], before[DELTA_TAPS];
#pragma unroll
    for (int back = 0; back < DELTA_TAPS; back++) {
        column[back] = which < 3 ? kernel[(size_t)channel * DELTA_TAPS + DELTA_TAPS - 1 - back] : 0;
        const bool there = which < 3 && back > 0 && back <= position;
        before[back] = there ? ring[(size_t)((position - back) % DELTA_ROWS) * CHANNELS] : 0;
    }
    const float own_bias = bias[head], own_decay = decay[head], scale = thread < DELTA_WIDTH ? norm[thread] : 0;
    states += (size_t)head * DELTA_WIDTH * DELTA_WIDTH;
    const OwnHead state(states + state_before(row, position), position > 0, thread);
    await_previous();

    const float *mine = products + (size_t)row * PRODUCTS, *ends = mine + CHANNELS + INNER;
    const float by = decayed(ends[DELTA_HEADS + head], own_bias, own_decay), beta = sigmoid(ends[head]);
    const float gate = thread < DELTA_WIDTH ? scale * silu(mine[CHANNELS + head * DELTA_WIDTH + thread]) : 0;
    float value = 0;
    if (which < 3) {
        const float fresh = mine[channel];
        value = fresh * column[0];
#pragma unroll
        for (int back = 1; back < DELTA_TAPS; back++) value = fmaf(before[back], column[back], value);
        value = silu(value);
        if (which == 2 || head < DELTA_KEYS) ring[(size_t)(position % DELTA_ROWS) * CHANNELS] = fresh;
    }
    const float length = rsqrtf(head_total(value * value, room) + DELTA_EPS);
    found[thread] = which == 0 ? value * length * rsqrtf((float)DELTA_WIDTH) : which == 1 ? value * length : value;
    __syncthreads();

    state.multiply(found + DELTA_WIDTH, found, sums);
    __syncthreads();
    value = 0;
    if (thread < DELTA_WIDTH) {
        const float own = found[2 * DELTA_WIDTH + thread];
        const float2 made = OwnHead::column(sums, thread, own, by, beta, 1, 1);
        deltas[thread] = made.x, value = made.y;
    }
    const float factor = rsqrtf(head_total(value * value, room) / DELTA_WIDTH + DELTA_EPS);
    if (thread < DELTA_WIDTH) {
        const Mixed to = {x, q, s};
        to.put<INNER>(row, head * DELTA_WIDTH + thread, value * factor * gate, true);
    }
    state.store(states + state_before(row, position + 1), by, found + DELTA_WIDTH,
                ((const float4 *)deltas)[state.unit]);
}
