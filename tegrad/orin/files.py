"""What every driver module shares: open files, one ioctl call in progress, and how a request number is decoded.

A handler is `handler(file, call)`: it checks, acts and returns None (0) or a positive count, or raises `Errno`. A
handler that needs the caller's memory, one of its fds or time is a generator that yields a `CopyIn`, `CopyOut`,
`GetFile`, `CloseFd`, `FindVma` or `Until`; meanwhile the board serves other callers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import socket
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tegrad.orin.wire import CHUNK
from tegrad.uapi.ioctls import LAST_NR, MAGIC, MAX_ARG_SIZE, Ioctl

if TYPE_CHECKING:
    from tegrad.orin.driver import Driver
    from tegrad.orin.nvmap import Buffer

T = TypeVar("T")


class Errno(Exception):
    """The ioctl fails with this errno; nothing is copied back."""

    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode.get(number, str(number)))
        self.number = number


def require(condition: object, number: int = errno.EINVAL) -> None:
    """Fail the ioctl with `number` unless the condition holds."""
    if not condition:
        raise Errno(number)


def needed(value: T | None, number: int = errno.EINVAL) -> T:
    """The value; fail the ioctl with `number` where there is none."""
    if value is None:
        raise Errno(number)
    return value


def signed(word: int) -> int:
    """A 32-bit word of user memory as the fd number that the kernel makes of it."""
    return (word & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)


# ---- what a generator handler may yield --------------------------------------------------------------------------


@dataclass(slots=True)
class CopyIn:
    """Read the caller's memory (at most CHUNK bytes); resumes with the bytes that could be read."""

    address: int
    size: int


@dataclass(slots=True)
class CopyOut:
    """Write the caller's memory (at most CHUNK bytes); resumes with the count that could not be written."""

    address: int
    data: bytes


@dataclass(slots=True)
class GetFile:
    """Look up an fd number in the caller's table; resumes with what `Driver.resolve` makes of it, or None.

    `unwritable`: afterwards, whether it was not opened for writing.
    """

    fd: int
    unwritable: bool = False


@dataclass(slots=True)
class CloseFd:
    """Close an fd number in the caller's table; resumes with None."""

    fd: int


@dataclass(slots=True)
class FindVma:
    """Look up an address in the caller's memory map; resumes with a `Vma` or None."""

    address: int


@dataclass(frozen=True, slots=True)
class Vma:
    """One line of a process's memory map."""

    start: int
    end: int
    offset: int
    inode: int
    path: str

    def file_offset(self, address: int) -> int:
        """Where in the file an address of this area lies."""
        return self.offset + address - self.start


class WaitQueue:
    """Callers that sleep until something happens to an object."""

    def __init__(self) -> None:
        self.waiters: list[Callable[[], None]] = []

    def wake(self) -> None:
        """Let every waiter look again."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter()


@dataclass(slots=True)
class Until:
    """Sleep until the queue is woken or the monotonic deadline passes; resumes with False at the deadline."""

    queue: WaitQueue | None
    deadline: float | None


Request = CopyIn | CopyOut | GetFile | CloseFd | FindVma | Until
Steps = Generator[Request, Any, int | None]
Handler = Callable[[Any, "Call"], "Steps | int | None"]
Table = Mapping[int, Handler]


def copy_in(address: int, size: int) -> Generator[Request, Any, bytes]:
    """copy_from_user: all of the bytes, or Errno(EFAULT)."""
    data, left = yield from copy_in_partly(address, size)
    require(left == 0, errno.EFAULT)
    return data


def copy_in_partly(address: int, size: int) -> Generator[Request, Any, tuple[bytes, int]]:
    """copy_from_user that tells: the bytes read, and how many could not be."""
    data = bytearray()
    while len(data) < size:
        want = min(CHUNK, size - len(data))
        chunk: bytes = yield CopyIn(address + len(data), want)
        data += chunk
        if len(chunk) < want:
            break
    return bytes(data), size - len(data)


def copy_out(address: int, data: bytes) -> Generator[Request, Any, int]:
    """copy_to_user: how many bytes could not be written (0 when all were)."""
    done = 0
    while done < len(data):
        chunk = data[done : done + CHUNK]
        left: int = yield CopyOut(address + done, chunk)
        done += len(chunk) - left
        if left:
            break
    return len(data) - done


# ---- files and calls ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Process:
    """A client process as the drivers know it."""

    token: str
    pid: int
    comm: str


class File:
    """An open file of a driver. `release` runs once, after the last fd is closed and the last call on it has ended."""

    kind: ClassVar[str]
    _serials = itertools.count(1)

    def __init__(self, driver: Driver, process: Process) -> None:
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
