"""What a handler of an ioctl may answer, and what it may wait for: its caller's memory, one of its fds, or time.

A handler that waits is a generator that yields a `CopyIn`, `CopyOut`, `GetFile`, `CloseFd`, `FindVma` or `Until`;
meanwhile the board serves other callers.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from tegrad.orin.wire import CHUNK

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

    def leave(self, waiter: Callable[[], None]) -> None:
        """Wait no more; harmless for one that was woken."""
        if waiter in self.waiters:
            self.waiters.remove(waiter)


@dataclass(slots=True)
class Until:
    """Sleep until the queue is woken or the monotonic deadline passes; resumes with False at the deadline."""

    queue: WaitQueue | None
    deadline: float | None


Request = CopyIn | CopyOut | GetFile | CloseFd | FindVma | Until
Steps = Generator[Request, Any, int | None]


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


@dataclass(slots=True)
class Process:
    """A client process as the drivers know it."""

    token: str
    pid: int
    comm: str
