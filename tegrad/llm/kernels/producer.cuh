// What the producer warp of the step in one launch (persistent.cu) does: it fills the pipeline with weights, and
// with keys and values where ATTENTION_PIPELINE. A delta net's state it fetches into L2.

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
