// y[tokens, ROWS] = x[tokens, COLUMNS] W^T for many tokens: packed weights, tensor cores, sums in float32.
//
// A block computes BM tokens times BN rows of W; a warp of it WM times WN. Stages of UNITS runs (64 columns each) of x and
// of W's bytes come by asynchronous copies; each warp makes fragments of the packed bytes as it uses them. The columns
// may be split over SPLITS blocks: the last of them to finish adds their sums, in order.
//
// KIND, ROWS, COLUMNS; BM, BN, WM, WN, UNITS, STAGES, SPLITS, RESIDENT (blocks an SM should hold);
// GATED: y = ACTIVATION(x W^T) * (x W2^T), else ACTIVATION(x W^T + bias); HALF_OUT: y is halves, else floats;
// ADD: y += instead; BIAS; STRIDE: elements from a row of y to the next, which may hold other products too.
// Grid: (tokens / BM, rows of y / (GATED ? BN / 2 : BN), SPLITS), rounded up. Block: BM / WM * BN / WN warps.
#include "fragments.cuh"
#include "activation.cuh"

constexpr int RUNS = COLUMNS / RUN;
constexpr int STEPS = RUNS / UNITS;
constexpr int WARPS_N = BN / WN, THREADS = BM / WM * WARPS_N * 32;
constexpr int MI = WM / 16, NI = WN / 8;
constexpr int X_BYTES = BM * 2 * RUN, W_BYTES = piece_offset(PIECES, BN);
constexpr int STAGE_BYTES = UNITS * (X_BYTES + W_BYTES);
static_assert(!HALF_OUT || (ROWS % 16 == 0 && STRIDE % 16 == 0), "halves are ordered within 16");
constexpr bool PAIRS = ROWS % 2 == 0 && STRIDE % 2 == 0;
static_assert(COLUMNS % (RUN * UNITS) == 0, "columns are whole stages");
static_assert(WM % 16 == 0 && WN % (GATED ? 16 : 8) == 0 && BM % WM == 0 && BN % WN == 0, "whole fragments");
static_assert(SPLITS <= STEPS && STAGES >= 2, "each block has a stage");

// The row of W (or of W2) that is row n of this block's tile; rows beyond the last are the last once more.
static __device__ __forceinline__ int weight_row(int n) {
    int row = GATED ? blockIdx.y * (BN / 2) + n / 16 * 8 + n % 8 : blockIdx.y * BN + n;
    return min(row, ROWS - 1);
}

// Rows of a piece are permuted within eights, so that neither copies nor loads meet in a bank.
static __device__ __forceinline__ int place(int n, int unit, int at) {
    if (KIND == KIND_F32) return n ^ (2 * (at & 3) | (at >> 2 & 1));
    if (PLAIN) return n ^ (4 * (at & 1) | (at >> 1 & 3));
    return n ^ 4 * (unit & 1);
}

// What this thread copies of every stage, and from where: the same chunk of rows that lie X_ROWS or W_ROWS apart.
constexpr int TOGETHER = PLAIN ? PIECES : 1;  // neighbouring threads copy a plain row's neighbouring chunks
constexpr int X_ROWS = THREADS / (8 * UNITS), X_COPIES = (BM + X_ROWS - 1) / X_ROWS;
constexpr int W_ROWS = THREADS / (TOGETHER * UNITS), W_COPIES = (BN + W_ROWS - 1) / W_ROWS;
static_assert(X_ROWS % 8 == 0 && W_ROWS % 8 == 0, "a thread's rows lie alike in their eights");

struct Copier {
    const __half *x;
    const unsigned char *w, *w2;
    unsigned x_to, w_to;
    int rows;  // of x that there are from this thread's first on
    int n, run[W_COPIES];

    __device__ __forceinline__ Copier(const __half *from, const unsigned char *one, const unsigned char *other, int first, int tokens)
        : w(one), w2(other) {
        const int chunk = threadIdx.x % 8, unit = threadIdx.x / 8 % UNITS, m = threadIdx.x / (8 * UNITS);
        x = from + (size_t)(first + m) * COLUMNS + unit * RUN + chunk * 8;
        x_to = unit * X_BYTES + m * 128 + (chunk ^ (m & 7)) * 16;
        rows = tokens - first - m;
        const int at = threadIdx.x % TOGETHER, part = threadIdx.x / TOGETHER % UNITS;
        n = threadIdx.x / (TOGETHER * UNITS);
        w_to = UNITS * X_BYTES + part * W_BYTES + (PLAIN ? (at * BN + place(n, part, at)) * 16 : 0);
#pragma unroll
        for (int i = 0; i < W_COPIES; i++) run[i] = weight_row(n + i * W_ROWS) * RUNS + part;
    }

    // The columns of a step; rows of x that are not there become zeros.
    __device__ __forceinline__ void copy(unsigned stage, int step) const {
#pragma unroll
        for (int i = 0; i < X_COPIES; i++) {
            if (BM % X_ROWS && threadIdx.x / (8 * UNITS) + i * X_ROWS >= BM) break;
            const __half *from = x + (size_t)i * X_ROWS * COLUMNS + step * UNITS * RUN;
            copy_async_or_zero(stage + x_to + i * X_ROWS * 128, from, rows > i * X_ROWS);
        }
#pragma unroll
        for (int i = 0; i < W_COPIES; i++) {
            if (BN % W_ROWS && n + i * W_ROWS >= BN) break;
            const int own = run[i] + step * UNITS, lane = own & 31;
            const unsigned char *from = (GATED && (n + i * W_ROWS & 8) ? w2 : w) + (size_t)(own >> 5) * SEGMENT_BYTES;
            if constexpr (PLAIN) copy_async<16>(stage + w_to + i * W_ROWS * 16, from + piece(0).stride * lane + 16 * (threadIdx.x % TOGETHER));
            else copy_pieces<0>(stage + w_to, from, lane, n + i * W_ROWS, threadIdx.x % UNITS);
        }
    }

    template <int AT> static __device__ __forceinline__ void copy_pieces(unsigned to, const unsigned char *from, int lane, int n, int unit) {
        if constexpr (AT < PIECES) {
            constexpr Piece p = piece(AT);
            copy_async<p.bytes>(to + piece_offset(AT, BN) + place(n, unit, AT) * p.bytes, from + p.base + p.stride * (lane >> p.shift));
            copy_pieces<AT + 1>(to, from, lane, n, unit);
        }
    }
};

// The fragments of row n of the tile, word t of each set.
static __device__ __forceinline__ void weights(unsigned tile, int n, int unit, int run, int t, unsigned (&b)[4][2]) {
    if constexpr (KIND == KIND_F32) {
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint4 v = lds128(tile + ((4 * s + t) * BN + place(n, unit, 4 * s + t)) * 16);
            b[s][0] = plain_pair(__uint_as_float(v.x), __uint_as_float(v.y));
            b[s][1] = plain_pair(__uint_as_float(v.z), __uint_as_float(v.w));
        }
    } else if constexpr (PLAIN) {
#pragma unroll
        for (int s = 0; s < 4; s++) {
            int at = 2 * s + (t >> 1);
            uint2 v = lds64(tile + (at * BN + place(n, unit, at)) * 16 + 8 * (t & 1));
            b[s][0] = plain_pair(v.x), b[s][1] = plain_pair(v.y);
        }
    } else {
        int row = place(n, unit, 0), lane = weight_row(n) * RUNS + run & 31;
        unsigned plane[PLANES];
#pragma unroll
        for (int p = 0; p < PLANES; p++) plane[p] = lds32(tile + (p * BN + row) * 16 + 4 * t);
        Head head;
        constexpr int FIRST = piece_offset(PLANES, BN), SECOND = piece_offset(PIECES - 1, BN);
        if constexpr (KIND == KIND_Q4_K || KIND == KIND_Q5_K) head.k = lds128(tile + SECOND + row * 16);
        else head.scales = lds32(tile + FIRST + row * 4);
        if constexpr (KIND == KIND_Q5_K) head.fifth = lds64(tile + FIRST + row * 8);
        if constexpr (KIND == KIND_Q6_K) head.d = lds32(tile + SECOND + row * 4);
        expand(plane, head, scales_of(head, lane), t, b);
    }
}

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
                load_matrices<false>(a[i][s], stage + unit * X_BYTES + (m + 16 * i) * 128 + ((2 * s + lane / 16) ^ lane % 8) * 16);
#pragma unroll
        for (int j = 0; j < NI; j++) {
            unsigned b[4][2];
            weights(stage + UNITS * X_BYTES + unit * W_BYTES, n + 8 * j, unit, step * UNITS + unit, t, b);
#pragma unroll
            for (int s = 0; s < 4; s++)
#pragma unroll
                for (int i = 0; i < MI; i++) mma(sum[i][j], a[i][s], b[s][0], b[s][1]);
        }
    }
}

// Adds the sums of the blocks that share this tile; true in the one that arrives last, which has them all.
static __device__ __forceinline__ bool join(float (&sum)[MI][NI][4], float *partial, unsigned *arrived) {
    __shared__ unsigned order;
    const int tile = blockIdx.y * gridDim.x + blockIdx.x;
    float4 *mine = reinterpret_cast<float4 *>(partial) + (size_t)tile * SPLITS * (BM * BN / 4) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < MI; i++)
#pragma unroll
        for (int j = 0; j < NI; j++)
            __stcg(mine + (blockIdx.z * MI * NI + i * NI + j) * THREADS, make_float4(sum[i][j][0], sum[i][j][1], sum[i][j][2], sum[i][j][3]));
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) order = atomicAdd(arrived + tile, 1);
    __syncthreads();
    if (order != SPLITS - 1) return false;
    __threadfence();
    if (threadIdx.x == 0) arrived[tile] = 0;
#pragma unroll
    for (int i = 0; i < MI; i++)
#pragma unroll
        for (int j = 0; j < NI; j++) {
            float4 total = make_float4(0, 0, 0, 0);
            for (int z = 0; z < SPLITS; z++) {
                float4 part = __ldcg(mine + (z * MI * NI + i * NI + j) * THREADS);
                total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
            }
            sum[i][j][0] = total.x, sum[i][j][1] = total.y, sum[i][j][2] = total.z, sum[i][j][3] = total.w;
        }
    return true;
}

static __device__ __forceinline__ void store(void *y, int token, int row, float a, float b) {
    size_t at = (size_t)token * STRIDE + row;
    if constexpr (HALF_OUT) {
        *reinterpret_cast<__half2 *>(static_cast<__half *>(y) + (size_t)token * STRIDE + fragment_order(row)) = __floats2half2_rn(a, b);
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

static __device__ __forceinline__ float biased(const float *bias, int row) { return BIAS ? bias[min(row, (GATED ? 2 : 1) * ROWS - 1)] : 0; }

static __device__ __forceinline__ void finish(float (&sum)[MI][NI][4], void *y, const float *bias, int first, int tokens) {
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
                    if constexpr (GATED) value[e] *= sum[i][j + STEP - 1][2 * h + e] * UNSCALE + biased(bias, ROWS + row + e);
                }
                store(y, token, row, value[0], value[1]);
            }
}

// y: floats, or halves in the order of fragments (tokens, ROWS of STRIDE); x: halves in that order (tokens, COLUMNS); partial: floats (tiles, SPLITS, BM * BN) and arrived: zeros (tiles), where SPLITS > 1;
// count: the number of tokens, at most the grid's; bias: floats (ROWS), of gate and up (2, ROWS) where GATED.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gemm(
    void *y, const __half *x, const unsigned char *w, const unsigned char *w2, const float *bias, float *partial,
    unsigned *arrived, const int *count
) {
    extern __shared__ __align__(128) unsigned char memory[];
    const int tokens = *count, first = blockIdx.x * BM;
    if (first >= tokens) return;
    const int begin = STEPS * blockIdx.z / SPLITS, end = STEPS * (blockIdx.z + 1) / SPLITS;
    const unsigned stages = shared_address(memory);
    const Copier copier(x, w, w2, first, tokens);
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
        if (!join(sum, partial, arrived)) return;
    }
    finish(sum, y, bias, first, tokens);
}
