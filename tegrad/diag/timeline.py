"""Spans of time of a GPU and its host: as a table, and as a trace that ui.perfetto.dev and chrome://tracing open.

Times are microseconds of one clock. Where a span's work is known in bytes, or was counted by an emulated board, the
table tells it; what is not known is left out, not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any, Final

COUNTED: Final = ("instructions", "bytes_read", "bytes_written", "l2_fills", "l2_reports")
"""A board's names of a `Counts`, in order."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What an emulated board counts of a kernel's launches: instructions of lanes, bytes that lanes read and wrote,
    sectors that came into the L2, and stale loads, if the board tells of them."""

    instructions: int = 0
    read: int = 0
    written: int = 0
    fills: int = 0
    stale: int = 0

    @classmethod
    def of(cls, counted: Mapping[str, int]) -> Counts:
        """A board's counts of a kernel (orin/grid.py)."""
        return cls(*(counted.get(name, 0) for name in COUNTED))

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(ours - theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time: on which track of which process it is shown, and under which name it is summed."""

    track: str
    name: str
    begin: float
    us: float
    bytes: int | None = None
    """That it has to read or copy, where that is known."""
    counts: Counts | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    """What else a trace shows of it."""
    process: str = ""


@dataclass(slots=True)
class Row:
    """Spans of one name together."""

    name: str
    count: int = 0
    us: float = 0.0
    bytes: int | None = 0
    """None where it is not known of one of them."""
    counts: Counts | None = field(default_factory=Counts)

    def add(self, span: Span) -> None:
        """One more."""
        self.count += 1
        self.us += span.us
        self.bytes = None if self.bytes is None or span.bytes is None else self.bytes + span.bytes
        self.counts = None if self.counts is None or span.counts is None else self.counts + span.counts


def rows(spans: Iterable[Span], key: Callable[[Span], str] = lambda span: span.name) -> list[Row]:
    """A row for each key, in the order of their first span."""
    found: dict[str, Row] = {}
    for span in spans:
        found.setdefault(key(span), Row(key(span))).add(span)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Scale:
    """What a table's numbers stand beside."""

    times: int = 1
    """By how many tokens, or repetitions, everything is divided."""
    peak: float | None = None
    """Bytes a second that memory gives at most; None: no speed is told."""
    instructions: int = 0
    """Of all rows together."""


def _share(row: Row, whole: float, scale: Scale) -> str:
    return f"{row.us / whole:.1%}" if whole else ""


def _speed(row: Row, whole: float, scale: Scale) -> str:
    return f"{row.bytes / row.us / 1e3:.1f}" if scale.peak and row.bytes and row.us > 0 else ""


def _of_peak(row: Row, whole: float, scale: Scale) -> str:
    return f"{row.bytes / row.us * 1e6 / scale.peak:.0%}" if scale.peak and row.bytes and row.us > 0 else ""


def _of_all(row: Row, whole: float, scale: Scale) -> str:
    return f"{row.counts.instructions / scale.instructions:.1%}" if row.counts and scale.instructions else ""


def _counted(pick: Callable[[Counts], int]) -> Callable[[Row, float, Scale], str]:
    return lambda row, whole, scale: f"{pick(row.counts) / scale.times / 1e6:.3f}" if row.counts else ""


COLUMNS: Final[Mapping[str, Callable[[Row, float, Scale], str]]] = {
    "count": lambda row, whole, scale: f"{row.count / scale.times:g}",
    "us": lambda row, whole, scale: f"{row.us / scale.times:.1f}",
    "each": lambda row, whole, scale: f"{row.us / row.count:.2f}",
    "share": _share,
    "MB": lambda row, whole, scale: f"{row.bytes / scale.times / 1e6:.3f}" if row.bytes else "",
    "GB/s": _speed,
    "of peak": _of_peak,
    "Minstr": _counted(lambda counts: counts.instructions),
    "of all": _of_all,
    "MB read": _counted(lambda counts: counts.read),
    "MB written": _counted(lambda counts: counts.written),
    "L2 fills": lambda row, whole, scale: (
        f"{row.counts.fills / scale.times:g}" if row.counts and row.counts.fills else ""
    ),
    "stale": lambda row, whole, scale: f"{row.counts.stale / scale.times:g}" if row.counts and row.counts.stale else "",
}
"""A column's head, and a row's cell given the sum of all times; a column without a cell is left out."""


def table(found: Sequence[Row], title: str, scale: Scale = Scale()) -> str:
    """Rows as aligned lines, with a last one for all of them."""
    whole = sum(row.us for row in found)
    total = Row("all", sum(row.count for row in found), whole, sum(row.bytes or 0 for row in found))
    total.counts = sum((row.counts for row in found if row.counts), Counts()) if any(r.counts for r in found) else None
    scale = replace(scale, instructions=total.counts.instructions if total.counts else 0)
    lines = [[title, *COLUMNS]]
    lines += [[row.name, *(cell(row, whole, scale) for cell in COLUMNS.values())] for row in (*found, total)]
    kept = [at for at in range(len(lines[0])) if any(line[at] for line in lines[1:])]
    widths = [max(len(line[at]) for line in lines) for at in kept]
    return "\n".join(
        "  ".join(
            line[at].ljust(width) if at == 0 else line[at].rjust(width) for at, width in zip(kept, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Chrome's trace events: a process and a thread for each track, in the order of their first span."""
    events: list[dict[str, Any]] = []
    processes: dict[str, int] = {}
    tracks: dict[tuple[str, str], int] = {}
    for span in spans:
        pid = processes.setdefault(span.process, len(processes) + 1)
        tid = tracks.setdefault((span.process, span.track), len(tracks) + 1)
        args = dict(span.args)
        if span.bytes is not None:
            args["bytes"] = span.bytes
        if span.counts is not None:
            args |= asdict(span.counts)
        events.append(
            {"ph": "X", "name": span.name, "pid": pid, "tid": tid, "ts": span.begin, "dur": span.us, "args": args}
        )
    named = [_named("process_name", pid, 0, name or "tegrad") for name, pid in processes.items()]
    for (process, track), tid in tracks.items():
        named.append(_named("thread_name", processes[process], tid, track))
        named.append(_named("thread_sort_index", processes[process], tid, tid, "sort_index"))
    return {"displayTimeUnit": "ns", "traceEvents": [*named, *events]}


def _named(what: str, pid: int, tid: int, value: object, key: str = "name") -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {key: value}}
