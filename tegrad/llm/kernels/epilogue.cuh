// What the epilogue warps of the step in one launch (persistent.cu) do: they wait for an instruction's input and stage
// it, and make of what the consumers computed what the next stage reads.

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
