// The k best tokens of a sequence, k up to TOP, found by a grid of (PARTS, sequences) with THREADS threads: each CTA
// leaves the k best of its chunk (`leave_best`), and the last one of the sequence merges them (`gather_best`): the k-th
// largest of the chunks' best is a bound, below which nothing is kept, so that it looks at few of the others.
//
// Work space: entries, Ranked (sequences, PARTS, TOP), and tops, Ranked (sequences, PARTS); functions take a
// sequence's.
#pragma once
#include "sampling.cuh"

namespace sampling {

constexpr int POOL = 2048, BATCH = POOL / 2 / THREADS;  // candidates at a time; new ones of a thread

struct Top {
    union {
        int counts[CHUNK];
        Ranked pool[POOL];
    };
    Ranked sorted[TOP], best[THREADS / 32];
    int scratch[2 * THREADS / 32];
    unsigned short lists[PARTS];
    int filled, listed, last;
};

// The k best of this chunk into `entries`, as nothing where they are fewer, and the best one into `tops`, which is
// returned.
__device__ __forceinline__ Ranked leave_best(Top &shared, const Ranked (&items)[ITEMS], int k, Ranked *entries,
                                             Ranked *tops) {
    const int part = blockIdx.x;
    Ranked best = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) best = larger(best, items[i]);
    best = largest(best, shared.best);
    const Ranked bound = k > 1 ? kth(items, k, shared.scratch) : best;
    if (threadIdx.x == 0) shared.filled = shared.listed = 0, tops[part] = best;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (items[i] && items[i] >= bound) entries[part * TOP + atomicAdd(&shared.filled, 1)] = items[i];
    __syncthreads();
    for (int at = shared.filled + threadIdx.x; at < k; at += THREADS) entries[part * TOP + at] = 0;
    return best;
}

// Keep the k best of the pool.
__device__ __forceinline__ void shrink(Top &shared, int k) {
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

// The k best of all chunks, in order, into `sorted`: how many there are, at most k. By the CTA that came last.
__device__ __forceinline__ int gather_best(Top &shared, int k, const Ranked *entries, const Ranked *tops) {
    if (threadIdx.x == 0) shared.filled = 0;
    __syncthreads();
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

    const int filled = shared.filled;
    const Ranked mine = threadIdx.x < filled ? shared.pool[threadIdx.x] : 0;
    int rank = 0;
    for (int i = 0; i < filled; i++) rank += shared.pool[i] > mine;
    if (threadIdx.x < filled && rank < k) shared.sorted[rank] = mine;
    __syncthreads();
    return min(filled, k);
}

}  // namespace sampling
