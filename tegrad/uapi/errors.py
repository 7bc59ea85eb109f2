"""The error of a failed system call at the driver's boundary: what was called, with which arguments, and what to do."""

import errno
import os
from collections.abc import Mapping

from tegrad.errors import TegradError
from tegrad.uapi.fields import call_arguments
from tegrad.uapi.flags import field_text
from tegrad.uapi.hints import ioctl_hint
from tegrad.uapi.ioctls import Ioctl


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

    @property
    def code(self) -> str:
        """The symbolic error number, such as "EINVAL"."""
        return errno.errorcode.get(self.errno or 0, str(self.errno))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.errno, self.arguments, self.hint)

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={field_text(self.name, key, value)}" for key, value in self.arguments.items())
        text = f"{self.name}({shown}) failed: {self.code} ({self.strerror})"
        return f"{text}: {self.hint}" if self.hint else text


def ioctl_error(row: Ioctl, fd: int, arg: object, code: int) -> DriverError:
    """The error for an ioctl that failed with `code`: its arguments that matter, and what to do about it."""
    return DriverError(row.name, code, call_arguments(row, fd, arg), ioctl_hint(row.name, code))
