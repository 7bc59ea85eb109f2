"""Channels: what one holds, when it can do work, and its error notifier. `channel_calls` has the channel fd.

Source: L4T r36.4.3 nvgpu, common/fifo/channel.c.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tegrad.hw.faults import NOTIFIER_ERROR, NotifierCode
from tegrad.orin.address_space import AddressSpace
from tegrad.orin.buffers import Buffer
from tegrad.orin.keeper import Keeper
from tegrad.orin.steps import Process, WaitQueue, require
from tegrad.orin.syncpoint import Syncpoint

if TYPE_CHECKING:  # a channel and its group know each other
    from tegrad.orin.tsg import Tsg

MAX_CHANNELS = 512
CONTEXT_SWITCH_MS = 3000
"""How long a channel may keep its TSG on the engine when another wants it, unless SET_TIMEOUT says otherwise."""
NOTIFIER_SIZE = 16


@dataclass(frozen=True, slots=True)
class Notifier:
    """Where a channel's error record lies: 16 bytes of a buffer."""

    buffer: Buffer
    offset: int

    def clear(self) -> None:
        """Zero the record, as registering does."""
        os.pwrite(self.buffer.fd, bytes(NOTIFIER_SIZE), self.offset)

    def set(self, code: int) -> bool:
        """Write an error unless one is there; the status goes last. Whether it was written."""
        (status,) = struct.unpack("<H", os.pread(self.buffer.fd, 2, self.offset + 14))
        if status == NOTIFIER_ERROR:
            return False
        os.pwrite(self.buffer.fd, struct.pack("<QI", time.time_ns(), code), self.offset)
        os.pwrite(self.buffer.fd, struct.pack("<H", NOTIFIER_ERROR), self.offset + 14)
        return True


class KeepsChannels(Keeper, Protocol):
    """Who keeps channels."""

    channels: dict[int, DriverChannel]
    free_chids: list[int]
    """Numbers that no channel has; the last one is the next that is given out."""


class DriverChannel:
    """A hardware channel. Its id comes from a stack that starts with the highest; a freed one is used next."""

    def __init__(self, driver: KeepsChannels, process: Process, runlist: int) -> None:
        require(driver.free_chids, errno.ENOMEM)
        self.driver, self.process, self.runlist = driver, process, runlist
        self.chid = driver.free_chids.pop()
        driver.channels[self.chid] = self
        self.vm: AddressSpace | None = None
        self.tsg: Tsg | None = None
        self.veid = self.bound_veid = 0
        """What it was last to be bound to, though that may have failed, and the subcontext that it is in."""
        self.queue = 0
        """The host queue of its runlist: 1 once it was to be bound to a veid above 0, and from then on."""
        self.watchdog = True
        self.watchdog_ms = 5000
        self.faulted = False
        self.set_up = False
        self.running = False
        self.gpfifo_va = 0
        self.userd: Buffer | None = None
        self.classes: list[int] = []
        self.last_class = 0
        self.timeout_ms = CONTEXT_SWITCH_MS
        self.stuck_ms = 0
        """Milliseconds for which its TSG kept others waiting; never set back for a ring that the client fills."""
        self.notifier: Notifier | None = None
        self.syncpoint: Syncpoint | None = None
        self.semaphore_waiters = WaitQueue()
        self.notifier_waiters = WaitQueue()
        self.railgate_allowed = False

    @property
    def serviceable(self) -> bool:
        """Whether it may still do work: bound to a TSG and without a fault."""
        return self.tsg is not None and not self.faulted

    def stop(self) -> bool:
        """Off the engine; nothing that is queued runs any more. Whether that ended its whole TSG."""
        if not self.running:
            return False
        self.running = False
        return bool(self.driver.tell_gpu("channel_destroy", self.chid))

    def kill(self) -> None:
        """Become unserviceable; whoever waits for its syncpoint goes on, whoever sleeps in WAIT is not woken."""
        self.faulted = True
        self.stop()
        if self.syncpoint is not None:
            self.syncpoint.make_safe()

    def wake(self) -> None:
        """Let everybody who sleeps in WAIT look again."""
        self.semaphore_waiters.wake()
        self.notifier_waiters.wake()

    def give_objects(self, classes: Sequence[int]) -> None:
        """Let the engines know the channel's context, once it runs and if they can load it."""
        if self.running and self.tsg is not None and self.tsg.context is not None and self.tsg.context.valid:
            for class_id in classes:
                self.driver.tell_gpu("object_ctx", self.chid, class_id)

    def release(self) -> None:
        """The last fd is closed: unbind, then give back what it holds, in the driver's order."""
        if self.tsg is not None:
            self.tsg.unbind(self, forced=True)
        self.wake()
        vm = self.vm
        if vm is not None and self.userd is not None:
            vm.unmap_kernel(self.gpfifo_va)
            self.userd.drop()
        if self.syncpoint is not None:
            self.syncpoint.release()
        if vm is not None:
            vm.drop()
        self.set_notifier(None)
        del self.driver.channels[self.chid]
        self.driver.free_chids.append(self.chid)

    def set_notifier(self, notifier: Notifier | None) -> None:
        """Replace the error notifier; the old one's buffer is let go."""
        old, self.notifier = self.notifier, notifier
        if old is not None:
            old.buffer.drop()

    def fault(self, code: NotifierCode) -> bool:
        """Become unserviceable, tell whoever waits; whether a notifier is registered."""
        if self.notifier is not None:
            self.notifier.set(code)
        self.kill()
        self.wake()
        return self.notifier is not None
