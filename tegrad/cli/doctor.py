"""`tegrad doctor`: what was found on this machine, what is missing, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from tegrad.cli import options

MARKS = {"ok": "ok     ", "warn": "note   ", "missing": "MISSING"}


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    gpu: options.Gpu = None,
) -> None:
    """Say what was found, what is missing and what to do. Exit code 0: models run here (on a GPU or emulated).

    Compiles and runs a small kernel, which takes a few seconds.

    \b
    tegrad doctor
    """
    from tegrad.diag.doctor import findings, runnable

    found = findings()
    verdict = runnable(found)
    if json_:
        typer.echo(json.dumps({"findings": [dataclasses.asdict(f) for f in found], "runs_on": verdict}))
    else:
        for finding in found:
            typer.echo(f"{MARKS[finding.state]}  {finding.name:12} {finding.detail}")
            if finding.remedy:
                typer.echo(f"         {'':12} -> {finding.remedy}")
        typer.echo(f"\nModels run here on: {verdict or 'nothing yet; see the lines marked MISSING'}")
    raise typer.Exit(0 if verdict else 1)
