// Launches that may begin before the one before them has ended, where the recording lets them (Hopper's dependent launch:
// PTX ISA, griddepcontrol). With OVERLAP 0, and on chips without it, both functions are nothing.
//
// Every kernel of such a chain must call `await_previous` in all threads before it reads or writes what another kernel of the
// chain touches. It returns when the launch before has ended and its stores are seen, which has itself waited so.
#pragma once

#ifndef OVERLAP
#define OVERLAP 0
#endif

// Once all CTAs have called it or ended, the next launch may begin.
__device__ __forceinline__ void allow_next() {
#if OVERLAP && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_previous() {
#if OVERLAP && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
