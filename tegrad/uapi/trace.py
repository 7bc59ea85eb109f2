"""A Kernel that shows every call made through it: decoded arguments, what the driver wrote back, result, duration."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tegrad.hw.gpfifo import DOORBELL, USERMODE_SIZE, decode_token
from tegrad.uapi.errors import DriverError
from tegrad.uapi.fields import call_arguments, snapshot, written_fields
from tegrad.uapi.flags import field_text
from tegrad.uapi.ioctls import BY_NAME, Ioctl
from tegrad.uapi.kernel import Arg, Doorbell, Kernel


@dataclass(frozen=True, slots=True)
class Call:
    """One call: `arguments` as they went in, `written` the fields the driver changed, `result` or `error`.

    `start` is in seconds since 1970. `fds` says what fds are that the call names, where a reader of the trace knows it.
    """

    name: str
    arguments: Mapping[str, object]
    written: Mapping[str, object]
    result: int | None
    error: str
    seconds: float
    pid: int = 0
    thread: int = 0
    start: float = 0.0
    fds: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        inside, outside = self.fields(self.arguments), self.fields(self.written)
        arrow = f" -> {outside}" if outside else ""
        return f"{self.name}({inside}) = {self.outcome}{arrow} [{self.seconds * 1e6:.0f} us]"

    def fields(self, values: Mapping[str, object]) -> str:
        """Fields for a reader: constants by name, fds with what they are."""
        return ", ".join(
            f"{key}={field_text(self.name, key, value)}{self._what(key, value)}" for key, value in values.items()
        )

    @property
    def outcome(self) -> str:
        """The error's name, or the result."""
        if self.error or self.result is None:
            return self.error or "ok"
        if self.name == "open":
            return f"{self.result}{self._what('fd', self.result)}"
        return str(self.result) if -4096 < self.result < 4096 else f"{self.result:#x}"

    def taken(self) -> dict[str, int]:
        """The fds that the call was given, by field."""
        return self._fds(self.arguments)

    def made(self) -> dict[str, int]:
        """The fds that came of it, by field; what `open` returns is `result`."""
        result = {"result": self.result} if self.name == "open" and self.result is not None else {}
        return self._fds(self.written) | result

    def _fds(self, values: Mapping[str, object]) -> dict[str, int]:
        fields = fd_fields(self.name)
        return {key: value for key, value in values.items() if key in fields and isinstance(value, int) and value >= 0}

    def _what(self, key: str, value: object) -> str:
        known = self.fds.get(value) if isinstance(value, int) and key in fd_fields(self.name) else None
        return f"<{known}>" if known else ""


def fd_fields(name: str) -> frozenset[str]:
    """Which fields of a call hold fds."""
    row = BY_NAME.get(name)
    return frozenset(("fd", "arg.fd", *row.fds_in, *row.fds_out)) if row else frozenset(("fd",))


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
        began, start = time.time(), time.perf_counter()

        def show(changed: Mapping[str, object], result: int | None, error: str = "") -> None:
            seconds = time.perf_counter() - start
            who = os.getpid(), threading.get_native_id()
            self.sink(Call(name, arguments, changed, result, error, seconds, *who, began))

        try:
            result = call()
        except DriverError as e:
            show({}, None, e.code)
            raise
        show(written(), result)
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
        self._tracer._run("store32", store_arguments(offset, value), lambda: self._bell.store32(offset, value))

    def load32(self, offset: int) -> int:
        """Doorbell.load32, shown."""
        return self._tracer._run("load32", {"offset": offset}, lambda: self._bell.load32(offset))

    def close(self) -> None:
        """Doorbell.close, shown."""
        self._tracer._run("doorbell_close", {}, self._bell.close)


def store_arguments(offset: int, value: int) -> dict[str, object]:
    """What to show of a store to the usermode registers: the doorbell's token taken apart."""
    arguments: dict[str, object] = {"offset": offset, "value": value}
    if offset == DOORBELL:
        arguments["chid"], arguments["runlist"] = decode_token(value)
    return arguments
