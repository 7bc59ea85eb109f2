"""From the lines of a trace to calls, with the names of the fds that each has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress

from tegrad.diag.trace.fds import Fds
from tegrad.diag.trace.raw import Decoder
from tegrad.diag.trace.strace import Log
from tegrad.uapi.trace import Call
from tegrad.uapi.tracefile import from_json


def calls(lines: Iterable[str]) -> Iterator[Call]:
    """The calls of a trace, as they come: JSON lines of ours, or what strace prints.

    A line that is none of a driver's, or is cut off, is passed over.
    """
    fds, log = Fds(), Log()
    decoder = Decoder(fds)
    for line in lines:
        if not line.startswith("{"):
            raw = log.raw(line)
            call = decoder.call(raw) if raw else None
            if call:
                yield call
            continue
        with suppress(ValueError, TypeError, KeyError, AttributeError, AssertionError):
            record = json.loads(line)
            if "process" in record:
                fds.forked(record["process"], record["parent"])
            else:
                yield fds.name(from_json(record))
