"""This process's own memory, as rules need it: blocks with an address, and addresses that the kernel cannot use."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator

from tegrad.uapi.libc import MAP_FAILED, libc

PAGE = mmap.PAGESIZE
PROT_NONE = 0


@contextlib.contextmanager
def pages(count: int) -> Iterator[int]:
    """The address of fresh zeroed pages; unmapped at the end."""
    address = libc.mmap(None, count * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | 0x20, -1, 0)
    if address is None or address == MAP_FAILED:
        raise MemoryError(f"no {count} pages")
    try:
        yield int(address)
    finally:
        libc.munmap(address, count * PAGE)


def protect(address: int, size: int, prot: int) -> None:
    """Change what may be done with pages."""
    if libc.mprotect(address, size, prot):
        raise OSError(ctypes.get_errno(), "mprotect")
