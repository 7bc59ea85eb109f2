// One token of each sequence whose top-k is none or too large for kernel `sample`, and the end of the step, in up to
// eight launches of grid (PARTS, sequences) with THREADS threads; `pass` says which one:
//   0      the largest logit
//   1-3    where top-k asks for it: the k-th largest logit, 11, 11 and 10 bits of it at a time, and the mass above it
//   4-6    where top-p asks for it: the logit at which the mass is reached, likewise
//   7      draw among what is kept, and end the step
// Masses are whole numbers, 2^40 for the likeliest token, so that their sums do not depend on the order of additions.
//   logits    float32 (sequences, VOCAB)
//   selects   Select (sequences); bests: Ranked (sequences, PARTS): work space
//   bins      (sequences): uint64 masses (BINS), then uint32 counts (BINS); counters: uint32 (sequences): all zeros,
//             and zeros again afterwards
#include "sampling.cuh"

using namespace sampling;

constexpr int BINS = 2048;
constexpr float UNIT = 1099511627776.0f;

typedef unsigned long long Mass;

// What the passes of a sequence publish.
struct Select {
    Mass above, goal, total;  // mass above the prefix; wanted; of all that top-k keeps
    float top;                // the largest logit
    unsigned prefix;          // upper bits of the key that is looked for
    int need;                 // tokens still wanted, of those with this prefix
    unsigned key;             // kept are all with larger keys,
    int left, equal;          // and the first `left` of the `equal` ones with this key
};
static_assert(sizeof(Select) == 48, "tegrad/llm/sampling.py makes room for it");

struct Bins {
    Mass mass[BINS];
    unsigned count[BINS];
};

struct Shared {
    union {
        int counts[CHUNK];
        Bins bins;
    };
    Ranked best[THREADS / 32];
    Mass warp_mass[THREADS / 32];
    unsigned warp_count[THREADS / 32];
    int last;
};

__device__ __forceinline__ bool wants_count(const Settings &wanted) {
    return wanted.top_k > TOP && wanted.top_k < VOCAB;
}
__device__ __forceinline__ bool wants_mass(const Settings &wanted) { return wanted.top_p < 1; }

// The last CTA of a pass finds the bin in which the goal is reached, and narrows the search to it.
__device__ __forceinline__ void narrow(Shared &shared, Select *select, Bins *bins, const Settings &wanted, bool by_mass,
                                       int level) {
    constexpr int OWN = BINS / THREADS;
    const int width = level < 2 ? 11 : 10, highest = BINS - 1 - threadIdx.x * OWN;  // from the largest keys down
    Mass masses[OWN], mass = 0;
    unsigned counts[OWN], count = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        mass += masses[i] = __ldcg(bins->mass + highest - i);
        count += counts[i] = __ldcg(bins->count + highest - i);
        bins->mass[highest - i] = 0;
        bins->count[highest - i] = 0;
    }
    const Mass mass_until = sum_until(mass, shared.warp_mass);
    const unsigned count_until = sum_until(count, shared.warp_count);
    Select now = *select;
    if (level == 0) {
        now.prefix = 0, now.above = 0, now.need = wanted.top_k;
        if (by_mass) {
            if (!wants_count(wanted))
                for (int warp = now.total = 0; warp < THREADS / 32; warp++) now.total += shared.warp_mass[warp];
            const Mass goal = (Mass)ceil((double)wanted.top_p * (double)now.total);
            now.goal = goal < 1 ? 1 : goal < now.total ? goal : now.total;
        }
    }
    // All have read `select` and the warps' sums before one changes it.
    __syncthreads();
    const bool begun = by_mass ? now.above + mass_until - mass < now.goal : count_until - count < (unsigned)now.need;
    const bool ended = by_mass ? now.above + mass_until >= now.goal : count_until >= (unsigned)now.need;
    if (!begun || !ended) return;
    now.above += mass_until - mass;
    now.need -= (int)(count_until - count);
    bool found = false;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (found) continue;
        found = by_mass ? now.above + masses[i] >= now.goal : counts[i] >= (unsigned)now.need;
        if (!found) {
            now.above += masses[i];
            now.need -= (int)counts[i];
        } else if (now.prefix = now.prefix << width | (highest - i), level == 2) {
            const Mass each = masses[i] / counts[i];  // equal keys have equal masses
            now.key = now.prefix, now.equal = (int)counts[i];
            now.left = by_mass ? (int)((now.goal - now.above + each - 1) / each) : now.need;
            now.total = now.above + now.left * each;
        }
    }
    *select = now;
}

// How many keys equal to `key` lie before this thread's logits, of which it has `own`. All threads; rarely called.
template <typename Load>
__device__ __forceinline__ int equals_before(Shared &shared, const Load &load, unsigned key, int own) {
    float values[ITEMS];
    unsigned before = 0, chunks = 0;
    for (int chunk = 0; chunk < (int)blockIdx.x; chunk++) {
        load(chunk, values);
#pragma unroll
        for (int i = 0; i < ITEMS; i++) before += key_of(values[i]) == key;
    }
    sum_until(before, shared.warp_count);
    for (int warp = 0; warp < THREADS / 32; warp++) chunks += shared.warp_count[warp];
    __syncthreads();
    return (int)(chunks + sum_until((unsigned)own, shared.warp_count)) - own;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
sample_wide(State *states, Entry *rings, int *histories, const int *ends, const Settings *settings, const Bias *biases,
            const unsigned *masks, const float *logits, Select *selects, Ranked *bests, Bins *bins, unsigned *counters,
            int pass) {
    __shared__ Shared shared;
    const int slot = blockIdx.y, first = blockIdx.x * CHUNK + threadIdx.x * ITEMS;
    const State state = states[slot];
    const Settings &wanted = settings[slot];
    const Own mine(slot, histories, biases, masks);
    if (wanted.narrow() || !ready(state, wanted, mine)) return;
    if (pass >= 1 && pass <= 3 && !wants_count(wanted)) return;
    if (pass >= 4 && pass <= 6 && !wants_mass(wanted)) return;
    Select *select = selects + slot;
    logits += (size_t)slot * VOCAB, bests += slot * PARTS, bins += slot;
    const auto load = [&](int chunk, float *out) {
        load_chunk(logits, chunk * CHUNK + threadIdx.x * ITEMS, out);
        if (wanted.adjusts()) adjust(wanted, state, mine, chunk, out, shared.counts);
    };
    float values[ITEMS];
    load(blockIdx.x, values);
    Ranked best = 0;

    if (pass == 0) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) best = larger(best, candidate(values[i], first + i));
    } else if (pass < 7) {
        const int level = (pass - 1) % 3, shift = level == 0 ? 21 : level == 1 ? 10 : 0, width = level < 2 ? 11 : 10;
        const float top = select->top;
        const unsigned prefix = select->prefix;
        __syncthreads();  // `load` uses the same shared memory
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.bins.mass[bin] = 0, shared.bins.count[bin] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const unsigned key = key_of(values[i]), bin = key >> shift & ((1u << width) - 1);
            if (first + i >= VOCAB || (level && key >> (shift + width) != prefix)) continue;
            atomicAdd(shared.bins.mass + bin, (Mass)(expf(values[i] - top) * UNIT));
            atomicAdd(shared.bins.count + bin, 1);
        }
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
            if (!shared.bins.count[bin]) continue;
            atomicAdd(bins->mass + bin, shared.bins.mass[bin]);
            atomicAdd(bins->count + bin, shared.bins.count[bin]);
        }
        if (last_here(counters + slot, &shared.last)) narrow(shared, select, bins, wanted, pass > 3, level);
        return;
    } else {
        const Select kept = *select;
        int before = 0;
        if (kept.left < kept.equal) {
            int own = 0;
#pragma unroll
            for (int i = 0; i < ITEMS; i++) own += key_of(values[i]) == kept.key;
            before = equals_before(shared, load, kept.key, own);
        }
        const uint4 random = noise(state, first / 4);
        const unsigned own[4] = {random.x, random.y, random.z, random.w};
        const float least = wanted.min_p > 0 ? logf(wanted.min_p) : NEVER;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const unsigned key = key_of(values[i]);
            const bool keep = key > kept.key || (key == kept.key && before++ < kept.left);
            const float above = values[i] - kept.top;
            if (keep && values[i] != NEVER && above >= least)
                best = larger(best, ranked(drawn(above, wanted.temperature, own[i]), first + i));
        }
    }

    best = largest(best, shared.best);
    if (threadIdx.x == 0) bests[blockIdx.x] = best;
    if (!last_here(counters + slot, &shared.last)) return;
    best = 0;
    for (int at = threadIdx.x; at < PARTS; at += THREADS) best = larger(best, __ldcg(bests + at));
    best = largest(best, shared.best);
    if (threadIdx.x) return;
    if (pass == 7) finish(states + slot, rings + slot * RING, histories + slot * HISTORY, ends, taken(best));
    else *select = {0, 0, 0, logit_of(best), 0, 0, 0, 0, 0};
}
