"""The channel fd and its calls: rings, objects, the error notifier, the syncpoint.

Source: L4T r36.4.3 nvgpu, os/linux/ioctl_channel.c and linux-channel.c, common/gr/gr_setup.c.
"""

from __future__ import annotations

import errno

from tegrad.hw.faults import NotifierCode
from tegrad.hw.gpfifo import token
from tegrad.orin import engine_classes
from tegrad.orin.address_space import AddressSpace
from tegrad.orin.channel import NOTIFIER_SIZE, DriverChannel, Notifier
from tegrad.orin.files import Call, File, Table
from tegrad.orin.nvmap import dmabuf, dmabuf_or_none
from tegrad.orin.preemption import object_allowed
from tegrad.orin.state import DriverState
from tegrad.orin.steps import Errno, Process, needed, require
from tegrad.orin.tsg import Tsg
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io

GR_RUNLIST = 0
MAX_GPFIFO_ENTRIES = 1 << 28
MIN_GPFIFO_BYTES = 4096


class ChannelFile(File):
    """A channel fd."""

    kind = "channel"

    def __init__(self, driver: DriverState, process: Process, runlist: int) -> None:
        require(runlist in (-1, GR_RUNLIST))
        super().__init__(driver, process)
        self.channel = DriverChannel(driver, process, GR_RUNLIST)

    def release(self) -> None:
        """Free the channel."""
        self.channel.release()


def _ring_checks(channel: DriverChannel, flags: int) -> tuple[AddressSpace, Tsg]:
    """What every ring must fulfil; the address space and the group it is for.

    A ring that the driver itself fills (no USERMODE) is not part of this board: as if there were no memory for it.
    """
    usermode = flags & k.NVGPU_CHANNEL_SETUP_BIND_FLAGS_USERMODE_SUPPORT
    deterministic = flags & k.NVGPU_CHANNEL_SETUP_BIND_FLAGS_DETERMINISTIC
    vm = needed(channel.vm)
    tsg = needed(channel.tsg)
    require(not channel.set_up, errno.EEXIST)
    require(not (deterministic and channel.watchdog))
    require(not usermode or deterministic)
    require(usermode, errno.ENOMEM)
    return vm, tsg


def _entry_checks(entries: int, flags: int) -> None:
    """How many entries a ring may have; what fails here prints nothing."""
    require(entries >= (2 if flags & k.NVGPU_CHANNEL_SETUP_BIND_FLAGS_USERMODE_SUPPORT else 4))
    require(entries & (entries - 1) == 0 and entries <= MAX_GPFIFO_ENTRIES)


def alloc_gpfifo_ex(file: ChannelFile, call: Call) -> None:
    """ALLOC_GPFIFO_EX: a ring that the driver fills; one with USERMODE lacks its buffers here."""
    arg = call.arg
    _entry_checks(arg.num_entries, arg.flags)
    with file.driver.log.failing("nvgpu_channel_setup_bind"):
        _ring_checks(file.channel, arg.flags)
        raise Errno(errno.EINVAL)


def setup_bind(file: ChannelFile, call: Call) -> None:
    """SETUP_BIND: rings from the caller's dmabufs. A failed call leaves the channel as it was."""
    arg, channel, driver = call.arg, file.channel, file.driver
    entries = arg.num_gpfifo_entries
    _entry_checks(entries, arg.flags)
    with driver.log.failing("nvgpu_channel_setup_bind"):
        vm, tsg = _ring_checks(channel, arg.flags)
        require(arg.gpfifo_dmabuf_fd != 0 and arg.userd_dmabuf_fd != 0)
        require(arg.gpfifo_dmabuf_offset == 0 and arg.userd_dmabuf_offset == 0)
        gpfifo = dmabuf(call, "gpfifo_dmabuf_fd")
        require(gpfifo.allocated, errno.ENOMEM)
        require(gpfifo.length >= max(MIN_GPFIFO_BYTES, entries * 8))
        userd = dmabuf(call, "userd_dmabuf_fd")
        require(userd.allocated, errno.ENOMEM)
        gpfifo_va = vm.map_kernel(gpfifo, writable=False)
    channel.gpfifo_va, channel.userd = gpfifo_va, userd.hold()
    channel.set_up = channel.running = True
    place = (channel.chid, tsg.id, vm.id, channel.runlist)
    driver.tell_gpu("channel_create", *place, gpfifo_va, entries, fd=userd.fd)
    channel.give_objects(channel.classes)
    arg.work_submit_token = token(channel.chid, channel.runlist)
    arg.gpfifo_gpu_va = arg.userd_gpu_va = arg.usermode_mmio_gpu_va = 0


def wdt(file: ChannelFile, call: Call) -> None:
    """WDT: exactly one of DISABLE and ENABLE; a deterministic channel takes DISABLE only."""
    status = call.arg.wdt_status
    on = status & k.NVGPU_IOCTL_CHANNEL_ENABLE_WDT
    off = status & k.NVGPU_IOCTL_CHANNEL_DISABLE_WDT
    require(bool(on) != bool(off))
    require(not (file.channel.set_up and on))
    file.channel.watchdog = bool(on)
    if status & k.NVGPU_IOCTL_CHANNEL_WDT_FLAG_SET_TIMEOUT:
        file.channel.watchdog_ms = call.arg.timeout_ms


def alloc_obj_ctx(file: ChannelFile, call: Call) -> None:
    """ALLOC_OBJ_CTX: an engine object; the first of a TSG makes its GR context. obj_id is never written."""
    arg, channel, chip = call.arg, file.channel, file.driver.chip
    tsg = needed(channel.tsg)
    vm = needed(channel.vm)
    require(engine_classes.known(chip, arg.class_num))
    channel.last_class = arg.class_num
    require(object_allowed(channel, tsg.channels))
    tsg.engine_veids.add(channel.bound_veid)
    gfxp = bool(arg.flags & k.NVGPU_ALLOC_OBJ_FLAGS_GFXP)
    cilp = bool(arg.flags & k.NVGPU_ALLOC_OBJ_FLAGS_CILP)
    tsg.modes.begin(channel, tsg.channels, gfxp=gfxp, cilp=cilp)
    tsg.make_context(vm)
    tsg.modes.started = True
    tsg.schedule()
    channel.classes.append(arg.class_num)
    channel.give_objects([arg.class_num])


def set_preemption_mode(file: ChannelFile, call: Call) -> None:
    """SET_PREEMPTION_MODE. Without the engine's part of a context the modes are remembered, though the call fails."""
    arg, channel = call.arg, file.channel
    require(channel.last_class)
    tsg = needed(channel.tsg)
    require(file.driver.tell_gpu("tsg_preempt", tsg.id) is not False, errno.EBUSY)
    if tsg.modes.change(channel, tsg.channels, arg.graphics_preempt_mode, arg.compute_preempt_mode):
        require(channel.bound_veid in tsg.engine_veids)
        tsg.modes.show()
        tsg.schedule()


def set_error_notifier(file: ChannelFile, call: Call) -> None:
    """SET_ERROR_NOTIFIER: the old notifier goes first, even when the new one is bad. `size` is ignored."""
    arg, channel = call.arg, file.channel
    require(arg.mem)
    channel.set_notifier(None)
    buffer = needed(dmabuf_or_none(call, "mem"))
    require(arg.offset + NOTIFIER_SIZE <= buffer.length)
    require(buffer.allocated, errno.ENOMEM)
    notifier = Notifier(buffer.hold(), arg.offset)
    notifier.clear()
    channel.set_notifier(notifier)


def get_timedout(file: ChannelFile, call: Call) -> None:
    """GET_TIMEDOUT: 1 when the channel can do no work: not in a TSG, or after a fault."""
    call.arg.value = int(not file.channel.serviceable)


def get_user_syncpoint(file: ChannelFile, call: Call) -> None:
    """GET_USER_SYNCPOINT: made once per channel. Without an address space the driver crashes; here it is EINVAL."""
    channel = file.channel
    vm = needed(channel.vm)
    if channel.syncpoint is None:
        channel.syncpoint = file.driver.syncpoints.allocate(vm)
    call.arg.gpu_va = channel.syncpoint.gpu_va
    call.arg.syncpoint_id = channel.syncpoint.id
    call.arg.syncpoint_max = channel.syncpoint.max


def submit_gpfifo(file: ChannelFile, call: Call) -> None:
    """SUBMIT_GPFIFO: refused on a usermode channel, and the board has no others."""
    require(file.channel.serviceable, errno.ETIMEDOUT)
    require(not file.channel.set_up)
    raise Errno(errno.ENOMEM)  # no ring


def enable(file: ChannelFile, call: Call) -> None:
    """ENABLE: the host may load this channel, whatever the others of its group do."""
    file.driver.tell_gpu("channel_enable", file.channel.chid, True)


def disable(file: ChannelFile, call: Call) -> None:
    """DISABLE: it is not loaded any more."""
    file.driver.tell_gpu("channel_enable", file.channel.chid, False)


def preempt(file: ChannelFile, call: Call) -> None:
    """PREEMPT: its group is disabled, preempted and enabled, and only a failure of the last is told."""
    tsg = needed(file.channel.tsg)
    tsg.preempt()
    file.driver.tell_gpu("tsg_enable", tsg.id)


def force_reset(file: ChannelFile, call: Call) -> None:
    """FORCE_RESET: the whole TSG dies with notifier 43; a channel that is in none is only complained about."""
    if file.channel.tsg is None:
        file.driver.log.error("nvgpu_tsg_force_reset_ch", f"chid: {file.channel.chid} is not bound to tsg")
        return
    file.channel.tsg.recover(NotifierCode.RESETCHANNEL_VERIF_ERROR)


def set_timeout(file: ChannelFile, call: Call) -> None:
    """SET_TIMEOUT and SET_TIMEOUT_EX: how long the channel may block a context switch, in ms; any number."""
    file.channel.timeout_ms = call.arg.timeout


def zcull_bind(file: ChannelFile, call: Call) -> None:
    """ZCULL_BIND: a buffer for the graphics part of the GR context."""
    tsg = needed(file.channel.tsg)
    needed(tsg.context).bind_zcull(call.arg.gpu_va, call.arg.mode)


def set_boosted_ctx(file: ChannelFile, call: Call) -> None:
    """SET_BOOSTED_CTX: ga10b has no such thing."""
    raise Errno(errno.EINVAL)


def accept(file: ChannelFile, call: Call) -> None:
    """SET_NVMAP_FD: accepted, does nothing."""


def reschedule_runlist(file: ChannelFile, call: Call) -> None:
    """RESCHEDULE_RUNLIST: for CAP_SYS_NICE only, which no client of the board has."""
    raise Errno(errno.EPERM)


def open_channel(file: ChannelFile, call: Call) -> None:
    """OPEN: another channel, as OPEN_CHANNEL of the ctrl fd with the GR runlist."""
    call.install("channel_fd", ChannelFile(file.driver, file.process, -1))


HANDLERS: Table = {
    io.NVGPU_IOCTL_CHANNEL_SET_NVMAP_FD.request: accept,
    io.NVGPU_IOCTL_CHANNEL_SET_TIMEOUT.request: set_timeout,
    io.NVGPU_IOCTL_CHANNEL_GET_TIMEDOUT.request: get_timedout,
    io.NVGPU_IOCTL_CHANNEL_SET_TIMEOUT_EX.request: set_timeout,
    io.NVGPU_IOCTL_CHANNEL_SUBMIT_GPFIFO.request: submit_gpfifo,
    io.NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX.request: alloc_obj_ctx,
    io.NVGPU_IOCTL_CHANNEL_ZCULL_BIND.request: zcull_bind,
    io.NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER.request: set_error_notifier,
    io.NVGPU_IOCTL_CHANNEL_OPEN.request: open_channel,
    io.NVGPU_IOCTL_CHANNEL_ENABLE.request: enable,
    io.NVGPU_IOCTL_CHANNEL_DISABLE.request: disable,
    io.NVGPU_IOCTL_CHANNEL_PREEMPT.request: preempt,
    io.NVGPU_IOCTL_CHANNEL_FORCE_RESET.request: force_reset,
    io.NVGPU_IOCTL_CHANNEL_WDT.request: wdt,
    io.NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE.request: set_preemption_mode,
    io.NVGPU_IOCTL_CHANNEL_ALLOC_GPFIFO_EX.request: alloc_gpfifo_ex,
    io.NVGPU_IOCTL_CHANNEL_SET_BOOSTED_CTX.request: set_boosted_ctx,
    io.NVGPU_IOCTL_CHANNEL_GET_USER_SYNCPOINT.request: get_user_syncpoint,
    io.NVGPU_IOCTL_CHANNEL_RESCHEDULE_RUNLIST.request: reschedule_runlist,
    io.NVGPU_IOCTL_CHANNEL_SETUP_BIND.request: setup_bind,
}
