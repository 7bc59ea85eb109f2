"""The board's kernel log, in the shape of nvgpu's lines.

`nvgpu: 17000000.gpu <function>:<line> [ERR]  <text>`: the text of a known event follows the driver's
format; the line number is always 0, since there is no driver source here.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from tegrad.orin.steps import Errno

DEVICE = "17000000.gpu"
ERROR, WARNING, INFO = 3, 4, 6  # as the kernel numbers them
MOST_LINES = 4096  # lines; the oldest go first, as in the kernel's ring


class Entry(NamedTuple):
    """One line: its number, when it came (microseconds since the board started), how bad it is, what it says."""

    sequence: int
    us: int
    level: int
    text: str

    def record(self) -> str:
        """The line as /dev/kmsg gives it: priority, number, microseconds, flags, text."""
        return f"{self.level},{self.sequence},{self.us},-;{self.text}\n"


class KernelLog:
    """Lines with rising sequence numbers."""

    def __init__(self) -> None:
        self._began = time.monotonic_ns()
        self._lines: deque[Entry] = deque(maxlen=MOST_LINES)
        self._next = 0
        self._copy: int | None = None

    def copy_to(self, fd: int) -> None:
        """Write every line to a file too, from the first that is kept."""
        self._copy = fd
        for entry in self._lines:
            self._store(entry)

    def write(self, text: str, level: int = ERROR) -> None:
        """Add a line as it stands."""
        entry = Entry(self._next, (time.monotonic_ns() - self._began) // 1000, level, text)
        self._lines.append(entry)
        self._next += 1
        self._store(entry)

    def _store(self, entry: Entry) -> None:
        if self._copy is not None:
            with suppress(OSError):  # a full disk is no reason for a driver to fail
                os.write(self._copy, entry.record().encode())

    def error(self, function: str, text: str) -> None:
        """An error line of nvgpu."""
        self.write(f"nvgpu: {DEVICE} {function}:0 [ERR]  {text}")

    def warn(self, function: str, text: str) -> None:
        """A warning line of nvgpu."""
        self.write(f"nvgpu: {DEVICE} {function}:0 [WRN]  {text}", WARNING)

    def info(self, function: str, text: str) -> None:
        """An informational line of nvgpu."""
        self.write(f"nvgpu: {DEVICE} {function}:0 [INFO]  {text}", INFO)

    def nvmap(self, text: str) -> None:
        """A line of the nvmap driver."""
        self.write(f"nvmap: {text}")

    def board(self, text: str) -> None:
        """What no driver would say: a note of the emulation itself."""
        self.write(f"board: {text}", INFO)

    @contextmanager
    def failing(self, function: str) -> Iterator[None]:
        """The bare line that nvgpu prints when a setup step is refused."""
        try:
            yield
        except Errno:
            self.error(function, "fail")
            raise

    def since(self, sequence: int) -> list[Entry]:
        """Every kept line from this sequence number on."""
        return [entry for entry in self._lines if entry.sequence >= sequence]


def copy_file(folder: str, *, board_ends: bool) -> int:
    """Make the file that keeps the log of the board which this process is about to fork: `STARTER-NUMBER.kmsg`.

    STARTER is the process that asked for the board, NUMBER tells its boards apart. If the board ends by itself, the
    file is locked (flock) until then: who gets the lock has the whole log. OSError where the file cannot be made.
    """
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{os.getppid()}-{os.getpid()}.kmsg")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    if board_ends:
        fcntl.flock(fd, fcntl.LOCK_EX)
    return fd
