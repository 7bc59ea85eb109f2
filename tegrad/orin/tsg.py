"""Timeslice groups: subcontexts, which channels run together, what becomes of them when one fails.

Source: L4T r36.4.3 nvgpu, common/fifo/tsg.c. `tsg_calls` has the TSG fd.
"""

from __future__ import annotations

import errno
import time
from typing import Protocol

from tegrad.hw.faults import NotifierCode
from tegrad.orin.address_space import AddressSpace
from tegrad.orin.channel import DriverChannel
from tegrad.orin.context import GraphicsContext
from tegrad.orin.keeper import Keeper
from tegrad.orin.preemption import Modes
from tegrad.orin.steps import Errno, needed, require
from tegrad.uapi import constants as k
from tegrad.uapi.structs import TsgSmErrorStateRecord

MAX_SUBCONTEXTS = 64
MAX_CHANNELS = 128
MAX_TSGS = 512
TIMESLICE_DEFAULT_US = 1024
FORCED_TRIES, TRY_SECONDS = 10, 0.003
"""How often a forced unbind asks whether a busy channel has ended, and how long it waits between (2 to 4 ms)."""


class KeepsTsgs(Keeper, Protocol):
    """Who keeps groups."""

    tsgs: dict[int, Tsg]


class Listener(Protocol):
    """An open file that becomes readable when its event is raised."""

    event: int

    def make_readable(self) -> None: ...


def _free_number(driver: KeepsTsgs) -> int | None:
    """The lowest number that no group has."""
    return next((i for i in range(MAX_TSGS) if i not in driver.tsgs), None)


class Tsg:
    """A timeslice group. Alive while its fd or a channel is."""

    def __init__(self, driver: KeepsTsgs) -> None:
        self.driver = driver
        self.id = needed(_free_number(driver), errno.ENOMEM)
        self.holders = 1
        self.subcontexts: dict[int, AddressSpace | None] = {}
        self.occupied: dict[int, AddressSpace | None] = {}
        """The subcontexts with channels in them, each with the address space that its first one had."""
        self.channels: list[DriverChannel] = []
        self.runlist: int | None = None
        self.timeslice_us = TIMESLICE_DEFAULT_US
        self.interleave = k.NVGPU_RUNLIST_INTERLEAVE_LEVEL_LOW
        self.modes = Modes()
        self.context: GraphicsContext | None = None
        self.engine_veids: set[int] = set()
        """Subcontexts that an object of one of their channels has given the engine's part of a context."""
        self.sm_errors: dict[int, TsgSmErrorStateRecord] = {}
        self.event_files: list[Listener] = []
        self.instances: list[int] = []
        """Device instances through which it was opened, one entry for each time."""
        self.token_count = 0
        driver.tsgs[self.id] = self
        try:
            driver.tell_gpu("tsg_create", self.id)
        except Errno:
            del driver.tsgs[self.id]
            raise

    def hold(self) -> Tsg:
        """Take a reference."""
        self.holders += 1
        return self

    def drop(self) -> None:
        """Give a reference back; the last one frees the GR context with the TSG."""
        self.holders -= 1
        if self.holders == 0:
            del self.driver.tsgs[self.id]
            if self.context is not None:
                self.context.release()
            self.driver.tell_gpu("tsg_destroy", self.id)

    def make_context(self, vm: AddressSpace) -> GraphicsContext:
        """The GR context, made on first use in the address space of the channel that uses it."""
        if self.context is None:
            self.context = GraphicsContext(self.driver, vm)
        return self.context

    def bind(self, channel: DriverChannel, veid: int) -> None:
        """BIND_CHANNEL's checks, in order.

        A veid of 0 that does not exist is made with the channel's address space, whatever comes of the rest; made
        without one it stays, and no other channel gets it then (ENOSPC). A channel that was unbound may be bound
        again, and a fault is forgotten, but its ring is on no runlist any more.
        """
        require(veid < MAX_SUBCONTEXTS)
        channel.veid = veid
        channel.queue |= veid > 0
        if veid == 0 and self.subcontexts.get(0) is None:
            require(0 not in self.subcontexts, errno.ENOSPC)
            self.subcontexts[0] = channel.vm
        # "No VM" equals "no VM": a channel without address space passes here, and is of no use afterwards.
        require(self.subcontexts.get(veid) is channel.vm)
        require(channel.tsg is None)
        require(len(self.channels) < MAX_CHANNELS)
        require(self.runlist is None or self.runlist == channel.runlist)
        self.runlist = channel.runlist
        require(self.occupied.setdefault(veid, channel.vm) is channel.vm)
        self.channels.append(channel)
        channel.tsg, channel.bound_veid, channel.faulted = self.hold(), veid, False

    def unbind(self, channel: DriverChannel, *, forced: bool) -> None:
        """Take a channel off the runlist: what is in its ring does not run any more.

        One of several channels whose work hangs in the host is busy: Errno(EAGAIN), or some more tries and then the
        end of the TSG where the unbind is `forced`. If the running grid does not give way, the TSG ends too, and the
        unbind fails with EBUSY though the channel is gone. A forced unbind of a subcontext's last channel deletes it.
        """
        failed = self._busy(channel)
        require(forced or not failed, errno.EAGAIN)
        for _ in range(FORCED_TRIES):
            if not failed:
                break
            time.sleep(TRY_SECONDS)
            failed = self._busy(channel)
        if failed:
            self._tear_down(channel, errno.EAGAIN)
        if channel.stop():
            failed = True
            self._tear_down(channel, errno.EBUSY)
        self.channels.remove(channel)
        channel.tsg = None
        if not any(c.bound_veid == channel.bound_veid for c in self.channels):
            del self.occupied[channel.bound_veid]
            if channel.bound_veid in self.engine_veids:
                self.engine_veids.remove(channel.bound_veid)
                self.modes.leave(channel.bound_veid)
            if forced:
                self.subcontexts.pop(channel.veid, None)
        if not failed and channel.syncpoint is not None:
            channel.syncpoint.make_safe()
        self.drop()
        require(forced or not failed, errno.EBUSY)

    def _busy(self, channel: DriverChannel) -> bool:
        """Whether the host still has work of one of several channels that can be served."""
        several = len(self.channels) > 1 and channel.serviceable and channel.running
        return several and bool(self.driver.tell_gpu("channel_busy", channel.chid))

    def _tear_down(self, channel: DriverChannel, number: int) -> None:
        """A channel could not be taken off: every channel of the group is dead, without a notification."""
        self.driver.log.error("nvgpu_tsg_unbind_channel", f"unbind common failed, err={-number}")
        self.driver.log.error(
            "nvgpu_tsg_unbind_channel", f"DriverChannel {channel.chid} unbind failed, tearing down TSG {self.id}"
        )
        self.abort()

    def abort(self) -> None:
        """Stop the group: its channels are unserviceable from now on."""
        self.driver.tell_gpu("tsg_abort", self.id)
        for member in self.channels:
            member.kill()

    def preempt(self) -> bool:
        """Take the group off the engine; whether it gave way. One that never had a channel is on no runlist."""
        if self.runlist is None or self.driver.tell_gpu("tsg_preempt", self.id) is not False:
            return True
        self.driver.log.error(
            "nvgpu_fifo_preempt_tsg",
            f"preempt timed out for tsgid: {self.id}, ctxsw timeout will trigger recovery if needed",
        )
        return False

    def recover(self, code: NotifierCode) -> None:
        """The group has failed, or is made to: every channel of it learns why and dies, then others get the engine."""
        for channel in list(self.channels):
            if channel.fault(code):
                self.driver.log.error(
                    "nvgpu_set_err_notifier_locked",
                    f"error notifier set to {int(code)} for ch {channel.chid} owned by {channel.process.comm}",
                )
        self.driver.tell_gpu("tsg_abort", self.id)

    def post(self, event: int) -> None:
        """Raise an event."""
        for file in self.event_files:
            if file.event == event:
                file.make_readable()

    def schedule(self) -> None:
        """Tell the GPU how the group takes its turns."""
        self.driver.tell_gpu("tsg_schedule", self.id, self.timeslice_us, self.interleave)
        self.driver.tell_gpu("tsg_preemption", self.id, self.modes.image)

    def replay(self) -> None:
        """Tell a new GPU process of this group; its channels stay dead."""
        self.driver.tell_gpu("tsg_create", self.id)
        self.schedule()
