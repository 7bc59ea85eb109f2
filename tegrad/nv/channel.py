"""Channels of a Jetson's GPU: the group they share (TSG), their setup in the order the driver wants, their health."""

import ctypes
import errno
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from tegrad.nv.memory import AddressSpace, Memory, Nvmap
from tegrad.uapi import constants as c
from tegrad.uapi import ioctls
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import Kernel
from tegrad.uapi.structs import (
    AllocObjCtx,
    AsBindChannel,
    ChannelSetupBind,
    ChannelWdt,
    GetParam,
    GetUserSyncpoint,
    GpuOpenChannel,
    GpuOpenTsg,
    Notification,
    PreemptionMode,
    SetErrorNotifier,
    TsgBindChannelEx,
    TsgCreateSubcontext,
    TsgReadSingleSmErrorState,
    TsgSmErrorStateRecord,
    Wait,
)

GR_RUNLIST = -1
"""OPEN_CHANNEL's name for the runlist of the graphics engine (compute, and copies on subchannel 4)."""
SETUP_FLAGS = c.NVGPU_CHANNEL_SETUP_BIND_FLAGS_USERMODE_SUPPORT | c.NVGPU_CHANNEL_SETUP_BIND_FLAGS_DETERMINISTIC
COMPUTE_PREEMPTION = (c.NVGPU_COMPUTE_PREEMPTION_MODE_CILP, c.NVGPU_COMPUTE_PREEMPTION_MODE_CTA)
"""Best first. In the driver's default another context gets the GPU only when the running kernel ends, and a kernel
that outlasts the context-switch timeout is killed; CTA stops between blocks, CILP at any instruction."""


class Tsg:
    """A time-slice group: channels scheduled together, sharing one engine context."""

    def __init__(self, kernel: Kernel, ctrl: int) -> None:
        self._kernel = kernel
        arg = GpuOpenTsg()
        kernel.ioctl(ctrl, ioctls.NVGPU_GPU_IOCTL_OPEN_TSG, arg)
        self.fd = int(arg.tsg_fd)

    def subcontext(self, space: AddressSpace) -> int:
        """The number (VEID) of a new asynchronous subcontext over an address space."""
        arg = TsgCreateSubcontext(type=c.NVGPU_TSG_SUBCONTEXT_TYPE_ASYNC, as_fd=space.fd)
        self._kernel.ioctl(self.fd, ioctls.NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT, arg)
        return int(arg.veid)

    def sm_error(self, sm: int) -> TsgSmErrorStateRecord:
        """What SM number `sm` remembers of the last exception."""
        record = TsgSmErrorStateRecord()
        arg = TsgReadSingleSmErrorState(
            sm_id=sm, record_mem=ctypes.addressof(record), record_size=ctypes.sizeof(record)
        )
        self._kernel.ioctl(self.fd, ioctls.NVGPU_TSG_IOCTL_READ_SINGLE_SM_ERROR_STATE, arg)
        return record

    def close(self) -> None:
        """Close the fd; the driver keeps the group until its channels are gone."""
        self._kernel.close(self.fd)


@dataclass(frozen=True, slots=True)
class Rings:
    """The buffers of one channel and where in them its parts lie. The driver takes offset 0 only."""

    gpfifo: Memory
    entries: int
    userd: Memory
    notifier: Memory
    gpfifo_offset: int = 0
    userd_offset: int = 0


class Channel:
    """One channel, bound and ready for the doorbell.

    The order is the driver's: address space before group, group before setup, the watchdog off before setup (a
    usermode channel needs that), the notifier last.
    """

    def __init__(
        self, kernel: Kernel, nvmap: Nvmap, ctrl: int, space: AddressSpace, tsg: Tsg, subcontext: int, rings: Rings
    ) -> None:
        self._kernel = kernel
        self._notification = Notification.from_address(rings.notifier.address)
        arg = GpuOpenChannel(in_=GpuOpenChannel.In(GR_RUNLIST))
        kernel.ioctl(ctrl, ioctls.NVGPU_GPU_IOCTL_OPEN_CHANNEL, arg)
        self.fd = int(arg.channel_fd)
        with ExitStack() as undo:
            undo.callback(self.close)
            kernel.ioctl(space.fd, ioctls.NVGPU_AS_IOCTL_BIND_CHANNEL, AsBindChannel(channel_fd=self.fd))
            bind = TsgBindChannelEx(channel_fd=self.fd, subcontext_id=subcontext)
            kernel.ioctl(tsg.fd, ioctls.NVGPU_TSG_IOCTL_BIND_CHANNEL_EX, bind)
            wdt = ChannelWdt(wdt_status=c.NVGPU_IOCTL_CHANNEL_DISABLE_WDT)
            kernel.ioctl(self.fd, ioctls.NVGPU_IOCTL_CHANNEL_WDT, wdt)
            self.token = self._setup(nvmap, rings)
            with nvmap.export(rings.notifier) as fd:
                notifier = SetErrorNotifier(offset=0, size=ctypes.sizeof(Notification), mem=fd)
                kernel.ioctl(self.fd, ioctls.NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER, notifier)
            undo.pop_all()

    def engine(self, class_number: int) -> None:
        """Give the channel an engine object, which its methods need."""
        self._kernel.ioctl(
            self.fd, ioctls.NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX, AllocObjCtx(class_num=class_number, flags=0)
        )

    def preempt(self, supported: int) -> int:
        """Raise the group's compute preemption to the best of the modes in the mask `supported` that the driver grants.

        That mode, or 0 where it grants none: kernels run all the same, with the driver's default.
        """
        for mode in COMPUTE_PREEMPTION:
            if mode & supported:
                arg = PreemptionMode(compute_preempt_mode=mode)
                with suppress(DriverError):
                    self._kernel.ioctl(self.fd, ioctls.NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE, arg)
                    return mode
        return 0

    def error(self) -> int | None:
        """The notifier's error code, or None while the channel is well. Reads memory only."""
        return int(self._notification.info32) if self._notification.status else None

    def timed_out(self) -> bool:
        """Whether the driver has given the channel up. A system call."""
        arg = GetParam()
        try:
            self._kernel.ioctl(self.fd, ioctls.NVGPU_IOCTL_CHANNEL_GET_TIMEDOUT, arg)
        except DriverError as error:
            if error.errno == errno.ETIMEDOUT:  # the driver answers any call so on a channel that it is letting go
                return True
            raise
        return bool(arg.value)

    def syncpoint(self) -> GetUserSyncpoint:
        """The channel's own syncpoint; a store to its GPU address moves it on by one. DriverError if there is none."""
        arg = GetUserSyncpoint()
        self._kernel.ioctl(self.fd, ioctls.NVGPU_IOCTL_CHANNEL_GET_USER_SYNCPOINT, arg)
        return arg

    def wait(self, dmabuf: int, offset: int, payload: int, ms: int) -> bool:
        """Sleep in the driver until the word at `offset` is `payload`, the time is up, or a signal or a fault ends it.

        False where the driver refuses to wait.
        """
        condition = Wait.Condition(semaphore=Wait.Condition.Semaphore(dmabuf, offset, payload))
        arg = Wait(type=c.NVGPU_WAIT_TYPE_SEMAPHORE, timeout=ms, condition=condition)
        try:
            self._kernel.ioctl(self.fd, ioctls.NVGPU_IOCTL_CHANNEL_WAIT, arg)
        except DriverError as error:
            return error.errno in (errno.ETIMEDOUT, errno.EINTR)
        return True

    def close(self) -> None:
        """Take the channel off the GPU; returns when it no longer runs."""
        self._kernel.close(self.fd)

    def _setup(self, nvmap: Nvmap, rings: Rings) -> int:
        """SETUP_BIND; the work-submit token."""
        with nvmap.export(rings.gpfifo) as gpfifo, nvmap.export(rings.userd) as userd:
            arg = ChannelSetupBind(
                num_gpfifo_entries=rings.entries,
                flags=SETUP_FLAGS,
                userd_dmabuf_fd=userd,
                gpfifo_dmabuf_fd=gpfifo,
                userd_dmabuf_offset=rings.userd_offset,
                gpfifo_dmabuf_offset=rings.gpfifo_offset,
            )
            self._kernel.ioctl(self.fd, ioctls.NVGPU_IOCTL_CHANNEL_SETUP_BIND, arg)
            return int(arg.work_submit_token)
