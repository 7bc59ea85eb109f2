// What products of up to 8 NB tokens have in common: x in shared memory, one row's weights as fragments, and what
// follows a product. THREADS of a block is defined before this is included.
//
// KIND, ROWS, COLUMNS, GATED, HALF_OUT, ADD, BIAS, STRIDE: as gemm.cu; NB; MOST: tokens that x has room for.
#pragma once
#include "activation.cuh"
#include "last_arriving.cuh"
#include "fragments.cuh"
#include "overlap.cuh"

constexpr int RUNS = COLUMNS / RUN, N = 8 * NB;
static_assert(COLUMNS % RUN == 0, "columns are whole runs");
static_assert(!HALF_OUT || ROWS % 16 == 0, "halves are ordered within 16");

// x of BLOCKS blocks of eight tokens from `first` on, and of HELD groups of 256 columns from `begin` on; groups from
// `end` on are zeros. The run of 128 bytes of which a lane
// makes fragments for a block of a group is line `lane` of that block, as a copy stores a line of memory
// at once only to a line. Its 16-byte chunk c lies at c ^ lane % 8, so that lanes load from different banks. Blocks
// begin with different groups, so that they do not all ask for the same lines at once.
template <int HELD, int BLOCKS>
static __device__ __forceinline__ void copy_x(unsigned to, const __half *x, int begin, int end, int first = 0) {
    const int c = threadIdx.x % 8, t = threadIdx.x / 8 % 4, turn = blockIdx.x % HELD;
#pragma unroll 4
    for (int at = threadIdx.x / 32; at < HELD * BLOCKS * 8; at += THREADS / 32) {
        const int near = at % (BLOCKS * 8), token = 8 * first + near;
        const int turned = at / (BLOCKS * 8) + turn, local = turned < HELD ? turned : turned - HELD;
        const int group = begin + local, run = 4 * group + t, line = near % 8 * 4 + t;
        copy_async_or_zero(to + ((local * BLOCKS + near / 8) * 32 + line) * 128 + (c ^ line % 8) * 16,
                           x + (size_t)token * COLUMNS + run * RUN + 8 * c,
                           group < end && (RUNS % 4 == 0 || run < RUNS) && (MOST >= N || token < MOST));
    }
}

// Chunk c of this lane for block b of a group, whose blocks begin at `group`.
static __device__ __forceinline__ uint4 x_chunk(unsigned group, int b, int c) {
    const int lane = threadIdx.x % 32;
    return lds128(group + b * 4096 + lane * 128 + (c ^ lane % 8) * 16);
}

// A lane's run of 64 weights of a row. PITCH: bytes between pieces of a plain run.
template <int PITCH> struct Row {
    unsigned at;
    uint4 plane[PLAIN ? 1 : PLANE_WORDS];
    Head head;
    Scales scales;

    // From shared memory: planes 512 bytes apart (or the first piece of a plain run); where(piece) is the address of
    // each piece after them, and place the run's in its segment.
    template <class Where> __device__ __forceinline__ void load(unsigned planes, const Where &where, int place) {
        at = planes;
        if constexpr (!PLAIN) {
#pragma unroll
            for (int p = 0; p < PLANES; p++) plane[p] = lds128(planes + 512 * p);
#define LOAD(which, member, ...) lds(head.member, where(which));
            OF_KIND(HEAD)(LOAD)
#undef LOAD
            scales = scales_of(head, place);
        }
    }

    // The sixteen weights of set s as pairs: out[w] are those of word w; CROSSED: as expand_set tells.
    template <bool CROSSED> __device__ __forceinline__ void expanded(int s, unsigned (&out)[4][2]) const {
        if constexpr (PLAIN) {
            constexpr int PARTS = PIECES / 4;  // 16 bytes each, of a set
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const uint4 v = lds128(at + PITCH * (PARTS * s + part));
                if constexpr (KIND == KIND_F32) {
                    out[part][0] = plain_pair(__uint_as_float(v.x), __uint_as_float(v.y));
                    out[part][1] = plain_pair(__uint_as_float(v.z), __uint_as_float(v.w));
                } else {
                    out[2 * part][0] = plain_pair(v.x), out[2 * part][1] = plain_pair(v.y);
                    out[2 * part + 1][0] = plain_pair(v.z), out[2 * part + 1][1] = plain_pair(v.w);
                }
            }
        } else {
#pragma unroll
            for (int w = 0; w < 4; w++) {
                unsigned word[PLANE_WORDS];
#pragma unroll
                for (int p = 0; p < PLANES; p++) word[p] = component(plane[p], w);
                expand_set<CROSSED>(word, head, scales, w, s, out[w]);
            }
        }
    }

    static __device__ __forceinline__ unsigned component(const uint4 &v, int at) {
        return at == 0 ? v.x : at == 1 ? v.y : at == 2 ? v.z : v.w;
    }
};

// Set s of two rows as left operands: of the chunk of even pairs and that of odd ones, two products each.
template <bool CROSSED = false, int PITCH>
static __device__ __forceinline__ void operands(const Row<PITCH> (&row)[2], int s, unsigned (&a)[2][2][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        unsigned words[4][2];
        row[r].template expanded<CROSSED>(s, words);
#pragma unroll
        for (int w = 0; w < 4; w++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) a[odd][w / 2][2 * (w % 2) + r] = words[w][odd];
    }
}

// Four sums of a lane: tokens `token` and `token + 1`, of rows `row` and `row + 8`; or of a row of gate, and of up.
struct Quad {
    static constexpr int EACH = GATED ? 2 : 4;  // results
    int token, row;

    __device__ __forceinline__ size_t at(int e) const {
        const int own = row + 8 * (e / 2);
        return (size_t)(token + e % 2) * STRIDE + (HALF_OUT ? fragment_order(own) : own);
    }
    __device__ __forceinline__ bool there(int e, int tokens) const {
        return token + e % 2 < tokens && row + 8 * (e / 2) < ROWS;
    }

    // What is added to. All loads of a warp come before its first store, which they would wait for.
    __device__ __forceinline__ void load(const void *y, int tokens, float (&old)[4]) const {
#pragma unroll
        for (int e = 0; e < EACH; e++) old[e] = ADD && there(e, tokens) ? static_cast<const float *>(y)[at(e)] : 0;
    }

    __device__ __forceinline__ void store(void *y, const float *bias, int tokens, const float4 &sum,
                                          const float (&old)[4]) const {
        const float held[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            if (!there(e, tokens)) continue;
            float value = activate(held[e] * UNSCALE + (BIAS ? bias[row + 8 * (e / 2)] : 0));
            if constexpr (GATED) value *= held[e + 2] * UNSCALE + (BIAS ? bias[ROWS + row] : 0);
            if constexpr (HALF_OUT) static_cast<__half *>(y)[at(e)] = __float2half(value);
            else static_cast<float *>(y)[at(e)] = value + old[e];
        }
    }
};

static __device__ __forceinline__ void add(float4 &sum, const float4 &part) {
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
}
