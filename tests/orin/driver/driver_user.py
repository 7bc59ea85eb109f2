"""A driver client in a few calls, through the Kernel seam: what the tests of the board's drivers share."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import Kernel

LOOKS, LOOK_S = 10, 0.002
"""A thread that sleeps at so many looks in a row, so far apart, is in its call: what it does before that is short."""
MEMORY = 15 << 30
SPEC = "agx-orin-64gb:15GiB"
"""The board that the driver tests share: of a size that no other test uses, since boards are shared by their spec."""
FAKE_GPU = "driver_fake_gpu:FakeGpu"
CTRL, NVMAP = "/dev/nvgpu/igpu0/ctrl", "/dev/nvmap"
FENCE = "/dev/host1x-fence"
VA_START, VA_END = 0x200000, 0xFF00000000
TAGGED = 0x0900 << 16 | k.NVMAP_HANDLE_INNER_CACHEABLE
SETUP_FLAGS = k.NVGPU_CHANNEL_SETUP_BIND_FLAGS_USERMODE_SUPPORT | k.NVGPU_CHANNEL_SETUP_BIND_FLAGS_DETERMINISTIC


@dataclass
class Buffer:
    """An nvmap handle and a dmabuf fd of it."""

    handle: int
    fd: int
    size: int


@dataclass
class Channel:
    """A channel fd with its TSG, address space and rings."""

    fd: int
    tsg: int
    vm: int
    token: int = -1


def asleep(user: User, thread: threading.Thread, channel: Channel) -> None:
    """Wait until the driver has the call that a thread makes on a channel, or until that is over.

    The thread sleeps then, and a later call on the same fd was answered.
    """
    looks, end = 0, time.monotonic() + 60
    while looks < LOOKS and thread.is_alive():
        assert time.monotonic() < end, "the call does not sleep"
        time.sleep(LOOK_S)
        looks = looks + 1 if _state(thread) in ("S", "D") else 0
    user.timed_out(channel)


def _state(thread: threading.Thread) -> str:
    """What the kernel says that a thread does; nothing of one that is over."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


class User:
    """An open ctrl and nvmap fd on a kernel; closes every fd it made."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.fds: list[int] = []
        self.nvmap = self.open(NVMAP)
        self.ctrl = self.open(CTRL)

    def open(self, path: str) -> int:
        return self.keep(self.kernel.open(path))

    def keep(self, fd: int) -> int:
        self.fds.append(fd)
        return fd

    def close(self, fd: int) -> None:
        self.fds.remove(fd)
        self.kernel.close(fd)

    def close_all(self) -> None:
        while self.fds:
            self.kernel.close(self.fds.pop())

    # -- nvmap --

    def create(self, size: int) -> int:
        arg = s.CreateHandle(size=size)
        self.kernel.ioctl(self.nvmap, io.NVMAP_IOC_CREATE, arg)
        return arg.handle

    def alloc(self, handle: int, *, flags: int = TAGGED, heap: int = k.NVMAP_HEAP_IOVMM, align: int = 4096) -> None:
        self.kernel.ioctl(self.nvmap, io.NVMAP_IOC_ALLOC, s.AllocHandle(handle, heap, flags, align, -1))

    def get_fd(self, handle: int) -> int:
        arg = s.CreateHandle(handle=handle)
        self.kernel.ioctl(self.nvmap, io.NVMAP_IOC_GET_FD, arg)
        return self.keep(arg.fd)

    def free(self, handle: int) -> None:
        self.kernel.ioctl(self.nvmap, io.NVMAP_IOC_FREE, handle)

    def buffer(self, size: int = 4096, *, allocate: bool = True, flags: int = TAGGED) -> Buffer:
        handle = self.create(size)
        if allocate:
            self.alloc(handle, flags=flags)
        return Buffer(handle, self.get_fd(handle), size)

    def mapped(self, buffer: Buffer, *, write: bool = True) -> ctypes.Array[ctypes.c_uint8]:
        address = self.kernel.mmap(buffer.fd, buffer.size, 3 if write else 1, 1)
        return (ctypes.c_uint8 * buffer.size).from_address(address)

    # -- address space --

    def address_space(self, start: int = VA_START, end: int = VA_END) -> int:
        arg = s.AllocAs(va_range_start=start, va_range_end=end)
        self.kernel.ioctl(self.ctrl, io.NVGPU_GPU_IOCTL_ALLOC_AS, arg)
        return self.keep(arg.as_fd)

    def map(self, vm: int, fd: int, *, flags: int = 0, **fields: int) -> int:
        arg = s.AsMapBufferEx(**{"flags": flags, "compr_kind": -1, "incompr_kind": 0, "dmabuf_fd": fd} | fields)
        self.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_MAP_BUFFER_EX, arg)
        return arg.offset

    def unmap(self, vm: int, va: int) -> None:
        self.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_UNMAP_BUFFER, s.AsUnmapBuffer(va))

    def reserve(self, vm: int, size: int, at: int | None = None) -> int:
        flags = 0 if at is None else k.NVGPU_AS_ALLOC_SPACE_FLAGS_FIXED_OFFSET
        arg = s.AsAllocSpace(pages=size // 4096, page_size=4096, flags=flags)
        arg.o_a.offset = at or 0
        self.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_ALLOC_SPACE, arg)
        return arg.o_a.offset

    # -- channels --

    def tsg(self) -> int:
        arg = s.GpuOpenTsg()
        self.kernel.ioctl(self.ctrl, io.NVGPU_GPU_IOCTL_OPEN_TSG, arg)
        return self.keep(arg.tsg_fd)

    def open_channel(self, runlist: int = -1) -> int:
        arg = s.GpuOpenChannel()
        arg.in_.runlist_id = runlist
        self.kernel.ioctl(self.ctrl, io.NVGPU_GPU_IOCTL_OPEN_CHANNEL, arg)
        return self.keep(arg.channel_fd)

    def bound_channel(self, *, vm: int | None = None, tsg: int | None = None) -> Channel:
        """A channel in an address space and a TSG, with its watchdog off, before SETUP_BIND."""
        vm = self.address_space() if vm is None else vm
        tsg = self.tsg() if tsg is None else tsg
        fd = self.open_channel()
        self.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_BIND_CHANNEL, s.AsBindChannel(fd))
        self.kernel.ioctl(tsg, io.NVGPU_TSG_IOCTL_BIND_CHANNEL_EX, s.TsgBindChannelEx(fd, 0))
        self.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_WDT, s.ChannelWdt(k.NVGPU_IOCTL_CHANNEL_DISABLE_WDT, 0))
        return Channel(fd, tsg, vm)

    def setup_args(self, *, entries: int = 512, flags: int = SETUP_FLAGS, **fields: int) -> s.ChannelSetupBind:
        arg = s.ChannelSetupBind(num_gpfifo_entries=entries, flags=flags)
        arg.gpfifo_dmabuf_fd = self.buffer(max(4096, entries * 8)).fd
        arg.userd_dmabuf_fd = self.buffer(4096).fd
        for name, value in fields.items():
            setattr(arg, name, value)
        return arg

    def channel(self, **kind: int | None) -> Channel:
        """A channel that is ready for its doorbell."""
        made = self.bound_channel(**kind)
        arg = self.setup_args()
        self.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_SETUP_BIND, arg)
        made.token = arg.work_submit_token
        return made

    def object(self, channel: Channel, class_id: int = 0xC7C0) -> None:
        self.kernel.ioctl(channel.fd, io.NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX, s.AllocObjCtx(class_id))

    def notifier(self, channel: Channel) -> Buffer:
        made = self.buffer(4096)
        arg = s.SetErrorNotifier(offset=0, size=16, mem=made.fd)
        self.kernel.ioctl(channel.fd, io.NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER, arg)
        return made

    def timed_out(self, channel: Channel) -> bool:
        arg = s.GetParam()
        self.kernel.ioctl(channel.fd, io.NVGPU_IOCTL_CHANNEL_GET_TIMEDOUT, arg)
        return bool(arg.value)


@contextmanager
def refused(number: int) -> Iterator[None]:
    """The block must fail with exactly this errno."""
    with pytest.raises(DriverError) as caught:
        yield
    assert caught.value.errno == number, str(caught.value)
