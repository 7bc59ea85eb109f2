// Packed weights: a lane's part of a segment in registers, and its product with activations.
//
// A segment is 2048 consecutive weights of a matrix; lane L of 32 owns weights [64L, 64L + 64) of it, as four sets of
// 16 (tegrad/llm/packing.py tells the layouts and has the same in numpy). A format is a struct:
//
//   F::BYTES                          bytes of a segment, a multiple of 16
//   F::Segment w; w.load(source, lane)     every load of the lane's part, 128 bits wide where the data are
//   Input x = load_input(shared, chunk)    the activations that meet it; chunk = column / 64
//   F::dot(w, x, lane) -> float            sum of the lane's 64 weights times activations
//
// Activations are int8 q with one float scale per 16. `stage` copies a vector of them to shared memory as `dot` wants
// it: planes of 512 bytes from which 32 lanes read conflict-free. A set's integer dot product starts at `fold`, which
// holds the format's offset (-32, -8) times the sum of q, plus MAGIC: an integer below 2^22 in magnitude added to the
// bits of 1.5 * 2^23 is that float plus the integer, so the sum becomes a float by one subtraction and no conversion.
//
// Instructions a lane spends on its 64 weights, activations in registers, as written (loads / integer / float):
//   Q6_K  5 / 48 (unpack 32, dp4a 16) / 4 conversions + 14     Q8_0  5 / 16 (dp4a) / 2 conversions + 10
//   Q4_K  3 / 32 (unpack 16, dp4a 16) + 18 header / 6 + 19     Q4_0  3 / 32 / 2 + 10
//   Q4_1  3 / 32 / 4 + 19                                      Q5_0  4 / 70 / 2 + 10
//   Q3_K  5 / 51 (unpack 35, dp4a 16) + 6 scales / 4 + 14      Q2_K  3 / 32 + 12 scales / 8 + 18
//   Q5_1  4 / 70 / 4 + 19                                      IQ4_NL 3 / 88 (dp4a 32) / 2 + 10
//   MXFP4 3 / 88 + 8 / 10                                      IQ4_XS 3 / 88 + 12 / 3 + 10
//   Q5_K  4 / 70 + 18 header / 6 + 19                          F16   8 / 0 / 64 + 64, BF16 8 / 64 / 64, F32 16 / 0 / 64
// Formats with a code book also load a word of it for each four weights (books.cuh).
// The float formats read their activations as float32 from shared memory, 16 loads of 128 bits.
#pragma once
#include "formats.cuh"
#include "books.cuh"

constexpr int SEGMENT = 2048;           // weights
constexpr int INPUT_BYTES = 3072;       // staged activations of a segment: 4 planes of q, one of scales, one of folds
constexpr int MAGIC_BITS = 0x4B400000;  // 1.5 * 2^23
constexpr float MAGIC = 12582912.0f;

// Where a segment is: device memory that is read once and never written meanwhile, or any memory by a plain pointer.
struct Stream {
    const unsigned char *at;
    __device__ uint4 u128(int offset) const {
        uint4 v;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at + offset));
        return v;
    }
    __device__ uint2 u64(int offset) const {
        uint2 v;
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at + offset));
        return v;
    }
    __device__ unsigned u32(int offset) const {
        unsigned v;
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at + offset));
        return v;
    }
    __device__ unsigned short u16(int offset) const {
        unsigned short v;
        asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(at + offset));
        return v;
    }
};

struct Memory {
    const unsigned char *at;
    __device__ uint4 u128(int offset) const { return *(const uint4 *)(at + offset); }
    __device__ uint2 u64(int offset) const { return *(const uint2 *)(at + offset); }
    __device__ unsigned u32(int offset) const { return *(const unsigned *)(at + offset); }
    __device__ unsigned short u16(int offset) const { return *(const unsigned short *)(at + offset); }
};

__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ float low_half(unsigned pair) { return half_to_float((unsigned short)(pair & 0xffff)); }
__device__ __forceinline__ float high_half(unsigned pair) { return half_to_float((unsigned short)(pair >> 16)); }

// Four unsigned bytes times four signed ones, added to `sum`.
__device__ __forceinline__ int dot4(unsigned weights, unsigned q, int sum) {
    int result;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(weights), "r"(q), "r"(sum));
    return result;
}

__device__ __forceinline__ unsigned word(const uint4 &v, int at) {
    return at == 0 ? v.x : at == 1 ? v.y : at == 2 ? v.z : v.w;
}

// a - b by the multiplier: the pipe of logic and shifts is the busiest in a product.
__device__ __forceinline__ unsigned less(unsigned a, unsigned b) {
    unsigned result, minus;
    asm("mov.b32 %0, -1;" : "=r"(minus));  // a constant that is seen would make a subtraction of it
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(b), "r"(minus), "r"(a));
    return result;
}

// Of each bit a's where `which` is set, else b's; written out, NVVM takes it apart for the sake of masks after it.
__device__ __forceinline__ unsigned chosen(unsigned which, unsigned a, unsigned b) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(result) : "r"(which), "r"(a), "r"(b));
    return result;
}

// An integer that was summed onto MAGIC_BITS, as a float.
__device__ __forceinline__ float unfold(int sum) { return __int_as_float(sum) - MAGIC; }

// --- activations ----------------------------------------------------------------------------------------------------

// The 64 activations that meet a lane's weights: four sets of 16, their scales, and what their sums start from.
struct Input {
    uint4 q[4];
    float4 scale;
    uint4 fold;
};

// The staged activations [64 * chunk, 64 * chunk + 64); chunk is the lane in a row of whole segments.
__device__ __forceinline__ Input load_input(const unsigned char *shared, int chunk) {
    const unsigned char *at = shared + (chunk >> 5) * INPUT_BYTES + (chunk & 31) * 16;
    Input x;
#pragma unroll
    for (int set = 0; set < 4; set++) x.q[set] = *(const uint4 *)(at + 512 * set);
    x.scale = *(const float4 *)(at + 2048);
    x.fold = *(const uint4 *)(at + 2560);
    return x;
}

// Where among the staged activations a set of a chunk begins.
__device__ __forceinline__ unsigned input_place(unsigned chunk, unsigned set) {
    return (chunk >> 5) * INPUT_BYTES + (chunk & 31) * 16 + 512 * set;
}

// One set at its place among the staged activations: q as it is, and scale and fold as format F wants them.
template <class F>
__device__ __forceinline__ void stage_set(unsigned char *shared, unsigned place, unsigned set, uint4 q, float s) {
    unsigned char *at = shared + place, *beside = at - 508 * set;
    *(uint4 *)at = q;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) sum = __dp4a((int)word(q, i), 0x01010101, sum);
    *(float *)(beside + 2048) = s * F::factor(set);
    *(unsigned *)(beside + 2560) = F::fold(set, sum, s);
}

// Copies `columns` activations, a multiple of 64, to shared memory (INPUT_BYTES per segment begun). Needs a barrier
// after it.
template <class F>
__device__ __forceinline__ void stage(unsigned char *shared, const signed char *q, const float *s, int columns,
                                      int thread, int threads) {
    for (int at = thread; at < columns / 16; at += threads) {
        const int chunk = (at >> 7) * 32 + (at & 31), set = (at >> 5) & 3;  // lanes differ in their chunk
        const bool whole = columns % SEGMENT == 0 || (at >> 7) < columns / SEGMENT;
        const int c = whole ? chunk : at >> 2, k = whole ? set : at & 3;
        stage_set<F>(shared, input_place(c, k), k, *(const uint4 *)(q + 64 * c + 16 * k), s[4 * c + k]);
    }
}

// --- block formats --------------------------------------------------------------------------------------------------

// Six bits: bytes of three planes hold sets 0..2 in their low bits, set 3 in their top pairs. Its sum is taken times 4.
struct Q6_K {
    static constexpr int BYTES = BYTES_Q6_K;
    static constexpr bool PACKED = true;
    struct Segment {
        uint4 plane[3];
        unsigned scales;
        unsigned short d;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
#pragma unroll
            for (int p = 0; p < 3; p++) plane[p] = from.u128(512 * p + 16 * lane);
            scales = from.u32(BASE_Q6_K_scales + 4 * lane);
            d = from.u16(BASE_Q6_K_d + 2 * (lane >> 2));
        }
    };
    static __device__ __forceinline__ float factor(int set) { return set == 3 ? 0.25f : 1.0f; }
    static __device__ __forceinline__ unsigned fold(int set, int sum, float) {
        return MAGIC_BITS - (set == 3 ? 128 : 32) * sum;
    }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int) {
        int s0 = x.fold.x, s1 = x.fold.y, s2 = x.fold.z, s3 = x.fold.w;
        constexpr unsigned LOW = 0x3f3f3f3f, TOP = 0xc0c0c0c0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned a = word(w.plane[0], i), b = word(w.plane[1], i), c = word(w.plane[2], i);
            const unsigned la = a & LOW, lb = b & LOW;
            s0 = dot4(la, word(x.q[0], i), s0);
            s1 = dot4(lb, word(x.q[1], i), s1);
            s2 = dot4(c & LOW, word(x.q[2], i), s2);
            const unsigned ab = less(b, lb) + (less(a, la) >> 2);
            s3 = dot4((c & TOP) + (ab >> 2), word(x.q[3], i), s3);
        }
        const int scales = (int)w.scales;
        float sum = unfold(s0) * ((float)(signed char)scales * x.scale.x);
        sum = fmaf(unfold(s1), (float)(signed char)(scales >> 8) * x.scale.y, sum);
        sum = fmaf(unfold(s2), (float)(signed char)(scales >> 16) * x.scale.z, sum);
        sum = fmaf(unfold(s3), (float)(signed char)(scales >> 24) * x.scale.w, sum);
        return sum * half_to_float(w.d);
    }
};

// What is multiplied with the lane's two groups of 32 integers, and what is subtracted: from the header of a Q4_K or
// Q5_K block, or as halves.
struct Affine {
    float d0, d1, m0, m1;
    __device__ __forceinline__ explicit Affine(const uint2 &pairs)
        : d0(low_half(pairs.x)), d1(low_half(pairs.y)), m0(-high_half(pairs.x)), m1(-high_half(pairs.y)) {}
    __device__ __forceinline__ Affine(const uint4 &header, int lane) {
        const int shift = (lane & 1) * 16;
        const unsigned a = header.y >> shift, b = header.z >> shift, c = header.w >> shift;
        const bool late = lane & 2;  // sub-blocks 4..7 have their high bits with those of 0..3
        const unsigned scales = late ? (c & 0x0f0f) | ((a >> 2) & 0x3030) : a & 0x3f3f;
        const unsigned minima = late ? ((c >> 4) & 0x0f0f) | ((b >> 2) & 0x3030) : b & 0x3f3f;
        const float d = low_half(header.x), dmin = high_half(header.x);
        d0 = d * (float)(scales & 0xff), d1 = d * (float)(scales >> 8);
        m0 = dmin * (float)(minima & 0xff), m1 = dmin * (float)(minima >> 8);
    }
    // The lane's sum from the four sets' sums of levels times q, and x.fold = scale times sum of q.
    __device__ __forceinline__ float sum(const int s[4], const Input &x) const {
        float first = fmaf(unfold(s[1]), x.scale.y, unfold(s[0]) * x.scale.x);
        float second = fmaf(unfold(s[3]), x.scale.w, unfold(s[2]) * x.scale.z);
        const float q0 = __uint_as_float(x.fold.x) + __uint_as_float(x.fold.y);
        const float q1 = __uint_as_float(x.fold.z) + __uint_as_float(x.fold.w);
        return fmaf(d0, first, d1 * second) - fmaf(m0, q0, m1 * q1);
    }
};

// Nibbles: byte i of plane p holds weight i of set 2p below that of set 2p + 1, whose sum is taken times 16.
struct Q4_K {
    static constexpr int BYTES = BYTES_Q4_K;
    static constexpr bool PACKED = true;
    struct Segment {
        uint4 plane[2], header;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
#pragma unroll
            for (int p = 0; p < 2; p++) plane[p] = from.u128(512 * p + 16 * lane);
            header = from.u128(BASE_Q4_K_k + 16 * (lane >> 2));
        }
    };
    static __device__ __forceinline__ float factor(int set) { return set & 1 ? 0.0625f : 1.0f; }
    static __device__ __forceinline__ unsigned fold(int, int sum, float s) { return __float_as_uint(s * (float)sum); }
    static __device__ __forceinline__ void levels(const uint4 plane[2], const Input &x, int sums[4]) {
#pragma unroll
        for (int p = 0; p < 2; p++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned v = word(plane[p], i);
                sums[2 * p] = dot4(v & 0x0f0f0f0f, word(x.q[2 * p], i), sums[2 * p]);
                sums[2 * p + 1] = dot4(v & 0xf0f0f0f0, word(x.q[2 * p + 1], i), sums[2 * p + 1]);
            }
    }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int lane) {
        int sums[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
        levels(w.plane, x, sums);
        return Affine(w.header, lane).sum(sums, x);
    }
};

// Nibbles, a scale and what is added per 32; planes as in Q4_K.
struct Q4_1 {
    static constexpr int BYTES = BYTES_Q4_1;
    static constexpr bool PACKED = true;
    struct Segment {
        uint4 plane[2];
        uint2 pairs;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
#pragma unroll
            for (int p = 0; p < 2; p++) plane[p] = from.u128(512 * p + 16 * lane);
            pairs = from.u64(BASE_Q4_1_pairs + 8 * lane);
        }
    };
    static __device__ __forceinline__ float factor(int set) { return Q4_K::factor(set); }
    static __device__ __forceinline__ unsigned fold(int set, int sum, float s) { return Q4_K::fold(set, sum, s); }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int) {
        int sums[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
        Q4_K::levels(w.plane, x, sums);
        return Affine(w.pairs).sum(sums, x);
    }
};

// Nibbles with a fifth bit: that of weight 4w + b is in byte b of the word of its pair of sets, of the first set bit w,
// of the second one bit 4 + w.
__device__ __forceinline__ void five_bit_levels(const uint4 plane[2], const uint2 &fifth, const Input &x, int sums[4]) {
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned v = word(plane[p], i), bits = p ? fifth.y : fifth.x;
            const unsigned low = (v & 0x0f0f0f0f) | (bits << (4 - i) & 0x10101010);
            const unsigned high = (v >> 4 & 0x0f0f0f0f) | (bits >> i & 0x10101010);
            sums[2 * p] = dot4(low, word(x.q[2 * p], i), sums[2 * p]);
            sums[2 * p + 1] = dot4(high, word(x.q[2 * p + 1], i), sums[2 * p + 1]);
        }
}

// Q4_K with a fifth bit.
struct Q5_K {
    static constexpr int BYTES = BYTES_Q5_K;
    static constexpr bool PACKED = true;
    struct Segment {
        uint4 plane[2], header;
        uint2 fifth;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
#pragma unroll
            for (int p = 0; p < 2; p++) plane[p] = from.u128(512 * p + 16 * lane);
            fifth = from.u64(BASE_Q5_K_fifth + 8 * lane);
            header = from.u128(BASE_Q5_K_k + 16 * (lane >> 2));
        }
    };
    static __device__ __forceinline__ float factor(int) { return 1.0f; }
    static __device__ __forceinline__ unsigned fold(int, int sum, float s) { return __float_as_uint(s * (float)sum); }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int lane) {
        int sums[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
        five_bit_levels(w.plane, w.fifth, x, sums);
        return Affine(w.header, lane).sum(sums, x);
    }
};

// Signed bytes, one scale per 32.
struct Q8_0 {
    static constexpr int BYTES = BYTES_Q8_0;
    static constexpr bool PACKED = true;
    struct Segment {
        uint4 plane[4];
        unsigned d;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
#pragma unroll
            for (int p = 0; p < 4; p++) plane[p] = from.u128(512 * p + 16 * lane);
            d = from.u32(BASE_Q8_0_scales + 4 * lane);
        }
    };
    static __device__ __forceinline__ float factor(int) { return 1.0f; }
    static __device__ __forceinline__ unsigned fold(int, int, float) { return 0; }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int) {
        int s[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int set = 0; set < 4; set++)
                s[set] = __dp4a((int)word(w.plane[set], i), (int)word(x.q[set], i), s[set]);
        const float first = fmaf(unfold(s[1]), x.scale.y, unfold(s[0]) * x.scale.x);
        const float second = fmaf(unfold(s[3]), x.scale.w, unfold(s[2]) * x.scale.z);
        return fmaf(low_half(w.d), first, high_half(w.d) * second);
    }
};

// Nibbles less 8, one scale per 32; planes as in Q4_K.
struct Q4_0 {
    static constexpr int BYTES = BYTES_Q4_0;
    static constexpr bool PACKED = true;
    struct Segment {
        uint4 plane[2];
        unsigned d;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
#pragma unroll
            for (int p = 0; p < 2; p++) plane[p] = from.u128(512 * p + 16 * lane);
            d = from.u32(BASE_Q4_0_scales + 4 * lane);
        }
    };
    static __device__ __forceinline__ float factor(int set) { return Q4_K::factor(set); }
    static __device__ __forceinline__ unsigned fold(int set, int sum, float) {
        return MAGIC_BITS - (set & 1 ? 128 : 8) * sum;
    }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int) {
        int s[4] = {(int)x.fold.x, (int)x.fold.y, (int)x.fold.z, (int)x.fold.w};
        Q4_K::levels(w.plane, x, s);
        const float first = fmaf(unfold(s[1]), x.scale.y, unfold(s[0]) * x.scale.x);
        const float second = fmaf(unfold(s[3]), x.scale.w, unfold(s[2]) * x.scale.z);
        return fmaf(low_half(w.d), first, high_half(w.d) * second);
    }
};

// Nibbles and a fifth bit less 16, one scale per 32.
struct Q5_0 {
    static constexpr int BYTES = BYTES_Q5_0;
    static constexpr bool PACKED = true;
    struct Segment {
        uint4 plane[2];
        uint2 fifth;
        unsigned d;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
#pragma unroll
            for (int p = 0; p < 2; p++) plane[p] = from.u128(512 * p + 16 * lane);
            fifth = from.u64(BASE_Q5_0_fifth + 8 * lane);
            d = from.u32(BASE_Q5_0_scales + 4 * lane);
        }
    };
    static __device__ __forceinline__ float factor(int) { return 1.0f; }
    static __device__ __forceinline__ unsigned fold(int, int sum, float) { return MAGIC_BITS - 16 * sum; }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int) {
        int s[4] = {(int)x.fold.x, (int)x.fold.y, (int)x.fold.z, (int)x.fold.w};
        five_bit_levels(w.plane, w.fifth, x, s);
        const float first = fmaf(unfold(s[1]), x.scale.y, unfold(s[0]) * x.scale.x);
        const float second = fmaf(unfold(s[3]), x.scale.w, unfold(s[2]) * x.scale.z);
        return fmaf(low_half(w.d), first, high_half(w.d) * second);
    }
};

// Nibbles and a fifth bit, a scale and what is added per 32.
struct Q5_1 {
    static constexpr int BYTES = BYTES_Q5_1;
    static constexpr bool PACKED = true;
    struct Segment {
        uint4 plane[2];
        uint2 fifth, pairs;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
#pragma unroll
            for (int p = 0; p < 2; p++) plane[p] = from.u128(512 * p + 16 * lane);
            fifth = from.u64(BASE_Q5_1_fifth + 8 * lane);
            pairs = from.u64(BASE_Q5_1_pairs + 8 * lane);
        }
    };
    static __device__ __forceinline__ float factor(int) { return 1.0f; }
    static __device__ __forceinline__ unsigned fold(int set, int sum, float s) { return Q4_K::fold(set, sum, s); }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int) {
        int sums[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
        five_bit_levels(w.plane, w.fifth, x, sums);
        return Affine(w.pairs).sum(sums, x);
    }
};

// Pairs of bits of the four sets in one plane: sums of set s are taken times 4^s. Four bits of scale and of minimum per
// 16.
struct Q2_K {
    static constexpr int BYTES = BYTES_Q2_K;
    static constexpr bool PACKED = true;
    struct Segment {
        uint4 plane;
        unsigned scales, d;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
            plane = from.u128(16 * lane);
            scales = from.u32(BASE_Q2_K_scales + 4 * lane);
            d = from.u32(BASE_Q2_K_d + 4 * (lane >> 2));
        }
    };
    static __device__ __forceinline__ float factor(int set) { return 1.0f / (1 << 2 * set); }
    static __device__ __forceinline__ unsigned fold(int, int sum, float s) { return __float_as_uint(s * (float)sum); }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int) {
        int s[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int set = 0; set < 4; set++)
                s[set] = dot4(word(w.plane, i) & 0x03030303 << 2 * set, word(x.q[set], i), s[set]);
        const float scale[4] = {x.scale.x, x.scale.y, x.scale.z, x.scale.w};
        const unsigned folds[4] = {x.fold.x, x.fold.y, x.fold.z, x.fold.w};
        float levels = 0, minima = 0;
#pragma unroll
        for (int set = 0; set < 4; set++) {
            const unsigned both = w.scales >> 8 * set;
            levels = fmaf(unfold(s[set]), (float)(both & 15) * scale[set], levels);
            minima = fmaf(__uint_as_float(folds[set]), (float)(both >> 4 & 15), minima);
        }
        return fmaf(low_half(w.d), levels, -high_half(w.d) * minima);
    }
};

// Three bits less 4: pairs of bits of the four sets in one plane, and a word with the third bits of two words of it, of
// which those of sets 0 and 2 come to lie above the pairs by one shift and those of 1 and 3, and their pairs, by
// another. Sums of sets 2 and 3 are taken times 16. A scale of six bits less 32 per 16: times 4 it is an int8.
struct Q3_K {
    static constexpr int BYTES = BYTES_Q3_K;
    static constexpr bool PACKED = true;
    struct Segment {
        uint4 plane;
        uint2 third;
        unsigned low, high;
        unsigned short d;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
            plane = from.u128(16 * lane);
            third = from.u64(BASE_Q3_K_third + 8 * lane);
            low = from.u32(BASE_Q3_K_low + 8 * (lane >> 2) + 4 * (lane & 1));
            high = from.u32(BASE_Q3_K_scales + 4 * (lane >> 2));
            d = from.u16(BASE_Q3_K_d + 2 * (lane >> 2));
        }
    };
    static __device__ __forceinline__ float factor(int set) { return set & 2 ? 0.25f / 16 : 0.25f; }
    static __device__ __forceinline__ unsigned fold(int set, int sum, float) {
        return MAGIC_BITS - (set & 2 ? 64 : 4) * sum;
    }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int lane) {
        int s0 = x.fold.x, s1 = x.fold.y, s2 = x.fold.z, s3 = x.fold.w;
        constexpr unsigned PAIRS = 0x33333333, LOW = 0x07070707, HIGH = 0x70707070;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned v = word(w.plane, i), bits = i < 2 ? w.third.x : w.third.y;
            const unsigned even = chosen(PAIRS, v, i & 1 ? bits << 2 : bits);
            const unsigned odd = chosen(PAIRS, v >> 2, i & 1 ? bits << 1 : bits >> 1);
            s0 = dot4(even & LOW, word(x.q[0], i), s0);
            s1 = dot4(odd & LOW, word(x.q[1], i), s1);
            s2 = dot4(even & HIGH, word(x.q[2], i), s2);
            s3 = dot4(odd & HIGH, word(x.q[3], i), s3);
        }
        const unsigned low = w.low >> (2 * (lane & 2)) << 2, high = w.high << (6 - 2 * (lane & 3));
        const int scales = (int)(((low & 0x3c3c3c3c) | (high & 0xc0c0c0c0)) ^ 0x80808080);
        float sum = unfold(s0) * ((float)(signed char)scales * x.scale.x);
        sum = fmaf(unfold(s1), (float)(signed char)(scales >> 8) * x.scale.y, sum);
        sum = fmaf(unfold(s2), (float)(signed char)(scales >> 16) * x.scale.z, sum);
        sum = fmaf(unfold(s3), (float)(signed char)(scales >> 24) * x.scale.w, sum);
        return sum * half_to_float(w.d);
    }
};

// --- codes ----------------------------------------------------------------------------------------------------------
//
// A nibble stands for one of 16 int8. A permutation of the bytes of two words looks up four, by four nibbles as they
// lie in a word: of a nibble below 8 a byte of the words, of one from 8 on only that byte's sign, all over. So there
// are two tables, whose bytes have one sign each, and a product with each; what a nibble gets from the table that it
// is not in, 0 or -1, is taken off the one that it is in.

__device__ __forceinline__ unsigned permuted(unsigned low, unsigned high, unsigned at) {
    unsigned result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(at));
    return result;
}

// The codes plus OFFSET, each half of them of one sign.
template <unsigned A, unsigned B, unsigned C, unsigned D> struct Codes {
    static __device__ constexpr int code(int at) {
        return (signed char)((at < 4 ? A : at < 8 ? B : at < 12 ? C : D) >> at % 4 * 8);
    }
    static constexpr bool FALLING = code(1) > 0;  // from positive to negative ones
    static constexpr int OFFSET = FALLING ? -1 : 0, LOWER_SIGN = FALLING ? 0 : -1, UPPER_SIGN = FALLING ? -1 : 0;
    static __device__ constexpr unsigned table(int first) {
        unsigned made = 0;
        for (int i = 0; i < 4; i++)
            made |= (unsigned)((code(first + i) + OFFSET - (first < 8 ? UPPER_SIGN : LOWER_SIGN)) & 255) << 8 * i;
        return made;
    }
    static __device__ constexpr bool signs(int first, int sign) {
        return ((table(first) ^ sign) & 0x80808080) == 0 && ((table(first + 4) ^ sign) & 0x80808080) == 0;
    }
    static_assert(signs(0, LOWER_SIGN) && signs(8, UPPER_SIGN), "the bytes of a table have one sign");
    static __device__ __forceinline__ int value(int at) {
        const unsigned lower = __byte_perm(A, B, at & 7), upper = __byte_perm(C, D, at & 7);
        return (signed char)((at & 8 ? upper : lower) & 255);
    }
    // Four nibbles times q, added to `sum`.
    static __device__ __forceinline__ int dot(unsigned nibbles, unsigned flipped, unsigned q, int sum) {
        sum = __dp4a((int)permuted(table(0), table(4), nibbles), (int)q, sum);
        return __dp4a((int)permuted(table(8), table(12), flipped), (int)q, sum);
    }
    // What a lane's first and second 32 weights make, but for their scales.
    static __device__ __forceinline__ float2 halves(const uint4 plane[2], const Input &x) {
        int sums[4] = {(int)x.fold.x, (int)x.fold.y, (int)x.fold.z, (int)x.fold.w};
#pragma unroll
        for (int p = 0; p < 2; p++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned v = word(plane[p], i), flipped = v ^ 0x88888888;
                sums[2 * p] = dot(v, flipped, word(x.q[2 * p], i), sums[2 * p]);
                sums[2 * p + 1] = dot(v >> 16, flipped >> 16, word(x.q[2 * p + 1], i), sums[2 * p + 1]);
            }
        return make_float2(fmaf(unfold(sums[1]), x.scale.y, unfold(sums[0]) * x.scale.x),
                           fmaf(unfold(sums[3]), x.scale.w, unfold(sums[2]) * x.scale.z));
    }
    static __device__ __forceinline__ unsigned fold(int sum) { return MAGIC_BITS - OFFSET * sum; }
};

// Codes, one scale per 32.
struct IQ4_NL {
    static constexpr int BYTES = BYTES_IQ4_NL;
    static constexpr bool PACKED = true;
    typedef Codes<CODES_IQ4_NL> Table;
    struct Segment {
        uint4 plane[2];
        unsigned d;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
#pragma unroll
            for (int p = 0; p < 2; p++) plane[p] = from.u128(512 * p + 16 * lane);
            d = from.u32(BASE_IQ4_NL_scales + 4 * lane);
        }
    };
    static __device__ __forceinline__ float factor(int) { return 1.0f; }
    static __device__ __forceinline__ unsigned fold(int, int sum, float) { return Table::fold(sum); }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int) {
        const float2 half = Table::halves(w.plane, x);
        return fmaf(low_half(w.d), half.x, high_half(w.d) * half.y);
    }
};

// Codes, a scale of six bits less 32 per 32.
struct IQ4_XS {
    static constexpr int BYTES = BYTES_IQ4_XS;
    static constexpr bool PACKED = true;
    typedef IQ4_NL::Table Table;
    struct Segment {
        uint4 plane[2];
        uint2 head;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
#pragma unroll
            for (int p = 0; p < 2; p++) plane[p] = from.u128(512 * p + 16 * lane);
            head = from.u64(BASE_IQ4_XS_head + 8 * (lane >> 2));
        }
    };
    static __device__ __forceinline__ float factor(int) { return 1.0f; }
    static __device__ __forceinline__ unsigned fold(int, int sum, float) { return Table::fold(sum); }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int lane) {
        const float2 half = Table::halves(w.plane, x);
        const unsigned low = w.head.y >> (8 * (lane & 3)), high = w.head.x >> (16 + 4 * (lane & 3));
        const int one = (int)((low & 15) | (high << 4 & 48)) - 32;
        const int other = (int)((low >> 4 & 15) | (high << 2 & 48)) - 32;
        return fmaf((float)one, half.x, (float)other * half.y) * low_half(w.head.x);
    }
};

// 2 ** (exponent - 128), of bytes below 2 a denormal.
__device__ __forceinline__ float power(unsigned exponent) {
    return __uint_as_float(exponent < 2 ? 0x00200000u << exponent : exponent - 1 << 23);
}

// Codes, and the exponent of a power of two per 32.
struct MXFP4 {
    static constexpr int BYTES = BYTES_MXFP4;
    static constexpr bool PACKED = true;
    typedef Codes<CODES_MXFP4> Table;
    struct Segment {
        uint4 plane[2];
        unsigned short exponents;
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
#pragma unroll
            for (int p = 0; p < 2; p++) plane[p] = from.u128(512 * p + 16 * lane);
            exponents = from.u16(BASE_MXFP4_scales + 2 * lane);
        }
    };
    static __device__ __forceinline__ float factor(int) { return 1.0f; }
    static __device__ __forceinline__ unsigned fold(int, int sum, float) { return Table::fold(sum); }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int) {
        const float2 half = Table::halves(w.plane, x);
        return fmaf(power(w.exponents & 255), half.x, power(w.exponents >> 8) * half.y);
    }
};

// Entries of a code book.
template <class Book> struct Booked {
    static constexpr int BYTES = Book::BYTES;
    static constexpr bool PACKED = true;
    struct Segment : EntryPieces {
        template <class Source> struct Loading {
            Source from;
            int lane;
            __device__ void operator()(uint4 &v, int base, int) const { v = from.u128(base + 16 * lane); }
            __device__ void operator()(uint2 &v, int base, int) const { v = from.u64(base + 8 * lane); }
            __device__ void operator()(unsigned &v, int base, int shift) const {
                v = from.u32(base + 4 * (lane >> shift));
            }
        };
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
            Book::load(*this, Loading<Source>{from, lane});
        }
    };
    static __device__ __forceinline__ float factor(int) { return 1.0f; }
    static __device__ __forceinline__ unsigned fold(int, int, float) { return 0; }
    // d, of two blocks that share a word, times what all scales have in common.
    static __device__ __forceinline__ float unit(const Segment &w, int lane) {
        return (lane & 4 ? high_half(w.d) : low_half(w.d)) * Book::FACTOR;
    }
    static __device__ __forceinline__ float dot(const Segment &w, const Input &x, int lane) {
        const Entries entries = Book::of(w, lane);
        const float scale[4] = {x.scale.x, x.scale.y, x.scale.z, x.scale.w};
        float sum = 0;
#pragma unroll
        for (int set = 0; set < 4; set++) {
            int s = MAGIC_BITS;
#pragma unroll
            for (int i = 0; i < 4; i++) s = __dp4a((int)Book::four(entries, set, i), (int)word(x.q[set], i), s);
            sum = fmaf(unfold(s), (float)(entries.scales >> 8 * set & 255) * scale[set], sum);
        }
        return sum * unit(w, lane);
    }
    static __device__ __forceinline__ float weight(const unsigned char *segment, int lane, int set, int byte) {
        Segment w;
        w.load(Memory{segment}, lane);
        const Entries entries = Book::of(w, lane);
        const signed char q = (signed char)(Book::four(entries, set, byte / 4) >> 8 * (byte % 4));
        return unit(w, lane) * (float)(entries.scales >> 8 * set & 255) * (float)q;
    }
};

struct IQ2_XXS : Booked<Book_IQ2_XXS> {};
struct IQ2_XS : Booked<Book_IQ2_XS> {};
struct IQ2_S : Booked<Book_IQ2_S> {};
struct IQ3_XXS : Booked<Book_IQ3_XXS> {};
struct IQ3_S : Booked<Book_IQ3_S> {};

// --- float formats --------------------------------------------------------------------------------------------------
//
// Rows as in the file. A part is one 128-bit load of a lane, the lanes side by side: 256 halves or 128 floats. A
// segment is up to 2048 weights of one row; lanes past its end hold zeros. The activations are float32 in shared
// memory, parts in order, in each first every lane's first four, then every lane's next four.

template <class F, int Size> struct Floats {
    static constexpr bool PACKED = false;
    static constexpr int LANE = 16 / Size, PART = 32 * LANE;  // weights
    template <int Count = SEGMENT> struct Segment {
        static constexpr int USED = (Count + PART - 1) / PART;
        uint4 part[USED];
        template <class Source> __device__ __forceinline__ void load(Source from, int lane) {
#pragma unroll
            for (int p = 0; p < USED; p++)
                part[p] = (p + 1) * PART <= Count || p * PART + lane * LANE < Count ? from.u128(512 * p + 16 * lane)
                                                                                     : make_uint4(0, 0, 0, 0);
        }
    };
    // x: the staged activations of the segment's first weight.
    template <int Count>
    static __device__ __forceinline__ float dot(const Segment<Count> &w, const float4 *x, int lane) {
        float sum = 0;
#pragma unroll
        for (int p = 0; p < Segment<Count>::USED; p++)
#pragma unroll
            for (int quad = 0; quad < LANE / 4; quad++) {
                const float4 v = x[(p * (LANE / 4) + quad) * 32 + lane];
                const float4 u = F::four(w.part[p], quad);
                sum = fmaf(u.w, v.w, fmaf(u.z, v.z, fmaf(u.y, v.y, fmaf(u.x, v.x, sum))));
            }
        return sum;
    }
    // Where the four activations [4 * at, 4 * at + 4) are staged, in float4; a vector takes PART floats per part begun.
    static __device__ __forceinline__ int place(int at) {
        constexpr int QUADS = LANE / 4;
        return (at / (32 * QUADS) * QUADS + at % QUADS) * 32 + at / QUADS % 32;
    }
};

struct F16 : Floats<F16, 2> {
    static __device__ __forceinline__ float4 four(const uint4 &v, int quad) {
        const unsigned a = quad ? v.z : v.x, b = quad ? v.w : v.y;
        return make_float4(low_half(a), high_half(a), low_half(b), high_half(b));
    }
};

struct BF16 : Floats<BF16, 2> {
    static __device__ __forceinline__ float4 four(const uint4 &v, int quad) {
        const unsigned a = quad ? v.z : v.x, b = quad ? v.w : v.y;
        return make_float4(__uint_as_float(a << 16), __uint_as_float(a & 0xffff0000), __uint_as_float(b << 16),
                           __uint_as_float(b & 0xffff0000));
    }
};

struct F32 : Floats<F32, 4> {
    static __device__ __forceinline__ float4 four(const uint4 &v, int) {
        return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
    }
};

// --- one weight -----------------------------------------------------------------------------------------------------
//
// By its index in the flattened matrix: for embeddings, of which a step reads one row.

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
    // The nibble of codes.
    __device__ __forceinline__ int code() const {
        const int at = 512 * (set / 2) + 16 * lane + byte / 4 * 4 + 2 * (set % 2) + byte % 4 / 2;
        return segment[at] >> (4 * (byte % 2)) & 15;
    }
    // With the fifth bit, of which 8 bytes of each lane lie at `bits`.
    __device__ __forceinline__ int five_bits(int bits) const {
        const int fifth = segment[bits + 8 * lane + 4 * (set / 2) + byte % 4] >> (4 * (set % 2) + byte / 4) & 1;
        return nibble() | fifth << 4;
    }
    // The half at `at`, of one for each 32 weights.
    __device__ __forceinline__ float scale32(int at) const {
        return half_to_float(((const unsigned short *)(segment + at))[2 * lane + set / 2]);
    }
    // d * q + m, with d and m as halves, a pair for each 32 weights, at `at`.
    __device__ __forceinline__ float pair32(int at, int q) const {
        const unsigned short *pair = (const unsigned short *)(segment + at) + 2 * (2 * lane + set / 2);
        return half_to_float(pair[0]) * (float)q + half_to_float(pair[1]);
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
    const int scale = ((const signed char *)at.segment)[BASE_Q6_K_scales + 4 * at.lane + at.set];
    const float d = half_to_float(((const unsigned short *)(at.segment + BASE_Q6_K_d))[at.lane / 4]);
    return d * (float)scale * (float)(q - 32);
}

template <> __device__ __forceinline__ float weight_at<Q4_K>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q4_K::BYTES);
    return at.affine(BASE_Q4_K_k, at.nibble());
}

template <> __device__ __forceinline__ float weight_at<Q5_K>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q5_K::BYTES);
    return at.affine(BASE_Q5_K_k, at.five_bits(BASE_Q5_K_fifth));
}

template <> __device__ __forceinline__ float weight_at<Q8_0>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q8_0::BYTES);
    return at.scale32(BASE_Q8_0_scales) * (float)(signed char)at.plane(at.set);
}

template <> __device__ __forceinline__ float weight_at<Q4_0>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q4_0::BYTES);
    return at.scale32(BASE_Q4_0_scales) * (float)(at.nibble() - 8);
}

template <> __device__ __forceinline__ float weight_at<Q4_1>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q4_1::BYTES);
    return at.pair32(BASE_Q4_1_pairs, at.nibble());
}

template <> __device__ __forceinline__ float weight_at<Q5_0>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q5_0::BYTES);
    return at.scale32(BASE_Q5_0_scales) * (float)(at.five_bits(BASE_Q5_0_fifth) - 16);
}

template <> __device__ __forceinline__ float weight_at<Q5_1>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q5_1::BYTES);
    return at.pair32(BASE_Q5_1_pairs, at.five_bits(BASE_Q5_1_fifth));
}

template <> __device__ __forceinline__ float weight_at<IQ4_NL>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, IQ4_NL::BYTES);
    return at.scale32(BASE_IQ4_NL_scales) * (float)IQ4_NL::Table::value(at.code());
}

template <> __device__ __forceinline__ float weight_at<Q3_K>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q3_K::BYTES);
    const int bit = 2 - 2 * (at.byte / 4 % 2) + at.set % 2 + 4 * (at.set / 2);
    const int third = at.segment[BASE_Q3_K_third + 8 * at.lane + 4 * (at.byte / 8) + at.byte % 4] >> bit & 1;
    const int low = at.segment[BASE_Q3_K_low + 8 * (at.lane / 4) + 4 * (at.lane % 2) + at.set];
    const int high = at.segment[BASE_Q3_K_scales + 4 * (at.lane / 4) + at.set] >> (2 * (at.lane % 4)) & 3;
    const int q = (at.plane(0) >> (2 * at.set) & 3) | third << 2;
    const float d = half_to_float(((const unsigned short *)(at.segment + BASE_Q3_K_d))[at.lane / 4]);
    return d * (float)((low >> (4 * (at.lane / 2 % 2)) & 15 | high << 4) - 32) * (float)(q - 4);
}

template <> __device__ __forceinline__ float weight_at<IQ4_XS>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, IQ4_XS::BYTES);
    const unsigned char *head = at.segment + BASE_IQ4_XS_head + 8 * (at.lane / 4);
    const int sub = 2 * (at.lane % 4) + at.set / 2;
    const int low = head[4 + sub / 2] >> (4 * (sub % 2)) & 15, high = head[2 + sub / 4] >> (2 * (sub % 4)) & 3;
    const float d = half_to_float(*(const unsigned short *)head);
    return d * (float)((low | high << 4) - 32) * (float)IQ4_XS::Table::value(at.code());
}

template <> __device__ __forceinline__ float weight_at<MXFP4>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, MXFP4::BYTES);
    const unsigned exponent = at.segment[BASE_MXFP4_scales + 2 * at.lane + at.set / 2];
    return power(exponent) * (float)MXFP4::Table::value(at.code());
}

template <> __device__ __forceinline__ float weight_at<Q2_K>(const unsigned char *matrix, long long index) {
    const Place at(matrix, index, Q2_K::BYTES);
    const int both = at.segment[BASE_Q2_K_scales + 4 * at.lane + at.set], q = at.plane(0) >> (2 * at.set) & 3;
    const unsigned short *d = (const unsigned short *)(at.segment + BASE_Q2_K_d) + 2 * (at.lane / 4);
    return half_to_float(d[0]) * (float)(both & 15) * (float)q - half_to_float(d[1]) * (float)(both >> 4);
}

#define BOOKED_WEIGHT(F)                                                                                      \
    template <> __device__ __forceinline__ float weight_at<F>(const unsigned char *matrix, long long index) { \
        const Place at(matrix, index, F::BYTES);                                                              \
        return F::weight(at.segment, at.lane, at.set, at.byte);                                               \
    }
BOOKED_WEIGHT(IQ2_XXS)
BOOKED_WEIGHT(IQ2_XS)
BOOKED_WEIGHT(IQ2_S)
BOOKED_WEIGHT(IQ3_XXS)
BOOKED_WEIGHT(IQ3_S)

template <> __device__ __forceinline__ float weight_at<F16>(const unsigned char *matrix, long long index) {
    return half_to_float(((const unsigned short *)matrix)[index]);
}

template <> __device__ __forceinline__ float weight_at<BF16>(const unsigned char *matrix, long long index) {
    return __uint_as_float((unsigned)((const unsigned short *)matrix)[index] << 16);
}

template <> __device__ __forceinline__ float weight_at<F32>(const unsigned char *matrix, long long index) {
    return ((const float *)matrix)[index];
}
