// A whole decode step in one launch: every CTA runs its list of instructions (tegrad/llm/schedule.py), and all of them
// must be on the chip at once. A CTA has three kinds of warps:
//
//   CONSUMERS warps multiply segments of weights from the pipeline, and attend;
//   EPILOGUE warps wait for an instruction's input, stage it in shared memory, and turn what the consumers computed
//       into what the next stage reads: norms' factors, activations, the residual stream, quantized packets;
//   one warp fills the pipeline with the weights of all instructions, and with keys and values where
//       ATTENTION_PIPELINE, as far ahead as it has stages; it waits for nobody.
//
// A consumer reads its first segment of an instruction into registers before it waits for the input. What a CTA needs
// of the residual stream stays in its shared memory.
//
// Grid (CTAS), 32 * (CONSUMERS + EPILOGUE + 1) threads, SHARED bytes of dynamic shared memory. Arguments:
//   program    struct of 32 words (schedule_words.WORDS) for each stage and CTA
//   workspace  schedule_words.WorkspaceLayout: number of the step, counters, joined splits of attention, packets; zeros
//              at first
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
// segments of a warp all meet the same activations), PRODUCT_FORMATS (how many packed formats are multiplied), NARROW
// (1: packed rows may be a multiple of 64 only, else they are of 256), SHARED; what may be tuned: CONSUMERS, EPILOGUE,
// PIPELINE_STAGES (at most), POLLED (sets of 16, of two packets each, that an epilogue thread waits for together),
// ATTENTION_PIPELINE (1, 2: keys and values come through the pipeline, attention_pipeline.cuh; 0: each lane loads its
// own) and those of sync.cuh.
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

// schedule.Op, schedule_words.WORDS and flags
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

#include "staging.cuh"
#include "products.cuh"

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

#include "consumers.cuh"
#include "producer.cuh"
#include "publish.cuh"
#include "epilogue.cuh"

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
