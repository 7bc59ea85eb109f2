// Code books: formats whose weights come four or eight at once, as entries of a table in memory, with a sign each.
//
// A format F of them has Book_F: of a lane's pieces, as they lie in the file, `of` makes the same for all, and `four`
// looks up word w of set i, its weights 4w .. 4w + 3, as int8.
#pragma once
#include "formats.cuh"

// A lane's 64 weights, each four or eight of which are an entry.
struct Entries {
    uint4 at;         // low bytes of their places in the table
    unsigned high;    // the bits above those
    uint2 signs;      // a bit for each weight
    unsigned scales;  // a byte for each set of 16: the odd number that is multiplied with d
};

// The pieces of a lane's run; only the members that a format has.
struct EntryPieces {
    uint4 at;
    uint2 low, signs;
    unsigned high, scales, d;
};

// Of bytes with seven signs the eighth: an even number of them is negative.
__device__ __forceinline__ unsigned eighth_signs(unsigned seven) {
    unsigned odd = seven ^ (seven >> 4 & 0x0f0f0f0f);
    odd ^= odd >> 2 & 0x03030303;
    return seven | ((odd ^ odd >> 1) & 0x01010101) << 7;
}

// The same of four times seven bits side by side.
__device__ __forceinline__ unsigned all_signs(unsigned bits) {
    return eighth_signs((bits & 0x7f) | (bits << 1 & 0x7f00) | (bits << 2 & 0x7f0000) | (bits << 3 & 0x7f000000));
}

// Two or four scales of four bits to a byte for each set: s stands for 2s + 1.
__device__ __forceinline__ unsigned odd_scales(unsigned first, unsigned second) {
    return (first * 0x0101 | second * 0x01010000) * 2 + 0x01010101;
}
__device__ __forceinline__ unsigned odd_scales(unsigned nibbles) {
    return ((nibbles & 15) | (nibbles << 4 & 0x0f00) | (nibbles << 8 & 0x0f0000) | (nibbles << 12 & 0x0f000000)) * 2 +
           0x01010101;
}

// Of 16 bits for every lane, two of which share a word, the lane's.
__device__ __forceinline__ unsigned half_word(unsigned word, int lane) { return word >> 16 * (lane & 1) & 0xffff; }

// Word w of set i of the entries of WEIGHTS weights, of whose places HIGH bits lie above the low byte.
template <int WEIGHTS, int HIGH>
__device__ __forceinline__ unsigned four_weights(const unsigned *table, const Entries &e, int i, int w) {
    const int first = 16 / WEIGHTS * i, own = 4 * w / WEIGHTS, quarter = first / 4;  // entries
    const unsigned bytes = quarter == 0 ? e.at.x : quarter == 1 ? e.at.y : quarter == 2 ? e.at.z : e.at.w;
    const unsigned high = e.high >> HIGH * first >> HIGH * own & ((1 << HIGH) - 1);
    const unsigned index = (bytes >> 8 * (first % 4) >> 8 * own & 255) | high << 8;
    const unsigned signs = (i < 2 ? e.signs.x : e.signs.y) >> 16 * (i % 2) >> 4 * w & 15;
    const unsigned ones = signs * 0x00204081 & 0x01010101;  // in the bytes that are negated; none is 0
    return (table[WEIGHTS / 4 * index + w % (WEIGHTS / 4)] ^ ones * 255) + ones;
}

// The head of Book_F; after it, its `of(pieces, lane)`. FACTOR: what d times the scale is multiplied with.
#define BOOK(F, WEIGHTS, HIGH, TIMES)                                                                             \
    struct Book_##F {                                                                                              \
        static constexpr int BYTES = BYTES_##F;                                                                    \
        static constexpr float FACTOR = TIMES;                                                                     \
        static __device__ __forceinline__ unsigned four(const Entries &e, int i, int w) {                          \
            static const unsigned TABLE[] = {BOOK_##F};                                                            \
            return four_weights<WEIGHTS, HIGH>(TABLE, e, i, w);                                                    \
        }                                                                                                          \
        template <class Load> static __device__ __forceinline__ void load(EntryPieces &pieces, const Load &load) { \
            HEAD_##F(LOAD_PIECE)                                                                                   \
        }                                                                                                          \
        template <class P> static __device__ __forceinline__ Entries of(const P &pieces, int lane);                \
    };                                                                                                             \
    template <class P> __device__ __forceinline__ Entries Book_##F::of(const P &pieces, int lane)
#define LOAD_PIECE(place, member, type, base, shift) load(pieces.member, base, shift);

BOOK(IQ2_XXS, 8, 0, 0.125f) {  // of 32 weights four bytes, and a word of signs and scale
    const uint4 &v = pieces.at;
    return {{v.x, v.z, 0, 0}, 0, {all_signs(v.y), all_signs(v.w)}, odd_scales(v.y >> 28, v.w >> 28)};
}

BOOK(IQ2_XS, 8, 1, 0.125f) {  // of eight weights nine bits of place and seven of signs
    const uint4 &v = pieces.at;
    const unsigned first = __byte_perm(v.x, v.y, 0x7531), second = __byte_perm(v.z, v.w, 0x7531);
    const unsigned high = (first & 0x01010101) * 0x01020408 >> 24 | (second & 0x01010101) * 0x01020408 >> 24 << 4;
    return {{__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.z, v.w, 0x6420), 0, 0},
            high,
            {eighth_signs(first >> 1 & 0x7f7f7f7f), eighth_signs(second >> 1 & 0x7f7f7f7f)},
            odd_scales(half_word(pieces.scales, lane))};
}

BOOK(IQ2_S, 8, 2, 0.125f) {
    return {{pieces.low.x, pieces.low.y, 0, 0},
            half_word(pieces.high, lane),
            pieces.signs,
            odd_scales(half_word(pieces.scales, lane))};
}

BOOK(IQ3_XXS, 4, 0, 0.25f) {
    const uint2 &v = pieces.signs;
    return {pieces.at, 0, {all_signs(v.x), all_signs(v.y)}, odd_scales(v.x >> 28, v.y >> 28)};
}

BOOK(IQ3_S, 4, 1, 1.0f) {
    const unsigned two = pieces.scales >> 8 * (lane & 3);
    return {pieces.at, half_word(pieces.high, lane), pieces.signs, odd_scales(two & 15, two >> 4 & 15)};
}
