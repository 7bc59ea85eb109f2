// The input of a product where the stream still lacks what the product before made: x + y * f * post, where f norms y
// by its root mean square; all of that times post[K] where JOIN is 2. Every CTA joins all of it for itself, which takes
// no launch and no meeting of CTAs.
//
// Part of matvec.cu, whose macros and helpers it uses. SS_PARTS sums of squares of y come from whoever made it.
#pragma once

struct Joining {
    float4 x, y, post, norm;
    __device__ __forceinline__ void load(int quad, const float *x_in, const float *y_in, const float *post_in,
                                         const float *norm_in) {
        if (quad >= K / 4) return;
        x = ((const float4 *)x_in)[quad], y = ((const float4 *)y_in)[quad];
        post = ((const float4 *)post_in)[quad], norm = ((const float4 *)norm_in)[quad];
    }
};

// Four elements of a set of 16, which lies in four lanes side by side, at their place among the staged activations.
template <class F> __device__ __forceinline__ void stage_quad(int quad, float4 v) {
    float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
    const float inverse = largest > 0 ? __fdividef(127.0f, largest) : 0, s = largest * (1.0f / 127.0f);
    const int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse);
    const int c = __float2int_rn(v.z * inverse), d = __float2int_rn(v.w * inverse);
    int sum = a + b + c + d;
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    if (quad >= K / 4) return;
    const int set = quad / 4 % 4;
    unsigned char *at = staged + input_place(quad / 16, set), *beside = at - 508 * set;
    ((unsigned *)at)[quad % 4] = a & 255 | (b & 255) << 8 | (c & 255) << 16 | (unsigned)d << 24;
    if (quad % 4) return;
    *(float *)(beside + 2048) = s * F::factor(set);
    *(unsigned *)(beside + 2560) = F::fold(set, sum, s);
}

// Stages the joined stream times the norm's weight, in int8 or float32 as a format reads it, and stores the stream
// itself where `joined` is not null. Returns this thread's share of its sum of squares. Needs a barrier after it.
template <class F>
__device__ __forceinline__ float join(const float *x, const float *y, const float *ss, const float *post,
                                      const float *norm, float *joined) {
    float of_y = 0, squares = 0;
    for (int at = threadIdx.x & 31; at < SS_PARTS; at += 32) of_y += ss[at];
    Joining held = {};
    held.load(threadIdx.x, x, y, post, norm);
#if JOIN == 2
    const float by = post[K];
#endif
    const float f = rsqrtf(warp_sum(of_y) / K + EPS);
#pragma unroll 1
    for (int first = 0; first < K / 4; first += THREADS) {
        const int quad = first + threadIdx.x;
        Joining next = {};
        next.load(quad + THREADS, x, y, post, norm);
        float4 v = make_float4(fmaf(held.y.x * f, held.post.x, held.x.x), fmaf(held.y.y * f, held.post.y, held.x.y),
                               fmaf(held.y.z * f, held.post.z, held.x.z), fmaf(held.y.w * f, held.post.w, held.x.w));
#if JOIN == 2
        v = make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
#endif
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        if (joined && quad < K / 4) ((float4 *)joined)[quad] = v;
        v = make_float4(v.x * held.norm.x, v.y * held.norm.y, v.z * held.norm.z, v.w * held.norm.w);
        if constexpr (F::PACKED) {
            stage_quad<F>(quad, v);
        } else {
            typedef Items<F> I;
            constexpr int USED = I::LENGTH / 4;
            if (quad < K / 4) ((float4 *)staged)[quad / USED * I::QUADS + F::place(quad % USED)] = v;
        }
        held = next;
    }
    if constexpr (!F::PACKED) {  // what is staged beyond a piece's end
        typedef Items<F> I;
        constexpr int USED = I::LENGTH / 4, BEYOND = I::QUADS - USED;
        if constexpr (BEYOND)
            for (int at = threadIdx.x; at < I::PIECES * BEYOND; at += THREADS)
                ((float4 *)staged)[at / BEYOND * I::QUADS + F::place(USED + at % BEYOND)] = make_float4(0, 0, 0, 0);
    }
    return squares;
}
