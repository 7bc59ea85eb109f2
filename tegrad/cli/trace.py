"""`tegrad trace`: every driver call of a command, decoded; logs of strace read; traces compared."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from tegrad.diag.trace.run import Traced
    from tegrad.uapi.trace import Call


class _RunByDefault(TyperGroup):
    """What names no subcommand is a command to trace."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(no_args_is_help=True, cls=_RunByDefault)
HELP = "Show every driver call of a command, decoded; read and compare traces."
EPILOG = """\b
tegrad trace -- tegrad run hello
tegrad trace --summary -- python my_program.py"""

Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Summary = Annotated[bool, typer.Option("--summary", help="Counts by phase, and memory by role.")]
Diagram = Annotated[bool, typer.Option("--diagram", help="A sequence diagram, for Mermaid.")]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="Write to this file.", dir_okay=False)]


@app.command(context_settings={"allow_interspersed_args": False}, no_args_is_help=True)
def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="What to run, with its arguments, after `--`.")],
    json_: Json = False,
    summary: Summary = False,
    diagram: Diagram = False,
    preload: Annotated[
        bool, typer.Option("--preload", help="Trace any program, by a library before libc (LD_PRELOAD).")
    ] = False,
    out: Out = None,
) -> None:
    """Run a command and show its driver calls ("run" may be left out).

    Calls of Python programs that use tegrad are decoded with arguments, result,
    duration and fds; with --preload those of any program, CUDA's among them. They
    are shown on stderr as they come, unless -o names a file (docs/trace.md). The
    exit code is the command's.

    \b
    tegrad trace run -- tegrad run hello
    tegrad trace run --preload -- ./my_nvgpu_test
    tegrad trace run --diagram -o calls.mmd -- python my_program.py
    TEGRAD_BOARD=agx-orin-64gb tegrad trace run --summary -- tegrad run hello
    """
    from tegrad.diag.trace.reading import calls
    from tegrad.diag.trace.run import Traced
    from tegrad.nv.kernel import TRACE_VARIABLE

    view = _view(json_, summary, diagram)
    traced = _preloaded(command) if preload else Traced(command, TRACE_VARIABLE, {})
    _show(view, calls(traced.lines()), out, err=True)
    raise typer.Exit(traced.code)


@app.command(
    epilog="tegrad trace decode strace.log", short_help="Read a trace, or strace's log, and name the calls in it."
)
def decode(
    file: Annotated[Path, typer.Argument(help="What strace or a trace wrote.")],
    json_: Json = False,
    summary: Summary = False,
    diagram: Diagram = False,
    out: Out = None,
) -> None:
    """Read a trace, or a log of strace, and name the drivers' calls in it.

    \b
    strace -f -y -v -e trace=openat,ioctl,mmap,munmap,close -o strace.log CMD
    tegrad trace decode --summary strace.log
    """
    from tegrad.diag.trace.reading import calls

    view = _view(json_, summary, diagram)
    with _opened(file) as lines:
        _show(view, calls(lines), out)


@app.command(epilog="tegrad trace diff before.json after.json")
def diff(
    a: Annotated[Path, typer.Argument(help="A trace, or a log of strace.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
) -> None:
    """Compare two traces call by call, whatever recorded them.

    Printed are calls that only one has, and arguments that differ; addresses,
    handles, ids and the numbers of fds are left out. Exit code 1 if they differ.
    """
    from tegrad.diag.trace.diff import diff as compare
    from tegrad.diag.trace.reading import calls

    with _opened(a) as left, _opened(b) as right:
        differences = list(compare(calls(left), calls(right)))
    for line in differences:
        typer.echo(line)
    raise typer.Exit(1 if differences else 0)


def _preloaded(command: list[str]) -> Traced:
    """The command under the preload library: on the board that TEGRAD_BOARD names, else on this machine's drivers."""
    from tegrad.diag.trace.run import Traced
    from tegrad.nv.kernel import board_asked
    from tegrad.orin import preload

    if board_asked():
        return Traced([sys.executable, "-m", "tegrad", "board", "exec", "--", *command], preload.TRACE_VARIABLE, {})
    preload.find_program(command[0])
    return Traced(command, preload.TRACE_VARIABLE, preload.preloaded(preload.library(), os.environ))


def _view(json_: bool, summary: bool, diagram: bool) -> str:
    chosen = [name for name, on in (("json", json_), ("summary", summary), ("diagram", diagram)) if on]
    if len(chosen) > 1:
        raise typer.BadParameter(f"choose one of {', '.join(f'--{name}' for name in chosen)}")
    return chosen[0] if chosen else "text"


def _show(view: str, calls: Iterable[Call], out: Path | None, *, err: bool = False) -> None:
    """Print a trace, each line as it comes."""
    from tegrad.diag.trace.views import VIEWS

    with ExitStack() as stack:
        into = stack.enter_context(_opened(out, "w")) if out else sys.stderr if err else sys.stdout
        for line in VIEWS[view](calls):
            print(line, file=into, flush=True)


def _opened(path: Path, mode: str = "r") -> IO[str]:
    try:
        return open(path, mode, encoding="utf-8", errors="replace")
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
