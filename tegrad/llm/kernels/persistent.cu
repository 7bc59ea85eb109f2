// A whole decode step in one launch: every CTA runs its list of instructions (tegrad/llm/schedule.py), and all of them
// must be on the chip at once. A CTA has three kinds of warps:
//
//   CONSUMERS warps multiply segments of weights from the pipeline, and attend;
//   EPILOGUE warps wait for an instruction's input, stage it in shared memory, and turn what the consumers computed
//       into what the next stage reads: norms' factors, activations, the residual stream, quantized packets;
//   one warp fills the pipeline with the weights of all instructions, as far ahead as it has stages; it waits for
//       nobody.
//
// A consumer reads its first segment of an instruction into registers before it waits for the input. What a CTA needs
// of the residual stream stays in its shared memory.
//
// Grid (CTAS), 32 * (CONSUMERS + EPILOGUE + 1) threads, SHARED bytes of dynamic shared memory. Arguments:
//   program    struct of 32 words (schedule.WORDS) for each stage and CTA
//   workspace  schedule.workspace: number of the step, counters, joined splits of attention, packets; zeros at first
//   state, ring   kernels/state.cuh; histories, ends   kernels/sampling.cuh: of these, the step's end
//   rope       float32 (ANGLE_TABLES, 2, ROPE_POSITIONS, TURN_PAIRS)
//   logits     float32 (rows of the output matrix)
//   timestamps where TIMESTAMPS: u64 (CTAS, STAGES, 4), SM cycles: stage begun, input there, results there, published
//   last       stages to run; fewer than STAGES for tests, which then find every vector as the last stage left it
//   greedy     1: the likeliest token ends the step; 0: other launches sample from the logits
//
// Macros: CTAS, STAGES, VOCAB, DIM, HEADS, CACHE_HEADS (KV heads; KV_HEADS counts their groups of query heads),
// KV_HEADS, HEAD_DIM, POSITIONS, ROPE, EPS, ... (attention.cuh), SPLITS, ACTIVATION; USES_<format> 1 for each format
// that occurs; JOINS, COUNTERS, REPORTS (places in the workspace); COLUMNS (of the widest matrix), OWN (rows of the
// residual stream of a CTA at most), SPLIT_SETS (1: two CTAs may write halves of 16 elements), SUMS (row sums of an
// instruction at most), POST_NORMS (1: APART and JOIN instead of ADD), BY_MEAN (1: not for norms after blocks, but to
// add without its mean what blocks add, which layer norms would subtract), UNNORMED (1: layers read the stream as it
// is), UNGATED (1: GATE's rows are activation(up) and have a bias), UPS (rows of up that a GATE at most keeps for the
// next one, which is of gate's), PARALLEL (1: of two APARTs the first only keeps its rows, and the second adds its own
// to them; GATE reads what PROJECT has staged for its format),
// LAYER_INPUTS (1: a GATE with OF_LAYER_INPUT reads the stream as it is and multiplies by what lies where others have a
// bias), SCALED (1: who adds multiplies the stream by a number),
// SECOND_HEAD_DIM, SECOND_KV_HEADS, SECOND_CACHE_HEADS, SECOND_ROPE_PAIRS, SECOND_ATTENTION_LOADS (of instructions
// with OF_SECOND, where a model has two kinds of heads), TURN_PAIRS (of the ropes' tables), KEYS_PLACED (heads.cuh),
// GATED (attention.cuh), DELTA_HEADS and others (delta.cuh, where layers are delta nets),
// TAPS (of layers that convolve, with rings of TAP_ROWS rows of DIM floats; 0: there are none),
// LOGIT_CAP (logits become LOGIT_CAP * tanh(logit / LOGIT_CAP)), ANGLE_TABLES (of how many ropes), FIXED (1: the
// segments of a warp all meet the same activations), NARROW (1: packed rows may be a multiple of 64 only, else they are
// of 256), SHARED; what may be tuned: CONSUMERS, EPILOGUE, PIPELINE_STAGES (at most), POLLED (sets of 16, of two
// packets each, that an epilogue thread waits for together), ATTENTION_PIPELINE (1, 2: keys and values come through the
// pipeline, attention_pipeline.cuh; 0: each lane loads its own) and those of sync.cuh.
#include "formats.cuh"
#include "sampling.cuh"
#include "barrier.cuh"
#include "attention.cuh"
#ifdef SECOND_HEAD_DIM
enum { FIRST_HEAD_DIM = HEAD_DIM, FIRST_KV_HEADS = KV_HEADS, FIRST_CACHE_HEADS = CACHE_HEADS,
       FIRST_ROPE_PAIRS = ROPE_PAIRS, FIRST_ATTENTION_LOADS = ATTENTION_LOADS };
#include "other_heads.cuh"
#include "attention.cuh"
#include "other_heads.cuh"
#endif
#include "blocks.cuh"
#include "activation.cuh"
#ifdef DELTA_HEADS
#include "delta.cuh"
#endif

#ifndef TIMESTAMPS
#define TIMESTAMPS 0
#endif
#ifndef POLLED
#define POLLED 3
#endif
#ifndef NARROW
#define NARROW 0
#endif
#ifndef ANGLE_TABLES
#define ANGLE_TABLES 1
#endif
#ifndef TURN_PAIRS
#define TURN_PAIRS ROPE_PAIRS
#endif
#ifndef KEYS_PLACED
#define KEYS_PLACED 0
#endif
#ifndef LAYER_INPUTS
#define LAYER_INPUTS 0
#endif
#ifndef SCALED
#define SCALED 0
#endif
#ifndef POST_NORMS
#define POST_NORMS 0
#endif
#ifndef BY_MEAN
#define BY_MEAN 0
#endif
#ifndef PARALLEL
#define PARALLEL 0
#endif
#ifndef TAPS
#define TAPS 0
#endif
#ifndef UNGATED
#define UNGATED 0
#endif
#ifndef UNNORMED
#define UNNORMED 0
#endif
#ifndef ROPE_POSITIONS
#define ROPE_POSITIONS POSITIONS
#endif
#ifndef ATTENTION_PIPELINE
#define ATTENTION_PIPELINE 0
#endif

// schedule.Op, schedule.WORDS and flags
enum Op { NOTHING, EMBED, PROJECT, ATTEND, ADD, GATE, LOGITS, SAMPLE, APART, JOIN, CONVOLVE, DELTA };
enum Field { OP, FLAGS, STAGE, COLUMNS_OF, SOURCE, WAIT, WRITERS, TARGET, FIRST, ROWS_OF, HEAD, SPLIT_OF, RUN = 12,
             NORM = 24, BIAS = 26, EXTRA = 28, WAIT2 = 30, WAIT3 = 31,
             RING_ROWS = RUN + 2, MOST_SEEN = RUN + 3, KEYS_AT = RUN + 6, VALUES_AT = RUN + 7 };
enum RunField { ADDRESS, SEGMENTS_OF = 2, FORMAT_OF = 3 };
enum Flag { READS_FLOATS = 1, WRITES_FLOATS = 2, HANDS_ON = 4, TIMES_LEFT = 8, OF_LAYER_INPUT = 16, OF_SECOND = 32 };
#define NAMED(NAME, ...) FORMAT_##NAME,
enum Format { EVERY_FORMAT(NAMED) };
#undef NAMED
constexpr int RUNS = 3, COUNTER_BYTES = 32;
enum : unsigned { ADDED = POST_NORMS ? APART : ADD, GROWS = POST_NORMS ? JOIN : ADD };  // the product, and who adds it
__device__ __forceinline__ bool multiplies(unsigned op) {
    return op == PROJECT || op == ADDED || op == GATE || op == LOGITS || (TAPS != 0 && op == CONVOLVE);
}
#ifdef DELTA_HEADS
__device__ __forceinline__ bool is_delta(unsigned op) { return op == DELTA; }
#else
__device__ __forceinline__ constexpr bool is_delta(unsigned) { return false; }
#endif
constexpr int GROUPS_PER_HEAD = KV_HEADS / CACHE_HEADS;
#ifdef SECOND_HEAD_DIM
enum { SECOND_GROUPS_PER_HEAD = SECOND_KV_HEADS / SECOND_CACHE_HEADS };
__device__ __forceinline__ bool is_second(unsigned flags) { return flags & OF_SECOND; }
#endif

constexpr int CONSUMER_THREADS = 32 * CONSUMERS, EPILOGUE_THREADS = 32 * EPILOGUE;
constexpr int HELD = 4;        // segments whose lanes' sums a warp keeps before it adds them up
static_assert(HELD % PER_TILE == 0, "whole tiles");
#define USED(NAME, ...) + USES_##NAME
constexpr bool PLAIN = 0 EVERY_PLAIN(USED), PACKED = 0 EVERY_PACKED(USED);
constexpr unsigned EVERY = 0xffffffffu;

__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
__device__ constexpr int segment_most() {
    int found = 0;
#define WIDER(NAME, ...) found = most(found, USES_##NAME * BYTES_##NAME);
    EVERY_FORMAT(WIDER)
#undef WIDER
    return found;
}
constexpr int SEGMENT_MOST = segment_most();
constexpr int TILE_SEGMENTS = CONSUMERS * PER_TILE;
constexpr int STAGE_BYTES = TILE_SEGMENTS * SEGMENT_MOST;
constexpr int PACKED_INPUT = PACKED ? (COLUMNS + SEGMENT - 1) / SEGMENT * INPUT_BYTES : 0;
constexpr int PLAIN_INPUT = PLAIN ? COLUMNS * 4 : 0;

#define PRODUCED (HEADS * (QUERY_PITCH / HEAD_DIM))  // heads of a product before its keys
#define QUERIES (attend::OUTPUTS / HEAD_DIM * QUERY_PITCH)  // floats of a group's, gates included
#include "attending.cuh"
enum { FIRST_OUTPUTS = attend::OUTPUTS };
#ifdef SECOND_HEAD_DIM
#include "other_heads.cuh"
#include "attending.cuh"
enum { MOST_OUTPUTS = most(FIRST_OUTPUTS, attend::OUTPUTS) };
#include "other_heads.cuh"
#else
enum { MOST_OUTPUTS = FIRST_OUTPUTS };
#endif

#ifdef DELTA_HEADS
using OwnHead = deltas::HeadState<CONSUMER_THREADS>;
// A head's query, key, value and gates; the units that its beta and its decay are in; and what is made of them.
struct Running {
    alignas(16) float x[4 * DELTA_WIDTH + 16], deltas[DELTA_WIDTH], sums[3 * DELTA_WIDTH / 32];
    OwnHead::Sums products;
};
#endif

// Shared memory but for the pipeline.
struct Work {
    union {
        alignas(16) unsigned char input[most(PACKED_INPUT, PLAIN_INPUT)];
        Attending attending;
#ifdef SECOND_HEAD_DIM
        SecondAttending second_attending;
#endif
#ifdef DELTA_HEADS
        Running running;
#endif
    };
    alignas(16) float scratch[CONSUMERS][32 * HELD];
#ifdef DELTA_HEADS
    alignas(16) float sums[most(most(SUMS, MOST_OUTPUTS), DELTA_WIDTH)];
#else
    alignas(16) float sums[most(SUMS, MOST_OUTPUTS)];
#endif
    float stream[OWN];  // this CTA's rows of the residual stream
#if POST_NORMS
    float apart[OWN];   // what is to be added to them
#endif
#if UPS
    float ups[UPS];     // rows of up that wait for gate's
#endif
    float turn[ANGLE_TABLES * 2 * TURN_PAIRS];  // ropes' cosines and sines at the position
    float squares[2][EPILOGUE], top[2][EPILOGUE];
    int top_row[2][EPILOGUE];
    int joined;         // attention's result is in `sums`
#if ATTENTION_PIPELINE
    int position;
    unsigned base;      // epoch before this step's first
#endif
};

constexpr int ROOM = (SHARED - (int)sizeof(Work) - 1024) / STAGE_BYTES;
constexpr int DEPTH = ROOM < PIPELINE_STAGES ? ROOM : PIPELINE_STAGES;
static_assert(DEPTH >= 2, "shared memory holds less than two tiles: make them smaller");
static_assert(ATTENTION_WARPS <= CONSUMERS, "attention is the consumers' work");
#include "sync.cuh"
#if ATTENTION_PIPELINE
#include "attention_pipeline.cuh"
#ifdef SECOND_HEAD_DIM
#include "other_heads.cuh"
#include "attention_pipeline.cuh"
#include "other_heads.cuh"
#endif
#endif
#if SPIN_LIMIT
static_assert(sizeof(Pipeline) + sizeof(Watch) + 128 <= 1024, "the pipeline's barriers have outgrown their place");
#endif
static_assert(sizeof(Pipeline) + 128 <= 1024, "the pipeline's barriers have outgrown their place");

// Shared memory begins with the pipeline.
__device__ __forceinline__ Work &work_in(unsigned char *memory) {
    return *(Work *)(memory + (size_t)DEPTH * STAGE_BYTES);
}
__device__ __forceinline__ Pipeline &pipeline_in(unsigned char *memory) {
    return *(Pipeline *)(memory + (size_t)DEPTH * STAGE_BYTES + (sizeof(Work) + 127) / 128 * 128);
}

// An instruction, a word in each lane.
struct Word {
    unsigned mine;
    __device__ __forceinline__ unsigned operator[](int field) const { return __shfl_sync(EVERY, mine, field); }
    __device__ __forceinline__ unsigned long long address(int field) const {
        const unsigned low = (*this)[field], high = (*this)[field + 1];
        return (unsigned long long)high << 32 | low;
    }
};

// Positions of the cache that a token sees.
__device__ __forceinline__ int seen(const Word &word, int position) {
#if RINGS
    return min(position, (int)word[MOST_SEEN]);
#else
    return position;
#endif
}

// The instructions of this CTA in turn; the next one is on its way while one is worked on.
struct Reader {
    const unsigned *at;
    int left;
    unsigned next;
    __device__ __forceinline__ Reader(const unsigned *program, int stages, int lane)
        : at(program + (size_t)blockIdx.x * 32 + lane), left(stages), next(stages ? __ldg(at) : 0) {}
    __device__ __forceinline__ bool take(Word &word) {
        if (left == 0) return false;
        word.mine = next;
        at += CTAS * 32;
        if (--left) next = __ldg(at);
#if SPIN_LIMIT
        if (threadIdx.x % 32 == STAGE) watch().stage[threadIdx.x / 32] = word.mine;
#endif
        return true;
    }
};

// Runs the statement with F as the format of that number; of formats that do not occur there is no code.
#define WITH_FORMAT(number, ...) do { \
    const unsigned number_ = number; \
    EVERY_FORMAT(ONE_FORMAT, __VA_ARGS__) \
} while (0)
#define ONE_FORMAT(NAME, ...) \
    if constexpr (USES_##NAME != 0) if (KINDS == 1 || number_ == FORMAT_##NAME) { using F = NAME; __VA_ARGS__; break; }
constexpr int KINDS = 0 EVERY_FORMAT(USED);

// Bytes of a streamed segment: one of a plain format ends with its row.
template <class F> __device__ __forceinline__ int segment_bytes(int columns) {
    if constexpr (F::PACKED) return F::BYTES;
    else return (columns < SEGMENT ? columns : SEGMENT) * (16 / F::LANE);
}

// The copy of the vectors that this CTA reads.
__device__ __forceinline__ const unsigned char *own_replica(const unsigned char *workspace) {
    return workspace + (size_t)(blockIdx.x % REPLICAS) * REPLICA_BYTES;
}

// --- input ----------------------------------------------------------------------------------------------------------

// A packet's third word: the unit's scale, rounded to 10 significant bits, and its sum of squares, to 8. With a scale
// this near to a 127th of the largest element, that element is 127 times it, but for an eighth of a step; many sums are
// added up.
__device__ __forceinline__ float unit_scale(unsigned word) { return __uint_as_float(word >> 15 << 14); }
__device__ __forceinline__ float unit_squares(unsigned word) { return __uint_as_float((word & 0x7fff) << 16); }

// 1 / v, of a v that is no denormal.
__device__ __forceinline__ float reciprocal(float v) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}

// a / b, of scales of 10 significant bits, rounded as division rounds: what it multiplies is often a tie, which an
// approximate quotient decides by its error. After one step of Newton the last rounding is the only one, since no
// quotient of such numbers lies nearer to the middle between two floats than the step leaves it off.
__device__ __forceinline__ float quotient(float a, float b) {
    const float inverse = reciprocal(b), near = a * inverse;
    return fmaf(fmaf(-near, b, a), inverse, near);
}

// Where two CTAs may write halves of a set, a packet has half an epoch, as none that is read is older than a step, and
// of each element two bits more: in which quarter of its step it lay.
enum : unsigned { EPOCH_KNOWN = SPLIT_SETS ? 0xffff : EVERY };
static_assert(!SPLIT_SETS || STAGES < 0x10000, "steps are told apart by half an epoch");

// Four bits, a byte for each.
__device__ __forceinline__ unsigned spread(unsigned bits) { return (bits & 15) * 0x204081 & 0x01010101; }

// Four int8 whose quarters are given, a byte for each, times a factor of at most 1. Products make eighths of steps, as
// conversions are slow.
__device__ __forceinline__ unsigned rescale(unsigned bytes, unsigned quarters, float factor) {
    unsigned result = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int own = __dp4a((int)quarters, 2 << (8 * i), MAGIC_BITS - 3);
        const float eighths = unfold(__dp4a((int)bytes, 8 << (8 * i), own));
        result |= (__float_as_uint(fmaf(eighths, 0.125f * factor, MAGIC)) & 255u) << (8 * i);
    }
    return result;
}

// Stages the sets of 16 [begin, end) of a quantized vector for products of format F, Count at a time by each of
// `threads` threads; returns this thread's part of the sum of squares.
template <class F, int Count>
__device__ __forceinline__ float stage_packets(Work &work, const unsigned char *from, int begin, int end,
                                               unsigned epoch, int thread, int threads) {
    float squares = 0;
#pragma unroll 1
    for (int first = begin + thread; first < end; first += Count * threads) {
        uint4 v[2 * Count];
        const int limit = (end - first + threads - 1) / threads;
        unsigned places[Count];
#pragma unroll
        for (int i = 0; i < Count; i++) {  // found before the wait
            places[i] = input_place((unsigned)(first + i * threads) / 4, (first + i * threads) % 4u);
            asm volatile("" : "+r"(places[i]));
        }
        load_packets<EPOCH_KNOWN>(
            v, 2 * limit, [=](int i) { return from + 32 * (first + i / 2 * threads) + 16 * (i & 1); },
            [=](int) { return epoch; });
#pragma unroll
        for (int i = 0; i < Count; i++) {
            if (i >= limit) break;
            const int set = first + i * threads;
            const uint4 &low = v[2 * i], &high = v[2 * i + 1];
            const float a = unit_scale(low.z), b = unit_scale(high.z), scale = fmaxf(a, b);
            uint4 q = make_uint4(low.x, low.y, high.x, high.y);
            if (SPLIT_SETS && a != b) {  // the halves come from two CTAs: the smaller one takes the larger one's scale
                const float factor = quotient(fminf(a, b), scale);
                const uint2 small = a < b ? make_uint2(q.x, q.y) : make_uint2(q.z, q.w);
                const unsigned rest = (a < b ? low.w : high.w) >> 16;
                const uint2 made = make_uint2(rescale(small.x, spread(rest) + 2 * spread(rest >> 8), factor),
                                              rescale(small.y, spread(rest >> 4) + 2 * spread(rest >> 12), factor));
                if (a < b) q.x = made.x, q.y = made.y;
                else q.z = made.x, q.w = made.y;
            }
            stage_set<F>(work.input, places[i], set % 4u, q, scale);
            squares += unit_squares(low.z) + unit_squares(high.z);
        }
    }
    return squares;
}

// Copies `count` floats from packets; `at(packet)` and `epoch(packet)` are a packet's place and epoch, `put(index,
// value)` stores one. Returns the thread's part of the sum of squares.
template <class At, class Epoch, class Put>
__device__ __forceinline__ float stage_floats(int count, int thread, At at, Epoch epoch, Put put) {
    float squares = 0;
    const int packets = count / 8 * 3;
#pragma unroll 1
    for (int first = thread; first < packets; first += 2 * POLLED * EPILOGUE_THREADS) {
        uint4 v[2 * POLLED];
        const int limit = (packets - first + EPILOGUE_THREADS - 1) / EPILOGUE_THREADS;
        load_packets(v, limit, [=](int i) { return at(first + i * EPILOGUE_THREADS); },
                     [=](int i) { return epoch(first + i * EPILOGUE_THREADS); });
#pragma unroll
        for (int i = 0; i < 2 * POLLED; i++) {
            if (i >= limit) break;
            const int packet = first + i * EPILOGUE_THREADS, third = packet % 3, to = packet / 3 * 8 + third * 3;
            put(to, __uint_as_float(v[i].x));
            put(to + 1, __uint_as_float(v[i].y));
            if (third == 2) squares += __uint_as_float(v[i].z);
            else put(to + 2, __uint_as_float(v[i].z));
        }
    }
    return squares;
}

// Sets of a vector that the epilogue warps stage. Where they would need several rounds of polling, the consumers, who
// can do nothing else, stage the rest; not of a normed vector, whose sum of squares the epilogue warps need.
__device__ __forceinline__ int epilogue_sets(int columns, unsigned op) {
    const int sets = columns / 16;
    return EPOCH_FLAGS && op == ADDED && sets > POLLED * EPILOGUE_THREADS ? POLLED * EPILOGUE_THREADS : sets;
}

template <class F>
__device__ __forceinline__ void stage_rest(const Word &word, Work &work, const unsigned char *workspace, unsigned base,
                                           int thread) {
    if constexpr (F::PACKED && EPOCH_FLAGS) {
        const int columns = word[COLUMNS_OF], begin = epilogue_sets(columns, word[OP]);
        if (begin == columns / 16) return;
        const unsigned char *from = own_replica(workspace) + word[SOURCE];
        const unsigned epoch = base + word[WAIT] + 1;
        barrier_sync<CONSUMER_WARPS>(CONSUMER_THREADS);  // nobody reads the input before this one any more
        stage_packets<F, 1>(work, from, begin, columns / 16, epoch, thread, CONSUMER_THREADS);
    }
}

// Stages a product's input as its format reads it, by the epilogue warps.
template <class F>
__device__ __forceinline__ float stage_input(Work &work, const unsigned char *from, int columns, unsigned op,
                                             unsigned epoch, int thread) {
    if constexpr (F::PACKED) {
        return stage_packets<F, POLLED>(work, from, 0, epilogue_sets(columns, op), epoch, thread, EPILOGUE_THREADS);
    } else {
        float *to = (float *)work.input;
        return stage_floats(columns, thread, [=](int packet) { return from + 16 * packet; }, [=](int) { return epoch; },
                            [=](int at, float v) { to[F::place(at / 4) * 4 + at % 4] = v; });
    }
}

// --- consumers ------------------------------------------------------------------------------------------------------

// What the lanes of a warp summed up for HELD segments, CONSUMERS apart, of which `count` are there, becomes sums of
// 4 << `width` neighbouring lanes. Of rows that are no multiple of 256 (NARROW) `width` may be -1 or -2.
__device__ __forceinline__ void add_up(const float (&v)[HELD], float *scratch, float *sums, int count, int width,
                                       int lane) {
    static_assert(HELD == 4, "lanes give half of what they hold away twice");
    const int segment = lane >> 3, at = lane & 7;
    float sum;
    if (width == 3) {
        const bool upper = lane & 16, odd = lane & 8;
        const float even = (upper ? v[2] : v[0]) + __shfl_xor_sync(EVERY, upper ? v[0] : v[2], 16);
        const float other = (upper ? v[3] : v[1]) + __shfl_xor_sync(EVERY, upper ? v[1] : v[3], 16);
        sum = (odd ? other : even) + __shfl_xor_sync(EVERY, odd ? even : other, 8);
#pragma unroll
        for (int step = 4; step; step >>= 1) sum += __shfl_xor_sync(EVERY, sum, step);
    } else {
#pragma unroll
        for (int i = 0; i < HELD; i++) scratch[32 * i + lane] = v[i];
        __syncwarp();
        const float4 four = ((const float4 *)scratch)[lane];
#if NARROW
        if (width < 0) {
            float *const to = sums + (segment * CONSUMERS << (3 - width)) + (at << -width);
            if (segment < count && width == -1) to[0] = four.x + four.y, to[1] = four.z + four.w;
            else if (segment < count) to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
            __syncwarp();
            return;
        }
#endif
        sum = (four.x + four.y) + (four.z + four.w);
#pragma unroll 1
        for (int step = (1 << width) >> 1; step; step >>= 1) sum += __shfl_xor_sync(EVERY, sum, step);
        __syncwarp();
    }
    if (segment < count && (at & ((1 << width) - 1)) == 0)
        sums[(segment * CONSUMERS << (3 - width)) + (at >> width)] = sum;
}

// Where a warp stands among the segments of an instruction's matrices: `place` is that of the activations that meet its
// next segment (packed: in chunks of 64 columns, a lane each; plain: in segments), `step` on for the one after it.
struct Places {
    int wide, place, step;
    __device__ __forceinline__ Places(int wide, int per, int warp, int first)
        : wide(wide), place((warp * per + first) % wide), step(CONSUMERS * per % wide) {}
    __device__ __forceinline__ void advance() {
        place += step;
        if (place >= wide) place -= wide;
    }
};

// The products of an instruction's segments, in the order of its runs, into work.sums: a warp takes PER_TILE segments
// of a tile, CONSUMERS apart. Where Fixed, all of a warp's segments meet the same part of the input.
template <class F, bool Fixed>
__device__ __forceinline__ void multiply_packed(Work &work, Pipeline &pipeline, const unsigned char *buffer, Turn &now,
                                                int segments, int width, Places places, int warp, int lane) {
    bool waiting = true;
    Input x = {};  // a value that seems to last from stage to stage would take its registers from attention
#pragma unroll 1
    for (int first = warp; first - warp < segments; first += HELD * CONSUMERS) {
        float v[HELD] = {};
#pragma unroll
        for (int i = 0; i < HELD; i += PER_TILE) {
            const int at = first + i * CONSUMERS;
            if (at - warp >= segments) break;
            const unsigned char *from = buffer + (size_t)now.stage * STAGE_BYTES + warp * F::BYTES;
            typename F::Segment segment[PER_TILE];
            pipeline_wait(pipeline, now);
#pragma unroll
            for (int j = 0; j < PER_TILE; j++)  // after the last one whatever lies there, which counts for nothing
                segment[j].load(Memory{from + j * CONSUMERS * F::BYTES}, lane);
            if (i == 0 && waiting) {
                barrier_sync<INPUT_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
                if (Fixed) x = load_input(work.input, places.place);
                waiting = false;
            }
#pragma unroll
            for (int j = 0; j < PER_TILE; j++) {
                if (!Fixed) x = load_input(work.input, places.place), places.advance();
                const float sum = F::dot(segment[j], x, lane);
                v[i + j] = at + j * CONSUMERS < segments ? sum : 0;
            }
            __syncwarp();
            if (lane == 0) pipeline_release(pipeline, now, warp);
            now.advance();
        }
        const int count = (segments - first + CONSUMERS - 1) / CONSUMERS;
        add_up(v, work.scratch[warp], work.sums + (first << (3 - width)), count, width, lane);
    }
}

// The same where a segment has `weights`, and is a row or a part of one.
template <class F>
__device__ __forceinline__ void multiply_plain(Work &work, Pipeline &pipeline, const unsigned char *buffer, Turn &now,
                                               int segments, int width, int weights, Places places, int warp,
                                               int lane) {
    const int bytes = weights * (16 / F::LANE);
    barrier_sync<INPUT_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
#pragma unroll 1
    for (int first = warp; first - warp < segments; first += HELD * CONSUMERS) {
        float v[HELD] = {};
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int at = first + i * CONSUMERS;
            if (at - warp - i % PER_TILE * CONSUMERS >= segments) break;
            if (i % PER_TILE == 0) pipeline_wait(pipeline, now);
            const Memory from = {buffer + (size_t)now.stage * STAGE_BYTES + (i % PER_TILE * CONSUMERS + warp) * bytes};
            const float4 *input = (const float4 *)work.input + places.place * (weights / 4);
            for (int part = 0; at < segments && part < weights / F::PART; part++) {
                const uint4 w = from.u128(512 * part + 16 * lane);
#pragma unroll
                for (int quad = 0; quad < F::LANE / 4; quad++) {
                    const float4 a = input[(part * (F::LANE / 4) + quad) * 32 + lane], b = F::four(w, quad);
                    v[i] = fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, v[i]))));
                }
            }
            places.advance();
            if (i % PER_TILE < PER_TILE - 1) continue;
            __syncwarp();
            if (lane == 0) pipeline_release(pipeline, now, warp);
            now.advance();
        }
        const int count = (segments - first + CONSUMERS - 1) / CONSUMERS;
        add_up(v, work.scratch[warp], work.sums + (first << (3 - width)), count, width, lane);
    }
}

template <class F>
__device__ __forceinline__ void multiply(const Word &word, Work &work, Pipeline &pipeline, const unsigned char *buffer,
                                         Turn &now, int warp, int lane) {
    const int columns = word[COLUMNS_OF];
    int segments = 0;
#pragma unroll
    for (int run = 0; run < RUNS; run++) segments += word[RUN + 4 * run + SEGMENTS_OF];
    const int weights = F::PACKED || columns > SEGMENT ? SEGMENT : columns;
    const Places places(F::PACKED ? columns / 64 : columns / weights, F::PACKED ? 32 : 1, warp, F::PACKED ? lane : 0);
    const int aligned = columns & -columns;
    const int width = F::PACKED ? __ffs(aligned < SEGMENT ? aligned : SEGMENT) - 9 : 3;
    if constexpr (!F::PACKED)
        multiply_plain<F>(work, pipeline, buffer, now, segments, width, weights, places, warp, lane);
    else if (FIXED || places.step == 0)
        multiply_packed<F, true>(work, pipeline, buffer, now, segments, width, places, warp, lane);
    else if constexpr (!FIXED)
        multiply_packed<F, false>(work, pipeline, buffer, now, segments, width, places, warp, lane);
}

// What a layer's heads are rotated by.
__device__ __forceinline__ const float *turn_of(const Word &word, const Work &work) {
    return work.turn + (ANGLE_TABLES > 1 ? word[COLUMNS_OF] * 2 * TURN_PAIRS : 0);
}

#include "heads.cuh"
#ifdef SECOND_HEAD_DIM
#include "other_heads.cuh"
#include "heads.cuh"
#include "other_heads.cuh"
#endif

#if ATTENTION_PIPELINE
// Tiles of keys and values of an ATTEND.
__device__ __forceinline__ int tiles_of(const Word &word, int position) {
#ifdef SECOND_HEAD_DIM
    if (is_second(word[FLAGS])) return second_attend::tiles(second_attend::range(seen(word, position), word[SPLIT_OF]));
#endif
    return attend::tiles(attend::range(seen(word, position), word[SPLIT_OF]));
}
#endif

// How many splits an ATTEND's head has.
#ifdef SECOND_HEAD_DIM
__device__ __forceinline__ int splits_of(const Word &word, int position) {
    const int cached = seen(word, position);
    return is_second(word[FLAGS]) ? second_attend::range(cached, 0).splits : attend::range(cached, 0).splits;
}
#else
#define splits_of(word, position) attend::range(seen(word, position), 0).splits
#endif

#ifdef DELTA_HEADS
// A head of a delta net: what comes of it in work.sums, by all consumers.
__device__ __noinline__ void run_delta(Word word, Work &work, int position, int thread) {
    using namespace deltas;
    constexpr int W = DELTA_WIDTH, EACH = (3 * W + CONSUMER_THREADS - 1) / CONSUMER_THREADS;
    static_assert(W <= CONSUMER_THREADS, "a consumer has a column");
    const int head = word[HEAD], own = head % DELTA_KEYS;
    const float *kernel = (const float *)word.address(RUN), *norm = (const float *)word.address(NORM);
    float *ring = (float *)word.address(RUN + 4);
    float *states = (float *)word.address(RUN + 8) + (size_t)head * W * W;
    Running &run = work.running;
    const auto channel_of = [&](int at) {
        return at < 2 * W ? (at / W * DELTA_KEYS + own) * W + at % W : (2 * DELTA_KEYS + head) * W + at % W;
    };
    float *found = work.scratch[0];
    static_assert(3 * W <= CONSUMERS * 32 * HELD, "what is convolved lies in the consumers' scratch");
    // The state, and what is convolved of earlier tokens, is of no stage of this step.
    const float bias = __ldg((const float *)word.address(BIAS) + head);
    const float decay = __ldg((const float *)word.address(EXTRA) + head);
    float before[EACH], last[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = thread + i * CONSUMER_THREADS, channel = channel_of(at);
        before[i] = last[i] = 0;
        if (at >= 3 * W) continue;
        const float *column = kernel + (size_t)channel * DELTA_TAPS + DELTA_TAPS - 1;
        last[i] = __ldg(column);
#pragma unroll
        for (int back = 1; back < DELTA_TAPS; back++) {
            const float there = back > position ? 0 :
                ring[(size_t)((unsigned)(position - back) % DELTA_ROWS) * CHANNELS + channel];
            before[i] = fmaf(there, __ldg(column - back), before[i]);
        }
    }
    const OwnHead state(states + state_before(0, position), position > 0, thread);
    barrier_sync<INPUT_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = thread + i * CONSUMER_THREADS;
        if (at >= 3 * W) continue;  // whole warps
        const float fresh = run.x[at];
        if (at >= 2 * W || head < DELTA_KEYS)
            ring[(size_t)((unsigned)position % DELTA_ROWS) * CHANNELS + channel_of(at)] = fresh;
        float value = silu(fmaf(fresh, last[i], before[i]));
        found[at] = value;
        value = warp_total(value * value);
        if (thread % 32 == 0) run.sums[at / 32] = value;
    }
    barrier_sync<CONSUMER_WARPS>(CONSUMER_THREADS);
    float lengths[2] = {DELTA_EPS, DELTA_EPS};
#pragma unroll
    for (int i = 0; i < W / 32; i++) lengths[0] += run.sums[i], lengths[1] += run.sums[W / 32 + i];
    const float query_by = rsqrtf(lengths[0]) * rsqrtf((float)W), key_by = rsqrtf(lengths[1]);
    const float by = decayed(run.x[4 * W + 8 + (CHANNELS + INNER + DELTA_HEADS + head) % 8], bias, decay);
    const float beta = sigmoid(run.x[4 * W + (CHANNELS + INNER + head) % 8]);
    const float scale = thread < W ? __ldg(norm + thread) : 0;
    state.multiply(found + W, found, run.products);
    barrier_sync<CONSUMER_WARPS>(CONSUMER_THREADS);
    float value = 0, gate = 0;
    if (thread < W) {  // whole warps
        const float2 made = OwnHead::column(run.products, thread, found[2 * W + thread], by, beta, key_by, query_by);
        run.deltas[thread] = made.x, value = made.y, gate = scale * silu(run.x[3 * W + thread]);
        const float size = warp_total(value * value);
        if (thread % 32 == 0) run.sums[thread / 32] = size;
    }
    barrier_sync<CONSUMER_WARPS>(CONSUMER_THREADS);
    float size = 0;
#pragma unroll
    for (int i = 0; i < W / 32; i++) size += run.sums[i];
    if (thread < W) work.sums[thread] = value * rsqrtf(size / W + DELTA_EPS) * gate;
    const float4 deltas = ((const float4 *)run.deltas)[state.unit];
    barrier_arrive<RESULTS_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
    // Nobody waits for what the next token reads; from here on `running` may be the next stage's input.
    state.store(states + state_before(0, position + 1), by, found + W, deltas);
    barrier_sync<CONSUMER_WARPS>(CONSUMER_THREADS);  // the scratch is theirs again
}
#endif

__device__ __forceinline__ void consume(Reader reader, Work &work, Pipeline &pipeline, const unsigned char *buffer,
                                        unsigned char *workspace, const float *rope, unsigned base, int position,
                                        int warp, int lane) {
    Turn now;
    // Seen by all of them once they have met for the first input.
    for (int i = warp * 32 + lane; i < ANGLE_TABLES * 2 * TURN_PAIRS; i += CONSUMER_THREADS)
        work.turn[i] = rope[((size_t)(i / TURN_PAIRS) * ROPE_POSITIONS + position) * TURN_PAIRS + i % TURN_PAIRS];
    for (Word word; reader.take(word);) {
        asm volatile("" : "+r"(warp), "+r"(lane));  // what is made of them is not kept in registers meanwhile
        const unsigned op = word[OP];
        if (op == ATTEND) {
#if ATTENTION_PIPELINE
#define TO_ATTEND word, workspace, now
#else
#define TO_ATTEND word, work, workspace, position, warp, warp * 32 + lane
#endif
#ifdef SECOND_HEAD_DIM
            if (is_second(word[FLAGS])) second_attend_split(TO_ATTEND);
            else
#endif
            attend_split(TO_ATTEND);
#undef TO_ATTEND
#if ATTENTION_PIPELINE
            now.skip(tiles_of(word, work.position));
#endif
#ifdef DELTA_HEADS
        } else if (op == DELTA) {
            run_delta(word, work, position, warp * 32 + lane);
#endif
        } else if (multiplies(op)) {
            WITH_FORMAT(word[RUN + FORMAT_OF], stage_rest<F>(word, work, workspace, base, warp * 32 + lane);
                        multiply<F>(word, work, pipeline, buffer, now, warp, lane));
            barrier_arrive<RESULTS_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
        }
    }
}

// --- the producer warp -----------------------------------------------------------------------------------------------

#ifdef DELTA_HEADS
// The state, and what is convolved of earlier tokens, of a head of a delta net.
__device__ __forceinline__ void prefetch_delta(Word word, int position, int lane) {
    using namespace deltas;
    constexpr int W = DELTA_WIDTH;
    const int head = word[HEAD], own = head % DELTA_KEYS;
    const auto prefetch = [=](const float *from, int floats) {
#pragma unroll 1
        for (int i = lane; i < floats / 32; i += 32) asm volatile("prefetch.global.L2 [%0];" :: "l"(from + 32 * i));
    };
    const float *kernel = (const float *)word.address(RUN), *ring = (const float *)word.address(RUN + 4);
    if (position > 0)
        prefetch((const float *)word.address(RUN + 8) + state_before(0, position) + (size_t)head * W * W, W * W);
#pragma unroll 1
    for (int side = 0; side < 3; side++) {
        const int channel = (side < 2 ? side * DELTA_KEYS + own : 2 * DELTA_KEYS + head) * W;
        prefetch(kernel + (size_t)channel * DELTA_TAPS, W * DELTA_TAPS);
        for (int back = 1; back < DELTA_TAPS && back <= position; back++)
            prefetch(ring + (size_t)((unsigned)(position - back) % DELTA_ROWS) * CHANNELS + channel, W);
    }
}
#endif

__device__ __forceinline__ void fill(Reader reader, Pipeline &pipeline, unsigned char *buffer, int position, int lane) {
    Producer producer;
    for (Word word; reader.take(word);) {
        const unsigned op = word[OP], columns = word[COLUMNS_OF];
#if ATTENTION_PIPELINE
#ifdef SECOND_HEAD_DIM
        if (op == ATTEND && is_second(word[FLAGS])) {
            const second_attend::Range rows = second_attend::range(seen(word, position), word[SPLIT_OF]);
            second_attend::produce_part(producer, pipeline, buffer, second_keys_of(word, position),
                                      second_values_of(word, position), rows, lane);
            continue;
        }
#endif
        if (op == ATTEND) {
            const attend::Range rows = attend::range(seen(word, position), word[SPLIT_OF]);
            attend::produce_part(producer, pipeline, buffer, keys_of(word, position), values_of(word, position), rows,
                                 lane);
            continue;
        }
#endif
#ifdef DELTA_HEADS
        if (op == DELTA) {  // long before its turn: what it reads into L2
            prefetch_delta(word, position, lane);
            continue;
        }
#endif
        if (!multiplies(op)) continue;
        unsigned bytes = 0;
        WITH_FORMAT(word[RUN + FORMAT_OF], bytes = segment_bytes<F>(columns));
        const unsigned char *from[RUNS];
        int ends[RUNS];
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            from[run] = (const unsigned char *)word.address(RUN + 4 * run + ADDRESS);
            ends[run] = (run ? ends[run - 1] : 0) + word[RUN + 4 * run + SEGMENTS_OF];
        }
        const int segments = ends[RUNS - 1];
#pragma unroll 1
        for (int first = 0; first < segments; first += TILE_SEGMENTS) {
            const int end = first + TILE_SEGMENTS < segments ? first + TILE_SEGMENTS : segments;
            producer.put(pipeline, buffer, (end - first) * bytes, RUNS, lane, [&](int run, const Copy &copy) {
                const int top = run == 0 ? 0 : run == 1 ? ends[0] : ends[1];
                const int bottom = run == 0 ? ends[0] : run == 1 ? ends[1] : ends[2];
                const unsigned char *at = run == 0 ? from[0] : run == 1 ? from[1] : from[2];
                const int low = top > first ? top : first, high = bottom < end ? bottom : end;
                if (low < high) copy((low - first) * bytes, at + (low - top) * bytes, (high - low) * bytes);
            });
        }
    }
    producer.finish(pipeline, lane);
}

// --- epilogue warps: output ------------------------------------------------------------------------------------------

// Where a lane's packet of a row goes: as floats the first copy of a third of eight rows, else one of eight copies.
__device__ __forceinline__ unsigned char *packet_of(unsigned char *target, int row, bool floats, int lane) {
    const int unit = row >> 3, at = lane % 8;
    return floats ? target + unit * 48 + 16 * (at < 2 ? at : 2) : target + (size_t)at * REPLICA_BYTES + unit * 16;
}

// What lies at a shared_address. In the window of all memory the compiler would look for it each time anew.
__device__ __forceinline__ float shared_float(unsigned at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ float4 shared_float4(unsigned at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ void put_shared(unsigned at, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

// Hands rows on, one in each lane, their number % 16 = lane % 16; all lanes take part. `to` is packet_of the row;
// `square` is summed up for the reader.
__device__ __forceinline__ void hand_on(unsigned char *to, bool inside, float value, float square, bool floats,
                                        int replicas, unsigned epoch, int lane) {
    const int at = lane % 8;
    if (!inside) value = 0, square = 0;
    if (floats) {
#pragma unroll
        for (int step = 4; step; step >>= 1) square += __shfl_xor_sync(EVERY, square, step);
        const int third = at < 2 ? at : 2, from = lane / 8 * 8 + 3 * third;
        const float a = __shfl_sync(EVERY, value, from), b = __shfl_sync(EVERY, value, from + 1);
        const float c = __shfl_sync(EVERY, value, third < 2 ? from + 2 : from);
#pragma unroll
        for (int copy = 0; copy < REPLICAS; copy++)
            if (inside && at < 3 && copy < replicas)
                store_packet(to + (size_t)copy * REPLICA_BYTES, __float_as_uint(a), __float_as_uint(b),
                             __float_as_uint(third == 2 ? square : c), epoch);
        return;
    }
    float largest = fmaxf(fabsf(value), __shfl_xor_sync(EVERY, fabsf(value), 8));
#pragma unroll
    for (int step = 4; step; step >>= 1) {  // side by side: either alone would wait for each exchange
        const float other = __shfl_xor_sync(EVERY, largest, step), more = __shfl_xor_sync(EVERY, square, step);
        largest = fmaxf(largest, other), square += more;
    }
    const unsigned code = largest < 1e-30f ? 0 : (__float_as_uint(largest * (1.0f / 127.0f)) + 0x2000) >> 14;
    const float inverse = largest < 1e-30f ? 0 : reciprocal(__uint_as_float(code << 14));
    // Added to MAGIC, a float's low bits are the nearest integer.
    const float nearest = value * inverse + MAGIC;
    unsigned bytes = (__float_as_uint(nearest) & 255u) << (8 * (lane & 3));
    bytes |= __shfl_xor_sync(EVERY, bytes, 1);
    bytes |= __shfl_xor_sync(EVERY, bytes, 2);
    const unsigned upper = __shfl_xor_sync(EVERY, bytes, 4);  // in the upper four of eight lanes the lower ones
    const unsigned rounded = (__float_as_uint(square) + 0x8000) >> 16;
    if constexpr (SPLIT_SETS != 0) {
        // Of the rest, half a step at most to either side, the nearest of -1.5, -0.5, 0.5 and 1.5 quarters of a step.
        const float rest = fmaf(value, inverse, MAGIC - nearest);
        const unsigned quarter = __float_as_uint(fmaf(rest, 3.99f, 1.5f) + MAGIC);
        const unsigned low = __ballot_sync(EVERY, quarter & 1), high = __ballot_sync(EVERY, quarter & 2);
        const int shift = lane & 24;
        epoch = (epoch & EPOCH_KNOWN) | (low >> shift & 255) << 16 | (high >> shift) << 24;
    }
    static_assert(REPLICAS <= 8, "a packet has eight lanes, each for a copy");
    if (inside && at < REPLICAS)
        store_packet(to, lane & 4 ? upper : bytes, lane & 4 ? bytes : upper, code << 15 | rounded, epoch);
}

struct Epilogue {
    Work &work;
    unsigned char *workspace;
    unsigned base;  // epoch before this step's first
    unsigned step;
    int thread, lane, warp;

    __device__ __forceinline__ unsigned *counter(int stage) const {
        return (unsigned *)(workspace + COUNTERS + (size_t)stage * COUNTER_BYTES);
    }
    __device__ __forceinline__ void meet() const { barrier_sync<EPILOGUE_WARPS>(EPILOGUE_THREADS); }

    // Where packets are not polled: until so many CTAs have counted up a stage.
    __device__ __forceinline__ void await(int stage, unsigned writers) const {
#if !EPOCH_FLAGS
        if (thread == 0) await_count(counter(stage), (step + 1) * writers);
        meet();
#endif
    }
    __device__ __forceinline__ void published(int stage) const {
#if !EPOCH_FLAGS
        meet();
        if (thread == 0) count_up(counter(stage));
#endif
    }

    // The largest of each thread's value and its row; of equals the lower row. Valid in thread 0.
    __device__ __forceinline__ void largest(float &value, int &row, int parity) const {
#pragma unroll
        for (int step = 16; step; step >>= 1) {
            const float other = __shfl_xor_sync(EVERY, value, step);
            const int other_row = __shfl_xor_sync(EVERY, row, step);
            if (other > value || (other == value && other_row < row)) value = other, row = other_row;
        }
        if (lane == 0) work.top[parity][warp] = value, work.top_row[parity][warp] = row;
        meet();
#pragma unroll 1
        for (int w = 0; thread == 0 && w < EPILOGUE; w++) {
            const float other = work.top[parity][w];
            const int other_row = work.top_row[parity][w];
            if (other > value || (other == value && other_row < row)) value = other, row = other_row;
        }
    }

    // Stages a product's input and lets the consumers go; the factor of the input's norm, or 1.
    __device__ __forceinline__ float input(const Word &word, int parity, bool normed) const {
        const int columns = word[COLUMNS_OF];
        const unsigned op = word[OP], wait = word[WAIT], epoch = base + wait + 1;
        const unsigned char *from = own_replica(workspace) + word[SOURCE];
        const bool floats = word[FLAGS] & READS_FLOATS;
        const unsigned format = word[RUN + FORMAT_OF];
        await(wait, word[WRITERS]);
        float squares = 0;
        WITH_FORMAT(format, squares = stage_input<F>(work, from, columns, op, epoch, thread));
        barrier_arrive<INPUT_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
        if (!normed) return 1;
        const float sum = total(squares, parity);
        return rsqrtf(sum * (1.0f / DIM) + EPS);
    }
    // A sum over the epilogue warps' threads.
    __device__ __forceinline__ float total(float squares, int parity) const {
#pragma unroll
        for (int step = 16; step; step >>= 1) squares += __shfl_xor_sync(EVERY, squares, step);
        if (lane == 0) work.squares[parity][warp] = squares;
        meet();
        float sum = 0;
        for (int w = 0; w < EPILOGUE; w++) sum += work.squares[parity][w];
        return sum;
    }

#if POST_NORMS
    // Keeps a product's rows, with those of the one before where this is the last that is added, and then hands on the
    // sum of their squares, or of them.
    __device__ __forceinline__ void set_apart(unsigned sums, int pieces, int rows, unsigned char *to, unsigned epoch,
                                              int parity, bool last) const {
        float squares = 0;
#pragma unroll 1
        for (int at = thread; at < rows; at += EPILOGUE_THREADS) {
            float value = row_sum(sums + 4 * at * pieces, pieces);
            if (PARALLEL && last) value += work.apart[at];
            work.apart[at] = value;
            squares += BY_MEAN ? value : value * value;
        }
        if (PARALLEL && !last) return;
        if (rows > 32) {
            squares = total(squares, parity);
        } else {  // all are the first warp's
#pragma unroll
            for (int step = 16; step; step >>= 1) squares += __shfl_xor_sync(EVERY, squares, step);
        }
        if (thread < REPLICAS)
            store_packet(to + (size_t)thread * REPLICA_BYTES + 16 * blockIdx.x, __float_as_uint(squares), 0, 0, epoch);
    }

    // What norms what all CTAs have set apart, or its mean.
    __device__ __forceinline__ float norm_apart(const Word &word, int parity) const {
        const unsigned wait = word[WAIT], epoch = base + wait + 1;
        const int writers = word[WRITERS];
        const unsigned char *from = own_replica(workspace) + word[SOURCE];
        await(wait, writers);
        float squares = 0;
#pragma unroll 1
        for (int first = thread; first < writers; first += 2 * EPILOGUE_THREADS) {
            uint4 v[2];
            const int limit = (writers - first + EPILOGUE_THREADS - 1) / EPILOGUE_THREADS;
            load_packets(v, limit, [=](int i) { return from + 16 * (first + i * EPILOGUE_THREADS); },
                         [=](int) { return epoch; });
            squares += __uint_as_float(v[0].x) + __uint_as_float(v[0].y) + __uint_as_float(v[0].z);  // y and z are 0
            if (limit > 1) squares += __uint_as_float(v[1].x) + __uint_as_float(v[1].y) + __uint_as_float(v[1].z);
        }
        const float mean = total(squares, parity) * (1.0f / DIM);
        return BY_MEAN ? mean : rsqrtf(mean + EPS);
    }
#endif

#if BY_MEAN
    // The mean of a row of the embedding.
    __device__ __forceinline__ float row_mean(const unsigned char *matrix, unsigned format, int token,
                                              int parity) const {
        float sum = 0;
#pragma unroll 1
        for (int at = thread; at < DIM; at += EPILOGUE_THREADS)
            WITH_FORMAT(format, sum += weight_at<F>(matrix, (long long)token * DIM + at));
        return total(sum, parity) * (1.0f / DIM);
    }
#endif

#if QK_NORM == 2
    // Sums of squares of all queries and of all keys, from packets whose third has that of their unit.
    __device__ __forceinline__ void sum_whole(const unsigned char *from, unsigned queries, unsigned keys) const {
        constexpr int UNITS = HEADS * HEAD_DIM / 8, COUNT = UNITS + CACHE_HEADS * HEAD_DIM / 8;
        float sums[2] = {};
#pragma unroll 1
        for (int first = thread; first < COUNT; first += 4 * EPILOGUE_THREADS) {
            uint4 v[4];
            const int limit = (COUNT - first + EPILOGUE_THREADS - 1) / EPILOGUE_THREADS;
            load_packets(v, limit, [=](int i) { return from + 48 * (first + i * EPILOGUE_THREADS) + 32; },
                         [=](int i) { return first + i * EPILOGUE_THREADS < UNITS ? queries : keys; });
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < limit) {  // a sum of squares that x and y, two of the eight, are a part of
                    const float x = __uint_as_float(v[i].x), y = __uint_as_float(v[i].y);
                    (first + i * EPILOGUE_THREADS < UNITS ? sums[0] : sums[1]) +=
                        fmaxf(__uint_as_float(v[i].z), x * x + y * y);
                }
        }
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const float sum = total(sums[side], side);
            if (thread < ATTENTION_WARPS) work.attending.shared.squares[side][thread] = thread ? 0 : sum;
        }
    }
#endif

    // Those `pieces` sums in shared memory that make up a row.
    __device__ __forceinline__ static float row_sum(unsigned at, int pieces) {
        constexpr int AT_ONCE = 8;
        if (pieces == 4) {
            const float4 four = shared_float4(at);
            return four.x + four.y + four.z + four.w;
        }
        float sum = shared_float(at);
#pragma unroll 1
        for (int i = 1; i < pieces; i += AT_ONCE) {  // rows of 11008 have 43
            float v[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) v[k] = i + k < pieces ? shared_float(at + 4 * (i + k)) : 0;
#pragma unroll
            for (int step = 1; step < AT_ONCE; step *= 2)
#pragma unroll
                for (int k = 0; k < AT_ONCE; k += 2 * step) v[k] += v[k + step];
            sum += v[0];
        }
        return sum;
    }
};

// Sums of a row's product in work.sums, as `multiply` leaves them.
__device__ __forceinline__ int row_pieces(int columns, bool packed) {
    if (!packed) return columns > SEGMENT ? columns / SEGMENT : 1;
    const int aligned = columns & -columns;
    return columns / (aligned < SEGMENT ? aligned : SEGMENT);
}

__device__ __forceinline__ void timestamp(unsigned long long *timestamps, const Work &work, int stage, int event,
                                          int thread) {
#if TIMESTAMPS
    // Only what needs a value from memory waits for a barrier in front of it; the clock is read where one is there.
    if (thread == 0 && *(const volatile int *)&work.joined != 0x7fffffff) {
        unsigned long long now;
        asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
        timestamps[((size_t)blockIdx.x * STAGES + stage) * 4 + event] = now;
    }
#endif
}

// Whether an instruction that makes rows waits for no results of the consumers.
__device__ __forceinline__ bool without_product(unsigned op) {
#if POST_NORMS
    if (op == JOIN) return true;
#endif
    return op == EMBED;
}

#if TAPS
// What convolves an element: its row of the kernel, whose last column is of the token itself, and what the ring has of
// the tokens before.
struct Convolution {
    float column[TAPS], before[TAPS];

    __device__ __forceinline__ void load(const float *kernel, const float *ring, int element, int position) {
#pragma unroll
        for (int back = 0; back < TAPS; back++) {
            column[back] = __ldg(kernel + (size_t)element * TAPS + TAPS - 1 - back);
            const bool there = back > 0 && back <= position;
            before[back] = there ? ring[(size_t)((unsigned)(position - back) % TAP_ROWS) * DIM + element] : 0;
        }
    }
    __device__ __forceinline__ float sum(float own) const {
        float result = own * column[0];
#pragma unroll
        for (int back = 1; back < TAPS; back++) result = fmaf(before[back], column[back], result);
        return result;
    }
};
#endif

// What a row has beside its sums: a norm's weight, a bias, or its element of the layer's own input. That is written by
// an earlier launch of the same recording, so it is read from L2, not from the read-only cache.
__device__ __forceinline__ float read_beside(const float *at) {
#if LAYER_INPUTS
    return __ldcg(at);
#else
    return __ldg(at);
#endif
}

__device__ __forceinline__ void run_epilogue(Reader reader, const Epilogue &epilogue, State *state, Entry *ring,
                                             int *histories, const int *ends, float *logits,
                                             unsigned long long *timestamps, bool greedy, int position, int token) {
    Work &work = epilogue.work;
    const int thread = epilogue.thread, lane = epilogue.lane;
    float best = __int_as_float(0xff800000);  // of this thread's logits
    int best_row = 0x7fffffff;
    int parity = 0;  // what epilogue warps leave for each other is overwritten by the instruction after the next
#if PARALLEL
    unsigned staged = EVERY;  // the format for which the instruction before, a PROJECT, staged what a GATE reads too
    float staged_factor = 1;
#endif
    for (Word word; reader.take(word);) {
        const unsigned op = word[OP];
        if (op == NOTHING) continue;
        const int stage = word[STAGE], first = word[FIRST], rows = word[ROWS_OF];
        parity ^= 1;
        timestamp(timestamps, work, stage, 0, thread);
        // What rows need beside their sums is loaded before the wait; more rows than threads load it late.
        const int mine = (first & ~15) + thread;
        const bool early = mine >= first && mine < first + rows;
        const float *beside = (const float *)word.address(op == GROWS || op == EMBED ? NORM : BIAS);
        const float held = beside && early && op != ATTEND && !is_delta(op) ? read_beside(beside + mine) : 0;
#if POST_NORMS
        const float *post = (const float *)word.address(BIAS);
        const float post_held = op == JOIN && early && (!BY_MEAN || post) ? __ldg(post + mine) : 0;
#endif
#if UNNORMED
        const bool normed = op == LOGITS;
#else
        const bool normed = op != ADDED && op != ATTEND && op != EMBED && op != SAMPLE &&
                            !(LAYER_INPUTS && word[FLAGS] & OF_LAYER_INPUT);
#endif
#if SCALED
        const float *scale_at = (const float *)word.address(EXTRA);
        const float scale = op == GROWS && scale_at ? __ldg(scale_at) : 1;
#endif
#if TAPS
        const float *kernel = (const float *)word.address(NORM);
        float *taps = (float *)word.address(EXTRA);
        Convolution convolution;
        if (op == CONVOLVE && early) convolution.load(kernel, taps, mine, position);
#endif
        float factor = 1;
        if (op == ATTEND) {
            if (word[SPLIT_OF] >= splits_of(word, position)) continue;
            const unsigned wait = word[WAIT], second = word[WAIT2], third = word[WAIT3];
            epilogue.await(wait, word[WRITERS]);
            if ((second & 0xffff) != wait) epilogue.await(second & 0xffff, second >> 16);
            if (third != second) epilogue.await(third & 0xffff, third >> 16);
            const int head = word[HEAD];
            const unsigned char *from = epilogue.workspace + word[SOURCE];
#define TO_STAGE word, work, epilogue, head, from, wait, second, third, thread
#ifdef SECOND_HEAD_DIM
            if (is_second(word[FLAGS])) second_stage_heads(TO_STAGE);
            else
#endif
            stage_heads(TO_STAGE);
#undef TO_STAGE
#if QK_NORM == 2
            epilogue.sum_whole(from, epilogue.base + 1 + wait, epilogue.base + 1 + (second & 0xffff));
#endif
            barrier_arrive<INPUT_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
#ifdef DELTA_HEADS
        } else if (op == DELTA) {
            using namespace deltas;
            constexpr int PACKETS = DELTA_WIDTH / 8 * 3;  // of a query, a key, values or gates
            const unsigned wait = word[WAIT];
            const int head = word[HEAD], own = head % DELTA_KEYS;
            epilogue.await(wait, word[WRITERS]);
            const unsigned char *from = epilogue.workspace + word[SOURCE];
            const int firsts[4] = {own * DELTA_WIDTH, (DELTA_KEYS + own) * DELTA_WIDTH,
                                   (2 * DELTA_KEYS + head) * DELTA_WIDTH, CHANNELS + head * DELTA_WIDTH};
            const int ends[2] = {(CHANNELS + INNER + head) / 8, (CHANNELS + INNER + DELTA_HEADS + head) / 8};
            float *to = work.running.x;
            stage_floats(
                4 * DELTA_WIDTH + 16, thread,
                [=](int packet) {
                    const int side = packet / PACKETS, rest = packet % PACKETS;
                    const int begin = side == 0 ? firsts[0] : side == 1 ? firsts[1] : side == 2 ? firsts[2] : firsts[3];
                    const int unit = side < 4 ? begin / 8 : rest < 3 ? ends[0] : ends[1];
                    return from + unit * 48 + 16 * (side < 4 ? rest : rest % 3);
                },
                [=](int) { return epilogue.base + 1 + wait; }, [=](int at, float v) { to[at] = v; });
            barrier_arrive<INPUT_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
#endif
        } else if (op == SAMPLE) {
            const int wait = word[WAIT], writers = word[WRITERS];
            const unsigned char *from = epilogue.workspace + word[SOURCE];
            epilogue.await(wait, writers);
            best = __int_as_float(0xff800000), best_row = 0x7fffffff;
#pragma unroll 1
            for (int at = thread; at < writers; at += EPILOGUE_THREADS) {
                uint4 v[1];
                load_packets(v, 1, [=](int) { return from + 16 * at; }, [=](int) { return epilogue.base + wait + 1; });
                const float value = __uint_as_float(v[0].x);
                if (value > best || (value == best && (int)v[0].y < best_row)) best = value, best_row = v[0].y;
            }
            epilogue.largest(best, best_row, parity);
            if (thread == 0) {
                if (greedy) sampling::finish(state, ring, histories, ends, best_row < VOCAB ? best_row : 0);
                *(unsigned *)epilogue.workspace = epilogue.step + 1;
            }
            continue;
#if POST_NORMS
        } else if (op == JOIN) {
            factor = epilogue.norm_apart(word, parity);
#endif
#if PARALLEL
        } else if (op == GATE && word[RUN + FORMAT_OF] == staged) {
            barrier_arrive<INPUT_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
            factor = staged_factor;
#endif
        } else if (op != EMBED) {
            factor = epilogue.input(word, parity, normed);
        }
#if PARALLEL
        staged = op == PROJECT ? word[RUN + FORMAT_OF] : EVERY, staged_factor = factor;
#endif
        timestamp(timestamps, work, stage, 1, thread);
        // While the consumers compute: what is made of their results. What comes after them is on the way of every
        // token, each instruction after the one before: it is short, and all that can be found before is.
        const int columns = word[COLUMNS_OF], end = first + rows;
        const unsigned epoch = epilogue.base + stage + 1;
        unsigned char *target = epilogue.workspace + word[TARGET];
        const bool floats = word[FLAGS] & WRITES_FLOATS, hands_on = word[FLAGS] & HANDS_ON;
        const bool adds = op == GROWS || op == EMBED;
        const bool whole = op == ATTEND || is_delta(op) || without_product(op);
        const int pieces = whole ? 1 : row_pieces(columns, !(word[FLAGS] & READS_FLOATS));
        if (op == EMBED) {
            const unsigned char *matrix = (const unsigned char *)word.address(RUN);
            const unsigned format = word[RUN + FORMAT_OF];
#if BY_MEAN
            const float mean = epilogue.row_mean(matrix, format, token, parity);
#endif
#pragma unroll 1
            for (int row = mine; row < end; row += EPILOGUE_THREADS) {
                if (row < first) continue;
                WITH_FORMAT(format, work.sums[row - first] = weight_at<F>(matrix, (long long)token * DIM + row));
#if BY_MEAN
                work.sums[row - first] -= mean;
#endif
#ifdef EMBEDDING_SCALE
                work.sums[row - first] *= EMBEDDING_SCALE;
#endif
                work.stream[row - first] = 0;
            }
        }
        if (op == LOGITS) {
            barrier_sync<RESULTS_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
            timestamp(timestamps, work, stage, 2, thread);
            const unsigned sums = shared_address(work.sums);
#pragma unroll 1
            for (int at = thread; at < rows; at += EPILOGUE_THREADS) {
                float value = epilogue.row_sum(sums + 4 * at * pieces, pieces) * factor;
#if BY_MEAN
                if (beside) value += __ldg(beside + first + at);
#endif
#ifdef LOGIT_CAP
                value = LOGIT_CAP * tanhf(value * (1 / LOGIT_CAP));
#endif
                logits[first + at] = value;
                if (value > best) best = value, best_row = first + at;
            }
            if (!hands_on) {
                timestamp(timestamps, work, stage, 3, thread);
                continue;
            }
            epilogue.largest(best, best_row, parity);
            if (thread == 0) store_packet(target + 16 * blockIdx.x, __float_as_uint(best), best_row, 0, epoch);
#if UPS
        } else if (op == GATE && !hands_on) {
            barrier_sync<RESULTS_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
            timestamp(timestamps, work, stage, 2, thread);
            for (int row = mine; row < end; row += EPILOGUE_THREADS)  // each by the thread that will read it
                if (row >= first)
                    work.ups[row - first] =
                        epilogue.row_sum(shared_address(work.sums + (row - first) * pieces), pieces) * factor;
            timestamp(timestamps, work, stage, 3, thread);
            continue;
#endif
#if POST_NORMS
        } else if (op == APART) {
            barrier_sync<RESULTS_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
            timestamp(timestamps, work, stage, 2, thread);
            epilogue.set_apart(shared_address(work.sums), pieces, rows, target, epoch, parity, hands_on);
            if (PARALLEL && !hands_on) {
                timestamp(timestamps, work, stage, 3, thread);
                continue;
            }
#endif
        } else {
            // A row in each lane, 16 of them in 16 neighbouring lanes.
            int row = mine;
            unsigned sums = shared_address(work.sums + (row - first) * pieces);
            unsigned stream = shared_address(work.stream + row - first);
#if POST_NORMS
            if (op == JOIN) sums = shared_address(work.apart + row - first);
            float by = post_held;
#endif
            unsigned char *to = packet_of(target, row, floats, lane);
            bool inside = early;
            float near = held;
            const unsigned ups = 4 * rows * pieces;
#if UPS
            const bool times_left = word[FLAGS] & TIMES_LEFT;
#endif
#if LAYER_INPUTS
            const bool of_input = word[FLAGS] & OF_LAYER_INPUT;
#endif
            asm volatile("" : "+r"(sums), "+r"(stream), "+l"(to));
            if (!without_product(op)) barrier_sync<RESULTS_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
            timestamp(timestamps, work, stage, 2, thread);
            if (op == ATTEND && !work.joined) continue;
#pragma unroll 1
            while (row - lane < end) {
                float value = 0, square = 0;
                if (inside) {
#if BY_MEAN
                    value = epilogue.row_sum(sums, pieces);
                    value = op == JOIN ? value - factor + by : value * factor;
#else
                    value = epilogue.row_sum(sums, pieces) * factor;
#endif
#if LAYER_INPUTS
                    if (op == GATE && of_input) value = activate(value) * near;
                    else
#endif
#if UNGATED
                    if (op == GATE) value = activate(value + near);
#else
#if UPS
                    if (op == GATE && times_left) value = activate(value) * work.ups[row - first];
                    else
#endif
                    if (op == GATE) value = activate(value) * epilogue.row_sum(sums + ups, pieces) * factor;
#endif
#if TAPS
                    if (op == CONVOLVE) {
                        const float second = epilogue.row_sum(sums + ups, pieces) * factor;
                        value *= epilogue.row_sum(sums + 2 * ups, pieces) * factor;
                        taps[(size_t)((unsigned)position % TAP_ROWS) * DIM + row] = value;
                        value = second * convolution.sum(value);
                    }
#endif
                    if (op == PROJECT) value += near;
#if QK_NORM == 2
                    if (op == PROJECT) square = value * value;
#endif
#if POST_NORMS && !BY_MEAN
                    if (op == JOIN) value *= by;
#endif
                    if (adds) {
                        value += shared_float(stream);
#if SCALED
                        value *= scale;
#endif
                        put_shared(stream, value);
                        square = value * value;
                        value *= near;
                    }
                }
                hand_on(to, inside, value, square, floats, op == PROJECT ? 1 : REPLICAS, epoch, lane);
                row += EPILOGUE_THREADS, sums += 4 * EPILOGUE_THREADS * pieces, stream += 4 * EPILOGUE_THREADS;
                to = packet_of(target, row, floats, lane);
                inside = row >= first && row < end;
                near = beside && op != ATTEND && !is_delta(op) && inside ? read_beside(beside + row) : 0;
#if TAPS
                if (op == CONVOLVE && inside) convolution.load(kernel, taps, row, position);
#endif
#if POST_NORMS
                by = op == JOIN && inside && (!BY_MEAN || post) ? __ldg(post + row) : 0;
#endif
            }
        }
        epilogue.published(stage);
        timestamp(timestamps, work, stage, 3, thread);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMER_THREADS + EPILOGUE_THREADS + 32, 1)
persistent(const unsigned *program, unsigned char *workspace, State *state, Entry *ring, int *histories,
           const int *ends, const float *rope, float *logits, unsigned long long *timestamps, int last, int greedy) {
    extern __shared__ __align__(128) unsigned char memory[];
    unsigned char *buffer = memory;
    Work &work = work_in(memory);
    Pipeline &tiles = pipeline_in(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Reader reader(program, last, lane);
    // A sequence that nobody has begun holds anything: read a row that exists.
    const int position = state->position, token = (unsigned)state->token < VOCAB ? state->token : 0;
    const unsigned step = *(const volatile unsigned *)workspace;
    if (threadIdx.x == 0) pipeline_init(tiles);
#if ATTENTION_PIPELINE
    if (threadIdx.x == 0) work.position = position, work.base = step * STAGES;
#endif
#if SPIN_LIMIT
    if (threadIdx.x == 0)
        watch().over = 0, watch().step = step, watch().report = (unsigned *)(workspace + REPORTS + 32 * blockIdx.x);
#endif
    __syncthreads();
    if (warp < CONSUMERS) {
        consume(reader, work, tiles, buffer, workspace, rope, step * STAGES, position, warp, lane);
    } else if (warp < CONSUMERS + EPILOGUE) {
        const int thread = threadIdx.x - CONSUMER_THREADS;
        const Epilogue epilogue = {work, workspace, step * STAGES, step, thread, lane, warp - CONSUMERS};
        run_epilogue(reader, epilogue, state, ring, histories, ends, logits, timestamps, greedy, position, token);
    } else {
        fill(reader, tiles, buffer, position, lane);
    }
}
