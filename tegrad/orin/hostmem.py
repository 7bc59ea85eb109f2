"""The host's memory as system calls: mappings at chosen addresses, and files that give parts of themselves back."""

from __future__ import annotations

import ctypes
import mmap
import os

from tegrad.uapi.libc import MAP_FAILED, libc

FIXED, NORESERVE = 0x10, 0x4000
"""MAP_FIXED and MAP_NORESERVE, which Python's mmap does not name everywhere."""
PROT_NONE = 0
ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
"""Memory of our own that is there only where it is touched."""
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_MADV_DONTNEED = 4
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def map_memory(addr: int, size: int, prot: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """mmap(2) at a fixed address, or at a free one for 0: the address. It keeps no fd. Raises OSError."""
    got = libc.mmap(addr or None, size, prot, flags, fd, offset)
    if got is None or got == MAP_FAILED:
        raise _error()
    return int(got)


def unmap_memory(addr: int, size: int) -> None:
    """munmap(2)."""
    libc.munmap(addr, size)


def forget_memory(addr: int, size: int) -> None:
    """Let private memory of our own read as zero again."""
    libc.madvise(addr, size, _MADV_DONTNEED)


def punch(fd: int, offset: int, size: int) -> None:
    """Give back the memory behind a part of a memfd: it reads as zero again. Raises OSError."""
    if libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size):
        raise _error()


def _error() -> OSError:
    errno = ctypes.get_errno()
    return OSError(errno, os.strerror(errno))
