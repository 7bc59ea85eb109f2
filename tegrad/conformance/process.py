"""A second process of a rule: forked, with a rig of its own, and a line to the first. It does not outlive it."""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
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
    """One end of the line between two processes of a rule: plain values (JSON) and fds, in order."""

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
            raise EOFError("the other process of the rule is gone")
        return json.loads(data), list(fds)

    def value(self) -> Any:
        """The next value."""
        return self.receive()[0]

    def close(self) -> None:
        """Hang up."""
        self._sock.close()


ChildFunction = Callable[["Rig", Peer], object]


class Child:
    """A forked process that runs a function. `result` waits for what it returns; `kill` ends it at once."""

    def __init__(self, rig: Rig, function: ChildFunction) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.peer = Peer(near)
        self._ended = False
        bind = bound()
        self.pid = os.fork()
        if self.pid == 0:
            bind()
            near.close()
            _child(rig, function, Peer(far))
        far.close()

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


def _child(rig: Rig, function: ChildFunction, peer: Peer) -> None:
    """The second process, from fork to exit."""
    answer: list[object] = ["error", "it ended without an answer"]
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with rig.in_child() as own:
            answer = ["ok", function(own, peer)]
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
