// What heads mix of a chunk's tokens, times the sigmoids of their gates.
//
// HEADS, KV_HEADS, HEAD_DIM; OVERLAP. Grid: (tokens, HEADS * HEAD_DIM / 256 rounded up), 256 threads.
//   mixed halves (tokens, HEADS, HEAD_DIM) in the order of fragments; qkv float32 (tokens, 2 HEADS + 2 KV_HEADS,
//   HEAD_DIM): each head's query and its gates, then keys, then values
#include "async.cuh"
#include "chunk.cuh"
#include "overlap.cuh"
#include <cuda_fp16.h>

extern "C" __global__ void __launch_bounds__(256) gate_rows(__half *mixed, const float *qkv, const Chunk *chunk) {
    allow_next();
    await_previous();
    const int token = blockIdx.x, at = blockIdx.y * 256 + threadIdx.x;
    if (token >= chunk->count || at >= HEADS * HEAD_DIM) return;
    const size_t row = (size_t)token * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM;
    const float gate = qkv[row + at / HEAD_DIM * 2 * HEAD_DIM + HEAD_DIM + at % HEAD_DIM];
    __half *to = mixed + (size_t)token * HEADS * HEAD_DIM + fragment_order(at);
    *to = __float2half_rn(__fdividef(__half2float(*to), 1 + __expf(-gate)));
}
