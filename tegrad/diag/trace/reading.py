"""From the lines of a trace to calls, with the names of the fds that each has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress

from tegrad.diag.trace.fds import Fds
from tegrad.diag.trace.raw import Decoder, from_preload
from tegrad.diag.trace.strace import Log
from tegrad.uapi.trace import Call
from tegrad.uapi.tracefile import from_json


def calls(lines: Iterable[str]) -> Iterator[Call]:
    """The calls of a trace, as they come: JSON lines of ours and of the preload library, or what strace prints.

    A line that is none of a driver's, or is cut off, is passed over.
    """
    fds, log = Fds(), Log()
    decoder = Decoder(fds)
    for line in lines:
        raw = None if line.startswith("{") else log.raw(line)
        with suppress(ValueError, TypeError, KeyError, AttributeError, AssertionError):
            record = json.loads(line) if raw is None else {}
            if "call" in record:
                raw = from_preload(record)
            elif "process" in record:
                fds.forked(record["process"], record["parent"])
            elif record:
                yield fds.name(from_json(record))
        if raw is not None and (call := decoder.call(raw)):
            yield call
