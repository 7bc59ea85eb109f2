"""Calls in progress: from an ioctl's message to its answer, through whatever its handler waits for."""

from __future__ import annotations

import ctypes
import errno
import json
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tegrad.orin import wire
from tegrad.orin.buffers import Buffer
from tegrad.orin.files import Call, File, block, writes_caller
from tegrad.orin.nvmap import read_only
from tegrad.orin.sockets import Sockets, deliver
from tegrad.orin.steps import CloseFd, CopyIn, CopyOut, Errno, FindVma, GetFile, Request, Steps, Until, Vma
from tegrad.orin.wire import Message, Op
from tegrad.uapi.ioctls import ROWS

NAMES = {row.request: row.name for row in ROWS}


@dataclass(slots=True)
class Pending:
    """One call, the socket that takes its answer, and the buffers that it keeps alive meanwhile."""

    file: File
    call: Call
    reply: socket.socket
    held: list[Buffer]
    steps: Steps | None = None
    waiting: Request | None = None
    deadline: float | None = None
    wake: Callable[[], None] | None = None


class Calls:
    """The calls whose handlers wait, for the clients of a board."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._by_fd: dict[int, Pending] = {}  # by fd of the reply socket
        self._sleeping: list[Pending] = []

    def __contains__(self, fd: int) -> bool:
        return fd in self._by_fd

    def next_deadline(self) -> float | None:
        """When the first sleeping call must be looked at, on the monotonic clock."""
        return min((p.deadline for p in self._sleeping if p.deadline is not None), default=None)

    def expire(self) -> None:
        """Resume the calls whose time is up."""
        now = time.monotonic()
        for pending in [p for p in self._sleeping if p.deadline is not None and p.deadline <= now]:
            self._resume(pending, False)

    def begin(self, file: File, message: Message, reply: socket.socket) -> None:
        """Carry out one ioctl as far as it goes; takes the message's fds and the reply socket over."""
        driver, held = self._sockets.driver, list[Buffer]()
        driver.state.calls[NAMES.get(message.code, "ioctl")] += 1
        try:
            found = [None if fd is None else self._sockets.resolve(fd, held) for fd in message.fds]
            unwritable = [fd is not None and read_only(fd) for fd in message.fds]
            message.close_fds()
            row = driver.row(file, message.code, len(message.payload))
        except Errno as refusal:
            message.close_fds()
            with reply:
                deliver(reply, Message(Op.DONE, refusal.number))
            for buffer in held:
                buffer.drop()
            return
        files = dict(zip(row.fds_in, found, strict=False))
        barred = frozenset(name for name, one in zip(row.fds_in, unwritable, strict=False) if one)
        call = Call(row, block(row, message.payload), message.value, files, barred)
        file.calls += 1
        pending = Pending(file, call, reply, held)
        try:
            outcome = driver.begin(file, call)
        except Errno as refusal:
            self._finish(pending, refusal.number)
        except Exception as bug:
            self._broken(pending, bug)
        else:
            if outcome is None or isinstance(outcome, int):
                self._finish(pending, 0, outcome or 0)
            else:
                pending.steps = outcome
                self._advance(pending, None)

    def answered(self, fd: int) -> None:
        """The caller's side has done what a handler asked of it."""
        pending = self._by_fd[fd]
        try:
            got = wire.receive(pending.reply)
        except BlockingIOError:
            return
        except OSError as lost:  # no room for the fd of the answer, which is gone
            self._give_up(pending, lost.errno or errno.EMFILE)
            return
        if got is None:
            return
        message = got[0]
        try:
            value = self._value(pending, message)
        except Errno as refusal:
            self._give_up(pending, refusal.number)
            return
        finally:
            message.close_fds()
        self._advance(pending, value)

    def abandon(self, fd: int) -> None:
        """The caller died in the middle of a call."""
        self._give_up(self._by_fd[fd], errno.EINTR)

    def _give_up(self, pending: Pending, code: int) -> None:
        """End a call whose handler waits."""
        assert pending.steps is not None
        pending.steps.close()
        self._finish(pending, code)

    def _value(self, pending: Pending, message: Message) -> Any:
        """What the handler gets for what it waited for."""
        wait = pending.waiting
        if isinstance(wait, CopyIn):
            return message.payload
        if isinstance(wait, CopyOut):
            return message.code
        if isinstance(wait, GetFile):
            fd = message.fds[0] if message.fds else None
            wait.unwritable = fd is not None and read_only(fd)
            return None if fd is None else self._sockets.resolve(fd, pending.held)
        if isinstance(wait, FindVma):
            return Vma(**json.loads(message.payload)) if message.payload else None
        return None

    def _advance(self, pending: Pending, value: Any) -> None:
        """Run the handler to its next wait or to its end."""
        assert pending.steps is not None
        try:
            wait = pending.steps.send(value)
        except StopIteration as end:
            self._finish(pending, 0, end.value or 0)
        except Errno as refusal:
            self._finish(pending, refusal.number)
        except Exception as bug:
            self._broken(pending, bug)
        else:
            self._suspend(pending, wait)

    def _suspend(self, pending: Pending, wait: Request) -> None:
        pending.waiting = wait
        if pending.reply.fileno() not in self._by_fd:
            self._by_fd[pending.reply.fileno()] = pending
            self._sockets.watch(pending.reply)
        if isinstance(wait, Until):
            pending.deadline = wait.deadline
            self._sleeping.append(pending)
            if wait.queue is not None:
                pending.wake = lambda: self._resume(pending, True)
                wait.queue.waiters.append(pending.wake)
        else:
            deliver(pending.reply, _question(wait))

    def _resume(self, pending: Pending, value: bool) -> None:
        """A timer or a wake-up: only for a call that still sleeps."""
        if self._roused(pending):
            self._advance(pending, value)

    def _roused(self, pending: Pending) -> bool:
        """Let a call sleep no more, nor its queue keep it; whether it slept."""
        if pending not in self._sleeping:
            return False
        self._sleeping.remove(pending)
        wait, wake, pending.wake = pending.waiting, pending.wake, None
        if isinstance(wait, Until) and wait.queue is not None and wake is not None:
            wait.queue.leave(wake)
        return True

    def _broken(self, pending: Pending, bug: Exception) -> None:
        """A handler failed in a way that no driver does: say so, and keep serving the others."""
        for line in traceback.format_exception(bug):
            self._sockets.driver.state.log.board(f"{pending.call.row.name}: {line.rstrip()}")
        self._finish(pending, errno.EIO)

    def _finish(self, pending: Pending, code: int, value: int = 0) -> None:
        """Answer the call and let go of what it held."""
        call, file, sockets = pending.call, pending.file, self._sockets
        self._roused(pending)
        if self._by_fd.pop(pending.reply.fileno(), None) is not None:
            sockets.unwatch(pending.reply)
        ends: list[socket.socket] = []
        answer = Message(Op.DONE, code, value)
        if not code:
            try:
                answer.fds = [self._new_fd(call.new[name], ends) for name in call.row.fds_out if name in call.new]
                answer.payload = _copied_back(call, value)
            except Errno as full:
                answer.code, answer.value = full.number, 0
        if answer.code:
            for made in call.new.values():
                if isinstance(made, File) and made.sock is None:  # one that has a socket goes with the other end of it
                    made.release()
            if call.copy_back_always:
                answer.payload = _block(call)
        with pending.reply:
            deliver(pending.reply, answer)
        for end in ends:
            end.close()
        for buffer in pending.held:
            buffer.drop()
        file.calls -= 1
        sockets.put(file)

    def _new_fd(self, made: File | int, ends: list[socket.socket]) -> int:
        """The fd to send for what a handler installed; a file's is kept in `ends` until it is sent."""
        if isinstance(made, int):
            return made
        ends.append(self._sockets.give(made))
        return ends[-1].fileno()


def _copied_back(call: Call, value: int) -> bytes:
    """The argument block as the caller gets it; a handler that returns a count stopped before that."""
    if call.arg is None or not (call.copy_back or (writes_caller(call.row) and not value)):
        return b""
    return _block(call)


def _block(call: Call) -> bytes:
    return ctypes.string_at(ctypes.addressof(call.arg), ctypes.sizeof(call.arg))


def _question(wait: Request) -> Message:
    """What the caller's side is asked to do."""
    if isinstance(wait, CopyIn):
        return Message(Op.COPY_IN, wait.size, wait.address)
    if isinstance(wait, CopyOut):
        return Message(Op.COPY_OUT, 0, wait.address, wait.data)
    if isinstance(wait, GetFile):
        return Message(Op.GET_FILE, 0, wait.fd)
    if isinstance(wait, CloseFd):
        return Message(Op.CLOSE_FD, 0, wait.fd)
    assert isinstance(wait, FindVma)
    return Message(Op.FIND_VMA, 0, wait.address)
