"""The caller's side of a call: what the driver may ask of this process while it carries out an ioctl.

Only a process itself knows which of its addresses are good and which of its fds are open, so its memory is touched
here, by a system call that reports a bad page instead of dying of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from tegrad.orin.wire import Message, Op

PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("process_vm_readv", "process_vm_writev"):
    _function = getattr(_libc, _name)
    # pid, local vectors and their count, remote vectors and their count, flags
    _function.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
    _function.restype = ctypes.c_ssize_t


def serve(message: Message) -> Message:
    """Do for the driver what only this process can."""
    if message.op == Op.COPY_IN:
        return Message(Op.COPIED, payload=_read_memory(message.value, message.code))
    if message.op == Op.COPY_OUT:
        return Message(Op.COPIED, code=_write_memory(message.value, message.payload))
    if message.op == Op.GET_FILE:
        return Message(Op.COPIED, fds=[if_open(message.value)])
    if message.op == Op.CLOSE_FD:
        with contextlib.suppress(OSError):
            os.close(message.value)
        return Message(Op.COPIED)
    if message.op == Op.FIND_VMA:
        return Message(Op.COPIED, payload=_find_vma(message.value))
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


def _read_memory(address: int, size: int) -> bytes:
    """As many bytes of this process's memory from `address` on as are readable."""
    data = ctypes.create_string_buffer(size)
    done = _transfer(_libc.process_vm_readv, ctypes.addressof(data), address, size)
    return data.raw[:done]


def _write_memory(address: int, data: bytes) -> int:
    """Store bytes at an address of this process; how many could not be."""
    source = ctypes.create_string_buffer(data, len(data))
    return len(data) - _transfer(_libc.process_vm_writev, ctypes.addressof(source), address, len(data))


def _transfer(call: Any, local: int, remote: int, size: int) -> int:
    """One process_vm_* call on ourselves, whose remote side may be bad; page by page, as it stops between vectors."""
    pages: list[int] = []
    at = remote
    while at < remote + size:
        step = min(PAGE - at % PAGE, remote + size - at)
        pages += [at & 0xFFFFFFFFFFFFFFFF, step]
        at += step
    near = (ctypes.c_uint64 * 2)(local, size)
    far = (ctypes.c_uint64 * len(pages))(*pages)
    done: int = call(os.getpid(), ctypes.byref(near), 1, ctypes.byref(far), len(pages) // 2, 0)
    return max(done, 0)


def _find_vma(address: int) -> bytes:
    """The area of our memory map that holds an address, as JSON; empty if none does."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *path = line.split(None, 5)
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= address < high:
            facts = {"start": low, "end": high, "offset": int(offset, 16), "inode": int(inode)}
            return json.dumps({**facts, "path": path[0] if path else ""}).encode()
    return b""
