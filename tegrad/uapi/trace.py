"""A Kernel that shows every call made through it: decoded arguments, what the driver wrote back, result, duration."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tegrad.hw.gpfifo import DOORBELL, USERMODE_SIZE, decode_token
from tegrad.uapi.errors import DriverError
from tegrad.uapi.fields import call_arguments, snapshot, written_fields
from tegrad.uapi.flags import field_text
from tegrad.uapi.ioctls import Ioctl
from tegrad.uapi.kernel import Arg, Doorbell, Kernel


@dataclass(frozen=True, slots=True)
class Call:
    """One call: `arguments` as they went in, `written` the fields the driver changed, `result` or `error`."""

    name: str
    arguments: Mapping[str, object]
    written: Mapping[str, object]
    result: int | None
    error: str
    seconds: float

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={field_text(self.name, key, value)}" for key, value in self.arguments.items())
        outside = ", ".join(f"{key}={field_text(self.name, key, value)}" for key, value in self.written.items())
        if self.error:
            outcome = self.error
        elif self.result is None:
            outcome = "ok"
        else:
            outcome = str(self.result) if -4096 < self.result < 4096 else f"{self.result:#x}"
        arrow = f" -> {outside}" if outside else ""
        return f"{self.name}({inside}) = {outcome}{arrow} [{self.seconds * 1e6:.0f} us]"


class Tracer:
    """Wraps a Kernel; every finished call, failed ones too, goes to `sink`. Without a sink, `calls` keeps them."""

    def __init__(self, kernel: Kernel, sink: Callable[[Call], None] | None = None) -> None:
        self.kernel = kernel
        self.calls: list[Call] = []
        self.sink = sink or self.calls.append

    def _run(
        self,
        name: str,
        arguments: Mapping[str, object],
        call: Callable[[], int | None],
        written: Callable[[], Mapping[str, object]] = dict,
    ) -> int:
        start = time.perf_counter()
        try:
            result = call()
        except DriverError as e:
            self.sink(Call(name, arguments, {}, None, e.code, time.perf_counter() - start))
            raise
        self.sink(Call(name, arguments, written(), result, "", time.perf_counter() - start))
        return result or 0

    def open(self, path: str, flags: int = os.O_RDWR | os.O_CLOEXEC) -> int:
        """Kernel.open, shown."""
        return self._run("open", {"path": path, "flags": flags}, lambda: self.kernel.open(path, flags))

    def ioctl(self, fd: int, row: Ioctl, arg: Arg = None) -> int:
        """Kernel.ioctl, shown with the fields of its struct."""
        before = snapshot(arg)
        arguments = call_arguments(row, fd, arg)
        return self._run(
            row.name,
            arguments,
            lambda: self.kernel.ioctl(fd, row, arg),
            lambda: written_fields(row, before, snapshot(arg)),
        )

    def mmap(self, fd: int, size: int, prot: int, flags: int, *, addr: int = 0, offset: int = 0) -> int:
        """Kernel.mmap, shown."""
        arguments = {"fd": fd, "size": size, "prot": prot, "flags": flags, "addr": addr, "offset": offset}
        return self._run("mmap", arguments, lambda: self.kernel.mmap(fd, size, prot, flags, addr=addr, offset=offset))

    def munmap(self, addr: int, size: int) -> None:
        """Kernel.munmap, shown."""
        self._run("munmap", {"addr": addr, "size": size}, lambda: self.kernel.munmap(addr, size))

    def msync(self, addr: int, size: int) -> None:
        """Kernel.msync, shown."""
        self._run("msync", {"addr": addr, "size": size}, lambda: self.kernel.msync(addr, size))

    def close(self, fd: int) -> None:
        """Kernel.close, shown."""
        self._run("close", {"fd": fd}, lambda: self.kernel.close(fd))

    def doorbell(self, fd: int, size: int = USERMODE_SIZE) -> "TracedDoorbell":
        """Kernel.doorbell, shown; the registers' stores are shown too."""
        bells: list[Doorbell] = []
        self._run("doorbell", {"fd": fd, "size": size}, lambda: bells.append(self.kernel.doorbell(fd, size)))
        return TracedDoorbell(self, bells[0])

    def exists(self, path: str) -> bool:
        """Kernel.exists, shown."""
        return bool(self._run("exists", {"path": path}, lambda: int(self.kernel.exists(path))))


class TracedDoorbell:
    """A doorbell whose stores show up in the trace, with the token taken apart."""

    def __init__(self, tracer: Tracer, bell: Doorbell) -> None:
        self._tracer = tracer
        self._bell = bell

    def store32(self, offset: int, value: int) -> None:
        """Doorbell.store32, shown."""
        arguments: dict[str, object] = {"offset": offset, "value": value}
        if offset == DOORBELL:
            chid, runlist = decode_token(value)
            arguments |= {"chid": chid, "runlist": runlist}
        self._tracer._run("store32", arguments, lambda: self._bell.store32(offset, value))

    def load32(self, offset: int) -> int:
        """Doorbell.load32, shown."""
        return self._tracer._run("load32", {"offset": offset}, lambda: self._bell.load32(offset))

    def close(self) -> None:
        """Doorbell.close, shown."""
        self._tracer._run("doorbell_close", {}, self._bell.close)
