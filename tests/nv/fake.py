"""A driver and a GPU front end in this process, just enough to open NVDevice: every ioctl is recorded.

Buffers are memfds. The GPU is a thread that runs host semaphores and linear copies; launches are counted and
skipped. `paused` stops it, `kill` is a fault.
"""

import ctypes
import errno
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tegrad.hw.chips import CHIPS, Chip
from tegrad.hw.classes import ComputeMethod, CopyMethod, HostMethod
from tegrad.hw.gpfifo import DOORBELL, MethodOp, Subchannel, Userd, decode_gp_entry, decode_header
from tegrad.uapi import constants as c
from tegrad.uapi.errors import DriverError
from tegrad.uapi.ioctls import Ioctl
from tegrad.uapi.kernel import MAP_SHARED, PROT_READ, PROT_WRITE, LinuxKernel
from tegrad.uapi.structs import AsUnmapBuffer, GpuCharacteristics

HEAP_TOP = 0x40000000
FIRST_CHID = 511


@dataclass
class Channel:
    entries: int = 0
    ring: int = 0
    userd: int = 0
    notifier: int = 0
    get: int = 0
    dead: bool = False


@dataclass
class FakeKernel:
    """Implements tegrad.uapi.kernel.Kernel."""

    chip: Chip = field(default_factory=lambda: CHIPS["agx-orin-64gb"])
    fail: dict[str, int] = field(default_factory=dict)
    """Ioctl name -> errno it fails with."""
    paused: bool = False

    def __post_init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        self.launches = 0
        self.fds: dict[int, tuple[str, Any]] = {}
        self.handles: dict[int, int] = {}
        self.maps: dict[int, int] = {}
        self.gpu_maps: dict[int, tuple[int, int]] = {}
        self.reserved: list[tuple[int, int]] = []
        self.channels: list[Channel] = []
        self._next_handle = 0x80000015
        self._next_va = self.chip.va_start
        self._linux = LinuxKernel()
        self._stopping = False
        self._running = threading.Lock()
        self._gpu: threading.Thread | None = None
        self._backing: dict[int, tuple[int, int]] = {}
        """Inode -> (address of our own mapping, size)."""

    # ---- Kernel

    def exists(self, path: str) -> bool:
        return True

    def open(self, path: str, flags: int = 0) -> int:
        self._fail("open")
        if path == "/dev/kmsg":
            return self._log_fd()
        if path == "/dev/host1x-fence":
            raise DriverError("open", errno.ENOENT, {"path": path})
        return self._fd("nvmap" if "nvmap" in path else "ctrl", None)

    def close(self, fd: int) -> None:
        kind, payload = self.fds.pop(fd)
        if kind == "channel":
            with self._running:
                payload.ring = 0
        os.close(fd)

    def mmap(self, fd: int, size: int, prot: int, flags: int, *, addr: int = 0, offset: int = 0) -> int:
        self._fail("mmap")
        address = self._linux.mmap(fd, size, prot, flags, addr=addr, offset=offset)
        self.maps[address] = size
        return address

    def munmap(self, addr: int, size: int) -> None:
        assert self.maps.pop(addr) == size
        self._linux.munmap(addr, size)

    def doorbell(self, fd: int, size: int = 0x10000) -> "FakeDoorbell":
        self._stopping = False
        self._gpu = threading.Thread(target=self._serve, daemon=True)
        self._gpu.start()
        return FakeDoorbell(self)

    def stop(self) -> None:
        """End the GPU's thread."""
        self._stopping = True
        if self._gpu is not None:
            self._gpu.join()

    def ioctl(self, fd: int, row: Ioctl, arg: Any = None) -> int:
        kind, payload = self.fds[fd]
        assert kind == row.fd_kind, f"{row.name} on a {kind} fd"
        self.calls.append((row.name, arg if isinstance(arg, int) or arg is None else type(arg).from_buffer_copy(arg)))
        self.counts[row.name] += 1
        self._fail(row.name)
        handler: Callable[..., None] | None = getattr(self, row.name.lower(), None)
        if handler is not None:
            handler(payload, arg)
        return 0

    # ---- nvmap

    def nvmap_create(self, _: Any, arg: Any) -> None:
        arg.handle = self._create(arg.size)

    def nvmap_create_64(self, _: Any, arg: Any) -> None:
        arg.handle64 = self._create(arg.size64)

    def nvmap_get_fd(self, _: Any, arg: Any) -> None:
        fd = os.dup(self.handles[arg.handle])
        self.fds[fd] = ("dmabuf", None)
        arg.fd = fd

    def nvmap_free(self, _: Any, handle: int) -> None:
        os.close(self.handles.pop(handle))

    def _create(self, size: int) -> int:
        fd = os.memfd_create("nvmap")
        rounded = -(-size // 4096) * 4096
        os.ftruncate(fd, rounded)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self.handles[handle] = fd
        return handle

    # ---- ctrl

    def gpu_get_characteristics(self, _: Any, arg: Any) -> None:
        info = GpuCharacteristics(
            num_gpc=self.chip.num_gpc,
            num_tpc_per_gpc=self.chip.tpc_per_gpc,
            max_gpc_count=self.chip.num_gpc,
            compute_class=self.chip.compute_class,
            gpfifo_class=self.chip.gpfifo_class,
            dma_copy_class=self.chip.dma_class,
            sm_arch_sm_version=self.chip.sm_version,
            sm_arch_warp_count=96,
            flags=c.NVGPU_GPU_FLAGS_SUPPORT_CLOCK_CONTROLS,
            max_freq=self.chip.max_freq_hz,
            compute_preemption_mode_flags=7,
        )
        ctypes.memmove(arg.gpu_characteristics_buf_addr, ctypes.addressof(info), ctypes.sizeof(info))

    def gpu_alloc_as(self, _: Any, arg: Any) -> None:
        arg.as_fd = self._fd("as", None)

    def gpu_open_tsg(self, _: Any, arg: Any) -> None:
        arg.tsg_fd = self._fd("tsg", None)

    def gpu_open_channel(self, _: Any, arg: Any) -> None:
        self.channels.append(Channel())
        arg.channel_fd = self._fd("channel", self.channels[-1])

    def gpu_num_vsms(self, _: Any, arg: Any) -> None:
        arg.num_vsms = self.chip.sm_count

    def gpu_get_tpc_masks(self, _: Any, arg: Any) -> None:
        masks = b"".join(struct.pack("<I", mask) for mask in self.chip.tpc_masks)
        ctypes.memmove(arg.mask_buf_addr, masks, arg.mask_buf_size)

    def gpu_clk_set_info(self, _: Any, arg: Any) -> None:
        arg.completion_fd = self._fd("clock", None)

    # ---- address space

    def as_alloc_space(self, _: Any, arg: Any) -> None:
        self.reserved.append((arg.o_a.offset, arg.pages * arg.page_size))

    def as_map_buffer_ex(self, _: Any, arg: Any) -> None:
        address, size = self._own_mapping(arg.dmabuf_fd)
        arg.offset = self._next_va
        self.gpu_maps[self._next_va] = (address, size)
        self._next_va += max(size, 0x200000)

    def as_unmap_buffer(self, _: Any, arg: Any) -> None:
        with self._running:
            del self.gpu_maps[arg.offset]

    def as_map_buffer_batch(self, _: Any, arg: Any) -> None:
        assert not arg.num_maps
        for unmap in (AsUnmapBuffer * arg.num_unmaps).from_address(arg.unmaps):
            self.as_unmap_buffer(None, unmap)

    # ---- TSG and channel

    def tsg_create_subcontext(self, _: Any, arg: Any) -> None:
        arg.veid = 1

    def channel_setup_bind(self, channel: Channel, arg: Any) -> None:
        if arg.gpfifo_dmabuf_offset or arg.userd_dmabuf_offset:
            raise DriverError("CHANNEL_SETUP_BIND", errno.EINVAL)
        ring, size = self._own_mapping(arg.gpfifo_dmabuf_fd)
        assert size >= arg.num_gpfifo_entries * 8
        channel.userd = self._own_mapping(arg.userd_dmabuf_fd)[0]
        channel.entries = arg.num_gpfifo_entries
        channel.ring = ring
        arg.work_submit_token = FIRST_CHID - self.channels.index(channel)

    def channel_set_error_notifier(self, channel: Channel, arg: Any) -> None:
        channel.notifier = self._own_mapping(arg.mem)[0]

    def channel_get_timedout(self, channel: Channel, arg: Any) -> None:
        arg.value = int(channel.dead)

    def channel_get_user_syncpoint(self, channel: Channel, arg: Any) -> None:
        raise DriverError("CHANNEL_GET_USER_SYNCPOINT", errno.ENOTTY)

    def channel_wait(self, channel: Channel, arg: Any) -> None:
        raise DriverError("CHANNEL_WAIT", errno.ENOTTY)

    # ---- the GPU

    def kill(self, code: int | None) -> None:
        """A fault: the channels die; with a code the notifiers say so."""
        for channel in self.channels:
            channel.dead = True
            if code is not None:
                ctypes.memmove(channel.notifier, struct.pack("<QIHH", 0, code, 0, 0xFFFF), 16)

    def _serve(self) -> None:
        while not self._stopping:
            channels = [] if self.paused else [channel for channel in self.channels if channel.ring]
            if not any([self._run_one(channel) for channel in channels]):  # noqa: C419 (every channel gets its turn)
                time.sleep(1e-4)

    def _run_one(self, channel: Channel) -> bool:
        with self._running:
            if channel.dead or not channel.ring:
                return False
            put = ctypes.c_uint32.from_address(channel.userd + Userd.GP_PUT).value
            entry = decode_gp_entry(ctypes.c_uint64.from_address(channel.ring + channel.get * 8).value)
            if channel.get == put or not self._segment(entry.va, entry.dwords):
                return False
            channel.get = (channel.get + 1) % channel.entries
            return True

    def _segment(self, va: int, dwords: int) -> bool:
        """Run one segment; False if it waits for a semaphore (it then starts over: acquires come first in ours)."""
        words = (ctypes.c_uint32 * dwords).from_address(self.host(va))
        at, regs = 0, {}
        while at < dwords:
            header = decode_header(words[at])
            at += 1
            assert header.op in (MethodOp.INC, MethodOp.IMMEDIATE)
            immediate = header.op == MethodOp.IMMEDIATE
            for i in range(1 if immediate else header.count):
                method = header.method + 4 * i
                regs[method] = header.count if immediate else words[at + i]
                if header.subch == 0 and method == HostMethod.SEM_EXECUTE and not self._semaphore(regs):
                    return False
                if header.subch == Subchannel.COPY and method == CopyMethod.LAUNCH_DMA:
                    self._copy(regs)
                self.launches += header.subch == Subchannel.COMPUTE and method == ComputeMethod.SEND_SIGNALING_PCAS2_B
            at += 0 if immediate else header.count
        return True

    def _semaphore(self, regs: dict[int, int]) -> bool:
        address = self.host(regs[HostMethod.SEM_ADDR_LO] | regs[HostMethod.SEM_ADDR_HI] << 32)
        word = ctypes.c_uint64.from_address(address)
        value = regs[HostMethod.SEM_PAYLOAD_LO] | regs[HostMethod.SEM_PAYLOAD_HI] << 32
        if regs[HostMethod.SEM_EXECUTE] & 7 == 1:
            word.value = value
            return True
        return word.value >= value

    def _copy(self, regs: dict[int, int]) -> None:
        """A linear copy, then the semaphore, as LAUNCH_DMA's bits ask."""
        launch = regs[CopyMethod.LAUNCH_DMA]

        def pair(upper: int) -> int:
            return self.host(regs[upper] << 32 | regs[upper + 4])

        if launch & 3:
            size = regs[CopyMethod.LINE_LENGTH_IN]
            ctypes.memmove(pair(CopyMethod.OFFSET_OUT_UPPER), pair(CopyMethod.OFFSET_IN_UPPER), size)
        if launch >> 3 & 3:
            payload = regs[CopyMethod.SET_SEMAPHORE_PAYLOAD]
            ctypes.c_uint64.from_address(pair(CopyMethod.SET_SEMAPHORE_A)).value = payload

    def host(self, va: int) -> int:
        """The CPU address of a GPU address."""
        for base, (address, size) in self.gpu_maps.items():
            if base <= va < base + size:
                return address + va - base
        raise AssertionError(f"GPU access to unmapped {va:#x}")

    # ---- inside

    def _log_fd(self) -> int:
        fd = os.memfd_create("kmsg")
        os.write(fd, "".join(f"3,{i},0,-;{line}\n" for i, line in enumerate(self.log)).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        self.fds[fd] = ("kmsg", None)
        return fd

    def _fail(self, name: str) -> None:
        if name in self.fail:
            raise DriverError(name, self.fail[name])

    def _fd(self, kind: str, payload: Any) -> int:
        fd = os.open("/dev/null", os.O_RDONLY)
        self.fds[fd] = (kind, payload)
        return fd

    def _own_mapping(self, fd: int) -> tuple[int, int]:
        assert self.fds[fd][0] == "dmabuf"
        stat = os.fstat(fd)
        if stat.st_ino not in self._backing:
            address = self._linux.mmap(fd, stat.st_size, PROT_READ | PROT_WRITE, MAP_SHARED)
            self._backing[stat.st_ino] = (address, stat.st_size)
        return self._backing[stat.st_ino]

    def held(self) -> dict[str, int]:
        """What a client holds at the moment."""
        return {
            "fds": len(self.fds),
            "handles": len(self.handles),
            "maps": len(self.maps),
            "gpu maps": len(self.gpu_maps),
        }


class FakeDoorbell:
    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel
        self.rings = 0
        kernel.maps[-1] = 0x10000

    def store32(self, offset: int, value: int) -> None:
        assert offset == DOORBELL
        self.rings += 1

    def close(self) -> None:
        self.kernel.stop()
        self.kernel.maps.pop(-1, None)
