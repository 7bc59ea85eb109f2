// How the epilogue warps of the step in one launch (persistent.cu) hand rows on, as packets of rounded values or of
// floats. After staging.cuh, which has the other side.

// Where a lane's packet of a row goes: as floats the first copy of a third of eight rows, else one of eight copies.
__device__ __forceinline__ unsigned char *packet_of(unsigned char *target, int row, bool floats, int lane) {
    const int unit = row >> 3, at = lane % 8;
    return floats ? target + unit * 48 + 16 * (at < 2 ? at : 2) : target + (size_t)at * REPLICA_BYTES + unit * 16;
}

// What lies at a shared_address. In the window of all memory the compiler would look for it each time anew.
__device__ __forceinline__ float shared_float(unsigned at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ float4 shared_float4(unsigned at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ void put_shared(unsigned at, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

// Hands rows on, one in each lane, their number % 16 = lane % 16; all lanes take part. `to` is packet_of the row;
// `square` is summed up for the reader.
__device__ __forceinline__ void hand_on(unsigned char *to, bool inside, float value, float square, bool floats,
                                        int replicas, unsigned epoch, int lane) {
    const int at = lane % 8;
    if (!inside) value = 0, square = 0;
    if (floats) {
#pragma unroll
        for (int step = 4; step; step >>= 1) square += __shfl_xor_sync(EVERY, square, step);
        const int third = at < 2 ? at : 2, from = lane / 8 * 8 + 3 * third;
        const float a = __shfl_sync(EVERY, value, from), b = __shfl_sync(EVERY, value, from + 1);
        const float c = __shfl_sync(EVERY, value, third < 2 ? from + 2 : from);
#pragma unroll
        for (int copy = 0; copy < REPLICAS; copy++)
            if (inside && at < 3 && copy < replicas)
                store_packet(to + (size_t)copy * REPLICA_BYTES, __float_as_uint(a), __float_as_uint(b),
                             __float_as_uint(third == 2 ? square : c), epoch);
        return;
    }
    float largest = fmaxf(fabsf(value), __shfl_xor_sync(EVERY, fabsf(value), 8));
#pragma unroll
    for (int step = 4; step; step >>= 1) {  // side by side: either alone would wait for each exchange
        const float other = __shfl_xor_sync(EVERY, largest, step), more = __shfl_xor_sync(EVERY, square, step);
        largest = fmaxf(largest, other), square += more;
    }
    const unsigned code = largest < 1e-30f ? 0 : (__float_as_uint(largest * (1.0f / 127.0f)) + 0x2000) >> 14;
    const float inverse = largest < 1e-30f ? 0 : reciprocal(__uint_as_float(code << 14));
    // Added to MAGIC, a float's low bits are the nearest integer.
    const float nearest = value * inverse + MAGIC;
    unsigned bytes = (__float_as_uint(nearest) & 255u) << (8 * (lane & 3));
    bytes |= __shfl_xor_sync(EVERY, bytes, 1);
    bytes |= __shfl_xor_sync(EVERY, bytes, 2);
    const unsigned upper = __shfl_xor_sync(EVERY, bytes, 4);  // in the upper four of eight lanes the lower ones
    const unsigned rounded = (__float_as_uint(square) + 0x8000) >> 16;
    if constexpr (SPLIT_SETS != 0) {
        // Of the rest, half a step at most to either side, the nearest of -1.5, -0.5, 0.5 and 1.5 quarters of a step.
        const float rest = fmaf(value, inverse, MAGIC - nearest);
        const unsigned quarter = __float_as_uint(fmaf(rest, 3.99f, 1.5f) + MAGIC);
        const unsigned low = __ballot_sync(EVERY, quarter & 1), high = __ballot_sync(EVERY, quarter & 2);
        const int shift = lane & 24;
        epoch = (epoch & EPOCH_KNOWN) | (low >> shift & 255) << 16 | (high >> shift) << 24;
    }
    static_assert(REPLICAS <= 8, "a packet has eight lanes, each for a copy");
    if (inside && at < REPLICAS)
        store_packet(to, lane & 4 ? upper : bytes, lane & 4 ? bytes : upper, code << 15 | rounded, epoch);
}
