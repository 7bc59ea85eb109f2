// What the sampling kernels share: settings, what they change in the logits, the order of tokens, random numbers, and
// the end of a step.
//
// First a sequence's biases are added, then come the filters of llama.cpp in its order: penalties, top-k, top-p, min-p,
// temperature, draw. A token whose logit is then -infinity is never taken, nor one that is not in the mask. Tokens are
// ordered by logit and, where equal, by index, so that the filters keep a definite set. The draw takes the largest of
// logit / temperature - log(exponential noise), which is softmax's distribution; the noise of a token comes from Philox
// with the sequence's seed as key and (token / 4, position) as counter, so that it does not depend on how work is cut.
//
// Macros: VOCAB; HISTORY, tokens kept of each sequence; BIASES, the room of its list; RING (state.cuh). A CTA of
// THREADS threads has CHUNK consecutive logits, a thread ITEMS.
#pragma once
#include "last_arriving.cuh"
#include "state.cuh"

#ifndef HISTORY
#define HISTORY 1024
#endif
#ifndef BIASES
#define BIASES 512
#endif

namespace sampling {

// A logit's key in the upper half, ~index in the lower: larger is better, 0 is nothing.
typedef unsigned long long Ranked;

constexpr int THREADS = 256, ITEMS = 4, CHUNK = THREADS * ITEMS, PARTS = (VOCAB + CHUNK - 1) / CHUNK;
constexpr int TOP = 128;  // the largest top-k that is sampled in one launch
constexpr unsigned ALL = 0xffffffffu;
#define NEVER __int_as_float(0xff800000)  // the logit of a token that is never taken

// One per sequence, 48 bytes; tegrad/llm/sampling.py writes it.
struct Settings {
    float temperature;  // 0: the likeliest token
    float top_p;        // 1: all
    float min_p;        // 0: all
    int top_k;          // 0: all
    float repeat, presence, frequency;  // 1, 0, 0: no penalty
    int last_n;         // tokens that are penalized
    int biases;         // entries of its list
    int masked;         // 1: only tokens of its mask
    int logprobs;       // so many likeliest tokens are told of beside the sampled one; -1: nothing is
    int reserved;

    __device__ bool penalizes() const { return last_n > 0 && (repeat != 1 || presence != 0 || frequency != 0); }
    // Whether tokens are ordered otherwise than by the model's logits.
    __device__ bool adjusts() const { return biases || masked || penalizes(); }
    // Whether the likeliest of the model's logits is taken: kernels `greedy` and `greedy_rows` do it.
    __device__ bool greedy() const { return temperature <= 0 && !adjusts(); }
    // Whether, of the others, one launch of kernel `sample` does it.
    __device__ bool narrow() const { return temperature <= 0 || (top_k > 0 && top_k <= TOP); }
};

// Added to a token's logit. A sequence has room for BIASES, each token at most once.
struct Bias {
    int token;
    float value;
};

// A mask is MASK_WORDS words: the number of the token that it is for, as State::written will count it; 1 where all are
// allowed, whatever the bits; two that nobody reads; and a bit for each token of the vocabulary, the lowest first.
enum { MASK_HEAD = 4, MASK_WORDS = MASK_HEAD + (VOCAB + 127) / 128 * 4 };

// What one sequence has beside its settings.
struct Own {
    const int *history;
    const Bias *biases;
    const unsigned *mask;

    __device__ Own(int slot, const int *histories, const Bias *lists, const unsigned *masks)
        : history(histories + slot * HISTORY), biases(lists + slot * BIASES), mask(masks + slot * MASK_WORDS) {}
};

// Whether a step may sample for this sequence: not where the mask of the next token has not come.
__device__ __forceinline__ bool ready(const State &state, const Settings &wanted, const Own &own) {
    return state.active && !state.stop && (!wanted.masked || own.mask[0] == state.written + 1);
}

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
// Nothing where the token is out of question, or beyond the vocabulary.
__device__ __forceinline__ Ranked candidate(float logit, int token) {
    return logit == NEVER ? 0 : ranked(logit, token);
}
__device__ __forceinline__ float logit_of(Ranked item) { return logit_of((unsigned)(item >> 32)); }
__device__ __forceinline__ int token_of(Ranked item) { return ~(unsigned)item; }

// The token to publish: that of an item, or -1 where it is nothing or its logit is no number.
__device__ __forceinline__ int taken(Ranked item) { return isnan(logit_of(item)) ? -1 : token_of(item); }

// --- logits ---------------------------------------------------------------------------------------------------------

// A thread's logits of its CTA's chunk; NEVER beyond the vocabulary.
__device__ __forceinline__ void load_chunk(const float *logits, int first, float *out) {
    if (VOCAB % ITEMS == 0 && first + ITEMS <= VOCAB) {
        *(float4 *)out = *(const float4 *)(logits + first);
        return;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) out[i] = first + i < VOCAB ? logits[first + i] : NEVER;
}

// Penalize what is among the last tokens.
__device__ __forceinline__ void penalize(const Settings &wanted, const State &state, const int *history, int chunk,
                                         float *logits, int *counts) {
    const int first = chunk * CHUNK, mine = threadIdx.x * ITEMS;
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

// Biases, penalties and the mask on a thread's logits of a chunk. All threads of the CTA; `counts` is CHUNK words of
// shared memory, which others may use after a barrier.
__device__ __forceinline__ void adjust(const Settings &wanted, const State &state, const Own &own, int chunk,
                                       float *logits, int *counts) {
    const int first = chunk * CHUNK, mine = threadIdx.x * ITEMS;
    if (wanted.biases) {
        float *added = (float *)counts;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) added[mine + i] = 0;
        __syncthreads();
        for (int at = threadIdx.x; at < wanted.biases; at += THREADS) {
            const Bias bias = own.biases[at];
            if (bias.token >= first && bias.token < first + CHUNK) added[bias.token - first] = bias.value;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (added[mine + i] != 0) logits[i] += added[mine + i];
    }
    if (wanted.penalizes()) penalize(wanted, state, own.history, chunk, logits, counts);
    if (wanted.masked) {
        const unsigned allowed = first + mine < VOCAB ? own.mask[MASK_HEAD + (first + mine) / 32] : 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (!(allowed >> (mine + i) % 32 & 1)) logits[i] = NEVER;
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

// Sum of the values of this thread and those before it. warps: THREADS / 32 words, which hold each warp's sum.
template <typename T>
__device__ __forceinline__ T sum_until(T value, T *warps) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        T other = __shfl_up_sync(ALL, value, step);
        if (threadIdx.x % 32 >= step) value += other;
    }
    if (threadIdx.x % 32 == 31) warps[threadIdx.x / 32] = value;
    __syncthreads();
    for (unsigned warp = 0; warp < threadIdx.x / 32; warp++) value += warps[warp];
    return value;
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
