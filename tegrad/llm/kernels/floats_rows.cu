// Products of many tokens with a few rows of floats, which halves would round: what beta and decay of a delta net are
// of.
//
// ROWS, COLUMNS; STRIDE (of y); OVERLAP. Grid: (tokens / 8 rounded up, ROWS / 8 rounded up), 256 threads: a warp has a
// row, for eight tokens.
//   y float32 (tokens, STRIDE); x halves (tokens, COLUMNS) in the order of fragments; w float32 (ROWS, COLUMNS)
#include "async.cuh"
#include "overlap.cuh"
#include <cuda_fp16.h>

constexpr int TOKENS = 8;

extern "C" __global__ void __launch_bounds__(256) floats_rows(float *y, const __half *x, const float *w,
                                                              const int *count) {
    allow_next();
    await_previous();
    const int first = blockIdx.x * TOKENS, row = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tokens = min(TOKENS, *count - first);
    if (row >= ROWS || tokens <= 0) return;
    float sums[TOKENS] = {};
    for (int at = lane; at < COLUMNS; at += 32) {
        const float weight = w[(size_t)row * COLUMNS + at];
#pragma unroll
        for (int i = 0; i < TOKENS; i++)
            if (i < tokens)
                sums[i] = fmaf(weight, __half2float(x[(size_t)(first + i) * COLUMNS + fragment_order(at)]), sums[i]);
    }
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
#pragma unroll
        for (int step = 16; step; step /= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], step);
        if (lane == 0 && i < tokens) y[(size_t)(first + i) * STRIDE + row] = sums[i];
    }
}
