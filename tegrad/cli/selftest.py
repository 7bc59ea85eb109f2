"""`tegrad selftest`: the first boot on a Jetson, stage by stage, with a report to send and a page to read."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tegrad.diag.selftest.runner import Outcome
    from tegrad.diag.selftest.stage import Stage

OUT = Path("tegrad-selftest.json")


def selftest(
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage; give it again for another.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Go on behind a stage that failed.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the stages and run none.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report instead of lines.")] = False,
    out: Annotated[Path, typer.Option(help="Where the report goes; the page goes beside it, as .md.")] = OUT,
) -> None:
    """Try this machine's GPU, the least risky thing first, and say what each outcome means.

    For the first boot on a Jetson Orin. Each stage runs in a process of its
    own with a limit of time, so a hang or a crash is told like any other
    outcome. The first surprise ends it; --all goes on.

    tegrad selftest

    tegrad selftest --all --out first-boot.json

    tegrad selftest --stage machine --stage ioctls

    TEGRAD_BOARD=agx-orin-64gb tegrad selftest

    (the last runs on an emulated Orin, on any machine)

    It writes a JSON report to send and a page to read. Nothing else should use
    the GPU meanwhile; save your work first, as on any first boot.

    Exit code 0: all is right. 1: a stage failed. 2: there is no such stage.
    """
    from tegrad.diag.selftest.stages import STAGES, chosen

    if unknown := sorted(set(stage or ()) - {one.name for one in STAGES}):
        raise typer.BadParameter(f"there is no stage {', '.join(unknown)}; see `tegrad selftest --list`")
    stages = chosen(stage or ())
    if list_:
        for one in stages:
            typer.echo(f"{one.name:12} {one.sentence} (at most {one.limit_s:g} s)")
        return
    if not out.parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is no folder: name another file with --out")
    _run(stages, go_on=all_, out=out, quiet=json_)


def _run(stages: Sequence[Stage], *, go_on: bool, out: Path, quiet: bool) -> None:
    """Run the stages, tell it, write both reports, and exit with the verdict."""
    from tegrad.bench.record import machine, now, versions
    from tegrad.diag.selftest.report import document, lines, page, summary
    from tegrad.diag.selftest.runner import run
    from tegrad.nv.kernel import BOARD_VARIABLE
    from tegrad.uapi.errors import DriverError

    board = os.environ.get(BOARD_VARIABLE, "")
    command = shlex.join(["tegrad", *sys.argv[1:]])
    about = {"date": now(), "command": command, "machine": machine(), "versions": versions()}
    outcomes: list[Outcome] = []
    try:
        for outcome in run(stages, go_on=go_on):
            outcomes.append(outcome)
            if not quiet:
                typer.echo("\n".join(lines(outcome)))
    finally:
        report = document(outcomes, about, board)
        beside = out.with_suffix(".md")
        try:
            out.write_text(json.dumps(report, indent=1) + "\n")
            beside.write_text(page(outcomes, about, board))
        except OSError as error:
            raise DriverError("open", error.errno or 0, {"path": str(out)}, "name another file with --out") from None
    if quiet:
        typer.echo(json.dumps(report))
    else:
        typer.echo(f"{summary(outcomes)}. To send: {out}. To read: {beside}")
    raise typer.Exit(1 if any(outcome.bad for outcome in outcomes) else 0)
