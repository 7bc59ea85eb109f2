"""A full memory barrier, for writes that another agent (the GPU) must see before a doorbell is rung.

Python has none, and libatomic is not everywhere: so one instruction and a return, in an executable page.
"""

import ctypes
import mmap
import os
import platform
from collections.abc import Callable

_CODE = {
    "aarch64": bytes.fromhex("9f3f03d5c0035fd6"),  # dsb sy; ret
    "x86_64": bytes.fromhex("0faef0c3"),  # mfence; ret
}
_SYS_MEMBARRIER = {"aarch64": 283, "x86_64": 324}
_MEMBARRIER_CMD_GLOBAL = 1


def _build() -> Callable[[], object]:
    """The barrier as a C function without arguments; the membarrier system call where code cannot be mapped."""
    machine = platform.machine()
    if machine not in _CODE:
        raise NotImplementedError(f"no memory barrier for {machine}; tegrad runs on aarch64 and x86_64")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    fd = os.memfd_create("tegrad-barrier", os.MFD_CLOEXEC)
    try:
        os.write(fd, _CODE[machine].ljust(mmap.PAGESIZE, b"\0"))
        address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, 0)
    finally:
        os.close(fd)
    if address == ctypes.c_void_p(-1).value:
        # A kernel that forbids executable memfds (vm.memfd_noexec): slower, but a barrier all the same.
        return lambda: libc.syscall(_SYS_MEMBARRIER[machine], _MEMBARRIER_CMD_GLOBAL, 0, 0)
    return ctypes.CFUNCTYPE(None)(address)


full_barrier: Callable[[], object] = _build()
"""Order every earlier memory access of this thread before every later one (dsb sy on arm64, mfence on x86-64)."""
