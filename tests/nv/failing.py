"""A Kernel whose calls fail on demand, and which knows the line of tegrad/nv that made each call."""

import ast
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import tegrad.nv
from tegrad.hw.gpfifo import USERMODE_SIZE
from tegrad.uapi import kmsg
from tegrad.uapi.errors import DriverError, ioctl_error
from tegrad.uapi.hints import ioctl_hint
from tegrad.uapi.ioctls import Ioctl
from tegrad.uapi.kernel import Arg, Doorbell, Kernel, _open_hint

NV = Path(tegrad.nv.__file__).parent
CALLERS = [*sorted(NV.glob("*.py")), Path(kmsg.__file__)]
"""The files whose calls of the Kernel are told apart by line."""
KERNELS = {"kernel", "_kernel", "_doorbell"}
"""What those files call a Kernel, or a doorbell that one gave."""
SEAM = {"open", "ioctl", "mmap", "munmap", "close", "doorbell"}

Site = tuple[str, int]
"""A file of CALLERS and a line: where the Kernel's method was looked up."""


@dataclass(frozen=True)
class Call:
    """One call: its name, which of that name it is (from 1), where it comes from, whether a sleeping wait made it."""

    name: str
    nth: int
    site: Site | None
    asleep: bool = False


Origin = tuple[Site | None, bool]


def origin(frame: FrameType | None) -> Origin:
    """The site of a frame, and whether a waker is among its callers."""
    assert frame is not None
    path, line, asleep = Path(frame.f_code.co_filename), frame.f_lineno, False
    while frame is not None and not asleep:
        asleep, frame = frame.f_code.co_name in ("sleep", "works"), frame.f_back
    return ((path.name, line) if path in CALLERS else None), asleep


def sites() -> set[Site]:
    """Every line of CALLERS that names a method of a Kernel or of a doorbell."""
    found = set()
    for path in CALLERS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in SEAM and _name(node.value) in KERNELS:
                found.add((path.name, node.lineno))
    return found


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def seam(method: Callable[..., Any]) -> Any:
    """A method that is told where it was looked up: for a callback, too, that is the line that names it."""
    return property(lambda self: functools.partial(method, self, origin(sys._getframe(1))))


class FailingKernel:
    """Implements tegrad.uapi.kernel.Kernel over another one.

    `fail` decides with which errno a call fails (0: it is made). A close that fails has closed the fd, as in Linux; an
    munmap that fails leaves the mapping, and `stranded` knows it.
    """

    def __init__(self, kernel: Kernel, fail: Callable[[Call], int] = lambda call: 0) -> None:
        self.kernel = kernel
        self.fail = fail
        self.calls: list[Call] = []
        self.struck: list[Call] = []
        self.stranded: list[tuple[int, int]] = []
        self._counts: Counter[str] = Counter()

    def _strike(self, name: str, site: Origin) -> int:
        self._counts[name] += 1
        call = Call(name, self._counts[name], *site)
        self.calls.append(call)
        code = self.fail(call)
        if code:
            self.struck.append(call)
        return code

    def _open(self, site: Origin, path: str, flags: int = os.O_RDWR | os.O_CLOEXEC) -> int:
        if code := self._strike(f"open {path}", site):
            raise DriverError("open", code, {"path": path}, _open_hint(path, code))
        return self.kernel.open(path, flags)

    def _ioctl(self, site: Origin, fd: int, row: Ioctl, arg: Arg = None) -> int:
        if code := self._strike(row.name, site):
            raise ioctl_error(row, fd, arg, code)
        return self.kernel.ioctl(fd, row, arg)

    def _mmap(self, site: Origin, fd: int, size: int, *args: int, **kwargs: int) -> int:
        if code := self._strike("mmap", site):
            raise DriverError("mmap", code, {"fd": fd, "size": size}, ioctl_hint("mmap", code))
        return self.kernel.mmap(fd, size, *args, **kwargs)

    def _munmap(self, site: Origin, addr: int, size: int) -> None:
        if code := self._strike("munmap", site):
            self.stranded.append((addr, size))
            raise DriverError("munmap", code, {"addr": addr, "size": size}, ioctl_hint("munmap", code))
        self.kernel.munmap(addr, size)

    def _close(self, site: Origin, fd: int) -> None:
        code = self._strike("close", site)
        self.kernel.close(fd)
        if code:
            raise DriverError("close", code, {"fd": fd}, ioctl_hint("close", code))

    def _doorbell(self, site: Origin, fd: int, size: int = USERMODE_SIZE) -> Doorbell:
        if code := self._strike("doorbell", site):
            raise DriverError("mmap", code, {"fd": fd, "size": size}, ioctl_hint("mmap", code))
        return FailingDoorbell(self, self.kernel.doorbell(fd, size))

    open, ioctl, mmap, munmap = seam(_open), seam(_ioctl), seam(_mmap), seam(_munmap)
    close, doorbell = seam(_close), seam(_doorbell)

    def exists(self, path: str) -> bool:
        return self.kernel.exists(path)

    def clean_up(self) -> None:
        """Unmap what munmaps that failed left behind."""
        while self.stranded:
            self.kernel.munmap(*self.stranded.pop())


class FailingDoorbell:
    def __init__(self, owner: FailingKernel, doorbell: Doorbell) -> None:
        self._owner, self._doorbell = owner, doorbell

    def store32(self, offset: int, value: int) -> None:
        self._doorbell.store32(offset, value)

    def load32(self, offset: int) -> int:
        return self._doorbell.load32(offset)

    def _close(self, site: Origin) -> None:
        code = self._owner._strike("doorbell.close", site)
        self._doorbell.close()
        if code:
            raise DriverError("munmap", code, {}, ioctl_hint("munmap", code))

    close = seam(_close)


@contextmanager
def failing(fail: Callable[[Call], int]) -> Iterator[FailingKernel]:
    """Put a FailingKernel in front of the one that the next device would meet."""
    import pytest

    from tegrad.nv import iface

    kernel = FailingKernel(iface.pick_kernel(), fail)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iface, "pick_kernel", lambda: kernel)
        yield kernel
