// Says what the next chunk of a prompt is: a recording of its own, so that every chunk is the same commands.
// Grid: 1 block of 1 thread.
#include "chunk.cuh"

extern "C" __global__ void chunk(Chunk *chunk, int start, int count, int slot, int at, int first) {
    chunk->start = start, chunk->count = count, chunk->slot = slot, chunk->at = at;
    if (first) chunk->lost = 0;
}
