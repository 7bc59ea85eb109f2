// What both kinds of attention of a chunk have in common. ROWS of a block and the macros of flash.cu are defined before
// this is included.
#pragma once
#include "chunk.cuh"
#include <cuda_fp16.h>

#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef BLOCK_POSITIONS
#define BLOCK_POSITIONS 0
#endif
#ifndef BOTH_WAYS
#define BOTH_WAYS 0
#endif

constexpr int GROUP = HEADS / KV_HEADS;
enum { PARTS = HEAD_DIM > 256 ? 2 : 1 };
constexpr int STEPS = HEAD_DIM / 16, NT = TILE / 8, ND = HEAD_DIM / PARTS / 8;
constexpr float NONE = -1e30f;
static_assert(HEADS % KV_HEADS == 0, "whole groups");

static __device__ __forceinline__ unsigned pack(float a, float b) {
    __half2 v = __floats2half2_rn(a, b);
    return *reinterpret_cast<unsigned *>(&v);
}

// A score (times log2 e) as it counts; the hyperbolic tangent as 1 - 2 / (1 + exp 2x).
static __device__ __forceinline__ float capped(float score) {
#ifdef SCORE_CAP
    constexpr float cap = 1.4426950408889634f * SCORE_CAP;
    return cap - __fdividef(2 * cap, 1 + exp2f(score * (2.0f / SCORE_CAP)));
#else
    return score;
#endif
}

// What scores are multiplied by, and log2 e.
static __device__ __forceinline__ float score_scale() {
#ifdef ATTENTION_SCALE
    return 1.4426950408889634f * ATTENTION_SCALE;
#else
    return 1.4426950408889634f * rsqrtf(HEAD_DIM);
#endif
}

// The tiles of positions that a block's rows from `block` on see, of a chunk of `count` tokens from `start` on.
struct Tiles {
    int first_end;  // positions below it are seen by all rows, but for a window's begin
    int end, last, first;
    int all_begin;  // positions from it on are in the window of all rows
    __device__ __forceinline__ Tiles(int start, int count, int block)
        : first_end(start + block / GROUP), end(start + min((block + ROWS - 1) / GROUP, count - 1) + 1),
          last((end + TILE - 1) / TILE), first(WINDOW ? max(0, first_end - WINDOW + 1) / TILE : 0),
          all_begin(end - WINDOW) {
        if (BOTH_WAYS) {
            first_end = last_of(first_end, start + count) + 1, end = last_of(end - 1, start + count) + 1;
            last = (end + TILE - 1) / TILE;
        }
    }
    // The last position that one sees, of a text up to `text_end`.
    static __device__ __forceinline__ int last_of(int position, int text_end) {
        return !BOTH_WAYS ? position : (WINDOW ? min(position + WINDOW, text_end) : text_end) - 1;
    }
    // Whether a row does not see all of a tile.
    __device__ __forceinline__ bool masked(int tile) const {
        return (tile + 1) * TILE > first_end | (WINDOW && tile * TILE < all_begin);
    }
};
