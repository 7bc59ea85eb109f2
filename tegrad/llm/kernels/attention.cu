// Attention of one new token of each sequence, from the product with q, k and v to the input of the output matrix.
//
// Grid (SPLITS, KV_HEADS, sequences), 32 * ATTENTION_WARPS threads: CTAs beyond the splits that the position asks for
// leave at once, as do those of sequences that are not active. attention.cuh tells the work of a CTA and the macros.
// KV_HEADS are groups of query heads, of which each of the KEY_HEADS KV heads has some.
//   qkv        float32 (sequences, HEADS + MADE * KV heads, HEAD_DIM): queries, then keys, then values; where GATED
//              behind each head's query its gates
//   *_norm     float32 (HEAD_DIM), read where QK_NORM; of all queries, and of all keys, where it is 2
//   rope       float32 (2, ROPE_POSITIONS, ROPE_PAIRS): cosines, sines; read where ROPE
//   k, v       the layer's cache (sequences, KV heads, POSITIONS, HEAD_DIM), f16 or int8; a ring where WINDOW
//   *_scale    f16 (sequences, KV heads, POSITIONS, HEAD_DIM / 32), read and written where CACHE_Q8
//   table      int32 (sequences, TABLE_BLOCKS), only where BLOCK_POSITIONS: each one's blocks of pools k and v (blocks,
//              KV heads, BLOCK_POSITIONS, HEAD_DIM) and of scales
//   workspace  float32 (sequences, KV_HEADS, SPLITS, SPLIT_FLOATS); counters: uint32 (sequences, KV_HEADS), zeros
//   x          float32 (sequences, HEADS, HEAD_DIM), written where OUTPUT_X; or halves in the order of fragments
//              (async.cuh), where OUTPUT_H
//   q, s       the same as int8 with a float32 scale for each 16, written where OUTPUT_Q
#include "overlap.cuh"
#include "state.cuh"
#if OUTPUT_H
#include "async.cuh"
#define OUTPUT_ORDER fragment_order
#endif
#include "attention.cuh"

#if GATED  // a head's query and its gates
#define PRODUCED (2 * HEADS)
#define GROUP_PITCH (2 * OUTPUTS)
#else
#define PRODUCED HEADS
#define GROUP_PITCH OUTPUTS
#endif
#ifndef ROPE_POSITIONS
#define ROPE_POSITIONS POSITIONS
#endif

extern "C" __global__ void __launch_bounds__(attend::THREADS)
attention(const State *states, const float *qkv, const float *q_norm, const float *k_norm, const float *rope, void *k,
          void *v, __half *k_scale, __half *v_scale, float *workspace, unsigned *counters, float *x, signed char *q,
          float *s
#if BLOCK_POSITIONS
          , const int *table
#endif
) {
    using namespace attend;
    // State, table, rope and earlier positions are of no launch of this step: all but q, k, v is read before the wait.
    allow_next();
    __shared__ Shared shared;
    const int head = blockIdx.y, sequence = blockIdx.z, index = sequence * KV_HEADS + head;
    const State &state = states[sequence];
    const int position = state.position;
    if (!state.active) return;
    const int cached = head / (KV_HEADS / KEY_HEADS), row = sequence * KEY_HEADS + cached;
    const float *mine = qkv + (size_t)sequence * (PRODUCED + MADE * KEY_HEADS) * HEAD_DIM;
    const size_t output = (size_t)index * OUTPUTS;
    const Output out = {
        OUTPUT_X ? x + output : nullptr, OUTPUT_Q ? q + output : nullptr, OUTPUT_Q ? s + output / 16 : nullptr,
        OUTPUT_H ? (__half *)x + output : nullptr,
#if GATED
        mine + head * GROUP_PITCH + HEAD_DIM,
#endif
    };
#if BLOCK_POSITIONS
    const Side keys = side(k, k_scale, sequence, cached, table), values = side(v, v_scale, sequence, cached, table);
#else
    const Side keys = side(k, k_scale, row, position), values = side(v, v_scale, row, position);
#endif
    split(shared, keys, values, blockIdx.x, position,
          mine + head * GROUP_PITCH, mine + (PRODUCED + cached) * HEAD_DIM,
          mine + (PRODUCED + (MADE == 2) * KEY_HEADS + cached) * HEAD_DIM,
          q_norm + (QK_NORM == 2 ? head * OUTPUTS : 0), k_norm + (QK_NORM == 2 ? cached * HEAD_DIM : 0),
          rope + (size_t)position * ROPE_PAIRS, (size_t)ROPE_POSITIONS * ROPE_PAIRS,
          workspace + (size_t)index * SPLITS * SPLIT_FLOATS, counters + index, out, threadIdx.x,
          [&] {
              await_previous();
#if QK_NORM == 2
              sum_squares(shared.squares, mine, mine + HEADS * HEAD_DIM, threadIdx.x);
              __syncthreads();
#endif
          });
}
