"""From the lines of a trace to calls, with the names of the fds that each has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePosixPath

from tegrad.uapi.trace import Call
from tegrad.uapi.tracefile import from_json

MADE = {"NVMAP_GET_FD": "dmabuf"}
"""What the fd is that an ioctl makes, where the field's name does not say it (`channel_fd`)."""


class Fds:
    """What the fds of every process are, as far as the trace has shown it."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, str]] = {}

    def forked(self, pid: int, parent: int) -> None:
        """A process that was not seen before has its parent's fds."""
        self._known.setdefault(pid, dict(self._known.get(parent, {})))

    def name(self, call: Call) -> Call:
        """The call with the names of its fds, which it may change for those that come after it."""
        known = self._known.setdefault(call.pid, {})
        known.update(call.fds)
        taken, made = call.taken(), call.made()
        for field, fd in made.items():
            known[fd] = MADE.get(call.name, field.rpartition(".")[2].removesuffix("_fd"))
        if "result" in made:
            known[made["result"]] = PurePosixPath(str(call.arguments["path"])).name
        shown = replace(call, fds={fd: known[fd] for fd in (*taken.values(), *made.values()) if fd in known})
        if call.name == "close":
            known.pop(taken.get("fd", -1), None)
        return shown


def calls(lines: Iterable[str]) -> Iterator[Call]:
    """The calls of a trace of ours, as they come. A line that is none, or is cut off, is passed over."""
    fds = Fds()
    for line in lines:
        with suppress(ValueError, TypeError, KeyError, AttributeError, AssertionError):
            record = json.loads(line)
            if "process" in record:
                fds.forked(record["process"], record["parent"])
            else:
                yield fds.name(from_json(record))
