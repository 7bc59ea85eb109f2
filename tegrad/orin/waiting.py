"""CHANNEL_WAIT: sleep on a semaphore word or a notifier until an interrupt finds it changed.

Source: L4T r36.4.3 nvgpu, os/linux/ioctl_channel.c and include/nvgpu/linux/cond.h.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable

from tegrad.orin.channel import DriverChannel
from tegrad.orin.channel_calls import ChannelFile
from tegrad.orin.files import Call, Table
from tegrad.orin.nvmap import dmabuf_or_none
from tegrad.orin.steps import Errno, Steps, Until, WaitQueue, needed, require
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io

NOTIFICATION = struct.Struct("<IIIHH")
"""Time in ns and s, info32, info16, status: 16 bytes."""

NOTIFIED = 0xDEADBEEF
"""info32 of a notification that a waiter has seen; info16 is the channel's number."""


def wait(file: ChannelFile, call: Call) -> Steps:
    """WAIT, after which a channel that died meanwhile still answers 0; timeout 0 is for ever."""
    channel, kind = file.channel, call.arg.type
    require(channel.serviceable, errno.ETIMEDOUT)
    if kind == k.NVGPU_WAIT_TYPE_SEMAPHORE:
        return (yield from _semaphore(channel, call))
    require(kind == k.NVGPU_WAIT_TYPE_NOTIFIER)
    return (yield from _notifier(channel, call))


def _sleep(channel: DriverChannel, queue: WaitQueue, timeout_ms: int, done: Callable[[], bool]) -> Steps:
    """Until `done()`, which is looked at when the queue is woken, or the channel is dead. Errno(ETIMEDOUT)."""
    deadline = time.monotonic() + timeout_ms / 1000 if timeout_ms else None
    while not done() and channel.serviceable:
        in_time = yield Until(queue, deadline)
        require(in_time or done(), errno.ETIMEDOUT)
    return None


def _semaphore(channel: DriverChannel, call: Call) -> Steps:
    where = call.arg.condition.semaphore
    require(where.offset % 4 == 0)
    buffer = needed(dmabuf_or_none(call, "condition.semaphore.dmabuf_fd"))
    require(where.offset + 4 <= buffer.length and buffer.allocated)
    wanted = struct.pack("<I", where.payload)
    offset = where.offset
    yield from _sleep(
        channel, channel.semaphore_waiters, call.arg.timeout, lambda: os.pread(buffer.fd, 4, offset) == wanted
    )
    return None


def _notifier(channel: DriverChannel, call: Call) -> Steps:
    """A notification whose status the caller has set to "in progress"; nothing but a notify interrupt wakes it."""
    offset = call.arg.condition.notifier.offset
    buffer = needed(dmabuf_or_none(call, "condition.semaphore.dmabuf_fd"))
    require(offset + NOTIFICATION.size <= buffer.length)
    require(buffer.allocated, errno.ENOMEM)

    def done() -> bool:
        return os.pread(buffer.fd, 2, offset + 14) == b"\0\0"

    try:
        yield from _sleep(channel, channel.notifier_waiters, call.arg.timeout, done)
    except Errno:
        raise Errno(errno.EINTR) from None  # the driver takes any failure of the wait for a signal
    require(done(), errno.ETIMEDOUT)
    now = time.monotonic_ns()
    seen = NOTIFICATION.pack(now % 10**9, now // 10**9, NOTIFIED, channel.chid, 0)
    os.pwrite(buffer.fd, seen[:14], offset)
    return None


HANDLERS: Table = {io.NVGPU_IOCTL_CHANNEL_WAIT.request: wait}
