// Embeds tokens: a row of the embedding matrix each, as what the first layer's product reads.
//
// Grid: (ceil(K / 256), sequences), blocks of 256 threads, one for each element. Row y of every output is of state[y].
//
// Macros: K (columns), ROWS (of the matrix), FORMAT
//   SCALE       what the row is multiplied by; 1 unless said
//   POSITIONS   rows of a second matrix in POSITIONS_FORMAT, whose row for the token's position is added; 0: none
//   OUT_Q       also store what a packed matrix after an RMS norm reads: the row times the norm's weight as int8 with
//               a scale per 16, and the sum of squares of every SUM elements (16 or 32)
//   OVERLAP     1: the next launch may begin before this one has ended (overlap.cuh)
// Arguments: state (of each row), matrix, [positions], x f32 (K), [norm f32 (K), q s8 (K), s f32 (K / 16),
//   ss f32 (ceil(K / SUM))]
#include "overlap.cuh"
#include "state.cuh"
#include "blocks.cuh"

#ifndef POSITIONS
#define POSITIONS 0
#endif
#ifndef OUT_Q
#define OUT_Q 0
#endif
#ifndef SUM
#define SUM 32
#endif
static_assert(!OUT_Q || K % 16 == 0, "16 elements share a scale");

extern "C" __global__ void __launch_bounds__(256) embed(
    const State *state,
    const unsigned char *matrix,
#if POSITIONS
    const unsigned char *positions,
#endif
    float *x
#if OUT_Q
    , const float *norm, signed char *q, float *s, float *ss
#endif
) {
    allow_next();
    await_previous();
    const int row = blockIdx.y, at = blockIdx.x * 256 + threadIdx.x;
    const unsigned asked = state[row].token;
    // A slot that nobody owns holds anything: read a row that exists.
    const long long token = asked < ROWS ? asked : 0;
    float value = 0;
    if (at < K) {
        value = weight_at<FORMAT>(matrix, token * K + at);
#ifdef SCALE
        value *= SCALE;
#endif
#if POSITIONS
        const unsigned stands = state[row].position;
        value += weight_at<POSITIONS_FORMAT>(positions, (long long)(stands < POSITIONS ? stands : 0) * K + at);
#endif
        x[(long long)row * K + at] = value;
    }
#if OUT_Q
    const float normed = at < K ? value * norm[at] : 0;
    float largest = fabsf(normed), squares = value * value;
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, offset));
#pragma unroll
    for (int offset = SUM / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffff, squares, offset);
    if (at < K) {
        const float inverse = largest > 0 ? 127.0f / largest : 0;
        q[(long long)row * K + at] = (signed char)__float2int_rn(normed * inverse);
        if (at % 16 == 0) s[row * (K / 16) + at / 16] = largest * (1.0f / 127.0f);
        if (at % SUM == 0) ss[row * ((K + SUM - 1) / SUM) + at / SUM] = squares;
    }
#endif
}
