// Attention of a chunk of tokens over the cache of its sequence, in tiles on tensor cores (FlashAttention-2's
// order).
//
// A block has WARPS * 16 rows, each one query head of one token; the GROUP query heads that share a KV head lie side by
// side, so that they share its tiles of TILE positions. Scores never leave registers: the accumulators of q k^T are the
// left operand of the product with v. The chunk's own keys and values are in the cache already. Of heads beyond 256
// elements a block mixes one part of PARTS, as a warp's registers hold no more, and its queries lie in shared memory.
//
// HEADS, KV_HEADS, HEAD_DIM, POSITIONS (of the cache), CACHE_Q8 (0: f16, 1: q8_0), WARPS, TILE; ATTENTION_SCALE,
// SCORE_CAP, WINDOW, BLOCK_POSITIONS, TABLE_BLOCKS as in attention.cuh; BOTH_WAYS: tokens attend to later ones, too.
// A ring that positions wrap around in has whole tiles, and so have blocks.
// Grid: (tokens * GROUP / rows, KV_HEADS, PARTS), rounded up. Block: WARPS warps.
constexpr int ROWS = WARPS * 16, THREADS = WARPS * 32;
#include "async.cuh"
#include "flash.cuh"
#include "overlap.cuh"

enum {
    WIDTH = HEAD_DIM / PARTS,  // of what a block mixes
    VALUE_STRIDE = WIDTH * 2 + 16,
    HELD = PARTS == 1,  // a warp has its queries in registers
};
constexpr int STRIDE = HEAD_DIM * 2 + 16;  // an odd number of 16-byte chunks: eight rows lie in different banks
constexpr int SIDE_BYTES = TILE * STRIDE, STAGE_BYTES = SIDE_BYTES + TILE * VALUE_STRIDE;
constexpr unsigned ALL = 0xffffffffu;
static_assert(BLOCK_POSITIONS % TILE == 0, "a tile lies in one block");
static_assert(HEAD_DIM % 16 == 0 && TILE % 16 == 0, "whole fragments");
static_assert(!CACHE_Q8 || HEAD_DIM % 32 == 0, "q8_0 has blocks of 32");
static_assert(PARTS == 1 || WIDTH % 32 == 0, "whole pairs of fragments, and blocks of q8_0, of a part");

// Sixteen bytes of q8_0 and their scale as two chunks of eight halves.
static __device__ __forceinline__ void store_widened(unsigned to, uint4 bytes, __half scale) {
    const unsigned words[4] = {bytes.x ^ 0x80808080u, bytes.y ^ 0x80808080u, bytes.z ^ 0x80808080u,
                               bytes.w ^ 0x80808080u};
    unsigned out[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        unsigned pair = __byte_perm(words[i / 2], 0x64646464u, i & 1 ? 0x4342 : 0x4140);
        __half2 v = __hmul2(__hsub2(*reinterpret_cast<__half2 *>(&pair), __float2half2_rn(1152)), __half2half2(scale));
        out[i] = *reinterpret_cast<unsigned *>(&v);
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to + 16 * h), "r"(out[4 * h]), "r"(out[4 * h + 1]),
                     "r"(out[4 * h + 2]), "r"(out[4 * h + 3]) : "memory");
}

// Rows [first, first + TILE) of one side of a KV head's cache, COLUMNS of each; those from `end` on are zeros.
// `blocks`: the sequence's.
template <int COLUMNS = HEAD_DIM>
static __device__ __forceinline__ void copy_side(unsigned to, const void *cache, const __half *scales,
                                                 [[maybe_unused]] const int *blocks, int first, int end) {
    constexpr int STRIDE = COLUMNS * 2 + 16;
#if WINDOW
    const int begin = first % POSITIONS;
    end += begin - first, first = begin;
#elif BLOCK_POSITIONS
    const int begin = blocks[first / BLOCK_POSITIONS] * (KV_HEADS * BLOCK_POSITIONS) + first % BLOCK_POSITIONS;
    end += begin - first, first = begin;
#endif
    if constexpr (CACHE_Q8) {
        for (int i = threadIdx.x; i < TILE * (COLUMNS / 16); i += THREADS) {
            int n = i / (COLUMNS / 16), at = i % (COLUMNS / 16), row = first + n;
            uint4 bytes = make_uint4(0, 0, 0, 0);
            __half scale = __float2half(0);
            if (row < end) {
                bytes = *reinterpret_cast<const uint4 *>(
                    static_cast<const char *>(cache) + (size_t)row * HEAD_DIM + 16 * at);
                scale = scales[(size_t)row * (HEAD_DIM / 32) + at / 2];
            }
            store_widened(to + n * STRIDE + 32 * at, bytes, scale);
        }
    } else {
        for (int i = threadIdx.x; i < TILE * (COLUMNS / 8); i += THREADS) {
            int n = i / (COLUMNS / 8), at = i % (COLUMNS / 8), row = first + n;
            const __half *from = static_cast<const __half *>(cache) + (size_t)min(row, end - 1) * HEAD_DIM + 8 * at;
            copy_async_or_zero(to + n * STRIDE + 16 * at, from, row < end);
        }
    }
}

// Left to itself, the compiler takes 128 registers here on Hopper, and spills.
#if __CUDA_ARCH__ >= 900 && HEAD_DIM <= 64
#define BOUNDS __launch_bounds__(THREADS, 3)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

// q: halves (tokens, HEADS, HEAD_DIM), rotated; out: the same, in the order of fragments (async.cuh). keys, values: the
// cache of one layer (slot, KV head, position, HEAD_DIM); of q8_0, key_scales and value_scales (slot, KV head,
// position, HEAD_DIM / 32). table: where BLOCK_POSITIONS, as attention.cu tells.
extern "C" __global__ void BOUNDS flash(
    __half *out, const __half *q, const void *keys, const void *values, const __half *key_scales,
    const __half *value_scales, const Chunk *chunk
#if BLOCK_POSITIONS
    , const int *table
#endif
) {
    extern __shared__ __align__(128) unsigned char memory[];
    allow_next();
    await_previous();
    const int start = chunk->start, count = chunk->count, head = blockIdx.y;
    const int block = (gridDim.x - 1 - blockIdx.x) * ROWS;  // the longest rows first
    if (block >= count * GROUP) return;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row0 = block + threadIdx.x / 32 * 16 + g;
#if BLOCK_POSITIONS
    const size_t base = (size_t)head * BLOCK_POSITIONS;
    const int *blocks = table + (size_t)chunk->slot * TABLE_BLOCKS;
#else
    const size_t base = ((size_t)chunk->slot * KV_HEADS + head) * POSITIONS;
    constexpr const int *blocks = nullptr;
#endif
    constexpr int ELEMENT = CACHE_Q8 ? 1 : 2;
    keys = static_cast<const char *>(keys) + base * HEAD_DIM * ELEMENT;
    values = static_cast<const char *>(values) + base * HEAD_DIM * ELEMENT;
    if constexpr (CACHE_Q8) key_scales += base * (HEAD_DIM / 32), value_scales += base * (HEAD_DIM / 32);
    const int from = HELD ? 0 : blockIdx.z * WIDTH;  // of the elements of a value
    values = static_cast<const char *>(values) + from * ELEMENT;
    if constexpr (CACHE_Q8 && !HELD) value_scales += from / 32;

    // Of this lane's rows g and g + 8: their tokens' positions, and where they lie in q and out.
    int token[2];
    size_t place[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = min(row0 + 8 * h, count * GROUP - 1);
        token[h] = start + row / GROUP;
        place[h] = ((size_t)(row / GROUP) * HEADS + head * GROUP + row % GROUP) * HEAD_DIM;
    }
    const Tiles seen(start, count, block);

    const unsigned queries = shared_address(memory), stages = queries + (HELD ? 0 : ROWS * STRIDE);
    const unsigned begun = stages + seen.first % 2 * STAGE_BYTES;
    copy_side(begun, keys, key_scales, blocks, seen.first * TILE, seen.end);
    copy_side<WIDTH>(begun + SIDE_BYTES, values, value_scales, blocks, seen.first * TILE, seen.end);
    if constexpr (!HELD)
        for (int i = threadIdx.x; i < ROWS * (HEAD_DIM / 8); i += THREADS) {
            const int n = i / (HEAD_DIM / 8), at = i % (HEAD_DIM / 8), row = min(block + n, count * GROUP - 1);
            const size_t of = ((size_t)(row / GROUP) * HEADS + head * GROUP + row % GROUP) * HEAD_DIM;
            copy_async_or_zero(queries + n * STRIDE + 16 * at, q + of + 8 * at, true);
        }
    commit_copies();

    unsigned a[HELD ? STEPS : 1][4];
#pragma unroll
    for (int s = 0; HELD && s < STEPS; s++)
#pragma unroll
        for (int r = 0; r < 4; r++)
            a[s][r] = *reinterpret_cast<const unsigned *>(q + place[r & 1] + 16 * s + 8 * (r >> 1) + 2 * t);

    float mixed[ND][4] = {}, top[2] = {NONE, NONE}, sum[2] = {};
    const float scale = score_scale();
    // Addresses of ldmatrix within a tile: of k, rows 8 (lane / 16) + lane % 8 and chunk lane / 8 % 2; of v, as of the
    // warp's queries, the reverse.
    const unsigned key_at = (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 16;
    const unsigned value_at = (lane / 8 % 2 * 8 + lane % 8) * VALUE_STRIDE + lane / 16 * 16;
    const unsigned query_at = queries + (threadIdx.x / 32 * 16 + lane % 16) * STRIDE + lane / 16 * 16;

    for (int tile = seen.first; tile < seen.last; tile++) {
        const unsigned stage = stages + tile % 2 * STAGE_BYTES;
        wait_copies<0>();
        __syncthreads();
        if (tile + 1 < seen.last) {
            unsigned next = stages + (tile + 1) % 2 * STAGE_BYTES;
            copy_side(next, keys, key_scales, blocks, (tile + 1) * TILE, seen.end);
            copy_side<WIDTH>(next + SIDE_BYTES, values, value_scales, blocks, (tile + 1) * TILE, seen.end);
        }
        commit_copies();

        float score[NT][4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            unsigned (&own)[4] = a[HELD ? s : 0];
            if constexpr (!HELD) load_matrices<false>(own, query_at + s * 32);
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                unsigned b[4];
                load_matrices<false>(b, stage + key_at + n * 8 * STRIDE + s * 32);
                mma(score[n], own, b[0], b[1]);
                mma(score[n + 1], own, b[2], b[3]);
            }
        }

        const bool masked = seen.masked(tile);
        float best[2] = {top[0], top[1]};
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                score[n][e] = capped(score[n][e] * scale);
                const int position = tile * TILE + 8 * n + 2 * t + (e & 1);
                if (masked && position > Tiles::last_of(token[e >> 1], start + count)) score[n][e] = NONE;
#if WINDOW
                if (masked && position <= token[e >> 1] - WINDOW) score[n][e] = NONE;
#endif
                best[e >> 1] = fmaxf(best[e >> 1], score[n][e]);
            }
        float shrink[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            best[h] = fmaxf(best[h], __shfl_xor_sync(ALL, best[h], 1));
            best[h] = fmaxf(best[h], __shfl_xor_sync(ALL, best[h], 2));
            shrink[h] = exp2f(top[h] - best[h]);
            top[h] = best[h];
            sum[h] *= shrink[h];
        }
#pragma unroll
        for (int d = 0; d < ND; d++)
#pragma unroll
            for (int e = 0; e < 4; e++) mixed[d][e] *= shrink[e >> 1];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                score[n][e] = exp2f(score[n][e] - top[e >> 1]);
                sum[e >> 1] += score[n][e];
            }
#pragma unroll
        for (int k = 0; k < NT / 2; k++) {
            const unsigned p[4] = {pack(score[2 * k][0], score[2 * k][1]), pack(score[2 * k][2], score[2 * k][3]),
                                   pack(score[2 * k + 1][0], score[2 * k + 1][1]),
                                   pack(score[2 * k + 1][2], score[2 * k + 1][3])};
#pragma unroll
            for (int d = 0; d < ND; d += 2) {
                unsigned b[4];
                load_matrices<true>(b, stage + SIDE_BYTES + value_at + k * 16 * VALUE_STRIDE + d * 16);
                mma(mixed[d], p, b[0], b[1]);
                mma(mixed[d + 1], p, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(ALL, sum[h], 1);
        sum[h] += __shfl_xor_sync(ALL, sum[h], 2);
        if (row0 + 8 * h >= count * GROUP) continue;
        float factor = 1 / sum[h];
#pragma unroll
        for (int d = 0; d < ND; d++)
            *reinterpret_cast<unsigned *>(out + place[h] + from + fragment_order(8 * d + 2 * t)) =
                pack(mixed[d][2 * h] * factor, mixed[d][2 * h + 1] * factor);
    }
}
