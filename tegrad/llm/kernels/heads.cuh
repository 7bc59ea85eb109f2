// What the step in one launch (persistent.cu) does for one kind of heads: what the epilogue warps stage for attention,
// and the consumers' part of it.
//
// KEYS_PLACED (1: the instruction says where the first key and the first value begin, as they may be an earlier
// layer's, or values keys; so it does where heads are of two kinds).

// The cache of a KV head, and how many positions of it a token sees.
__device__ __forceinline__ attend::Side side_of(const Word &word, void *elements, __half *scales, int head,
                                                int position) {
#if RINGS
    return attend::ring(elements, scales, head, word[RING_ROWS], word[MOST_SEEN], position);
#else
    return attend::side(elements, scales, head);
#endif
}
#if ATTENTION_PIPELINE
__device__ __forceinline__ attend::Side keys_of(const Word &word, int position) {
    return side_of(word, (void *)word.address(RUN), (__half *)word.address(RUN + 8), word[HEAD] / GROUPS_PER_HEAD,
                   position);
}
__device__ __forceinline__ attend::Side values_of(const Word &word, int position) {
    return side_of(word, (void *)word.address(RUN + 4), (__half *)word.address(EXTRA), word[HEAD] / GROUPS_PER_HEAD,
                   position);
}
#endif

// Stages the queries of a share of a KV head's, of a product that begins at `from`, and key and value, by the epilogue
// warps: each is of one of three stages, which the instruction waits for.
template <class Epilogue>
__device__ __forceinline__ void stage_heads([[maybe_unused]] const Word &word, Work &work, const Epilogue &epilogue,
                                            int head, const unsigned char *from, unsigned wait, unsigned second,
                                            unsigned third, int thread) {
    // Packets before the key, and before the value.
    constexpr int QUERY = QUERIES / 8 * 3, KEY = QUERY + HEAD_DIM / 8 * 3;
    float *to = work.attending.query;
    static_assert(sizeof(work.attending.query) % 16 == 0, "query, key and value lie side by side");
#if KEYS_PLACED
    const unsigned char *queries = from + head * QUERIES / 8 * 48;
    const int share = head / GROUPS_PER_HEAD * HEAD_DIM / 8 * 48;
    const unsigned char *keys = epilogue.workspace + word[KEYS_AT] + share;
    const unsigned char *values = epilogue.workspace + word[VALUES_AT] + share;
#endif
    stage_floats(
        QUERIES + 2 * HEAD_DIM, thread,
        [=](int packet) {
#if KEYS_PLACED
            return packet < QUERY ? queries + 16 * packet
                : packet < KEY ? keys + 16 * (packet - QUERY) : values + 16 * (packet - KEY);
#else
            const int begin = packet < QUERY
                ? head * QUERIES
                : (PRODUCED + (packet >= KEY ? CACHE_HEADS : 0) + head / GROUPS_PER_HEAD) * HEAD_DIM;
            return from + begin / 8 * 48 + 16 * (packet - (packet < QUERY ? 0 : packet < KEY ? QUERY : KEY));
#endif
        },
        [=](int packet) {
            return epilogue.base + 1 + ((packet < QUERY ? wait : packet < KEY ? second : third) & 0xffff);
        },
        [=](int at, float v) { to[at] = v; });
}

// Where attention's result goes, and what gates it.
#if GATED
#define ATTENDED(work) {work.sums, nullptr, nullptr, nullptr, work.attending.query + HEAD_DIM}
#else
#define ATTENDED(work) {work.sums, nullptr, nullptr}
#endif

// A split of a KV head's positions; who joins the splits leaves the result in work.sums. A function of its own:
// inlined, what the caller keeps in registers would make its loops spill.
#if ATTENTION_PIPELINE
__device__ __noinline__ void attend_split(Word word, unsigned char *workspace, Turn now) {
    extern __shared__ __align__(128) unsigned char memory[];
    Work &work = work_in(memory);
    Attending &a = work.attending;
    const int thread = threadIdx.x;
    if (word[SPLIT_OF] >= attend::range(seen(word, work.position), 0).splits) return;
    attend::pipelined_split(a.shared, pipeline_in(memory), memory, now, keys_of(word, work.position),
                      values_of(word, work.position), word[SPLIT_OF], work.position, a.query, a.key, a.value,
                      (const float *)word.address(NORM), (const float *)word.address(BIAS), turn_of(word, work),
                      TURN_PAIRS, thread, [] { barrier_sync<INPUT_READY>(CONSUMER_THREADS + EPILOGUE_THREADS); });
    const int head = word[HEAD], splits = attend::range(seen(word, work.position), 0).splits;
    attend::finish_pipelined_split(a.shared, word[SPLIT_OF], splits,
                             workspace + JOINS + (size_t)head * SPLITS * attend::LOTS * attend::LOT_BYTES,
                             (unsigned *)(workspace + COUNTERS + (size_t)(STAGES + head) * COUNTER_BYTES),
                             work.base + word[STAGE] + 1, ATTENDED(work), thread);
    if (thread == 0) work.joined = splits == 1 || a.shared.last;
    barrier_arrive<RESULTS_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
}
#else
__device__ __noinline__ void attend_split(Word word, Work &work, unsigned char *workspace, int position, int warp,
                                         int thread) {
    const int head = word[HEAD], number = word[SPLIT_OF];
    void *keys = (void *)word.address(RUN), *values = (void *)word.address(RUN + 4);
    __half *key_scales = (__half *)word.address(RUN + 8), *value_scales = (__half *)word.address(EXTRA);
    const float *q_norm = (const float *)word.address(NORM), *k_norm = (const float *)word.address(BIAS);
    float *joins = (float *)(workspace + JOINS) + (size_t)head * SPLITS * attend::SPLIT_FLOATS;
    unsigned *counter = (unsigned *)(workspace + COUNTERS + (size_t)(STAGES + head) * COUNTER_BYTES);
    const float *turn = turn_of(word, work);
    const int splits = attend::range(seen(word, position), 0).splits;
    if (number >= splits) return;
    if (warp < ATTENTION_WARPS) {
        const attend::Output out = ATTENDED(work);
        Attending &a = work.attending;
        attend::split(a.shared, side_of(word, keys, key_scales, head / GROUPS_PER_HEAD, position),
                     side_of(word, values, value_scales, head / GROUPS_PER_HEAD, position), number, position, a.query,
                     a.key, a.value, q_norm, k_norm, turn, TURN_PAIRS, joins, counter, out, thread,
                     [] { barrier_sync<INPUT_READY>(CONSUMER_THREADS + EPILOGUE_THREADS); });
        if (thread == 0) work.joined = splits == 1 || a.shared.last;
    } else {
        barrier_sync<INPUT_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
    }
    barrier_arrive<RESULTS_READY>(CONSUMER_THREADS + EPILOGUE_THREADS);
}
#endif
