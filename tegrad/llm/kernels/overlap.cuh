// Launches that may begin before the one before them has ended, where the recording lets them (Hopper's dependent
// launch: PTX ISA, griddepcontrol). OVERLAP 1: this launch waits for the one before by itself, and lets the next one
// begin early; 2: it only waits; 0, and chips without it: both functions are nothing.
//
// A kernel with OVERLAP must call `await_previous` in all threads before it reads or writes what another kernel of the
// chain touches, but in threads that touch nothing. It returns when the launch before has ended, which has itself
// waited so, and its stores are seen.
#pragma once

#ifndef OVERLAP
#define OVERLAP 0
#endif

// Once all CTAs have called it or ended, the next launch may begin.
__device__ __forceinline__ void allow_next() {
#if OVERLAP == 1 && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_previous() {
#if OVERLAP && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
