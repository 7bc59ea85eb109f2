"""A full memory barrier that Python can call, without any library.

A submission writes commands, the ring and GPPut into normal memory and then the doorbell into device memory; on
aarch64 nothing but a `dsb` keeps these in order for an observer outside the CPU. libatomic's fence is a `dmb ish`, is
often not installed, and orders for other CPUs only; a lock or a system call promises nothing. So the barrier is one
instruction in a page of our own: `dsb sy` on aarch64, `mfence` on x86-64 (which only write-combined memory needs).
"""

import ctypes
import mmap
import platform
from collections.abc import Callable

from tegrad.errors import TegradError

CODE = {
    "aarch64": bytes.fromhex("9f3f03d5c0035fd6"),  # dsb sy; ret
    "arm64": bytes.fromhex("9f3f03d5c0035fd6"),
    "x86_64": bytes.fromhex("0faef0c3"),  # mfence; ret
    "AMD64": bytes.fromhex("0faef0c3"),
}
"""The barrier and a return, per machine."""

_page: mmap.mmap | None = None
"""Keeps the code mapped for the life of the process; one page."""


def _build() -> Callable[[], None]:
    """Map the instruction and return it as a function.

    The page is written before it becomes executable, which makes the kernel clean the caches for it on aarch64.
    TegradError on an unknown machine or where the system forbids executable memory.
    """
    global _page
    code = CODE.get(platform.machine())
    if code is None:
        raise TegradError(f"no memory barrier is known for {platform.machine()}; tegrad runs on aarch64 and x86-64")
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC):
        raise TegradError("the system refuses executable memory, which the memory barrier needs: allow it for Python")
    _page = page
    return ctypes.PYFUNCTYPE(None)(address)  # keeps the interpreter's lock, which costs more than the barrier


full_barrier: Callable[[], None] = _build()
"""Order every earlier memory access before every later one, seen by any device."""
