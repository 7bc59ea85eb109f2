"""`tegrad conformance`: does this kernel do what nvgpu and nvmap do? Rule by rule, with a report to send."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tegrad.conformance.rule import Rule
    from tegrad.conformance.run import Outcome

OUT = Path("tegrad-conformance.json")


def conformance(
    section: Annotated[list[str] | None, typer.Option(help="Only the rules of this section, like 2 or 2.3.")] = None,
    rule: Annotated[list[str] | None, typer.Option(help="Only this rule, by its id.")] = None,
    hazardous: Annotated[
        bool, typer.Option("--hazardous", help="Also rules that can hang a real GPU or wedge its driver.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the rules and run none.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report instead of lines.")] = False,
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = OUT,
) -> None:
    """Run the rules on the drivers found here. Exit code 0: all hold; 1: some differ or failed; 2: no such rule.

    \b
    tegrad conformance --section 2.3
    """
    from tegrad.conformance import all_rules
    from tegrad.conformance.rule import chosen

    rules = chosen(all_rules(), section or (), rule or ())
    if unknown := set(rule or ()) - {one.id for one in rules}:
        raise typer.BadParameter(f"there is no rule {', '.join(sorted(unknown))}: see `tegrad conformance --list`")
    if not rules:
        raise typer.BadParameter("no rule is in this section: see `tegrad conformance --list`")
    if list_:
        for one in rules:
            typer.echo(f"{one.id:48} {'hazardous: ' if one.hazardous else ''}{one.sentence}")
        return
    _run(rules, hazardous=hazardous, out=out, quiet=json_)


def _run(rules: list[Rule], *, hazardous: bool, out: Path, quiet: bool) -> None:
    """Judge the rules, tell it, write the report, and exit with the verdict."""
    from tegrad.conformance.report import document, line, summary
    from tegrad.conformance.run import run
    from tegrad.nv.kernel import board_asked, pick_kernel
    from tegrad.uapi.errors import DriverError

    kernel = pick_kernel()
    outcomes: list[Outcome] = []
    kernel.close(kernel.open("/dev/nvmap"))  # one clear error where there is no driver
    try:
        for outcome in run(rules, kernel, hazardous=hazardous or board_asked()):
            outcomes.append(outcome)
            _progress(f"{len(outcomes)}/{len(rules)} {outcome.rule.section}")
            if outcome.state != "holds" and not quiet:
                _progress("")
                typer.echo(line(outcome))
    finally:
        _progress("")
        report = document(kernel, outcomes, shlex.join(["tegrad", *sys.argv[1:]]))
        try:
            out.write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:
            raise DriverError("open", error.errno or 0, {"path": str(out)}, "name another file with --out") from None
    if quiet:
        typer.echo(json.dumps(report))
    else:
        typer.echo(f"{summary(outcomes)}. Report: {out}")
    raise typer.Exit(1 if {"differs", "error"} & {outcome.state for outcome in outcomes} else 0)


def _progress(text: str) -> None:
    """A line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
