"""`tegrad profile`: where the time of a model's token goes, or a program's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tegrad import models
from tegrad.cli import options
from tegrad.hub.cache import located
from tegrad.llm.start import choose_device, settle_device

if TYPE_CHECKING:
    from tegrad.diag.timeline import Span

    Made = tuple[str, dict[str, Any], Sequence[Span]]
    """Text, JSON and the spans of a trace."""

EPILOG: Final = """\b
tegrad profile --layers
tegrad profile --model m.gguf --depth 2000 -o trace.json
tegrad profile -o trace.json -- python program.py"""


class Plan(StrEnum):
    """How a step runs."""

    MANY = "many"
    ONE = "one"


def profile(
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- COMMAND]", hidden=True)] = None,
    model: Annotated[
        Path | None,
        typer.Option(parser=located, metavar="MODEL", show_default=False, help="A GGUF file or a name."),
    ] = None,
    tokens: Annotated[int, typer.Option("-n", min=1, metavar="N", help="Tokens to measure.")] = 3,
    depth: Annotated[int, typer.Option(min=0, metavar="N", help="Positions before them.")] = 0,
    context: options.Context = None,
    plan: Annotated[
        Plan | None, typer.Option(metavar="many|one", show_default=False, help="Launches; as the engine chooses.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="A table by layer, too.")] = False,
    peak: Annotated[
        float | None, typer.Option(metavar="GB/s", show_default=False, help="Of the memory; the chip's.")
    ] = None,
    gpu: options.Gpu = None,
    as_json: Annotated[bool, typer.Option("--json", help="The tables as one JSON object.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", metavar="FILE", show_default=False, help="A trace for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Show where the time of a model's token goes, or of a tinygrad program."""
    from tegrad.diag.timeline import write_trace

    speed = None if peak is None else peak * 1e9
    code = 0
    if command:
        code, made = _command(command, speed)
    else:
        made = _token(model or models.SMALL, tokens, depth, context, plan, layers, speed)
    text, found, spans = made
    typer.echo(json.dumps(found) if as_json else text)
    if out is not None:
        write_trace(out, spans)
    raise typer.Exit(code)


def _token(
    path: Path, tokens: int, depth: int, context: int | None, plan: Plan | None, layers: bool, peak: float | None
) -> Made:
    """Tokens of a model."""
    choose_device()
    from tegrad.bench import token
    from tegrad.llm.device import open_device
    from tegrad.nv.kernel import board_counts

    open_device()
    found = token.profile(path, tokens=tokens, depth=depth, context=context, plan=plan or "", counted=board_counts)
    return token.text(found, peak, layers=layers), token.as_json(found), found.shown


def _command(command: Sequence[str], peak: float | None) -> tuple[int, Made]:
    """A command's processes, and its exit code."""
    settle_device()
    from tegrad.diag import profile as programs

    code, found = programs.run(command)
    if not found:
        typer.echo("tegrad: " + programs.NOTHING, err=True)
    text = "\n\n".join(programs.text(program, peak) for program in found)
    return code, (text, {"programs": [programs.as_json(program) for program in found]}, programs.trace_spans(found))
