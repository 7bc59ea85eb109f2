// Attention of one new token over the cache of its sequence: the query heads that share a KV head read K and V once.
//
// A split is what one CTA does for one KV head: it computes scores and weighted values of a range of positions. The
// first split also writes the token's own K and V to the cache and takes them from shared memory. Splits of a long
// sequence meet in a workspace; the last-arriving block joins them. In a split every warp takes tiles of positions; a
// row of K or V is read by LANES lanes of EACH elements, and all loads of a tile are issued before the first is used.
//
// Macros: HEADS, KV_HEADS, HEAD_DIM, POSITIONS (of the cache), ROPE (0 none, 1 neighbours, 2 halves) and ROPE_PAIRS,
// CACHE_Q8 (0: f16, 1: q8_0), QK_NORM and QK_EPS, or else EPS (RMS norm: 1 of each query and key head, 2 of all queries
// and of all keys, 3 of each rotated head), ATTENTION_WARPS (of a CTA), ATTENTION_LOADS (rows of K that a lane has in
// flight), SPLITS (of a KV head at most), SPLIT_ROWS (positions that make another split worth its while), SPLIT_FROM
// (positions that one split takes alone), ATTENTION_SYNC (barrier of the CTA's ATTENTION_WARPS warps);
// ATTENTION_SCALE (of products of queries and keys, where it is not 1 / sqrt(HEAD_DIM)), SCORE_CAP (scores become
// SCORE_CAP * tanh(score / SCORE_CAP)), WINDOW (positions that are attended to, the token's own included; 0: all.
// The cache then is a ring: a position lies in row position % POSITIONS), RINGS (1: rows and windows come with each
// cache, as numbers), CACHE_HEADS (KV heads, where KV_HEADS counts groups of their query heads), TEMPERATURE
// (queries are multiplied by 1 + TEMPERATURE * log(1 + position / TEMPERATURE_PERIOD)), BLOCK_POSITIONS (of a block,
// where the cache is a pool of them; 0: a sequence's positions follow each other), TABLE_BLOCKS (of a sequence in
// the table), GATED (1: behind each head's query stand as many gates, by whose sigmoids its output is multiplied),
// MADE (2: keys and values are made of the token; 1: keys, which before they are normed are values, too; 0: neither,
// they lie in the cache already, the token's too), UNIT_VALUES (1: a value is divided by its root mean square).
//
// Included once for each kind of heads: `attend` and the macros of heads are then others (other_heads.cuh).
#include "last_arriving.cuh"
#include <cuda_fp16.h>

#ifndef ROPE_PAIRS
#define ROPE_PAIRS (HEAD_DIM / 2)
#endif
#ifndef CACHE_Q8
#define CACHE_Q8 0
#endif
#ifndef QK_NORM
#define QK_NORM 0
#endif
#ifndef EPS
#define EPS 1e-6f
#endif
#ifndef QK_EPS
#define QK_EPS EPS
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef RINGS
#define RINGS 0
#endif
#ifdef CACHE_HEADS
#define KEY_HEADS CACHE_HEADS
#else
#define KEY_HEADS KV_HEADS
#endif
#ifndef BLOCK_POSITIONS
#define BLOCK_POSITIONS 0
#endif
#ifndef GATED
#define GATED 0
#endif
#if GATED
#define QUERY_PITCH (2 * HEAD_DIM)  // from a head's query to the next one's
#else
#define QUERY_PITCH HEAD_DIM
#endif
#ifndef MADE
#define MADE 2
#endif
#ifndef UNIT_VALUES
#define UNIT_VALUES 0
#endif
#ifdef SCORE_CAP
#define CAPPED 1
#else
#define CAPPED 0
#endif
#ifndef ATTENTION_WARPS
#define ATTENTION_WARPS 8
#endif
#ifndef ATTENTION_SYNC
#define ATTENTION_SYNC() __syncthreads()
#endif

namespace attend {

constexpr int GROUP = HEADS / KV_HEADS;
constexpr int THREADS = 32 * ATTENTION_WARPS;
#ifdef ATTENTION_LOADS
constexpr int LOADS = ATTENTION_LOADS;
#else
constexpr int LOADS = GROUP <= 2 ? 8 : 4;  // what the registers of 12 warps hold, or of 8 for large groups
#endif
enum { EACH = HEAD_DIM <= 256 ? 8 : 16 };  // elements of a row in a lane
constexpr int SHARES = HEAD_DIM / EACH;  // of a row
constexpr int LANES = SHARES <= 1 ? 1 : SHARES <= 2 ? 2 : SHARES <= 4 ? 4 : SHARES <= 8 ? 8 : SHARES <= 16 ? 16 : 32;
constexpr int ROWS = 32 / LANES;
constexpr int TILE = ROWS * LOADS;
constexpr int KEPT = LOADS > LANES ? LOADS / LANES : 1;  // scores of a head and tile that a lane keeps
constexpr int COPIES = LANES > LOADS ? LANES / LOADS : 1;  // lanes that keep the same score
constexpr int GROUP_SLOTS = GROUP <= 1 ? 1 : GROUP <= 2 ? 2 : GROUP <= 4 ? 4 : (GROUP + 3) / 4 * 4;
constexpr int OUTPUTS = GROUP * HEAD_DIM;
constexpr int SPLIT_FLOATS = OUTPUTS + 2 * GROUP;
constexpr int PAIR_TURNS = (HEAD_DIM / 2 + 31) / 32;
#ifdef SPLIT_ROWS
constexpr int SPLIT_POSITIONS = SPLIT_ROWS;
#else
constexpr int SPLIT_POSITIONS = ATTENTION_WARPS * TILE;
#endif
#ifdef SPLIT_FROM
constexpr int ALONE_ROWS = SPLIT_FROM;
#else
constexpr int ALONE_ROWS = SPLIT_POSITIONS;
#endif
constexpr unsigned ALL = 0xffffffffu;
constexpr float NONE = -1e30f;  // below any score

static_assert(HEADS % KV_HEADS == 0 && HEAD_DIM % 16 == 0 && HEAD_DIM <= 512, "sizes of heads");
static_assert(!CACHE_Q8 || HEAD_DIM % 32 == 0, "a q8_0 cache has blocks of 32");
static_assert(2 * ROPE_PAIRS <= HEAD_DIM, "rope turns at most a head");
static_assert((LOADS & (LOADS - 1)) == 0, "loads are halved");
static_assert(WINDOW <= POSITIONS, "the ring holds a window");
static_assert(!BLOCK_POSITIONS || (!WINDOW && !RINGS && BLOCK_POSITIONS % TILE == 0), "a tile lies in one block");

// Keys or values of one KV head of a sequence in the cache: (position, element).
#if CACHE_Q8
typedef signed char Element;
typedef uint2 Octet;
#else
typedef __half Element;
typedef uint4 Octet;
#endif
struct Side {
    Element *at;
    __half *scale;  // of q8_0: (position, block of 32)
#if WINDOW || RINGS
    int origin;  // row of what is called row 0; rows go on from the ring's end at its beginning
#endif
#if RINGS
    int rows, cached;  // of the ring; positions that a token sees
#endif
#if BLOCK_POSITIONS
    const int *blocks;  // of the sequence, in order; `at` is the KV head's in block 0
#endif
};

// Rows of the cache of a KV head.
__device__ __forceinline__ int rows_of([[maybe_unused]] const Side &side) {
#if RINGS
    return side.rows;
#else
    return POSITIONS;
#endif
}

#if BLOCK_POSITIONS
// The row of a KV head, counted from its first in block 0, in which a position of a sequence lies.
__device__ __forceinline__ int row_of(const int *blocks, int position) {
    return blocks[position / BLOCK_POSITIONS] * (KEY_HEADS * BLOCK_POSITIONS) + position % BLOCK_POSITIONS;
}
#endif

#if WINDOW
// Positions that a token's window has left behind.
__device__ __forceinline__ int left_behind(int position) { return position < WINDOW ? 0 : position - (WINDOW - 1); }
#endif

// The cache of `index` = sequence * KV_HEADS + KV head in a buffer of all of them, as a token at `position` sees it.
__device__ __forceinline__ Side side(void *elements, __half *scales, int index, [[maybe_unused]] int position = 0) {
    size_t row = (size_t)index * POSITIONS;
#if WINDOW
    return {(Element *)elements + row * HEAD_DIM, CACHE_Q8 ? scales + row * (HEAD_DIM / 32) : nullptr,
            left_behind(position) % POSITIONS};
#else
    return {(Element *)elements + row * HEAD_DIM, CACHE_Q8 ? scales + row * (HEAD_DIM / 32) : nullptr};
#endif
}

#if RINGS
// The same of a ring of `rows`, of which a token at `position` sees at most `most` positions.
__device__ __forceinline__ Side ring(void *elements, __half *scales, int index, int rows, int most, int position) {
    const size_t row = (size_t)index * rows;
    const int cached = min(position, most);
    return {(Element *)elements + row * HEAD_DIM, CACHE_Q8 ? scales + row * (HEAD_DIM / 32) : nullptr,
            (position - cached) % rows, rows, cached};
}
#endif

// Positions of a cache that a token sees.
__device__ __forceinline__ int cached([[maybe_unused]] const Side &keys, int position) {
#if RINGS
    return keys.cached;
#elif WINDOW
    return position - left_behind(position) + !MADE;
#else
    return position + !MADE;
#endif
}

// One KV head of a sequence in a pool of blocks (block, KV head, BLOCK_POSITIONS, HEAD_DIM); `table`: of all sequences.
#if BLOCK_POSITIONS
__device__ __forceinline__ Side side(void *elements, __half *scales, int sequence, int head, const int *table) {
    size_t row = (size_t)head * BLOCK_POSITIONS;
    return {(Element *)elements + row * HEAD_DIM, CACHE_Q8 ? scales + row * (HEAD_DIM / 32) : nullptr,
            table + (size_t)sequence * TABLE_BLOCKS};
}
#endif

struct __align__(16) Shared {
    float query[GROUP][HEAD_DIM];  // rotated, times scale and log2 e
    float fresh[2][HEAD_DIM];      // the token's own key and value, as the cache holds them
    float weight[ATTENTION_WARPS][TILE][GROUP_SLOTS];
    float mixed[ATTENTION_WARPS][OUTPUTS];
    float top[ATTENTION_WARPS][GROUP], sum[ATTENTION_WARPS][GROUP];
    float share[GROUP][SPLITS > 1 ? SPLITS : 1];
    int last;
#if QK_NORM == 2
    float squares[2][ATTENTION_WARPS];
#endif
};

// Positions [begin, end) of a split, and how many splits there are; `cached` positions lie in the cache.
struct Range {
    int begin, end, splits;
};

__device__ __forceinline__ Range range(int cached, int split) {
    if (cached <= ALONE_ROWS) return {split ? cached : 0, cached, 1};
    int wanted = (cached + SPLIT_POSITIONS - 1) / SPLIT_POSITIONS;
    int limit = wanted < 1 ? 1 : wanted < SPLITS ? wanted : SPLITS;
    int rows = ((cached + limit - 1) / limit + TILE - 1) / TILE * TILE;
    int splits = rows ? (cached + rows - 1) / rows : 1;
    int begin = split * rows, end = begin + rows;
    return {begin < cached ? begin : cached, end < cached ? end : cached, splits};
}

__device__ __forceinline__ float2 widen(unsigned pair) {
    __half2 halves;
    memcpy(&halves, &pair, 4);
    return __half22float2(halves);
}

// Four signed bytes as floats: each byte, moved up by 128, becomes the low bits of 2^23.
__device__ __forceinline__ void widen_bytes(unsigned bytes, float *out) {
    unsigned raised = bytes ^ 0x80808080u;
    out[0] = __uint_as_float(__byte_perm(raised, 0x4b000000u, 0x7440)) - 8388736.0f;
    out[1] = __uint_as_float(__byte_perm(raised, 0x4b000000u, 0x7441)) - 8388736.0f;
    out[2] = __uint_as_float(__byte_perm(raised, 0x4b000000u, 0x7442)) - 8388736.0f;
    out[3] = __uint_as_float(__byte_perm(raised, 0x4b000000u, 0x7443)) - 8388736.0f;
}

__device__ __forceinline__ void widen(uint4 octet, float *out) {
    float2 a = widen(octet.x), b = widen(octet.y), c = widen(octet.z), d = widen(octet.w);
    out[0] = a.x, out[1] = a.y, out[2] = b.x, out[3] = b.y, out[4] = c.x, out[5] = c.y, out[6] = d.x, out[7] = d.y;
}

__device__ __forceinline__ void widen(uint2 octet, float *out) {
    widen_bytes(octet.x, out);
    widen_bytes(octet.y, out + 4);
}

// 2 to the power of an exponent of at most 0; far below, 0.
__device__ __forceinline__ float power(float exponent) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(exponent));
    return value;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(ALL, value, step);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(ALL, value, step));
    return value;
}

// Sums of COUNT values over the lanes that differ in the bits from HIGH down to LOW, shared out: while an even number
// is left, a lane hands half of its sums to the other side. Returns the index of its first; LEFT of them are then in
// place.
template <int COUNT, int HIGH, int LOW>
struct Spread {
    static constexpr bool HALVE = COUNT % 2 == 0;
    typedef Spread<HALVE ? COUNT / 2 : COUNT, HIGH / 2, LOW> Next;
    static constexpr int LEFT = Next::LEFT;
    __device__ static __forceinline__ int run(float *values, unsigned lane) {
        constexpr int half = COUNT / 2;
        bool upper = lane & HIGH;
        if constexpr (HALVE) {
#pragma unroll
            for (int i = 0; i < half; i++) {
                float given = upper ? values[i] : values[i + half], kept = upper ? values[i + half] : values[i];
                values[i] = kept + __shfl_xor_sync(ALL, given, HIGH);
            }
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; i++) values[i] += __shfl_xor_sync(ALL, values[i], HIGH);
        }
        return (HALVE && upper ? half : 0) + Next::run(values, lane);
    }
};

template <int COUNT, int LOW>
struct Spread<COUNT, LOW, LOW> {
    static constexpr int LEFT = COUNT;
    __device__ static __forceinline__ int run(float *, int) { return 0; }
};

// Rows that earlier launches of the same recording wrote: not ld.global.nc, whose lines a launch need not have dropped.
__device__ __forceinline__ uint4 stream(const uint4 *at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ uint2 stream(const uint2 *at) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}

// A tile's rows of K or of V as they come from memory.
struct Rows {
    Octet octet[LOADS][EACH / 8];
#if CACHE_Q8
    unsigned short scale[LOADS];
#endif
    // The rows from `first` on, all of which are there.
    __device__ __forceinline__ void load(const Side &from, int first, unsigned lane) {
        take(from, first + lane / LANES, lane, [](int u) { return u * ROWS; });
    }

    // The rows from `first` on; those from `end` on are the last one once more.
    __device__ __forceinline__ void load_some(const Side &from, int first, int end, unsigned lane) {
        const int most = end - 1 - (first + lane / LANES);
        take(from, first + lane / LANES, lane, [=](int u) { return min(u * ROWS, most); });
    }

    // `beyond` gives each load's distance in rows from the first.
    template <typename Beyond>
    __device__ __forceinline__ void take(const Side &from, int row, unsigned lane, Beyond beyond) {
        const unsigned column = (lane % LANES < SHARES ? lane % LANES : SHARES - 1) * (EACH / 8);
#if WINDOW || RINGS
        const auto place = [=](int u) {
            const int past = from.origin + row + beyond(u) - rows_of(from);
            return past < 0 ? past + rows_of(from) : past;
        };
#pragma unroll
        for (int u = 0; u < LOADS; u++)
#pragma unroll
            for (int i = 0; i < EACH / 8; i++)
                octet[u][i] = stream((const Octet *)(from.at + place(u) * HEAD_DIM) + column + i);
#if CACHE_Q8
        const unsigned short *of_rows = (const unsigned short *)from.scale + column / 4;
#pragma unroll
        for (int u = 0; u < LOADS; u++) scale[u] = of_rows[place(u) * (HEAD_DIM / 32)];
#endif
#else
#if BLOCK_POSITIONS
        row = row_of(from.blocks, row);
#endif
        const Octet *at = (const Octet *)(from.at + (size_t)row * HEAD_DIM) + column;
#pragma unroll
        for (int u = 0; u < LOADS; u++)
#pragma unroll
            for (int i = 0; i < EACH / 8; i++) octet[u][i] = stream(at + beyond(u) * (HEAD_DIM / 8) + i);
#if CACHE_Q8
        const unsigned short *scales = (const unsigned short *)from.scale + (size_t)row * (HEAD_DIM / 32) + column / 4;
#pragma unroll
        for (int u = 0; u < LOADS; u++) scale[u] = scales[beyond(u) * (HEAD_DIM / 32)];
#endif
#endif
    }

    __device__ __forceinline__ void widened(int u, float (&out)[EACH]) const {
#pragma unroll
        for (int i = 0; i < EACH / 8; i++) widen(octet[u][i], out + 8 * i);
    }

    __device__ __forceinline__ float factor(int u) const {
#if CACHE_Q8
        return __half2float(__ushort_as_half(scale[u]));
#else
        return 1;
#endif
    }
};

// A head's vector as pairs: lane holds pairs lane, lane + 32, ...; pair i is what rope turns together.
__device__ __forceinline__ int2 pair_at(int pair) {
    if (ROPE == 2 && pair < ROPE_PAIRS) return {pair, pair + ROPE_PAIRS};
    return {2 * pair, 2 * pair + 1};
}

// Sums of squares of all of a token's queries, and of its keys, by THREADS threads: each warp's part. Needs a barrier.
__device__ __forceinline__ void sum_squares(float (&squares)[2][ATTENTION_WARPS], const float *q, const float *k,
                                            unsigned thread) {
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const float4 *from = (const float4 *)(side ? k : q);
        float sum = 0;
        for (int i = thread; i < (side ? KEY_HEADS : HEADS) * HEAD_DIM / 4; i += THREADS)
            sum += from[i].x * from[i].x + from[i].y * from[i].y + from[i].z * from[i].z + from[i].w * from[i].w;
        sum = warp_sum(sum);
        if (thread % 32 == 0) squares[side][thread / 32] = sum;
    }
}

// What norms so many elements whose squares were summed.
__device__ __forceinline__ float whole(const float (&squares)[ATTENTION_WARPS], int elements) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < ATTENTION_WARPS; i++) sum += squares[i];
    return rsqrtf(sum / elements + QK_EPS);
}

// What queries are multiplied by where they stand.
__device__ __forceinline__ float temperature(int position) {
#ifdef TEMPERATURE
    return 1 + TEMPERATURE * logf((float)(1 + position / TEMPERATURE_PERIOD));
#else
    return 1;
#endif
}

// Turn a pair of elements by its angle at this position.
__device__ __forceinline__ void turn_pair(float &a, float &b, int pair, const float *turn, size_t sines) {
    if (ROPE && pair < ROPE_PAIRS) {
        float c = turn[pair], s = turn[pair + sines];
        float turned = a * c - b * s;
        b = a * s + b * c;
        a = turned;
    }
}

// A lane's weights of what norms a head, by its pairs.
struct HeadNorm {
    float2 pair[PAIR_TURNS];
    __device__ __forceinline__ void load([[maybe_unused]] const float *weights, [[maybe_unused]] unsigned lane) {
#if QK_NORM
#pragma unroll
        for (int i = 0; i < PAIR_TURNS; i++) {
            const int of = lane + 32 * i;
            if (of >= HEAD_DIM / 2) break;
            const int2 at = pair_at(of);
            pair[i] = {weights[at.x], weights[at.y]};
        }
#endif
    }
};

// Norm and rotate one head of q or k by a warp; where heads are normed together, `factor` has their norm.
// `turn` is the table's cosines at this position; its sines are `sines` on.
__device__ __forceinline__ void turn_head(const float *in, const HeadNorm &norm, const float *turn, size_t sines,
                                          float factor, float *out, unsigned lane) {
    float2 held[PAIR_TURNS];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < PAIR_TURNS; i++) {
        int pair = lane + 32 * i;
        if (pair >= HEAD_DIM / 2) break;
        int2 at = pair_at(pair);
        held[i] = {in[at.x], in[at.y]};
        if (QK_NORM == 3) turn_pair(held[i].x, held[i].y, pair, turn, sines);
        squares += held[i].x * held[i].x + held[i].y * held[i].y;
    }
    float root = factor;
    if (QK_NORM == 1 || QK_NORM == 3) root *= rsqrtf(warp_sum(squares) / HEAD_DIM + QK_EPS);
#pragma unroll
    for (int i = 0; i < PAIR_TURNS; i++) {
        int pair = lane + 32 * i;
        if (pair >= HEAD_DIM / 2) break;
        int2 at = pair_at(pair);
        float a = held[i].x * root, b = held[i].y * root;
        if (QK_NORM) a *= norm.pair[i].x, b *= norm.pair[i].y;
        if (QK_NORM != 3) turn_pair(a, b, pair, turn, sines);
        out[at.x] = a;
        out[at.y] = b;
    }
    __syncwarp();
}

// A head's value by a warp, as the cache is to hold it.
__device__ __forceinline__ void copy_value(const float *in, float *out, unsigned lane) {
    float by = 1;
#if UNIT_VALUES
    float squares = 0;
    for (int i = lane; i < HEAD_DIM; i += 32) squares += in[i] * in[i];
    by = rsqrtf(warp_sum(squares) / HEAD_DIM + QK_EPS);
#endif
    for (int i = lane; i < HEAD_DIM; i += 32) out[i] = UNIT_VALUES ? in[i] * by : in[i];
    __syncwarp();
}

// Round a row in shared memory to the cache's type and write it there; the row then holds what the cache holds.
__device__ __forceinline__ void store_row(float *row, const Side &to, int position, unsigned lane) {
#if WINDOW || RINGS
    position %= rows_of(to);
#elif BLOCK_POSITIONS
    position = row_of(to.blocks, position);
#endif
#if CACHE_Q8
#pragma unroll
    for (int block = 0; block < HEAD_DIM / 32; block++) {
        float value = row[block * 32 + lane];
        float step = warp_max(fabsf(value)) / 127;
        __half rounded = __float2half_rn(step);
        float quantized = roundf(step > 0 ? value / step : 0);
        to.at[(size_t)position * HEAD_DIM + block * 32 + lane] = (signed char)quantized;
        if (lane == 0) to.scale[(size_t)position * (HEAD_DIM / 32) + block] = rounded;
        row[block * 32 + lane] = quantized * __half2float(rounded);
    }
#else
    for (int i = lane; i < HEAD_DIM; i += 32) {
        __half rounded = __float2half_rn(row[i]);
        to.at[(size_t)position * HEAD_DIM + i] = rounded;
        row[i] = __half2float(rounded);
    }
#endif
}

// The norms of queries and key, which a warp loads before queries and key are there.
struct HeadNorms {
    const float *query, *key;
    HeadNorm held;
    __device__ __forceinline__ HeadNorms(const float *query, const float *key, unsigned thread)
        : query(query), key(key) {
        load(thread / 32, thread % 32);
    }
    // Those of a query head, or, after all of them, of the key.
    __device__ __forceinline__ void load(int vector, unsigned lane) {
        if (vector <= GROUP) held.load(vector == GROUP ? key : query + (QK_NORM == 2 ? vector * HEAD_DIM : 0), lane);
    }
};

// Queries of a KV head into shared memory; the first split also makes the token's own key and value and stores them.
// q, k, v: float32, this KV head's GROUP query heads, its key and its value. turn: rope's cosines at this position; its
// sines are `sines` on.
__device__ __forceinline__ void prepare(Shared &shared, const Side &keys, const Side &values, int position, bool first,
                                        const float *q, const float *k, const float *v, HeadNorms norms,
                                        const float *turn, size_t sines, unsigned thread) {
    unsigned lane = thread % 32;
#ifdef ATTENTION_SCALE
    const float scale = 1.4426950408889634f * ATTENTION_SCALE;
#else
    const float scale = 1.4426950408889634f / sqrtf((float)HEAD_DIM);
#endif
    float q_factor = scale, k_factor = 1;
#ifdef TEMPERATURE
    q_factor *= temperature(position);
#endif
#if QK_NORM == 2
    q_factor *= whole(shared.squares[0], HEADS * HEAD_DIM), k_factor = whole(shared.squares[1], KEY_HEADS * HEAD_DIM);
#endif
    for (int vector = thread / 32; vector < GROUP + (first ? 2 : 0); vector += ATTENTION_WARPS) {
        if (vector >= ATTENTION_WARPS) norms.load(vector, lane);
        if (vector < GROUP) {
            turn_head(q + vector * QUERY_PITCH, norms.held, turn, sines, q_factor, shared.query[vector], lane);
            continue;
        }
        bool value = vector > GROUP;
        float *row = shared.fresh[value];
        if (value) {
            copy_value(v, row, lane);
        } else {
            turn_head(k, norms.held, turn, sines, k_factor, row, lane);
        }
#if RINGS || BLOCK_POSITIONS
        Side to = keys;  // whose rows are the values' too; a choice of two Sides would put both into local memory
        if (value) to.at = values.at, to.scale = values.scale;
        store_row(row, to, position, lane);
#else
        store_row(row, {value ? values.at : keys.at, value ? values.scale : keys.scale}, position, lane);
#endif
    }
}

#if CAPPED
// A score (times log2 e) as it counts.
__device__ __forceinline__ float capped(float score) {
    constexpr float cap = 1.4426950408889634f * SCORE_CAP;
    return cap * tanhf(score * (1 / cap));
}
#endif

// What a warp has gathered of its positions: for each head the largest score, the sum of weights, the weighted values.
struct Gathered {
    float query[GROUP][EACH], mixed[GROUP][EACH], top[GROUP], sum[GROUP];

    // Start from the token's own key and value where `fresh`, else from nothing.
    __device__ __forceinline__ void begin(const Shared &shared, bool fresh, unsigned lane) {
        int column = lane % LANES;
        bool inside = column < SHARES;
        float own[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++)
            own[i] = fresh && inside && lane < LANES ? shared.fresh[1][column * EACH + i] : 0;
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float score = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                query[g][i] = inside ? shared.query[g][column * EACH + i] : 0;
                mixed[g][i] = own[i];
            }
            if (fresh) {
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    score += query[g][i] * (inside ? shared.fresh[0][column * EACH + i] : 0);
#pragma unroll
                for (int step = LANES / 2; step; step /= 2) score += __shfl_xor_sync(ALL, score, step);
            }
#if CAPPED
            score = capped(score);
#endif
            top[g] = fresh ? score : NONE;
            sum[g] = fresh && lane == 0 ? 1 : 0;
        }
    }

    // Weights of the positions of a tile of keys into shared memory. The tile begins at `first`; those before `begin`,
    // which another tile has, and from `end` on weigh nothing.
    __device__ __forceinline__ void score(const Rows &keys, float (*weight)[GROUP_SLOTS], int first, int begin, int end,
                                          unsigned lane) {
        float scores[GROUP][LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            float key[EACH];
            keys.widened(u, key);
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                float dot = 0;
#pragma unroll
                for (int i = 0; i < EACH; i++) dot += query[g][i] * key[i];
                scores[g][u] = dot * keys.factor(u);
            }
        }
        // Lane holds the scores of KEPT positions from `own` on, ROWS apart.
        int own = 0;
#pragma unroll
        for (int g = 0; g < GROUP; g++) own = Spread<LOADS, LANES / 2, 0>::run(scores[g], lane) * ROWS + lane / LANES;
        bool higher = false;
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            const int position = first + own + j * ROWS;
            const bool counts = position >= begin && position < end;
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
#if CAPPED
                scores[g][j] = capped(scores[g][j]);
#endif
                if (!counts) scores[g][j] = NONE;
                higher |= scores[g][j] > top[g];
            }
        }
        if (__any_sync(ALL, higher)) {
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                float best = scores[g][0];
#pragma unroll
                for (int j = 1; j < KEPT; j++) best = fmaxf(best, scores[g][j]);
                best = fmaxf(top[g], warp_max(best));
                float shrink = power(top[g] - best);
                top[g] = best;
                sum[g] *= shrink;
#pragma unroll
                for (int i = 0; i < EACH; i++) mixed[g][i] *= shrink;
            }
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            float part[GROUP_SLOTS] = {};
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                part[g] = power(scores[g][j] - top[g]);
                if (lane % COPIES == 0) sum[g] += part[g];
            }
            copy_weights(part, weight[own + j * ROWS]);  // copies store alike
        }
        __syncwarp();
    }

    // Add a tile of values by its weights.
    __device__ __forceinline__ void add(const Rows &values, const float (*weight)[GROUP_SLOTS], unsigned lane) {
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            float value[EACH], part[GROUP_SLOTS];
            copy_weights(weight[u * ROWS + lane / LANES], part);
            values.widened(u, value);
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                part[g] *= values.factor(u);
#pragma unroll
                for (int i = 0; i < EACH; i++) mixed[g][i] += part[g] * value[i];
            }
        }
    }

    __device__ static __forceinline__ void copy_weights(const float *from, float *to) {
        if constexpr (GROUP_SLOTS % 4 == 0) {
#pragma unroll
            for (int i = 0; i < GROUP_SLOTS; i += 4) *(float4 *)(to + i) = *(const float4 *)(from + i);
        } else if constexpr (GROUP_SLOTS == 2) {
            *(float2 *)to = *(const float2 *)from;
        } else {
            to[0] = from[0];
        }
    }

    // Hand the warp's result to its CTA.
    __device__ __forceinline__ void publish(Shared &shared, unsigned warp, unsigned lane) {
        typedef Spread<GROUP * EACH, 16, LANES / 2> Shares;
        int first = Shares::run(&mixed[0][0], lane);
        if (lane % LANES < SHARES) {
#pragma unroll
            for (int i = 0; i < Shares::LEFT; i++) {
                int g = (first + i) / EACH, d = (first + i) % EACH;
                shared.mixed[warp][g * HEAD_DIM + lane % LANES * EACH + d] = (&mixed[0][0])[i];
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float total = warp_sum(sum[g]);
            if (lane == 0) shared.top[warp][g] = top[g], shared.sum[warp][g] = total;
        }
    }
};

// Output `at` of this CTA's warps: weighted values, not yet divided; the largest score and the sum of weights with it.
__device__ __forceinline__ float join_warps(const Shared &shared, int at, float &top, float &sum) {
    int g = at / HEAD_DIM;
    float mixed = 0;
    top = NONE, sum = 0;
#pragma unroll
    for (int w = 0; w < ATTENTION_WARPS; w++) top = fmaxf(top, shared.top[w][g]);
#pragma unroll
    for (int w = 0; w < ATTENTION_WARPS; w++) {
        const float part = power(shared.top[w][g] - top), found = shared.mixed[w][at];
        mixed += shared.top[w][g] == NONE ? 0 : part * found;  // a warp that had no positions wrote nothing else
        sum += part * shared.sum[w][g];
    }
    return mixed;
}

// Where the outputs of a KV head go: what is null is not written.
struct Output {
    float *x;          // (heads, HEAD_DIM)
    signed char *q;    // the same as bytes,
    float *s;          // with a scale for each 16
    __half *h;         // the same as halves, each at OUTPUT_ORDER of its index
#if GATED
    const float *gates;  // each head's, QUERY_PITCH apart
#endif

    __device__ __forceinline__ void put(int at, float value, bool inside) const {
#if GATED
        if (inside) value = __fdividef(value, 1 + __expf(-gates[at / HEAD_DIM * QUERY_PITCH + at % HEAD_DIM]));
#endif
        if (inside && x) x[at] = value;
#ifdef OUTPUT_ORDER
        if (inside && h) h[OUTPUT_ORDER(at)] = __float2half_rn(value);
#endif
        if (!q) return;
        float most = fabsf(value);
#pragma unroll
        for (int step = 8; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
        float scale = most / 127;
        if (!inside) return;
        q[at] = (signed char)__float2int_rn(most > 0 ? value * (127 / most) : 0);
        if (at % 16 == 0) s[at / 16] = scale;
    }
};

// Join the splits of a KV head in the workspace, by the last-arriving CTA.
__device__ __forceinline__ void join_splits(Shared &shared, const float *workspace, int splits, const Output &out,
                                           unsigned thread) {
    for (int g = thread / 32; g < GROUP; g += ATTENTION_WARPS) {
        unsigned lane = thread % 32;
        float top = NONE, sum = 0;
        for (int p = lane; p < splits; p += 32) top = fmaxf(top, __ldcg(workspace + p * SPLIT_FLOATS + OUTPUTS + g));
        top = warp_max(top);
        for (int p = lane; p < splits; p += 32) {
            float part = power(__ldcg(workspace + p * SPLIT_FLOATS + OUTPUTS + g) - top);
            shared.share[g][p] = part;
            sum += part * __ldcg(workspace + p * SPLIT_FLOATS + OUTPUTS + GROUP + g);
        }
        sum = warp_sum(sum);
        for (int p = lane; p < splits; p += 32) shared.share[g][p] /= sum;
    }
    ATTENTION_SYNC();
    for (int first = 0; first < OUTPUTS; first += THREADS) {
        int at = first + thread;
        bool inside = at < OUTPUTS;
        if (first + thread / 32 * 32 >= OUTPUTS) break;
        float value = 0;
        if (inside) {
#pragma unroll 8
            for (int p = 0; p < splits; p++)
                value += shared.share[at / HEAD_DIM][p] * __ldcg(workspace + p * SPLIT_FLOATS + at);
        }
        out.put(at, value, inside);
    }
}

// What the warps of one of `splits` have published, to the output or to the last-arriving CTA.
__device__ __forceinline__ void finish_split(Shared &shared, int split, int splits, float *workspace, unsigned *counter,
                                            const Output &out, unsigned thread) {
    float top, sum;
    float *mine = workspace + split * SPLIT_FLOATS;
    for (int first = 0; first < OUTPUTS; first += THREADS) {
        int index = first + thread;
        bool inside = index < OUTPUTS;
        if (first + thread / 32 * 32 >= OUTPUTS) break;
        float value = inside ? join_warps(shared, index, top, sum) : 0;
        if (splits == 1) {
            out.put(index, inside ? __fdividef(value, sum) : 0, inside);
        } else if (inside) {
            mine[index] = value;
            if (index % HEAD_DIM == 0) {
                mine[OUTPUTS + index / HEAD_DIM] = top;
                mine[OUTPUTS + GROUP + index / HEAD_DIM] = sum;
            }
        }
    }
    if (splits == 1) return;
    ATTENTION_SYNC();
    if (thread == 0) shared.last = last_arriving(counter, splits);
    ATTENTION_SYNC();
    if (shared.last) join_splits(shared, workspace, splits, out, thread);
}

// One split of a KV head by one CTA. `ready` is called once the first tiles are on their way and before q, k and v
// are read. workspace: SPLIT_FLOATS floats for each split of this head; counter: 0, and 0 again afterwards.
template <typename Ready>
__device__ __forceinline__ void split(Shared &shared, const Side &keys, const Side &values, int split, int position,
                                     const float *q, const float *k, const float *v, const float *q_norm,
                                     const float *k_norm, const float *turn, size_t sines, float *workspace,
                                     unsigned *counter, const Output &out, unsigned thread, Ready ready) {
    const Range rows = range(cached(keys, position), split);
    if (split >= rows.splits) return;
    const unsigned warp = thread / 32, lane = thread % 32;
    int at = rows.begin + warp * TILE;
    Rows k_rows, v_rows;
    if (!MADE) ready();  // the token's own are of a launch of this step
    if (at < rows.end) {
        k_rows.load_some(keys, at, rows.end, lane);
        v_rows.load_some(values, at, rows.end, lane);
    }
    const HeadNorms norms(q_norm, k_norm, thread);
    if (MADE) ready();
    prepare(shared, keys, values, position, MADE && split == 0, q, k, v, norms, turn, sines, thread);
    ATTENTION_SYNC();
    // The last warp has the fewest tiles, so that the token's own key is its.
    bool fresh = MADE && split == 0 && warp == ATTENTION_WARPS - 1;
    if (fresh || at < rows.end) {
        Gathered gathered;
        gathered.begin(shared, fresh, lane);
        for (int first = at; at < rows.end;) {
            // A later tile that would reach beyond the end begins earlier instead, in rows that count elsewhere; in a
            // pool of blocks it would lie in two of them.
            const int next = at + ATTENTION_WARPS * TILE;
            const int next_first = BLOCK_POSITIONS ? next : min(next, rows.end - TILE);
            const auto load = [&](Rows &to, const Side &from) {
                if (BLOCK_POSITIONS)
                    to.load_some(from, next, rows.end, lane);
                else
                    to.load(from, next_first, lane);
            };
            gathered.score(k_rows, shared.weight[warp], first, at, rows.end, lane);
            if (next < rows.end) load(k_rows, keys);
            gathered.add(v_rows, shared.weight[warp], lane);
            if (next < rows.end) load(v_rows, values);
            at = next, first = next_first;
        }
        gathered.publish(shared, warp, lane);
    } else if (lane < GROUP) {
        shared.top[warp][lane] = NONE, shared.sum[warp][lane] = 0;
    }
    ATTENTION_SYNC();
    finish_split(shared, split, rows.splits, workspace, counter, out, thread);
}

}  // namespace attend
