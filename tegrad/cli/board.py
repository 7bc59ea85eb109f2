"""`tegrad board`: shared emulated boards, which several processes reach by name (`TEGRAD_BOARD=NAME`), and programs
that run on a board without knowing it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True)
EPILOG = """\b
tegrad board start my-board
TEGRAD_BOARD=my-board tegrad run hello"""

Name = Annotated[str, typer.Argument(help="The board's name.")]
DEFAULT_CHIP = "agx-orin-64gb"
EXEC_LINE = "Run any program on a board, as if this were a Jetson."


@app.command(epilog="tegrad board start my-board --chip orin-nano-8gb")
def start(
    name: Name,
    chip: Annotated[str, typer.Option(help="Which board to emulate; `tegrad board chips` lists them.")] = DEFAULT_CHIP,
    memory: Annotated[str, typer.Option(help="Its memory, like 8GiB; the chip's own by default.")] = "",
) -> None:
    """Start a board that stays until it is stopped."""
    from tegrad.hw.chips import CHIPS
    from tegrad.orin import board

    if chip not in CHIPS:
        raise board.BoardError(f"there is no chip named {chip!r}; choose one of {', '.join(CHIPS)}")
    row = CHIPS[chip]
    board.check_name(name)
    size = board.parse_size(memory) if memory else row.mem_bytes
    board.start(row, size, name=name, linger=None)
    typer.echo(f"{name}: {chip} with {size / 2**30:g} GiB. Use it with TEGRAD_BOARD={name}")


@app.command(epilog="tegrad board stop my-board")
def stop(name: Name) -> None:
    """Stop a board; its clients' devices die with it."""
    from tegrad.orin.client import board_stop

    board_stop(name)
    typer.echo(f"{name}: stopped")


@app.command(name="list", epilog="tegrad board list")
def list_() -> None:
    """Name the boards that run."""
    from tegrad.orin import board
    from tegrad.orin.client import board_status

    for name in board.running():
        try:
            found = board_status(name)
        except (board.BoardError, OSError, ValueError):
            typer.echo(f"{name:20} does not answer")
            continue
        clients = ", ".join(f"{c['comm']} ({c['pid']})" for c in found["clients"] if c["pid"] != _own_pid())
        typer.echo(f"{name:20} {found['chip']:16} {found['memory_limit'] / 2**30:6g} GiB  {clients or 'no clients'}")


@app.command(epilog="tegrad board status my-board")
def status(
    name: Name,
    json_: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what a board holds: clients, open files, buffers, mappings, channels, work done."""
    from tegrad.orin.client import board_status

    found = board_status(name)
    if json_:
        typer.echo(json.dumps(found))
        return
    for title, values in (
        ("board", {"chip": found["chip"], "memory": f"{found['memory_limit'] / 2**30:g} GiB", **found["pids"]}),
        ("files", found["files"]),
        ("counts", found["counts"]),
        ("gpu", _scalars(found["gpu"])),
    ):
        typer.echo(f"{title:8}" + ("  ".join(f"{key}={value}" for key, value in values.items()) or "none"))
    for client in found["clients"]:
        typer.echo(f"client  {client['comm']} ({client['pid']})")


@app.command(epilog="tegrad board log my-board")
def log(name: Name) -> None:
    """Print a board's kernel log."""
    from tegrad.orin.client import board_log

    for line in board_log(name):
        typer.echo(line)


@app.command(
    name="exec", context_settings={"allow_interspersed_args": False}, no_args_is_help=True, short_help=EXEC_LINE
)
def exec_(
    command: Annotated[
        list[str], typer.Argument(metavar="PROGRAM", help="What to run, with its arguments, after `--`.")
    ],
    spec: Annotated[
        str,
        typer.Option(
            "--board",
            envvar="TEGRAD_BOARD",
            help="A chip, with a memory size if it is to differ (orin-nano-8gb:2GiB), for a private board; or the name "
            "of a shared one.",
        ),
    ] = DEFAULT_CHIP,
) -> None:
    """Run any program on a board, as if this were a Jetson.

    It opens /dev/nvmap, /dev/nvgpu/igpu0/* and /dev/host1x-fence, makes the
    drivers' ioctls, maps buffers and rings the doorbell, unmodified.

    \b
    tegrad board exec -- ./my_nvgpu_test --verbose
    tegrad board exec --board orin-nano-8gb -- python my_client.py
    tegrad board exec --board shared -- sh -c 'my_server & my_client'
    TEGRAD_BOARD_LOG=logs tegrad board exec -- ./my_program
    (the last keeps the board's kernel log in a file)

    The program takes this command's place: its exit code, its signals and its
    terminal are its own. What it starts runs on the board too. A private board
    ends with it, or with the last of its processes that uses the board.
    /dev/kmsg is the board's log; every other file is the machine's.

    It works by a library that is put before libc (LD_PRELOAD) and built on
    first use, so a C compiler is needed. Programs that go around libc (static
    ones, system calls of their own as in Go) do not see the board. Kernels run
    if tegrad's compilers made them; others end with an illegal instruction
    (docs/board.md).
    """
    from tegrad.orin.preload import run_in_place

    run_in_place(spec, command)


@app.command(epilog="tegrad board chips")
def chips() -> None:
    """List the boards that can be emulated."""
    from tegrad.hw.chips import CHIPS

    for chip in CHIPS.values():
        typer.echo(
            f"{chip.name:16} {chip.chip:6} {chip.arch}  {chip.sm_count:3} SMs  {chip.mem_bytes / 2**30:6.4g} GiB"
        )


def _scalars(values: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (values or {}).items() if not isinstance(value, (dict, list))}


def _own_pid() -> int:
    import os

    return os.getpid()
