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
// x comes through the ring, eight tokens after the others, in as many buffers as leave room for a set of weights.
constexpr int X_BYTES = WARPS * 4096, ROOM = (RING_BYTES - STAGE_BYTES) / X_BYTES;
constexpr int BUFFERS = ROOM < 1 ? 1 : ROOM < NB ? ROOM : NB, SPARE = (RING_BYTES - BUFFERS * X_BYTES) / STAGE_BYTES;
constexpr int EARLY_SETS = SPARE < STAGES - 1 ? SPARE : STAGES - 1;  // that come beside x, which leaves room for them
constexpr bool EARLY = OVERLAP != 0;  // nobody writes weights: they are asked for before the wait
constexpr int SUMS = WARPS * NB * 32;                                // quads of a set
constexpr bool CROSSED = INTEGERS == INTEGERS_NIBBLES;               // pairs of weights, and so of x
static_assert(RUNS % 32 == 0, "rows are whole segments");
static_assert(ROW_STRIDE % 128 == 16 && X_BYTES <= RING_BYTES && STAGES >= 2, "a ring holds a block of x");

// The row of a tile that fragments take for row g.
static __device__ __forceinline__ int spread(int g) { return g >> 1 | (g & 1) << 2; }

// A warp copies neighbouring rows of a set. Where this lane has its part of one of them; rows beyond the last are the
// last once more.
constexpr int ROWS_EACH = 16 / WARPS, ROW_BYTES = SEGMENTS * SEGMENT_BYTES;
constexpr bool WHOLE_SETS = ROWS % (GATED ? 8 : 16) == 0;
static __device__ __forceinline__ const unsigned char *row_of(const unsigned char *w, const unsigned char *w2, int set,
                                                              int i) {
    const int own = ROWS_EACH * (threadIdx.x / 32) + i, row = GATED ? 8 * set + own % 8 : 16 * set + own;
    return (GATED && own >= 8 ? w2 : w) + (size_t)min(row, ROWS - 1) * ROW_BYTES + blockIdx.y * SEGMENT_BYTES +
           16 * (threadIdx.x % 32);
}

static __device__ __forceinline__ void copy_row(unsigned to, const unsigned char *from) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < CHUNKS; j += 32)
        if (j + 32 <= CHUNKS || lane < CHUNKS - j) copy_async<16>(to + 16 * j, from + 16 * j);
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
        operands<CROSSED>(row, s, a);
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

// Pairs of neighbours in the chunks of even and of odd pairs as pairs of every other one.
static __device__ __forceinline__ void cross(unsigned &even, unsigned &odd) {
    const unsigned first = __byte_perm(even, odd, 0x5410);
    odd = __byte_perm(even, odd, 0x7632), even = first;
}
static __device__ __forceinline__ void cross(uint4 &even, uint4 &odd) {
    cross(even.x, odd.x), cross(even.y, odd.y), cross(even.z, odd.z), cross(even.w, odd.w);
}

static __device__ __forceinline__ void copy_tokens(unsigned staged, const __half *x, int b) {
    copy_x<WARPS, 1>(staged + b % BUFFERS * X_BYTES, x, WARPS * blockIdx.y, WARPS * (blockIdx.y + 1), b);
    commit_copies();
}

// Groups of copies that were asked for after tokens `b` when these are waited for.
static __host__ __device__ constexpr int after_tokens(int b) {
    const int later = b < NB - BUFFERS ? BUFFERS - 1 : NB - 1 - b;
    return later + (!EARLY && b < BUFFERS ? EARLY_SETS : 0);
}

// Fragments of x of tokens B and those after them.
template <int B>
static __device__ __forceinline__ void take_tokens(uint4 (&held)[NB][8], unsigned staged, const __half *x) {
    wait_copies<after_tokens(B)>();
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 8; c++)
        held[B][c] = x_chunk(staged + B % BUFFERS * X_BYTES + threadIdx.x / 32 * 4096, 0, c);
    if constexpr (CROSSED)
#pragma unroll
        for (int c = 0; c < 8; c += 2) cross(held[B][c], held[B][c + 1]);
    if constexpr (B + BUFFERS < NB) {
        __syncthreads();
        copy_tokens(staged, x, B + BUFFERS);
    }
    if constexpr (B + 1 < NB) take_tokens<B + 1>(held, staged, x);
}

static __device__ __forceinline__ Quad quad_of(int set, int b) {
    const int lane = threadIdx.x % 32;
    return {8 * b + 2 * (lane % 4), (GATED ? 8 : 16) * set + spread(lane / 4)};
}

// Add up the warps' sums of a set, by NB warps in turn; keep them for the last block, or end them.
static __device__ __forceinline__ void end_set(const float4 *sums, int set, unsigned turn, void *y, const float *bias,
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
    const unsigned ring = shared_address(memory), staged = ring + RING_BYTES - BUFFERS * X_BYTES;
    float4 *const sums = reinterpret_cast<float4 *>(memory + RING_BYTES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // Addresses move on before they are used: what a copy was given stays in its registers until it has read them.
    int coming = blockIdx.x - gridDim.x;
    const int stride = gridDim.x * (GATED ? 8 : 16) * ROW_BYTES;
    const unsigned own = ring + ROWS_EACH * warp * ROW_STRIDE + 16 * lane, last = own + RING_BYTES - STAGE_BYTES;
    unsigned to = last;
    const unsigned char *from[ROWS_EACH];
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) from[i] = row_of(w, w2, blockIdx.x, i) - stride;
    auto ahead = [&] {
        coming += gridDim.x;
        to = to == last ? own : to + STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < ROWS_EACH; i++) from[i] = WHOLE_SETS ? from[i] + stride : row_of(w, w2, coming, i);
        if (coming < SETS)
#pragma unroll
            for (int i = 0; i < ROWS_EACH; i++) copy_row(to + i * ROW_STRIDE, from[i]);
        commit_copies();
    };
    if (EARLY)
#pragma unroll 1
        for (int i = 0; i < EARLY_SETS; i++) ahead();
    await_previous();
    uint4 held[NB][8];
#pragma unroll
    for (int b = 0; b < BUFFERS; b++) copy_tokens(staged, x, b);
    if (!EARLY)
#pragma unroll 1
        for (int i = 0; i < EARLY_SETS; i++) ahead();
    take_tokens<0>(held, staged, x);
    const int tokens = min(*count, N);
    __syncthreads();
#pragma unroll 1
    for (int i = EARLY_SETS; i < STAGES - 1; i++) ahead();

    unsigned now = ring;
    unsigned turn = 0;
    for (int set = blockIdx.x;; set += gridDim.x, turn++) {
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
