// What the consumers of the step in one launch (persistent.cu) do: they multiply (products.cuh), attend
// (heads.cuh), and run the heads of delta nets.

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
