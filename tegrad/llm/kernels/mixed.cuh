// Where what a mixer makes goes: float32 where OUTPUT_X, or halves in the order of fragments (async.cuh) where
// OUTPUT_H; and int8 with a scale for each 16 where OUTPUT_Q. A vector has SIZE elements.
#pragma once
#include "async.cuh"
#include <cuda_fp16.h>

struct Mixed {
    float *x;
    signed char *q;
    float *s;

    // Of a row, element `at`; all lanes of a warp take part, 16 neighbours of which have neighbouring elements.
    template <int SIZE> __device__ __forceinline__ void put(int row, int at, float value, bool inside) const {
        const size_t place = (size_t)row * SIZE + at;
#if OUTPUT_H
        if (inside) ((__half *)x)[(size_t)row * SIZE + fragment_order(at)] = __float2half_rn(value);
#elif OUTPUT_X
        if (inside) x[place] = value;
#endif
#if OUTPUT_Q
        float most = fabsf(value);
#pragma unroll
        for (int step = 8; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
        if (!inside) return;
        q[place] = (signed char)__float2int_rn(most > 0 ? value * (127 / most) : 0);
        if (at % 16 == 0) s[place / 16] = most / 127;
#endif
    }
};
