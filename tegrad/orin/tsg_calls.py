"""The TSG fd and its calls: subcontexts, channels, scheduling.

Source: L4T r36.4.3 nvgpu, os/linux/ioctl_tsg.c and common/fifo/tsg.c.
"""

from __future__ import annotations

import errno

from tegrad.orin.as_file import AsFile
from tegrad.orin.channel_calls import ChannelFile
from tegrad.orin.context import L2_WAYS
from tegrad.orin.files import Call, File, Table
from tegrad.orin.sharing import Instance
from tegrad.orin.state import DriverState
from tegrad.orin.steps import Errno, Process, Steps, copy_out, needed, require
from tegrad.orin.tsg import MAX_SUBCONTEXTS, Tsg
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi.structs import TsgSmErrorStateRecord

SECTOR_PROMOTIONS = (
    k.NVGPU_GPU_IOCTL_TSG_L2_SECTOR_PROMOTE_FLAG_NONE,
    k.NVGPU_GPU_IOCTL_TSG_L2_SECTOR_PROMOTE_FLAG_64B,
    k.NVGPU_GPU_IOCTL_TSG_L2_SECTOR_PROMOTE_FLAG_128B,
)
TIMESLICE_MIN_US, TIMESLICE_MAX_US = 1000, 50000


class TsgFile(File):
    """A TSG fd."""

    kind = "tsg"

    def __init__(self, driver: DriverState, process: Process, tsg: Tsg, instance: Instance | None = None) -> None:
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
    require(file.tsg.preempt(), errno.EBUSY)


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
}
