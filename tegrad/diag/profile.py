"""A command whose processes profile themselves (nv/profiling.py), and what they leave: spans, kernels, counts."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tegrad.diag.timeline import Counts, Row, Scale, Span, rows, table
from tegrad.errors import TegradError
from tegrad.hw.chips import CHIPS, Chip, by_arch
from tegrad.nv.kernel import PROFILE_VARIABLE

NOTHING: Final = (
    "nothing to show: no Python process of the command opened tinygrad's NV device (DEV=NV chooses it) and came to its "
    "end (os._exit and a kill leave no profile)"
)
SHOWN: Final = 20
"""Rows of a table; the rest are one."""


class NoProfile(TegradError):
    """A command left nothing to show."""


@dataclass(frozen=True, slots=True)
class Program:
    """One process of a command."""

    pid: int
    command: tuple[str, ...]
    board: str
    """That it ran on; empty on a GPU."""
    chip: Chip | None
    spans: tuple[Span, ...]
    counts: Mapping[str, Counts]
    """What the board counted, by kernel."""

    def of(self, *kinds: str) -> list[Span]:
        """The spans of these kinds ("kernel", "copy", "wait", "host")."""
        return [span for span in self.spans if span.args["kind"] in kinds]


def chip_of(arch: str, sms: int) -> Chip | None:
    """The board of an architecture with so many SMs, or the first one of it."""
    return next((chip for chip in CHIPS.values() if (chip.arch, chip.sm_count) == (arch, sms)), by_arch(arch))


def run(command: Sequence[str]) -> tuple[int, list[Program]]:
    """Run a command with this process's streams; its exit code, as a shell tells it, and what its processes left.

    NoProfile where it cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="tegrad-profile-") as folder:
        try:
            process = subprocess.Popen(command, env={**os.environ, PROFILE_VARIABLE: folder})
        except OSError as error:
            raise NoProfile(
                f"cannot run {command[0]}: {error.strerror}; give a program, as in `-- python x.py`"
            ) from error
        while True:
            with suppress(KeyboardInterrupt):  # it goes to the command, too, whose end is waited for
                code = process.wait()
                break
        found = [_read(path) for path in sorted(Path(folder).glob("*.json"))]
    return code if code >= 0 else 128 - code, found


def _read(path: Path) -> Program:
    told: dict[str, Any] = json.loads(path.read_text())
    begun = min((span[3] for span in told["spans"]), default=0.0)
    device = next(iter(told["devices"].values()))
    name = f"{' '.join(map(os.path.basename, told['command'][:1]))} ({told['pid']})"
    spans = tuple(
        Span(track, what, begin - begun, us, size, args={"kind": kind}, process=name)
        for kind, track, what, begin, us, size in told["spans"]
    )
    counts = {name: Counts.of(counted) for name, counted in (told["counts"] or {}).items()}
    chip = chip_of(device["arch"], device["sms"])
    return Program(told["pid"], tuple(told["command"]), told["board"], chip, spans, counts)


def outermost(spans: Iterable[Span]) -> list[Span]:
    """Of spans that lie in each other those that lie in no other one of their track."""
    ends: dict[tuple[str, str], float] = {}
    kept = []
    for span in sorted(spans, key=lambda one: (one.begin, -one.us)):
        if span.begin >= ends.get((span.process, span.track), float("-inf")):
            ends[span.process, span.track] = span.begin + span.us
            kept.append(span)
    return kept


def sections(program: Program) -> dict[str, list[Row]]:
    """Tables of a process by their titles: kernels, copies, and what the host did; the longest first."""
    kernels = rows(program.of("kernel"))
    for row in kernels:
        row.counts = program.counts.get(row.name)
    found = {"kernel": kernels, "copy": rows(program.of("copy"))}
    found["host"] = rows(outermost(program.of("host")), lambda span: f"{span.track}: {span.name}")
    found["host"] += rows(outermost(program.of("wait")), lambda span: "waits for the GPU")
    return {title: sorted(each, key=lambda row: -row.us) for title, each in found.items() if each}


def text(program: Program, peak: float | None) -> str:
    """A process's tables, and what their numbers mean. `peak` in bytes a second, if not the chip's."""
    if program.board:
        peak = None
    elif peak is None and program.chip is not None:
        peak = program.chip.mem_bandwidth
    parts = [shlex.join([os.path.basename(program.command[0]), *program.command[1:]])]
    for title, found in sections(program).items():
        shown, rest = found[:SHOWN], found[SHOWN:]
        if rest:
            count, us = sum(row.count for row in rest), sum(row.us for row in rest)
            shown.append(Row(f"{len(rest)} more", count, us, None, None))
        parts.append(table(shown, title, Scale(peak=None if title == "host" else peak)))
    parts.append(
        foot(program.board, program.chip, peak, "MB of a kernel are tinygrad's count of what it reads and writes.")
    )
    return "\n\n".join(parts)


def foot(board: str, chip: Chip | None, peak: float | None, note: str) -> str:
    """What times and bytes are."""
    if board:
        return (
            f"On an emulated board ({board}): times are the emulation's and mean nothing for a GPU.\n"
            "Minstr (instructions of lanes), MB read and MB written (by lanes) are what the board has counted."
        )
    of = f"\nPeak: {peak / 1e9:.0f} GB/s (--peak; else that of {chip.name})." if peak and chip else ""
    return f"Times are the GPU's. {note}{of}"


def as_json(program: Program) -> dict[str, Any]:
    """Everything of a process's tables."""
    return {
        "pid": program.pid, "command": program.command, "board": program.board,
        "chip": program.chip and program.chip.name,
        "tables": {title: [row_json(row) for row in found] for title, found in sections(program).items()},
    }  # fmt: skip


def row_json(row: Row) -> dict[str, Any]:
    """A row, without what is not known."""
    made: dict[str, Any] = {"name": row.name, "count": row.count, "us": round(row.us, 3)}
    if row.bytes:
        made["bytes"] = row.bytes
    if row.counts:
        made |= asdict(row.counts)
    return made
