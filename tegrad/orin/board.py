"""Boards: what a spec means, how a board's processes are started, and how a running one is found.

A spec is the name of a chip row, with a memory size if it is to differ (`agx-orin-64gb`, `orin-nano-8gb:2GiB`): a
private board, which this process and its forked children share. Any other name is a board that `tegrad board start`
made. Boards listen on abstract sockets, so nothing of them is left in the file system, however they end.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tegrad.errors import SettingError, TegradError
from tegrad.hw.chips import CHIPS, Chip
from tegrad.installed import lacking_llvmlite, pip_install, search_path

GPU = "tegrad.orin.gpu:Gpu"
LINGER_S = 5.0
START_TIMEOUT_S = 30.0
MIN_MEMORY = 64 << 20
"""Bytes below which a board's memory is taken for a slip of the unit."""
MAX_MEMORY = 1 << 40
"""Bytes that a GPU's addresses reach."""
NEEDED = (
    (resource.RLIMIT_NOFILE, 256, "256 open files", "-n"),
    (resource.RLIMIT_AS, 5 << 38, "1.25 TiB of addresses, without using as much memory", "-v"),
    (resource.RLIMIT_FSIZE, 1 << 30, "files in memory of 1 GiB", "-f"),
)
"""Limits that a board inherits, what it needs of each at least, in words too, and the shell's option: measured with the
shipped model, which runs with 128 files and 1.01 TiB."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class BoardError(TegradError):
    """A board could not be started or reached."""


class SpecError(BoardError):
    """A board's name, chip or size means nothing, or a variable that it reads."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Spec:
    """A private board's chip and memory, or (`chip` None) the name of a shared one."""

    text: str
    chip: Chip | None
    memory: int = 0


def parse_spec(text: str) -> Spec:
    """What TEGRAD_BOARD says. Raises SpecError for a bad size or name."""
    name, _, size = text.partition(":")
    if name in CHIPS:
        chip = CHIPS[name]
        return Spec(text, chip, parse_size(size) if size else chip.mem_bytes)
    check_name(text)
    return Spec(text, None)


def check_name(name: str) -> None:
    """Raise SpecError unless a shared board may be called that."""
    if name.partition(":")[0] in CHIPS:
        raise SpecError(f"{name!r} is a chip's name, which always means a private board: choose another name")
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} names no board: use one of {', '.join(CHIPS)}, or letters and digits for a shared board"
        )


def parse_size(text: str) -> int:
    """Bytes of `512M`, `2GiB`, `8 GB` (all powers of two)."""
    match = _SIZE.fullmatch(text.strip())
    if not match or not int(match[1]):
        raise SpecError(f"{text!r} is no memory size: write it like 512M or 8GiB")
    size = int(match[1]) * _UNITS[match[2].upper()]
    if size < MIN_MEMORY:
        raise SpecError(f"{text!r} is too little memory for a board: give it {MIN_MEMORY >> 20}M or more")
    if size > MAX_MEMORY:
        raise SpecError(f"{text!r} is more memory than a board can address: give it {MAX_MEMORY >> 30}GiB or less")
    return size


def named_address(name: str) -> bytes:
    """The abstract address of a shared board of this user."""
    return b"\0" + _prefix().encode() + name.encode()


def _prefix() -> str:
    return f"tegrad-board-{os.getuid()}-"


SO_ACCEPTCON = 1 << 16
"""Flag of a socket that listens, in /proc/net/unix (__SO_ACCEPTCON, include/linux/net.h)."""


def running() -> list[str]:
    """Names of this user's shared boards, sorted."""
    head = "@" + _prefix()
    names = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, _, *path = line.split()
        # A connection has the name of what accepted it, for a moment longer than the board has it.
        if path and path[0].startswith(head) and int(flags, 16) & SO_ACCEPTCON:
            names.add(path[0].removeprefix(head))
    return sorted(names)


def not_running(name: str) -> BoardError:
    """What to tell who asks for a shared board that is not there."""
    return BoardError(f"no board named {name!r} is running; start it with `tegrad board start {name}`")


def check_spec(text: str) -> None:
    """Raise BoardError where TEGRAD_BOARD can mean nothing: a bad spec, or a shared board that is not there."""
    if parse_spec(text).chip is None and text not in running():
        raise not_running(text)


def connect(address: bytes) -> socket.socket | None:
    """A connection to the board at an address; None when there is none. Refuses another user's socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(address)
    except OSError:
        sock.close()
        return None
    if peer(sock)[1] not in (os.getuid(), 0):
        sock.close()
        raise BoardError("the board's address is taken by another user: choose another board name")
    return sock


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of whoever made the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it gave no reason; set TEGRAD_BOARD_DEBUG=1 to see its stderr"


def start(
    chip: Chip, memory: int, *, name: str | None = None, linger: float | None = LINGER_S, gpu: str = GPU
) -> bytes:
    """Start a board in a process session of its own and return its address once it listens.

    A private one (`name` None) gets a random address. Raises BoardError when it does not come up,
    SpecError for a variable that means nothing to it.
    """
    _check_limits()
    listener = _above_standard(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    address = named_address(name) if name else b"\0tegrad-private-" + os.urandom(12).hex().encode()
    try:
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise BoardError(f"a board named {name!r} is running already: see `tegrad board list`") from error
    with listener:
        command = [sys.executable, "-m", "tegrad.orin", chip.name, str(memory), str(listener.fileno())]
        command += ["forever" if linger is None else str(linger), gpu]
        environment = {**os.environ, "PYTHONPATH": search_path()}
        # The command forks the board and ends, so that the board is nobody's child and never a zombie; and the board
        # lets go of stderr, or whoever waits for the end of our output would wait for the board too.
        done = _started(
            command,
            pass_fds=(listener.fileno(),),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        if done.returncode:
            wrong = SpecError if done.returncode == SettingError.exit_code else BoardError
            raise wrong(f"the emulated board did not start: {_last_line(done.stderr)}")
    return address


def _check_limits() -> None:
    """BoardError where a board, which inherits our limits, cannot live. What may be raised, it raises."""
    if lacking := lacking_llvmlite():
        raise BoardError(f"the emulated board needs {lacking}: {pip_install('board')}")
    for kind, needed, what, option in NEEDED:
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY and most < needed:
            raise BoardError(f"the emulated board needs {what}: raise `ulimit {option}`, or use a new shell")


def raise_limits() -> None:
    """In the board's process: all of NEEDED up to what this user may have."""
    for kind, *_ in NEEDED:
        most = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most, most))


def _above_standard(sock: socket.socket) -> socket.socket:
    """The same socket under a number that no standard stream of a child's has, if its own is one's that was closed."""
    if sock.fileno() > 2:
        return sock
    with sock:
        return socket.socket(fileno=fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, 3))


def _started(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, timeout=START_TIMEOUT_S, check=False, text=True, **options)
    except subprocess.TimeoutExpired:
        raise BoardError(
            f"the emulated board did not start within {START_TIMEOUT_S:g} s: end other programs, then try again"
        ) from None
    except OSError as error:
        raise BoardError(f"the emulated board cannot be started: {error.strerror}; see `ulimit -a`") from error
