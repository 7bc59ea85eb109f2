// The first kernel of a prefill chunk: moves on to the next tokens of the prompt, so that every chunk is the same
// commands.
// TOKENS: of a chunk. Grid: 1 block of 1 thread.
#include "chunk.cuh"
#include "overlap.cuh"

extern "C" __global__ void chunk(Chunk *chunk) {
    allow_next();
    await_previous();
    int done = chunk->count, left = chunk->left - done;
    chunk->start += done;
    chunk->at += done;
    chunk->left = left;
    chunk->count = left < TOKENS ? left : TOKENS;
}
