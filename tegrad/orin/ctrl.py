"""The ctrl fd: how to get an address space, TSG or channel, the time, and what belongs to no other part.

Source: L4T r36.4.3 nvgpu, os/linux/ioctl_ctrl.c; values that only a board tells are an AGX Orin 64GB's.
"""

from __future__ import annotations

import errno
import time

from tegrad.hw.gpfifo import USERMODE_SIZE
from tegrad.orin.as_file import AsFile, alloc_as
from tegrad.orin.buffers import PAGE
from tegrad.orin.channel import MAX_CHANNELS
from tegrad.orin.channel_calls import ChannelFile
from tegrad.orin.files import Call, File, Table
from tegrad.orin.sharing import Instance, shared_tsg
from tegrad.orin.state import DriverState
from tegrad.orin.steps import Errno, GetFile, Process, Steps, copy_in, require, signed
from tegrad.orin.tsg import Tsg
from tegrad.orin.tsg_calls import TsgFile
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io

PTIMER_STEP = 32  # ns
ZCULL_CONTEXT_BYTES = 164352  # read on an AGX Orin 64GB
USER_END = 1 << 52  # addresses from here on are the kernel's: access_ok refuses them


def gpu_time() -> int:
    """The GPU's clock in ns, in steps of its timer."""
    return time.monotonic_ns() // PTIMER_STEP * PTIMER_STEP


class CtrlFile(File):
    """A ctrl fd: one doorbell mapping at a time, a device instance number, and a session of the clock arbiter."""

    kind = "ctrl"

    def __init__(self, driver: DriverState, process: Process) -> None:
        super().__init__(driver, process)
        self.instance = Instance(driver)
        self.registers_mapped = False
        self.target_mhz = 0
        driver.clock.sessions.append(self)

    def release(self) -> None:
        """End the clock session; the instance lives on while TSG fds hold it."""
        self.instance.drop()
        self.driver.clock.sessions.remove(self)
        self.driver.clock.run()


def alloc_address_space(file: CtrlFile, call: Call) -> None:
    """ALLOC_AS."""
    arg = call.arg
    vm = alloc_as(file.driver, arg.big_page_size, arg.va_range_start, arg.va_range_end, arg.va_range_split)
    call.install("as_fd", AsFile(file.driver, file.process, vm))


def open_tsg(file: CtrlFile, call: Call) -> None:
    """OPEN_TSG: a new one, or with SHARE the one of a token that another instance made for this one."""
    tsg = shared_tsg(file.driver, call.arg, file.instance.id) or Tsg(file.driver)
    call.install("tsg_fd", TsgFile(file.driver, file.process, tsg, file.instance))


def open_channel(file: CtrlFile, call: Call) -> None:
    """OPEN_CHANNEL on the GR runlist (-1 or its id)."""
    call.install("channel_fd", ChannelFile(file.driver, file.process, call.arg.in_.runlist_id))


def get_gpu_time(file: CtrlFile, call: Call) -> None:
    """GET_GPU_TIME."""
    call.arg.gpu_timestamp = gpu_time()


def _cpu_time(source: int) -> int:
    """The CPU's clock as a source tells it: the timer that also feeds the GPU's in ticks, or Unix time in us."""
    if source == k.NVGPU_GPU_GET_CPU_TIME_CORRELATION_INFO_SRC_ID_TSC:
        return time.monotonic_ns() // PTIMER_STEP
    return time.time_ns() // 1000


def get_cpu_time_correlation_info(file: CtrlFile, call: Call) -> None:
    """GET_CPU_TIME_CORRELATION_INFO: pairs of CPU and GPU time."""
    arg = call.arg
    require(arg.count <= k.NVGPU_GPU_GET_CPU_TIME_CORRELATION_INFO_MAX_COUNT)
    tsc = k.NVGPU_GPU_GET_CPU_TIME_CORRELATION_INFO_SRC_ID_TSC
    require(arg.source_id in (tsc, k.NVGPU_GPU_GET_CPU_TIME_CORRELATION_INFO_SRC_ID_OSTIME))
    for i in range(arg.count):
        arg.samples[i].gpu_timestamp = gpu_time()
        arg.samples[i].cpu_timestamp = _cpu_time(arg.source_id)


def flush_l2(file: CtrlFile, call: Call) -> None:
    """FLUSH_L2, once the combination makes sense. An fb_flush alone leaves the L2 as it is: it orders, no more.

    Source: L4T r36.4.3 nvgpu, os/linux/ioctl_ctrl.c nvgpu_gpu_ioctl_l2_fb_ops, hal/mm/cache/flush_gk20a_fusa.c.
    """
    arg = call.arg
    require(arg.l2_flush or arg.fb_flush)
    require(not arg.l2_invalidate or arg.l2_flush)
    if arg.l2_flush:
        file.driver.tell_gpu("flush_l2", bool(arg.l2_invalidate))


def zcull_get_ctx_size(file: CtrlFile, call: Call) -> None:
    """ZCULL_GET_CTX_SIZE."""
    call.arg.size = ZCULL_CONTEXT_BYTES


def set_deterministic_opts(file: CtrlFile, call: Call) -> Steps:
    """SET_DETERMINISTIC_OPTS: per channel, up to the first failure, whether the GPU may be suspended under it."""
    arg = call.arg
    allow = bool(arg.flags & k.NVGPU_GPU_SET_DETERMINISTIC_OPTS_FLAGS_ALLOW_RAILGATING)
    disallow = bool(arg.flags & k.NVGPU_GPU_SET_DETERMINISTIC_OPTS_FLAGS_DISALLOW_RAILGATING)
    require(arg.num_channels <= MAX_CHANNELS)
    require(arg.channels + 4 * arg.num_channels <= USER_END, errno.EFAULT)
    for i in range(arg.num_channels):
        number = int.from_bytes((yield from copy_in(arg.channels + 4 * i, 4)), "little")
        found = yield GetFile(signed(number))
        require(isinstance(found, ChannelFile))
        require(found.channel.set_up)  # a channel is set up for usermode submit, and then it is deterministic
        require(not (allow and disallow))
        if allow or disallow:
            found.channel.railgate_allowed = allow
    return None


def set_sm_debug_mode(file: CtrlFile, call: Call) -> None:
    """SET_SM_DEBUG_MODE: for a channel; what it changes only a debugger sees."""
    require(call.file("channel_fd", ChannelFile))


def for_debuggers(file: CtrlFile, call: Call) -> None:
    """SET_MMUDEBUG_MODE and CLEAR_SM_ERRORS: succeed; nothing that a client can see depends on them."""


def refuse(file: CtrlFile, call: Call) -> None:
    """What Orin has no sensor or event for."""
    require(False)


def no_hook(file: CtrlFile, call: Call) -> None:
    """WAIT_FOR_PAUSE, RESUME_FROM_PAUSE and TRIGGER_SUSPEND: ga10b has none of them."""
    raise Errno(errno.ENOSYS)


def alloc_vidmem(file: CtrlFile, call: Call) -> None:
    """ALLOC_VIDMEM: an integrated GPU has none."""
    arg = call.arg.in_
    require(not arg.flags & (k.NVGPU_GPU_ALLOC_VIDMEM_FLAG_CPU_MASK | k.NVGPU_GPU_ALLOC_VIDMEM_FLAG_VPR))
    require(arg.size and arg.size % PAGE == 0)
    raise Errno(errno.ENOMEM)


def get_memory_state(file: CtrlFile, call: Call) -> None:
    """GET_MEMORY_STATE: of video memory, which an integrated GPU has none of."""
    require(not any(call.arg.reserved))
    raise Errno(errno.ENOSYS)


HANDLERS: Table = {
    io.NVGPU_GPU_IOCTL_ZCULL_GET_CTX_SIZE.request: zcull_get_ctx_size,
    io.NVGPU_GPU_IOCTL_ALLOC_AS.request: alloc_address_space,
    io.NVGPU_GPU_IOCTL_OPEN_TSG.request: open_tsg,
    io.NVGPU_GPU_IOCTL_OPEN_CHANNEL.request: open_channel,
    io.NVGPU_GPU_IOCTL_FLUSH_L2.request: flush_l2,
    io.NVGPU_GPU_IOCTL_SET_MMUDEBUG_MODE.request: for_debuggers,
    io.NVGPU_GPU_IOCTL_SET_SM_DEBUG_MODE.request: set_sm_debug_mode,
    io.NVGPU_GPU_IOCTL_WAIT_FOR_PAUSE.request: no_hook,
    io.NVGPU_GPU_IOCTL_RESUME_FROM_PAUSE.request: no_hook,
    io.NVGPU_GPU_IOCTL_TRIGGER_SUSPEND.request: no_hook,
    io.NVGPU_GPU_IOCTL_CLEAR_SM_ERRORS.request: for_debuggers,
    io.NVGPU_GPU_IOCTL_GET_CPU_TIME_CORRELATION_INFO.request: get_cpu_time_correlation_info,
    io.NVGPU_GPU_IOCTL_GET_GPU_TIME.request: get_gpu_time,
    io.NVGPU_GPU_IOCTL_ALLOC_VIDMEM.request: alloc_vidmem,
    io.NVGPU_GPU_IOCTL_GET_EVENT_FD.request: refuse,
    io.NVGPU_GPU_IOCTL_GET_MEMORY_STATE.request: get_memory_state,
    io.NVGPU_GPU_IOCTL_GET_VOLTAGE.request: refuse,
    io.NVGPU_GPU_IOCTL_GET_CURRENT.request: refuse,
    io.NVGPU_GPU_IOCTL_GET_POWER.request: refuse,
    io.NVGPU_GPU_IOCTL_GET_TEMPERATURE.request: refuse,
    io.NVGPU_GPU_IOCTL_SET_THERM_ALERT_LIMIT.request: refuse,
    io.NVGPU_GPU_IOCTL_SET_DETERMINISTIC_OPTS.request: set_deterministic_opts,
}


def mmap_registers_check(file: CtrlFile, length: int, offset: int) -> None:
    """The checks of mmap on the ctrl fd, in order: the memory manager's own, then the driver's (3.9)."""
    require(length and offset % PAGE == 0)
    require(not file.registers_mapped, errno.EBUSY)
    require(length <= USERMODE_SIZE)
    require(offset == 0)
