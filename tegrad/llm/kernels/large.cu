// Tells whether a BF16 matrix has a weight that is 256 or more in magnitude, or no number: prompts and batches multiply
// halves of 256 times the weight (fragments.cuh), which would be infinite.
//
// A warp takes a segment of 2048 weights, 16 bytes a lane and load. Launch with WARPS warps a block and a warp for each
// segment; `found` is 0 before.

constexpr unsigned LIMIT = 0x4380;  // 256
constexpr unsigned REST = 0x8000 - LIMIT;
constexpr int LOADS = 8;

extern "C" __global__ void __launch_bounds__(32 * WARPS) large(const uint4 *data, int *found, int segments) {
    const int segment = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (segment >= segments) return;
    const uint4 *const own = data + (size_t)segment * 32 * LOADS + lane;
    unsigned above = 0;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const uint4 v = own[32 * i];
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
        // The top bit of each half becomes set where its magnitude reaches LIMIT; no sum reaches the next half.
#pragma unroll
        for (int w = 0; w < 4; w++) above |= (words[w] & 0x7fff7fffu) + (REST << 16 | REST);
    }
    if (above & 0x80008000u) *found = 1;
}
