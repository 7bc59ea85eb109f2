// The masks of the next tokens, from where the host writes them, for the launches that sample after this one: so the
// host makes them while the GPU computes the logits. A sequence whose mask does not come in WAIT_NS samples nothing in
// this step: its next step is the same one again. Grid (sequences), THREADS threads.
//   given  uint32 (sequences, MASK_WORDS) in the host's memory: the number is written last
//   valid  uint32 (sequences, MASK_WORDS): what the launches after this one read
#include "sampling.cuh"

using namespace sampling;

__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// What the host stored before this number is seen afterwards.
__device__ __forceinline__ unsigned seen(const unsigned *word) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
masks(const State *states, const Settings *settings, const unsigned *given, unsigned *valid) {
    __shared__ int came;
    const State state = states[blockIdx.x];
    if (!state.active || state.stop || !settings[blockIdx.x].masked) return;
    given += blockIdx.x * MASK_WORDS, valid += blockIdx.x * MASK_WORDS;
    const unsigned number = state.written + 1;
    if (threadIdx.x == 0) {
        const unsigned long long begun = nanoseconds();
        while (!(came = seen(given) == number) && nanoseconds() - begun < WAIT_NS) __nanosleep(500);
    }
    __syncthreads();
    if (!came) return;
    const bool all = given[1];
    for (int at = MASK_HEAD / 4 + threadIdx.x; at < MASK_WORDS / 4; at += THREADS)
        ((uint4 *)valid)[at] = all ? make_uint4(ALL, ALL, ALL, ALL) : ((const uint4 *)given)[at];
    if (threadIdx.x == 0) valid[0] = number;
}
