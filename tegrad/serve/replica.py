"""A replica: an actor of Ray Serve, which starts an engine and tells Ray whether that still runs.

It calls the server, and what then speaks with the server is the engine's process itself: nothing of an answer goes
through Ray, in which a message was measured to cost a millisecond or more.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tegrad import __version__
from tegrad.errors import TegradError
from tegrad.hub import cache
from tegrad.llm.errors import ModelError
from tegrad.llm.footprint import PROCESS, gpu_has_memory, machine_room
from tegrad.llm.start import choose_gpu, gpus
from tegrad.serve.plan import Plan, Wanted, planned
from tegrad.serve.remote import started
from tegrad.serve.wire import Channel, EngineError, Fault, Refused, packed

CALL_S: Final = 10.0
"""Seconds in which the server has to take a call, and each side to prove that it may call."""
SILENT_S: Final = 15
"""Seconds after which a machine that says nothing counts as gone."""
AGAIN_S: Final = 30.0
"""Seconds until a machine that cannot load the model tries again."""
_NONCE: Final = 32


@dataclass(frozen=True, slots=True)
class Call:
    """What a replica is told: where its server is, and what it is to load."""

    app: str
    """Its name in Ray Serve."""
    address: tuple[str, int]
    secret: bytes
    name: str
    """The model's, for a machine that does not have it at `path`."""
    path: Path
    size: int
    """Bytes of its file."""
    embeds: bool
    wanted: Wanted
    memory: int | None
    """Bytes that it may take, of a machine whose GPU uses the system's."""
    version: str = __version__


@dataclass(frozen=True, slots=True)
class Here:
    """A replica's first words: who it is, and how it would load the model."""

    name: str
    path: Path
    plan: Plan


class Replica:
    """The actor."""

    def __init__(self, call: Call) -> None:
        """Call the server; if it is gone for good, this application of Ray's is removed."""
        self._process: subprocess.Popen[bytes] | None = None
        self._life, self._made = -1, time.monotonic()
        try:
            sock = socket.create_connection(call.address, CALL_S)
        except ConnectionRefusedError:
            _remove(call.app)
            raise
        with sock:
            authenticate(sock, call.secret, calls=True)
            name = _name()
            try:
                sock.sendall(packed(Here(name, *_planned(call))))
            except TegradError as error:
                sock.sendall(packed(Refused(Fault.of(type(error)(f"{name}: {error}")))))
                return
            keep_alive(sock)
            ends, self._life = os.pipe()
            self._process = started(sock, ends)
            os.close(ends)

    def check_health(self) -> None:
        """For Ray, which makes another replica once this fails. EngineError."""
        if self._process is None and time.monotonic() > self._made + AGAIN_S:
            raise EngineError("the model could not be loaded here: another try")
        if self._process is not None and self._process.poll() is not None:
            raise EngineError("the engine of this replica has ended")

    def __del__(self) -> None:
        """The engine ends with this."""
        if self._process is not None:
            os.close(self._life)
            self._process.wait(CALL_S)


def _name() -> str:
    """This machine's address and its GPU's number, which is chosen for the engine unless that is an emulated one."""
    import ray

    (number, *_) = ray.get_runtime_context().get_accelerator_ids().get("GPU") or ["0"]
    if gpus() is not None:
        choose_gpu(int(number))
    return f"{ray.util.get_node_ip_address()}/{number}"


def _planned(call: Call) -> tuple[Path, Plan]:
    """The model's file on this machine and its place in memory. ModelError, OutOfMemory."""
    if call.version != __version__:
        raise ModelError(f"this machine has tegrad {__version__}, its server {call.version}: install the same")
    path = call.path if call.path.exists() else cache.located(call.name)
    if path.stat().st_size != call.size:
        raise ModelError(f"{path} is another file than the server's: copy that one here")
    room = None if gpu_has_memory() else machine_room()
    if call.memory is not None:
        room = call.memory - PROCESS
    return path, planned(path, call.wanted, room, embeds=call.embeds)


def _remove(app: str) -> None:
    """Have Ray end this application: its server was killed and could not do so."""
    with suppress(Exception):  # else Ray starts another replica, which tries again
        from ray import serve

        serve.delete(app, _blocking=False)


# ---- the call's ends


def authenticate(sock: socket.socket, secret: bytes, *, calls: bool) -> None:
    """Prove to each other that both know a secret, before any pickle is read. ConnectionError, TimeoutError."""
    mine = secrets.token_bytes(_NONCE)
    sock.sendall(mine)
    sock.sendall(_proof(secret, _read(sock, _NONCE), calls))
    if not hmac.compare_digest(_read(sock, _NONCE), _proof(secret, mine, not calls)):
        raise ConnectionRefusedError("the other side does not know the secret")


def _proof(secret: bytes, nonce: bytes, calls: bool) -> bytes:
    return hmac.digest(secret, bytes([calls]) + nonce, "sha256")


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := sock.recv(count - len(data))):
            raise ConnectionAbortedError("the other side has left")
        data += more
    return data


def first_words(sock: socket.socket) -> Any:
    """The first message of who has called. ConnectionError, TimeoutError."""
    for message in Channel(sock).messages():
        return message
    raise ConnectionAbortedError("the other side has left")


def keep_alive(sock: socket.socket) -> None:
    """Have a connection end once the other side's machine is gone, and send what is written at once."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENT_S // 3), (socket.TCP_KEEPINTVL, SILENT_S // 3), (socket.TCP_KEEPCNT, 2),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENT_S), (socket.TCP_NODELAY, 1),
    ):  # fmt: skip
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
