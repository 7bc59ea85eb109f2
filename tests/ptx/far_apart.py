"""Run as a program, with a cache directory: compile and run kernels while free addresses move away, as they do in a GPU
process that reserves terabytes. Prints how many pairs of a kernel and a function that kernels call lie too far apart
for a 32-bit displacement, of how many.
"""

import ctypes
import sys
import threading

import numpy as np

from tegrad import ptx
from tegrad.ptx import jit

PRIVATE_ANONYMOUS_NORESERVE = 0x4022
GAP = 3 << 30
HOLES = tuple(1 << bits for bits in (20, 18, 16, 14, 12))
KERNELS = 12

REVERSE = """
.version 7.5
.target sm_80
.address_size 64
.visible .entry reverse(.param .u64 p)
{
    .reg .b64 %%a; .reg .b64 %%o; .reg .b32 %%i; .reg .b32 %%j; .reg .f32 %%v;
    .shared .align 4 .b8 tile[256];
    ld.param.u64 %%a, [p];
    mov.u32 %%i, %%tid.x;
    mul.wide.u32 %%o, %%i, 4;
    add.u64 %%a, %%a, %%o;
    ld.global.f32 %%v, [%%a];
    shl.b32 %%j, %%i, 2;
    st.shared.f32 [%%j], %%v;
    bar.sync 0;
    sub.u32 %%j, 252, %%j;
    ld.shared.f32 %%v, [%%j];
    mul.f32 %%v, %%v, 0f%08X;
    st.global.f32 [%%a], %%v;
    ret;
}
"""
"""Turns 64 numbers round and scales them; the scale makes each a kernel of its own."""

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def reserve(size: int) -> int:
    """Addresses that nothing else gets."""
    return int(libc.mmap(None, size, 0, PRIVATE_ANONYMOUS_NORESERVE, -1, 0))


def move_on() -> None:
    """Let the next mapping lie beyond a gap: reserve the gap, then every hole in front of it."""
    gap = reserve(GAP)
    for size in HOLES:
        while reserve(size) > gap:
            pass


def run(scale: float, cache: str) -> list[ptx.LoadedKernel]:
    """Compile a kernel, run it, check its results."""
    bits = int(np.float32(scale).view(np.uint32))
    module = ptx.load(REVERSE % bits, cache)
    data = np.arange(64, dtype=np.float32)
    module.launch((1, 1, 1), (64, 1, 1), [data])
    assert (data == np.arange(64, dtype=np.float32)[::-1] * np.float32(scale)).all(), data
    return list(module.kernels.values())


def main(cache: str) -> None:
    """See above."""
    done = threading.Event()

    def churn() -> None:
        while not done.wait(0.005):
            move_on()

    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    try:
        kernels = [kernel for i in range(KERNELS) for kernel in run(i + 1.5, cache)]
    finally:
        done.set()
        thread.join()
    helpers = [address for linked in jit._helpers.values() for address in linked.addresses.values()]
    pairs = [(kernel.compile(), helper) for kernel in kernels for helper in helpers]
    print(sum(abs(a - b) > 1 << 31 for a, b in pairs), len(pairs))


if __name__ == "__main__":
    main(sys.argv[1])
