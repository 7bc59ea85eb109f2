// flash.cu's attention by Hopper's asynchronous tensor cores, for sm_90a and a cache of halves: flash.cu is its
// reference.
//
// A warpgroup has 64 rows, and GROUPS of them share the tiles of keys and values that one more warpgroup copies; they
// wait for tiles, not for each other. While the tensor cores multiply one tile's weights with its values, a warpgroup
// makes the next tile's scores into weights.
//
// Macros as flash.cu's, without CACHE_Q8 and WARPS; GROUPS: warpgroups; HEAD_DIM: 64, 128 or 256; TILE: 64 or 128
// positions; DEPTH: tiles of one side that are there or on their way.
// Grid: (tokens * GROUP / rows, KV_HEADS), rounded up. Block: GROUPS + 1 warpgroups.
#define CONSUMERS (4 * GROUPS)
#define STAGE_BYTES (TILE * HEAD_DIM * 2)
constexpr int ROWS = GROUPS * 64, PRODUCERS = 128, THREADS = GROUPS * 128 + PRODUCERS;
#include "async.cuh"
#include "flash.cuh"
#include "overlap.cuh"
#include "sync.cuh"
#include "wgmma.cuh"

constexpr int QUERY_BYTES = ROWS * HEAD_DIM * 2;
// Registers of a thread: what all of them are launched with is dealt out anew.
constexpr int LAUNCHED = 65536 / THREADS / 8 * 8, COPYING = 40;
constexpr int LEFT = (LAUNCHED * (GROUPS + 1) - COPYING) / GROUPS / 8 * 8, COMPUTING = LEFT < 240 ? LEFT : 240;
constexpr int TOGETHER = 64;  // rows of a tile that follow each other: they lie in one block, or within a ring
static_assert(BLOCK_POSITIONS % TOGETHER == 0 && TILE % TOGETHER == 0, "whole parts");
static_assert(HEAD_DIM % 64 == 0, "whole rows of a swizzle");

// Where a chunk of eight halves lies in a matrix of `rows` rows of HEAD_DIM: columns of 64 side by side, each swizzled
// by 128 bytes.
static __device__ __forceinline__ unsigned swizzled(int rows, int row, int chunk) {
    return (chunk / 8 * rows + row) * 128 + ((chunk ^ row) & 7) * 16;
}

// The powers of two of what the scores are less the row's largest.
static __device__ __forceinline__ float power(float v) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}

// Copies rows [first, first + TILE) of one side of a KV head's cache; those from `end` on are zeros.
static __device__ __forceinline__ void copy_side(unsigned to, const __half *cache, [[maybe_unused]] const int *blocks,
                                                 int first, int end) {
    constexpr int CHUNKS = HEAD_DIM / 8, AT_ONCE = PRODUCERS / CHUNKS;  // rows
    const int row = threadIdx.x % PRODUCERS / CHUNKS, chunk = threadIdx.x % CHUNKS;
#pragma unroll
    for (int part = 0; part < TILE; part += TOGETHER) {
        int begin = first + part;
        const int there = end - begin;
#if WINDOW
        begin %= POSITIONS;
#elif BLOCK_POSITIONS
        if (there > 0)
            begin = blocks[begin / BLOCK_POSITIONS] * (KV_HEADS * BLOCK_POSITIONS) + begin % BLOCK_POSITIONS;
#endif
        const __half *from = cache + (size_t)begin * HEAD_DIM + 8 * chunk;
#pragma unroll 4  // more would take registers that the copying warpgroup has not
        for (int n = row; n < TOGETHER; n += AT_ONCE) {
            const unsigned at = to + swizzled(TILE, part + n, chunk);
            copy_async_or_zero(at, n < there ? from + n * HEAD_DIM : cache, n < there);
        }
    }
}

// Keys and values of tiles in turn; a tile is shown once the copies of the one after it have been asked for.
static __device__ __forceinline__ void produce(Pipeline &pipeline, unsigned stages, const __half *keys,
                                               const __half *values, const int *blocks, int first, int tiles, int end) {
    Turn now, landed;
    const auto show = [&] {
        show_to_products();
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&pipeline.full[landed.stage]);
        landed.advance();
    };
#pragma unroll 1
    for (int at = 2 * first; at < 2 * tiles; at++) {
        if (now.tile >= DEPTH) await_phase(&pipeline.empty[now.stage], now.odd ^ 1, FOR_STAGE, now.tile);
        copy_side(stages + now.stage * STAGE_BYTES, at % 2 ? values : keys, blocks, at / 2 * TILE, end);
        commit_copies();
        if (now.tile) wait_copies<1>(), show();
        now.advance();
    }
    wait_copies<0>();
    show();
}

// Of a thread's two rows: the largest score so far, and the sum of the weights of this thread's columns.
struct Softmax {
    float top[2] = {NONE, NONE}, sum[2] = {};

    // Makes scores into weights; what the rows' sums so far are multiplied by.
    __device__ __forceinline__ void take(float (&score)[TILE / 2], float scale, float (&shrink)[2]) {
        float best[2] = {top[0], top[1]}, least[2];
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) best[i >> 1 & 1] = fmaxf(best[i >> 1 & 1], score[i]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            best[h] = fmaxf(best[h], __shfl_xor_sync(0xffffffffu, best[h], 1));
            best[h] = fmaxf(best[h], __shfl_xor_sync(0xffffffffu, best[h], 2));
            least[h] = best[h] == NONE ? 0 : -scale * best[h];  // a row may see nothing of a window's first tile
            shrink[h] = power(fmaf(top[h], scale, least[h]));
            top[h] = best[h], sum[h] *= shrink[h];
        }
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            score[i] = power(fmaf(score[i], scale, least[i >> 1 & 1]));
            sum[i >> 1 & 1] += score[i];
        }
    }
};

// Weights as the left operand of each 16 positions.
static __device__ __forceinline__ void packed(const float (&weight)[TILE / 2], unsigned (&p)[TILE / 16][4]) {
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
#pragma unroll
        for (int r = 0; r < 4; r++) p[k][r] = pack(weight[8 * k + 2 * r], weight[8 * k + 2 * r + 1]);
}

// q: halves (tokens, HEADS, HEAD_DIM), rotated; out: the same, in the order of fragments (async.cuh). keys, values: the
// cache of one layer (slot, KV head, position, HEAD_DIM). The scales are flash.cu's, and not read. table: where
// BLOCK_POSITIONS, as attention.cu tells.
extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_wgmma(
    __half *out, const __half *q, const __half *keys, const __half *values, const __half *, const __half *,
    const Chunk *chunk
#if BLOCK_POSITIONS
    , const int *table
#endif
) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Pipeline pipeline;
    allow_next();
    await_previous();
    const int start = chunk->start, count = chunk->count, head = blockIdx.y;
    const int block = (gridDim.x - 1 - blockIdx.x) * ROWS;  // the longest rows first
    if (block >= count * GROUP) return;
#if BLOCK_POSITIONS
    const size_t base = (size_t)head * BLOCK_POSITIONS * HEAD_DIM;
    const int *blocks = table + (size_t)chunk->slot * TABLE_BLOCKS;
#else
    const size_t base = ((size_t)chunk->slot * KV_HEADS + head) * POSITIONS * HEAD_DIM;
    constexpr const int *blocks = nullptr;
#endif
    const Tiles seen(start, count, block);
    const unsigned queries = (shared_address(memory) + 1023) & ~1023u, stages = queries + QUERY_BYTES;
    if (threadIdx.x == 0) pipeline_init(pipeline, PRODUCERS / 32);
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING));
        produce(pipeline, stages, keys + base, values + base, blocks, seen.first, seen.last, seen.end);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTING));

    const auto row_at = [=](int row) {  // where a row lies in q and out
        row = min(row, count * GROUP - 1);
        return ((size_t)(row / GROUP) * HEADS + head * GROUP + row % GROUP) * HEAD_DIM;
    };
    const int own = warp / 4 * 64;  // the warpgroup's first row
#pragma unroll 4
    for (int i = threadIdx.x % 128; i < 64 * HEAD_DIM / 8; i += 128) {
        const int row = own + i / (HEAD_DIM / 8), at = i % (HEAD_DIM / 8);
        copy_async_or_zero(queries + swizzled(ROWS, row, at), q + row_at(block + row) + 8 * at, true);
    }
    commit_copies();
    wait_copies<0>();
    show_to_products();
    asm volatile("barrier.sync %0, 128;" ::"r"(1 + warp / 4) : "memory");

    const int g = lane / 4, t = lane % 4, row0 = block + warp * 16 + g;
    int token[2];  // positions of this thread's rows' tokens
#pragma unroll
    for (int h = 0; h < 2; h++) token[h] = start + min(row0 + 8 * h, count * GROUP - 1) / GROUP;
    const float scale = score_scale();

    Turn now;
    Softmax softmax;
    float score[TILE / 2], mixed[HEAD_DIM / 2] = {}, shrink[2];
    unsigned p[TILE / 16][4];
    const auto multiply_keys = [&] {
        pipeline_wait(pipeline, now);
        const unsigned at = stages + now.stage * STAGE_BYTES, from = queries + own * 128;
        settle(score);
        warpgroup_fence();
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const unsigned long long a = described(from + s / 4 * (ROWS * 128) + s % 4 * 32);
            const unsigned long long b = described(at + s / 4 * (TILE * 128) + s % 4 * 32);
            if (s) Product<TILE>::template shared<1>(score, a, b);
            else Product<TILE>::template shared<0>(score, a, b);
        }
        warpgroup_commit();
    };
    const auto multiply_values = [&](const Turn &of) {
        pipeline_wait(pipeline, of);
        const unsigned at = stages + of.stage * STAGE_BYTES;
        warpgroup_begin(mixed, p);
#pragma unroll
        for (int k = 0; k < TILE / 16; k++)
            Product<HEAD_DIM>::template run<1>(mixed, p[k], described(at + k * 2048, TILE * 128));
        warpgroup_commit();
    };
    const auto release = [&](const Turn &of) {
        __syncwarp();
        if (lane == 0) pipeline_release(pipeline, of, warp);
    };
    // Hides what a row does not see, and caps.
    const auto hide = [&](int tile) {
#ifdef SCORE_CAP
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) score[i] = capped(score[i] * scale);
#endif
        if (!seen.masked(tile)) return;
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            const int position = tile * TILE + 8 * (i / 4) + 2 * t + (i & 1), row = token[i >> 1 & 1];
            if (position > Tiles::last_of(row, start + count) || (WINDOW && position <= row - WINDOW)) score[i] = NONE;
        }
    };
#ifdef SCORE_CAP
    constexpr float counted = 1;
#else
    const float counted = scale;
#endif

    multiply_keys();
    warpgroup_wait(score);
    release(now);
    now.advance();
    hide(seen.first);
    softmax.take(score, counted, shrink);
    packed(score, p);
#pragma unroll 1
    for (int tile = seen.first + 1; tile < seen.last; tile++) {
        const Turn before = now;  // the values of the tile before
        now.advance();
        multiply_keys();
        multiply_values(before);
        warpgroup_wait<1>(score);
        release(now);
        now.advance();
        hide(tile);
        softmax.take(score, counted, shrink);
        warpgroup_wait(mixed);
        release(before);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) mixed[i] *= shrink[i >> 1 & 1];
        packed(score, p);
    }
    multiply_values(now);
    warpgroup_wait(mixed);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = softmax.sum[h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (row0 + 8 * h >= count * GROUP) continue;
        const float factor = 1 / sum;
        const size_t to = row_at(row0 + 8 * h);
#pragma unroll
        for (int d = 0; d < ND; d++)
            *reinterpret_cast<unsigned *>(out + to + fragment_order(8 * d + 2 * t)) =
                pack(mixed[4 * d + 2 * h] * factor, mixed[4 * d + 2 * h + 1] * factor);
    }
}
