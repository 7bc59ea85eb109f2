// A tile's operands: how a block copies x and packed weights, stage by stage, and makes fragments of them; and what is
// the same after every kind of product. The including file defines THREADS of a block before it includes this.
//
// KIND, ROWS, COLUMNS, BM, BN, UNITS, STAGES, GATED, HALF_OUT, BIAS, STRIDE: as gemm.cu tells.
#pragma once
#include "activation.cuh"
#include "last_arriving.cuh"
#include "fragments.cuh"
#include "overlap.cuh"

constexpr int RUNS = COLUMNS / RUN;
constexpr int STEPS = RUNS / UNITS;
constexpr int X_BYTES = BM * 2 * RUN, W_BYTES = piece_offset(PIECES, BN);
static_assert(!HALF_OUT || (ROWS % 16 == 0 && STRIDE % 16 == 0), "halves are ordered within 16");
static_assert(COLUMNS % (RUN * UNITS) == 0, "columns are whole stages");
static_assert(STAGES >= 2, "one is filled while one is used");

// The row of W (or of W2) that is row n of the tile `down` of them; rows beyond the last are the last once more.
static __device__ __forceinline__ int weight_row(int down, int n) {
    int row = GATED ? down * (BN / 2) + n / 16 * 8 + n % 8 : down * BN + n;
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

    __device__ __forceinline__ Copier(const __half *from, const unsigned char *one, const unsigned char *other,
                                      int down, int first, int tokens)
        : w(one), w2(other) {
        const int chunk = threadIdx.x % 8, unit = threadIdx.x / 8 % UNITS, m = threadIdx.x / (8 * UNITS);
        x = from + (size_t)(first + m) * COLUMNS + unit * RUN + chunk * 8;
        x_to = unit * X_BYTES + m * 128 + (chunk ^ (m & 7)) * 16;
        rows = tokens - first - m;
        const int at = threadIdx.x % TOGETHER, part = threadIdx.x / TOGETHER % UNITS;
        n = threadIdx.x / (TOGETHER * UNITS);
        w_to = UNITS * X_BYTES + part * W_BYTES + (PLAIN ? (at * BN + place(n, part, at)) * 16 : 0);
#pragma unroll
        for (int i = 0; i < W_COPIES; i++) run[i] = weight_row(down, n + i * W_ROWS) * RUNS + part;
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
            if constexpr (PLAIN)
                copy_async<16>(stage + w_to + i * W_ROWS * 16,
                               from + piece(0).stride * lane + 16 * (threadIdx.x % TOGETHER));
            else
                copy_pieces<0>(stage + w_to, from, lane, n + i * W_ROWS, threadIdx.x % UNITS);
        }
    }

    template <int AT>
    static __device__ __forceinline__ void copy_pieces(unsigned to, const unsigned char *from, int lane, int n,
                                                       int unit) {
        if constexpr (AT < PIECES) {
            constexpr Piece p = piece(AT);
            copy_async<p.bytes>(to + piece_offset(AT, BN) + place(n, unit, AT) * p.bytes,
                                from + p.base + p.stride * (lane >> p.shift));
            copy_pieces<AT + 1>(to, from, lane, n, unit);
        }
    }
};

// The fragments of row n of the tile, word t of each set.
static __device__ __forceinline__ void weights(unsigned tile, int down, int n, int unit, int run, int t,
                                               unsigned (&b)[4][2]) {
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
        int row = place(n, unit, 0), lane = weight_row(down, n) * RUNS + run & 31;
        unsigned plane[PLANE_WORDS];
#pragma unroll
        for (int p = 0; p < PLANES; p++) plane[p] = lds32(tile + (p * BN + row) * 16 + 4 * t);
        Head head;
#define LOAD(place, member, type, ...) lds(head.member, tile + piece_offset(place, BN) + row * sizeof(type));
        OF_KIND(HEAD)(LOAD)
#undef LOAD
        expand(plane, head, scales_of(head, lane), t, b);
    }
}

// A part's sums to where they are kept: BM * BN floats.
template <int COUNT> static __device__ __forceinline__ void store_part(const float (&sum)[COUNT], float4 *to) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++)
        __stcg(to + i * THREADS, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
}

// The sums of a tile's parts in order, of which `of(z)` are part z's.
template <int COUNT, class Of>
static __device__ __forceinline__ void add_parts(float (&sum)[COUNT], int parts, Of of) {
    constexpr int FLIGHT = COUNT % 16 ? 1 : 4;  // loads that wait for L2 together; more would spill
#pragma unroll
    for (int first = 0; first < COUNT / 4; first += FLIGHT) {
#pragma unroll
        for (int i = 4 * first; i < 4 * (first + FLIGHT); i++) sum[i] = 0;
#pragma unroll 1
        for (int z = 0; z < parts; z++) {
            float4 part[FLIGHT];
#pragma unroll
            for (int i = 0; i < FLIGHT; i++) part[i] = __ldcg(of(z) + (first + i) * THREADS);
#pragma unroll
            for (int i = 0; i < FLIGHT; i++) {
                float *to = sum + 4 * (first + i);
                to[0] += part[i].x, to[1] += part[i].y, to[2] += part[i].z, to[3] += part[i].w;
            }
        }
    }
}

static __device__ __forceinline__ float biased(const float *bias, int row) {
    return BIAS ? bias[min(row, (GATED ? 2 : 1) * ROWS - 1)] : 0;
}
