// Packed weights (tegrad/llm/packing.py) as pairs of halves for the tensor cores.
//
// A *run* is the 64 consecutive weights of one lane of a segment, in four sets of 16. *Word* w of a set is its weights
// 4w .. 4w + 3. Fragments of mma.m16n8k16 hold, for thread t of a group of four, the columns 2t, 2t + 1, 2t + 8 and
// 2t + 9: which columns these are does not matter as long as both operands agree, so we say they are word t.
//
// Halves hold 256 times the weight (unless KIND is F16), so that small scales keep their precision; the product is
// multiplied by UNSCALE. Integers are exact in halves; unit = d * scale is rounded once, and the weight once more.
// Weights are below 256: matrices were looked at when they were loaded (large.cu), prompts in F32 go by steps.
#pragma once
#include "async.cuh"
#include "formats.cuh"
#include <cuda_fp16.h>

// KIND: ggml's number of the format.
#define INTEGERS OF_KIND(INTEGERS_OF)
#define SCALES OF_KIND(SCALES_OF)
#define HAS_MINIMA (SCALES == SCALES_SIX_BIT_PAIRS || SCALES == SCALES_FOUR_BIT_PAIRS || SCALES == SCALES_HALF_PAIRS)
#if INTEGERS == INTEGERS_BOOK
#include "books.cuh"
#endif
constexpr bool PLAIN = INTEGERS == INTEGERS_NONE;
constexpr int RUN = 64;
constexpr float UNSCALE = KIND == KIND_F16 ? 1.0f : 1.0f / 256;

// A part of a run: BYTES bytes at base + stride * (lane >> shift) of its segment.
struct Piece {
    int bytes, base, stride, shift;
};
constexpr int SEGMENT_BYTES = OF_KIND(BYTES), PIECES = OF_KIND(PIECES), PLANES = OF_KIND(PLANES);
constexpr int PLANE_WORDS = PLANES ? PLANES : 1;  // of a word of weights; an array has one at least

// Planes first; then what the scales are made of, as whole words.
static __host__ __device__ constexpr Piece piece(int at) {
    if (PLAIN) return {16, 16 * at, SEGMENT_BYTES / 32, 0};
    if (at < PLANES) return {16, 512 * at, 16, 0};
#define PIECE(place, member, type, base, shift) if (at == place) return {(int)sizeof(type), base, sizeof(type), shift};
    OF_KIND(HEAD)(PIECE)
#undef PIECE
    return {};
}

// Where a piece of a tile of `runs` runs begins: all of one piece lie side by side.
static __host__ __device__ constexpr int piece_offset(int at, int runs) {
    int sum = 0;
    for (int i = 0; i < at; i++) sum += piece(i).bytes * runs;
    return sum;
}

// What the pieces after the planes of a run hold; only the members that KIND has.
struct Head {
    unsigned scales;  // four int8, or two halves, or two exponents for each of two runs, or high bits of six-bit scales
    uint2 low;        // their low nibbles
    uint2 head;       // d and eight six-bit scales, high bits first
    uint2 third;      // the third bits of the run
    uint2 pairs;      // two times a half and what is added
    unsigned d;       // the halves of two blocks, or two halves of one
    uint4 k;          // d, dmin and twelve bytes of six-bit scales and minima
    uint2 fifth;      // the fifth bits of the run
    uint4 at;         // places in a code book
    uint2 signs;      // a bit for each weight, or seven for each eight
    unsigned high;    // high bits of places
};

// unit (and shift) of each set: weight = unit * q - shift.
struct Scales {
    __half2 unit[4], shift[4];
#if INTEGERS == INTEGERS_BOOK
    Entries entries;
#endif
};

static __device__ __forceinline__ __half2 as_half2(unsigned bits) { return *reinterpret_cast<__half2 *>(&bits); }
static __device__ __forceinline__ unsigned as_bits(__half2 v) { return *reinterpret_cast<unsigned *>(&v); }

// Bytes `first` and `first + 1` of a word as halves 1024 + byte.
static __device__ __forceinline__ __half2 magic(unsigned word, int first) {
    return as_half2(__byte_perm(word, 0x64646464u, first ? 0x4342 : 0x4140));
}

// word & mask | 1024 in each half, as one instruction: LOP3 has room for one constant, and nvcc would make two of it.
static __device__ __forceinline__ __half2 masked_magic(unsigned word, unsigned mask) {
    unsigned v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(word), "r"(mask), "n"(0x64006400));
    return as_half2(v);
}

static __device__ __forceinline__ __half2 both(float value) { return __float2half2_rn(value); }

// d and dmin of a block as 256 d.
static __device__ __forceinline__ __half2 scaled(unsigned halves) { return __hmul2(as_half2(halves), both(256)); }

// The scales of the run of `lane`.
static __device__ __forceinline__ Scales scales_of(const Head &head, int lane) {
    Scales s;
    if constexpr (SCALES == SCALES_INT8 || SCALES == SCALES_SIX_BITS) {
        __half2 d = scaled(lane & 4 ? __byte_perm(head.d, 0, 0x3232) : __byte_perm(head.d, 0, 0x1010));
        unsigned biased = head.scales ^ 0x80808080u;
        if constexpr (SCALES == SCALES_SIX_BITS) {  // as int8 they are 4 times what they are less 32
            const unsigned low = (lane & 1 ? head.low.y : head.low.x) >> (2 * (lane & 2)) << 2;
            biased = (low & 0x3c3c3c3cu) | (head.scales << (6 - 2 * (lane & 3)) & 0xc0c0c0c0u);
            d = __hmul2(d, both(0.25f));
        }
        __half2 low = __hmul2(__hsub2(magic(biased, 0), both(1152)), d);
        __half2 high = __hmul2(__hsub2(magic(biased, 2), both(1152)), d);
        s.unit[0] = __low2half2(low), s.unit[1] = __high2half2(low);
        s.unit[2] = __low2half2(high), s.unit[3] = __high2half2(high);
    } else if constexpr (SCALES == SCALES_ODD) {
#if INTEGERS == INTEGERS_BOOK
        s.entries = OF_KIND(Book)::of(head, lane);
        __half2 d = scaled(lane & 4 ? __byte_perm(head.d, 0, 0x3232) : __byte_perm(head.d, 0, 0x1010));
        d = __hmul2(d, both(OF_KIND(Book)::FACTOR));
        const __half2 low = __hmul2(__hsub2(magic(s.entries.scales, 0), both(1024)), d);
        const __half2 high = __hmul2(__hsub2(magic(s.entries.scales, 2), both(1024)), d);
        s.unit[0] = __low2half2(low), s.unit[1] = __high2half2(low);
        s.unit[2] = __low2half2(high), s.unit[3] = __high2half2(high);
#endif
    } else if constexpr (SCALES == SCALES_HALVES) {
        __half2 d = scaled(head.scales);
        s.unit[0] = s.unit[1] = __low2half2(d), s.unit[2] = s.unit[3] = __high2half2(d);
    } else if constexpr (SCALES == SCALES_FOUR_BIT_PAIRS) {
        const __half2 d = scaled(head.d), units = __low2half2(d), shifts = __high2half2(d);
        const unsigned scale = head.scales & 0x0f0f0f0fu, minimum = head.scales >> 4 & 0x0f0f0f0fu;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const __half2 unit = __hmul2(__hsub2(magic(scale, i), both(1024)), units);
            const __half2 shift = __hmul2(__hsub2(magic(minimum, i), both(1024)), shifts);
            s.unit[i] = __low2half2(unit), s.unit[i + 1] = __high2half2(unit);
            s.shift[i] = __low2half2(shift), s.shift[i + 1] = __high2half2(shift);
        }
    } else if constexpr (SCALES == SCALES_EXPONENTS) {
        // 256 times 2^(exponent - 128), which a half may hold as infinite or zero.
        const unsigned two = head.scales >> (16 * (lane & 1));
        const auto unit = [](unsigned exponent) { return both(__uint_as_float(min(exponent + 7, 254u) << 23)); };
        s.unit[0] = s.unit[1] = unit(two & 255), s.unit[2] = s.unit[3] = unit(two >> 8 & 255);
    } else if constexpr (SCALES == SCALES_SIX_BITS_OF_32) {
        const unsigned low = head.head.y >> (8 * (lane & 3)), high = head.head.x >> (16 + 4 * (lane & 3));
        const unsigned two = (low & 0x0f) | (high << 4 & 0x30) | (low << 4 & 0x0f00) | (high << 10 & 0x3000);
        const __half2 unit = __hmul2(__hsub2(magic(two, 0), both(1024 + 32)), __low2half2(scaled(head.head.x)));
        s.unit[0] = s.unit[1] = __low2half2(unit), s.unit[2] = s.unit[3] = __high2half2(unit);
    } else if constexpr (SCALES == SCALES_HALF_PAIRS) {
        const __half2 first = scaled(head.pairs.x), second = scaled(head.pairs.y);
        s.unit[0] = s.unit[1] = __low2half2(first), s.unit[2] = s.unit[3] = __low2half2(second);
        s.shift[0] = s.shift[1] = __hneg2(__high2half2(first));
        s.shift[2] = s.shift[3] = __hneg2(__high2half2(second));
    } else if constexpr (SCALES == SCALES_SIX_BIT_PAIRS) {
        // Scales and minima of sub-blocks 2i and 2i + 1, i = lane % 4, as two bytes each.
        // Of the upper four, the low bits are nibbles of the last word and the high ones the top bits of the others.
        const bool upper = lane & 2;
        const int by = lane & 1 ? 16 : 0;
        const unsigned low = upper ? 0x0f0f : 0x3f3f, top = upper ? 0x3030 : 0;
        const unsigned a = head.k.y >> by, b = head.k.z >> by, c = head.k.w >> by;
        const unsigned scale = ((upper ? c : a) & low) | (a >> 2 & top);
        const unsigned minimum = ((upper ? c >> 4 : b) & low) | (b >> 2 & top);
        __half2 d = scaled(head.k.x);
        __half2 unit = __hmul2(__hsub2(magic(scale, 0), both(1024)), __low2half2(d));
        __half2 shift = __hmul2(__hsub2(magic(minimum, 0), both(1024)), __high2half2(d));
        s.unit[0] = s.unit[1] = __low2half2(unit), s.unit[2] = s.unit[3] = __high2half2(unit);
        s.shift[0] = s.shift[1] = __low2half2(shift), s.shift[2] = s.shift[3] = __high2half2(shift);
    }
    return s;
}

// Word w of set i of a run, from word w of its planes: two pairs of halves, of neighbours; CROSSED: of weights 0 and 2,
// and 1 and 3, between which nibbles need not be moved.
template <bool CROSSED = false>
static __device__ __forceinline__ void expand_set(
    const unsigned (&plane)[PLANE_WORDS], const Head &head, const Scales &s, int w, int i, unsigned (&out)[2]
) {
    static_assert(!CROSSED || INTEGERS == INTEGERS_NIBBLES, "of nibbles alone");
    unsigned q = 0;
    if constexpr (INTEGERS == INTEGERS_SIX_BITS) {
        if (i < 3) q = plane[i] & 0x3f3f3f3fu;
        else q = (plane[0] >> 6 & 0x03030303u) | (plane[1] >> 4 & 0x0c0c0c0cu) | (plane[2] >> 2 & 0x30303030u);
    } else if constexpr (INTEGERS == INTEGERS_TWO_BITS) {
        q = plane[0] >> (2 * i) & 0x03030303u;
    } else if constexpr (INTEGERS == INTEGERS_TWO_BITS_AND_THIRD) {
        const unsigned bits = (w < 2 ? head.third.x : head.third.y) >> (2 - 2 * (w & 1) + (i & 1) + 4 * (i >> 1));
        q = (plane[0] >> (2 * i) & 0x03030303u) | (bits & 0x01010101u) << 2;
    } else if constexpr (INTEGERS == INTEGERS_BOOK) {
#if INTEGERS == INTEGERS_BOOK
        q = OF_KIND(Book)::four(s.entries, i, w) ^ 0x80808080u;
#endif
    } else if constexpr (INTEGERS == INTEGERS_CODES) {
        constexpr unsigned TABLE[4] = {OF_KIND(CODES)}, FLIP = 0x80808080u;
        const unsigned at = plane[i / 2] >> (16 * (i & 1)), index = at & 0x7777u;
        const unsigned lower = __byte_perm(TABLE[0] ^ FLIP, TABLE[1] ^ FLIP, index);
        const unsigned upper = __byte_perm(TABLE[2] ^ FLIP, TABLE[3] ^ FLIP, index);
        q = __byte_perm(lower, upper, (at & 0x8888u) >> 1 | 0x3210u);
    } else if constexpr (INTEGERS == INTEGERS_BYTES) {
        q = plane[i] ^ 0x80808080u;
    } else if constexpr (!PLAIN) {
        q = plane[i / 2] >> (i & 1 ? 4 : 0) & 0x0f0f0f0fu;
        if constexpr (INTEGERS == INTEGERS_NIBBLES_AND_FIFTH) {
            const unsigned bits = i < 2 ? head.fifth.x : head.fifth.y;
            q |= (i & 1 ? bits >> w : bits << (4 - w)) & 0x10101010u;
        }
    }
    constexpr float ZERO = INTEGERS == INTEGERS_CODES || INTEGERS == INTEGERS_BOOK ? 128 : -OF_KIND(LOWEST);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        __half2 v;
        if constexpr (CROSSED) {  // 1024 + nibble, or 1024 + 16 nibble
            const unsigned two = plane[i / 2] >> 8 * j;
            if (i & 1) v = __hfma2(masked_magic(two, 0x00f000f0u), both(1 / 16.0f), both(-64 - ZERO));
            else v = __hsub2(masked_magic(two, 0x000f000fu), both(1024 + ZERO));
        } else {
            v = __hsub2(magic(q, 2 * j), both(1024 + ZERO));
        }
        if constexpr (HAS_MINIMA) v = __hfma2(v, s.unit[i], __hneg2(s.shift[i]));
        else v = __hmul2(v, s.unit[i]);
        out[j] = as_bits(v);
    }
}

// Word w of the four sets of a run.
static __device__ __forceinline__ void expand(
    const unsigned (&plane)[PLANE_WORDS], const Head &head, const Scales &s, int w, unsigned (&out)[4][2]
) {
#pragma unroll
    for (int i = 0; i < 4; i++) expand_set(plane, head, s, w, i, out[i]);
}

// Two weights of a plain format, as they lie in memory.
static __device__ __forceinline__ unsigned plain_pair(unsigned bits) {
    if constexpr (KIND == KIND_F16) return bits;
    return as_bits(__floats2half2_rn(__uint_as_float(bits << 16) * 256, __uint_as_float(bits & 0xffff0000u) * 256));
}
static __device__ __forceinline__ unsigned plain_pair(float a, float b) {
    return as_bits(__floats2half2_rn(a * 256, b * 256));
}
