"""`tegrad board`: shared emulated boards, which several processes reach by name (`TEGRAD_BOARD=NAME`), and programs
that run on a board without knowing it."""

from __future__ import annotations

import errno
import json
import os
from typing import Annotated

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
        raise board.BoardError(f"there is no chip named {chip!r}: choose one of {', '.join(CHIPS)}")
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
        clients = ", ".join(f"{c['comm']} ({c['pid']})" for c in found["clients"] if c["pid"] != os.getpid())
        typer.echo(f"{name:20} {found['chip']:16} {found['memory_limit'] / 2**30:6g} GiB  {clients or 'no clients'}")


@app.command(epilog="tegrad board status my-board", short_help="Say what a board holds, and what work it has done.")
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
    gpu = {key: value for key, value in (found["gpu"] or {}).items() if not isinstance(value, dict | list)}
    for title, values in (
        ("board", {"chip": found["chip"], "memory": f"{found['memory_limit'] / 2**30:g} GiB", **found["pids"]}),
        ("files", found["files"]),
        ("counts", found["counts"]),
        ("calls", found["calls"]),
        ("gpu", gpu),
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


@app.command(short_help="Make a board's drivers fail, stall or answer otherwise.")
def inject(
    name: Name,
    ioctl: Annotated[
        str,
        typer.Argument(
            metavar="[IOCTL]", help="Its name, or a pattern ('NVMAP_*'); without one nothing fails any more."
        ),
    ] = "",
    error: Annotated[str, typer.Option("--errno", help="What it fails with, such as ENOMEM.")] = "",
    stall: Annotated[float, typer.Option(min=0, help="Seconds that it waits first.")] = 0.0,
    answer: Annotated[list[str] | None, typer.Option(metavar="FIELD=VALUE", help="A field of what it returns.")] = None,
    nth: Annotated[int, typer.Option(min=0, help="The nth such call from now; the next one if nothing is said.")] = 0,
    probability: Annotated[float, typer.Option(min=0, max=1, help="Each such call, with this chance.")] = 0.0,
    seed: Annotated[int, typer.Option(help="What that chance is drawn from.")] = 0,
    times: Annotated[int, typer.Option(min=0, help="How often in all; 0 for ever.")] = 1,
) -> None:
    """Make a board's drivers fail, stall or answer otherwise, to see what a client does then.

    Replaces what was injected before. Calls are counted from now on.

    \b
    tegrad board inject my-board NVMAP_ALLOC --errno ENOMEM --nth 3
    tegrad board inject my-board 'CHANNEL_*' --stall 0.5 --probability 0.1 --times 0
    tegrad board inject my-board GPU_NUM_VSMS --answer num_vsms=8
    tegrad board inject my-board                     (nothing fails any more)
    """
    from tegrad.orin.client import board_inject
    from tegrad.orin.inject import Injection

    if not ioctl:
        board_inject(name, [])
        typer.echo(f"{name}: nothing is injected any more")
        return
    fields = dict(_field(text) for text in answer or ())
    _check_ioctl(ioctl, fields)
    code = _errno(error) if error else 0
    if not (code or stall or fields):
        raise typer.BadParameter("say what is to happen: --errno, --stall or --answer")
    if nth and probability:
        raise typer.BadParameter("--nth and --probability exclude each other")
    rule = Injection(ioctl, code, stall, 0 if probability else nth or 1, probability, seed, times, fields)
    board_inject(name, [rule])
    when = f"with chance {probability:g}" if probability else f"at call {nth or 1}"
    typer.echo(f"{name}: {ioctl} is struck {when}")


def _errno(text: str) -> int:
    code = getattr(errno, text.upper(), 0) if not text.isdecimal() else int(text)
    if code not in errno.errorcode:
        raise typer.BadParameter(f"there is no error {text!r}; such as ENOMEM, EINVAL, EBUSY", param_hint="--errno")
    return int(code)


def _field(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        return name, int(value, 0)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no FIELD=VALUE with a whole number", param_hint="--answer") from error


def _check_ioctl(pattern: str, fields: dict[str, int]) -> None:
    """A usage error where no ioctl of the drivers matches, or one that does has no such fields."""
    from difflib import get_close_matches
    from fnmatch import fnmatchcase

    from tegrad.uapi.ioctls import ROWS

    rows = [row for row in ROWS if fnmatchcase(row.name, pattern)]
    if not rows:
        near = get_close_matches(pattern, [row.name for row in ROWS], 3, 0.4)
        raise typer.BadParameter(f"no ioctl is called {pattern}" + (f"; near: {', '.join(near)}" if near else ""))
    for row in rows:
        known = {field[0] for field in getattr(row.struct, "_fields_", ())}
        if unknown := sorted(set(fields) - known):
            raise typer.BadParameter(
                f"{row.name} has no field {unknown[0]}; it has {', '.join(sorted(known)) or 'none'}"
            )


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
