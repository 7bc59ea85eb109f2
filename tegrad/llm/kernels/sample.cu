// One token of each sequence with a top-k up to TOP, or the likeliest with penalties, and the end of the step, in one
// launch. Grid (PARTS, sequences), THREADS threads.
//
// A CTA finds the k best of its chunk. The last CTA of a sequence merges them: the k-th largest of the chunks' best is
// a bound, below which nothing is kept, so that it looks at few of the others. It then sorts the k best by counting.
//   logits    float32 (sequences, VOCAB)
//   entries   Ranked (sequences, PARTS, TOP), tops: Ranked (sequences, PARTS): work space
//   counters  uint32 (sequences): zeros, and zeros again afterwards
#include "sampling.cuh"

using namespace sampling;

constexpr int POOL = 2048, BATCH = POOL / 2 / THREADS;  // candidates at a time; new ones of a thread

struct Shared {
    union {
        int counts[CHUNK];
        Ranked pool[POOL];
    };
    Ranked sorted[TOP], best[THREADS / 32];
    float weight[TOP];
    int scratch[2 * THREADS / 32];
    unsigned short lists[PARTS];
    int filled, listed, last;
};

// Keep the k best of the pool.
__device__ __forceinline__ void shrink(Shared &shared, int k) {
    Ranked items[POOL / THREADS];
    const int filled = shared.filled;
#pragma unroll
    for (int i = 0; i < POOL / THREADS; i++) {
        int at = threadIdx.x + i * THREADS;
        items[i] = at < filled ? shared.pool[at] : 0;
    }
    const Ranked bound = kth(items, k, shared.scratch);
    if (threadIdx.x == 0) shared.filled = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < POOL / THREADS; i++)
        if (items[i] && items[i] >= bound) shared.pool[atomicAdd(&shared.filled, 1)] = items[i];
    __syncthreads();
}

// The k best of all chunks, or all where they are fewer, into the pool: at most THREADS.
__device__ __forceinline__ void merge(Shared &shared, const Ranked *entries, const Ranked *tops, int k) {
    Ranked bound = 0;
    if (PARTS > 1) {
        Ranked items[(PARTS + THREADS - 1) / THREADS];
#pragma unroll
        for (int i = 0; i < (PARTS + THREADS - 1) / THREADS; i++) {
            int at = threadIdx.x + i * THREADS;
            items[i] = at < PARTS ? __ldcg(tops + at) : 0;
        }
        bound = k <= PARTS ? kth(items, k, shared.scratch) : 0;
#pragma unroll
        for (int i = 0; i < (PARTS + THREADS - 1) / THREADS; i++)
            if (items[i] && items[i] >= bound) shared.lists[atomicAdd(&shared.listed, 1)] = threadIdx.x + i * THREADS;
    } else if (threadIdx.x == 0) {
        shared.lists[0] = 0, shared.listed = 1;
    }
    __syncthreads();
    const int shift = 32 - __clz(k - 1), total = shared.listed << shift;  // a list of k takes the next power of two
    for (int first = 0; first < total; first += BATCH * THREADS) {
        const int filled = shared.filled;
        __syncthreads();  // nobody adds before all have decided alike
        if (filled > POOL - BATCH * THREADS) shrink(shared, k);
        Ranked items[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int at = first + i * THREADS + threadIdx.x, entry = at & ((1 << shift) - 1);
            items[i] = at < total && entry < k ? __ldcg(entries + shared.lists[at >> shift] * TOP + entry) : 0;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (items[i] && items[i] >= bound) shared.pool[atomicAdd(&shared.filled, 1)] = items[i];
        __syncthreads();
    }
    if (shared.filled > THREADS) shrink(shared, k);
}

// The token that is drawn from the pool, -1 where its logits are no numbers; in thread 0.
__device__ __forceinline__ int draw(Shared &shared, const Settings &wanted, const State &state, int k) {
    const int filled = shared.filled, count = min(filled, k), thread = threadIdx.x;
    Ranked mine = thread < filled ? shared.pool[thread] : 0;
    int rank = 0;
    for (int i = 0; i < filled; i++) rank += shared.pool[i] > mine;
    if (thread < filled && rank < k) shared.sorted[rank] = mine;
    __syncthreads();
    if (count <= 1) return taken(shared.sorted[0]);
    float above = 0;
    if (thread < count) {
        above = logit_of(shared.sorted[thread]) - logit_of(shared.sorted[0]);
        shared.weight[thread] = expf(above);
    }
    __syncthreads();
    float before = 0, total = 0;
    for (int i = 0; i < count; i++) {
        if (i == thread) before = total;
        total += shared.weight[i];
    }
    Ranked choice = 0;
    if (thread < count && before < wanted.top_p * total && (wanted.min_p <= 0 || above >= logf(wanted.min_p)) ||
        thread == 0) {
        const int token = token_of(shared.sorted[thread]);
        const uint4 random = noise(state, token / 4);
        const unsigned own =
            token % 4 == 0 ? random.x : token % 4 == 1 ? random.y : token % 4 == 2 ? random.z : random.w;
        choice = ranked(drawn(above, wanted.temperature, own), token);
    }
    return taken(largest(choice, shared.best));
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample(State *states, Entry *rings, int *histories, const int *ends, const Settings *settings, const float *logits,
       Ranked *entries, Ranked *tops, unsigned *counters) {
    __shared__ Shared shared;
    const int slot = blockIdx.y, part = blockIdx.x, first = part * CHUNK + threadIdx.x * ITEMS;
    const State state = states[slot];
    const Settings wanted = settings[slot];
    if (!state.active || state.stop || !wanted.narrow()) return;
    const int k = wanted.temperature > 0 ? wanted.top_k : 1;
    entries += (size_t)slot * PARTS * TOP, tops += slot * PARTS;

    float values[ITEMS];
    load_chunk(logits + (size_t)slot * VOCAB, first, values);
    if (wanted.penalizes()) penalize(wanted, state, histories + slot * HISTORY, values, shared.counts);
    Ranked items[ITEMS], best = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        items[i] = first + i < VOCAB ? ranked(values[i], first + i) : 0;
        best = larger(best, items[i]);
    }
    best = largest(best, shared.best);
    const Ranked bound = k > 1 ? kth(items, k, shared.scratch) : best;
    if (threadIdx.x == 0) shared.filled = shared.listed = 0, tops[part] = best;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (items[i] && items[i] >= bound) entries[part * TOP + atomicAdd(&shared.filled, 1)] = items[i];
    __syncthreads();
    for (int at = shared.filled + threadIdx.x; at < k; at += THREADS) entries[part * TOP + at] = 0;

    if (!last_here(counters + slot, &shared.last)) return;
    if (threadIdx.x == 0) shared.filled = 0;
    __syncthreads();
    merge(shared, entries, tops, k);
    const int token = draw(shared, wanted, state, k);
    if (threadIdx.x == 0) finish(states + slot, rings + slot * RING, histories + slot * HISTORY, ends, token);
}
