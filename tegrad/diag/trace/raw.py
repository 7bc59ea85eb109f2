"""Calls as the kernel sees them (numbers, blocks of bytes), which strace and the preload library record, decoded."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from tegrad.diag.trace.fds import Fds
from tegrad.uapi import desktop
from tegrad.uapi.fields import call_arguments, snapshot, written_fields
from tegrad.uapi.ioctls import ROWS, Ioctl, request_size
from tegrad.uapi.trace import Call, store_arguments
from tegrad.uapi.tracefile import DRIVER_FILES

BY_REQUEST: Mapping[int, Ioctl] = {row.request: row for row in ROWS}

DRIVERS = re.compile("|".join((*DRIVER_FILES, "/?dmabuf", "anon_inode:.*(nvgpu|nvhost|sync_file)")))
"""Files of the GPU's drivers, as /proc names them."""
TERMINALS = re.compile(r"/dev/(pts/|tty|ptmx|console)")
"""Files whose ioctls have numbers of nvgpu's (TCSETSW is TSG_IOCTL_ENABLE)."""

DMA_BUF_SYNC = 0x40086200
"""The kernel's own ioctl of a dmabuf: a struct of flags."""


@dataclass(slots=True)
class Raw:
    """A system call. `arguments` of an ioctl has its fd alone; `paths` is what /proc says of fds."""

    name: str
    pid: int
    thread: int
    start: float
    seconds: float
    arguments: dict[str, Any]
    result: int | None
    error: str
    request: int = 0
    value: int = 0
    """The ioctl's last argument: an address, or a number."""
    before: bytes = b""
    after: bytes = b""
    """The block at that address, as far as it is known."""
    paths: Mapping[int, str] = field(default_factory=dict)


def from_preload(record: Mapping[str, Any]) -> Raw:
    """What the preload library wrote of a call. KeyError, ValueError where it is none of that."""
    fields = dict(record)
    name, pid, thread, start, seconds = (fields.pop(key) for key in ("call", "pid", "thread", "start", "seconds"))
    number = fields.pop("errno", 0)
    error = errno.errorcode.get(number, str(number)) if number else ""
    raw = Raw(name, pid, thread, start, seconds, {}, fields.pop("result", None), error)
    raw.request, raw.value = fields.pop("request", 0), fields.pop("value", 0)
    raw.before, raw.after = (bytes.fromhex(fields.pop(key, "")) for key in ("before", "after"))
    if raw.name != "open" and "path" in fields:
        raw.paths = {fields["fd"]: fields.pop("path")}
    raw.arguments = store_arguments(fields["offset"], raw.value) if raw.name == "store32" else fields
    return raw


class Decoder:
    """Picks the drivers' calls out of a stream of system calls, and decodes them."""

    def __init__(self, fds: Fds) -> None:
        self._fds = fds
        self._mapped: dict[int, set[int]] = {}

    def call(self, raw: Raw) -> Call | None:
        """The call, or None for one that is not a driver's."""
        if not self._ours(raw):
            return None
        if raw.name == "mmap" and raw.result is not None:
            self._mapped.setdefault(raw.pid, set()).add(raw.result)
        name, arguments, written = raw.name, dict(raw.arguments), dict[str, object]()
        labels = {fd: what for fd, path in raw.paths.items() if (what := label(path))}
        if raw.name == "ioctl":
            fd = raw.arguments["fd"]
            on_desktop = (labels.get(fd) or self._fds.known(raw.pid).get(fd, "")).startswith("nvidia")
            name, arguments, written = desktop_ioctl(raw) if on_desktop else ioctl(raw)
        who = raw.pid, raw.thread, raw.start
        return self._fds.name(Call(name, arguments, written, raw.result, raw.error, raw.seconds, *who, labels))

    def _ours(self, raw: Raw) -> bool:
        fd = raw.arguments.get("fd", -1)
        path = raw.paths.get(fd, "")
        if raw.name == "open":
            return bool(DRIVERS.match(raw.arguments["path"]))
        if raw.name == "store32":
            return True
        if raw.name == "munmap":
            return raw.arguments["addr"] in self._mapped.get(raw.pid, ())
        if DRIVERS.match(path) or (raw.name == "ioctl" and raw.request in BY_REQUEST and not TERMINALS.match(path)):
            return True
        return not path.startswith("/") and fd in self._fds.known(raw.pid)


def label(path: str) -> str:
    """What a file is in a word; "" where its name does not say it."""
    if path.startswith("/dev/"):
        return PurePosixPath(path).name
    return "dmabuf" if "dmabuf" in path else "fence" if "sync_file" in path else ""


def ioctl(raw: Raw) -> tuple[str, dict[str, Any], dict[str, object]]:
    """Name, arguments and written fields of an ioctl."""
    fd, row = raw.arguments["fd"], BY_REQUEST.get(raw.request)
    if raw.request == DMA_BUF_SYNC:
        return "DMA_BUF_SYNC", {"fd": fd, "flags": int.from_bytes(raw.before, "little")}, {}
    if row is None:
        return "ioctl", {"fd": fd, "request": raw.request, **_where(raw)}, {}
    if row.struct is None or row.by_value:
        return row.name, call_arguments(row, fd, raw.value if row.by_value else None), {}
    given = bytes(row.size) if row.direction == "r" else raw.before
    if len(given) < row.size:
        return row.name, {"fd": fd, **_where(raw)}, {}
    arg = row.struct.from_buffer_copy(given)
    arguments = call_arguments(row, fd, arg)
    if raw.error or len(raw.after) < row.size:
        return row.name, arguments, {}
    return row.name, arguments, written_fields(row, snapshot(arg), snapshot(row.struct.from_buffer_copy(raw.after)))


def desktop_ioctl(raw: Raw) -> tuple[str, dict[str, Any], dict[str, object]]:
    """The same of an ioctl on /dev/nvidia*: its name, its size, the handles, class or command that its block names."""
    name = desktop.name(raw.request)
    known = name != "ioctl"
    size = {"size": size} if (size := request_size(raw.request) if raw.request >> 8 & 0xFF else 0) else {}
    arguments = {"fd": raw.arguments["fd"], **({} if known else {"request": raw.request}), **size}
    made = desktop.fields(name, raw.after)
    written: dict[str, object] = {
        field: value for field, value in made.items() if value != desktop.fields(name, raw.before).get(field)
    }
    refused = desktop.status(name, raw.after)
    return name, arguments | desktop.fields(name, raw.before), written | ({"status": refused} if refused else {})


def _where(raw: Raw) -> dict[str, object]:
    """What there is to say of a block that is not decoded."""
    block = {"block": raw.before.hex()} if raw.before else {"at": raw.value} if raw.value else {}
    return {**block, **({"size": request_size(raw.request)} if block else {})}
