// A gated delta net (arXiv:2412.06464), as network.Delta has it: what its kernels for steps and for prompts share.
//
// DELTA_HEADS, of values; DELTA_KEYS, of queries and keys: head h takes those of head h % DELTA_KEYS; DELTA_WIDTH of
// each, a multiple of 32; DELTA_TAPS; DELTA_ROWS of the ring of what is convolved, in which position p lies in row
// p % DELTA_ROWS; DELTA_EPS.
//   products  float32 (rows, PRODUCTS): queries, keys and values, gates, and of each head what beta and decay are of
//   kept      float32 (sequences, DELTA_ROWS, CHANNELS): of those the first three, of earlier tokens
//   states    float32 (sequences, 2, DELTA_HEADS, DELTA_WIDTH of values, DELTA_WIDTH of keys): before positions that
//             are even, and odd. A step reads one and writes the other, so that it may be taken again.
#pragma once

namespace deltas {

constexpr int CHANNELS = (2 * DELTA_KEYS + DELTA_HEADS) * DELTA_WIDTH, INNER = DELTA_HEADS * DELTA_WIDTH;
constexpr int PRODUCTS = CHANNELS + INNER + 2 * DELTA_HEADS, QUADS = DELTA_WIDTH / 16;
static_assert(DELTA_WIDTH % 32 == 0 && DELTA_WIDTH <= 256, "four lanes have a column, and a block a head");

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1 + __expf(-v)); }
__device__ __forceinline__ float sigmoid(float v) { return __fdividef(1, 1 + __expf(-v)); }

// What the state is multiplied by.
__device__ __forceinline__ float decayed(float own, float bias, float decay) {
    const float x = own + bias;
    return expf(decay * (x > 20 ? x : log1pf(expf(x))));
}

// Where a sequence's state before a position begins.
__device__ __forceinline__ size_t state_before(int sequence, int position) {
    return ((size_t)sequence * 2 + (position & 1)) * DELTA_HEADS * DELTA_WIDTH * DELTA_WIDTH;
}

__device__ __forceinline__ float warp_total(float v) {
#pragma unroll
    for (int step = 16; step; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

// The sum over DELTA_WIDTH neighbouring threads; `room` has a float for each warp of the block.
__device__ __forceinline__ float head_total(float v, float *room) {
    v = warp_total(v);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < DELTA_WIDTH / 32; warp++)
        sum += room[threadIdx.x / DELTA_WIDTH * (DELTA_WIDTH / 32) + warp];
    __syncthreads();
    return sum;
}

// A quarter of a column of a head's state: in each of four lanes `part` four of 16 elements in turn.
struct Column {
    float4 s[QUADS];

    __device__ __forceinline__ void load(const float *column, int part, bool there) {
#pragma unroll
        for (int i = 0; i < QUADS; i++)
            s[i] = there ? ((const float4 *)column)[4 * i + part] : make_float4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void store(float *column, int part) const {
#pragma unroll
        for (int i = 0; i < QUADS; i++) ((float4 *)column)[4 * i + part] = s[i];
    }
    // What comes of the column after a token, in each of its four lanes. `key` and `query` give this lane's four
    // elements at a time, to be multiplied by `key_by` and `query_by`.
    template <typename Key, typename Query>
    __device__ __forceinline__ float step(Key key, Query query, float value, float decay, float beta, float key_by = 1,
                                          float query_by = 1) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float4 k = key(i);
            s[i].x *= decay, s[i].y *= decay, s[i].z *= decay, s[i].w *= decay;
            sum += s[i].x * k.x + s[i].y * k.y + s[i].z * k.z + s[i].w * k.w;
        }
        const float delta = (value - quarters(sum) * key_by) * beta * key_by;
        sum = 0;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float4 k = key(i), q = query(i);
            s[i].x = fmaf(k.x, delta, s[i].x), s[i].y = fmaf(k.y, delta, s[i].y);
            s[i].z = fmaf(k.z, delta, s[i].z), s[i].w = fmaf(k.w, delta, s[i].w);
            sum += s[i].x * q.x + s[i].y * q.y + s[i].z * q.z + s[i].w * q.w;
        }
        return quarters(sum) * query_by;
    }
    __device__ __forceinline__ static float quarters(float v) {
        v += __shfl_xor_sync(0xffffffffu, v, 1);
        return v + __shfl_xor_sync(0xffffffffu, v, 2);
    }
};

}  // namespace deltas
