"""Boards: what a spec means, how a board's processes are started, and how a running one is found.

A spec is the name of a chip row, with a memory size if it is to differ (`agx-orin-64gb`, `orin-nano-8gb:2GiB`): a
private board, which this process and its forked children share. Any other name is a board that `tegrad board start`
made. Boards listen on abstract sockets, so nothing of them is left in the file system, however they end.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tegrad.errors import TegradError
from tegrad.hw.chips import CHIPS, Chip
from tegrad.installed import pip_install

GPU = "tegrad.orin.gpu:Gpu"
LINGER_S = 5.0
START_TIMEOUT_S = 30.0
MIN_MEMORY = 64 << 20
"""Bytes below which a board's memory is taken for a slip of the unit."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class BoardError(TegradError):
    """A board could not be started or reached."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A private board's chip and memory, or (`chip` None) the name of a shared one."""

    text: str
    chip: Chip | None
    memory: int = 0


def parse_spec(text: str) -> Spec:
    """What TEGRAD_BOARD says. Raises BoardError for a bad size or name."""
    name, _, size = text.partition(":")
    if name in CHIPS:
        chip = CHIPS[name]
        return Spec(text, chip, parse_size(size) if size else chip.mem_bytes)
    check_name(text)
    return Spec(text, None)


def check_name(name: str) -> None:
    """Raise BoardError unless a shared board may be called that."""
    if name.partition(":")[0] in CHIPS:
        raise BoardError(f"{name!r} is a chip's name, which always means a private board; choose another name")
    if not _NAME.fullmatch(name):
        raise BoardError(
            f"{name!r} names no board: use one of {', '.join(CHIPS)}, or letters and digits for a shared board"
        )


def parse_size(text: str) -> int:
    """Bytes of `512M`, `2GiB`, `8 GB` (all powers of two)."""
    match = _SIZE.fullmatch(text.strip())
    if not match or not int(match[1]):
        raise BoardError(f"{text!r} is no memory size: write it like 512M or 8GiB")
    size = int(match[1]) * _UNITS[match[2].upper()]
    if size < MIN_MEMORY:
        raise BoardError(f"{text!r} is too little memory for a board: give it {MIN_MEMORY >> 20}M or more")
    return size


def named_address(name: str) -> bytes:
    """The abstract address of a shared board of this user."""
    return b"\0" + _prefix().encode() + name.encode()


def _prefix() -> str:
    return f"tegrad-board-{os.getuid()}-"


def running() -> list[str]:
    """Names of this user's shared boards, sorted."""
    head = "@" + _prefix()
    names = set()
    for line in Path("/proc/net/unix").read_text().splitlines():
        path = line.rsplit(" ", 1)[-1]
        if path.startswith(head):
            names.add(path.removeprefix(head))
    return sorted(names)


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
        raise BoardError("the board's address is taken by another user; choose another board name")
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

    A private one (`name` None) gets a random address. Raises BoardError when it does not come up.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = named_address(name) if name else b"\0tegrad-private-" + os.urandom(12).hex().encode()
    try:
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise BoardError(f"a board named {name!r} is running already; see `tegrad board list`") from error
    with listener:
        command = [sys.executable, "-m", "tegrad.orin", chip.name, str(memory), str(listener.fileno())]
        command += ["forever" if linger is None else str(linger), gpu]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        # The command forks the board and ends, so that the board is nobody's child and never a zombie; and the board
        # lets go of stderr, or whoever waits for the end of our output would wait for the board too.
        done = subprocess.run(
            command,
            pass_fds=(listener.fileno(),),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            reason = _last_line(done.stderr)
            remedy = f"; {pip_install('board')}" if "llvmlite" in reason else ""
            raise BoardError(f"the emulated board did not start: {reason}{remedy}")
    return address
