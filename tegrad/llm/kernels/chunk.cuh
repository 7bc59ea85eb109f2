// What a prefill chunk works on: consecutive tokens of one sequence. Written by the host, moved on by kernels/chunk.cu.
// Its host side is tegrad/llm/prefill.py.
#pragma once

struct Chunk {
    int start;  // position of the chunk's first token in its sequence
    int count;  // tokens of the chunk
    int slot;   // the sequence's place in the cache
    int at;     // index of the chunk's first token among the prompt's
    int left;   // tokens of the prompt from `at` on
    int lost;   // 1 once a norm has met what is no number: some half was infinite
    int reserved[2];
};
static_assert(sizeof(Chunk) == 32, "tegrad/llm/prefill.py writes it");
