// Matrices times one vector, with what comes before and after it in a decode step.
//
// A CTA owns CTA_ROWS consecutive rows and takes their weights as one run of items: whole segments of a packed matrix,
// whichever rows they belong to, or equal pieces of a row of floats. Warp w takes items w, w + WARPS, ...; it has AHEAD
// of them in flight in registers, the first ones before it waits for anything, and leaves the sum of each item and row
// in shared memory. One thread per row then adds up, and ends the row's work.
//
// Macros: K (columns), CTA_ROWS, WARPS, AHEAD (items of a warp in flight), CTAS (CTAs per SM to leave registers for),
// KEEP (1: a lane's activations stay in registers where it always meets the same columns; 0: it reads them for each
// item)
//   PARTS         matrices, each with FORMATi, ROWSi and CTAs of its own, outputs one after another; GATED: two
//                 matrices alike, gate and up, whose products a CTA joins row by row
//   NORM          0 none, 1 RMS, 2 layer: norm of the input over its K elements. A packed matrix has the norm's weight
//                 in q already and takes the sum of squares from SS_PARTS parts; floats are normed here. EPS
//   JOIN          1, 2: the input is a stream to which a product y, normed by itself, is still to be added: each CTA
//                 does that for itself, and one of them stores the sum (join.cuh), and norms it where NORM is 1
//   BIAS, ACTIVATION (0 none, 1 silu, 2 gelu, 3 CAP * tanh(v / CAP), 4 relu2), RESIDUAL (add to `out`), TIMES (multiply
//                 by `out`: gate's product where that of up, in another format, lies there)
//   OUT_X         store float32; OUT_Q: store int8 with a scale per 16 rows (OUT_NORM: of the row times next_norm, and
//                 the sum of squares of every 32 rows, or of 16 where CTA_ROWS is 16); OUT_SS: such sums alone; BEST:
//                 the largest of every 32 rows, and where
//   OVERLAP       1, 2: this launch may begin before the one before it has ended (overlap.cuh)
// Arguments, those in brackets where a macro asks for them:
//   for each part: weights, [bias f32 (rows)]
//   [q s8 (K), s f32 (K / 16), [ss f32 (SS_PARTS)]] where a part is packed (INPUT_Q)
//   [x f32 (K), [norm f32 (K), [norm_bias f32 (K)]]] where a part is of floats (INPUT_X)
//   instead of those of both where JOIN: x f32 (K), y f32 (K), ss f32 (SS_PARTS) of y, post f32 (K) the norm's weight
//   of y, norm f32 (K), joined f32 (K) the sum
//   [out f32 (rows)] [next_norm f32 (rows)] [out_q s8 (rows), out_s f32 (rows / 16)] [out_ss f32]
//   [best f32, best_row s32]
#include "blocks.cuh"
#include "overlap.cuh"

#ifndef AHEAD
#define AHEAD 4
#endif
#ifndef CTAS
#define CTAS 1
#endif
#ifndef KEEP
#define KEEP 1
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef GATED
#define GATED 0
#endif
#ifndef NORM
#define NORM 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef ACTIVATION
#define ACTIVATION 0
#endif
#ifndef RESIDUAL
#define RESIDUAL 0
#endif
#ifndef TIMES
#define TIMES 0
#endif
#ifndef OUT_X
#define OUT_X 0
#endif
#ifndef OUT_Q
#define OUT_Q 0
#endif
#ifndef OUT_NORM
#define OUT_NORM 0
#endif
#ifndef OUT_SS
#define OUT_SS OUT_NORM
#endif
#ifndef BEST
#define BEST 0
#endif
#ifndef JOIN
#define JOIN 0
#endif
#ifndef INPUT_Q
#define INPUT_Q 0
#endif
#ifndef INPUT_X
#define INPUT_X 0
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int MATRICES = GATED ? 2 : 1;  // that a CTA multiplies

static_assert(CTA_ROWS % 16 == 0 && CTA_ROWS <= THREADS, "a thread ends a row, 16 of them share a scale");
static_assert(!GATED || PARTS == 1, "gate and up are one part");
static_assert(!OUT_SS || CTA_ROWS == 16 || CTA_ROWS % 32 == 0, "a sum of squares is of 32 rows, or of a CTA's 16");
static_assert(!JOIN || NORM != 2, "what is joined is normed by the root mean square, if at all");
static_assert(!BEST || CTA_ROWS % 32 == 0, "every 32 rows have a best one");

// --- the items of a format ------------------------------------------------------------------------------------------

// The most rows that one of `count` items of 32 chunks touches.
__device__ constexpr int most_rows(int count, int chunks) {
    int most = 1;
    for (int item = 0; item < count; item++) {
        const int rows = (item * 32 + 31) / chunks - item * 32 / chunks + 1;
        if (rows > most) most = rows;
    }
    return most;
}

// Equal pieces of a row, each of whole 128-bit loads and of 1024 weights at most.
__device__ constexpr int pieces(int lane) {
    int count = (K + 1023) / 1024;
    while (K % (count * lane)) count++;
    return count;
}

template <class F, bool = F::PACKED> struct Items;

// Segments: an item may hold the ends of several rows, at most SPAN of them.
template <class F> struct Items<F, true> {
    static_assert(F::PACKED && K % 64 == 0 && CTA_ROWS * K % SEGMENT == 0,
                  "a lane's weights are of one row, a CTA's whole");
    typedef typename F::Segment Item;
    static constexpr int CHUNKS = K / 64;  // of a row
    static constexpr int COUNT = CTA_ROWS * (K / 64) / 32, BYTES = F::BYTES;
    static constexpr int SHARED = (K + SEGMENT - 1) / SEGMENT * INPUT_BYTES;
    static constexpr int SPAN = most_rows(COUNT, CHUNKS);
    // A warp always meets the same columns.
    static constexpr bool FIXED = KEEP && CHUNKS && CHUNKS % 32 == 0 && WARPS % (CHUNKS / 32) == 0;
    static __device__ constexpr int row(int chunk) { return chunk / CHUNKS; }
    // Items of `rows` rows: the last segment of a matrix may be partly used.
    static __device__ constexpr int of(int rows) { return (rows * CHUNKS + 31) / 32; }
};

// Pieces of a row, all equal.
template <class F> struct Items<F, false> {
    static_assert(K % F::LANE == 0, "rows begin at 16 bytes");
    static constexpr int PIECES = pieces(F::LANE), LENGTH = K / PIECES, BYTES = LENGTH * (16 / F::LANE);
    static constexpr int QUADS = (LENGTH + F::PART - 1) / F::PART * F::PART / 4;  // staged float4 of a piece
    typedef typename F::template Segment<LENGTH> Item;
    static constexpr int COUNT = CTA_ROWS * PIECES, SPAN = 1;
    static constexpr int SHARED = PIECES * QUADS * 16;
    static __device__ constexpr int of(int rows) { return rows * PIECES; }
};

// --- helpers --------------------------------------------------------------------------------------------------------

// Sums over the lanes of N values, 32 at most: lane L gets that of value L / (32 / N), N a power of two. Lanes that
// differ by Offset exchange halves of what they have left, or all of it when that is one. The halves are chosen by
// arithmetic: of a condition NVVM makes branches, with the shuffles in both, where one side waits for the other.
template <int N, int Half = N / 2, int Offset = 16>
__device__ __forceinline__ float lane_sums(float (&v)[N], int lane) {
    if constexpr (Offset == 0) return v[0];
    else {
        const unsigned upper = 0u - (unsigned)(lane / Offset & 1);
#pragma unroll
        for (int i = 0; i < Half; i++) {
            const unsigned low = __float_as_uint(v[i]), high = __float_as_uint(v[i + Half]);
            const unsigned swap = (low ^ high) & upper;
            const float keep = __uint_as_float(low ^ swap), send = __uint_as_float(high ^ swap);
            v[i] = keep + __shfl_xor_sync(0xffffffff, send, Offset);
        }
        if constexpr (Half == 0) v[0] += __shfl_xor_sync(0xffffffff, v[0], Offset);
        return lane_sums<N, Half / 2, Offset / 2>(v, lane);
    }
}

// The same number, but the compiler does not know that: what is read from there is read anew, and held in no register.
__device__ __forceinline__ int hidden(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

__device__ __forceinline__ float warp_sum(float v) {
    float one[1] = {v};
    return lane_sums<1>(one, threadIdx.x & 31);
}

__device__ __forceinline__ float block_sum(float v) {
    __shared__ float sums[WARPS];
    v = warp_sum(v);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int warp = 0; warp < WARPS; warp++) v += sums[warp];
    __syncthreads();
    return v;
}

__device__ __forceinline__ float activate(float v) {
#if ACTIVATION == 1
    return __fdividef(v, 1.0f + __expf(-v));
#elif ACTIVATION == 2
    return 0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
#elif ACTIVATION == 3
    return CAP * tanhf(v * (1 / CAP));
#elif ACTIVATION == 4
    return v > 0 ? v * v : 0;
#else
    return v;
#endif
}

// The float32 input, normed, where `dot` of a float format wants it.
template <class F> __device__ __forceinline__ void stage_floats(float4 *shared, const float *x, const float *norm,
                                                                const float *norm_bias) {
    typedef Items<F> I;
    const float4 *quads = (const float4 *)x;
    [[maybe_unused]] float mean = 0, scale = 1;
#if NORM
    if (NORM == 2) {
        float sum = 0;
        for (int at = threadIdx.x; at < K / 4; at += THREADS)
            sum += quads[at].x + quads[at].y + quads[at].z + quads[at].w;
        mean = block_sum(sum) / K;
    }
    float squares = 0;
    for (int at = threadIdx.x; at < K / 4; at += THREADS) {
        const float4 v = quads[at];
        const float a = v.x - mean, b = v.y - mean, c = v.z - mean, d = v.w - mean;
        squares += a * a + b * b + c * c + d * d;
    }
    scale = rsqrtf(block_sum(squares) / K + EPS);
#endif
    constexpr int USED = I::LENGTH / 4;
#pragma unroll 1
    for (int at = threadIdx.x; at < I::PIECES * I::QUADS; at += THREADS) {
        const int piece = at / I::QUADS, quad = at % I::QUADS;
        float4 v = make_float4(0, 0, 0, 0);
        if (quad < USED) {
            const int from = piece * USED + quad;
            v = quads[from];
#if NORM
            const float4 w = ((const float4 *)norm)[from];
            v = make_float4((v.x - mean) * scale * w.x, (v.y - mean) * scale * w.y, (v.z - mean) * scale * w.z,
                            (v.w - mean) * scale * w.w);
#endif
#if NORM == 2
            const float4 b = ((const float4 *)norm_bias)[from];
            v = make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w);
#endif
        }
        shared[piece * I::QUADS + F::place(quad)] = v;
    }
}

struct Arguments {
    const signed char *q;
    const float *s, *ss, *x, *norm, *norm_bias, *next_norm;
#if JOIN
    const float *y, *post;
    float *joined;
#endif
    float *out, *out_s, *out_ss, *best;
    signed char *out_q;
    int *best_row;
};

// --- the kernel -----------------------------------------------------------------------------------------------------

// Where the items' sums lie: matrix, item, row that the item touches.
template <class F> struct Sums {
    float at[MATRICES * Items<F>::COUNT * Items<F>::SPAN];
    // The product of the CTA's row `row` with matrix `matrix`.
    __device__ __forceinline__ float row(int matrix, int row) const {
        typedef Items<F> I;
        float sum = 0;
        if constexpr (F::PACKED) {
            const int first = row * I::CHUNKS / 32, last = ((row + 1) * I::CHUNKS - 1) / 32;
            for (int item = first; item <= last; item++)
                sum += at[(matrix * I::COUNT + item) * I::SPAN + row - I::row(item * 32)];
        } else {
            for (int piece = 0; piece < I::PIECES; piece++) sum += at[matrix * I::COUNT + row * I::PIECES + piece];
        }
        return sum;
    }
};

extern __shared__ __align__(16) unsigned char staged[];
#if JOIN
#include "join.cuh"
#endif

// A warp's items of a CTA's work on a matrix with Rows rows, in rounds of ROUND: code enough to keep FLIGHT of them in
// flight, and no more. Slots are template arguments: an array that a loop indexes which the compiler does not unroll
// would lie in local memory.
template <class F, int Rows> struct Run {
    typedef Items<F> I;
    static constexpr int TOTAL = MATRICES * I::COUNT, STEPS = (TOTAL + WARPS - 1) / WARPS;
    static constexpr int FLIGHT = AHEAD < STEPS ? AHEAD : STEPS;
    static constexpr int WHOLE = (4 + FLIGHT - 1) / FLIGHT * FLIGHT, ROUND = STEPS < WHOLE ? STEPS : WHOLE;
    static constexpr bool ONCE = ROUND == STEPS, RAGGED = Rows % CTA_ROWS != 0;
    static constexpr int VALUES = ROUND * I::SPAN;

    const unsigned char *base[MATRICES];  // a matrix's item that would be the warp's first
    int warp, lane;
    int left;  // items of this CTA that exist
    typename I::Item flight[FLIGHT];
    float values[VALUES];
    Input fixed;

    __device__ __forceinline__ int item(int step) const { return warp + WARPS * step; }
    __device__ __forceinline__ bool exists(int item) const {
        return ((ONCE && TOTAL % WARPS == 0) || item < TOTAL) && (!RAGGED || item % I::COUNT < left);
    }

    template <int Slot> __device__ __forceinline__ void load(int step) {
        if (!exists(item(step))) return;
        const unsigned char *from = MATRICES == 1 || item(step) < I::COUNT ? base[0] : base[MATRICES - 1];
        flight[Slot].load(Stream{from + WARPS * step * I::BYTES}, lane);
    }

    // The first items, all at once.
    template <int Slot = 0> __device__ __forceinline__ void begin() {
        if constexpr (Slot < FLIGHT) {
            load<Slot>(Slot);
            begin<Slot + 1>();
        }
    }

    // The products of a round that begins with step `first`; a slot is asked for its next item as soon as it is free.
    template <int At = 0> __device__ __forceinline__ void multiply(int first) {
        if constexpr (At < ROUND) {
            constexpr int Slot = At % FLIGHT;
            const int own = item(first + At), at = own % I::COUNT;
            float value = 0;
            if (exists(own)) {
                if constexpr (!F::PACKED) {
                    const float4 *x = (const float4 *)staged + hidden(at % I::PIECES * I::QUADS);
                    value = F::template dot<I::LENGTH>(flight[Slot], x, lane);
                } else if constexpr (I::FIXED) {
                    value = F::dot(flight[Slot], fixed, lane);
                } else {
                    value = F::dot(flight[Slot], load_input(staged, hidden((at * 32 + lane) % I::CHUNKS)), lane);
                }
            }
            if constexpr (!ONCE || At + FLIGHT < STEPS) load<Slot>(first + At + FLIGHT);
            if constexpr (I::SPAN == 1) {
                values[At] = value;
            } else {
                const int mine = I::row(at * 32 + lane) - I::row(at * 32);
#pragma unroll
                for (int i = 0; i < I::SPAN; i++) values[At * I::SPAN + i] = mine == i ? value : 0;
            }
            multiply<At + 1>(first);
        }
    }

    // The lanes' sums of a round, up to 32 values at a time.
    __device__ __forceinline__ void keep(Sums<F> &sums, int first) {
        constexpr int GROUP =
            VALUES <= 1 ? 1 : VALUES <= 2 ? 2 : VALUES <= 4 ? 4 : VALUES <= 8 ? 8 : VALUES <= 16 ? 16 : 32;
#pragma unroll
        for (int from = 0; from < VALUES; from += GROUP) {
            float group[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; i++) group[i] = from + i < VALUES ? values[from + i] : 0;
            const float sum = lane_sums<GROUP>(group, lane);
            const int value = from + lane / (32 / GROUP), own = item(first + value / I::SPAN);
            if (lane % (32 / GROUP) == 0 && value < VALUES && own < TOTAL)
                sums.at[own * I::SPAN + value % I::SPAN] = sum;
        }
    }

    __device__ __forceinline__ void finish(Sums<F> &sums) {
#pragma unroll 1
        for (int first = 0; first < STEPS; first += ROUND) {
            multiply<0>(first);
            keep(sums, first);
        }
    }
};

// The CTA's part of the work on a matrix with Rows rows, from row `first`; `base` is what comes before it in the
// outputs.
template <class F, int Rows>
__device__ __forceinline__ void work(const Arguments &a, const unsigned char *const (&weights)[MATRICES],
                                     const float *const (&biases)[MATRICES], int first, int base) {
    typedef Items<F> I;
    typedef Run<F, Rows> R;
    __shared__ Sums<F> sums;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    R run;
    run.warp = warp, run.lane = lane, run.left = R::RAGGED ? I::of(Rows - first) : I::COUNT;
    const long long item = (long long)(first / CTA_ROWS) * I::COUNT + warp;
#pragma unroll
    for (int m = 0; m < MATRICES; m++) run.base[m] = weights[m] + (item - m * I::COUNT) * I::BYTES;

    // What the row's end needs is asked for before the weights, behind which it would wait, unless it is not there yet.
    const int row = first + (int)threadIdx.x;
    const bool ends = threadIdx.x < CTA_ROWS && (!R::RAGGED || row < Rows);
    float bias[MATRICES] = {}, before = 0;
    [[maybe_unused]] float next = 1, squares = 0;
#if BIAS
    if (ends)
        for (int m = 0; m < MATRICES; m++) bias[m] = biases[m][row];
#endif
#if OUT_NORM
    if (ends) next = a.next_norm[base + row];
#endif
#if OVERLAP
    allow_next();
    run.begin();
    await_previous();
#endif
#if RESIDUAL || TIMES
    if (ends) before = a.out[base + row];
#endif
#if NORM == 1 && !JOIN
    if (F::PACKED && warp * 32 < CTA_ROWS)
        for (int at = lane; at < SS_PARTS; at += 32) squares += a.ss[at];
#endif
#if !OVERLAP
    run.begin();
#endif

#if JOIN
    squares = join<F>(a.x, a.y, a.ss, a.post, a.norm, blockIdx.x == 0 ? a.joined : nullptr);
#else
    if constexpr (F::PACKED)
        stage<F>(staged, a.q, a.s, K, threadIdx.x, THREADS);
    else
        stage_floats<F>((float4 *)staged, a.x, a.norm, a.norm_bias);
#endif
    __syncthreads();
    if constexpr (F::PACKED)
        if (I::FIXED) run.fixed = load_input(staged, warp % (I::CHUNKS / 32 ? I::CHUNKS / 32 : 1) * 32 + lane);
    run.finish(sums);

    float scale = 1;
#if JOIN && NORM
    scale = rsqrtf(block_sum(squares) / K + EPS);
#elif NORM == 1
    if (F::PACKED) scale = rsqrtf(warp_sum(squares) / K + EPS);
#endif
    __syncthreads();
    if (warp * 32 >= CTA_ROWS) return;

    float result = 0;
    if (ends) {
        result = activate(fmaf(sums.row(0, threadIdx.x), scale, bias[0]));
        if constexpr (MATRICES == 2) result *= fmaf(sums.row(1, threadIdx.x), scale, bias[1]);
#if TIMES
        result *= before;
#else
        result += before;
#endif
    }
#if OUT_X
    if (ends) a.out[base + row] = result;
#endif
#if OUT_Q
    float largest = fabsf(result * next);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, offset));
    if (ends) {
        const float inverse = largest > 0 ? __fdividef(127.0f, largest) : 0;
        a.out_q[base + row] = (signed char)__float2int_rn(result * next * inverse);
        if (row % 16 == 0) a.out_s[(base + row) / 16] = largest * (1.0f / 127.0f);
    }
#endif
#if OUT_SS
    const float own = warp_sum(result * result);
    if (lane == 0 && ends) a.out_ss[(base + row) / (CTA_ROWS < 32 ? CTA_ROWS : 32)] = own;
#endif
#if BEST
    float best = ends ? result : __int_as_float(0xff800000);
    int at = row;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(0xffffffff, best, offset);
        const int other_at = __shfl_xor_sync(0xffffffff, at, offset);
        if (other > best || (other == best && other_at < at)) best = other, at = other_at;
    }
    if (lane == 0 && ends) a.best[row / 32] = best, a.best_row[row / 32] = at;
#endif
}

#define GRID(rows) (((rows) + CTA_ROWS - 1) / CTA_ROWS)
#if BIAS
#define MATRIX(i) , const unsigned char *w##i, const float *b##i
#else
#define MATRIX(i) , const unsigned char *w##i
#define b0 nullptr
#define b1 nullptr
#define b2 nullptr
#define b3 nullptr
#endif

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) matvec(
    const unsigned char *w0
#if BIAS
    , const float *b0
#endif
#if PARTS > 1 || GATED
    MATRIX(1)
#endif
#if PARTS > 2
    MATRIX(2)
#endif
#if PARTS > 3
    MATRIX(3)
#endif
#if JOIN
    , const float *x, const float *y, const float *ss, const float *post, const float *norm, float *joined
#endif
#if INPUT_Q && !JOIN
    , const signed char *q, const float *s
#if NORM
    , const float *ss
#endif
#endif
#if INPUT_X && !JOIN
    , const float *x
#if NORM
    , const float *norm
#endif
#if NORM == 2
    , const float *norm_bias
#endif
#endif
#if OUT_X || RESIDUAL || TIMES
    , float *out
#endif
#if OUT_NORM
    , const float *next_norm
#endif
#if OUT_Q
    , signed char *out_q, float *out_s
#endif
#if OUT_SS
    , float *out_ss
#endif
#if BEST
    , float *best, int *best_row
#endif
) {
    Arguments a = {};
#if JOIN
    a.x = x, a.y = y, a.ss = ss, a.post = post, a.norm = norm, a.joined = joined;
#endif
#if INPUT_Q && !JOIN
    a.q = q, a.s = s;
#if NORM
    a.ss = ss;
#endif
#endif
#if INPUT_X && !JOIN
    a.x = x;
#if NORM
    a.norm = norm;
#endif
#if NORM == 2
    a.norm_bias = norm_bias;
#endif
#endif
#if OUT_X || RESIDUAL || TIMES
    a.out = out;
#endif
#if OUT_NORM
    a.next_norm = next_norm;
#endif
#if OUT_SS
    a.out_ss = out_ss;
#endif
#if OUT_Q
    a.out_q = out_q, a.out_s = out_s;
#endif
#if BEST
    a.best = best, a.best_row = best_row;
#endif
    const int block = blockIdx.x;
#if GATED
    work<FORMAT0, ROWS0>(a, {w0, w1}, {b0, b1}, block * CTA_ROWS, 0);
#elif PARTS == 1
    work<FORMAT0, ROWS0>(a, {w0}, {b0}, block * CTA_ROWS, 0);
#else
    if (block < GRID(ROWS0)) return work<FORMAT0, ROWS0>(a, {w0}, {b0}, block * CTA_ROWS, 0);
    const int second = block - GRID(ROWS0);
#if PARTS == 2
    work<FORMAT1, ROWS1>(a, {w1}, {b1}, second * CTA_ROWS, ROWS0);
#else
    if (second < GRID(ROWS1)) return work<FORMAT1, ROWS1>(a, {w1}, {b1}, second * CTA_ROWS, ROWS0);
#if PARTS == 4
    const int fourth = second - GRID(ROWS1) - GRID(ROWS2);
    if (fourth >= 0) return work<FORMAT3, ROWS3>(a, {w3}, {b3}, fourth * CTA_ROWS, ROWS0 + ROWS1 + ROWS2);
#endif
    work<FORMAT2, ROWS2>(a, {w2}, {b2}, (second - GRID(ROWS1)) * CTA_ROWS, ROWS0 + ROWS1);
#endif
#endif
}
