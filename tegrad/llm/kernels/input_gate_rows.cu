// activation(products) of a chunk's tokens, times the layer's input of them, where the products are of the stream over
// its root mean square: halves hold that, but not every stream.
//
// SIZE, COLUMNS of the stream, ACTIVATION, EPS; THREADS. Grid: tokens. Block: THREADS, a multiple of 32.
//   out       halves (tokens, SIZE) in the order of fragments
//   products  float32 (tokens, SIZE); inputs the same; x float32 (tokens, COLUMNS): the stream
#include "activation.cuh"
#include "async.cuh"
#include "block_sum.cuh"
#include "chunk.cuh"
#include "overlap.cuh"
#include <cuda_fp16.h>

extern "C" __global__ void __launch_bounds__(THREADS) input_gate_rows(
    __half *out, const float *products, const float *inputs, const float *x, const int *count
) {
    static_assert(COLUMNS % 4 == 0 && SIZE % 16 == 0, "halves are ordered within 16");
    allow_next();
    await_previous();
    const size_t token = blockIdx.x;
    if (token >= *count) return;
    const float4 *row = reinterpret_cast<const float4 *>(x + token * COLUMNS);
    float squares = 0;
    for (int at = threadIdx.x; at < COLUMNS / 4; at += THREADS) {
        const float4 v = row[at];
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float root = sqrtf(block_sum(squares) / COLUMNS + EPS);
    for (int at = threadIdx.x; at < SIZE; at += THREADS) {
        const float value = activate(products[token * SIZE + at] * root) * inputs[token * SIZE + at];
        out[token * SIZE + fragment_order(at)] = __float2half_rn(value);
    }
}
