// How the CTAs of one launch, and the warps of one CTA, wait for each other.
//
// Between CTAs: **packets** of 16 bytes, 12 of data and the epoch, which the reader polls until the epoch is the
// awaited one. A packet is one 128-bit store, seen whole, so that it needs no fence. **Whoever loads a packet uses all
// its data**: of a load whose second and third word are dead, ptxas makes two, and the epoch may then be newer than the
// data (seen on an H200; of ld.b128, too). tests/llm/test_packets.py looks. With EPOCH_FLAGS 0 the same packets are
// written without being polled, and a counter for each stage, after a fence, says that all of them are there.
//
// Within a CTA: a **pipeline** of DEPTH tiles of weights that one warp fills and CONSUMERS warps read. On sm_90 its
// tiles come by bulk copies and mbarriers, else (BULK 0) by 16-byte cp.async and words in shared memory.
//
// Macros: EPOCH_FLAGS (1 packets, 0 counters), BULK, DEPTH, STAGE_BYTES, IN_FLIGHT (tiles on their way at most),
// CONSUMERS, BACKOFF (ns between polls), EVICT_FIRST (weights leave L2 first; sm_90), SPIN_LIMIT (polls of a wait at
// most, 0 any).
#pragma once
#include "async.cuh"
#include "barrier.cuh"

#ifndef EPOCH_FLAGS
#define EPOCH_FLAGS 1
#endif
#ifndef BULK
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BULK 1
#else
#define BULK 0
#endif
#endif
#ifndef IN_FLIGHT
#define IN_FLIGHT 1
#endif
#ifndef BACKOFF
#define BACKOFF 0
#endif
#ifndef EVICT_FIRST
#define EVICT_FIRST 0
#endif
#ifndef SPIN_LIMIT
#define SPIN_LIMIT 0
#endif

__device__ __forceinline__ void back_off() {
    if constexpr (BACKOFF > 0) __nanosleep(BACKOFF);
}

// --- patience -------------------------------------------------------------------------------------------------------

enum Waiting { FOR_PACKET = 1, FOR_COUNTER, FOR_TILE, FOR_STAGE, FOR_LANDING };

#if SPIN_LIMIT

// At the end of shared memory.
struct alignas(16) Watch {
    unsigned over;            // a wait of this CTA was given up: no other one is begun
    unsigned step;
    unsigned *report;         // this CTA's in the workspace, persistent.REPORT
    unsigned short stage[32]; // of each warp
};

__device__ __forceinline__ Watch &watch() {
    extern __shared__ __align__(128) unsigned char memory[];
    return *(Watch *)(memory + SHARED - sizeof(Watch));
}

// The CTA's first report stays, over launches too.
__device__ __noinline__ void give_up(Waiting what, unsigned wanted, unsigned found) {
    Watch &seen = watch();
    if (atomicExch(&seen.over, 1) || seen.report[0]) return;
    const int warp = threadIdx.x / 32;
    seen.report[1] = seen.stage[warp], seen.report[2] = warp, seen.report[3] = wanted, seen.report[4] = found;
    seen.report[5] = seen.step, seen.report[0] = what;
}

#endif

// One wait. With SPIN_LIMIT it is given up after so many polls, and at once where the CTA has given up another one: the
// launch then ends, with a report of who waited for what, and nothing else that it leaves means anything.
struct Patience {
    unsigned polls = 0;
    __device__ __forceinline__ bool over(Waiting what, unsigned wanted, unsigned found) {
#if SPIN_LIMIT
        if (*(volatile unsigned *)&watch().over) return true;
        if (++polls < SPIN_LIMIT) return false;
        give_up(what, wanted, found);
        return true;
#else
        return false;
#endif
    }
};

// --- packets --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 load_packet(const unsigned char *from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ void store_packet(unsigned char *to, unsigned x, unsigned y, unsigned z, unsigned epoch) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(epoch) : "memory");
}

// Whether a packet is not of an epoch, of which the bits of Known travel.
template <unsigned Known> __device__ __forceinline__ bool stale(const uint4 &packet, unsigned epoch) {
    if constexpr (Known == 0xffffffffu) return packet.w != epoch;
    else return (packet.w ^ epoch) & Known;
}

// Loads packets `at(i)` for all i < Count below `limit`; returns when each is of epoch `epoch(i)`.
template <unsigned Known = 0xffffffffu, int Count, class At, class Epoch>
__device__ __forceinline__ void load_packets(uint4 (&v)[Count], int limit, At at, Epoch epoch) {
#pragma unroll
    for (int i = 0; i < Count; i++)
        if (i < limit) v[i] = load_packet(at(i));
#if EPOCH_FLAGS
    Patience patience;
    while (true) {
        bool missing = false;
        unsigned wanted = 0, found = 0;
#pragma unroll
        for (int i = 0; i < Count; i++)
            if (i < limit && stale<Known>(v[i], epoch(i))) missing = true, wanted = epoch(i), found = v[i].w;
        if (!missing || patience.over(FOR_PACKET, wanted, found)) break;
        back_off();
#pragma unroll
        for (int i = 0; i < Count; i++)
            if (i < limit && stale<Known>(v[i], epoch(i))) v[i] = load_packet(at(i));
    }
#endif
}

// --- counters -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void await_count(const unsigned *counter, unsigned wanted) {
    unsigned value;
    Patience patience;
    while (true) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
        if ((int)(value - wanted) >= 0 || patience.over(FOR_COUNTER, wanted, value)) return;
        back_off();
    }
}

__device__ __forceinline__ void count_up(unsigned *counter) {
    asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// --- the pipeline --------------------------------------------------------------------------------------------------

// A tile's number, stage, and whether the stage is used for an odd time.
struct Turn {
    unsigned tile = 0, stage = 0, odd = 0;
    __device__ __forceinline__ void advance() {
        tile++;
        if (++stage == DEPTH) stage = 0, odd ^= 1;
    }
    __device__ __forceinline__ void skip(unsigned tiles) {
        tile += tiles, stage += tiles;
        odd ^= stage / DEPTH & 1, stage %= DEPTH;
    }
};

#if BULK

struct Pipeline {
    alignas(8) unsigned long long full[DEPTH], empty[DEPTH];
};

__device__ __forceinline__ void pipeline_init(Pipeline &pipeline, int producers = 1) {
    for (int i = 0; i < DEPTH; i++) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&pipeline.full[i])), "r"(producers));
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&pipeline.empty[i])), "r"(CONSUMERS));
    }
    // What the bulk copies count down is seen by the async proxy too.
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}

// `what` and `tile` are for a report.
__device__ __forceinline__ void await_phase(unsigned long long *barrier, unsigned parity, Waiting what, unsigned tile) {
#if SPIN_LIMIT
    Patience patience;
    unsigned done;
    do {
        asm volatile("{\n\t.reg .pred done;\n\t"
                     "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, done;\n\t}"
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    } while (!done && !patience.over(what, tile, parity));
#else
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "AGAIN_%=:\n\t"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n\t"
        "@!done bra AGAIN_%=;\n\t}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
#endif
}

__device__ __forceinline__ void pipeline_wait(Pipeline &pipeline, const Turn &now, Waiting what = FOR_TILE) {
    await_phase(&pipeline.full[now.stage], now.odd, what, now.tile);
}

__device__ __forceinline__ void arrive(unsigned long long *barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// By one lane of a warp that has awaited the tile and read its part of it. Without the wait, a warp with no part in a
// tile could come here while another one still reads what the stage held before, and would be counted in its stead.
__device__ __forceinline__ void pipeline_release(Pipeline &pipeline, const Turn &now, int) {
    arrive(&pipeline.empty[now.stage]);
}

// Copies `bytes`, a multiple of 16, to `offset` in a stage.
struct Copy {
    unsigned stage, full;
    unsigned long long policy;
    __device__ __forceinline__ void operator()(unsigned offset, const unsigned char *from, unsigned bytes) const {
#if EVICT_FIRST
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1], %2, [%3], %4;"
                     ::"r"(stage + offset), "l"(from), "r"(bytes), "r"(full), "l"(policy) : "memory");
#else
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(stage + offset), "l"(from), "r"(bytes), "r"(full) : "memory");
#endif
    }
};

// The producer warp. `put` fills the next stage with what piece(i, copy) calls its Copy for, of all i < count, at most
// 32; `bytes` in all.
struct Producer {
    // A parity tells a phase from its neighbours only: the tile waited for must still be in its stage.
    static constexpr unsigned FLIGHT = IN_FLIGHT < DEPTH ? IN_FLIGHT : DEPTH;
    Turn now, landed;  // the next tile; the one that must have come before it may be asked for
    unsigned long long policy = 0;
    __device__ __forceinline__ Producer() {
#if EVICT_FIRST
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    }
    // By lane 0: the next stage is free and `bytes` are announced; false where a wait was given up.
    __device__ __forceinline__ bool open(Pipeline &pipeline, unsigned bytes) {
        const unsigned full = shared_address(&pipeline.full[now.stage]);
        if (now.tile >= DEPTH) await_phase(&pipeline.empty[now.stage], now.odd ^ 1, FOR_STAGE, now.tile);
        if (now.tile >= FLIGHT) {
            pipeline_wait(pipeline, landed, FOR_LANDING);
            landed.advance();
        }
#if SPIN_LIMIT
        if (*(volatile unsigned *)&watch().over) return false;  // the stage may not be free
#endif
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
        return true;
    }
    __device__ __forceinline__ Copy copy(Pipeline &pipeline, unsigned char *buffer) const {
        const unsigned full = shared_address(&pipeline.full[now.stage]);
        return {shared_address(buffer + (size_t)now.stage * STAGE_BYTES), full, policy};
    }
    // Each lane finds its piece by itself: one after the other would take as long as the bytes.
    template <class Piece>
    __device__ __forceinline__ void put(Pipeline &pipeline, unsigned char *buffer, unsigned bytes, int count, int lane,
                                        Piece piece) {
        const bool open = lane != 0 || this->open(pipeline, bytes);
        __syncwarp();
        if (__all_sync(0xffffffffu, open) && lane < count) piece(lane, copy(pipeline, buffer));
        now.advance();
    }
    __device__ __forceinline__ void finish(Pipeline &, int) {}
};

#else

struct Pipeline {
    volatile unsigned filled;               // tiles that are there
    volatile unsigned released[CONSUMERS];  // tiles that a warp is done with
};

__device__ __forceinline__ void pipeline_init(Pipeline &pipeline) {
    pipeline.filled = 0;
    for (int i = 0; i < CONSUMERS; i++) pipeline.released[i] = 0;
}

__device__ __forceinline__ void pipeline_wait(Pipeline &pipeline, const Turn &now) {
    Patience patience;
    while (pipeline.filled <= now.tile)
        if (patience.over(FOR_TILE, now.tile, pipeline.filled)) break;
    __threadfence_block();
    __syncwarp();
}

__device__ __forceinline__ void pipeline_release(Pipeline &pipeline, const Turn &now, int warp) {
    __threadfence_block();
    pipeline.released[warp] = now.tile + 1;
}

// Copies `bytes`, a multiple of 16, to `offset` in a stage.
struct Copy {
    unsigned stage;
    int lane;
    __device__ __forceinline__ void operator()(unsigned offset, const unsigned char *from, unsigned bytes) const {
        const unsigned to = stage + offset;
#pragma unroll 4
        for (unsigned at = lane * 16; at < bytes; at += 512)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(from + at) : "memory");
    }
};

struct Producer {
    Turn now;
    unsigned told = 0;

    // Tell the readers of all tiles but the last `Kept`.
    template <int Kept> __device__ __forceinline__ void tell(Pipeline &pipeline, int lane) {
        asm volatile("cp.async.wait_group %0;" ::"n"(Kept) : "memory");
        __threadfence_block();
        __syncwarp();
        if (now.tile > told + Kept) {
            told = now.tile - Kept;
            if (lane == 0) pipeline.filled = told;
        }
    }
    __device__ __forceinline__ bool taken(Pipeline &pipeline, int lane) const {
        bool busy = false;
        for (int w = lane; w < CONSUMERS; w += 32) busy |= pipeline.released[w] + DEPTH <= now.tile;
        return __any_sync(0xffffffffu, busy);
    }
    template <class Piece>
    __device__ __forceinline__ void put(Pipeline &pipeline, unsigned char *buffer, unsigned, int count, int lane,
                                        Piece piece) {
        if (taken(pipeline, lane)) {
            tell<0>(pipeline, lane);  // what is on its way must not wait for the stage
            Patience patience;
            while (taken(pipeline, lane))
                if (__any_sync(0xffffffffu, patience.over(FOR_STAGE, now.tile, 0))) break;
        }
        __threadfence_block();
        const Copy copy = {(unsigned)__cvta_generic_to_shared(buffer + (size_t)now.stage * STAGE_BYTES), lane};
        for (int i = 0; i < count; i++) piece(i, copy);
        asm volatile("cp.async.commit_group;" ::: "memory");
        now.advance();
        tell<IN_FLIGHT - 1>(pipeline, lane);
    }
    __device__ __forceinline__ void finish(Pipeline &pipeline, int lane) { tell<0>(pipeline, lane); }
};

#endif
