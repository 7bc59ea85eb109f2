"""Connections to boards: one session per process and board, started on first use, and how one request travels on it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import stat
import threading
from pathlib import Path
from typing import Any

from tegrad.orin import board, wire
from tegrad.orin.board import BoardError, parse_spec
from tegrad.orin.caller import serve
from tegrad.orin.wire import Message, Op


class Me:
    """This process as the board knows it; a forked child is another one."""

    token = secrets.token_hex(8)

    @classmethod
    def renew(cls) -> None:
        """Become another process."""
        cls.token = secrets.token_hex(8)


def _comm() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/self/comm").read_text().strip()
    return "?"


def call(to: int | socket.socket, request: Message, *, peer: int | None = None) -> Message:
    """Send a request on a socket or an fd of one, and serve the board until the answer comes. Raises OSError.

    With `peer`, the fd may be anything of the caller's: nothing is written to it unless that process made it.
    """
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near:
        with far, _copy(to) if isinstance(to, int) else contextlib.nullcontext(to) as sock:
            if peer is not None and not _made_by(sock, peer):
                raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
            wire.send(sock, request, reply=far.fileno())
        while True:
            got = wire.receive(near)
            if got is None:
                raise OSError(errno.EPIPE, "the board is gone")
            answer = got[0]
            if answer.op == Op.DONE:
                return answer
            wire.send(near, serve(answer))


def _copy(fd: int) -> socket.socket:
    """Another fd of the caller's socket. OSError(ENOTSOCK) if it is none.

    Never the caller's own: the exception of a signal may destroy the object at any moment, which closes its fd.
    """
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):  # socket() would refuse the copy, and leave it open
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=os.dup(fd))


def _made_by(sock: socket.socket, pid: int) -> bool:
    """Whether a socket is a device fd of the board whose driver has this pid."""
    kind = sock.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN), sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    return kind == (socket.AF_UNIX, socket.SOCK_SEQPACKET) and board.peer(sock)[0] == pid


class Connection:
    """This process's session with one board, started on first use; a forked child gets its own."""

    def __init__(self, spec: str, *, linger: float = board.LINGER_S, gpu: str = board.GPU) -> None:
        self.spec, self.start = parse_spec(spec), (linger, gpu)
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._address = board.named_address(spec) if self.spec.chip is None else b""
        self.facts: dict[str, Any] = {}

    def sync(self) -> None:
        """Wait until the board has seen everything that we closed. A board that is gone has."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                call(sock, Message(Op.SYNC))

    def call(self, request: Message) -> Message:
        """A request to the board itself; starts a private one when there is none. Raises OSError, BoardError."""
        for attempt in (1, 2):
            sock = None
            try:
                sock = self._session()
                answer = call(sock, request)
            except OSError as error:
                closed = sock is not None and sock.fileno() < 0  # another thread was first to find the board gone
                if not closed and not isinstance(error, BrokenPipeError | ConnectionResetError):
                    raise
                if sock is not None:  # else the board has ended before it took us
                    self._forget(sock)
                if attempt == 2:
                    raise OSError(errno.EPIPE, "the board is gone") from error
            else:
                if answer.code:
                    raise OSError(answer.code, os.strerror(answer.code))
                return answer
        raise AssertionError

    def stop(self, seconds: float = 10.0) -> None:
        """End the board and wait until it is gone. BoardError if that takes too long."""
        self.call(Message(Op.STOP))
        sock = self._session()
        sock.settimeout(seconds)
        try:
            while sock.recv(1):
                pass
        except TimeoutError:
            raise BoardError(f"board {self.spec.text!r} does not stop: kill process {self.pid}") from None
        except OSError:
            pass
        self._forget(sock)

    @property
    def pid(self) -> int:
        """The driver process, once there is a session."""
        return int(self.facts.get("pid", 0))

    @property
    def address(self) -> bytes:
        """Where the board listens; empty before a private one is started."""
        return self._address

    def _session(self) -> socket.socket:
        with self._lock:
            if self._sock is not None:
                return self._sock
            sock = board.connect(self._address) if self._address else None
            if sock is None:
                if self.spec.chip is None:
                    raise board.not_running(self.spec.text)
                self._address = board.start(self.spec.chip, self.spec.memory, linger=self.start[0], gpu=self.start[1])
                sock = board.connect(self._address)
                if sock is None:
                    raise BoardError("the emulated board ended right after its start")
            me = {"token": Me.token, "pid": os.getpid(), "comm": _comm()}
            try:
                hello = call(sock, Message(Op.HELLO, payload=json.dumps(me).encode()))
            except OSError:
                sock.close()
                raise
            self.facts = json.loads(hello.payload)
            self._sock = sock
            return sock

    def forked(self) -> None:
        """We are a child now: the session and whatever lock a thread held are the parent's."""
        self._lock = threading.Lock()
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            if self._sock is sock:
                self._sock = None
        sock.close()


_connections: dict[str, Connection] = {}
_connections_lock = threading.Lock()


def connection(spec: str, *, linger: float = board.LINGER_S, gpu: str = board.GPU) -> Connection:
    """This process's one connection to the board of a spec; the first to ask decides how that is started.

    BoardError for one who asks for another way of starting it.
    """
    with _connections_lock:
        known = _connections.setdefault(spec, Connection(spec, linger=linger, gpu=gpu))
    if (linger, gpu) not in ((board.LINGER_S, board.GPU), known.start):
        raise BoardError(f"the board of {spec!r} was started in another way in this process: use another memory size")
    return known


def _forked() -> None:
    global _connections_lock
    Me.renew()
    _connections_lock = threading.Lock()
    for known in _connections.values():
        known.forked()


os.register_at_fork(after_in_child=_forked)
