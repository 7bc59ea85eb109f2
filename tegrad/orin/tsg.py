"""Timeslice groups: the TSG fd, subcontexts, which channels run together.

Source: L4T r36.4.3 nvgpu, os/linux/ioctl_tsg.c and common/fifo/tsg.c.
"""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

from tegrad.orin.address_space import AddressSpace, AsFile
from tegrad.orin.channel import ChannelFile, DriverChannel, preempted
from tegrad.orin.context import L2_WAYS, GraphicsContext
from tegrad.orin.files import Call, Errno, File, Process, Steps, Table, copy_out, needed, require
from tegrad.orin.preemption import Modes
from tegrad.orin.sharing import Instance, get_share_token, revoke_share_token
from tegrad.orin.tsg_events import EventFile, event_id_ctrl
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi.structs import TsgSmErrorStateRecord

if TYPE_CHECKING:
    from tegrad.orin.driver import Driver

MAX_SUBCONTEXTS = 64
MAX_CHANNELS = 128
MAX_TSGS = 512
FORCED_TRIES, TRY_SECONDS = 10, 0.003
"""How often a forced unbind asks whether a busy channel has ended, and how long it waits between (2 to 4 ms)."""
SECTOR_PROMOTIONS = (
    k.NVGPU_GPU_IOCTL_TSG_L2_SECTOR_PROMOTE_FLAG_NONE,
    k.NVGPU_GPU_IOCTL_TSG_L2_SECTOR_PROMOTE_FLAG_64B,
    k.NVGPU_GPU_IOCTL_TSG_L2_SECTOR_PROMOTE_FLAG_128B,
)
TIMESLICE_MIN_US, TIMESLICE_MAX_US, TIMESLICE_DEFAULT_US = 1000, 50000, 1024


def _free_number(driver: Driver) -> int | None:
    """The lowest number that no group has."""
    return next((i for i in range(MAX_TSGS) if i not in driver.tsgs), None)


class Tsg:
    """A timeslice group. Alive while its fd or a channel is."""

    def __init__(self, driver: Driver) -> None:
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
        self.event_files: list[EventFile] = []
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

    def schedule(self) -> None:
        """Tell the GPU how the group takes its turns."""
        self.driver.tell_gpu("tsg_schedule", self.id, self.timeslice_us, self.interleave)
        self.driver.tell_gpu("tsg_preemption", self.id, self.modes.image)

    def replay(self) -> None:
        """Tell a new GPU process of this group; its channels stay dead."""
        self.driver.tell_gpu("tsg_create", self.id)
        self.schedule()


class TsgFile(File):
    """A TSG fd."""

    kind = "tsg"

    def __init__(self, driver: Driver, process: Process, tsg: Tsg, instance: Instance | None = None) -> None:
        super().__init__(driver, process)
        self.tsg = tsg
        self.instance = None if instance is None else instance.hold()
        if instance is not None:
            tsg.instances.append(instance.id)

    def release(self) -> None:
        """Drop the TSG, with the tokens of the instance it was opened through; it lives on while channels are bound."""
        if self.instance is not None:
            self.instance.revoke(self.tsg)
            self.tsg.instances = [i for i in self.tsg.instances if i != self.instance.id]
            self.instance.drop()
        self.tsg.drop()


def create_subcontext(file: TsgFile, call: Call) -> None:
    """CREATE_SUBCONTEXT: SYNC takes veid 0, ASYNC the lowest free one from 1 (then 0). The VM is not kept alive."""
    arg, taken = call.arg, file.tsg.subcontexts
    address_space = call.file("as_fd", AsFile)
    require(address_space)
    if arg.type == k.NVGPU_TSG_SUBCONTEXT_TYPE_SYNC:
        candidates = range(1)
    elif arg.type == k.NVGPU_TSG_SUBCONTEXT_TYPE_ASYNC:
        candidates = range(1, MAX_SUBCONTEXTS)
    else:
        raise Errno(errno.EINVAL)
    veid = needed(next((v for v in (*candidates, 0) if v not in taken), None), errno.ENOSPC)
    taken[veid] = address_space.vm
    arg.veid = veid


def delete_subcontext(file: TsgFile, call: Call) -> None:
    """DELETE_SUBCONTEXT: not while channels are bound to it; one that does not exist is fine."""
    tsg, veid = file.tsg, call.arg.veid
    require(veid < MAX_SUBCONTEXTS)
    require(veid not in tsg.occupied)
    tsg.subcontexts.pop(veid, None)


def bind_channel_ex(file: TsgFile, call: Call) -> None:
    """BIND_CHANNEL_EX: a channel into a subcontext of the group."""
    found = call.file("channel_fd", ChannelFile)
    require(found)
    file.tsg.bind(found.channel, call.arg.subcontext_id)


def bind_channel(file: TsgFile, call: Call) -> None:
    """BIND_CHANNEL: the same with the veid that the channel has: 0, or what a failed BIND_CHANNEL_EX left."""
    found = call.file("value", ChannelFile)
    require(found)
    file.tsg.bind(found.channel, found.channel.veid)


def unbind_channel(file: TsgFile, call: Call) -> None:
    """UNBIND_CHANNEL: the channel is unserviceable until it is bound again."""
    found = call.file("value", ChannelFile)
    require(found and found.channel.tsg is file.tsg)
    file.tsg.unbind(found.channel, forced=False)


def enable(file: TsgFile, call: Call) -> None:
    """ENABLE."""
    if file.tsg.channels:
        file.driver.tell_gpu("tsg_enable", file.tsg.id)


def disable(file: TsgFile, call: Call) -> None:
    """DISABLE."""
    file.driver.tell_gpu("tsg_disable", file.tsg.id)


def preempt(file: TsgFile, call: Call) -> None:
    """PREEMPT: EBUSY if the running grid does not give way within the context-switch period."""
    require(preempted(file.tsg), errno.EBUSY)


def set_runlist_interleave(file: TsgFile, call: Call) -> None:
    """SET_RUNLIST_INTERLEAVE: how often the group's turn comes."""
    require(call.arg.level < k.NVGPU_RUNLIST_INTERLEAVE_NUM_LEVELS)
    file.tsg.interleave = call.arg.level
    file.tsg.schedule()


def set_timeslice(file: TsgFile, call: Call) -> None:
    """SET_TIMESLICE, in microseconds."""
    require(TIMESLICE_MIN_US <= call.arg.timeslice_us <= TIMESLICE_MAX_US)
    file.tsg.timeslice_us = call.arg.timeslice_us
    file.tsg.schedule()


def get_timeslice(file: TsgFile, call: Call) -> None:
    """GET_TIMESLICE."""
    call.arg.timeslice_us = file.tsg.timeslice_us


def read_single_sm_error_state(file: TsgFile, call: Call) -> Steps:
    """READ_SINGLE_SM_ERROR_STATE: what the last exception left of one SM; at most 24 bytes, of which it tells.

    A bad pointer gives the count of bytes that could not be stored.
    """
    arg, tsg = call.arg, file.tsg
    require(arg.sm_id < file.driver.chip.sm_count)
    record = bytes(tsg.sm_errors.get(arg.sm_id, TsgSmErrorStateRecord()))[: arg.record_size]
    left = yield from copy_out(arg.record_mem, record)
    if left:
        return left
    arg.record_size = len(record)
    return None


def set_l2_max_ways(file: TsgFile, call: Call) -> None:
    """SET_L2_MAX_WAYS_EVICT_LAST: up to the ways of a set; a register of the context, so there must be one."""
    require(call.arg.max_ways <= L2_WAYS)
    needed(file.tsg.context).l2_ways = call.arg.max_ways


def get_l2_max_ways(file: TsgFile, call: Call) -> None:
    """GET_L2_MAX_WAYS_EVICT_LAST."""
    call.arg.max_ways = needed(file.tsg.context).l2_ways


def set_l2_sector_promotion(file: TsgFile, call: Call) -> None:
    """SET_L2_SECTOR_PROMOTION: one of three flags; nothing that this memory would show."""
    require(call.arg.promotion_flag in SECTOR_PROMOTIONS)
    needed(file.tsg.context)


def bind_scheduling_domain(file: TsgFile, call: Call) -> None:
    """BIND_SCHEDULING_DOMAIN: this board has no domain fds, so none is ever right."""
    require(not call.arg.reserved0 and not any(call.arg.reserved))
    raise Errno(errno.ENOENT)


HANDLERS: Table = {
    io.NVGPU_TSG_IOCTL_BIND_CHANNEL.request: bind_channel,
    io.NVGPU_TSG_IOCTL_UNBIND_CHANNEL.request: unbind_channel,
    io.NVGPU_IOCTL_TSG_ENABLE.request: enable,
    io.NVGPU_IOCTL_TSG_DISABLE.request: disable,
    io.NVGPU_IOCTL_TSG_PREEMPT.request: preempt,
    io.NVGPU_IOCTL_TSG_EVENT_ID_CTRL.request: event_id_ctrl,
    io.NVGPU_IOCTL_TSG_SET_RUNLIST_INTERLEAVE.request: set_runlist_interleave,
    io.NVGPU_IOCTL_TSG_SET_TIMESLICE.request: set_timeslice,
    io.NVGPU_IOCTL_TSG_GET_TIMESLICE.request: get_timeslice,
    io.NVGPU_TSG_IOCTL_BIND_CHANNEL_EX.request: bind_channel_ex,
    io.NVGPU_TSG_IOCTL_READ_SINGLE_SM_ERROR_STATE.request: read_single_sm_error_state,
    io.NVGPU_TSG_IOCTL_SET_L2_MAX_WAYS_EVICT_LAST.request: set_l2_max_ways,
    io.NVGPU_TSG_IOCTL_GET_L2_MAX_WAYS_EVICT_LAST.request: get_l2_max_ways,
    io.NVGPU_TSG_IOCTL_SET_L2_SECTOR_PROMOTION.request: set_l2_sector_promotion,
    io.NVGPU_TSG_IOCTL_BIND_SCHEDULING_DOMAIN.request: bind_scheduling_domain,
    io.NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT.request: create_subcontext,
    io.NVGPU_TSG_IOCTL_DELETE_SUBCONTEXT.request: delete_subcontext,
    io.NVGPU_TSG_IOCTL_GET_SHARE_TOKEN.request: get_share_token,
    io.NVGPU_TSG_IOCTL_REVOKE_SHARE_TOKEN.request: revoke_share_token,
}
