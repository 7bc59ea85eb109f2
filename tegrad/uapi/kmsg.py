"""Records of the kernel log, /dev/kmsg, through the Kernel seam (Documentation/ABI/testing/dev-kmsg).

The board answers an open of /dev/kmsg with its own log in the same form, so a reader need not know which one it has.
"""

import errno
import os
import re
import select
from collections.abc import Iterator
from typing import NamedTuple

from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import Kernel

PATH = "/dev/kmsg"
RECORD_MAX = 8192
LEVEL_MASK = 7  # the facility stands above it
_HEAD = re.compile(r"(\d+),(\d+),(\d+),[^;]*;(.*)")


class LogRecord(NamedTuple):
    """One line: its number, microseconds since boot, syslog level (3 is an error, 6 information), its text."""

    sequence: int
    us: int
    level: int
    text: str


def records(kernel: Kernel, since: int = 0, *, follow: bool = False) -> Iterator[LogRecord]:
    """What the log holds now from sequence number `since` on, and with `follow` what comes after it, without end.

    A board's log is a copy, which ends all the same. DriverError where the log may not be read.
    """
    fd = kernel.open(PATH, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while (text := _read(fd)) or (follow and text is None):
            if text is None:
                select.select([fd], [], [])
                continue
            yield from (record for line in text.splitlines() if (record := parse(line)) and record.sequence >= since)
    finally:
        kernel.close(fd)


def parse(line: str) -> LogRecord | None:
    """A record of `priority,sequence,microseconds,flags;text`; None for the dictionary lines that follow one."""
    match = _HEAD.fullmatch(line)
    if match is None:
        return None
    return LogRecord(int(match[2]), int(match[3]), int(match[1]) & LEVEL_MASK, match[4])


def _read(fd: int) -> str | None:
    """The next whole lines; None where there is none yet, "" at the end of a copy."""
    data = b""
    while True:
        try:
            chunk = os.read(fd, RECORD_MAX)
        except BlockingIOError:
            return data.decode(errors="replace") or None
        except OSError as error:
            if error.errno == errno.EPIPE:  # overwritten before it was read: the next one follows
                continue
            raise DriverError("read", error.errno or 0, {"path": PATH}) from None
        data += chunk
        if not chunk or chunk.endswith(b"\n"):
            break
    return data.decode(errors="replace")
