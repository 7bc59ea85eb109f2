// y[tokens, ROWS] = x[tokens, COLUMNS] W^T for up to 8 NB tokens and rows of whole segments: x stays in registers, and
// W streams by.
//
// Eight warps share a segment of 2048 columns: each keeps the fragments of x for its 256 of them. The bytes of a set of
// 16 rows (8 of gate and 8 of up) come to shared memory as they lie in memory, STAGES - 1 sets ahead; each warp makes
// fragments of its part of them, and hands its sums to those who add up all eight. There is one barrier a set: after
// it the set's bytes are there, those of the set before it are used up, and the sums of that one are there.
//
// KIND, ROWS, COLUMNS, GATED, ACTIVATION, HALF_OUT, ADD, BIAS, STRIDE: as gemm.cu. NB, MOST: as small_m.cuh. STAGES;
// RESIDENT; SUM_PARTS. Blocks of other segments of the same rows write sums, which the last of them adds, in order.
// Grid: (blocks that share all sets, COLUMNS / 2048). Block: 256 threads.
constexpr int THREADS = 256, WARPS = 8;
#include "small_m.cuh"

constexpr int SEGMENTS = RUNS / 32, CHUNKS = SEGMENT_BYTES / 16;
constexpr int SETS = (ROWS * (GATED ? 2 : 1) + 15) / 16;
// Lanes of neighbouring rows, four apart, load from different banks.
constexpr int ROW_STRIDE = (SEGMENT_BYTES + 111) / 128 * 128 + 16;
constexpr int STAGE_BYTES = 16 * ROW_STRIDE, RING_BYTES = STAGES * STAGE_BYTES;
// x comes through the ring, as many blocks of eight tokens at a time as it holds.
constexpr bool WHOLE = WARPS * NB * 4096 <= RING_BYTES, HALVES = NB % 2 == 0 && WARPS * NB * 2048 <= RING_BYTES;
constexpr int AT_ONCE = WHOLE ? NB : HALVES ? NB / 2 : 1;
constexpr int X_BYTES = WARPS * AT_ONCE * 4096, SPARE = (RING_BYTES - X_BYTES) / STAGE_BYTES;
constexpr int EARLY_SETS = SPARE < STAGES - 1 ? SPARE : STAGES - 1;  // that come beside x, which leaves room for them
constexpr int SUMS = WARPS * NB * 32;                                // quads of a set
static_assert(RUNS % 32 == 0, "rows are whole segments");
static_assert(ROW_STRIDE % 128 == 16 && X_BYTES <= RING_BYTES && STAGES >= 2, "a ring holds a block of x");

// The row of a tile that fragments take for row g.
static __device__ __forceinline__ int spread(int g) { return g >> 1 | (g & 1) << 2; }

// A warp copies two rows of a set.
static __device__ __forceinline__ void copy_set(unsigned to, const unsigned char *w, const unsigned char *w2, int set) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned char *matrix = GATED && warp >= 4 ? w2 : w;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int own = 2 * warp + i, row = min(GATED ? 8 * set + own % 8 : 16 * set + own, ROWS - 1);
        const unsigned char *from = matrix + ((size_t)row * SEGMENTS + blockIdx.y) * SEGMENT_BYTES + 16 * lane;
#pragma unroll
        for (int j = 0; j < CHUNKS; j += 32)
            if (j + 32 <= CHUNKS || lane < CHUNKS - j)
                copy_async<16>(to + own * ROW_STRIDE + 16 * lane + 16 * j, from + 16 * j);
    }
}

// Products follow each other only by their sums: of few tokens there are several sums, SUM_PARTS (1, 2 or 4), which are
// added up at the end.
static __device__ __forceinline__ void multiply(float (&sum)[SUM_PARTS][NB][4], const uint4 (&x)[NB][8],
                                                unsigned stage) {
    const int lane = threadIdx.x % 32, place = 4 * (threadIdx.x / 32) + lane % 4;
    Row<16> row[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const unsigned at = stage + (spread(lane / 4) + 8 * r) * ROW_STRIDE;
        const auto where = [&](int which) {
            return at + piece(which).base + piece(which).stride * (place >> piece(which).shift);
        };
        row[r].load(at + piece(0).stride * place, where, place);
    }
#pragma unroll
    for (int s = 0; s < 4; s++) {
        unsigned a[2][2][4];
        operands(row, s, a);
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int b = 0; b < NB; b++) {
                    const uint4 &v = x[b][2 * s + odd];
                    mma(sum[(2 * odd + half) % SUM_PARTS][b], a[odd][half], half ? v.z : v.x, half ? v.w : v.y);
                }
    }
#pragma unroll
    for (int part = 1; part < SUM_PARTS; part++)
#pragma unroll
        for (int b = 0; b < NB; b++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[0][b][e] += sum[part][b][e];
}

static __device__ __forceinline__ Quad quad_of(int set, int b) {
    const int lane = threadIdx.x % 32;
    return {8 * b + 2 * (lane % 4), (GATED ? 8 : 16) * set + spread(lane / 4)};
}

// Add up the warps' sums of a set, by NB warps in turn; keep them for the last block, or end them.
static __device__ __forceinline__ void end_set(const float4 *sums, int set, int turn, void *y, const float *bias,
                                               float4 *partial, int tokens) {
    const int b = (threadIdx.x / 32 + WARPS - turn * NB % WARPS) % WARPS, lane = threadIdx.x % 32;
    if (b >= NB) return;
    const Quad quad = quad_of(set, b);
    float old[4];
    if constexpr (SEGMENTS == 1) quad.load(y, tokens, old);
    float4 sum = sums[b * 32 + lane];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) add(sum, sums[(warp * NB + b) * 32 + lane]);
    if constexpr (SEGMENTS > 1) __stcg(partial + ((set * SEGMENTS + blockIdx.y) * NB + b) * 32 + lane, sum);
    else quad.store(y, bias, tokens, sum, old);
}

// The blocks of all segments have written the sums of their sets: the last one adds them, of JOINED quads at a time, so
// that a warp does not wait for memory once for each.
constexpr int JOINED = SEGMENTS < 16 ? 16 / SEGMENTS : 1;
static __device__ __forceinline__ void join_segments(void *y, const float *bias, const float4 *partial,
                                                     unsigned *arrived, int tokens) {
    if (!last_arriving_block(arrived + blockIdx.x, SEGMENTS)) return;
    const int lane = threadIdx.x % 32, quads = (SETS - blockIdx.x + gridDim.x - 1) / gridDim.x * NB;
    const auto set_of = [&](int at) { return blockIdx.x + at / NB * gridDim.x; };
#pragma unroll 1
    for (int first = threadIdx.x / 32; first < quads; first += WARPS * JOINED) {
        float old[JOINED][4];
        float4 part[JOINED][SEGMENTS];  // all on their way at once
#pragma unroll
        for (int i = 0; i < JOINED; i++) {
            const int at = min(first + WARPS * i, quads - 1);
            quad_of(set_of(at), at % NB).load(y, tokens, old[i]);
#pragma unroll
            for (int z = 0; z < SEGMENTS; z++)
                part[i][z] = __ldcg(partial + ((set_of(at) * SEGMENTS + z) * NB + at % NB) * 32 + lane);
        }
#pragma unroll
        for (int i = 0; i < JOINED; i++) {
            const int at = first + WARPS * i;
            if (at >= quads) break;
#pragma unroll
            for (int z = 1; z < SEGMENTS; z++) add(part[i][0], part[i][z]);
            quad_of(set_of(at), at % NB).store(y, bias, tokens, part[i][0], old[i]);
        }
    }
}

// y: floats, or halves in the order of fragments (tokens, ROWS of STRIDE); x: halves in that order (MOST, COLUMNS);
// partial: floats (sets, SEGMENTS, 16 N) and arrived: zeros (blocks), where SEGMENTS > 1; count: the number of tokens,
// at most N.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gemm_stream(
    void *y, const __half *x, const unsigned char *w, const unsigned char *w2, const float *bias, float4 *partial,
    unsigned *arrived, const int *count
) {
    extern __shared__ __align__(128) unsigned char memory[];
    allow_next();
    const unsigned ring = shared_address(memory), staged = ring + RING_BYTES - X_BYTES;
    float4 *const sums = reinterpret_cast<float4 *>(memory + RING_BYTES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    int coming = blockIdx.x;
    unsigned to = ring;
    auto ahead = [&] {
        if (coming < SETS) copy_set(to, w, w2, coming);
        commit_copies();
        coming += gridDim.x;
        to = to + STAGE_BYTES == ring + RING_BYTES ? ring : to + STAGE_BYTES;
    };
    constexpr bool EARLY = OVERLAP != 0;  // nobody writes weights: they are asked for before the wait
    if (EARLY)
#pragma unroll 1
        for (int i = 0; i < EARLY_SETS; i++) ahead();
    await_previous();
    uint4 held[NB][8];
#pragma unroll
    for (int first = 0; first < NB; first += AT_ONCE) {
        if (first) __syncthreads();
        copy_x<WARPS, AT_ONCE>(staged, x, WARPS * blockIdx.y, WARPS * (blockIdx.y + 1), first);
        commit_copies();
        if (!EARLY && !first)
#pragma unroll 1
            for (int i = 0; i < EARLY_SETS; i++) ahead();
        if (EARLY || first) wait_copies<0>();
        else wait_copies<EARLY_SETS>();
        __syncthreads();
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++)
#pragma unroll
            for (int c = 0; c < 8; c++) held[first + b][c] = x_chunk(staged + warp * AT_ONCE * 4096, b, c);
    }
    const int tokens = min(*count, N);
    __syncthreads();
#pragma unroll 1
    for (int i = EARLY_SETS; i < STAGES - 1; i++) ahead();

    unsigned now = ring;
    for (int set = blockIdx.x, turn = 0;; set += gridDim.x, turn++) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        ahead();
        if (turn) end_set(sums + (turn - 1) % 2 * SUMS, set - gridDim.x, turn - 1, y, bias, partial, tokens);
        if (set >= SETS) break;
        float sum[SUM_PARTS][NB][4] = {};
        multiply(sum, held, now);
#pragma unroll
        for (int b = 0; b < NB; b++)
            sums[turn % 2 * SUMS + (warp * NB + b) * 32 + lane] =
                make_float4(sum[0][b][0], sum[0][b][1], sum[0][b][2], sum[0][b][3]);
        now = now + STAGE_BYTES == ring + RING_BYTES ? ring : now + STAGE_BYTES;
    }
    wait_copies<0>();
    if constexpr (SEGMENTS > 1) join_segments(y, bias, partial, arrived, tokens);
}
