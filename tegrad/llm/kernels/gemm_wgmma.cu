// gemm.cu's product by Hopper's asynchronous tensor cores, for sm_90a: gemm.cu is its reference.
//
// The operands change sides: packed weights become the left one in registers, 16 rows a warp, and the tile of x, which
// lies swizzled by 128 bytes as it is, the right one in shared memory. A warpgroup computes 64 rows of W times BM
// tokens. While the tensor cores run a step's product, its warpgroup makes the fragments of the next step.
//
// Blocks share the stages of columns of all tiles evenly: a block's are those of neighbouring tiles, the first and the
// last of which it may have in part. Of a tile in parts the last block to finish adds the sums, in order.
//
// Macros as gemm.cu's, without WM, WN and SPLITS; BM: 32, 64, 128 or 256; BN: a multiple of 64, a warpgroup each;
// ACROSS: tiles of tokens; BLOCKS: one for each tile, or as many as share them. Grid: BLOCKS. Block: BN / 64
// warpgroups.
constexpr int THREADS = BN / 64 * 128;
#include "gemm_tile.cuh"
#include "wgmma.cuh"

constexpr int STAGE_BYTES = (UNITS * (X_BYTES + W_BYTES) + 1023) / 1024 * 1024;
constexpr int FILLED = STAGES - 1;  // stages that are there or on their way when the first product begins
constexpr int DOWN = (ROWS * (GATED ? 2 : 1) + BN - 1) / BN, TILES = ACROSS * DOWN;
constexpr unsigned WORK = TILES * STEPS;
static_assert(FILLED > 1, "a stage to fill besides those in use: of x in a product, of weights for the next one");
static_assert(BLOCKS <= WORK, "each block has a stage");
static_assert(BN % 64 == 0 && X_BYTES % 1024 == 0, "whole warpgroups, and swizzled rows in their place");

// A step's weights as left operands, of four sets a unit.
typedef unsigned Fragments[4 * UNITS][4];

// Of row n of this warp's rows g and g + 8, word t of each set.
static __device__ __forceinline__ void make(Fragments &made, unsigned stage, int down, int step) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n = threadIdx.x / 32 * 16 + g;
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
        unsigned low[4][2], high[4][2];
        const unsigned tile = stage + UNITS * X_BYTES + unit * W_BYTES;
        weights(tile, down, n, unit, step * UNITS + unit, t, low);
        weights(tile, down, n + 8, unit, step * UNITS + unit, t, high);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            unsigned(&four)[4] = made[4 * unit + s];
            four[0] = low[s][0], four[1] = high[s][0], four[2] = low[s][1], four[3] = high[s][1];
        }
    }
}

// Begins to add a step's product.
static __device__ __forceinline__ void multiply(float (&sum)[BM / 2], Fragments &made, unsigned stage) {
    warpgroup_begin(sum, made);
#pragma unroll
    for (int s = 0; s < 4 * UNITS; s++)
        Product<BM>::run(sum, made[s], described(stage + s / 4 * X_BYTES + s % 4 * 32));
    warpgroup_commit();
}

// An element is added to once: without an answer, since a load that follows a store would wait for it.
static __device__ __forceinline__ void finish(float (&sum)[BM / 2], void *y, const float *bias, int down, int first,
                                              int tokens) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, tile = threadIdx.x / 32 * 16;
#pragma unroll
    for (int j = 0; j < BM / 8; j++)
#pragma unroll
        for (int h = 0; h < (GATED ? 1 : 2); h++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int token = first + 8 * j + 2 * t + e, row = (down * BN + tile) / (GATED ? 2 : 1) + g + 8 * h;
                if (token >= tokens || row >= ROWS) continue;
                float value = activate(sum[4 * j + 2 * h + e] * UNSCALE + biased(bias, row));
                if constexpr (GATED) value *= sum[4 * j + 2 + e] * UNSCALE + biased(bias, ROWS + row);
                size_t at = (size_t)token * STRIDE + (HALF_OUT ? fragment_order(row) : row);
                if constexpr (HALF_OUT) static_cast<__half *>(y)[at] = __float2half(value);
                else if constexpr (ADD) atomicAdd(static_cast<float *>(y) + at, value);
                else static_cast<float *>(y)[at] = value;
            }
}

// The first stage of a block, of those of all tiles in turn; and the block that has a stage.
static __device__ __forceinline__ unsigned begin_of(unsigned block) { return WORK * block / BLOCKS; }
static __device__ __forceinline__ unsigned block_of(unsigned stage) { return ((stage + 1) * BLOCKS - 1) / WORK; }

// Adds the sums of the blocks that share a tile; true in the one that arrives last, which has them all. A block keeps
// those of its first tile, and of its last; it is the first one of a single tile at most that has others, too.
template <int COUNT>
static __device__ __forceinline__ bool join(float (&sum)[COUNT], int tile, float *partial, unsigned *arrived) {
    const unsigned first = block_of(tile * STEPS), last = block_of(tile * STEPS + STEPS - 1);
    const auto of = [=](unsigned block) {
        const unsigned part = 2 * block + (begin_of(block) / STEPS != tile);
        return reinterpret_cast<float4 *>(partial) + (size_t)part * (BM * BN / 4) + threadIdx.x;
    };
    store_part(sum, of(blockIdx.x));
    if (!last_arriving_block(arrived + first, last - first + 1)) return false;
    add_parts(sum, last - first + 1, [=](int z) { return of(first + z); });
    return true;
}

// Operands as gemm's; partial: floats (2 * BLOCKS, BM * BN), arrived: zeros (BLOCKS), where BLOCKS is not TILES.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gemm_wgmma(
    void *y, const __half *x, const unsigned char *w, const unsigned char *w2, const float *bias, float *partial,
    unsigned *arrived, const int *count
) {
    extern __shared__ __align__(128) unsigned char memory[];
    allow_next();
    await_previous();
    const int tokens = *count;
    const unsigned stages = (shared_address(memory) + 1023) & ~1023u;
    const auto next = [&](unsigned at) {
        return at == stages + (STAGES - 1) * STAGE_BYTES ? stages : at + STAGE_BYTES;
    };
    const int stop = begin_of(blockIdx.x + 1);
    int at = begin_of(blockIdx.x);
    do {
        const int tile = at / STEPS, first = tile % ACROSS * BM, down = tile / ACROSS;
        const int begin = at % STEPS, end = BLOCKS == TILES ? STEPS : min(STEPS, begin + stop - at);
        at += end - begin;
        if (first >= tokens) continue;
        if constexpr (BLOCKS != TILES) __syncthreads();  // all have read the tile before
        const Copier copier(x, w, w2, down, first, tokens);
        float sum[BM / 2] = {};
#pragma unroll
        for (int i = 0; i < FILLED; i++) {
            if (begin + i < end) copier.copy(stages + i * STAGE_BYTES, begin + i);
            commit_copies();
        }
        unsigned now = stages, free = stages + FILLED * STAGE_BYTES;
        Fragments made, ahead;
        wait_copies<FILLED - 1>();
        show_to_products();
        __syncthreads();
        make(made, now, down, begin);
        for (int step = begin;; now = next(now), free = next(free)) {
            multiply(sum, made, now);
            const bool more = step + 1 < end;
            if (more) {  // while that runs
                wait_copies<FILLED - 2>();
                show_to_products();
                __syncthreads();  // all have the next stage, and are done with the one before
                if (step + FILLED < end) copier.copy(free, step + FILLED);
                commit_copies();
                make(ahead, next(now), down, step + 1);
            }
            warpgroup_wait(sum);
            if (!more) break;
            step++;
#pragma unroll
            for (int i = 0; i < 16 * UNITS; i++) made[i / 4][i % 4] = ahead[i / 4][i % 4];
        }
        wait_copies<0>();
        if (BLOCKS != TILES && end - begin < STEPS && !join(sum, tile, partial, arrived)) continue;
        finish(sum, y, bias, down, first, tokens);
    } while (BLOCKS != TILES && at < stop);
}
