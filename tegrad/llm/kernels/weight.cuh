// One weight of a packed matrix (tegrad/llm/packing.py), by its index in the flattened matrix: for embeddings, of which
// a step reads one row.
#pragma once
#include "blocks.cuh"

template <class F> __device__ __forceinline__ float weight_at(const unsigned char *matrix, long long index);

// A weight's place: its segment, the lane that owns it, the set of 16 and the byte in it.
struct Place {
    const unsigned char *segment;
    int lane, set, byte;
    __device__ __forceinline__ Place(const unsigned char *matrix, long long index, int bytes)
        : segment(matrix + index / SEGMENT * bytes), lane(index % SEGMENT / 64), set(index % 64 / 16),
          byte(index % 16) {}
    // The byte of plane `p` that belongs to the weight.
    __device__ __forceinline__ int plane(int p) const { return segment[512 * p + 16 * lane + byte]; }
    __device__ __forceinline__ int nibble() const { return plane(set / 2) >> (4 * (set % 2)) & 15; }
    // The half at `at`, of one for each 32 weights.
    __device__ __forceinline__ float scale32(int at) const {
        return half_to_float(((const unsigned short *)(segment + at))[2 * lane + set / 2]);
    }
    // d * scale * q - dmin * minimum, with the block's 16 bytes at `at`.
    __device__ __forceinline__ float affine(int at, int q) const {
        const unsigned char *head = segment + at + 16 * (lane / 4), *six = head + 4;
        const int sub = 2 * (lane % 4) + set / 2, low = sub % 4;
        int scale = six[low], minimum = six[4 + low];
        if (sub < 4) {
            scale &= 63, minimum &= 63;
        } else {
            scale = (six[8 + low] & 15) | scale >> 6 << 4, minimum = six[8 + low] >> 4 | minimum >> 6 << 4;
        }
        const unsigned short *d = (const unsigned short *)head;
        return half_to_float(d[0]) * (float)scale * (float)q - half_to_float(d[1]) * (float)minimum;
    }
};

template <> __device__ __forceinline__ float weight_at<Q6_K>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q6_K::BYTES);
    const int q = at.set < 3 ? at.plane(at.set) & 63 : at.plane(0) >> 6 | at.plane(1) >> 6 << 2 | at.plane(2) >> 6 << 4;
    const int scale = ((const signed char *)at.segment)[1536 + 4 * at.lane + at.set];
    const float d = half_to_float(((const unsigned short *)(at.segment + 1664))[at.lane / 4]);
    return d * (float)scale * (float)(q - 32);
}

template <> __device__ __forceinline__ float weight_at<Q4_K>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q4_K::BYTES);
    return at.affine(1024, at.nibble());
}

template <> __device__ __forceinline__ float weight_at<Q5_K>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q5_K::BYTES);
    const int fifth = at.segment[1024 + 8 * at.lane + 2 * at.set + at.byte / 8] >> (at.byte % 8) & 1;
    return at.affine(1280, at.nibble() | fifth << 4);
}

template <> __device__ __forceinline__ float weight_at<Q8_0>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q8_0::BYTES);
    return at.scale32(2048) * (float)(signed char)at.plane(at.set);
}

template <> __device__ __forceinline__ float weight_at<Q4_0>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q4_0::BYTES);
    return at.scale32(1024) * (float)(at.nibble() - 8);
}

template <> __device__ __forceinline__ float weight_at<F16>(const unsigned char *matrix, long long index) {
    return half_to_float(((const unsigned short *)matrix)[index]);
}

template <> __device__ __forceinline__ float weight_at<BF16>(const unsigned char *matrix, long long index) {
    return __uint_as_float((unsigned)((const unsigned short *)matrix)[index] << 16);
}

template <> __device__ __forceinline__ float weight_at<F32>(const unsigned char *matrix, long long index) {
    return ((const float *)matrix)[index];
}
