"""What every driver module shares: open files, one ioctl call in progress, and how a request number is decoded.

A handler is `handler(file, call)`: it checks, acts and returns None (0) or a positive count, or raises `Errno`. One
that has to wait for its caller is a generator (`steps`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tegrad.orin.buffers import Buffer
from tegrad.orin.state import DriverState
from tegrad.orin.steps import Errno, Process, Steps
from tegrad.uapi.ioctls import LAST_NR, MAGIC, MAX_ARG_SIZE, Ioctl


class File:
    """An open file of a driver. `release` runs once, after the last fd is closed and the last call on it has ended."""

    kind: ClassVar[str]
    _serials = itertools.count(1)

    def __init__(self, driver: DriverState, process: Process) -> None:
        self.driver = driver
        self.process = process
        self.serial = next(File._serials)
        self.calls = 0
        self.sock: socket.socket | None = None
        self.inode = (0, 0)
        self.readable = False

    def make_readable(self) -> None:
        """Let poll() on the client's fd report POLLIN from now on."""
        self.readable = True
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.send(b"\1", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def release(self) -> None:
        """Give back what the file holds, as the driver's release function does."""


class Foreign:
    """An open fd of the caller that is neither one of the board's files nor an nvmap buffer."""


FOREIGN = Foreign()


@dataclass(slots=True)
class Call:
    """One ioctl: its row, its argument block and what it produces."""

    row: Ioctl
    arg: Any
    value: int = 0
    files: dict[str, File | Buffer | Foreign | None] = field(default_factory=dict)
    unwritable: frozenset[str] = frozenset()
    """The fd fields whose fds were not opened for writing."""
    new: dict[str, File | int] = field(default_factory=dict)
    copy_back: bool = False
    copy_back_always: bool = False  # also after a failure

    def file(self, name: str, kind: type[File]) -> Any:
        """The file of an fd field: None unless it is open and of that kind."""
        found = self.files.get(name)
        return found if isinstance(found, kind) else None

    def install(self, name: str, made: File | int) -> None:
        """Give the caller a new fd in the named field: a file's, or a duplicate of one of the board's own."""
        self.new[name] = made


Handler = Callable[[Any, Call], Steps | int | None]
"""Carries out one call; the file is one of the handler's own kind."""
Table = dict[int, Handler]
"""Handlers by request number."""


# ---- decoding -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decoder:
    """How a driver's entry function takes a request number apart (ioctl_ctrl.c and its kin, nvmap_dev.c)."""

    magic: str
    first: int
    last: int
    max_size: int | None
    outside: int

    def check(self, request: int) -> None:
        """Raise the errno of a request that this driver cannot have."""
        number, size = request & 0xFF, request >> 16 & 0x3FFF
        alien = chr(request >> 8 & 0xFF) != self.magic or not self.first <= number <= self.last
        if alien or (self.max_size is not None and size > self.max_size):
            raise Errno(self.outside)


DECODERS = {
    kind: Decoder(magic, 1, LAST_NR[kind], MAX_ARG_SIZE[kind], errno.EINVAL)
    if kind in MAX_ARG_SIZE
    else Decoder(magic, 0, LAST_NR.get(kind, 255), None, errno.ENOTTY)
    for kind, magic in MAGIC.items()
}


def block(row: Ioctl, payload: bytes) -> Any:
    """The kernel's copy of an argument block: zeroed, and filled from the caller when the request says so."""
    if row.struct is None:
        return None
    arg = row.struct()
    if reads_caller(row):
        ctypes.memmove(ctypes.byref(arg), payload, min(len(payload), ctypes.sizeof(arg)))
    return arg


def reads_caller(row: Ioctl) -> bool:
    """Whether the driver copies the block in: nvmap always, the others by the request's W bit."""
    return row.fd_kind == "nvmap" or bool(row.request >> 30 & 1)


def writes_caller(row: Ioctl) -> bool:
    """Whether the driver copies the block back after success: by the request's R bit."""
    return bool(row.request >> 31 & 1)
