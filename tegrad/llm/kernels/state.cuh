// What a sequence's decode steps hand to each other on the device, and the ring in which its tokens reach the host.
// Its host side is tegrad/llm/state.py.
#pragma once

#ifndef RING
#define RING 256
#endif
static_assert((RING & (RING - 1)) == 0, "the count of tokens wraps at 2^32, so RING must divide that");

// One per sequence, 64 bytes. A step embeds `token`, which stands at `position`, and publishes the next one.
struct State {
    int position;            // where the keys and values of `token` go
    int token;
    int stop;                // 1: steps change nothing any more
    unsigned written;        // tokens published so far
    unsigned seed_lo, seed_hi;
    int limit;               // positions that may be used: the sequence stops before it would stand at `limit`
    int active;              // 0: nobody owns this slot of a batch
    int forced;              // so many tokens are not the sampled ones but those that the host left in the ring
    int reserved[7];
};
static_assert(sizeof(State) == 64, "tegrad/llm/state.py writes it");

// A token as the host reads it: the count of tokens with it in the upper half, so that one 8-byte store says both.
typedef unsigned long long Entry;

// Hand over the token that a step has sampled. Called by one thread of the grid, after everything else of the step;
// what it stores is seen by the next step, and by the host once this launch has ended.
// A stopped sequence keeps position and token: the steps that were in flight repeat its last one and publish nothing.
__device__ inline void publish_token(State *state, Entry *ring, int sampled) {
    if (state->stop) return;
    unsigned written = state->written;
    volatile Entry *entry = ring + written % RING;
    int token = sampled;
    if (state->forced > 0) {
        token = (int)(unsigned)*entry;
        state->forced--;
    }
    state->written = written + 1;
    *entry = (Entry)(written + 1) << 32 | (unsigned)token;
    if (state->position + 1 >= state->limit) {
        state->stop = 1;
        return;
    }
    state->position++;
    state->token = token;
}
