// A gated delta net for a chunk of a prompt, in three launches (STAGE):
//
//   0: tokens' queries, keys and values, convolved, through SiLU and of length 1; and decay and beta.
//      Grid (tokens, 2 * DELTA_KEYS + DELTA_HEADS), DELTA_WIDTH threads
//   1: what comes of the state, token by token, in the place of the values; then the state, and the ring.
//      Grid (DELTA_HEADS, DELTA_WIDTH / 32), 128 threads: 32 columns of a head
//   2: that, normed and gated, as halves. Grid (tokens, DELTA_HEADS), DELTA_WIDTH threads
//
// Macros: those of delta.cuh and mixed.cuh, OVERLAP.
//   made   float32 (tokens, CHANNELS + 2 * DELTA_HEADS): what stage 0 makes
//   others as in delta.cu
#include "chunk.cuh"
#include "delta.cuh"
#include "mixed.cuh"
#include "overlap.cuh"

using namespace deltas;

constexpr int MADE = CHANNELS + 2 * DELTA_HEADS, QUADS = DELTA_WIDTH / 16;

// A quarter of a column of a head's state: in each of four lanes `part` four of 16 elements in turn.
struct Column {
    float4 s[QUADS];

    __device__ __forceinline__ void load(const float *column, int part, bool there) {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float *at = column + (16 * i + 4 * part) * DELTA_WIDTH;
            s[i] = there ? make_float4(at[0], at[DELTA_WIDTH], at[2 * DELTA_WIDTH], at[3 * DELTA_WIDTH])
                         : make_float4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ void store(float *column, int part) const {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            float *at = column + (16 * i + 4 * part) * DELTA_WIDTH;
            at[0] = s[i].x, at[DELTA_WIDTH] = s[i].y, at[2 * DELTA_WIDTH] = s[i].z, at[3 * DELTA_WIDTH] = s[i].w;
        }
    }
    // What comes of the column after a token, in each of its four lanes, of this lane's elements of a key and a query.
    __device__ __forceinline__ float step(const float4 *key, const float4 *query, float value, float decay,
                                          float beta) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float4 k = key[i];
            s[i].x *= decay, s[i].y *= decay, s[i].z *= decay, s[i].w *= decay;
            sum += s[i].x * k.x + s[i].y * k.y + s[i].z * k.z + s[i].w * k.w;
        }
        const float delta = (value - quarters(sum)) * beta;
        sum = 0;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float4 k = key[i], q = query[i];
            s[i].x = fmaf(k.x, delta, s[i].x), s[i].y = fmaf(k.y, delta, s[i].y);
            s[i].z = fmaf(k.z, delta, s[i].z), s[i].w = fmaf(k.w, delta, s[i].w);
            sum += s[i].x * q.x + s[i].y * q.y + s[i].z * q.z + s[i].w * q.w;
        }
        return quarters(sum);
    }
    __device__ __forceinline__ static float quarters(float v) {
        v += __shfl_xor_sync(0xffffffffu, v, 1);
        return v + __shfl_xor_sync(0xffffffffu, v, 2);
    }
};

extern "C" __global__ void __launch_bounds__(STAGE == 1 ? 128 : DELTA_WIDTH) delta_rows(
    const Chunk *chunk, const float *products, const float *kernel, const float *bias, const float *decay,
    const float *norm, float *kept, float *states, float *made, float *x
) {
    __shared__ float room[DELTA_WIDTH / 32];
    allow_next();
    await_previous();
    const int count = chunk->count, start = chunk->start, thread = threadIdx.x;
    float *ring = kept + (size_t)chunk->slot * DELTA_ROWS * CHANNELS;
#if STAGE == 0
    const int token = blockIdx.x, unit = blockIdx.y, channel = unit * DELTA_WIDTH + thread;
    if (token >= count) return;
    float value = 0;
#pragma unroll
    for (int back = 0; back < DELTA_TAPS; back++) {
        const int position = start + token - back;
        const float there = back <= token ? products[(size_t)(token - back) * PRODUCTS + channel]
                          : position >= 0 ? ring[(size_t)(position % DELTA_ROWS) * CHANNELS + channel] : 0;
        value = fmaf(there, kernel[(size_t)channel * DELTA_TAPS + DELTA_TAPS - 1 - back], value);
    }
    value = silu(value);
    float *to = made + (size_t)token * MADE;
    if (unit < 2 * DELTA_KEYS) {  // of all threads
        value *= rsqrtf(head_total(value * value, room) + DELTA_EPS);
        if (unit < DELTA_KEYS) value *= rsqrtf((float)DELTA_WIDTH);
    } else if (thread == 0) {
        const int head = unit - 2 * DELTA_KEYS;
        const float *ends = products + (size_t)token * PRODUCTS + CHANNELS + INNER;
        to[CHANNELS + head] = decayed(ends[DELTA_HEADS + head], bias[head], decay[head]);
        to[CHANNELS + DELTA_HEADS + head] = sigmoid(ends[head]);
    }
    to[channel] = value;
#elif STAGE == 1
    const int head = blockIdx.x, at = blockIdx.y * 32 + thread / 4, part = thread % 4, own = head % DELTA_KEYS;
    const size_t place = (size_t)head * DELTA_WIDTH * DELTA_WIDTH + at;
    Column state;
    state.load(states + state_before(chunk->slot, start) + place, part, start > 0);
    struct Token {
        float4 q[QUADS], k[QUADS];
        float value, decay, beta;
        __device__ __forceinline__ void load(const float *from, int own, int head, int at, int part) {
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                q[i] = ((const float4 *)(from + own * DELTA_WIDTH))[4 * i + part];
                k[i] = ((const float4 *)(from + (DELTA_KEYS + own) * DELTA_WIDTH))[4 * i + part];
            }
            value = from[(2 * DELTA_KEYS + head) * DELTA_WIDTH + at];
            decay = from[CHANNELS + head], beta = from[CHANNELS + DELTA_HEADS + head];
        }
    };
    Token next;
    next.load(made, own, head, at, part);
#pragma unroll 1
    for (int token = 0; token < count; token++) {
        const Token now = next;
        if (token + 1 < count) next.load(made + (size_t)(token + 1) * MADE, own, head, at, part);
        // Whoever takes the last token again finds the state before it.
        if (token + 1 == count) state.store(states + state_before(chunk->slot, start + token) + place, part);
        const float out = state.step(now.k, now.q, now.value, now.decay, now.beta);
        if (part == 0) made[(size_t)token * MADE + (2 * DELTA_KEYS + head) * DELTA_WIDTH + at] = out;
    }
    state.store(states + state_before(chunk->slot, start + count) + place, part);
    const int all = gridDim.x * gridDim.y * 128, first = (blockIdx.y * gridDim.x + blockIdx.x) * 128 + thread;
    const int from = count > DELTA_ROWS ? count - DELTA_ROWS : 0;
    for (int i = first; i < (count - from) * CHANNELS; i += all) {
        const int token = from + i / CHANNELS, channel = i % CHANNELS;
        const float value = products[(size_t)token * PRODUCTS + channel];
        ring[(size_t)((start + token) % DELTA_ROWS) * CHANNELS + channel] = value;
    }
#else
    const int token = blockIdx.x, head = blockIdx.y;
    if (token >= count) return;
    float value = made[(size_t)token * MADE + (2 * DELTA_KEYS + head) * DELTA_WIDTH + thread];
    value *= rsqrtf(head_total(value * value, room) / DELTA_WIDTH + DELTA_EPS) * norm[thread];
    value *= silu(products[(size_t)token * PRODUCTS + CHANNELS + head * DELTA_WIDTH + thread]);
    const Mixed to = {x, nullptr, nullptr};
    to.put<INNER>(token, head * DELTA_WIDTH + thread, value, true);
#endif
}
