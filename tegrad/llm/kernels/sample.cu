// One token of each sequence with a top-k up to TOP, or the likeliest after adjustments, and the end of the step, in
// one launch. Grid (PARTS, sequences), THREADS threads.
//   logits    float32 (sequences, VOCAB)
//   entries, tops: work space (top.cuh)
//   counters  uint32 (sequences): zeros, and zeros again afterwards
#include "top.cuh"

using namespace sampling;

struct Shared : Top {
    float weight[TOP];
};

// The token that is drawn from the `count` best, -1 where their logits are no numbers or there are none; in thread 0.
__device__ __forceinline__ int draw(Shared &shared, const Settings &wanted, const State &state, int count) {
    const int thread = threadIdx.x;
    if (count <= 1) return count ? taken(shared.sorted[0]) : -1;
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

extern "C" __global__ void __launch_bounds__(THREADS, 5)
sample(State *states, Entry *rings, int *histories, const int *ends, const Settings *settings, const Bias *biases,
       const unsigned *masks, const float *logits, Ranked *entries, Ranked *tops, unsigned *counters) {
    __shared__ Shared shared;
    const int slot = blockIdx.y, first = blockIdx.x * CHUNK + threadIdx.x * ITEMS;
    const State state = states[slot];
    const Settings wanted = settings[slot];
    const Own own(slot, histories, biases, masks);
    if (wanted.greedy() || !wanted.narrow() || !ready(state, wanted, own)) return;
    const int k = wanted.temperature > 0 ? wanted.top_k : 1;
    entries += (size_t)slot * PARTS * TOP, tops += slot * PARTS;

    float values[ITEMS];
    load_chunk(logits + (size_t)slot * VOCAB, first, values);
    if (wanted.adjusts()) adjust(wanted, state, own, blockIdx.x, values, shared.counts);
    Ranked items[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) items[i] = candidate(values[i], first + i);
    leave_best(shared, items, k, entries, tops);
    if (!last_here(counters + slot, &shared.last)) return;
    const int count = gather_best(shared, k, entries, tops);
    const int token = draw(shared, wanted, state, count);
    if (threadIdx.x == 0) finish(states + slot, rings + slot * RING, histories + slot * HISTORY, ends, token);
}
