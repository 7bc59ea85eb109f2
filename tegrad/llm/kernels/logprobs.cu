// Of each sequence that asks for it, the log-probability of the token that this step has sampled, and the likeliest
// tokens with theirs: log-softmax of the model's own logits, before biases, penalties, masks and temperature. After the
// launches that sample. Grid (PARTS, sequences), THREADS threads.
//   logits    float32 (sequences, VOCAB)
//   entries, tops: work space (top.cuh); sums: float32 (sequences, PARTS): work space
//   counters  uint32 (sequences): zeros, and zeros again afterwards
//   records   Record (sequences, RECORDS): that of token n (from 1) is at (n - 1) % RECORDS
#include "top.cuh"

using namespace sampling;

constexpr int LIKELIEST = 20;  // the most that are told of

// What a token's record holds; tegrad/llm/sampling.py reads it.
struct Record {
    unsigned number;  // of the token, as State::written counted it
    float logprob;
    int count;        // of `likely` that are there
    int reserved;
    struct {
        int token;
        float logprob;
    } likely[LIKELIEST];
};
static_assert(sizeof(Record) == 176, "tegrad/llm/sampling.py makes room for it");

struct Shared : Top {
    float warps[THREADS / 32];
};

// The sum of all threads' values, in all of them.
__device__ __forceinline__ float sum(Shared &shared, float value) {
    __syncthreads();
    sum_until(value, shared.warps);
    float total = 0;
    for (int warp = 0; warp < THREADS / 32; warp++) total += shared.warps[warp];
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
logprobs(const State *states, const Entry *rings, const Settings *settings, const float *logits, Ranked *entries,
         Ranked *tops, float *sums, unsigned *counters, Record *records) {
    __shared__ Shared shared;
    const int slot = blockIdx.y, part = blockIdx.x, first = part * CHUNK + threadIdx.x * ITEMS;
    const unsigned number = states[slot].written;
    const Settings wanted = settings[slot];
    Record *record = records + slot * RECORDS + (number - 1) % RECORDS;
    // A sequence that stood still in this step has its last token's record already.
    if (!states[slot].active || wanted.logprobs < 0 || number == 0 || record->number == number) return;
    const int k = max(1, wanted.logprobs);
    entries += (size_t)slot * PARTS * TOP, tops += slot * PARTS, sums += slot * PARTS;
    logits += (size_t)slot * VOCAB;

    float values[ITEMS], own = 0;
    load_chunk(logits, first, values);
    Ranked items[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) items[i] = candidate(values[i], first + i);
    const Ranked best = leave_best(shared, items, k, entries, tops);
    if (best) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) own += expf(values[i] - logit_of(best));
    }
    own = sum(shared, own);
    if (threadIdx.x == 0) sums[part] = own;
    if (!last_here(counters + slot, &shared.last)) return;

    const int count = gather_best(shared, k, entries, tops);
    const float top = logit_of(shared.sorted[0]);
    own = 0;
    for (int at = threadIdx.x; at < PARTS; at += THREADS) {
        const Ranked theirs = __ldcg(tops + at);
        if (theirs) own += __ldcg(sums + at) * expf(logit_of(theirs) - top);
    }
    const float all = top + logf(sum(shared, own));
    if (threadIdx.x < min(count, wanted.logprobs)) {
        const Ranked item = shared.sorted[threadIdx.x];
        record->likely[threadIdx.x] = {token_of(item), logit_of(item) - all};
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const int token = (int)(unsigned)rings[slot * RING + (number - 1) % RING];
        record->logprob = token >= 0 && token < VOCAB ? logits[token] - all : NEVER;
        record->count = min(count, wanted.logprobs);
        __threadfence_system();  // the host may look before this launch has ended: the number says that all is there
        record->number = number;
    }
}
