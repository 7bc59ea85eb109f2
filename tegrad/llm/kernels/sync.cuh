// How the CTAs of one launch, and the warps of one CTA, wait for each other.
//
// Between CTAs: **packets** of 16 bytes, 12 of data and the epoch, which the reader polls until the epoch is the awaited
// one. A packet is one 128-bit store, seen whole, so that it needs no fence. With HANDOVER 0 the same packets are written
// without being polled, and a counter for each stage, behind a fence, says that all of them are there.
//
// Within a CTA: a **ring** of SLOTS tiles of weights that one warp fills and CONSUMERS warps read. On sm_90 its tiles come
// by bulk copies and mbarriers, else (BULK 0) by 16-byte cp.async and words in shared memory.
//
// Macros: HANDOVER (1 packets, 0 counters), BULK, SLOTS, SLOT_BYTES, IN_FLIGHT (tiles on their way at most), CONSUMERS,
// BACKOFF (ns between polls), EVICT_FIRST (weights leave L2 first; sm_90).
#pragma once
#include "barrier.cuh"

#ifndef HANDOVER
#define HANDOVER 1
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

__device__ __forceinline__ void back_off() {
    if constexpr (BACKOFF > 0) __nanosleep(BACKOFF);
}

// --- packets --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 load_packet(const unsigned char *from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ void store_packet(unsigned char *to, unsigned x, unsigned y, unsigned z, unsigned epoch) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(epoch) : "memory");
}

// Loads packets `at(i)` for all i < Count below `limit`; returns when each is of epoch `epoch(i)`.
template <int Count, class At, class Epoch>
__device__ __forceinline__ void load_packets(uint4 (&v)[Count], int limit, At at, Epoch epoch) {
#pragma unroll
    for (int i = 0; i < Count; i++)
        if (i < limit) v[i] = load_packet(at(i));
#if HANDOVER
    while (true) {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < Count; i++) missing |= i < limit && v[i].w != epoch(i);
        if (!missing) break;
        back_off();
#pragma unroll
        for (int i = 0; i < Count; i++)
            if (i < limit && v[i].w != epoch(i)) v[i] = load_packet(at(i));
    }
#endif
}

// --- counters -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void await_count(const unsigned *counter, unsigned wanted) {
    unsigned value;
    while (true) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
        if ((int)(value - wanted) >= 0) return;
        back_off();
    }
}

__device__ __forceinline__ void count_up(unsigned *counter) {
    asm volatile("fence.acq_rel.gpu;\n\tred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// --- the ring -------------------------------------------------------------------------------------------------------

// A tile's number, slot, and whether the slot is used for an odd time.
struct Turn {
    unsigned tile = 0, slot = 0, odd = 0;
    __device__ __forceinline__ void advance() {
        tile++;
        if (++slot == SLOTS) slot = 0, odd ^= 1;
    }
};

#if BULK

struct Ring {
    alignas(8) unsigned long long full[SLOTS], empty[SLOTS];
};

__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void ring_init(Ring &ring) {
    for (int i = 0; i < SLOTS; i++) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&ring.full[i])), "r"(1));
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&ring.empty[i])), "r"(CONSUMERS));
    }
    // What the bulk copies count down is seen by the async proxy too.
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void await_phase(unsigned long long *barrier, unsigned parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "AGAIN_%=:\n\t"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n\t"
        "@!done bra AGAIN_%=;\n\t}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void ring_await(Ring &ring, const Turn &now) { await_phase(&ring.full[now.slot], now.odd); }

// By one lane of a warp that has awaited the tile and read its part of it. Without the wait, a warp with no part in a tile
// could come here while another one still reads what the slot held before, and would be counted in its stead.
__device__ __forceinline__ void ring_release(Ring &ring, const Turn &now, int) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&ring.empty[now.slot])) : "memory");
}

// The filling warp. `put` copies `bytes`, a multiple of 16, to the next slot.
struct Filler {
    // A parity tells a phase from its neighbours only: the tile waited for must still be in its slot.
    static constexpr unsigned FLIGHT = IN_FLIGHT < SLOTS ? IN_FLIGHT : SLOTS;
    Turn now, landed;  // the next tile; the one that must have come before it may be asked for
    unsigned long long policy = 0;
    __device__ __forceinline__ Filler() {
#if EVICT_FIRST
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    }
    __device__ __forceinline__ void put(Ring &ring, unsigned char *slots, const unsigned char *from, unsigned bytes, int lane) {
        if (lane == 0) {
            const unsigned full = shared_address(&ring.full[now.slot]);
            if (now.tile >= SLOTS) await_phase(&ring.empty[now.slot], now.odd ^ 1);
            if (now.tile >= FLIGHT) {
                ring_await(ring, landed);
                landed.advance();
            }
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
            const unsigned to = shared_address(slots + (size_t)now.slot * SLOT_BYTES);
#if EVICT_FIRST
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                         ::"r"(to), "l"(from), "r"(bytes), "r"(full), "l"(policy) : "memory");
#else
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         ::"r"(to), "l"(from), "r"(bytes), "r"(full) : "memory");
#endif
        }
        now.advance();
    }
    __device__ __forceinline__ void finish(Ring &, int) {}
};

#else

struct Ring {
    volatile unsigned filled;               // tiles that are there
    volatile unsigned released[CONSUMERS];  // tiles that a warp is done with
};

__device__ __forceinline__ void ring_init(Ring &ring) {
    ring.filled = 0;
    for (int i = 0; i < CONSUMERS; i++) ring.released[i] = 0;
}

__device__ __forceinline__ void ring_await(Ring &ring, const Turn &now) {
    while (ring.filled <= now.tile) {}
    __threadfence_block();
    __syncwarp();
}

__device__ __forceinline__ void ring_release(Ring &ring, const Turn &now, int warp) {
    __threadfence_block();
    ring.released[warp] = now.tile + 1;
}

struct Filler {
    Turn now;
    unsigned told = 0;

    // Tell the readers of all tiles but the last `Kept`.
    template <int Kept> __device__ __forceinline__ void tell(Ring &ring, int lane) {
        asm volatile("cp.async.wait_group %0;" ::"n"(Kept) : "memory");
        __threadfence_block();
        __syncwarp();
        if (now.tile > told + Kept) {
            told = now.tile - Kept;
            if (lane == 0) ring.filled = told;
        }
    }
    __device__ __forceinline__ bool taken(Ring &ring, int lane) const {
        bool busy = false;
        for (int w = lane; w < CONSUMERS; w += 32) busy |= ring.released[w] + SLOTS <= now.tile;
        return __any_sync(0xffffffffu, busy);
    }
    __device__ __forceinline__ void put(Ring &ring, unsigned char *slots, const unsigned char *from, unsigned bytes, int lane) {
        if (taken(ring, lane)) {
            tell<0>(ring, lane);  // what is on its way must not wait for the slot
            while (taken(ring, lane)) {}
        }
        __threadfence_block();
        const unsigned to = (unsigned)__cvta_generic_to_shared(slots + (size_t)now.slot * SLOT_BYTES);
#pragma unroll 4
        for (unsigned at = lane * 16; at < bytes; at += 512)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(from + at) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
        now.advance();
        tell<IN_FLIGHT - 1>(ring, lane);
    }
    __device__ __forceinline__ void finish(Ring &ring, int lane) { tell<0>(ring, lane); }
};

#endif
