"""The error of a failed system call at the driver's boundary: what was called, with which arguments, and what to do."""

import errno
import os
from collections.abc import Mapping

from tegrad.errors import TegradError


class DriverError(TegradError, OSError):
    """A system call to the driver failed.

    `name` is the ioctl's short name, or `open`, `mmap`, `munmap`, `close`; `errno` the error number; `arguments` those
    that matter; `hint` what to do next ("" if nothing is known). It is an OSError too, so that `errno` and `strerror`
    mean what they always mean.
    """

    def __init__(self, name: str, errno_: int, arguments: Mapping[str, object] | None = None, hint: str = "") -> None:
        self.name = name
        self.arguments = dict(arguments or {})
        self.hint = hint
        OSError.__init__(self, errno_, os.strerror(errno_))

    def __str__(self) -> str:
        code = errno.errorcode.get(self.errno or 0, str(self.errno))
        shown = ", ".join(f"{key}={show(value)}" for key, value in self.arguments.items())
        text = f"{self.name}({shown}) failed: {code} ({self.strerror})"
        return f"{text}. {self.hint}" if self.hint else text


def show(value: object) -> str:
    """A value for a message: integers of two digits and more in hexadecimal, except errno-like small ones."""
    if isinstance(value, bool) or not isinstance(value, int):
        return repr(value) if isinstance(value, str) else str(value)
    return str(value) if -4096 < value < 4096 else f"{value:#x}"
