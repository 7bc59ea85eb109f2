// What a prefill chunk works on: consecutive tokens of one sequence. Written by kernels/chunk.cu.
// Its host side is tegrad/llm/prefill.py.
#pragma once

struct Chunk {
    int start;  // position of the chunk's first token in its sequence
    int count;  // tokens of the chunk
    int slot;   // the sequence's place in the cache
    int at;     // index of the chunk's first token in the buffer of tokens
    int lost;   // 1 once a norm of the prompt has met what is no number: some half was infinite
    int reserved[3];
};
static_assert(sizeof(Chunk) == 32, "tegrad/llm/prefill.py writes it");
