// x[token] = a chunk's tokens' rows of the packed embedding, and of the learned positions where a model has them.
//
// FORMAT, ROWS, COLUMNS of the embedding; SCALE: what a row is multiplied by, 1 unless said; POSITIONS: rows of the
// second matrix, in POSITIONS_FORMAT, or 0.
// Grid: (COLUMNS / 256 rounded up, tokens). Block: 256 threads, one for each element.
#include "chunk.cuh"
#include "overlap.cuh"
#include "blocks.cuh"

extern "C" __global__ void __launch_bounds__(256) embed_rows(
    float *x, const unsigned char *matrix, const unsigned char *positions, const int *tokens, const Chunk *chunk
) {
    allow_next();
    await_previous();
    const int row = blockIdx.y, at = blockIdx.x * 256 + threadIdx.x;
    if (row >= chunk->count || at >= COLUMNS) return;
    const long long token = min(max(tokens[chunk->at + row], 0), ROWS - 1);
    float value = weight_at<FORMAT>(matrix, token * COLUMNS + at);
#ifdef SCALE
    value *= SCALE;
#endif
#if POSITIONS
    value += weight_at<POSITIONS_FORMAT>(positions, (long long)min(chunk->start + row, POSITIONS - 1) * COLUMNS + at);
#endif
    x[(size_t)row * COLUMNS + at] = value;
}
