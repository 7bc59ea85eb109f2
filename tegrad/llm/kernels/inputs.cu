// Per-layer inputs: each layer's part of a product, normed by its root mean square, plus its part of the token's row of
// a table.
//
// SIZE (elements of a layer), LAYERS, MOST (tokens that `made` has room for), ROWS and FORMAT of the table, EPS,
// PRODUCT_SCALE, TABLE_SCALE, SCALE (of the sum); CHUNKED: 0 a token of each sequence, 1 those of a chunk; THREADS.
// Grid: (LAYERS, tokens). Block: THREADS, a multiple of 32.
//   made      float32 (LAYERS, MOST, SIZE)
//   products  float32 (tokens, LAYERS, SIZE)
//   norm      float32 (SIZE)
#include "blocks.cuh"
#include "block_sum.cuh"
#include "chunk.cuh"
#include "overlap.cuh"
#include "state.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) inputs(
    float *made, const float *products, const float *norm, const unsigned char *table,
#if CHUNKED
    const int *tokens, const Chunk *chunk
#else
    const State *states
#endif
) {
    allow_next();
    await_previous();
    const int layer = blockIdx.x, row = blockIdx.y;
#if CHUNKED
    if (row >= chunk->count) return;
    const int asked = tokens[chunk->at + row];
#else
    const int asked = states[row].token;
#endif
    // A slot that nobody owns holds anything: read a row that exists.
    const long long token = (unsigned)asked < ROWS ? asked : 0;
    const float *from = products + ((size_t)row * LAYERS + layer) * SIZE;
    float squares = 0;
    for (int at = threadIdx.x; at < SIZE; at += THREADS) {
        const float value = from[at] * PRODUCT_SCALE;
        squares += value * value;
    }
    const float factor = rsqrtf(block_sum(squares) / SIZE + EPS) * PRODUCT_SCALE;
    float *to = made + ((size_t)layer * MOST + row) * SIZE;
    for (int at = threadIdx.x; at < SIZE; at += THREADS) {
        const float own = weight_at<FORMAT>(table, (token * LAYERS + layer) * SIZE + at) * TABLE_SCALE;
        to[at] = fmaf(from[at] * factor, norm[at], own) * SCALE;
    }
}
