// Attention of the step in one launch (persistent.cu) whose keys and values come through the pipeline of weights.
//
// The rows of a split are cut into tiles of up to PIPELINE_ROWS positions, keys and values in one stage of the
// pipeline. They were written by earlier launches, so that the producer warp fetches them during the stages before.
// Position and split tell it and the consumers alike how many there are. Every warp walks over all of them, works on
// its own units of each, and releases each.
//
// ATTENTION_PIPELINE 1: a warp works as in attention.cuh, with rows from shared memory. 2: on the tensor cores, where
// the cache is f16, groups are of at most 8, heads of 64 or 128 and scores not capped; else as 1.
//
// On the tensor cores 16 positions are two products of 16 x HEAD_DIM x 8 and one of 16 x 16 x HEAD_DIM. Rows 0 .. 7 of
// the first operand are the heads' queries (then their weights) as halves, rows 8 .. 15 what the halves leave out, so
// that 22 bits of a float count. Which positions and elements are a product's columns does not matter as long as both
// sides agree: that lets each lane load 16 bytes of a row, and the lanes of a phase from different banks.
// Included after attention.cuh, for each kind of heads.
namespace attend {

constexpr bool TENSOR =
    ATTENTION_PIPELINE == 2 && !CACHE_Q8 && !CAPPED && GROUP <= 8 && (HEAD_DIM == 64 || HEAD_DIM == 128);
constexpr int ROW_BYTES = HEAD_DIM * (int)sizeof(Element), SCALE_BYTES = CACHE_Q8 ? HEAD_DIM / 32 * 2 : 0;
// What a warp takes at a time: two products of 16 positions are more independent instructions, where they fit.
constexpr int PRODUCTS = HEAD_DIM <= 64 && STAGE_BYTES / 2 >= 32 * ROW_BYTES + 128 ? 2 : 1;
constexpr int UNIT_ROWS = TENSOR ? 16 * PRODUCTS : TILE;
// Rows of keys lie in two pieces and of values in four, a quarter of the rows being QUARTERS'. The pieces are so far
// apart that each begins in other banks.
constexpr int QUARTERS = TENSOR ? 4 : 1, KEY_PIECES = TENSOR ? 2 : 1, VALUE_PIECES = QUARTERS;
constexpr int SHIFTS = TENSOR ? 128 : 0;  // of all pieces of a side together
constexpr int PIPELINE_ROWS = (STAGE_BYTES / 2 - SHIFTS) / (ROW_BYTES + SCALE_BYTES) / UNIT_ROWS * UNIT_ROWS;
// A tile's values are after its keys, then the scales of both.
constexpr int SIDE_BYTES = PIPELINE_ROWS * ROW_BYTES + SHIFTS;
constexpr int KEY_PITCH = SIDE_BYTES / KEY_PIECES, VALUE_PITCH = SIDE_BYTES / VALUE_PIECES;
constexpr int SIDE_SCALES = PIPELINE_ROWS * SCALE_BYTES;
constexpr int PIECES = KEY_PIECES + VALUE_PIECES + (CACHE_Q8 ? 2 : 0);

static_assert(PIPELINE_ROWS > 0, "a stage of the pipeline holds no tile of keys and values");
static_assert(PIPELINE_ROWS * SCALE_BYTES % 16 == 0 && TILE * SCALE_BYTES % 16 == 0 &&
                  POSITIONS * SCALE_BYTES % 16 == 0,
              "scales are copied in pieces of 16 bytes: positions of the cache must be a multiple of 8");
static_assert(!RINGS || SCALE_BYTES % 16 == 0, "in a ring a tile begins at any row");
static_assert(ATTENTION_WARPS == CONSUMERS, "every warp that releases tiles attends");

// Tiles of a split.
__device__ __forceinline__ int tiles(const Range &rows) {
    return (rows.end - rows.begin + PIPELINE_ROWS - 1) / PIPELINE_ROWS;
}

// Rows of a quarter of a tile of `rows`: the last tile's are spread like the others', the last quarters then end early.
__device__ __forceinline__ int quarter_rows(int rows) {
    return QUARTERS == 1 ? rows : (rows + UNIT_ROWS - 1) / UNIT_ROWS * (UNIT_ROWS / QUARTERS);
}

// --- the producer warp -----------------------------------------------------------------------------------------------

#if RINGS
// Copies rows of `width` bytes from `row` on, which go on from a ring's end at its beginning.
__device__ __forceinline__ void copy_rows(const void *cache, int width, const Side &side, int row, unsigned to,
                                          unsigned bytes, const Copy &copy) {
    const unsigned char *from = (const unsigned char *)cache;
    row = (side.origin + row) % side.rows;
    const unsigned fitting = min(bytes, (unsigned)((side.rows - row) * width));
    copy(to, from + (size_t)row * width, fitting);
    if (fitting < bytes) copy(to + fitting, from, bytes - fitting);
}
#endif

// Copies piece `at` of the `rows` rows of a tile that begins at row `first` of the cache.
__device__ __forceinline__ void copy_piece(const Side &keys, const Side &values, int first, int rows, int at,
                                           const Copy &copy) {
    if (at < KEY_PIECES + VALUE_PIECES) {
        const bool value = at >= KEY_PIECES;
        const int piece = value ? at - KEY_PIECES : at;
        const int most = quarter_rows(rows) * (value ? 1 : QUARTERS / KEY_PIECES), begin = piece * most;
        const int count = min(most, rows - begin);
        const int to = value ? SIDE_BYTES + piece * VALUE_PITCH : piece * KEY_PITCH;
#if RINGS
        const Element *from = value ? values.at : keys.at;
        if (count > 0) copy_rows(from, ROW_BYTES, keys, first + begin, to, (unsigned)count * ROW_BYTES, copy);
#else
        const Element *from = (value ? values : keys).at + (size_t)(first + begin) * HEAD_DIM;
        if (count > 0) copy(to, (const unsigned char *)from, (unsigned)count * ROW_BYTES);
#endif
    } else {
        const bool value = at > KEY_PIECES + VALUE_PIECES;
        const unsigned bytes = (rows * SCALE_BYTES + 15) / 16 * 16;
        const int to = 2 * SIDE_BYTES + (value ? SIDE_SCALES : 0);
#if RINGS
        copy_rows(value ? values.scale : keys.scale, SCALE_BYTES, keys, first, to, bytes, copy);
#else
        const __half *from = (value ? values : keys).scale + (size_t)first * (HEAD_DIM / 32);
        copy(to, (const unsigned char *)from, bytes);
#endif
    }
}

// All bytes of a tile.
__device__ __forceinline__ unsigned tile_bytes(int rows) {
    return 2 * rows * ROW_BYTES + 2 * ((rows * SCALE_BYTES + 15) / 16 * 16);
}

// Puts the tiles of a split.
__device__ __forceinline__ void produce_part(Producer &producer, Pipeline &pipeline, unsigned char *buffer,
                                             const Side &keys, const Side &values, const Range &range, int lane) {
#pragma unroll 1
    for (int first = range.begin; first < range.end; first += PIPELINE_ROWS) {
        const int rows = min(PIPELINE_ROWS, range.end - first);
        producer.put(pipeline, buffer, tile_bytes(rows), PIECES, lane,
                   [=](int at, const Copy &copy) { copy_piece(keys, values, first, rows, at, copy); });
    }
}

// --- a warp's share, by lanes ----------------------------------------------------------------------------------------

struct ByLanes {
    Gathered gathered;

    __device__ static __forceinline__ void lay_out(Shared &, unsigned, unsigned) {}
    __device__ __forceinline__ void begin(const Shared &shared, bool fresh, unsigned lane) {
        gathered.begin(shared, fresh, lane);
    }
    // Rows of one side from `first` on; those after the last of `rows` are the last one once more.
    __device__ static __forceinline__ void take(Rows &to, const unsigned char *tile, bool side, int first, int rows,
                                                unsigned lane) {
        const unsigned column = (lane % LANES < SHARES ? lane % LANES : SHARES - 1) * (EACH / 8);
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            const int row = min(first + (int)lane / LANES + u * ROWS, rows - 1);
#pragma unroll
            for (int i = 0; i < EACH / 8; i++)
                to.octet[u][i] = *((const Octet *)(tile + side * SIDE_BYTES + row * ROW_BYTES) + column + i);
#if CACHE_Q8
            to.scale[u] = *((const unsigned short *)(tile + 2 * SIDE_BYTES + side * SIDE_SCALES + row * SCALE_BYTES) +
                            column / 4);
#endif
        }
    }
    __device__ __forceinline__ void add(Shared &shared, const unsigned char *tile, int first, int rows, unsigned warp,
                                        unsigned lane) {
        Rows side;
        take(side, tile, false, first, rows, lane);
        gathered.score(side, shared.weight[warp], first, first, rows, lane);
        take(side, tile, true, first, rows, lane);
        gathered.add(side, shared.weight[warp], lane);
    }
    __device__ __forceinline__ void publish(Shared &shared, unsigned warp, unsigned lane) {
        gathered.publish(shared, warp, lane);
    }
};

// --- a warp's share, on the tensor cores -----------------------------------------------------------------------------

// d += a b (PTX ISA: mma.m16n8k16): a 16 x 16, b 16 x 8.
__device__ __forceinline__ void mma(float (&d)[4], const uint4 &a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned pair_of(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    unsigned bits;
    memcpy(&bits, &pair, 4);
    return bits;
}

// Two floats as halves, and what these leave out as halves.
__device__ __forceinline__ void split_pair(float a, float b, unsigned &high, unsigned &low) {
    high = pair_of(a, b);
    const float2 kept = widen(high);
    low = pair_of(a - kept.x, b - kept.y);
}

__device__ __forceinline__ float2 join_pair(unsigned high, unsigned low) {
    const float2 a = widen(high), b = widen(low);
    return make_float2(a.x + b.x, a.y + b.y);
}

// Lane 4 g + t: of head g. The positions of a unit that are its own: of each turn, columns 2 t and 2 t + 1; two turns
// are a product of 16 positions.
struct ByTensor {
    static constexpr int STEPS = HEAD_DIM / 16, COLUMNS_OF_8 = HEAD_DIM / 8, TURNS = 2 * PRODUCTS;
    static constexpr bool HOLD = STEPS * PRODUCTS <= 4;  // more would not fit 128 registers
    uint4 query[HOLD ? STEPS : 1];
    // Columns 2 t and 2 t + 1, of the weights and then of what their halves leave out.
    float mixed[COLUMNS_OF_8][4];
    float top, sum;

    // The element of a head that column `column` of product `at` is, and the first of four that lane t has in a step.
    __device__ static __forceinline__ int element(int at, int column) { return at / 8 * 64 + 8 * column + at % 8; }
    __device__ static __forceinline__ int first_of(int step, int t) { return 8 * (t + step / 2 * 4) + step % 2 * 4; }

    // The fragment of a step: of neighbouring heads in different banks.
    __device__ static __forceinline__ uint4 *place_of(Shared &shared, int g, int step, int t) {
        return (uint4 *)shared.query[g] + (step ^ (g & 1)) * 4 + t;
    }
    // Query heads, by the warps that made them, as the fragments of all warps; in place.
    __device__ static __forceinline__ void lay_out(Shared &shared, unsigned warp, unsigned lane) {
        const int step = lane / 4, t = lane % 4;
        for (int g = warp; g < GROUP; g += ATTENTION_WARPS) {
            uint4 made = make_uint4(0, 0, 0, 0);
            if (step < STEPS) {
                const float4 v = *(const float4 *)&shared.query[g][first_of(step, t)];
                split_pair(v.x, v.y, made.x, made.y);
                split_pair(v.z, v.w, made.z, made.w);
            }
            __syncwarp();
            if (step < STEPS) *place_of(shared, g, step, t) = made;
        }
    }

    __device__ __forceinline__ void begin(Shared &shared, bool fresh, unsigned lane) {
        const int g = min((int)lane / 4, GROUP - 1), t = lane % 4;  // where no head is, the last one once more
        float score = 0;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            if (!HOLD && !fresh) break;
            const uint4 held = *place_of(shared, g, s, t);
            if (HOLD) query[HOLD ? s : 0] = held;
            if (!fresh) continue;
            const float4 k = *(const float4 *)&shared.fresh[0][first_of(s, t)];
            const float2 a = join_pair(held.x, held.y), b = join_pair(held.z, held.w);
            score += a.x * k.x + a.y * k.y + b.x * k.z + b.y * k.w;
        }
        score += __shfl_xor_sync(ALL, score, 1);
        score += __shfl_xor_sync(ALL, score, 2);
        top = fresh ? score : NONE;
        sum = fresh && t == 0 ? 1 : 0;
#pragma unroll
        for (int at = 0; at < COLUMNS_OF_8; at++) {
#pragma unroll
            for (int b = 0; b < 2; b++) {
                mixed[at][b] = fresh ? shared.fresh[1][element(at, 2 * t + b)] : 0;
                mixed[at][2 + b] = 0;
            }
        }
    }

    __device__ __forceinline__ void add(Shared &shared, const unsigned char *tile, int first, int rows, unsigned,
                                        unsigned lane) {
        const int g = min((int)lane / 4, GROUP - 1), t = lane % 4, each = quarter_rows(rows), base = first / QUARTERS;
        // A position of the unit: turn, and whether its column is odd. A lane of keys loads column lane / 4; of values,
        // both of its own. What lies after the last row is the first one once more.
        const int column = lane / 4, odd = column & 1;
        const int quarter = (column / 2 + 2 * odd) & 3;
        int from[TURNS];
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            const int row = base + 2 * turn + odd, in_piece = quarter % 2 * each + row;
            from[turn] = quarter * each + row < rows ? quarter / 2 * KEY_PITCH + in_piece * ROW_BYTES : 0;
        }
        float score[TURNS][4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; s += 2) {
            const uint4 a = HOLD ? query[HOLD ? s : 0] : *place_of(shared, g, s, t);
            const uint4 b = HOLD ? query[HOLD ? s + 1 : 0] : *place_of(shared, g, s + 1, t);
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                const uint4 k = *(const uint4 *)(tile + from[turn] + 16 * t + 32 * s);
                mma(score[turn], a, k.x, k.y);
                mma(score[turn], b, k.z, k.w);
            }
        }
        int place[TURNS][2];
        float best = top;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const int quarter = (t + 2 * b) & 3, row = base + 2 * turn + b;
                const bool counts = quarter * each + row < rows;
                place[turn][b] = counts ? quarter * VALUE_PITCH + row * ROW_BYTES : 0;
                score[turn][b] = counts ? score[turn][b] + score[turn][2 + b] : NONE;
                best = fmaxf(best, score[turn][b]);
            }
        }
        best = fmaxf(best, __shfl_xor_sync(ALL, best, 1));
        best = fmaxf(best, __shfl_xor_sync(ALL, best, 2));
        if (__any_sync(ALL, best > top)) {
            const float shrink = power(top - best);
            top = best;
            sum *= shrink;
#pragma unroll
            for (int at = 0; at < COLUMNS_OF_8; at++) {
#pragma unroll
                for (int i = 0; i < 4; i++) mixed[at][i] *= shrink;
            }
        }
        float part[TURNS][2];
#pragma unroll
        for (int i = 0; i < 2 * TURNS; i++) sum += part[i / 2][i % 2] = power(score[i / 2][i % 2] - top);
        uint4 weight[PRODUCTS];
#pragma unroll
        for (int p = 0; p < PRODUCTS; p++) {
            split_pair(part[2 * p][0], part[2 * p][1], weight[p].x, weight[p].y);
            split_pair(part[2 * p + 1][0], part[2 * p + 1][1], weight[p].z, weight[p].w);
        }
#pragma unroll
        for (int at = 0; at < HEAD_DIM / 64 * PRODUCTS; at++) {
            const int half = at / PRODUCTS, p = at % PRODUCTS;
            const unsigned char *values = tile + SIDE_BYTES + half * 128 + 16 * column;
            uint4 v[2][2];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i / 2][i % 2] = *(const uint4 *)(values + place[2 * p + i / 2][i % 2]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const unsigned order = i & 1 ? 0x7632 : 0x5410;
                mma(mixed[8 * half + i], weight[p], __byte_perm(word(v[0][0], i / 2), word(v[0][1], i / 2), order),
                    __byte_perm(word(v[1][0], i / 2), word(v[1][1], i / 2), order));
            }
        }
    }
    __device__ static __forceinline__ unsigned word(const uint4 &v, int at) {
        return at == 0 ? v.x : at == 1 ? v.y : at == 2 ? v.z : v.w;
    }

    __device__ __forceinline__ void publish(Shared &shared, unsigned warp, unsigned lane) {
        const int g = lane / 4, t = lane % 4;
        sum += __shfl_xor_sync(ALL, sum, 1);
        sum += __shfl_xor_sync(ALL, sum, 2);
        if (g >= GROUP) return;
#pragma unroll
        for (int at = 0; at < COLUMNS_OF_8; at += 4) {
#pragma unroll
            for (int b = 0; b < 2; b++) {
                float v[4];
#pragma unroll
                for (int i = 0; i < 4; i++) v[i] = mixed[at + i][b] + mixed[at + i][2 + b];
                *(float4 *)&shared.mixed[warp][g * HEAD_DIM + element(at, 2 * t + b)] =
                    make_float4(v[0], v[1], v[2], v[3]);
            }
        }
        if (t == 0) shared.top[warp][g] = top, shared.sum[warp][g] = sum;
    }
};

static_assert(ATTENTION_WARPS * TILE * GROUP_SLOTS % (TENSOR ? 4 : 2) == 0, "what warps publish lies aligned");

template <bool Tensor> struct Worker { typedef ByLanes Type; };
template <> struct Worker<true> { typedef ByTensor Type; };

// --- joining ---------------------------------------------------------------------------------------------------------

// With packets, the first split joins: it waits for those of the others, which saves the fence and the count that tell
// the last-arriving one. A packet has two outputs, and the logarithm of the weight that they have.
constexpr int LOTS = OUTPUTS / 2, LOT_BYTES = 16;

// What a CTA's warps have published, joined: outputs and weights, where what nobody needs any more lay.
struct Own {
    float *outputs, *weight;
    __device__ __forceinline__ Own(Shared &shared) : outputs(shared.query[0]), weight(shared.fresh[0]) {}
};
static_assert(GROUP <= HEAD_DIM, "a head's row has room for all heads' weights");

// Hands a split on to its place in the workspace.
__device__ __forceinline__ void send_split(const Own &own, unsigned char *to, unsigned epoch, unsigned thread) {
    for (int lot = thread; lot < LOTS; lot += THREADS) {
        const float2 v = *(const float2 *)(own.outputs + 2 * lot);
        store_packet(to + lot * LOT_BYTES, __float_as_uint(v.x), __float_as_uint(v.y),
                     __float_as_uint(own.weight[2 * lot / HEAD_DIM]), epoch);
    }
}

// The first split's own results with all others' in the workspace: crews of threads take some of the splits each,
// AT_ONCE of them on their way.
__device__ __forceinline__ void join_sent(Shared &shared, const Own &own, const unsigned char *splits, int count,
                                          unsigned epoch, const Output &out, unsigned thread) {
    constexpr int FITTING = THREADS / LOTS < ATTENTION_WARPS ? THREADS / LOTS : ATTENTION_WARPS;
    constexpr int CREWS = FITTING < 1 ? 1 : FITTING < SPLITS ? FITTING : SPLITS;
    constexpr int EACH = (SPLITS - 1 + CREWS - 1) / CREWS, AT_ONCE = EACH < 1 ? 1 : EACH < 8 ? EACH : 8;
#pragma unroll 1
    for (int at = thread; at < LOTS * CREWS; at += THREADS) {
        const int lot = at % LOTS, crew = at / LOTS, g = 2 * lot / HEAD_DIM;
        float best = NONE, sum = 0, a = 0, b = 0;
#pragma unroll 1
        for (int first = 1 + crew; first < count; first += AT_ONCE * CREWS) {
            uint4 v[AT_ONCE];
            const int limit = (count - first + CREWS - 1) / CREWS;
            const unsigned char *from = splits + (first * LOTS + lot) * LOT_BYTES;
            load_packets(v, limit, [=](int i) { return from + i * (CREWS * LOTS * LOT_BYTES); },
                         [=](int) { return epoch; });
            float top = best;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (i < limit) top = fmaxf(top, __uint_as_float(v[i].z));
            const float shrink = power(best - top);
            a *= shrink, b *= shrink, sum *= shrink, best = top;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (i >= limit) break;
                const float part = power(__uint_as_float(v[i].z) - top);
                a += part * __uint_as_float(v[i].x), b += part * __uint_as_float(v[i].y), sum += part;
            }
        }
        shared.mixed[crew][2 * lot] = a, shared.mixed[crew][2 * lot + 1] = b;
        if (2 * lot % HEAD_DIM == 0) shared.top[crew][g] = best, shared.sum[crew][g] = sum;
    }
    ATTENTION_SYNC();
    for (int first = 0; first < OUTPUTS; first += THREADS) {
        const int at = first + thread, g = at / HEAD_DIM;
        const bool inside = at < OUTPUTS;
        if (first + thread / 32 * 32 >= OUTPUTS) break;
        float value = 0, sum = 1;
        if (inside) {
            float best = own.weight[g];
#pragma unroll
            for (int c = 0; c < CREWS; c++) best = fmaxf(best, shared.top[c][g]);
            sum = power(own.weight[g] - best), value = sum * own.outputs[at];
#pragma unroll
            for (int c = 0; c < CREWS; c++) {
                const float part = power(shared.top[c][g] - best);
                value += part * shared.mixed[c][at], sum += part * shared.sum[c][g];
            }
        }
        out.put(at, __fdividef(value, sum), inside);
    }
}

// --- a split ---------------------------------------------------------------------------------------------------------

// The first half of what `split` of attention.cuh does, with the rows from the tiles from `now` on, by all CONSUMERS
// warps; finish_pipelined_split does the second.
template <typename Ready>
__device__ __forceinline__ void pipelined_split(Shared &shared, Pipeline &pipeline, const unsigned char *buffer,
                                          Turn now, const Side &keys, const Side &values, int split, int position,
                                          const float *q, const float *k, const float *v, const float *q_norm,
                                          const float *k_norm, const float *turn, size_t sines, unsigned thread,
                                          Ready ready) {
    const Range range = attend::range(cached(keys, position), split);
    const unsigned warp = thread / 32, lane = thread % 32;
    const HeadNorms norms(q_norm, k_norm, thread);
    ready();
    prepare(shared, keys, values, position, split == 0, q, k, v, norms, turn, sines, thread);
    typename Worker<TENSOR>::Type worker;
    worker.lay_out(shared, warp, lane);
    ATTENTION_SYNC();
    // The last warp has the fewest units, so that the token's own key is its.
    worker.begin(shared, split == 0 && warp == ATTENTION_WARPS - 1, lane);
    int unit = warp;
#pragma unroll 1
    for (int left = range.end - range.begin; left > 0; left -= PIPELINE_ROWS) {
        const int rows = min(left, PIPELINE_ROWS);
        pipeline_wait(pipeline, now);
        const unsigned char *tile = buffer + (size_t)now.stage * STAGE_BYTES;
#pragma unroll 1
        for (; unit < PIPELINE_ROWS / UNIT_ROWS; unit += ATTENTION_WARPS)
            if (unit * UNIT_ROWS < rows) worker.add(shared, tile, unit * UNIT_ROWS, rows, warp, lane);
        unit -= PIPELINE_ROWS / UNIT_ROWS;
        __syncwarp();
        if (lane == 0) pipeline_release(pipeline, now, warp);
        now.advance();
    }
    worker.publish(shared, warp, lane);
    ATTENTION_SYNC();
}

// workspace: LOTS * LOT_BYTES for each split; shared.last: whether the output is there.
__device__ __forceinline__ void finish_pipelined_split(Shared &shared, int split, int count, unsigned char *workspace,
                                                 unsigned *counter, unsigned epoch, const Output &out,
                                                 unsigned thread) {
    if (!EPOCH_FLAGS) {
        finish_split(shared, split, count, (float *)workspace, counter, out, thread);
        return;
    }
    const Own own(shared);
    for (int at = 2 * thread; at < OUTPUTS; at += 2 * THREADS) {
        const int g = at / HEAD_DIM;
        float top = NONE, sum = 0, a = 0, b = 0;
#pragma unroll
        for (int w = 0; w < ATTENTION_WARPS; w++) top = fmaxf(top, shared.top[w][g]);
#pragma unroll
        for (int w = 0; w < ATTENTION_WARPS; w++) {
            const float part = power(shared.top[w][g] - top);
            const float2 found = *(const float2 *)&shared.mixed[w][at];
            a += part * found.x, b += part * found.y, sum += part * shared.sum[w][g];
        }
        a = __fdividef(a, sum), b = __fdividef(b, sum);
        if (count == 1) {
            out.put(at, a, true);
            out.put(at + 1, b, true);
        } else {
            own.outputs[at] = a, own.outputs[at + 1] = b;
            if (at % HEAD_DIM == 0) own.weight[g] = top + __log2f(sum);
        }
    }
    if (count == 1) return;
    ATTENTION_SYNC();
    if (split) send_split(own, workspace + split * LOTS * LOT_BYTES, epoch, thread);
    else join_sent(shared, own, workspace, count, epoch, out, thread);
    if (thread == 0) shared.last = split == 0;
}

}  // namespace attend
