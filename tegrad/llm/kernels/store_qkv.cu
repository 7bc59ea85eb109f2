// A chunk's queries normed, rotated and as halves; its keys, normed and rotated, and its values in the cache.
//
// One warp a head of a token. Macros: those of attention.cuh, and WARPS of a block.
// Grid: (tokens, (HEADS + 2 KV_HEADS, or HEADS where MADE is 0) / WARPS), rounded up. Block: WARPS warps.
#define ATTENTION_WARPS WARPS
#define SPLITS 1
#define ATTENTION_LOADS 1
#include "attention.cuh"
#include "chunk.cuh"
#include "overlap.cuh"

// qkv: floats (tokens, HEADS + MADE * KV_HEADS, HEAD_DIM), where GATED with each head's gates behind its query;
// q: halves (tokens, HEADS, HEAD_DIM); keys, values and their scales: one layer's cache (slot, KV head, position,
// HEAD_DIM), or a pool of blocks (attention.cu) whose table of all slots follows; rope: cosines and sines
// (2, rope_positions, ROPE_PAIRS).
extern "C" __global__ void store_qkv(
    __half *q, void *keys, void *values, __half *key_scales, __half *value_scales, const float *qkv,
    const float *q_norm, const float *k_norm, const float *rope, const Chunk *chunk,
#if BLOCK_POSITIONS
    const int *table,
#endif
    int rope_positions
) {
    __shared__ float rows[WARPS][HEAD_DIM];
    allow_next();
    await_previous();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.x, head = blockIdx.y * WARPS + warp;
#if QK_NORM == 2
    __shared__ float squares[2][WARPS];
    if (token >= chunk->count) return;
    const float *all = qkv + (size_t)token * (HEADS + MADE * KV_HEADS) * HEAD_DIM;
    attend::sum_squares(squares, all, all + HEADS * HEAD_DIM, threadIdx.x);
    __syncthreads();
#endif
    if (token >= chunk->count || head >= HEADS + (MADE ? 2 : 0) * KV_HEADS) return;
    const int position = chunk->start + token;
#if GATED
    const int before = head < HEADS ? 2 * head : head + HEADS;
    const float *in = qkv + ((size_t)token * (2 * HEADS + MADE * KV_HEADS) + before) * HEAD_DIM;
#else
    const int before = MADE == 1 && head >= HEADS + KV_HEADS ? head - KV_HEADS : head;
    const float *in = qkv + ((size_t)token * (HEADS + MADE * KV_HEADS) + before) * HEAD_DIM;
#endif
    float *row = rows[warp];
    if (head < HEADS + KV_HEADS) {
        const float *turn = rope + (size_t)position * ROPE_PAIRS;
        const float *norm = head < HEADS ? q_norm : k_norm;
        float factor = 1;
#if QK_NORM == 2
        norm += (head < HEADS ? head : head - HEADS) * HEAD_DIM;
        factor = attend::whole(squares[head >= HEADS], (head < HEADS ? HEADS : KV_HEADS) * HEAD_DIM);
#endif
#ifdef TEMPERATURE
        if (head < HEADS) factor *= attend::temperature(position);
#endif
        attend::HeadNorm held;
        held.load(norm, lane);
        attend::turn_head(in, held, turn, (size_t)rope_positions * ROPE_PAIRS, factor, row, lane);
    } else {
        attend::copy_value(in, row, lane);
    }
    if (head < HEADS) {
        __half *to = q + ((size_t)token * HEADS + head) * HEAD_DIM;
        for (int i = lane; i < HEAD_DIM / 2; i += 32)
            reinterpret_cast<__half2 *>(to)[i] = __floats2half2_rn(row[2 * i], row[2 * i + 1]);
        return;
    }
    const bool value = head >= HEADS + KV_HEADS;
    void *side = value ? values : keys;
    __half *scales = value ? value_scales : key_scales;
#if BLOCK_POSITIONS
    const attend::Side to = attend::side(side, scales, chunk->slot, (head - HEADS) % KV_HEADS, table);
#else
    const attend::Side to = attend::side(side, scales, chunk->slot * KV_HEADS + (head - HEADS) % KV_HEADS);
#endif
    attend::store_row(row, to, position, lane);
}
