// How warps of the step in one launch (persistent.cu) stage in shared memory what an instruction reads: packets of a
// vector, which they poll.

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
