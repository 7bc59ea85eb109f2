"""Calls whose handlers sleep, without a board around them."""

from __future__ import annotations

import errno
import socket
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tegrad.orin import wire
from tegrad.orin.calls import Calls
from tegrad.orin.steps import Errno, Steps, Until, WaitQueue
from tegrad.orin.wire import Message, Op
from tegrad.uapi import ioctls as io


def _ignore(_: object) -> None:
    pass


class Sleepers:
    """Calls that sleep on one queue, each until a deadline of its own, and answer whether they were woken in time."""

    def __init__(self) -> None:
        self.queue, self.deadline = WaitQueue(), 0.0
        driver = SimpleNamespace(
            state=SimpleNamespace(calls=Counter[str]()), row=lambda *_: io.NVGPU_IOCTL_CHANNEL_WAIT, begin=self._begin
        )
        sockets: Any = SimpleNamespace(driver=driver, watch=_ignore, unwatch=_ignore, put=_ignore)
        self.calls = Calls(sockets)

    def _begin(self, *_: object) -> Steps:
        def sleep() -> Steps:
            if not (yield Until(self.queue, self.deadline)):
                raise Errno(errno.ETIMEDOUT)
            return None

        return sleep()

    def call(self, deadline: float) -> tuple[socket.socket, int]:
        """The caller's end, and the number of the board's."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.deadline, number = deadline, far.fileno()
        file: Any = SimpleNamespace(calls=0)
        self.calls.begin(file, Message(Op.IOCTL, io.NVGPU_IOCTL_CHANNEL_WAIT.request, payload=bytes(64)), far)
        return near, number


def answer(near: socket.socket) -> int:
    with near:
        near.setblocking(False)
        got = wire.receive(near)
    assert got is not None
    return got[0].code


@pytest.mark.parametrize("end", ["deadline", "death"])
def test_a_queue_keeps_no_call_that_is_over(end: str) -> None:
    """Nobody may ever wake it; those that sleep on are woken."""
    sleepers = Sleepers()
    first, later = sleepers.call(float("inf")), sleepers.call(0.0 if end == "deadline" else float("inf"))
    assert len(sleepers.queue.waiters) == 2
    if end == "deadline":
        sleepers.calls.expire()
    else:
        sleepers.calls.abandon(later[1])
    assert len(sleepers.queue.waiters) == 1
    assert answer(later[0]) == (errno.ETIMEDOUT if end == "deadline" else errno.EINTR)
    sleepers.queue.wake()
    assert sleepers.queue.waiters == []
    assert answer(first[0]) == 0


def test_a_call_that_ends_while_its_queue_is_woken_is_no_error() -> None:
    """The handler of the one ends the other."""
    sleepers = Sleepers()
    first, other = sleepers.call(float("inf")), sleepers.call(float("inf"))
    sleepers.queue.waiters.insert(0, lambda: sleepers.calls.abandon(other[1]))
    sleepers.queue.wake()
    assert [answer(first[0]), answer(other[0])] == [0, errno.EINTR]
    assert sleepers.calls.next_deadline() is None
