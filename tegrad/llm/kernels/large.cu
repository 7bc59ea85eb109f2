// Tells whether a packed matrix has a weight that the products for prompts and batches may not hold: they multiply
// halves of 256 times the weight (fragments.cuh), infinite from 256 on. BF16 weights are looked at themselves; blocks
// by their scales, what the largest of their numbers would be, so that a weight of 255 may be told of, too. F16 weights
// are multiplied as they are.
//
// KIND: BF16 or one of blocks. A warp takes a segment of 2048 weights. Launch with WARPS warps a block and a warp for
// each segment; `found` is 0 before.
#include "fragments.cuh"

// Whether any of the words has a half whose magnitude is LIMIT or more, or no number.
static __device__ __forceinline__ bool plain_above(const unsigned char *segment, int lane) {
    constexpr unsigned LIMIT = 0x4380;  // 256
    constexpr unsigned REST = 0x8000 - LIMIT;
    const uint4 *const own = reinterpret_cast<const uint4 *>(segment) + lane;
    unsigned above = 0;
#pragma unroll
    for (int i = 0; i < SEGMENT_BYTES / 512; i++) {
        const uint4 v = own[32 * i];
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
        // The top bit of each half becomes set where its magnitude reaches LIMIT; no sum reaches the next half.
#pragma unroll
        for (int w = 0; w < 4; w++) above |= (words[w] & 0x7fff7fffu) + (REST << 16 | REST);
    }
    return above & 0x80008000u;
}

// Whether the lane's run may have such a weight, from the scales that the products make, rounded as they round them.
static __device__ __forceinline__ bool scales_above(const unsigned char *segment, int lane) {
    constexpr float LIMIT = 255.0f * 256;  // what is rounded twice may have grown by 0.1%
    constexpr float LOWEST = OF_KIND(LOWEST), HIGHEST = OF_KIND(HIGHEST);
    const auto at = [&](int index) {
        return segment + piece(index).base + piece(index).stride * (lane >> piece(index).shift);
    };
    Head head = {};
#define LOAD(place, member, type, ...) head.member = *reinterpret_cast<const type *>(at(place));
    OF_KIND(HEAD)(LOAD)
#undef LOAD
    const Scales s = scales_of(head, lane);
    bool above = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float unit = __low2float(s.unit[i]);
        float shift = 0;
        if constexpr (HAS_MINIMA) shift = __low2float(s.shift[i]);
        // Not "at least", which would be false of what is no number.
        above |= !(fabsf(unit * LOWEST - shift) < LIMIT) || !(fabsf(unit * HIGHEST - shift) < LIMIT);
    }
    return above;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) large(const unsigned char *data, int *found, int segments) {
    const int segment = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (segment >= segments) return;
    const unsigned char *const own = data + (size_t)segment * SEGMENT_BYTES;
    if (PLAIN ? plain_above(own, lane) : scales_above(own, lane)) *found = 1;
}
