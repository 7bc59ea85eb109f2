// gemm.cu's product by Hopper's asynchronous tensor cores, for sm_90a: gemm.cu is its reference.
//
// The operands change sides: packed weights become the left one in registers, 16 rows a warp, and the tile of x, which
// lies swizzled by 128 bytes as it is, the right one in shared memory. A warpgroup computes 64 rows of W times BM
// tokens. While one warpgroup waits for its product, another one, of this block or of the SM's other one, makes
// fragments.
//
// Macros as gemm.cu's, without WM and WN; BM: 32, 64, 128 or 256; BN: a multiple of 64, a warpgroup each.
// Grid: (tokens / BM, rows of y / (GATED ? BN / 2 : BN), SPLITS), rounded up. Block: BN / 64 warpgroups.
constexpr int THREADS = BN / 64 * 128;
#include "gemm_tile.cuh"
#include "wgmma.cuh"

constexpr int STAGE_BYTES = (UNITS * (X_BYTES + W_BYTES) + 1023) / 1024 * 1024;
constexpr int FILLED = STAGES - 1;  // stages that are there or on their way when a product begins
static_assert(FILLED > 0, "a stage to fill besides those in use");
static_assert(BN % 64 == 0 && X_BYTES % 1024 == 0, "whole warpgroups, and swizzled rows in their place");

// Of row n of this warp's rows g and g + 8, word t of each set.
static __device__ __forceinline__ void multiply(float (&sum)[BM / 2], unsigned stage, int step) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n = threadIdx.x / 32 * 16 + g;
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
        unsigned low[4][2], high[4][2], made[4][4];
        const unsigned tile = stage + UNITS * X_BYTES + unit * W_BYTES;
        weights(tile, n, unit, step * UNITS + unit, t, low);
        weights(tile, n + 8, unit, step * UNITS + unit, t, high);
#pragma unroll
        for (int s = 0; s < 4; s++)
            made[s][0] = low[s][0], made[s][1] = high[s][0], made[s][2] = low[s][1], made[s][3] = high[s][1];
        warpgroup_begin(sum, made);
#pragma unroll
        for (int s = 0; s < 4; s++) Product<BM>::run(sum, made[s], described(stage + unit * X_BYTES + 32 * s));
        warpgroup_commit();
        warpgroup_wait(sum);
    }
}

static __device__ __forceinline__ void finish(float (&sum)[BM / 2], void *y, const float *bias, int first, int tokens) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, tile = threadIdx.x / 32 * 16;
#pragma unroll
    for (int j = 0; j < BM / 8; j++)
#pragma unroll
        for (int h = 0; h < (GATED ? 1 : 2); h++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int token = first + 8 * j + 2 * t + e, row = (blockIdx.y * BN + tile) / (GATED ? 2 : 1) + g + 8 * h;
                if (token >= tokens || row >= ROWS) continue;
                float value = activate(sum[4 * j + 2 * h + e] * UNSCALE + biased(bias, row));
                if constexpr (GATED) value *= sum[4 * j + 2 + e] * UNSCALE + biased(bias, ROWS + row);
                size_t at = (size_t)token * STRIDE + (HALF_OUT ? fragment_order(row) : row);
                if constexpr (HALF_OUT) static_cast<__half *>(y)[at] = __float2half(value);
                else static_cast<float *>(y)[at] = ADD ? static_cast<float *>(y)[at] + value : value;
            }
}

// Operands as gemm's.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gemm_wgmma(
    void *y, const __half *x, const unsigned char *w, const unsigned char *w2, const float *bias, float *partial,
    unsigned *arrived, const int *count
) {
    extern __shared__ __align__(128) unsigned char memory[];
    allow_next();
    await_previous();
    const int tokens = *count, first = blockIdx.x * BM;
    if (first >= tokens) return;
    const int begin = STEPS * blockIdx.z / SPLITS, end = STEPS * (blockIdx.z + 1) / SPLITS;
    const unsigned stages = (shared_address(memory) + 1023) & ~1023u;
    const Copier copier(x, w, w2, first, tokens);
    float sum[BM / 2] = {};
#pragma unroll
    for (int i = 0; i < FILLED; i++) {
        if (begin + i < end) copier.copy(stages + i * STAGE_BYTES, begin + i);
        commit_copies();
    }
    unsigned now = stages, free = stages + FILLED * STAGE_BYTES;
    const auto next = [&](unsigned at) {
        return at == stages + (STAGES - 1) * STAGE_BYTES ? stages : at + STAGE_BYTES;
    };
    int step = begin;
    do {  // a split has a step at least
        wait_copies<FILLED - 1>();
        show_to_products();
        __syncthreads();
        if (step + FILLED < end) copier.copy(free, step + FILLED);
        commit_copies();
        multiply(sum, now, step);
        free = next(free), now = next(now);
    } while (++step < end);
    wait_copies<0>();
    if constexpr (SPLITS > 1) {
        if (!join(sum, partial, arrived)) return;
    }
    finish(sum, y, bias, first, tokens);
}
