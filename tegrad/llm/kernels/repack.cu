// Turns segments of a matrix from the file's order into ours, in place (as tegrad/llm/packing.py does in numpy).
//
// FORMAT is the block format. A warp takes a segment into shared memory, 16 bytes a lane and load; each lane then
// gathers the 64 weights that it owns from there and stores its 16 bytes of every plane, and its share of the scales.
// Launch with WARPS warps a block and a warp for each segment.
#include "formats.cuh"

constexpr int SEGMENT = 2048;

// Four bytes from shared memory at an even address.
__device__ __forceinline__ unsigned load32(const unsigned char *at) {
    const unsigned short *half = (const unsigned short *)at;
    return half[0] | (unsigned)half[1] << 16;
}

// A word of a plane of nibbles: the low nibbles of `low` and those of `high` above them.
__device__ __forceinline__ unsigned nibbles(unsigned low, unsigned high) {
    return (low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4;
}

// A format is a segment's size, its number of planes, and two functions of a segment in the file's order in shared
// memory: word w (weights 4w to 4w + 3 of a set) of plane p of a lane, and what the lane stores after the planes.

struct Q8_0 {  // blocks of 32: d, 32 bytes
    static constexpr int BYTES = BYTES_Q8_0, PLANES = PLANES_Q8_0;
    static __device__ unsigned plane(const unsigned char *raw, int lane, int p, int w) {
        return load32(raw + 34 * (2 * lane + p / 2) + 2 + 16 * (p % 2) + 4 * w);
    }
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        const unsigned first = *(const unsigned short *)(raw + 34 * (2 * lane));
        *(unsigned *)(out + 4 * lane) = first | (unsigned)*(const unsigned short *)(raw + 34 * (2 * lane + 1)) << 16;
    }
};

struct Q4_0 {  // blocks of 32: d, 16 bytes whose low nibbles are the first 16 weights, which is what a plane holds
    static constexpr int BYTES = BYTES_Q4_0, PLANES = PLANES_Q4_0;
    static __device__ unsigned plane(const unsigned char *raw, int lane, int p, int w) {
        return load32(raw + 18 * (2 * lane + p) + 2 + 4 * w);
    }
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        const unsigned first = *(const unsigned short *)(raw + 18 * (2 * lane));
        *(unsigned *)(out + 4 * lane) = first | (unsigned)*(const unsigned short *)(raw + 18 * (2 * lane + 1)) << 16;
    }
};

struct Q4_1 {  // blocks of 32: d, m, 16 bytes as in Q4_0
    static constexpr int BYTES = BYTES_Q4_1, PLANES = PLANES_Q4_1;
    static __device__ unsigned plane(const unsigned char *raw, int lane, int p, int w) {
        return *(const unsigned *)(raw + 20 * (2 * lane + p) + 4 + 4 * w);
    }
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        const unsigned char *pair = raw + 20 * (2 * lane);
        *(uint2 *)(out + 8 * lane) = make_uint2(*(const unsigned *)pair, *(const unsigned *)(pair + 20));
    }
};

// 32 fifth bits in the order of the weights: of each four, one to each byte.
__device__ __forceinline__ unsigned across(unsigned bits) {
    unsigned made = 0;
#pragma unroll
    for (int w = 0; w < 8; w++) made |= ((bits >> (4 * w) & 15) * 0x00204081 & 0x01010101) << w;
    return made;
}

struct Q5_0 {  // blocks of 32: d, 4 bytes of fifth bits, 16 bytes as in Q4_0
    static constexpr int BYTES = BYTES_Q5_0, PLANES = PLANES_Q5_0;
    static __device__ unsigned plane(const unsigned char *raw, int lane, int p, int w) {
        return load32(raw + 22 * (2 * lane + p) + 6 + 4 * w);
    }
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        const unsigned char *first = raw + 22 * (2 * lane), *second = first + 22;
        *(uint2 *)(out + 8 * lane) = make_uint2(across(load32(first + 2)), across(load32(second + 2)));
        *(unsigned *)(out + 256 + 4 * lane) =
            *(const unsigned short *)first | (unsigned)*(const unsigned short *)second << 16;
    }
};

struct Q5_1 {  // blocks of 32: d, m, and as Q5_0
    static constexpr int BYTES = BYTES_Q5_1, PLANES = PLANES_Q5_1;
    static __device__ unsigned plane(const unsigned char *raw, int lane, int p, int w) {
        return *(const unsigned *)(raw + 24 * (2 * lane + p) + 8 + 4 * w);
    }
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        const unsigned *first = (const unsigned *)(raw + 24 * (2 * lane)), *second = first + 6;
        *(uint2 *)(out + 8 * lane) = make_uint2(across(first[1]), across(second[1]));
        *(uint2 *)(out + 256 + 8 * lane) = make_uint2(first[0], second[0]);
    }
};

// Low nibbles of four bytes side by side in 16 bits.
__device__ __forceinline__ unsigned beside(unsigned bytes) {
    const unsigned pairs = (bytes & 0x0f0f0f0f) * 0x0011 >> 4;  // in bytes 0 and 2, two each
    return (pairs & 0xff) | (pairs >> 8 & 0xff00);
}

// A word of codes: those of `low` beside each other, and above them those of `high`.
__device__ __forceinline__ unsigned codes(unsigned low, unsigned high) { return beside(low) | beside(high) << 16; }

struct IQ4_NL {  // blocks of 32 as Q4_0's
    static constexpr int BYTES = BYTES_IQ4_NL, PLANES = PLANES_IQ4_NL;
    static __device__ unsigned plane(const unsigned char *raw, int lane, int p, int w) {
        const unsigned nibbles = load32(raw + 18 * (2 * lane + p) + 2 + 4 * w);
        return codes(nibbles, nibbles >> 4);
    }
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) { Q4_0::rest(raw, lane, out); }
};

struct IQ4_XS {  // blocks of 256: 8 bytes of scales, 128 of codes, of each 16 for 32 weights as Q4_0's
    static constexpr int BYTES = BYTES_IQ4_XS, PLANES = PLANES_IQ4_XS;
    static __device__ unsigned plane(const unsigned char *raw, int lane, int p, int w) {
        const unsigned nibbles =
            *(const unsigned *)(raw + 136 * (lane / 4) + 8 + 16 * (2 * (lane % 4) + p) + 4 * w);
        return codes(nibbles, nibbles >> 4);
    }
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        if (lane % 4 < 2)
            *(unsigned *)(out + 8 * (lane / 4) + 4 * (lane % 4)) =
                *(const unsigned *)(raw + 136 * (lane / 4) + 4 * (lane % 4));
    }
};

struct MXFP4 {  // blocks of 32: an exponent, 16 bytes of codes as Q4_0's, at any address
    static constexpr int BYTES = BYTES_MXFP4, PLANES = PLANES_MXFP4;
    static __device__ unsigned plane(const unsigned char *raw, int lane, int p, int w) {
        // Volatile: a load each, not pairs of bytes, which the PTX engine's recorded answers of silicon do not cover.
        const volatile unsigned char *at = raw + 17 * (2 * lane + p) + 1 + 4 * w;
        const unsigned nibbles = at[0] | at[1] << 8 | at[2] << 16 | (unsigned)at[3] << 24;
        return codes(nibbles, nibbles >> 4);
    }
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        *(unsigned short *)(out + 2 * lane) = (unsigned short)(raw[34 * lane] | raw[34 * lane + 17] << 8);
    }
};

// Blocks of 256 with 16 bytes of scales in front; weight 64j + 32n + l is nibble n of byte 32j + l. A lane has one j.
template <int BLOCK, int NIBBLES> struct Affine {
    static constexpr int BYTES = 8 * BLOCK, PLANES = 2;
    static __device__ unsigned plane(const unsigned char *raw, int lane, int p, int w) {
        const unsigned char *at = raw + BLOCK * (lane / 4) + NIBBLES + 32 * (lane % 4) + 4 * w;
        const unsigned first = *(const unsigned *)at, second = *(const unsigned *)(at + 16);
        return nibbles(first >> (4 * p), second >> (4 * p));
    }
    static __device__ void head(const unsigned char *raw, int lane, unsigned char *out) {
        *(unsigned *)(out + 4 * lane) = *(const unsigned *)(raw + BLOCK * (lane / 4) + 4 * (lane % 4));
    }
};

struct Q4_K : Affine<144, 16> {
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) { head(raw, lane, out); }
};

struct Q5_K : Affine<176, 48> {  // 32 bytes of fifth bits after the scales: weight 32s + l has bit s of byte l
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        const unsigned char *fifth = raw + 176 * (lane / 4) + 16;
        unsigned bits[2] = {0, 0};
#pragma unroll
        for (int w = 0; w < 8; w++) {
            const unsigned bytes = *(const unsigned *)(fifth + 4 * w) >> (2 * (lane % 4));
            bits[0] |= (bytes & 0x01010101) << w;
            bits[1] |= (bytes >> 1 & 0x01010101) << w;
        }
        *(uint2 *)(out + 8 * lane) = make_uint2(bits[0], bits[1]);
        head(raw, lane, out + 256);
    }
};

// Pairs of bits: of each 128 weights 32 bytes, weight 32j + l having bits 2j and 2j + 1 of byte l. Of a lane's 64, set
// s has j = 2 * (lane % 2) + s / 2, and bytes from 16 * (s % 2) on.
__device__ __forceinline__ unsigned pairs(const unsigned char *bytes, int lane, int w) {
    unsigned made = 0;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const unsigned four = load32(bytes + 32 * (lane / 2 % 2) + 16 * (s % 2) + 4 * w);
        made |= (four >> (4 * (lane % 2) + 2 * (s / 2)) & 0x03030303) << (2 * s);
    }
    return made;
}

struct Q2_K {  // blocks of 256: 16 bytes of scales, 64 of pairs, d, dmin
    static constexpr int BYTES = BYTES_Q2_K, PLANES = PLANES_Q2_K;
    static __device__ unsigned plane(const unsigned char *raw, int lane, int, int w) {
        return pairs(raw + 84 * (lane / 4) + 16, lane, w);
    }
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        const unsigned char *block = raw + 84 * (lane / 4);
        *(unsigned *)(out + 4 * lane) = *(const unsigned *)(block + 4 * (lane % 4));
        if (lane % 4 == 0) *(unsigned *)(out + 128 + lane) = *(const unsigned *)(block + 80);
    }
};

struct Q3_K {  // blocks of 256: 32 bytes of third bits (weight 32s + l has bit s of byte l), 64 of pairs, scales, d
    static constexpr int BYTES = BYTES_Q3_K, PLANES = PLANES_Q3_K;
    static __device__ unsigned plane(const unsigned char *raw, int lane, int, int w) {
        return pairs(raw + 110 * (lane / 4) + 32, lane, w);
    }
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        const unsigned char *block = raw + 110 * (lane / 4);
        unsigned bits[2] = {0, 0};
#pragma unroll
        for (int w = 0; w < 4; w++)
#pragma unroll
            for (int s = 0; s < 4; s++) {
                const unsigned four = load32(block + 16 * (s % 2) + 4 * w) >> (2 * (lane % 4) + s / 2);
                bits[w / 2] |= (four & 0x01010101) << (2 - 2 * (w % 2) + s % 2 + 4 * (s / 2));
            }
        *(uint2 *)(out + 8 * lane) = make_uint2(bits[0], bits[1]);
        const int at = lane % 4;
        if (at == 3) *(unsigned short *)(out + 352 + lane / 4 * 2) = *(const unsigned short *)(block + 108);
        else
            *(unsigned *)(out + (at == 2 ? 320 + lane / 4 * 4 : 256 + lane / 4 * 8 + 4 * at)) =
                load32(block + 96 + 4 * at);
    }
};

struct Q6_K {  // blocks of 256: of each 128 weights 64 bytes of nibbles; of each, 32 bytes of bit pairs; 16 scales; d
    static constexpr int BYTES = BYTES_Q6_K, PLANES = PLANES_Q6_K;
    static __device__ unsigned value(const unsigned char *raw, int lane, int set, int w) {
        const unsigned char *block = raw + 210 * (lane / 4);
        const int half = lane / 2 % 2, nibble = lane % 2;
        const unsigned low = load32(block + 64 * half + 16 * set + 4 * w) >> (4 * nibble);
        const unsigned high = load32(block + 128 + 32 * half + 16 * (set % 2) + 4 * w) >> (4 * nibble + 2 * (set / 2));
        return (low & 0x0f0f0f0f) | (high & 0x03030303) << 4;
    }
    static __device__ unsigned plane(const unsigned char *raw, int lane, int p, int w) {
        return value(raw, lane, p, w) | (value(raw, lane, 3, w) >> (2 * p) & 0x03030303) << 6;
    }
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        const unsigned char *block = raw + 210 * (lane / 4) + 192;
        *(unsigned *)(out + 4 * lane) = load32(block + 4 * (lane % 4));
        if (lane % 4 == 0) *(unsigned short *)(out + 128 + lane / 2) = *(const unsigned short *)(block + 16);
    }
};

// Formats with a code book: blocks of BLOCK bytes, of which a lane takes its share of one field after the other, as it
// is.
template <int BLOCK> struct Fields {
    static constexpr int BYTES = 8 * BLOCK, PLANES = 0;
    static __device__ unsigned plane(const unsigned char *, int, int, int) { return 0; }
    // `COUNT` bytes of each lane's from `at` of its block on; where those of the next field go.
    template <int COUNT>
    static __device__ unsigned char *field(const unsigned char *raw, int lane, int at, unsigned char *out) {
        const unsigned char *from = raw + BLOCK * (lane / 4) + at + COUNT * (lane % 4);
        if constexpr (COUNT == 1) out[lane] = *from;
        else
            for (int i = 0; i < COUNT; i += 2)
                *(unsigned short *)(out + COUNT * lane + i) = *(const unsigned short *)(from + i);
        return out + 32 * COUNT;
    }
    static __device__ void d(const unsigned char *raw, int lane, unsigned char *out) {
        if (lane < 8) *(unsigned short *)(out + 2 * lane) = *(const unsigned short *)(raw + BLOCK * lane);
    }
};

struct IQ2_XXS : Fields<66> {  // d, places and signs and scales
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        d(raw, lane, field<16>(raw, lane, 2, out));
    }
};

struct IQ2_XS : Fields<74> {  // d, places and signs, scales
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        d(raw, lane, field<2>(raw, lane, 66, field<16>(raw, lane, 2, out)));
    }
};

struct IQ2_S : Fields<82> {  // d, low bits of places, signs, high bits, scales
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        out = field<8>(raw, lane, 34, field<8>(raw, lane, 2, out));
        d(raw, lane, field<2>(raw, lane, 74, field<2>(raw, lane, 66, out)));
    }
};

struct IQ3_XXS : Fields<98> {  // d, places, signs and scales
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        d(raw, lane, field<8>(raw, lane, 66, field<16>(raw, lane, 2, out)));
    }
};

struct IQ3_S : Fields<110> {  // d, low bits of places, high bits, signs, scales
    static __device__ void rest(const unsigned char *raw, int lane, unsigned char *out) {
        out = field<8>(raw, lane, 74, field<16>(raw, lane, 2, out));
        d(raw, lane, field<1>(raw, lane, 106, field<2>(raw, lane, 66, out)));
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) repack(unsigned char *data, int segments) {
    __shared__ __align__(16) unsigned char shared[WARPS][FORMAT::BYTES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int segment = blockIdx.x * WARPS + warp;
    if (segment >= segments) return;
    unsigned char *const own = data + (size_t)segment * FORMAT::BYTES, *const raw = shared[warp];
    for (int at = 16 * lane; at < FORMAT::BYTES; at += 512) *(uint4 *)(raw + at) = *(const uint4 *)(own + at);
    __syncwarp();
#pragma unroll
    for (int p = 0; p < FORMAT::PLANES; p++) {
        unsigned words[4];
#pragma unroll
        for (int w = 0; w < 4; w++) words[w] = FORMAT::plane(raw, lane, p, w);
        *(uint4 *)(own + 512 * p + 16 * lane) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    FORMAT::rest(raw, lane, own + 512 * FORMAT::PLANES);
}
