"""The host's memory as system calls: mappings at chosen addresses, and files that give parts of themselves back."""

from __future__ import annotations

import ctypes
import mmap
import os

FIXED, NORESERVE = 0x10, 0x4000
"""MAP_FIXED and MAP_NORESERVE, which Python's mmap does not name everywhere."""
PROT_NONE = 0
ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
"""Memory of our own that is there only where it is touched."""
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_MADV_DONTNEED = 4
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def map_memory(addr: int, size: int, prot: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """mmap(2) at a fixed address, or at a free one for 0: the address. It keeps no fd. Raises OSError."""
    got = _libc.mmap(addr or None, size, prot, flags, fd, offset)
    if got is None or got == _FAILED:
        raise _error()
    return int(got)


def unmap_memory(addr: int, size: int) -> None:
    """munmap(2)."""
    _libc.munmap(addr, size)


def forget_memory(addr: int, size: int) -> None:
    """Let private memory of our own read as zero again."""
    _libc.madvise(addr, size, _MADV_DONTNEED)


def punch(fd: int, offset: int, size: int) -> None:
    """Give back the memory behind a part of a memfd: it reads as zero again. Raises OSError."""
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size):
        raise _error()


def _error() -> OSError:
    errno = ctypes.get_errno()
    return OSError(errno, os.strerror(errno))
