// The stream normed by its mean and variance, as the matrices that read it want it: y = (x - mean) / deviation * weight
// + bias. Packed matrices cannot do without this launch: the mean is known only after all of x.
//
// Macros: K (a multiple of 16), EPS, THREADS (a multiple of 32), OUT_X (1: y as floats), OVERLAP
// Grid: 1 block of THREADS. Arguments: x f32 (K), weight f32 (K), bias f32 (K), q s8 (K), s f32 (K / 16: a scale per
//   16), [y f32 (K)]
#include "block_sum.cuh"
#include "overlap.cuh"

static_assert(K % 16 == 0, "16 elements share a scale");

extern "C" __global__ void __launch_bounds__(THREADS) layer_norm(
    const float *x, const float *weight, const float *bias, signed char *q, float *s
#if OUT_X
    , float *y
#endif
) {
    constexpr int HELD = (K + THREADS - 1) / THREADS;
    allow_next();
    await_previous();
    float held[HELD], sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int at = threadIdx.x + i * THREADS;
        held[i] = at < K ? x[at] : 0;
        sum += held[i];
    }
    const float mean = block_sum(sum) / K;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        held[i] = threadIdx.x + i * THREADS < K ? held[i] - mean : 0;
        squares += held[i] * held[i];
    }
    const float factor = rsqrtf(block_sum(squares) / K + EPS);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int at = threadIdx.x + i * THREADS;
        const bool inside = at < K;
        const float normed = inside ? held[i] * factor * weight[at] + bias[at] : 0;
        float largest = fabsf(normed);
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
        if (!inside) continue;
        const float inverse = largest > 0 ? __fdividef(127.0f, largest) : 0;
        q[at] = (signed char)__float2int_rn(normed * inverse);
        if (at % 16 == 0) s[at / 16] = largest * (1.0f / 127.0f);
#if OUT_X
        y[at] = normed;
#endif
    }
}
