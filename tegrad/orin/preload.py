"""The preload library: what it takes to build it, and the environment under which a program runs on a board.

Its C files are in `exec/`. What they know of the drivers (nodes, request numbers, where a block names fds) is written
from our tables into `table.h`, so that it is stated once.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NoReturn

from tegrad import kept
from tegrad.errors import TegradError
from tegrad.orin import wire
from tegrad.orin.client import COPY_BACK_EFAULT
from tegrad.orin.connection import Connection
from tegrad.orin.nodes import NODES
from tegrad.orin.wire import Message, Op
from tegrad.uapi.ioctls import ROWS, Ioctl, set_field
from tegrad.uapi.tracefile import DRIVER_FILES

SOURCE = Path(__file__).parent / "exec"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-U_FORTIFY_SOURCE")
TRACE_VARIABLE = "TEGRAD_TRACE_PRELOAD"
"""A file to which the library appends every call of the drivers'."""
MAX_OWN = 72
"""Fds that the library may hold: a session, and two for each mapping of the registers."""


class PreloadError(TegradError):
    """The preload library cannot be built, or the program cannot take it."""


class NoProgram(PreloadError):
    """There is no such program; the shell's code for that."""

    exit_code = 127


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/tegrad/preload or ~/.cache/tegrad/preload."""
    return kept.cache_folder() / "tegrad" / "preload"


def library(folder: Path | None = None) -> Path:
    """The library, built if it is not in the cache folder yet, or not as it was built. PreloadError where that fails.

    The loader takes a damaged one for a reason to end the program, or to run it without a board.
    """
    table = header()
    sources = sorted(SOURCE.glob("*.c"))
    compiler = find_compiler()
    digest = hashlib.sha256("\0".join([table, *compiler, *FLAGS, os.uname().machine]).encode())
    for file in [*sources, *sorted(SOURCE.glob("*.h"))]:
        digest.update(file.read_bytes())
    folder = folder or default_cache_dir()
    path = folder / f"{digest.hexdigest()[:24]}.so"
    if any(c in str(path) for c in ": "):
        raise PreloadError(f"the loader cannot preload {path}: set XDG_CACHE_HOME to a folder without space and colon")
    if not _whole(path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _build(compiler, sources, table, path)
        except OSError as error:
            raise PreloadError(f"the preload library cannot be kept in {folder}: {error}; set XDG_CACHE_HOME") from None
    return path


def _whole(path: Path) -> bool:
    """Whether this is a library as `_build` left it: it ends with its digest, which the loader does not look at."""
    data = kept.read(path) or b""
    return (
        len(data) > kept.DIGEST_BYTES
        and hashlib.sha256(data[: -kept.DIGEST_BYTES]).digest() == data[-kept.DIGEST_BYTES :]
    )


def find_compiler() -> list[str]:
    """The C compiler, with arguments if $CC has some: $CC, or the first that there is."""
    chosen = os.environ.get("CC", "").strip()
    for words in [shlex.split(chosen)] if chosen else [[name] for name in COMPILERS]:
        if path := shutil.which(words[0]):
            return [path, *words[1:]]
    missing = f"CC={chosen} is no program" if chosen else "there is no C compiler (cc, gcc or clang)"
    raise PreloadError(f"{missing}, and the preload library must be built: install one (apt install gcc) or set CC")


def _build(compiler: Sequence[str], sources: Iterable[Path], table: str, path: Path) -> None:
    """Compile in a folder of its own and put the result in its place at once, whoever else does the same."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        (Path(scratch) / "table.h").write_text(table)
        made = Path(scratch) / "made.so"
        command = [*compiler, *FLAGS, f"-I{scratch}", "-o", str(made), *map(str, sources), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
            raise PreloadError(
                f"{' '.join(compiler)} cannot build the preload library: {reason}; set CC to another compiler"
            )
        with open(made, "ab") as library:
            library.write(hashlib.sha256(made.read_bytes()).digest())
            library.flush()
            os.fsync(library.fileno())
        made.replace(path)


# ---- table.h --------------------------------------------------------------------------------------------------------


def header() -> str:
    """What the C files know of nodes, messages and ioctls."""
    folders = sorted({str(p) for node in NODES for p in PurePosixPath(node).parents if str(p).startswith("/dev/")})
    numbers = {f"OP_{op.name}": int(op) for op in wire.Op}
    numbers |= {name: getattr(wire, name) for name in ("CHUNK", "MAX_MESSAGE", "MAX_FDS", "ABSENT")}
    numbers["MAX_OWN"] = MAX_OWN
    lines = ["#pragma once", *(f"#define {name} {value}" for name, value in numbers.items())]
    lines += _array("char *const", "NODES", [f'"{path}"' for path in NODES])
    lines += _array("char *const", "FOLDERS", [f'"{path}"' for path in folders])
    lines += _array("char *const", "DRIVER_FILES", [f'"{start}"' for start in DRIVER_FILES])
    lines += _array("struct row", "ROWS", [_row(row) for row in ROWS])
    return "\n".join(lines) + "\n"


def _array(kind: str, name: str, items: Iterable[str]) -> list[str]:
    return [f"__attribute__((unused)) static const {kind} {name}[] = {{", *(f"  {item}," for item in items), "};"]


def _row(row: Ioctl) -> str:
    """A `struct row`."""
    into = [offset(row, name) for name in row.fds_in] + [-1, -1]
    out = [offset(row, name) for name in row.fds_out] + [-1]
    assert len(row.fds_in) <= 2
    assert len(row.fds_out) <= 1
    efault = int(row.fd_kind in COPY_BACK_EFAULT)
    return f"{{{row.request:#x}, {int(row.sleeps)}, {efault}, {{{into[0]}, {into[1]}}}, {out[0]}}}"


def offset(row: Ioctl, name: str) -> int:
    """Where in the argument block a 32-bit field is, in bytes: found by what storing to it changes."""
    assert row.struct is not None
    arg, mark = row.struct(), 0x5A3C6978
    set_field(arg, name, mark)
    at = bytes(arg).find(mark.to_bytes(4, "little"))
    assert at >= 0, (row.name, name)
    return at


# ---- running a program ----------------------------------------------------------------------------------------------


def run_in_place(spec: str, command: Sequence[str]) -> NoReturn:
    """Become a program that runs on the board of a spec. PreloadError, BoardError."""
    program = find_program(command[0])
    preload = library()
    board = Connection(spec)
    if board.spec.chip is None:
        board.call(Message(Op.SYNC))
    else:
        pidfd = os.pidfd_open(os.getpid())
        board.call(Message(Op.KEEP, fds=[pidfd]))
        os.close(pidfd)
    prepared = environment(preload, board.pid, board.address, str(board.facts["buffers"]), os.environ)
    sys.stdout.flush()
    try:
        os.execve(program, list(command), prepared)
    except OSError as error:
        raise PreloadError(f"{program} cannot be run: {error.strerror}") from None


def environment(preload: Path, driver: int, address: bytes, buffers: str, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that runs on the board with this driver process, address and name of buffers.

    TEGRAD_BOARD is left out: what runs there finds a device.
    """
    made = {name: value for name, value in base.items() if name != "TEGRAD_BOARD"} | preloaded(preload, base)
    made["TEGRAD_EXEC"] = f"{driver}:{address.hex()}:{buffers}"
    return made


def preloaded(preload: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The variable with which the loader takes the library, before those that it takes already."""
    return {"LD_PRELOAD": " ".join(part for part in (str(preload), base.get("LD_PRELOAD", "")) if part)}


def find_program(name: str) -> str:
    """The path of a program that can take the library. NoProgram, PreloadError."""
    program = shutil.which(name)
    if program is None:
        raise NoProgram(f"there is no program {name!r}: give a path, or a name that PATH finds")
    check_program(program)
    return program


def check_program(path: str) -> None:
    """PreloadError where the loader would ignore the library: a static program, another machine's, one with set-id.

    A script is judged by its interpreter.
    """
    with open(path, "rb") as file:
        head = file.read(4096)
    if head.startswith(b"#!"):
        interpreter = head[2:].split(b"\n", 1)[0].split()
        if interpreter and os.path.exists(interpreter[0]):
            check_program(os.fsdecode(interpreter[0]))
        return
    if os.stat(path).st_mode & 0o6000:
        raise PreloadError(f"{path} runs with another user's rights, so nothing can be preloaded: run a copy of it")
    if not head.startswith(b"\x7fELF"):
        return
    own = Path("/proc/self/exe").read_bytes()[:20]
    if head[4:6] + head[18:20] != own[4:6] + own[18:20]:
        raise PreloadError(
            f"{path} is built for another machine: the board is reached from programs of this one's kind"
        )
    if not _has_interpreter(head):
        raise PreloadError(f"{path} is linked statically, so nothing can be preloaded: link it against libc.so")


def _has_interpreter(head: bytes) -> bool:
    """Whether a 64-bit ELF file names a loader (PT_INTERP, 3)."""
    start, size, count = (int.from_bytes(head[a:b], "little") for a, b in ((32, 40), (54, 56), (56, 58)))
    return any(head[at : at + 4] == b"\3\0\0\0" for at in range(start, start + size * count, size or 1))
