"""The line between the driver process and the GPU process.

The driver calls methods of `tegrad.orin.gpu.Gpu` and waits for each; fds travel with the call. Events come back on a
socket of their own, in the order they happened. A GPU process that dies or hangs is a `GpuLost`: the driver starts
another and replays what it knows, as after a reset of the hardware.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import queue
import signal
import socket
import struct
import threading
import traceback
from typing import Any, Final

from tegrad.hw.chips import Chip
from tegrad.orin import wire
from tegrad.orin.events import GpuEvent, Note

GPU = "tegrad.orin.gpu:Gpu"
CALL_TIMEOUT_S = 60.0
MAX_MESSAGE = 1 << 16
_PR_SET_PDEATHSIG = 1
ENDING: Final = frozenset({"channel_destroy", "tsg_destroy", "syncpoint_free"})
"""Calls after which a number may be somebody else's: what the GPU has to report of it comes before their answer."""
REPORT_S: Final = 1.0
"""Seconds that an answer waits for reports at most: the driver takes none meanwhile, and may have no room for more."""


class GpuLost(Exception):
    """The GPU process died or stopped answering."""


class Link:
    """The driver's end. `events` becomes readable when the GPU has something to report or is gone."""

    def __init__(self, chip: Chip, doorbell: int, *, factory: str = GPU) -> None:
        self._calls, far_calls = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.events, far_events = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._calls.settimeout(CALL_TIMEOUT_S)
        self.events.setblocking(False)
        self.answered = False
        self.pid = os.fork()
        if self.pid == 0:
            _gpu_process(chip, factory, far_calls, far_events, doorbell)
        far_calls.close()
        far_events.close()

    def call(self, method: str, *args: object, fd: int | None = None) -> Any:
        """Call a method of the GPU, with an fd if it takes one. Raises GpuLost; GpuError when the method raised."""
        try:
            message = pickle.dumps((method, args))
            if fd is None:
                self._calls.send(message)
            else:
                socket.send_fds(self._calls, [message], [fd])
            answer, large, _, _ = socket.recv_fds(self._calls, MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise GpuLost(f"{method}: {error}") from error
        if not answer:
            raise GpuLost(f"{method}: the GPU process is gone")
        failure, result = pickle.loads(wire.from_file(large[0]) if large else answer)
        self.answered = True
        if failure is not None:
            raise GpuError(f"{method}: {failure}")
        return result

    def poll(self) -> tuple[list[GpuEvent], bool]:
        """What the GPU reported since the last time, and whether it is gone."""
        found: list[GpuEvent] = []
        while True:
            try:
                data = self.events.recv(MAX_MESSAGE)
            except BlockingIOError:
                return found, False
            except OSError:
                return found, True
            if not data:
                return found, True
            found.append(pickle.loads(data))

    def close(self) -> None:
        """End the GPU process and wait for it."""
        self._calls.close()
        self.events.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class GpuError(Exception):
    """A method of the GPU raised: a bug in the board, not a fault of its user."""


def _gpu_process(chip: Chip, factory: str, calls: socket.socket, events: socket.socket, doorbell: int) -> None:
    """The GPU process, from fork to exit."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _close_all_but(0, 1, 2, calls.fileno(), events.fileno(), doorbell)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _serve(chip, factory, calls, events, doorbell)
        status = 0
    except BaseException:
        for line in traceback.format_exc().splitlines():
            events.send(pickle.dumps(Note(-1, -1, f"GPU process: {line}")))
    finally:
        os._exit(status)


def _close_all_but(*keep: int) -> None:
    """Clients' sockets are the driver's: a copy here would outlive it."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in keep:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(fd)


def _serve(chip: Chip, factory: str, calls: socket.socket, events: socket.socket, doorbell: int) -> None:
    """Build the GPU and answer calls until the driver is gone."""
    outbox: queue.Queue[GpuEvent] = queue.Queue()

    def post() -> None:
        while True:
            try:
                events.send(pickle.dumps(outbox.get()))
            except OSError:
                os._exit(0)
            outbox.task_done()

    threading.Thread(target=post, name="events", daemon=True).start()
    module, _, name = factory.partition(":")
    gpu = getattr(importlib.import_module(module), name)(chip, outbox.put, doorbell)
    while True:
        data, ancillary, _, _ = calls.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        fds = [struct.unpack("i", raw[:4])[0] for _, kind, raw in ancillary if kind == socket.SCM_RIGHTS]
        method, args = pickle.loads(data)
        answer: tuple[str | None, Any]
        try:
            answer = None, _invoke(gpu, method, args, fds)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}", None
        finally:
            for fd in fds:
                os.close(fd)
        if method in ENDING:
            with outbox.all_tasks_done:
                outbox.all_tasks_done.wait_for(lambda: not outbox.unfinished_tasks, REPORT_S)
        _answer(calls, pickle.dumps(answer))


def _answer(calls: socket.socket, data: bytes) -> None:
    """Send an answer; one too long for a message goes as a file."""
    if len(data) <= MAX_MESSAGE:
        calls.send(data)
        return
    fd = wire.to_file(data)
    socket.send_fds(calls, [b"file"], [fd])
    os.close(fd)


def _invoke(gpu: Any, method: str, args: tuple[Any, ...], fds: list[int]) -> Any:
    """Call the method, with the fd in its place."""
    if method == "map":
        vm, va, size, *rest = args
        return gpu.map(vm, va, size, fds[0], *rest)
    return getattr(gpu, method)(*args, *fds)
