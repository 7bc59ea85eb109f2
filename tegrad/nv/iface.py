"""TegraIface: tinygrad's NVDevice on a Jetson's drivers, through the Kernel seam.

NVDevice speaks to the resource manager of desktop drivers: it allocates objects of numbered classes and sends numbered
controls. Here those calls are looked up in the tables of `rm`; objects live in a table of handles, memory in a table of
nvmap handles, and `device_fini` releases all of it in the driver's order.
"""

import ctypes
import errno
import functools
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface

from tegrad.hw.chips import Chip, by_sm_version
from tegrad.hw.gpfifo import GP_ENTRY_SIZE, USERD_SIZE
from tegrad.nv import compat, kernlog, rm, roles
from tegrad.nv.channel import Channel, Tsg
from tegrad.nv.faults import FREED_REMEMBERED, SmError, describe_address
from tegrad.nv.kernel import CTRL_NODE, pick_kernel
from tegrad.nv.memory import AddressSpace, Memory, Nvmap
from tegrad.nv.pending import PendingFrees
from tegrad.nv.roles import PAGE, Role
from tegrad.nv.spec import role_here
from tegrad.nv.waits import FENCE_NODE, Clock, FenceWaker, InterruptWaker, Waker
from tegrad.uapi import constants as c
from tegrad.uapi import ioctls
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import Doorbell, Kernel
from tegrad.uapi.structs import (
    GpuCharacteristics,
    GpuClkInfo,
    GpuClkSetInfo,
    GpuGetCharacteristics,
    GpuGetTpcMasks,
    GpuL2Fb,
    GpuNumVsms,
    TsgSmErrorStateRecord,
)

NVMAP_NODE = "/dev/nvmap"
GPFIFO_ENTRIES = 1024
"""Entries of a channel's GPFIFO: 8 KiB. The driver maps the whole buffer into its own range, so it stays small."""

CHANNEL_ID = 0xFFF
"""Bits of a work-submit token that name the channel."""
FLUSH_BUSY = (errno.EBUSY, errno.ETIMEDOUT)
"""FLUSH_L2's errors where the GPU did not get through in the 0.5 ms (the way to memory) or 10 ms (L2) that nvgpu polls
(hal/mm/cache/flush_gk20a_fusa.c), as beside another process's kernels."""
FLUSH_LIMIT_S = 1.0
"""How long such a flush is asked for again."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RmObject:
    """An object of the resource manager: its class and what stands behind it."""

    clss: int
    payload: Any = None

    def holds(self, kind: type[T]) -> T:
        """The payload, which must be of this kind. RmError otherwise."""
        if not isinstance(self.payload, kind):
            raise rm.RmError(f"{rm.call_name(self.clss)} is no {kind.__name__}; the call names the wrong object")
        return self.payload


class Registers:
    """The usermode registers as NVDevice writes them: 32-bit words by index."""

    def __init__(self, doorbell: Doorbell) -> None:
        self.doorbell = doorbell

    def __setitem__(self, index: int, value: int) -> None:
        self.doorbell.store32(index * 4, value)


class TegraIface:
    """The interface between NVDevice and nvgpu/nvmap. DEV=Tegra+NV names it.

    Raises DriverError, or TegradError for a chip that is not in hw.chips; then nothing stays open.
    """

    count = 1
    root = 1
    gpu_instance = 0
    viddec_class = None
    peer_group = "NV:tegra"
    preemption = 0
    """The compute preemption mode that the driver granted; 0 is its default."""
    unified_memory = True
    """CPU and GPU read the same memory, so copies are memmove."""

    def __init__(self, dev: Any, device_id: int) -> None:
        if device_id != 0:
            raise rm.RmError(f"NV:{device_id} does not exist: a Jetson has one GPU")
        self.dev = dev
        chosen = roles.policy()
        self.kernel: Kernel = pick_kernel()
        self.objects: dict[int, RmObject] = {self.root: RmObject(rm.nv.NV01_ROOT)}
        self.memory: dict[int, Memory] = {}
        self._handles = itertools.count(self.root + 1)
        self._clock_request: int | None = None
        self._fence_node: int | None = None
        self._doorbell: Doorbell | None = None
        self._released = False
        self._freed: deque[tuple[int, int]] = deque(maxlen=FREED_REMEMBERED)
        with ExitStack() as undo:
            self.nvmap = Nvmap(self.kernel, NVMAP_NODE, chosen)
            undo.callback(self.nvmap.close)
            self.pending = PendingFrees(self.kernel, self.nvmap)
            self.ctrl: int = self.kernel.open(CTRL_NODE)
            undo.callback(self.kernel.close, self.ctrl)
            self.characteristics: GpuCharacteristics = self._read_characteristics()
            self.chip: Chip = _chip(self.characteristics.sm_arch_sm_version)
            self._log_start = kernlog.position(self.kernel)  # only here: where there is no Jetson, its log is long
            undo.pop_all()
        self.compute_class = int(self.characteristics.compute_class)
        self.gpfifo_class = int(self.characteristics.gpfifo_class)
        self.dma_class = int(self.characteristics.dma_copy_class)
        self._allocs = rm.allocs(self.gpfifo_class, self.compute_class, self.dma_class)

    @property
    def shared_mem_window(self) -> int:
        """Where kernels see their shared memory."""
        return self.chip.shared_window

    @property
    def local_mem_window(self) -> int:
        """Where kernels see their local memory."""
        return self.chip.local_window

    # ---- the resource manager

    def rm_alloc(self, parent: int, clss: int, params: Any = None, root: int | None = None) -> int:
        """Make an object of a class; its handle."""
        if clss not in self._allocs:
            raise rm.RmError(f"RM class {rm.call_name(clss)} is not available on a Jetson")
        payload = self._allocs[clss](self, self.objects[parent], params)
        handle = next(self._handles)
        self.objects[handle] = RmObject(clss, payload)
        return handle

    def rm_control(self, obj: int, cmd: int, params: Any = None, **kwargs: Any) -> Any:
        """Send a control; the parameters, filled."""
        if cmd not in rm.CONTROLS:
            raise rm.RmError(f"RM control {rm.call_name(cmd, '_CTRL_')} is not available on a Jetson")
        rm.CONTROLS[cmd](self, self.objects[obj], params)
        return params

    def setup_usermode(self) -> tuple[int, Registers]:
        """Map the doorbell page; (no handle, registers)."""
        self._doorbell = self.kernel.doorbell(self.ctrl)
        return 0, Registers(self._doorbell)

    def setup_vm(self, vaspace: int) -> None:
        """Reserve the shader windows: a buffer that lay behind one would be invisible to kernels."""
        self._space = self.objects[vaspace].holds(AddressSpace)
        for start in (self.chip.local_window, self.chip.shared_window):
            self._space.reserve(start, self.chip.window_size)

    def open_fifo(self, group: int, share: int, engine_class: int) -> tuple[int, Memory, Memory]:
        """A channel of its own small buffers with an engine object: its handle, GPFIFO and USERD."""
        gpfifo = self._channel_memory(GPFIFO_ENTRIES * GP_ENTRY_SIZE, roles.GPFIFO)
        userd = self._channel_memory(max(PAGE, USERD_SIZE), roles.USERD)
        notifier = self._channel_memory(PAGE, roles.NOTIFIER)
        params = rm.nv.NV_CHANNELGPFIFO_ALLOCATION_PARAMETERS(
            gpFifoEntries=GPFIFO_ENTRIES,
            hContextShare=share,
            hObjectError=notifier.handle,
            hObjectBuffer=gpfifo.handle,
            hUserdMemory=(ctypes.c_uint32 * 8)(userd.handle),
        )
        channel = self.rm_alloc(group, self.gpfifo_class, params)
        self.rm_alloc(channel, engine_class)
        return channel, gpfifo, userd

    def wakers(self, channel: int, progress: HCQBuffer) -> Iterator[Waker]:
        """What may wake a CPU that sleeps for this channel, best first; its progress word is in `progress`."""
        found, by_fence = self.objects[channel].holds(Channel), None
        with suppress(DriverError):
            if self._fence_node is None:
                self._fence_node = self.kernel.open(FENCE_NODE)
            by_fence = FenceWaker(self.kernel, self._fence_node, found.syncpoint())
        if by_fence is not None:
            yield by_fence
        yield InterruptWaker(found, lambda: self.nvmap.export(progress.meta), progress.va_addr - progress.base.va_addr)
        yield Clock()

    # ---- memory

    def alloc(self, size: int, *, role: Role | None = None, **wishes: Any) -> HCQBuffer:
        """A zeroed buffer of `size` bytes, mapped for both CPU and GPU, of a role: unless said, what allocates here.

        tinygrad's wishes (host, uncached, cpu_access, ...) are for desktop GPUs; none applies. MemoryError when memory
        runs out.
        """
        role = role or role_here()
        return self._hand_out(self._made(lambda: self.nvmap.alloc(size, role, self._space)), self.dev)

    def map(self, mem: HCQBuffer) -> HCQBuffer:
        """Map a CPU buffer for the GPU, in place: its pages become an nvmap buffer that both see."""
        if mem.owner is None or not compat.is_cpu(mem.owner):
            raise rm.RmError("only this GPU's own buffers and the CPU's can be mapped on a Jetson")
        mem.owner.synchronize()
        made = self._made(lambda: self.nvmap.adopt(mem.cpu_view().addr, mem.size, self._space))
        return self._hand_out(made, mem.owner)

    def free(self, mem: HCQBuffer) -> None:
        """Give a buffer back with the next batch (`give_back`); nothing uses it any more, and the GPU is done with it.

        A buffer that is not (or no longer) ours is left alone.
        """
        memory = mem.meta
        if isinstance(memory, Memory) and self.memory.get(memory.handle) is memory:
            del self.memory[memory.handle]
            self._freed.append((memory.va, memory.size))
            self.pending.add(memory, self._space)

    def give_back(self) -> bool:
        """Unmap and free at once what was freed and waits for a batch; whether anything did."""
        return self.pending.give_back(self._space)

    def flush_l2(self) -> None:
        """Empty the GPU's L2: write back what is dirty, keep nothing, and flush the way to memory. DriverError.

        A flush that did not get through is asked for again.
        """
        deadline = time.monotonic() + FLUSH_LIMIT_S
        while True:
            try:
                arg = GpuL2Fb(l2_flush=1, l2_invalidate=1, fb_flush=1)
                self.kernel.ioctl(self.ctrl, ioctls.NVGPU_GPU_IOCTL_FLUSH_L2, arg)
            except DriverError as error:
                if error.errno not in FLUSH_BUSY or time.monotonic() > deadline:
                    raise
            else:
                return

    def describe_address(self, address: int) -> str | None:
        """Which buffer an address lies in, or next to; None below every buffer's range, where null pointers point."""
        if address < self.chip.va_start:
            return None
        memory = list(self.memory.values())  # at once: other threads go on allocating and freeing
        mapped = [(own.va, own.size) for own in memory if own.va]
        return describe_address(address, mapped, list(self._freed)[::-1])

    # ---- what the driver tells

    @functools.cached_property
    def sm_count(self) -> int:
        """Streaming multiprocessors that work now (the power mode can gate some)."""
        arg = GpuNumVsms()
        self.kernel.ioctl(self.ctrl, ioctls.NVGPU_GPU_IOCTL_NUM_VSMS, arg)
        return int(arg.num_vsms)

    @functools.cached_property
    def tpc_count(self) -> int:
        """TPCs that work now."""
        masks = (ctypes.c_uint32 * self.characteristics.max_gpc_count)()
        arg = GpuGetTpcMasks(mask_buf_size=ctypes.sizeof(masks), mask_buf_addr=ctypes.addressof(masks))
        self.kernel.ioctl(self.ctrl, ioctls.NVGPU_GPU_IOCTL_GET_TPC_MASKS, arg)
        return sum(mask.bit_count() for mask in masks)

    def boost_clock(self) -> None:
        """Ask for the highest GPU clock while the device is open. Where that is not allowed, the governor decides."""
        if self._clock_request is not None or not self._has(c.NVGPU_GPU_FLAGS_SUPPORT_CLOCK_CONTROLS):
            return
        entry = GpuClkInfo(
            clk_type=c.NVGPU_GPU_CLK_TYPE_TARGET,
            clk_domain=c.NVGPU_GPU_CLK_DOMAIN_GPCCLK,
            freq_hz=self.characteristics.max_freq,
        )
        arg = GpuClkSetInfo(num_entries=1, clk_info_entries=ctypes.addressof(entry))
        with suppress(DriverError):
            self.kernel.ioctl(self.ctrl, ioctls.NVGPU_GPU_IOCTL_CLK_SET_INFO, arg)
            self._clock_request = int(arg.completion_fd)

    # ---- health

    def channel_error(self) -> int | None:
        """The error code in the notifier of a dead channel, or None. Reads memory only."""
        return next((code for channel in self._channels() if (code := channel.error()) is not None), None)

    def timed_out(self) -> bool:
        """Whether the driver has given up a channel. One system call per channel."""
        return any(channel.timed_out() for channel in self._channels())

    def sm_errors(self) -> list[TsgSmErrorStateRecord]:
        """The exception record of every SM, by number."""
        group = next((o.payload for o in self.objects.values() if isinstance(o.payload, Tsg)), None)
        return [] if group is None else [group.sm_error(sm) for sm in range(self.sm_count)]

    def failed_sms(self) -> list[SmError]:
        """The SMs that report an exception; empty where the driver does not answer."""
        with suppress(DriverError):
            return [
                SmError(sm, record.global_esr, record.warp_esr, record.warp_esr_pc)
                for sm, record in enumerate(self.sm_errors())
                if record.global_esr or record.warp_esr
            ]
        return []

    def fault_report(self) -> kernlog.FaultReport | None:
        """What the kernel log says of our last fault, if it may be read."""
        channels = [channel.token & CHANNEL_ID for channel in self._channels()]
        return kernlog.fault_report(self.kernel, channels, self._log_start)

    def sleep(self, ms: int) -> None:
        """Called from a long wait; our waits look at `channel_error` and `timed_out` themselves."""

    # ---- the end

    def device_fini(self) -> None:
        """Release everything, in the driver's order: channels, mappings, groups and spaces, doorbell, ctrl, memory.

        A second call does nothing. If a step fails the others still happen, and the first error is raised.
        """
        if self._released:
            return
        self._released = True
        payloads = [obj.payload for obj in self.objects.values()]
        left = [*self.memory.values(), *self.pending.take()]
        with ExitStack() as steps:  # runs from the last to the first
            steps.callback(self.nvmap.close)
            for memory in left:
                steps.callback(self.nvmap.free, memory)
            steps.callback(self.kernel.close, self.ctrl)
            for fd in (self._clock_request, self._fence_node):
                if fd is not None:
                    steps.callback(self.kernel.close, fd)
            if self._doorbell is not None:
                steps.callback(self._doorbell.close)
            for payload in payloads:
                if isinstance(payload, (Tsg, AddressSpace)):
                    steps.callback(payload.close)
            for memory in left:
                if memory.va:
                    steps.callback(self._space.unmap, memory.va)
            for payload in payloads:
                if isinstance(payload, Channel):
                    steps.callback(payload.close)
            self.memory, self.objects = {}, {}

    def abandon(self) -> None:
        """In a forked child: let go of the parent's fds without a call of the driver, which would act for the parent.

        The mappings were not inherited; the parent's objects live as long as its own fds.
        """
        self._released = True
        fds = [self.ctrl, self.nvmap.fd, self._clock_request, self._fence_node]
        fds += [o.payload.fd for o in self.objects.values() if isinstance(o.payload, (Channel, Tsg, AddressSpace))]
        for fd in fds:
            if fd is not None:
                with suppress(OSError):
                    os.close(fd)
        self.memory, self.objects = {}, {}
        self.pending.take()

    # ---- inside

    def _read_characteristics(self) -> GpuCharacteristics:
        info = GpuCharacteristics()
        arg = GpuGetCharacteristics(
            gpu_characteristics_buf_size=ctypes.sizeof(info), gpu_characteristics_buf_addr=ctypes.addressof(info)
        )
        self.kernel.ioctl(self.ctrl, ioctls.NVGPU_GPU_IOCTL_GET_CHARACTERISTICS, arg)
        return info

    def _has(self, flag: int) -> bool:
        return bool(self.characteristics.flags & flag)

    def _channels(self) -> list[Channel]:
        return [obj.payload for obj in self.objects.values() if isinstance(obj.payload, Channel)]

    def _made(self, make: Callable[[], Memory]) -> Memory:
        """What `make` makes; where memory runs out, freed buffers are given back first and it is tried again."""
        try:
            return make()
        except MemoryError:
            if not self.give_back():
                raise
        return make()

    def _channel_memory(self, size: int, role: Role) -> Memory:
        """Memory that the driver maps for itself."""
        memory = self.nvmap.alloc(size, role)
        self.memory[memory.handle] = memory
        return memory

    def _hand_out(self, memory: Memory, owner: Any) -> HCQBuffer:
        self.memory[memory.handle] = memory
        # A view would outlive the moment at which L2 has nothing of the memory (see `coherence`).
        view = None if memory.cached else MMIOInterface(memory.address, memory.size, fmt="B")
        return HCQBuffer(memory.va, memory.size, meta=memory, view=view, owner=owner)


def drivers_present() -> bool:
    """Whether this machine (or the board that was asked for) has a Jetson's GPU driver."""
    return pick_kernel().exists(CTRL_NODE)


def _chip(sm_version: int) -> Chip:
    try:
        return by_sm_version(sm_version)
    except KeyError as error:
        raise rm.RmError(f"this GPU is not supported: {error.args[0]}; tegrad/hw/chips.py takes new rows") from error
