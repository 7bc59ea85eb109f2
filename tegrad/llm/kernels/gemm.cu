// y[tokens, ROWS] = x[tokens, COLUMNS] W^T for many tokens: packed weights, tensor cores, sums in float32.
//
// A block computes BM tokens times BN rows of W; a warp of it WM times WN. Stages of UNITS runs (64 columns each) of x
// and of W's bytes come by asynchronous copies; each warp makes fragments of the packed bytes as it uses them. The
// columns may be split over SPLITS blocks: the last of them to finish adds their sums, in order.
//
// KIND, ROWS, COLUMNS; BM, BN, WM, WN, UNITS, STAGES, SPLITS, RESIDENT (blocks an SM should hold);
// GATED: y = ACTIVATION(x W^T) * (x W2^T), else ACTIVATION(x W^T + bias); HALF_OUT: y is halves, else floats;
// ADD: y += instead; BIAS; STRIDE: elements from a row of y to the next, which may hold other products too.
// Grid: (tokens / BM, rows of y / (GATED ? BN / 2 : BN), SPLITS), rounded up. Block: BM / WM * BN / WN warps.
constexpr int WARPS_N = BN / WN, THREADS = BM / WM * WARPS_N * 32;
constexpr int MI = WM / 16, NI = WN / 8;
#include "gemm_tile.cuh"

static_assert(SPLITS <= STEPS, "each block has a stage");
constexpr int STAGE_BYTES = UNITS * (X_BYTES + W_BYTES);
constexpr bool PAIRS = ROWS % 2 == 0 && STRIDE % 2 == 0;
static_assert(WM % 16 == 0 && WN % (GATED ? 16 : 8) == 0 && BM % WM == 0 && BN % WN == 0, "whole fragments");

static __device__ __forceinline__ void multiply(float (&sum)[MI][NI][4], unsigned stage, int step) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int m = warp / WARPS_N * WM + lane % 16, n = warp % WARPS_N * WN + g;
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
        unsigned a[MI][4][4];
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int s = 0; s < 4; s++)
                load_matrices<false>(a[i][s], stage + unit * X_BYTES + (m + 16 * i) * 128 +
                                                  ((2 * s + lane / 16) ^ lane % 8) * 16);
#pragma unroll
        for (int j = 0; j < NI; j++) {
            unsigned b[4][2];
            weights(stage + UNITS * X_BYTES + unit * W_BYTES, blockIdx.y, n + 8 * j, unit, step * UNITS + unit, t, b);
#pragma unroll
            for (int s = 0; s < 4; s++)
#pragma unroll
                for (int i = 0; i < MI; i++) mma(sum[i][j], a[i][s], b[s][0], b[s][1]);
        }
    }
}

static __device__ __forceinline__ void store(void *y, int token, int row, float a, float b) {
    size_t at = (size_t)token * STRIDE + row;
    if constexpr (HALF_OUT) {
        *reinterpret_cast<__half2 *>(static_cast<__half *>(y) + (size_t)token * STRIDE + fragment_order(row)) =
            __floats2half2_rn(a, b);
    } else {
        float *to = static_cast<float *>(y) + at;
        if (PAIRS) {
            float2 old = ADD ? *reinterpret_cast<float2 *>(to) : make_float2(0, 0);
            *reinterpret_cast<float2 *>(to) = make_float2(a + old.x, b + old.y);
        } else {
            to[0] = ADD ? to[0] + a : a;
            if (row + 1 < ROWS) to[1] = ADD ? to[1] + b : b;
        }
    }
}

static __device__ __forceinline__ void finish(float (&sum)[MI][NI][4], void *y, const float *bias, int first,
                                              int tokens) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    constexpr int STEP = GATED ? 2 : 1;
#pragma unroll
    for (int i = 0; i < MI; i++)
#pragma unroll
        for (int j = 0; j < NI; j += STEP)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int token = first + warp / WARPS_N * WM + 16 * i + 8 * h + g;
                int row = (blockIdx.y * BN + warp % WARPS_N * WN) / STEP + j / STEP * 8 + 2 * t;
                if (token >= tokens || row >= ROWS) continue;
                float value[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    value[e] = activate(sum[i][j][2 * h + e] * UNSCALE + biased(bias, row + e));
                    if constexpr (GATED)
                        value[e] *= sum[i][j + STEP - 1][2 * h + e] * UNSCALE + biased(bias, ROWS + row + e);
                }
                store(y, token, row, value[0], value[1]);
            }
}

// Adds the sums of the blocks that share this tile; true in the one that arrives last, which has them all.
template <int COUNT>
static __device__ __forceinline__ bool join(float (&sum)[COUNT], float *partial, unsigned *arrived) {
    const int tile = blockIdx.y * gridDim.x + blockIdx.x;
    float4 *mine = reinterpret_cast<float4 *>(partial) + (size_t)tile * SPLITS * (BM * BN / 4) + threadIdx.x;
    store_part(sum, mine + blockIdx.z * (COUNT / 4) * THREADS);
    if (!last_arriving_block(arrived + tile, SPLITS)) return false;
    add_parts(sum, SPLITS, [=](int z) { return mine + z * (COUNT / 4) * THREADS; });
    return true;
}

// y: floats, or halves in the order of fragments (tokens, ROWS of STRIDE); x: halves in that order (tokens, COLUMNS);
// partial: floats (tiles, SPLITS, BM * BN) and arrived: zeros (tiles), where SPLITS > 1;
// count: the number of tokens, at most the grid's; bias: floats (ROWS), of gate and up (2, ROWS) where GATED.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gemm(
    void *y, const __half *x, const unsigned char *w, const unsigned char *w2, const float *bias, float *partial,
    unsigned *arrived, const int *count
) {
    extern __shared__ __align__(128) unsigned char memory[];
    allow_next();
    await_previous();
    const int tokens = *count, first = blockIdx.x * BM;
    if (first >= tokens) return;
    const int begin = STEPS * blockIdx.z / SPLITS, end = STEPS * (blockIdx.z + 1) / SPLITS;
    const unsigned stages = shared_address(memory);
    const Copier copier(x, w, w2, blockIdx.y, first, tokens);
    float sum[MI][NI][4] = {};
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (begin + i < end) copier.copy(stages + i * STAGE_BYTES, begin + i);
        commit_copies();
    }
    unsigned now = stages, free = stages + (STAGES - 1) * STAGE_BYTES;
    for (int step = begin; step < end; step++) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < end) copier.copy(free, step + STAGES - 1);
        commit_copies();
        multiply(sum, now, step);
        free = now;
        now = now == stages + (STAGES - 1) * STAGE_BYTES ? stages : now + STAGE_BYTES;
    }
    wait_copies<0>();
    if constexpr (SPLITS > 1) {
        if (!join(reinterpret_cast<float(&)[MI * NI * 4]>(sum), partial, arrived)) return;
    }
    finish(sum, y, bias, first, tokens);
}
