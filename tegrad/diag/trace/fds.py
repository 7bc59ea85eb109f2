"""What the fds of a trace are: followed from the calls that make them to those that close them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath

from tegrad.uapi.ioctls import BY_NAME
from tegrad.uapi.trace import Call

MADE = {"NVMAP_GET_FD": "dmabuf"}
"""What the fd is that an ioctl makes, where the field's name does not say it (`channel_fd`)."""


class Fds:
    """What the fds of every process are, as far as the trace has shown it."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, str]] = {}

    def forked(self, pid: int, parent: int) -> None:
        """A process that was not seen before has its parent's fds."""
        self._known.setdefault(pid, dict(self._known.get(parent, {})))

    def known(self, pid: int) -> Mapping[int, str]:
        """The fds of a process that are known, with what they are."""
        return self._known.get(pid, {})

    def name(self, call: Call) -> Call:
        """The call with the names of its fds, which it may change for those that come after it."""
        known = self._known.setdefault(call.pid, {})
        known.update(call.fds)
        taken, made = call.taken(), call.made()
        if (row := BY_NAME.get(call.name)) and "fd" in taken:
            known.setdefault(taken["fd"], row.fd_kind)
        for field, fd in made.items():
            known[fd] = MADE.get(call.name, field.rpartition(".")[2].removesuffix("_fd"))
        if "result" in made:
            known[made["result"]] = PurePosixPath(str(call.arguments["path"])).name
        shown = replace(call, fds={fd: known[fd] for fd in (*taken.values(), *made.values()) if fd in known})
        if call.name == "close":
            known.pop(taken.get("fd", -1), None)
        return shown
