"""`tegrad klog`: the kernel log's lines about the GPU, sorted by how much they matter."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tegrad.diag.klog import KernelLog, LogLine


def klog(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on with new lines until Ctrl-C.")] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="The last N lines; with --watch, stop after N new ones.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print what the GPU's drivers wrote to the kernel log: error, warning, harmless or info, and what it means.

    Reads /dev/kmsg (root, or kernel.dmesg_restrict=0), or the log of the board that TEGRAD_BOARD names. Exit code 1 if
    an error line was among those printed.

    \b
    tegrad klog --watch
    TEGRAD_BOARD=my-board tegrad klog -n 20
    """
    from tegrad.diag.klog import KernelLog, Severity

    worst, log = False, KernelLog()
    for line in _lines(log, watch, count):
        worst |= line.severity is Severity.ERROR
        typer.echo(_json(line) if json_ else _text(line))
    if not worst:
        typer.echo(f"tegrad: {_nothing_wrong(log)}", err=True)
    raise typer.Exit(1 if worst else 0)


def _nothing_wrong(log: KernelLog) -> str:
    """Why no error was shown: none is there, or nothing that could have one."""
    if not log.driver:
        return "nothing to judge: no GPU's driver is loaded here; `tegrad doctor` says what was found"
    if not log.records:
        return "nothing to judge: the kernel log is empty"
    return f"clean: no error among the {log.lines} lines of the GPU's drivers, of {log.records} in the kernel log"


def _lines(log: KernelLog, watch: bool, count: int | None) -> Iterator[LogLine]:
    there = log.new()
    if watch:
        return itertools.islice(log.watch(), count)
    return iter(there[-count:] if count else there)


def _text(line: LogLine) -> str:
    meaning = f"  ({line.meaning})" if line.meaning else ""
    return f"{line.severity:8} {line}{meaning}"


def _json(line: LogLine) -> str:
    return json.dumps({"class": line.severity, "meaning": line.meaning, **line.record._asdict()})
