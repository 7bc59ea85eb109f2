// A gated delta net (arXiv:2412.06464), as network.Delta has it: what its kernels for steps and for prompts share.
//
// DELTA_HEADS, of values; DELTA_KEYS, of queries and keys: head h takes those of head h % DELTA_KEYS; DELTA_WIDTH of
// each, a multiple of 32; DELTA_TAPS; DELTA_ROWS of the ring of what is convolved, in which position p lies in row
// p % DELTA_ROWS; DELTA_EPS.
//   products  float32 (rows, PRODUCTS): queries, keys and values, gates, and of each head what beta and decay are of
//   kept      float32 (sequences, DELTA_ROWS, CHANNELS): of those the first three, of earlier tokens
//   states    float32 (sequences, 2, DELTA_HEADS, DELTA_WIDTH of keys, DELTA_WIDTH of values): before positions that
//             are even, and odd. A step reads one and writes the other, so that it may be taken again.
#pragma once

namespace deltas {

constexpr int CHANNELS = (2 * DELTA_KEYS + DELTA_HEADS) * DELTA_WIDTH, INNER = DELTA_HEADS * DELTA_WIDTH;
constexpr int PRODUCTS = CHANNELS + INNER + 2 * DELTA_HEADS;
static_assert(DELTA_WIDTH % 32 == 0 && DELTA_WIDTH <= 128, "rows of whole warps, and a block a head");

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

// A head's state in so many threads: each has four neighbouring columns, of values, of EACH rows, of keys.
//
// With S' = decay * S + k * delta, what a token makes of a column is S' * q = decay * (S * q) + delta * (k * q): all
// sums are of the state before it, and what is written comes after what others wait for.
template <int THREADS> struct HeadState {
    static constexpr int UNITS = DELTA_WIDTH / 4, GROUPS = THREADS / UNITS;
    static constexpr int EACH = (DELTA_WIDTH + GROUPS - 1) / GROUPS;
    static constexpr bool EVEN = GROUPS * UNITS == THREADS && GROUPS * EACH == DELTA_WIDTH;
    // Each group's sums, over its rows, of columns by a key and by a query, and of these two.
    struct Sums {
        alignas(16) float by[2][GROUPS][DELTA_WIDTH];
        float both[GROUPS];
    };
    float4 s[EACH];
    int group, unit;

    __device__ __forceinline__ HeadState(const float *state, bool there, int thread)
        : group(thread / UNITS), unit(thread % UNITS) {
        const float4 *from = (const float4 *)state + row(0) * UNITS + unit;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            s[i] = make_float4(0, 0, 0, 0);
            // A choice between what is loaded and zeros would wait for it here.
            asm volatile("{\n"
                         ".reg .pred p;\n"
                         "setp.ne.s32 p, %4, 0;\n"
                         "@p ld.global.v4.f32 {%0, %1, %2, %3}, [%5];\n"
                         "}"
                         : "+f"(s[i].x), "+f"(s[i].y), "+f"(s[i].z), "+f"(s[i].w)
                         : "r"((int)(there && has(i))), "l"(from + i * UNITS));
        }
    }
    __device__ __forceinline__ int row(int i) const { return group * EACH + i; }
    __device__ __forceinline__ bool has(int i) const { return EVEN || row(i) < DELTA_WIDTH; }

    __device__ __forceinline__ void multiply(const float *key, const float *query, Sums &sums) const {
        float4 a = make_float4(0, 0, 0, 0), b = a;
        float both = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float k = has(i) ? key[row(i)] : 0, q = has(i) ? query[row(i)] : 0;
            a.x = fmaf(s[i].x, k, a.x), a.y = fmaf(s[i].y, k, a.y);
            a.z = fmaf(s[i].z, k, a.z), a.w = fmaf(s[i].w, k, a.w);
            b.x = fmaf(s[i].x, q, b.x), b.y = fmaf(s[i].y, q, b.y);
            b.z = fmaf(s[i].z, q, b.z), b.w = fmaf(s[i].w, q, b.w);
            both = fmaf(k, q, both);
        }
        if (!EVEN && group >= GROUPS) return;
        ((float4 *)sums.by[0][group])[unit] = a, ((float4 *)sums.by[1][group])[unit] = b;
        if (unit == 0) sums.both[group] = both;
    }
    // What is added of a key, in proportion, to a column, and what comes of that; keys and queries are to be multiplied
    // by `key_by` and `query_by`.
    __device__ __forceinline__ static float2 column(const Sums &sums, int at, float value, float decay, float beta,
                                                    float key_by, float query_by) {
        float by_key = 0, by_query = 0, both = 0;
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
            by_key += sums.by[0][i][at], by_query += sums.by[1][i][at], both += sums.both[i];
        const float delta = (value - decay * by_key * key_by) * beta * key_by;
        return make_float2(delta, fmaf(delta, both, decay * by_query) * query_by);
    }
    // After a token; `deltas` of this thread's columns.
    __device__ __forceinline__ void store(float *state, float decay, const float *key, float4 deltas) const {
        float4 *to = (float4 *)state + row(0) * UNITS + unit;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (!has(i)) continue;
            const float k = key[row(i)];
            to[i * UNITS] = make_float4(fmaf(k, deltas.x, s[i].x * decay), fmaf(k, deltas.y, s[i].y * decay),
                                        fmaf(k, deltas.z, s[i].z * decay), fmaf(k, deltas.w, s[i].w * decay));
        }
    }
};

}  // namespace deltas
