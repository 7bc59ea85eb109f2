"""`tegrad profile`: where the time of a model's token goes, or a program's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from tegrad import models
from tegrad.cli import options
from tegrad.diag.timeline import Span, trace
from tegrad.hub.cache import located
from tegrad.llm.start import choose_device, settle_device

SVG: Final = ".svg"
EPILOG: Final = """\b
tegrad profile --layers
tegrad profile --model m.gguf --depth 2000 -o trace.json
tegrad profile -o trace.json -- python program.py"""


class Made(NamedTuple):
    """A profile."""

    text: str
    json: dict[str, Any]
    spans: Sequence[Span]
    """Of a trace."""
    picture: Callable[[], str]


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
    depth: Annotated[int, typer.Option(min=0, metavar="N", help="Tokens in the cache before them.")] = 0,
    context: options.Context = None,
    plan: Annotated[
        Plan | None, typer.Option(metavar="many|one", show_default=False, help="A token in many launches or one.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="A table by layer, too.")] = False,
    peak: Annotated[
        float | None, typer.Option(metavar="GB/s", show_default=False, help="Memory's peak; the chip's.")
    ] = None,
    gpu: options.Gpu = None,
    as_json: Annotated[bool, typer.Option("--json", help="The tables as one JSON object.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", metavar="FILE", show_default=False, help="A trace for ui.perfetto.dev; with .svg a picture."
        ),
    ] = None,
) -> None:
    """Show where the time of a model's token goes, or of a tinygrad program."""
    speed = None if peak is None else peak * 1e9
    if out is not None:
        _check(out, bool(command))
    if command:
        code, made = _command(command, speed)
    else:
        code, made = 0, _token(model or models.SMALL, tokens, depth, context, plan, layers, speed)
    typer.echo(json.dumps(made.json) if as_json else made.text)
    if out is not None:
        out.write_text(made.picture() if out.suffix == SVG else json.dumps(trace(made.spans)))
    raise typer.Exit(code)


def _check(out: Path, program: bool) -> None:
    """A usage error for a file that cannot be written."""
    if program and out.suffix == SVG:
        raise typer.BadParameter("a picture shows a model's token: give a name that ends in .json", param_hint="-o")
    try:
        out.touch()
    except OSError as error:
        raise typer.BadParameter(f"cannot write {out}: {error.strerror}", param_hint="-o") from error


def _token(
    path: Path, tokens: int, depth: int, context: int | None, plan: Plan | None, layers: bool, peak: float | None
) -> Made:
    """Tokens of a model."""
    from tegrad.llm.gguf import Gguf

    with Gguf.open(path):  # a wrong file is refused before a device is opened, which takes seconds
        pass
    choose_device()
    from tegrad.bench import one_token
    from tegrad.llm.device import open_device
    from tegrad.nv.kernel import board_counts

    open_device()
    found = one_token.profile(path, tokens=tokens, depth=depth, context=context, plan=plan or "", counted=board_counts)
    text = one_token.text(found, peak, layers=layers)
    return Made(text, one_token.as_json(found), found.shown, lambda: one_token.picture(found))


def _command(command: Sequence[str], peak: float | None) -> tuple[int, Made]:
    """A command's processes, and its exit code."""
    settle_device()
    from tegrad.diag import profile as programs

    code, found = programs.run(command)
    if not found:
        typer.echo("tegrad: " + programs.NOTHING, err=True)
    text = "\n\n".join(programs.text(program, peak) for program in found)
    spans = [span for program in found for span in program.spans]
    return code, Made(text, {"programs": [programs.as_json(program) for program in found]}, spans, str)
