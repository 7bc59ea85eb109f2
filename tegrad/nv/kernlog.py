"""The address of a GPU fault, out of the kernel log: nvgpu has no ioctl that tells it.

Reading /dev/kmsg often needs a privilege; without it a fault is reported without its address.
"""

import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress

from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import Kernel

KMSG = "/dev/kmsg"
RECORD_MAX = 8192
MMU_FAULT = re.compile(r"\[MMU FAULT\].*ch id:\s*(\d+), fault addr:\s*(0x[0-9a-fA-F]+)")
"""nvgpu's first line of an MMU fault: channel and page address."""


def fault_address(kernel: Kernel, channels: Collection[int]) -> int | None:
    """The page address of the last MMU fault of one of these channels (by id), or None if the log does not say."""
    found = None
    for line in _lines(kernel):
        match = MMU_FAULT.search(line)
        if match and int(match[1]) in channels:
            found = int(match[2], 16)
    return found


def _lines(kernel: Kernel) -> Iterator[str]:
    """What the log holds, without waiting for more; nothing if it may not be read."""
    with suppress(DriverError):
        fd = kernel.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while record := _read(fd):
                yield from record.decode(errors="replace").splitlines()
        finally:
            kernel.close(fd)


def _read(fd: int) -> bytes:
    """The next record or records; b"" at the end."""
    while True:
        try:
            return os.read(fd, RECORD_MAX)
        except OSError as error:
            if error.errno != errno.EPIPE:  # the record was overwritten meanwhile: the next one follows
                return b""
