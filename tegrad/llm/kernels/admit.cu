// Sets a sequence's state between two steps: to the one that the host has staged for its slot.
// Grid: 1 block of 16 threads.
#include "state.cuh"

extern "C" __global__ void admit(State *states, const State *staged, int slot) {
    reinterpret_cast<int *>(states + slot)[threadIdx.x] = reinterpret_cast<const int *>(staged + slot)[threadIdx.x];
}
