// y[token] = norm(x[token]) as halves in the order of fragments (async.cuh), for a chunk of tokens, or for its last one
// alone. Where x is no number any more, the chunk says so: a value before did not fit a half, which is infinite then.
//
// Where JOIN, x first gets what the product before made, y, normed by its own root mean square: x += norm(y), post
// being that norm's weight; where JOIN is 2, the sum is multiplied by post[COLUMNS].
//
// COLUMNS; NORM: 0 as it is; 1 by the root mean square; 2 by mean and variance, with a bias; EPS; LAST: 1 takes the
// chunk's last token to row 0; THREADS. Grid: tokens (1 where LAST). Block: THREADS, a multiple of 32.
#include "async.cuh"
#include "block_sum.cuh"
#include "chunk.cuh"
#include "overlap.cuh"
#include <cuda_fp16.h>

#ifndef JOIN
#define JOIN 0
#endif
#if JOIN
#define JOINED
#else
#define JOINED const
#endif

extern "C" __global__ void __launch_bounds__(THREADS) norm_rows(
    __half *y, JOINED float *x, const float *weight, const float *bias, Chunk *chunk
#if JOIN
    , const float *added, const float *post
#endif
) {
    constexpr int HELD = (COLUMNS / 4 + THREADS - 1) / THREADS;
    static_assert(COLUMNS % 16 == 0, "halves are ordered within 16");
    allow_next();
    await_previous();
    // Everything that is read is asked for at once: x has a row for every block.
    const int count = chunk->count, token = LAST ? count - 1 : blockIdx.x;
    if (LAST && token < 0) return;
    const float4 *row = reinterpret_cast<const float4 *>(x + (size_t)token * COLUMNS);
    const float4 *weights = reinterpret_cast<const float4 *>(weight), *biases = reinterpret_cast<const float4 *>(bias);
    const float4 none = make_float4(0, 0, 0, 0), one = make_float4(1, 1, 1, 1);
    float4 held[HELD], w[HELD], b[HELD];
    float sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int at = threadIdx.x + i * THREADS;
        const bool inside = at < COLUMNS / 4;
        held[i] = inside ? row[at] : none;
        w[i] = !NORM ? one : inside ? weights[at] : none;
        b[i] = NORM == 2 && inside ? biases[at] : none;
    }
    if (token >= count) return;
#if JOIN
    const float4 *extra = reinterpret_cast<const float4 *>(added + (size_t)token * COLUMNS);
    const float4 *posts = reinterpret_cast<const float4 *>(post);
    float4 more[HELD];
    float size = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int at = threadIdx.x + i * THREADS;
        more[i] = at < COLUMNS / 4 ? extra[at] : none;
        size += more[i].x * more[i].x + more[i].y * more[i].y + more[i].z * more[i].z + more[i].w * more[i].w;
    }
    const float f = rsqrtf(block_sum(size) / COLUMNS + EPS);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at >= COLUMNS / 4) continue;
        const float4 p = posts[at];
        held[i].x = fmaf(more[i].x * f, p.x, held[i].x), held[i].y = fmaf(more[i].y * f, p.y, held[i].y);
        held[i].z = fmaf(more[i].z * f, p.z, held[i].z), held[i].w = fmaf(more[i].w * f, p.w, held[i].w);
#if JOIN == 2
        held[i].x *= post[COLUMNS], held[i].y *= post[COLUMNS], held[i].z *= post[COLUMNS], held[i].w *= post[COLUMNS];
#endif
        if (!LAST) reinterpret_cast<float4 *>(x + (size_t)token * COLUMNS)[at] = held[i];
    }
#endif
#pragma unroll
    for (int i = 0; i < HELD; i++) sum += held[i].x + held[i].y + held[i].z + held[i].w;
    const float mean = NORM == 2 ? block_sum(sum) / COLUMNS : 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        if (threadIdx.x + i * THREADS >= COLUMNS / 4) continue;
        held[i].x -= mean, held[i].y -= mean, held[i].z -= mean, held[i].w -= mean;
        squares += held[i].x * held[i].x + held[i].y * held[i].y + held[i].z * held[i].z + held[i].w * held[i].w;
    }
    squares = block_sum(squares);
    if (threadIdx.x == 0 && !(squares <= 3.402823466e38f)) chunk->lost = 1;
    const float factor = NORM ? rsqrtf(squares / COLUMNS + EPS) : 1;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at >= COLUMNS / 4) continue;
        __half2 low = __floats2half2_rn(held[i].x * factor * w[i].x + b[i].x, held[i].y * factor * w[i].y + b[i].y);
        __half2 high = __floats2half2_rn(held[i].z * factor * w[i].z + b[i].z, held[i].w * factor * w[i].w + b[i].w);
        __half *to = y + (size_t)(LAST ? 0 : token) * COLUMNS;
        *reinterpret_cast<__half2 *>(to + fragment_order(4 * at)) = low;
        *reinterpret_cast<__half2 *>(to + fragment_order(4 * at + 2)) = high;
    }
}
