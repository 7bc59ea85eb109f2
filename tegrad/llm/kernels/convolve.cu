// A short convolution of each row: y = second * (the sum of kernel[tap] times first * third, of it and earlier tokens).
// Rows are new tokens: one of each sequence, or a chunk's, which read each other.
//
// DIM; TAPS; ROWS: of the ring, in which position p lies in row p % ROWS; CHUNK: 1 of a chunk's tokens, 0 of sequences;
// OUTPUT_X, OUTPUT_H, OUTPUT_Q: what of y is written; OVERLAP. Grid: (DIM / 256 rounded up, rows). Block: 256 threads,
// one for each element. CTAs of rows beyond a chunk's, and of sequences that are not active, leave at once.
//   from      states of the sequences, or the chunk
//   products  float32 (rows, 3, DIM)
//   kernel    float32 (DIM, TAPS): the last column is of the token itself
//   kept      float32 (sequences, ROWS, DIM): first * third
//   x         float32 (rows, DIM), written where OUTPUT_X; or halves in the order of fragments, where OUTPUT_H
//   q, s      the same as int8 with a float32 scale for each 16, written where OUTPUT_Q
#include "chunk.cuh"
#include "mixed.cuh"
#include "overlap.cuh"
#include "state.cuh"

static_assert(DIM % 16 == 0, "16 elements share a scale");

extern "C" __global__ void __launch_bounds__(256) convolve(
#if CHUNK
    const Chunk *from,
#else
    const State *from,
#endif
    const float *products, const float *kernel, float *kept, float *x, signed char *q, float *s
) {
    allow_next();
    const int row = blockIdx.y, at = blockIdx.x * 256 + threadIdx.x;
    const bool inside = at < DIM;
    float column[TAPS];
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) column[tap] = inside ? kernel[(size_t)at * TAPS + tap] : 0;
#if CHUNK
    await_previous();  // the chunk is told by a launch of its own
    if (row >= from->count) return;
    const int position = from->start + row, sequence = from->slot, fresh = row;
#else
    if (!from[row].active) return;  // of no launch of this step, as are earlier positions
    const int position = from[row].position, sequence = row, fresh = 0;
#endif
    float *ring = kept + (size_t)sequence * ROWS * DIM + at;
    float before[TAPS];
#pragma unroll
    for (int back = 1; back < TAPS; back++)
        before[back] = inside && back > fresh && back <= position ? ring[(size_t)((position - back) % ROWS) * DIM] : 0;
#if !CHUNK
    await_previous();
#endif
    float value = 0;
    if (inside) {
        const float *own = products + (size_t)row * 3 * DIM + at;
        const float gated = own[0] * own[2 * DIM];
        float sum = gated * column[TAPS - 1];
#pragma unroll
        for (int back = 1; back < TAPS; back++) {
            const float *earlier = own - (size_t)back * 3 * DIM;
            sum += column[TAPS - 1 - back] * (back <= fresh ? earlier[0] * earlier[2 * DIM] : before[back]);
        }
        ring[(size_t)(position % ROWS) * DIM] = gated;
        value = own[DIM] * sum;
    }
    const Mixed out = {x, q, s};
    out.put<DIM>(row, at, value, inside);
}
