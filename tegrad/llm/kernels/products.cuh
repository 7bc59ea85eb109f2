// Products of the consumers of the step in one launch (persistent.cu): segments of weights from the pipeline, times
// the staged input.

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
    else if (FIXED || (PRODUCT_FORMATS == 1 && places.step == 0))
        multiply_packed<F, true>(work, pipeline, buffer, now, segments, width, places, warp, lane);
    // Of several formats no other loop than this: two for each are more code than is worth its gain (docs/notebook.md).
    else if constexpr (!FIXED)
        multiply_packed<F, false>(work, pipeline, buffer, now, segments, width, places, warp, lane);
}
