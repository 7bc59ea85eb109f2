// y[tokens, ROWS] = x[tokens, COLUMNS] W^T for up to 8 NB tokens, as in a decode step of many sequences: W is read
// once.
//
// The packed weights go from memory to registers and become the left operand there: a lane loads runs of 64 weights of
// its rows by 16 bytes, and a step of 256 columns gives the four threads of a group a run each. Which columns a product
// of mma takes does not matter as long as x agrees; x lies in shared memory by 16-byte chunks in the order of its use.
//
// KIND, ROWS, COLUMNS, GATED, ACTIVATION, HALF_OUT, ADD, BIAS, STRIDE: as gemm.cu. NB; MT: tiles of 16 rows of a warp;
// WARPS_M times WARPS_K warps, which share the rows and the columns of a block; STAGES of x; RESIDENT.
// Grid: rows of W and W2 / (16 MT WARPS_M), rounded up. Block: all warps.
#include "fragments.cuh"
#include "activation.cuh"
#include "overlap.cuh"

constexpr int RUNS = COLUMNS / RUN, GROUPS = (RUNS + 3) / 4, STEPS = (GROUPS + WARPS_K - 1) / WARPS_K;
constexpr int THREADS = 32 * WARPS_M * WARPS_K, M = 16 * MT * WARPS_M, N = 8 * NB, OUT = GATED ? M / 2 : M;
constexpr int GROUP_BYTES = NB * 8 * 512, STAGE_BYTES = WARPS_K * GROUP_BYTES;
constexpr int SUM_STRIDE = M + 4;  // lanes of a warp store to different banks
constexpr int PARTS = PLAIN ? 2 : 1;  // of a run: registers hold 32 weights of a plain row at a time
constexpr int HELD = KIND == KIND_F32 ? 8 : PLAIN ? 4 : PLANES;
constexpr bool AHEAD = KIND != KIND_F32;
static_assert(!HALF_OUT || ROWS % 16 == 0, "halves are ordered within 16");
static_assert(COLUMNS % RUN == 0 && STAGES >= 2 && 8 % WARPS_M == 0, "columns are whole runs");

static __device__ __forceinline__ uint4 stream128(const unsigned char *at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// What a lane has of its rows for one step: of each tile rows g and g + 8, or row g of gate and of up.
struct Weights {
    uint4 part[MT][2][HELD];
    Head head[MT][2];
};

static __device__ __forceinline__ int weight_row(int first, int tile, int second) {
    int row = GATED ? (first + 16 * tile) / 2 : first + 16 * tile + 8 * second;
    return min(row + (int)threadIdx.x % 32 / 4, ROWS - 1);
}

static __device__ __forceinline__ const unsigned char *piece_at(const unsigned char *segment, int at, int lane) {
    return segment + piece(at).base + piece(at).stride * (lane >> piece(at).shift);
}

// first: the warp's first row of the tile, of gate and up together where GATED.
static __device__ __forceinline__ void load(Weights &held, const unsigned char *w, const unsigned char *w2, int first,
                                            int group, int part) {
    const int own = min(4 * group + (int)threadIdx.x % 4, RUNS - 1);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int run = weight_row(first, i, r) * RUNS + own, lane = run & 31;
            const unsigned char *segment = (GATED && r ? w2 : w) + (size_t)(run >> 5) * SEGMENT_BYTES;
            if constexpr (PLAIN) {
#pragma unroll
                for (int c = 0; c < HELD; c++)
                    held.part[i][r][c] = stream128(segment + piece(0).stride * lane + 16 * (HELD * part + c));
            } else {
#pragma unroll
                for (int p = 0; p < PLANES; p++) held.part[i][r][p] = stream128(piece_at(segment, p, lane));
                Head &head = held.head[i][r];
                if constexpr (KIND == KIND_Q4_K || KIND == KIND_Q5_K)
                    head.k = *reinterpret_cast<const uint4 *>(piece_at(segment, PIECES - 1, lane));
                else head.scales = *reinterpret_cast<const unsigned *>(piece_at(segment, PLANES, lane));
                if constexpr (KIND == KIND_Q5_K)
                    head.fifth = *reinterpret_cast<const uint2 *>(piece_at(segment, PLANES, lane));
                if constexpr (KIND == KIND_Q6_K)
                    head.d = *reinterpret_cast<const unsigned *>(piece_at(segment, PIECES - 1, lane));
            }
        }
}

static __device__ __forceinline__ unsigned component(const uint4 &v, int at) {
    return at == 0 ? v.x : at == 1 ? v.y : at == 2 ? v.z : v.w;
}

// The sixteen weights of set s of a row as pairs: out[w] are those of word w. Of a plain run, set s of part p is
// 4p + s.
static __device__ __forceinline__ void row_set(const Weights &held, int i, int r, const Scales &scales, int s,
                                               unsigned (&out)[4][2]) {
    const uint4 *part = held.part[i][r];
    if constexpr (KIND == KIND_F32) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const uint4 v = part[4 * s + w];
            out[w][0] = plain_pair(__uint_as_float(v.x), __uint_as_float(v.y));
            out[w][1] = plain_pair(__uint_as_float(v.z), __uint_as_float(v.w));
        }
    } else if constexpr (PLAIN) {
#pragma unroll
        for (int e = 0; e < 8; e++) out[e / 2][e % 2] = plain_pair(component(part[2 * s + e / 4], e % 4));
    } else {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            unsigned plane[PLANES];
#pragma unroll
            for (int p = 0; p < PLANES; p++) plane[p] = component(part[p], w);
            expand_set(plane, held.head[i][r], scales, w, s, out[w]);
        }
    }
}

// x of a step: 16-byte chunk c of run t of token 8b + g lies at slot (4g + t) ^ c of row c of block b of its group.
static __device__ __forceinline__ void copy_x(unsigned stage, const __half *x, int tokens, int step) {
    // This thread's chunks are those of tokens WARPS_M apart; all that depends on the thread is in these four.
    const int c = threadIdx.x % 8, t = threadIdx.x / 8 % 4;
    const int k = threadIdx.x / 32 % WARPS_K, first = threadIdx.x / 32 / WARPS_K;
    const int run = 4 * (step * WARPS_K + k) + t, left = run < RUNS ? tokens - first : 0;
    const __half *from = x + (size_t)first * COLUMNS + run * RUN + 8 * c;
    stage += k * GROUP_BYTES + c * 512 + first / 2 * 128;
#pragma unroll
    for (int i = 0; i < N; i += WARPS_M) {
        const int parity = WARPS_M == 1 ? i % 2 : first % 2;
        const unsigned slot = ((parity * 4 + t) ^ c) * 16;
        copy_async_or_zero(stage + slot + i / 8 * 4096 + i % 8 / 2 * 128, from + (size_t)i * COLUMNS, left > i);
    }
}

static __device__ __forceinline__ void multiply(float (&sum)[MT][NB][4], const Weights &held, int first, unsigned x,
                                                int group, int part) {
    const int lane = threadIdx.x % 32;
    Scales scales[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int own = min(4 * group + lane % 4, RUNS - 1);
            if constexpr (!PLAIN) scales[i][r] = scales_of(held.head[i][r], weight_row(first, i, r) * RUNS + own & 31);
        }
#pragma unroll
    for (int s = 0; s < 4 / PARTS; s++) {
        unsigned a[MT][2][2][4];  // of the chunk of even pairs and that of odd ones, two products each
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                unsigned words[4][2];
                row_set(held, i, r, scales[i][r], s, words);
#pragma unroll
                for (int w = 0; w < 4; w++)
#pragma unroll
                    for (int odd = 0; odd < 2; odd++) a[i][odd][w / 2][2 * (w % 2) + r] = words[w][odd];
            }
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
#pragma unroll
            for (int b = 0; b < NB; b++) {
                const int c = 2 * (4 / PARTS * part + s) + odd;
                uint4 v = lds128(x + (8 * b + c) * 512 + (lane ^ c) * 16);
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    mma(sum[i][b], a[i][odd][0], v.x, v.y);
                    mma(sum[i][b], a[i][odd][1], v.z, v.w);
                }
            }
    }
}

static __device__ __forceinline__ void store(void *y, int token, int row, float value) {
    size_t at = (size_t)token * STRIDE + (HALF_OUT ? fragment_order(row) : row);
    if constexpr (HALF_OUT) static_cast<__half *>(y)[at] = __float2half(fitting(value));
    else static_cast<float *>(y)[at] = ADD ? static_cast<float *>(y)[at] + value : value;
}

// Sums of the warps that share columns, and what follows the product.
static __device__ __forceinline__ void finish(float (&sum)[MT][NB][4], float *shared, void *y, const float *bias,
                                              int tokens) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float *mine = shared + warp / WARPS_M * N * SUM_STRIDE + warp % WARPS_M * 16 * MT;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int b = 0; b < NB; b++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                mine[(8 * b + 2 * t + e % 2) * SUM_STRIDE + 16 * i + g + 8 * (e / 2)] = sum[i][b][e];
    __syncthreads();
    for (int at = threadIdx.x; at < tokens * OUT; at += THREADS) {
        int token = at / OUT, j = at % OUT, row = blockIdx.x * OUT + j;
        if (row >= ROWS) continue;
        const float *from = shared + token * SUM_STRIDE + (GATED ? j / 8 * 16 + j % 8 : j);
        float value = 0, up = 0;
#pragma unroll
        for (int k = 0; k < WARPS_K; k++) {
            value += from[k * N * SUM_STRIDE];
            if (GATED) up += from[k * N * SUM_STRIDE + 8];
        }
        value = activate(value * UNSCALE + (BIAS ? bias[row] : 0));
        if (GATED) value *= up * UNSCALE + (BIAS ? bias[ROWS + row] : 0);
        store(y, token, row, value);
    }
}

// y: floats, or halves in the order of fragments (tokens, ROWS of STRIDE); x: halves in that order (tokens, COLUMNS);
// count: the number of tokens, at most N.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gemm_few(
    void *y, const __half *x, const unsigned char *w, const unsigned char *w2, const float *bias, const int *count
) {
    extern __shared__ __align__(128) unsigned char memory[];
    allow_next();
    const int warp = threadIdx.x / 32, k = warp / WARPS_M;
    const int first = blockIdx.x * M + warp % WARPS_M * 16 * MT;
    const unsigned stages = shared_address(memory);
    Weights held;
    load(held, w, w2, first, k, 0);  // nobody writes weights: they are asked for before the wait
    await_previous();
    const int tokens = min(*count, N);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < STEPS) copy_x(stages + i * STAGE_BYTES, x, tokens, i);
        commit_copies();
    }
    float sum[MT][NB][4] = {};
    for (int step = 0; step < STEPS; step++) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < STEPS)
            copy_x(stages + (step + STAGES - 1) % STAGES * STAGE_BYTES, x, tokens, step + STAGES - 1);
        commit_copies();
        const int group = step * WARPS_K + k;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            Weights next;
            const int later = part + 1 < PARTS ? group : group + WARPS_K;
            if (AHEAD && later < GROUPS) load(next, w, w2, first, later, (part + 1) % PARTS);
            if (group < GROUPS)
                multiply(sum, held, first, stages + step % STAGES * STAGE_BYTES + k * GROUP_BYTES, group, part);
            if (!AHEAD && later < GROUPS) load(next, w, w2, first, later, (part + 1) % PARTS);
            held = next;
        }
    }
    wait_copies<0>();
    finish(sum, reinterpret_cast<float *>(memory), y, bias, tokens);
}
