// y[tokens, ROWS] = x[tokens, COLUMNS] W^T for up to 8 NB tokens, as in a decode step of many sequences: W is read
// once, and x once by each block.
//
// A warp multiplies tiles of 16 MT rows, 256 columns a step: the weights are the left operand, and a step gives the
// four threads of a group a run of 64 weights each. Which columns a product of mma takes does not matter as long as x
// agrees. A lane copies the runs that it needs to shared memory by itself, STAGES - 1 steps ahead and from one tile to
// the next, so that no warp waits for another. x stays in shared memory.
//
// KIND, ROWS, COLUMNS, GATED, ACTIVATION, HALF_OUT, ADD, BIAS, STRIDE: as gemm.cu. NB, MOST: as small_m.cuh. MT;
// WARPS_M times WARPS_K warps, which share the rows and the columns of a set of tiles; SPLITS: blocks that share the
// columns of a set, of whom the last to finish adds their sums, in order; PHASES: parts in which x comes, where a block
// cannot hold all of its columns at once; RESIDENT. Grid: (sets, or fewer blocks that take several each; SPLITS).
// Block: all warps.
constexpr int THREADS = 32 * WARPS_M * WARPS_K, WARPS = WARPS_M * WARPS_K;
#include "small_m.cuh"

constexpr int GROUPS = (RUNS + 3) / 4;
constexpr int TILE = 16 * MT, SET = TILE * WARPS_M, SETS = (ROWS * (GATED ? 2 : 1) + SET - 1) / SET;
constexpr int SHARE = (GROUPS + SPLITS - 1) / SPLITS, STEPS = (SHARE + WARPS_K - 1) / WARPS_K;  // of a block, a warp
constexpr int PHASE_STEPS = (STEPS + PHASES - 1) / PHASES, HELD = PHASE_STEPS * WARPS_K;  // groups of x at a time
constexpr int GROUP_BYTES = NB * 8 * 512, X_BYTES = HELD * GROUP_BYTES;
constexpr int ROW_BYTES = piece_offset(PIECES, 32), STAGE_BYTES = MT * 2 * ROW_BYTES;  // of a warp's lanes
constexpr bool ALIGNED = RUNS % 32 == 0;  // every row begins with a segment
constexpr int QUADS = MT * NB;            // sums of a lane, by fours
static_assert(STAGES >= 2, "a stage is used while the next one comes");
static_assert((SPLITS - 1) * SHARE < GROUPS, "every block of a set has columns");

// A number of which the compiler knows nothing: then it adds constants in addresses, where they cost nothing.
static __device__ __forceinline__ unsigned opaque(unsigned value) {
    asm("" : "+r"(value));
    return value;
}

// Where a lane's weights of a tile begin: rows g and g + 8 of each 16, or row g of gate and of up.
struct Source {
    const unsigned char *row[MT][2];
    int run[MT][2];

    __device__ __forceinline__ Source(const unsigned char *w, const unsigned char *w2, int set) {
        const int lane = threadIdx.x % 32, first = set * SET + threadIdx.x / 32 % WARPS_M * TILE;
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int at = (GATED ? (first + 16 * i) / 2 : first + 16 * i + 8 * r) + lane / 4;
                run[i][r] = min(at, ROWS - 1) * RUNS;
                row[i][r] = GATED && r ? w2 : w;
                if (ALIGNED) row[i][r] += (size_t)(run[i][r] / 32) * SEGMENT_BYTES;
            }
    }

    // The run of a group that is this lane's, of the runs of a row.
    static __device__ __forceinline__ int own(int group) {
        const int run = 4 * group + (int)threadIdx.x % 4;
        return RUNS % 4 ? min(run, RUNS - 1) : run;
    }

    // Its place in its segment.
    __device__ __forceinline__ int place(int group, int i, int r) const {
        return (ALIGNED ? own(group) : run[i][r] + own(group)) & 31;
    }

    __device__ __forceinline__ void copy(unsigned stage, int group) const {
        const unsigned lane = threadIdx.x % 32, whole = stage + opaque(16 * lane);
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int from = (ALIGNED ? 0 : run[i][r]) + own(group), place = from & 31;
                // Of a matrix whose rows begin anywhere, which may be longer than 2 GiB.
                const unsigned char *segment = row[i][r] + (size_t)(from >> 5) * SEGMENT_BYTES;
                const unsigned char *begin = segment + (int)opaque(piece(0).stride * place);
                pieces<0>(whole, stage, segment, begin, place, (2 * i + r) * ROW_BYTES);
            }
    }

    // begin: where the lane's part of the first plane lies; whole: where it goes, and stage for lane 0.
    template <int AT>
    static __device__ __forceinline__ void pieces(unsigned whole, unsigned stage, const unsigned char *segment,
                                                  const unsigned char *begin, int place, unsigned to) {
        if constexpr (AT < PIECES) {
            constexpr Piece p = piece(AT);
            if constexpr (AT < PLANES)
                copy_async_near<p.bytes>(whole + to + piece_offset(AT, 32), begin + p.base);
            else
                copy_async_near<p.bytes>(stage + threadIdx.x % 32 * p.bytes + to + piece_offset(AT, 32),
                                         segment + p.base + p.stride * (place >> p.shift));
            pieces<AT + 1>(whole, stage, segment, begin, place, to);
        }
    }
};

static __device__ __forceinline__ void multiply(float (&sum)[MT][NB][4], const Source &source, unsigned stage,
                                                unsigned x, int group) {
    const int lane = threadIdx.x % 32;
    Row<512> row[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const unsigned at = stage + (2 * i + r) * ROW_BYTES;
            const auto where = [&](int which) { return at + piece_offset(which, 32) + piece(which).bytes * lane; };
            row[i][r].load(at + 16 * lane, where, source.place(group, i, r));
        }
#pragma unroll
    for (int s = 0; s < 4; s++) {
        unsigned a[MT][2][2][4];
#pragma unroll
        for (int i = 0; i < MT; i++) operands(row[i], s, a[i]);
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
#pragma unroll
            for (int b = 0; b < NB; b++) {
                const uint4 v = x_chunk(x, b, 2 * s + odd);
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    mma(sum[i][b], a[i][odd][0], v.x, v.y);
                    mma(sum[i][b], a[i][odd][1], v.z, v.w);
                }
            }
    }
}

// Whether this warp ends quad q: warps that share columns share the work after them.
static __device__ __forceinline__ bool ends(int q) { return q % WARPS_K == (int)threadIdx.x / 32 / WARPS_M; }

// The sums of the warps that share columns, into those that end them. room: WARPS_K * QUADS * WARPS_M * 32 quads.
static __device__ __forceinline__ void join_warps(float4 (&sum)[QUADS], float4 *room) {
    const int k = threadIdx.x / 32 / WARPS_M, lane = threadIdx.x % (32 * WARPS_M);
    __syncthreads();
#pragma unroll
    for (int q = 0; q < QUADS; q++)
        if (!ends(q)) room[(k * QUADS + q) * WARPS_M * 32 + lane] = sum[q];
    __syncthreads();
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        if (!ends(q)) continue;
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int other = 0; other < WARPS_K; other++) {
            const float4 part = other == k ? sum[q] : room[(other * QUADS + q) * WARPS_M * 32 + lane];
            add(total, part);
        }
        sum[q] = total;
    }
}

// The sums of the blocks that share a set's columns; true in the one that arrives last, which has them all.
static __device__ __forceinline__ bool join_blocks(float4 (&sum)[QUADS], float4 *partial, unsigned *arrived, int set) {
    constexpr int QUAD = WARPS_M * 32;
    partial += (size_t)set * SPLITS * QUADS * QUAD + threadIdx.x % QUAD;
#pragma unroll
    for (int q = 0; q < QUADS; q++)
        if (ends(q)) __stcg(partial + (blockIdx.y * QUADS + q) * QUAD, sum[q]);
    if (!last_arriving_block(arrived + set, SPLITS)) return false;
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        if (!ends(q)) continue;
        float4 part[SPLITS];  // all on their way at once
#pragma unroll
        for (int z = 0; z < SPLITS; z++) part[z] = __ldcg(partial + (z * QUADS + q) * QUAD);
        sum[q] = part[0];
#pragma unroll
        for (int z = 1; z < SPLITS; z++) add(sum[q], part[z]);
    }
    return true;
}

// What follows the product, for the quads that this warp ends.
static __device__ __forceinline__ void finish(const float4 (&sum)[QUADS], void *y, const float *bias, int set,
                                              int tokens) {
    const int lane = threadIdx.x % 32, first = set * SET + threadIdx.x / 32 % WARPS_M * TILE;
    float old[QUADS][4];
    auto quad = [&](int q) {
        const int i = q / NB;
        return Quad{8 * (q % NB) + 2 * (lane % 4), (GATED ? (first + 16 * i) / 2 : first + 16 * i) + lane / 4};
    };
#pragma unroll
    for (int q = 0; q < QUADS; q++)
        if (ends(q)) quad(q).load(y, tokens, old[q]);
#pragma unroll
    for (int q = 0; q < QUADS; q++)
        if (ends(q)) quad(q).store(y, bias, tokens, sum[q], old[q]);
}

// y: floats, or halves in the order of fragments (tokens, ROWS of STRIDE); x: halves in that order (MOST, COLUMNS);
// partial: floats (sets, SPLITS, SET * N) and arrived: zeros (sets), where SPLITS > 1; count: the number of tokens, at
// most N.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gemm_small_m(
    void *y, const __half *x, const unsigned char *w, const unsigned char *w2, const float *bias, float4 *partial,
    unsigned *arrived, const int *count
) {
    extern __shared__ __align__(128) unsigned char memory[];
    allow_next();
    const int warp = threadIdx.x / 32, k = warp / WARPS_M;
    const int begin = blockIdx.y * SHARE, end = min(begin + SHARE, GROUPS);
    const unsigned held = shared_address(memory), stages = held + X_BYTES + warp * STAGES * STAGE_BYTES;
    const unsigned wrap = stages + STAGES * STAGE_BYTES;

    int coming_set = blockIdx.x, coming = 0;
    unsigned to = stages;
    Source from(w, w2, coming_set);
    auto ahead = [&] {
        const int group = begin + coming * WARPS_K + k;
        if (coming_set < SETS && group < end) from.copy(to, group);
        commit_copies();
        to = to + STAGE_BYTES == wrap ? stages : to + STAGE_BYTES;
        if (++coming == STEPS) {
            coming = 0, coming_set += gridDim.x;
            from = Source(w, w2, coming_set);
        }
    };
    constexpr bool EARLY = OVERLAP != 0;  // nobody writes weights: they are asked for before the wait
    if (EARLY)
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) ahead();
    await_previous();
    copy_x<HELD, NB>(held, x, begin, end);
    commit_copies();
    if (!EARLY)
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) ahead();
    wait_copies<EARLY ? 0 : STAGES - 1>();
    __syncthreads();

    unsigned now = stages;
    for (int set = blockIdx.x; set < SETS; set += gridDim.x) {
        float sum[MT][NB][4] = {};
        const Source source(w, w2, set);
        for (int step = 0; step < STEPS; step++) {
            if (PHASES > 1 && step % PHASE_STEPS == 0 && (step || set != (int)blockIdx.x)) {
                __syncthreads();
                copy_x<HELD, NB>(held, x, begin + step * WARPS_K, end);
                commit_copies();
                wait_copies<0>();
                __syncthreads();
            }
            wait_copies<STAGES - 2>();  // a lane reads what it has copied itself
            ahead();
            const int group = begin + step * WARPS_K + k;
            if (group < end)
                multiply(sum, source, now, held + (step % PHASE_STEPS * WARPS_K + k) * GROUP_BYTES, group);
            now = now + STAGE_BYTES == wrap ? stages : now + STAGE_BYTES;
        }
        float4 quads[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const float(&one)[4] = sum[q / NB][q % NB];
            quads[q] = make_float4(one[0], one[1], one[2], one[3]);
        }
        if constexpr (WARPS_K > 1)
            join_warps(quads, reinterpret_cast<float4 *>(memory + X_BYTES + WARPS * STAGES * STAGE_BYTES));
        if (SPLITS == 1 || join_blocks(quads, partial, arrived, set)) finish(quads, y, bias, set, min(*count, N));
    }
    wait_copies<0>();
}
