// What a feed-forward layer's gate makes of a chunk's tokens, times what its other matrix makes of them, where no
// product takes both.
//
// COLUMNS; OVERLAP. Grid: (tokens, COLUMNS / 256 rounded up), 256 threads.
//   hidden  halves (tokens, COLUMNS) in the order of fragments
//   up      float32 (tokens, COLUMNS)
#include "async.cuh"
#include "chunk.cuh"
#include "overlap.cuh"
#include <cuda_fp16.h>

extern "C" __global__ void __launch_bounds__(256) times_rows(__half *hidden, const float *up, const int *count) {
    allow_next();
    await_previous();
    const int token = blockIdx.x, at = blockIdx.y * 256 + threadIdx.x;
    if (token >= *count || at >= COLUMNS) return;
    __half *to = hidden + (size_t)token * COLUMNS + fragment_order(at);
    *to = __float2half_rn(__half2float(*to) * up[(size_t)token * COLUMNS + at]);
}
