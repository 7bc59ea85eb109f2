"""The caller's side of a call: what the driver may ask of this process while it carries out an ioctl.

Only a process itself knows which of its addresses are good and which of its fds are open, so its memory is touched
here, by system calls that report a bad page instead of dying of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tegrad.orin.wire import BUFFER_NAME, Message, Op

PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)
for _function in (_libc.read, _libc.write):
    _function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = ctypes.c_ssize_t


def serve(message: Message) -> Message:
    """Do for the driver what only this process can."""
    if message.op == Op.COPY_IN:
        return Message(Op.COPIED, payload=read_memory(message.value, message.code))
    if message.op == Op.COPY_OUT:
        return Message(Op.COPIED, code=write_memory(message.value, message.payload))
    if message.op == Op.GET_FILE:
        return Message(Op.COPIED, fds=[if_open(message.value)])
    if message.op == Op.CLOSE_FD:
        with contextlib.suppress(OSError):
            os.close(message.value)
        return Message(Op.COPIED)
    if message.op == Op.FIND_VMA:
        area = find_vma(message.value)
        return Message(Op.COPIED, payload=json.dumps(area).encode() if area else b"")
    raise OSError(errno.EPROTO, f"the board asks for something unknown ({message.op})")


def if_open(fd: int) -> int | None:
    """The fd itself, or None if this process has no such fd."""
    try:
        os.fstat(fd)
    except (OSError, OverflowError):
        return None
    return fd


def lowest(fd: int) -> int:
    """The same file under the lowest free number, as the kernel hands out fds."""
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    os.close(max(fd, copy))
    return min(fd, copy)


def read_memory(address: int, size: int) -> bytes:
    """As many bytes of this process's memory from `address` on as are readable."""
    data = bytearray()
    with _pipe() as (out, into):
        for start, length in _pages(address, size):
            if _libc.write(into, start, length) != length:
                break
            data += os.read(out, length)
    return bytes(data)


def write_memory(address: int, data: bytes) -> int:
    """Store bytes at an address of this process; how many could not be."""
    done = 0
    with _pipe() as (out, into):
        for start, length in _pages(address, len(data)):
            os.write(into, data[done : done + length])
            if _libc.read(out, start, length) != length:
                break
            done += length
    return len(data) - done


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """A pipe: the kernel copies to and from memory through it, and says EFAULT where it cannot."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def _pages(address: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of each part of a range that lies in one page."""
    end = address + size
    while address < end:
        length = min(PAGE - address % PAGE, end - address)
        yield address, length
        address += length


def find_vma(address: int) -> dict[str, Any] | None:
    """The area of our memory map that holds an address: `start`, `end`, `offset`, `inode`, `path`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *path = line.split(None, 5)
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= address < high:
            facts = {"start": low, "end": high, "offset": int(offset, 16), "inode": int(inode)}
            return {**facts, "path": path[0] if path else ""}
    return None


def is_buffer(area: dict[str, Any] | None) -> bool:
    """Whether an area of our memory map is a mapped buffer of a board."""
    return area is not None and area["path"].startswith(f"/memfd:{BUFFER_NAME}:")
