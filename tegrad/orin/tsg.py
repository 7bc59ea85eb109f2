"""Timeslice groups: the TSG fd, subcontexts, which channels run together.

Source: L4T r36.4.3 nvgpu, os/linux/ioctl_tsg.c and common/fifo/tsg.c.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tegrad.orin.address_space import AddressSpace, AsFile
from tegrad.orin.channel import Channel, ChannelFile
from tegrad.orin.files import Call, Errno, File, Process, Steps, Table, copy_out, needed, require
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi.structs import TsgSmErrorStateRecord

if TYPE_CHECKING:
    from tegrad.orin.driver import Driver

MAX_SUBCONTEXTS = 64
ADDRESS_BITS = 40
CONTEXT_IMAGE, CONTEXT_BUFFERS = 1 << 20, 4 << 20  # bytes; orders of magnitude, the real sizes are firmware's
MAX_CHANNELS = 128
MAX_TSGS = 512
TIMESLICE_MIN_US, TIMESLICE_MAX_US, TIMESLICE_DEFAULT_US = 1000, 50000, 1024


class GraphicsContext:
    """The GR context of a TSG: made by its first ALLOC_OBJ_CTX, in that channel's driver range.

    Its image is what the engine loads, by 40 bits of address: where the range leaves no room for it below 2^40, the
    context is not valid. The larger circular buffers only draw a warning there.
    """

    def __init__(self, driver: Driver, vm: AddressSpace) -> None:
        self.graphics_mode = k.NVGPU_GRAPHICS_PREEMPTION_MODE_WFI
        self.compute_mode = k.NVGPU_COMPUTE_PREEMPTION_MODE_WFI
        self.vm = vm
        self.places = [vm.take_kernel(CONTEXT_IMAGE), vm.take_kernel(CONTEXT_BUFFERS)]
        self.valid = self.places[0] + CONTEXT_IMAGE <= 1 << ADDRESS_BITS
        if self.places[1] + CONTEXT_BUFFERS > 1 << ADDRESS_BITS:
            driver.log.write("WARNING: tu104_gr_init_commit_rtv_cb: address above 40 bits")

    def release(self) -> None:
        """Give the addresses back."""
        for va in self.places:
            self.vm.give_kernel(va)


class Tsg:
    """A timeslice group. Alive while its fd or a channel is."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.id = needed(next((i for i in range(MAX_TSGS) if i not in driver.tsgs), None), errno.ENOMEM)
        self.holders = 1
        self.subcontexts: dict[int, AddressSpace | None] = {}
        self.channels: list[Channel] = []
        self.runlist: int | None = None
        self.timeslice_us = TIMESLICE_DEFAULT_US
        self.interleave = k.NVGPU_RUNLIST_INTERLEAVE_LEVEL_LOW
        self.context: GraphicsContext | None = None
        self.sm_errors: dict[int, TsgSmErrorStateRecord] = {}
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

    def bind(self, channel: Channel, veid: int) -> None:
        """BIND_CHANNEL's checks, in order. A veid of 0 that does not exist is made with the channel's address space."""
        require(veid < MAX_SUBCONTEXTS)
        channel.veid = veid
        # "No VM" equals "no VM": a channel without address space passes here, and is of no use afterwards.
        require((veid == 0 and 0 not in self.subcontexts) or self.subcontexts.get(veid) is channel.vm)
        require(channel.tsg is None and not channel.was_unbound)
        require(len(self.channels) < MAX_CHANNELS)
        require(self.runlist is None or self.runlist == channel.runlist)
        self.subcontexts.setdefault(veid, channel.vm)
        self.runlist = channel.runlist
        self.channels.append(channel)
        channel.tsg = self.hold()

    def unbind(self, channel: Channel, *, forced: bool) -> None:
        """Take a channel off the runlist, for good. A forced unbind of a subcontext's last channel deletes it."""
        channel.stop()
        self.channels.remove(channel)
        channel.tsg = None
        channel.was_unbound = True
        if forced and not any(c.veid == channel.veid for c in self.channels):
            self.subcontexts.pop(channel.veid, None)
        self.drop()

    def replay(self) -> None:
        """Tell a new GPU process of this group; its channels stay dead."""
        self.driver.tell_gpu("tsg_create", self.id)


class TsgFile(File):
    """A TSG fd."""

    kind = "tsg"

    def __init__(self, driver: Driver, process: Process, tsg: Tsg) -> None:
        super().__init__(driver, process)
        self.tsg = tsg

    def release(self) -> None:
        """Drop the TSG; it lives on while channels are bound."""
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
    """DELETE_SUBCONTEXT: not while channels are bound to it."""
    tsg, veid = file.tsg, call.arg.veid
    require(veid in tsg.subcontexts and not any(c.veid == veid for c in tsg.channels))
    del tsg.subcontexts[veid]


def bind_channel_ex(file: TsgFile, call: Call) -> None:
    """BIND_CHANNEL_EX: a channel into a subcontext of the group."""
    found = call.file("channel_fd", ChannelFile)
    require(found)
    file.tsg.bind(found.channel, call.arg.subcontext_id)


def bind_channel(file: TsgFile, call: Call) -> None:
    """BIND_CHANNEL: the same with veid 0."""
    found = call.file("value", ChannelFile)
    require(found)
    file.tsg.bind(found.channel, 0)


def unbind_channel(file: TsgFile, call: Call) -> None:
    """UNBIND_CHANNEL: the channel is unserviceable from then on."""
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
    """PREEMPT."""
    require(file.driver.tell_gpu("tsg_preempt", file.tsg.id) is not False, errno.EBUSY)


def set_runlist_interleave(file: TsgFile, call: Call) -> None:
    """SET_RUNLIST_INTERLEAVE."""
    require(call.arg.level < k.NVGPU_RUNLIST_INTERLEAVE_NUM_LEVELS)
    file.tsg.interleave = call.arg.level


def set_timeslice(file: TsgFile, call: Call) -> None:
    """SET_TIMESLICE, in microseconds."""
    require(TIMESLICE_MIN_US <= call.arg.timeslice_us <= TIMESLICE_MAX_US)
    file.tsg.timeslice_us = call.arg.timeslice_us


def get_timeslice(file: TsgFile, call: Call) -> None:
    """GET_TIMESLICE."""
    call.arg.timeslice_us = file.tsg.timeslice_us


def read_single_sm_error_state(file: TsgFile, call: Call) -> Steps:
    """READ_SINGLE_SM_ERROR_STATE: what the last exception left of one SM; at most 24 bytes."""
    arg, tsg = call.arg, file.tsg
    require(arg.sm_id < file.driver.chip.sm_count and tsg.context is not None)
    record = bytes(tsg.sm_errors.get(arg.sm_id, TsgSmErrorStateRecord()))[: arg.record_size]
    left = yield from copy_out(arg.record_mem, record)
    require(left == 0, errno.EFAULT)
    return None


HANDLERS: Table = {
    io.NVGPU_TSG_IOCTL_BIND_CHANNEL.request: bind_channel,
    io.NVGPU_TSG_IOCTL_UNBIND_CHANNEL.request: unbind_channel,
    io.NVGPU_IOCTL_TSG_ENABLE.request: enable,
    io.NVGPU_IOCTL_TSG_DISABLE.request: disable,
    io.NVGPU_IOCTL_TSG_PREEMPT.request: preempt,
    io.NVGPU_IOCTL_TSG_SET_RUNLIST_INTERLEAVE.request: set_runlist_interleave,
    io.NVGPU_IOCTL_TSG_SET_TIMESLICE.request: set_timeslice,
    io.NVGPU_IOCTL_TSG_GET_TIMESLICE.request: get_timeslice,
    io.NVGPU_TSG_IOCTL_BIND_CHANNEL_EX.request: bind_channel_ex,
    io.NVGPU_TSG_IOCTL_READ_SINGLE_SM_ERROR_STATE.request: read_single_sm_error_state,
    io.NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT.request: create_subcontext,
    io.NVGPU_TSG_IOCTL_DELETE_SUBCONTEXT.request: delete_subcontext,
}
