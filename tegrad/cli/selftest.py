"""`tegrad selftest`: the first boot on a Jetson, stage by stage, with a report to send and a page to read."""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tegrad.diag.selftest.runner import Outcome
    from tegrad.diag.selftest.stage import Asked, Stage

OUT = Path("tegrad-selftest.json")


def selftest(
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage; give it again for another.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Go on after a stage that failed.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the stages and run none.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report instead of lines.")] = False,
    out: Annotated[Path, typer.Option(help="Where the report goes; the page goes beside it, as .md.")] = OUT,
    model: Annotated[
        Path | None,
        typer.Option(help="A GGUF file of yours: run it too, beside llama-bench.", exists=True, dir_okay=False),
    ] = None,
    llama_bench: Annotated[
        Path | None,
        typer.Option(help="llama.cpp's llama-bench; else the one on the PATH.", exists=True, dir_okay=False),
    ] = None,
) -> None:
    """Try this machine's GPU, the least risky thing first, for the first boot on a Jetson (docs/selftest.md).

    Each stage has a process and a limit of time; the first surprise ends it. It writes a report to send and a page to
    read. Exit code 0: all is right. 1: a stage failed. 2: there is no such stage. 130, 129, 143: a signal ended it.

    \b
    tegrad selftest --all --out first-boot.json
    TEGRAD_BOARD=agx-orin-64gb tegrad selftest    on an emulated Orin
    """
    from tegrad.diag.selftest.stage import Asked
    from tegrad.diag.selftest.stages import STAGES, chosen
    from tegrad.nv.kernel import BOARD_VARIABLE
    from tegrad.nv.roles import policy
    from tegrad.orin.board import check_spec

    if unknown := sorted(set(stage or ()) - {one.name for one in STAGES}):
        raise typer.BadParameter(f"there is no stage {', '.join(unknown)}: see `tegrad selftest --list`")
    stages = chosen(stage or ())
    asked = Asked(*(str(path.resolve()) if path else "" for path in (model, llama_bench)))
    for one in stages if stage else ():
        if one.asks and not getattr(asked, one.asks):
            raise typer.BadParameter(f"the stage {one.name} needs --{one.asks} FILE")
    if list_:
        for one in stages:
            typer.echo(f"{one.name:12} {one.sentence} (at most {one.limit_s:g} s)")
        return
    policy()  # a wrong TEGRAD_MEMORY or TEGRAD_BOARD is no finding about this machine
    if board := os.environ.get(BOARD_VARIABLE):
        check_spec(board)
    if not out.parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is no folder: name another file with --out")
    _run(stages, asked, go_on=all_, out=out, quiet=json_)


def _run(stages: Sequence[Stage], asked: Asked, *, go_on: bool, out: Path, quiet: bool) -> None:
    """Run the stages, tell it, write both reports, and exit with the verdict."""
    from tegrad.bench.record import machine, now, versions
    from tegrad.diag.selftest.ending import Ended, ending
    from tegrad.diag.selftest.report import document, lines, page, summary
    from tegrad.diag.selftest.runner import run
    from tegrad.nv.kernel import BOARD_VARIABLE, emulated
    from tegrad.uapi.errors import DriverError

    board = os.environ.get(BOARD_VARIABLE, "of `tegrad board exec`" if emulated() else "")
    command = shlex.join(["tegrad", *sys.argv[1:]])
    about = {"date": now(), "command": command, "machine": machine(), "versions": versions()}
    outcomes: list[Outcome] = []
    ended = 0
    with ending() as undisturbed:
        try:
            for outcome in run(stages, go_on=go_on, asked=asked):
                outcomes.append(outcome)
                ended = ended or outcome.ended
                if not quiet:
                    _say("\n".join(lines(outcome)))
        except Ended as signalled:  # between two stages
            ended = signalled.number
        finally:
            undisturbed()
            report = document(outcomes, about, board)
            beside = out.with_suffix(".md")
            try:
                out.write_text(json.dumps(report, indent=1) + "\n")
                beside.write_text(page(outcomes, about, board))
            except OSError as error:
                code = error.errno or 0
                raise DriverError("open", code, {"path": str(out)}, "name another file with --out") from None
        if quiet:
            _say(json.dumps(report))
        else:
            _say(f"{summary(outcomes)}. To send: {out}. To read: {beside}")
    raise typer.Exit(128 + ended if ended else 1 if any(outcome.bad for outcome in outcomes) else 0)


def _say(text: str) -> None:
    """Print, where somebody still reads it: the report is written all the same."""
    with suppress(OSError):
        typer.echo(text)
