// What the sampling kernels share: settings, penalties, the order of tokens, random numbers, and the end of a step.
//
// The filters are those of llama.cpp in its order: penalties, top-k, top-p, min-p, temperature, draw. Tokens are
// ordered by logit and, where equal, by index, so that the filters keep a definite set. The draw takes the largest of
// logit / temperature - log(exponential noise), which is softmax's distribution; the noise of a token comes from Philox
// with the sequence's seed as key and (token / 4, position) as counter, so that it does not depend on how work is cut.
//
// Macros: VOCAB; HISTORY, tokens kept of each sequence; RING (state.cuh). A CTA of THREADS threads has CHUNK
// consecutive logits, a thread ITEMS.
#pragma once
#include "last_arriving.cuh"
#include "state.cuh"

#ifndef HISTORY
#define HISTORY 1024
#endif

namespace sampling {

// A logit's key in the upper half, ~index in the lower: larger is better, 0 is nothing.
typedef unsigned long long Ranked;

constexpr int THREADS = 256, ITEMS = 4, CHUNK = THREADS * ITEMS, PARTS = (VOCAB + CHUNK - 1) / CHUNK;
constexpr int TOP = 128;  // the largest top-k that is sampled in one launch
constexpr unsigned ALL = 0xffffffffu;

// One per sequence, 32 bytes; tegrad/llm/sampling.py writes it.
struct Settings {
    float temperature;  // 0: the likeliest token
    float top_p;        // 1: all
    float min_p;        // 0: all
    int top_k;          // 0: all
    float repeat, presence, frequency;  // 1, 0, 0: no penalty
    int last_n;         // tokens that are penalized

    __device__ bool penalizes() const { return last_n > 0 && (repeat != 1 || presence != 0 || frequency != 0); }
    // Whether one launch of kernel `sample` does it.
    __device__ bool narrow() const { return temperature <= 0 || (top_k > 0 && top_k <= TOP); }
};

// --- order ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned key_of(float logit) {
    unsigned bits = __float_as_uint(logit);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ Ranked ranked(float logit, int token) {
    return (Ranked)key_of(logit) << 32 | ~(unsigned)token;
}
__device__ __forceinline__ float logit_of(Ranked item) { return logit_of((unsigned)(item >> 32)); }
__device__ __forceinline__ int token_of(Ranked item) { return ~(unsigned)item; }

// The token to publish: that of an item, or -1 where it is nothing or its logit is no number.
__device__ __forceinline__ int taken(Ranked item) { return isnan(logit_of(item)) ? -1 : token_of(item); }

// --- logits ---------------------------------------------------------------------------------------------------------

// A thread's logits of its CTA's chunk; -infinity beyond the vocabulary.
__device__ __forceinline__ void load_chunk(const float *logits, int first, float *out) {
    if (VOCAB % ITEMS == 0 && first + ITEMS <= VOCAB) {
        *(float4 *)out = *(const float4 *)(logits + first);
        return;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) out[i] = first + i < VOCAB ? logits[first + i] : __int_as_float(0xff800000);
}

// Penalize what is among the last tokens. All threads of the CTA; `counts` is CHUNK words of shared memory.
__device__ __forceinline__ void penalize(const Settings &wanted, const State &state, const int *history, float *logits,
                                         int *counts) {
    const int first = blockIdx.x * CHUNK, mine = threadIdx.x * ITEMS;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) counts[mine + i] = 0;
    __syncthreads();
    int window = min(min(wanted.last_n, HISTORY), state.position + 1);
    for (int back = threadIdx.x; back < window; back += THREADS) {
        int token = back ? history[(state.position - back) % HISTORY] : state.token;
        if (token >= first && token < first + CHUNK) atomicAdd(counts + token - first, 1);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int count = counts[mine + i];
        if (!count) continue;
        float scaled = logits[i] <= 0 ? logits[i] * wanted.repeat : logits[i] / wanted.repeat;
        logits[i] = scaled - (count * wanted.frequency + wanted.presence);
    }
}

// --- noise ----------------------------------------------------------------------------------------------------------

// Philox-4x32-10 (Salmon et al., SC 2011).
__device__ __forceinline__ uint4 philox(uint4 counter, unsigned key_lo, unsigned key_hi) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned hi0 = __umulhi(0xD2511F53u, counter.x), lo0 = 0xD2511F53u * counter.x;
        unsigned hi1 = __umulhi(0xCD9E8D57u, counter.z), lo1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(hi1 ^ counter.y ^ key_lo, lo1, hi0 ^ counter.w ^ key_hi, lo0);
        key_lo += 0x9E3779B9u;
        key_hi += 0xBB67AE85u;
    }
    return counter;
}

// The noise of the four tokens from 4 * quad on.
__device__ __forceinline__ uint4 noise(const State &state, int quad) {
    return philox(make_uint4(quad, state.position, 0, 0), state.seed_lo, state.seed_hi);
}

// What the token's draw is decided by: `above` is its logit less the largest.
__device__ __forceinline__ float drawn(float above, float temperature, unsigned random) {
    float uniform = ((float)random + 0.5f) * 2.3283064365386963e-10f;
    return above / temperature - logf(-log1pf(-uniform));
}

// --- ends -----------------------------------------------------------------------------------------------------------

// Whether this CTA is the last of `parts` to come here: then it sees what the others stored. All threads.
__device__ __forceinline__ bool last_here(unsigned *counter, int *flag) {
    __syncthreads();
    if (threadIdx.x == 0) *flag = last_arriving(counter, PARTS);
    __syncthreads();
    return *flag;
}

// End the step of a sequence with a sampled token, by one thread. ends: a count, and as many tokens that end a text;
// history: of this sequence, indexed by position modulo HISTORY.
__device__ inline void finish(State *state, Entry *ring, int *history, const int *ends, int token) {
    if (state->stop) return;
    const bool sampled = state->forced <= 0;
    history[state->position % HISTORY] = state->token;
    publish_token(state, ring, token);
    bool end = false;
    for (int i = 1; i <= ends[0]; i++) end |= ends[i] == token;
    if (sampled && end) state->stop = 1;
}

// --- reductions -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ Ranked larger(Ranked a, Ranked b) { return a > b ? a : b; }

// The largest of all threads, in all threads. scratch: THREADS / 32 words of shared memory.
__device__ __forceinline__ Ranked largest(Ranked item, Ranked *scratch) {
#pragma unroll
    for (int step = 16; step; step /= 2) item = larger(item, __shfl_xor_sync(ALL, item, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = item;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) item = larger(item, scratch[warp]);
    return item;
}

// The k-th largest of all threads' items, which differ (or are 0); 0 if there are fewer. scratch: 2 * THREADS / 32
// words.
template <int COUNT>
__device__ __forceinline__ Ranked kth(const Ranked (&items)[COUNT], int k, int *scratch) {
    Ranked found = 0;
    __syncthreads();
    for (int bit = 63; bit >= 0; bit--) {
        Ranked candidate = found | 1ull << bit;
        int count = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) count += items[i] >= candidate;
        count = __reduce_add_sync(ALL, count);
        int *slots = scratch + bit % 2 * (THREADS / 32);  // two in turn: one barrier a bit is enough
        if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = count;
        __syncthreads();
        count = 0;
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; warp++) count += slots[warp];
        if (count >= k) found = candidate;
        if (count == k) break;
    }
    return found;
}

}  // namespace sampling
