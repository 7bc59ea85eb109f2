// The stream with what the product before made, normed by itself, as a product reads it: x + y * f * post. For products
// of more CTAs than are worth joining it for themselves (join.cuh), those with the output matrix, or for two products.
//
// Macros: K (a multiple of 16), SS_PARTS (sums of squares of y), EPS, THREADS (a multiple of 32), OVERLAP
//   SCALED  1: the sum is multiplied by a number that stands behind post
//   OUT_Q   also store what a packed matrix after an RMS norm reads: the sum times the norm's weight as int8 with a
//           scale per 16, and the sum of squares of every 32 elements
// Grid: 1 block of THREADS. Arguments: x f32 (K), y f32 (K), ss f32 (SS_PARTS), post f32 (K), joined f32 (K),
//   [norm f32 (K), q s8 (K), s f32 (K / 16), out_ss f32 (ceil(K / 32))]
#include "overlap.cuh"

#ifndef OUT_Q
#define OUT_Q 0
#endif
#ifndef SCALED
#define SCALED 0
#endif
static_assert(K % 16 == 0, "16 elements share a scale");

extern "C" __global__ void __launch_bounds__(THREADS) join(
    const float *x, const float *y, const float *ss, const float *post, float *joined
#if OUT_Q
    , const float *norm, signed char *q, float *s, float *out_ss
#endif
) {
    allow_next();
    await_previous();
    float of_y = 0;
    for (int at = threadIdx.x & 31; at < SS_PARTS; at += 32) of_y += ss[at];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) of_y += __shfl_xor_sync(0xffffffff, of_y, offset);
    const float f = rsqrtf(of_y / K + EPS);
    for (int first = 0; first < K; first += THREADS) {
        const int at = first + threadIdx.x;
        const bool inside = at < K;
        float value = inside ? fmaf(y[at] * f, post[at], x[at]) : 0;
#if SCALED
        value *= post[K];
#endif
        if (inside) joined[at] = value;
#if OUT_Q
        const float normed = inside ? value * norm[at] : 0;
        float largest = fabsf(normed), squares = value * value;
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, offset));
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffff, squares, offset);
        if (!inside) continue;
        const float inverse = largest > 0 ? __fdividef(127.0f, largest) : 0;
        q[at] = (signed char)__float2int_rn(normed * inverse);
        if (at % 16 == 0) s[at / 16] = largest * (1.0f / 127.0f);
        if (at % 32 == 0) out_ss[at / 32] = squares;
#endif
    }
}
