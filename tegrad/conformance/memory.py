"""This process's own memory, as rules need it: blocks with an address, and addresses that the kernel cannot use."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator

PAGE = mmap.PAGESIZE
PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@contextlib.contextmanager
def pages(count: int) -> Iterator[int]:
    """The address of fresh zeroed pages; unmapped at the end."""
    address = _libc.mmap(None, count * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | 0x20, -1, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise MemoryError(f"no {count} pages")
    try:
        yield int(address)
    finally:
        _libc.munmap(address, count * PAGE)


def protect(address: int, size: int, prot: int) -> None:
    """Change what may be done with pages."""
    if _libc.mprotect(address, size, prot):
        raise OSError(ctypes.get_errno(), "mprotect")
