// A gated delta net for a chunk of a prompt, in three launches (STAGE):
//
//   0: tokens' queries, keys and values, convolved, through SiLU and of length 1; and decay and beta.
//      Grid (tokens, 2 * DELTA_KEYS + DELTA_HEADS), DELTA_WIDTH threads
//   1: what comes of the state, four tokens at a time, in the place of the values; then the state, and the ring.
//      Grid (DELTA_HEADS, DELTA_WIDTH / 32), 128 threads: 32 columns of a head
//   2: that, normed and gated, as halves. Grid (tokens, DELTA_HEADS), DELTA_WIDTH threads
//
// Macros: those of delta.cuh and mixed.cuh, OVERLAP.
//   made   float32 (tokens, CHANNELS + 2 * DELTA_HEADS, filled up to a multiple of 4): what stage 0 makes
//   others as in delta.cu
#include "async.cuh"
#include "chunk.cuh"
#include "delta.cuh"
#include "mixed.cuh"
#include "overlap.cuh"

using namespace deltas;

constexpr int MADE = (CHANNELS + 2 * DELTA_HEADS + 3) / 4 * 4;
// A lane has a column of ROWS of a head's state. Tokens are taken BLOCK at a time: with S' = g S + k d for each, what a
// block makes of S and reads of it are sums of S with its keys and queries, and of these with each other.
constexpr int WARPS = 4, ROWS = DELTA_WIDTH / WARPS, COLUMNS = 32, BLOCK = 4, TILE = 4 * BLOCK;

// What columns read of a token: its head's query and key, their values, decay and beta.
struct Token {
    alignas(16) float key[DELTA_WIDTH], query[DELTA_WIDTH], value[COLUMNS];
    float decay, beta, reserved[2];
};

// Products of a block's keys, the first index, with keys of later tokens, and with their queries and its own.
struct Products {
    float keys[BLOCK][BLOCK], queries[BLOCK][BLOCK];
};

// How many tokens go together: the last one is by itself, since whoever takes it again needs the state before it.
__device__ __forceinline__ int tile_of(int first, int count) {
    return first >= count ? 0 : first + 1 == count ? 1 : min(TILE, count - 1 - first);
}

// So many tokens, a token to a warp at a time; a block is filled up with tokens that change nothing. `values` is the
// first of the columns' in `made`.
__device__ __forceinline__ void copy_tokens(Token *to, const float *made, int tokens, int own, int head, int values) {
    const int lane = threadIdx.x % 32;
    for (int at = threadIdx.x / 32; at < (tokens + BLOCK - 1) / BLOCK * BLOCK; at += WARPS) {
        const float *from = made + (size_t)at * MADE;
        Token &token = to[at];
        if (at >= tokens) {
            for (int i = lane; i < DELTA_WIDTH; i += 32) token.key[i] = token.query[i] = 0;
            token.value[lane] = token.beta = 0, token.decay = 1;
            continue;
        }
        for (int i = lane; i < DELTA_WIDTH / 4; i += 32) {
            copy_async<16>(shared_address(token.query + 4 * i), from + own * DELTA_WIDTH + 4 * i);
            copy_async<16>(shared_address(token.key + 4 * i), from + (DELTA_KEYS + own) * DELTA_WIDTH + 4 * i);
        }
        if (lane < COLUMNS / 4) copy_async<16>(shared_address(token.value + 4 * lane), from + values + 4 * lane);
        if (lane == 30) copy_async<4>(shared_address(&token.decay), from + CHANNELS + head);
        if (lane == 31) copy_async<4>(shared_address(&token.beta), from + CHANNELS + DELTA_HEADS + head);
    }
    commit_copies();
}

__device__ __forceinline__ float product(float4 a, float4 b) {
    return fmaf(a.x, b.x, a.y * b.y) + fmaf(a.z, b.z, a.w * b.w);
}

// By a warp.
__device__ __forceinline__ void multiply_tokens(const Token *block, Products &to) {
    const int lane = threadIdx.x % 32;
    const bool there = 4 * lane < DELTA_WIDTH;
    const float4 none = make_float4(0, 0, 0, 0);
    float4 k[BLOCK], q[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        k[i] = there ? ((const float4 *)block[i].key)[lane] : none;
        q[i] = there ? ((const float4 *)block[i].query)[lane] : none;
    }
#pragma unroll
    for (int one = 0; one < BLOCK; one++)
#pragma unroll
        for (int later = one; later < BLOCK; later++) {
            const float keys = later > one ? warp_total(product(k[one], k[later])) : 0;
            const float queries = warp_total(product(k[one], q[later]));
            if (lane == 0) to.keys[one][later] = keys, to.queries[one][later] = queries;
        }
}

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
    __shared__ Token tiles[2][TILE];
    __shared__ Products products_of[TILE / BLOCK];
    __shared__ float parts[2][2 * BLOCK][WARPS][COLUMNS];
    const int head = blockIdx.x, own = head % DELTA_KEYS, warp = thread / 32, lane = thread % 32;
    const int values = (2 * DELTA_KEYS + head) * DELTA_WIDTH + blockIdx.y * COLUMNS, slot = chunk->slot;
    const auto row_of = [=](int position, int i) {
        const size_t row = (size_t)head * DELTA_WIDTH + warp * ROWS + i;
        return states + state_before(slot, position) + row * DELTA_WIDTH + blockIdx.y * COLUMNS + lane;
    };
    copy_tokens(tiles[0], made, tile_of(0, count), own, head, values);
    float s[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) s[i] = start > 0 ? *row_of(start, i) : 0;
    for (int first = 0, tokens, turn = 0; first < count; first += tokens, turn ^= 1) {
        tokens = tile_of(first, count);
        const int next = first + tokens;
        copy_tokens(tiles[turn ^ 1], made + (size_t)next * MADE, tile_of(next, count), own, head, values);
        wait_copies<1>();
        __syncthreads();
        if (warp * BLOCK < tokens) multiply_tokens(tiles[turn] + warp * BLOCK, products_of[warp]);
        if (next == count)
#pragma unroll
            for (int i = 0; i < ROWS; i++) *row_of(start + first, i) = s[i];
#pragma unroll 1
        for (int at = 0; at < tokens; at += BLOCK) {
            const Token *block = tiles[turn] + at;
            const auto four = [=](const float *from, int i) { return *(const float4 *)(from + warp * ROWS + i); };
            float a[BLOCK] = {}, b[BLOCK] = {};
#pragma unroll
            for (int i = 0; i < ROWS; i += 4)
#pragma unroll
                for (int c = 0; c < BLOCK; c++) {
                    const float4 k = four(block[c].key, i), q = four(block[c].query, i);
                    a[c] = fmaf(s[i], k.x, a[c]), b[c] = fmaf(s[i], q.x, b[c]);
                    a[c] = fmaf(s[i + 1], k.y, a[c]), b[c] = fmaf(s[i + 1], q.y, b[c]);
                    a[c] = fmaf(s[i + 2], k.z, a[c]), b[c] = fmaf(s[i + 2], q.z, b[c]);
                    a[c] = fmaf(s[i + 3], k.w, a[c]), b[c] = fmaf(s[i + 3], q.w, b[c]);
                }
            auto &room = parts[at / BLOCK % 2];  // the other one may still be read
#pragma unroll
            for (int c = 0; c < BLOCK; c++) room[c][warp][lane] = a[c], room[BLOCK + c][warp][lane] = b[c];
            __syncthreads();
            const Products &products = products_of[at / BLOCK];
            float deltas[BLOCK], decay = 1;
#pragma unroll
            for (int c = 0; c < BLOCK; c++) {
                const float now = block[c].decay;
                decay *= now;
                float by_key = 0, by_query = 0;
#pragma unroll
                for (int i = 0; i < WARPS; i++) by_key += room[c][i][lane], by_query += room[BLOCK + c][i][lane];
                by_key *= decay, by_query *= decay;
#pragma unroll
                for (int one = 0; one < c; one++) {
                    deltas[one] *= now;
                    by_key = fmaf(deltas[one], products.keys[one][c], by_key);
                }
                deltas[c] = (block[c].value[lane] - by_key) * block[c].beta;
#pragma unroll
                for (int one = 0; one <= c; one++) by_query = fmaf(deltas[one], products.queries[one][c], by_query);
                if (warp == c && at + c < tokens) made[(size_t)(first + at + c) * MADE + values + lane] = by_query;
            }
#pragma unroll
            for (int i = 0; i < ROWS; i += 4) {
                s[i] *= decay, s[i + 1] *= decay, s[i + 2] *= decay, s[i + 3] *= decay;
#pragma unroll
                for (int c = 0; c < BLOCK; c++) {
                    const float4 k = four(block[c].key, i);
                    s[i] = fmaf(k.x, deltas[c], s[i]), s[i + 1] = fmaf(k.y, deltas[c], s[i + 1]);
                    s[i + 2] = fmaf(k.z, deltas[c], s[i + 2]), s[i + 3] = fmaf(k.w, deltas[c], s[i + 3]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) *row_of(start + count, i) = s[i];
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
