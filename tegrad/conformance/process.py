"""A second process, forked, with a line to the first: it does not outlive it. That of a rule has a rig of its own."""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tegrad.conformance.rule import Differs, NotApplicable

if TYPE_CHECKING:
    from tegrad.conformance.rig import Rig

_LIMIT = 1 << 16
PR_SET_PDEATHSIG = 1
"""linux/prctl.h. It is kept over exec, and is sent when the thread that made the process ends."""
_libc = ctypes.CDLL(None)


def bound() -> Callable[[], None]:
    """For the new process to call, before exec or after a fork: it is killed when this one ends, even by SIGKILL."""
    parent = os.getpid()

    def bind() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    return bind


class Peer:
    """One end of the line between two processes: plain values (JSON) and fds, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, value: object = None, *fds: int) -> None:
        """Send a value and duplicates of fds."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._sock.sendmsg([json.dumps(value).encode()], rights)

    def receive(self) -> tuple[Any, list[int]]:
        """The next value and its fds, which are the caller's to close. EOFError when the other side is gone."""
        data, fds, _, _ = socket.recv_fds(self._sock, _LIMIT, 16)
        if not data:
            raise EOFError("the other process is gone")
        return json.loads(data), list(fds)

    def value(self) -> Any:
        """The next value."""
        return self.receive()[0]

    def waits(self, seconds: float = 0) -> bool:
        """Whether there is a value, or the other side is gone, within some time."""
        return bool(select.select([self._sock], [], [], seconds)[0])

    def close(self) -> None:
        """Hang up."""
        self._sock.close()


ChildFunction = Callable[["Rig", Peer], object]


class Forked:
    """A forked process that runs a function. What became of that is the last it says: "ok" and what it returned, or
    "error" and why, or as `Child.result` reads it."""

    def __init__(self, function: Callable[[Peer], object]) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.peer = Peer(near)
        self._ended = False
        bind = bound()
        self.pid = os.fork()
        if self.pid == 0:
            bind()
            near.close()
            _run(function, Peer(far))
        far.close()

    def kill(self) -> None:
        """End the process with SIGKILL and wait until it is gone. Twice is harmless."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._wait()

    def close(self) -> None:
        """Kill the process if it still runs and hang up."""
        self.kill()
        self.peer.close()

    def _wait(self) -> None:
        if not self._ended:
            os.waitpid(self.pid, 0)
            self._ended = True


class Child(Forked):
    """That of a rule. `result` waits for what its function returns."""

    def __init__(self, rig: Rig, function: ChildFunction) -> None:
        def run(peer: Peer) -> object:
            with rig.in_child() as own:
                return function(own, peer)

        super().__init__(run)

    def result(self) -> Any:
        """What the function returned; its Differs, NotApplicable and errors are raised here."""
        kind, *rest = self.peer.value()
        self._wait()
        if kind == "differs":
            raise Differs(*rest)
        if kind == "not applicable":
            raise NotApplicable(*rest)
        if kind == "error":
            raise RuntimeError(f"in the rule's second process: {rest[0]}")
        return rest[0]


def _run(function: Callable[[Peer], object], peer: Peer) -> None:
    """The second process, from fork to exit."""
    answer: list[object] = ["error", "it ended without an answer"]
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        answer = ["ok", function(peer)]
    except Differs as difference:
        answer = ["differs", difference.expected, difference.seen]
    except NotApplicable as reason:
        answer = ["not applicable", str(reason)]
    except BaseException as error:
        answer = ["error", f"{type(error).__name__}: {error}"]
    finally:
        with contextlib.suppress(Exception):
            peer.send(answer)
        os._exit(0)
