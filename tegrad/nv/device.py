"""NVDevice and its allocator: tinygrad's NV device with what unified memory and long runs need.

`bind()` puts our classes in place of tinygrad's in its NV runtime, which looks them up by name when a device is opened.
The class serves every interface; what only a Jetson needs is asked of the interface (`unified_memory`, `open_fifo`).
"""

import errno
import functools
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final
from weakref import WeakSet

from tinygrad.device import BufferSpec, Device, TinyELF
from tinygrad.engine import realize
from tinygrad.helpers import DEV, PROFILE, TracingKey, cpu_profile, round_up, suppress_finalizing, to_mv
from tinygrad.runtime import ops_nv
from tinygrad.runtime.support.hcq import HCQBuffer, HCQCompiled, MMIOInterface

from tegrad.hw.gpfifo import Userd
from tegrad.nv import compat, roles, wrong_setting
from tegrad.nv.coherence import Coherence
from tegrad.nv.copies import Staging, uncollected
from tegrad.nv.debugger import sms_in_order
from tegrad.nv.desktop import DesktopMemory
from tegrad.nv.faults import (
    DeviceClosed,
    DeviceFault,
    DriverGone,
    NoDevice,
    UnsupportedBuffer,
    UnsupportedDriver,
    WaitTimeout,
    fault_address,
)
from tegrad.nv.gpu import GpuMethods
from tegrad.nv.graph import NVGraph
from tegrad.nv.iface import GPFIFO_ENTRIES, TegraIface, drivers_present
from tegrad.nv.kernel import board_asked, emulated
from tegrad.nv.memory import Memory
from tegrad.nv.queues import Fifo, NVComputeQueue, NVCopyQueue, NVSignal, as_mapped
from tegrad.nv.rings import Ring
from tegrad.nv.slabs import PART_BYTES, Part
from tegrad.nv.spec import MemorySpec, allocating, role_of, with_role
from tegrad.uapi import releases
from tegrad.uapi.errors import DriverError

KERNARGS_SIZE = 4 << 20
"""Bytes of the ring of kernel arguments: about 1,600 launches in flight."""
LAUNCHES_REMEMBERED = 64
"""Submissions whose kernel names a fault can report."""
PROGRESS_STRIDE = 16
"""Distance of the channels' progress words in their page."""

_StockAllocator: Any = ops_nv.NVAllocator
_StockDevice: Any = ops_nv.NVDevice


class Allocator(_StockAllocator):  # type: ignore[misc]
    """tinygrad's allocator, for several threads, with copies that several threads make."""

    _staging: Staging | None = None
    b_timeline: list[int]

    def alloc(self, size: int, options: BufferSpec | None = None) -> HCQBuffer:
        """A buffer, from the cache if one fits. MemoryError, DeviceClosed or DeviceFault."""
        with self.dev.lock:
            self.dev.check_usable()
            buffer: HCQBuffer = super().alloc(size, options)
        return buffer

    def free(self, opaque: Any, size: int, options: BufferSpec | None = None) -> None:
        """Keep the buffer for reuse or give it back; a closed device has none left."""
        with self.dev.lock:
            if not self.dev.closed:
                super().free(opaque, size, options)

    def _free(self, buf: HCQBuffer, options: BufferSpec | None = None) -> None:
        if self.dev.settled():  # a device that failed keeps its memory until it is closed
            super()._free(buf, options)

    def _unmap(self, mb: HCQBuffer) -> None:
        if self.dev.settled():
            super()._unmap(mb)

    def _copyin(self, dest: HCQBuffer, src: memoryview) -> None:
        with self.dev.lock:  # the staging buffers are everybody's
            self.dev.check_usable()
            if PROFILE.value:
                super()._copyin(dest, src)
                return
            self._stage(self._staged().copy_in, dest, src)

    def _copyout(self, dest: memoryview, src: HCQBuffer) -> None:
        with self.dev.lock:
            self.dev.check_usable()
            if PROFILE.value:
                super()._copyout(dest, src)
                return
            self._stage(self._staged().copy_out, dest, src)

    def _staged(self) -> Staging:
        """The staging buffers, which tinygrad's own copies use too, when none is in use."""
        self.dev.timeline_signal.wait(max(self.b_timeline))
        if self._staging is None:
            self._staging = Staging(self.dev, self.b)
        return self._staging

    def _stage(self, copy: Callable[..., None], *ends: Any) -> None:
        """One copy. Whatever is interrupted, and where, is put in order."""
        try:
            try:
                uncollected.begin(id(self))
                copy(*ends)
            finally:
                self._unstage()
        except BaseException:
            if self._staging is not None:
                self._staging.recover()
            self._unstage()  # which may have been interrupted itself
            raise

    def _unstage(self) -> None:
        """Let Python collect, and tinygrad's own copies see when ours end. Once more does no harm."""
        uncollected.end(id(self))
        self.b_timeline = [self.dev.timeline_value - 1] * len(self.b)

    def copy_from_disk(self, dest: HCQBuffer, src: Any, size: int) -> None:
        """Read a file's bytes into a buffer, through the staging buffers."""
        with self.dev.lock:
            self.dev.check_usable()
            try:
                super().copy_from_disk(dest, src, size)
            except BaseException:
                self._unstage()  # tinygrad marks the buffers that it reads into as never free
                raise


class DesktopAllocator(Allocator):
    """The allocator of a GPU whose interface has small buffers in slabs (`tegrad.nv.desktop`)."""

    def free_cache(self) -> None:
        """Give back the buffers that are kept for reuse, and what small ones lay in."""
        with self.dev.lock:
            super().free_cache()
            if self.dev.settled():
                self.dev.iface.trim()

    def _alloc(self, size: int, options: BufferSpec) -> HCQBuffer:
        buffer: HCQBuffer | None = None
        if size <= PART_BYTES and not (options.host or options.cpu_access or options.zero):
            buffer = self.dev.iface.take_spare(size)
        return super()._alloc(size, options) if buffer is None else buffer

    @suppress_finalizing  # type: ignore[untyped-decorator]
    def _free(self, buf: HCQBuffer, options: BufferSpec | None = None) -> None:
        if not isinstance(buf, Part):
            super()._free(buf, options)
        elif self.dev.settled():
            for device in buf.mapped_devs:  # for which the slab stays mapped
                if device is not self.dev and not getattr(device, "closed", False):
                    device.synchronize()
            self.dev.iface.free(buf)

    def _encode_decode(self, bufout: HCQBuffer, bufin: HCQBuffer, desc_buf: HCQBuffer, *args: Any) -> None:
        """tinygrad's video decoder, whose channel sees what RM has mapped."""
        with self.dev.lock:
            for buffer in (bufout, bufin, desc_buf, *args[0]):
                self.dev.iface.map_with_rm(buffer)
        super()._encode_decode(bufout, bufin, desc_buf, *args)


class UnifiedAllocator(Allocator):
    """The allocator where CPU and GPU share memory: copies are memmove after a sync, and no staging buffers exist.

    Every buffer has a role. Those that the GPU's L2 may keep lines of have no CPU view; copies see to L2 (`coherence`).
    """

    def __init__(self, dev: "NVDevice") -> None:
        super().__init__(dev, batch_cnt=0, supports_copy_from_disk=False)
        self.default_buffer_spec = MemorySpec()
        self._coherence = Coherence(lambda: dev.submissions, dev.synchronize, lambda: dev.iface.flush_l2())

    def alloc(self, size: int, options: BufferSpec | None = None) -> HCQBuffer:
        """A buffer, from the cache if one fits. MemoryError, DeviceClosed, DeviceFault, or UnsupportedBuffer."""
        if options is not None and options.external_ptr is not None:
            raise UnsupportedBuffer("memory at a given address cannot become NV memory: copy it with .to('NV')")
        try:
            return super().alloc(size, with_role(options, role_of(options)))
        except MemoryError as error:  # of the second attempt, without the story of the first
            raise MemoryError(f"{error}{f': {error.__cause__}' if error.__cause__ else ''}") from None

    def free(self, opaque: Any, size: int, options: BufferSpec | None = None) -> None:
        """Keep the buffer for reuse in its role or give it back; a closed device has none left."""
        super().free(opaque, size, with_role(options, opaque.meta.role))

    def lend(self, buffers: Iterable[HCQBuffer]) -> list[memoryview]:
        """The bytes of buffers for the CPU to write or read, until the next launches that use them.

        Waits for the GPU if it may have touched one that L2 keeps lines of. DeviceClosed, DeviceFault.
        """
        given = list(buffers)
        with self.dev.lock:
            self.dev.check_usable()
            self._coherence.before_cpu(_memory(buffer) for buffer in given)
        return [self._bytes(buffer) for buffer in given]

    def _alloc(self, size: int, options: BufferSpec) -> HCQBuffer:
        buffer: HCQBuffer = self.dev.iface.alloc(size, role=role_of(options))
        self._coherence.mapped(_memory(buffer))
        return buffer

    def _free(self, buf: HCQBuffer, options: BufferSpec | None = None) -> None:
        if self.dev.settled():
            with self.dev.giving_back():
                self._do_free(buf, options)

    def free_cache(self) -> None:
        """Give back the buffers that are kept for reuse, and all that was freed before."""
        with self.dev.lock:
            super().free_cache()
            if self.dev.settled():
                self.dev.iface.give_back()

    def _map(self, buf: HCQBuffer) -> HCQBuffer:
        """The buffer as the GPU sees it. A CPU buffer gets another address there: 40 bits do not hold its own."""
        if buf.owner is self.dev:
            return buf
        if self.dev not in buf.mappings:
            buf.mappings[self.dev] = self.dev.iface.map(buf.base)
            buf.mappings[self.dev].mapped_from = buf.base
        return as_mapped(buf)

    def _unmap(self, mb: HCQBuffer) -> None:
        mb.base.mapped_from.mappings.pop(self.dev, None)
        if self.dev.settled():
            with self.dev.giving_back():
                self.dev.iface.free(mb.base)

    def _as_buffer(self, src: HCQBuffer) -> memoryview:
        if (memory := _memory(src)).cached:
            raise UnsupportedBuffer(
                f"memory for {memory.role.name} lies in the GPU's L2 between launches, so that no view of it can be "
                "given: copy it out"
            )
        return self._bytes(src)

    def _copyin(self, dest: HCQBuffer, src: memoryview) -> None:
        self.dev.synchronize()
        with cpu_profile(TracingKey(f"TINY -> {self.dev.device}", ret=src.nbytes), f"{self.dev.device}:COPY"):
            self._for_cpu(dest)[: src.nbytes] = src.cast("B")

    def _copyout(self, dest: memoryview, src: HCQBuffer) -> None:
        self.dev.synchronize()
        with cpu_profile(TracingKey(f"{self.dev.device} -> TINY", ret=dest.nbytes), f"{self.dev.device}:COPY"):
            dest.cast("B")[:] = self._for_cpu(src)[: dest.nbytes]

    def _for_cpu(self, buf: HCQBuffer) -> memoryview:
        """The bytes of one buffer, for now."""
        if (memory := _memory(buf)).cached:
            with self.dev.lock:
                self._coherence.before_cpu([memory])
        return self._bytes(buf)

    def _bytes(self, buf: HCQBuffer) -> memoryview:
        if self.dev.closed:
            raise self.dev.gone("a tensor's memory was released when its device was closed: make the tensor again")
        view: memoryview = to_mv(_memory(buf).address + int(buf.va_addr - buf.base.va_addr), buf.size)
        return view


def _memory(buffer: HCQBuffer) -> Memory:
    """What a buffer of a Jetson's is part of."""
    memory: Memory = buffer.meta
    return memory


def make_allocator(dev: "NVDevice") -> Any:
    """The allocator that suits the device's interface."""
    if getattr(dev.iface, "unified_memory", False):
        return UnifiedAllocator(dev)
    return DesktopAllocator(dev) if isinstance(dev.iface, DesktopMemory) else Allocator(dev)


class _SmallRings(HCQCompiled):  # type: ignore[misc]
    """Stands between tinygrad's NVDevice and its base to size the ring of kernel arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with allocating(roles.ARGUMENTS):
            super().__init__(*args, kernargs_size=KERNARGS_SIZE, **kwargs)


class NVDevice(GpuMethods, _StockDevice, _SmallRings):  # type: ignore[misc]
    """tinygrad's NV device. The name is what tinygrad looks for.

    `close()` releases everything at once; `Device["NV"]` then opens a new one, and `reopen` does both. DeviceFault is
    raised by whatever waits when the GPU reports a fault, and by everything that follows until then.
    """

    ifaces: Sequence[Any] = (TegraIface, *_StockDevice.ifaces)
    error_state: Exception | None = None
    slm_per_thread: int
    shader_local_mem: HCQBuffer | None
    _kernargs: Ring[tuple[Fifo, int]]

    def __init__(self, device: str = "") -> None:
        self.closed = False
        self.forked = False
        self.lock = threading.RLock()
        """Held from taking a value of the timeline to its submission: values go out in order."""
        self.computed_value = -1
        """The last timeline value that work of the compute channel ends with: what follows it there need not wait."""
        self._launches: deque[tuple[Fifo, int, Sequence[str]]] = deque(maxlen=LAUNCHES_REMEMBERED)
        self._timeline: deque[tuple[int, Fifo, int]] = deque(maxlen=2 * GPFIFO_ENTRIES)
        self._programs: WeakSet[Any] = WeakSet()
        self._progress: HCQBuffer | None = None
        self._fifos: list[Fifo] = []
        try:
            with allocating(roles.PUSHBUFFER):
                super().__init__(device)
            for fifo in self._fifos:  # each has done its first submission
                fifo.settle_waker()
            self.graph = NVGraph
            # Lazy activation happens inside tinygrad's own lookup, which then keeps the device where nothing drops it.
            _opened[self.device] = self
        except BaseException as error:
            self._release()
            _forget(self)
            if told := _release_trouble(error):
                raise UnsupportedDriver(f"NV cannot be opened: {told}") from error
            raise

    def _select_iface(self, device: str) -> Any:
        roles.policy()  # what is wrong with it is no reason to try another interface
        # Where the Jetson's driver is, what it refuses is the answer; no other interface could tell more.
        if board_asked() or (not DEV.target("NV").interface and drivers_present()):
            self.ifaces = [iface for iface in self.ifaces if iface.__name__ == TegraIface.__name__]
            if (number := DEV.target("NV").indices) not in ("", "0"):
                raise NoDevice(f"GPU {number} does not exist: a Jetson has one, whose number is 0")
        try:
            return super()._select_iface(device)
        except ExceptionGroup as tried:
            reasons = "; ".join(f"{type(error).__name__}: {error}" for error in tried.exceptions)
            raise NoDevice(f"{device} cannot be opened: {reasons}") from None

    @functools.cached_property
    def sm_count(self) -> int:
        """Streaming multiprocessors that work.

        What tinygrad asks for counts those of the largest chip of the family: 144 on a GH100, of which an H200 has 132
        (inferred from the name of the values, "litter"). More blocks than these are never resident together.
        """
        own = getattr(self.iface, "sm_count", None)
        if own is not None:
            return int(own)
        if count := sms_in_order(self) or self._sms_by_masks():
            return count
        raise NoDevice("the driver does not tell how many SMs the GPU has: please report this with its version")

    def _sms_by_masks(self) -> int:
        """The SMs of the TPCs that RM says are there; 0 where it does not answer."""
        nv_gpu, tpcs = ops_nv.nv_gpu, 0
        for gpc in range(self.num_gpcs):
            asked = nv_gpu.NV2080_CTRL_GR_GET_TPC_MASK_PARAMS(gpcId=gpc)
            with suppress(RuntimeError, OSError):  # of a GPC that this GPU lacks
                command = nv_gpu.NV2080_CTRL_CMD_GR_GET_TPC_MASK
                tpcs += int(self.iface.rm_control(self.subdevice, command, asked).tpcMask).bit_count()
        return tpcs * int(self.num_sm_per_tpc)

    # ---- values that tinygrad sets and a Jetson has its own for

    @property
    def shared_mem_window(self) -> int:
        """Where kernels see their shared memory."""
        return self._window("shared_mem_window")

    @shared_mem_window.setter
    def shared_mem_window(self, value: int) -> None:
        self._stock_shared_mem_window = value

    @property
    def local_mem_window(self) -> int:
        """Where kernels see their local memory."""
        return self._window("local_mem_window")

    @local_mem_window.setter
    def local_mem_window(self, value: int) -> None:
        self._stock_local_mem_window = value

    def _window(self, name: str) -> int:
        return int(getattr(self.iface, name, None) or getattr(self, f"_stock_{name}"))

    @property
    def gpfifo_area(self) -> HCQBuffer | None:
        """One area for all GPFIFOs; None where every channel brings its own buffers."""
        return self._gpfifo_area

    @gpfifo_area.setter
    def gpfifo_area(self, area: HCQBuffer) -> None:
        own = hasattr(self.iface, "open_fifo")
        if own:
            self.iface.free(area)
            self.iface.give_back()
        self._gpfifo_area = None if own else area

    @property
    def cmdq_allocator(self) -> Ring[tuple[Fifo, int]]:
        """The ring of command memory."""
        return self._commands

    @cmdq_allocator.setter
    def cmdq_allocator(self, stock: Any) -> None:
        self._commands = Ring(stock.size, stock.base, _wait, "command memory")

    @property
    def kernargs_offset_allocator(self) -> Ring[tuple[Fifo, int]]:
        """The ring of kernel arguments. What is filled in belongs to the next submission on the compute channel.

        Arguments that are launched again and again need memory of their own (`fill_kernargs(..., kernargs=buffer)`).
        """
        self.check_usable()
        return self._kernargs

    @kernargs_offset_allocator.setter
    def kernargs_offset_allocator(self, stock: Any) -> None:
        self._kernargs = Ring(stock.size, stock.base, _wait, "kernel arguments")

    # ---- channels and submissions

    def _new_gpu_fifo(
        self,
        gpfifo_area: HCQBuffer,
        ctxshare: int,
        channel_group: int,
        offset: int = 0,
        entries: int = 0x400,
        compute: bool = False,
        video: bool = False,
    ) -> Fifo:
        """A channel; on a Jetson with buffers of its own, since the driver takes no offset into a shared one."""
        if hasattr(self.iface, "open_fifo"):
            made = self._open_fifo(ctxshare, channel_group, compute)
        else:
            fifo = super()._new_gpu_fifo(gpfifo_area, ctxshare, channel_group, offset, entries, compute, video)
            made = Fifo(fifo, self, self._progress_word())
        self._fifos.append(made)
        return made

    def _open_fifo(self, share: int, group: int, compute: bool) -> Fifo:
        engine = self.iface.compute_class if compute else self.iface.dma_class
        channel, gpfifo, userd = self.iface.open_fifo(group, share, engine)
        token = self.iface.rm_control(
            channel,
            ops_nv.nv_gpu.NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN,
            ops_nv.nv_gpu.NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN_PARAMS(),
        ).workSubmitToken
        ring = MMIOInterface(gpfifo.address, gpfifo.size, fmt="Q")
        put = MMIOInterface(userd.address + Userd.GP_PUT, 4, fmt="I")
        fifo = ops_nv.GPFifo(ring=ring, gpput=put, entries_count=len(ring), token=token)
        progress = self._progress_word()
        return Fifo(fifo, self, progress, self.iface.wakers(channel, progress))

    def _progress_word(self) -> HCQBuffer:
        if self._progress is None:
            with allocating(roles.SIGNALS):
                self._progress = self.iface.alloc(0x1000, host=True, cpu_access=True)
        return self._progress.offset(len(self._fifos) * PROGRESS_STRIDE, PROGRESS_STRIDE)

    @property
    def submissions(self) -> int:
        """How much went to the GPU so far, on all channels."""
        return sum(fifo.submissions for fifo in self._fifos)

    def place_commands(self, words: "array[int]") -> tuple[int, int]:
        """Put commands into the ring of command memory: their GPU address and how many words they are."""
        va = self._commands.alloc(len(words) * 4, 16)
        at = (va - self.cmdq_page.va_addr) // 4
        self.cmdq[at : at + len(words)] = words
        return va, len(words)

    def submitted(self, fifo: Fifo, number: int, kernels: Sequence[str], releases: int | None) -> None:
        """Note that a queue went out: what it uses of the rings stays until `number` is done.

        `kernels` are the names of what it launches, `releases` is the timeline value that it ends with, if any.
        """
        self._commands.submitted((fifo, number))
        if fifo is self.compute_gpfifo:
            self._kernargs.submitted((fifo, number))
        self._launches.append((fifo, number, kernels))
        if releases is not None:
            self._timeline.append((releases, fifo, number))
            if fifo is self.compute_gpfifo:
                self.computed_value = releases

    def replayed(self, fifo: Fifo, number: int, kernels: Sequence[str], value: int) -> None:
        """Note that a recording went out, which has memory of its own; `value` is the timeline value it ends with.

        Of several runs at once the last one: those before have the numbers and values below it.
        """
        self.computed_value = value
        self._launches.append((fifo, number, kernels))
        self._timeline.append((value, fifo, number))

    def releasing(self, value: int) -> tuple[Fifo, int] | None:
        """The submission that lets the timeline reach `value`, if it is on its way."""
        for seen, fifo, number in list(self._timeline):
            if seen >= value:
                return fifo, number - (seen - value)
        return None

    def settled(self) -> bool:
        """Wait for the GPU; whether memory may be given back. If the device failed or is closed, `close` does that.

        Buffers that are freed when Python ends come here too: a setting that a wait cannot read was told before.
        """
        if self.closed or self.error_state is not None:
            return False
        try:
            self.synchronize()
        except (DeviceFault, WaitTimeout):
            return False
        except ValueError as error:
            if wrong_setting(error) is None:
                raise
            return False
        return True

    def timed(self, submit: Callable[[], object]) -> float:
        """Microseconds by the GPU's clock from before the launches that `submit` submits to after them; waits."""
        begin, end = self.new_signal(), self.new_signal()
        with self.lock:
            self.hw_compute_queue_t().timestamp(begin).submit(self)
            submit()
            self.hw_compute_queue_t().timestamp(end).submit(self)
        self.compute_gpfifo.wait(self.compute_gpfifo.submissions)
        return float(end.timestamp - begin.timestamp)

    # ---- copies

    def copy_parts(self, parts: Iterable[tuple[HCQBuffer, HCQBuffer, int]]) -> int:
        """Have the copy engine copy (target, source, bytes), after what was submitted; what `wait_for` takes."""
        with self.lock:
            self.check_usable()
            queue = self.hw_copy_queue_t().wait(self.timeline_signal, self.timeline_value - 1)
            for target, source, size in parts:
                queue.copy(target, source, size)
            copied: int = self.next_timeline()
            queue.signal(self.timeline_signal, copied).submit(self)
        return copied

    def wait_for(self, copied: int) -> None:
        """Wait until copies are done. DeviceFault, WaitTimeout."""
        self.timeline_signal.wait(copied)

    # ---- programs and local memory

    def runtime(self, obj: TinyELF) -> Any:
        """Load a program."""
        with self.lock:
            self.check_usable()
            program = super().runtime(obj)
            self._programs.add(program)
        return program

    def new_signal(self, **kwargs: Any) -> NVSignal:
        """A signal from the pool."""
        with self.lock, allocating(roles.SIGNALS):
            signal: NVSignal = super().new_signal(**kwargs)
        return signal

    def _wrap_timeline_signal(self) -> None:
        """Start the timeline over, at a moment when nothing is on its way."""
        with self.lock:
            self.timeline_signal.wait(self.timeline_value - 1)
            super()._wrap_timeline_signal()
            self._timeline.clear()
            self.computed_value = -1

    def _ensure_has_local_memory(self, required: int) -> None:
        """Grow the kernels' local memory (`required` bytes a thread).

        Kernels in flight may spill into the old one: it is replaced after a sync and given back, not cached.
        MemoryError leaves everything as it was.
        """
        if self.slm_per_thread >= required:
            return
        per_thread = round_up(required, 32)
        per_warp = round_up(per_thread * 32, 0x200)
        per_tpc = round_up(per_warp * self.max_warps_per_sm * self.num_sm_per_tpc, 0x8000)
        size = round_up(per_tpc * self.num_tpc_per_gpc * self.num_gpcs, 0x20000)
        spec = MemorySpec(nolru=True, role=roles.LOCAL)
        new, old = self.allocator.alloc(size, spec), self.shader_local_mem
        self.synchronize()
        queue = NVComputeQueue().wait(self.timeline_signal, self.timeline_value - 1)
        queue.setup(local_mem=new.va_addr, local_mem_tpc_bytes=per_tpc)
        queue.signal(self.timeline_signal, self.next_timeline()).submit(self)
        self.shader_local_mem, self.slm_per_thread = new, per_thread
        if old is not None:
            self.synchronize()
            self.allocator.free(old, old.size, spec)

    # ---- faults

    def gone(self, closed: str) -> DeviceClosed:
        """The error about something of this device when it is closed, or when it is the parent process's."""
        return DeviceClosed(
            f"{self.device} was opened before fork() and stays with the parent process: make tensors in the child from "
            "data of the CPU's, or start processes with multiprocessing's 'spawn'"
            if self.forked
            else closed
        )

    def check_usable(self) -> None:
        """DeviceClosed or the DeviceFault of before, if the device can do no more work."""
        if self.closed:
            raise self.gone(f"{self.device} was closed: get the new device from Device[{self.device!r}]")
        if self.error_state is not None:
            raise self.error_state

    def check_fault(self, ask_driver: bool = False) -> None:
        """DeviceFault if a channel is dead: by its notifier in memory, or by the driver's word for it."""
        iface = self.iface
        if not hasattr(iface, "channel_error"):
            return
        code = iface.channel_error()
        dead = code is not None or (ask_driver and self._given_up())
        if dead:
            # The driver writes the notifier before it gives a channel up: it may have come since the first look.
            fault = self._fault(iface.channel_error() if code is None else code)
            self.error_state = fault
            raise fault

    def _given_up(self) -> bool:
        """Whether the driver has given up a channel. DriverGone if there is none any more."""
        try:
            return bool(self.iface.timed_out())
        except DriverError as error:
            if error.errno != errno.ENODEV:
                raise
            self.error_state = DriverGone(emulated=emulated(), in_flight=self._in_flight())
            raise self.error_state from None

    @contextmanager
    def giving_back(self) -> Iterator[None]:
        """Around calls that give something back: a driver that is gone has nothing of ours."""
        try:
            yield
        except DriverError as error:
            if error.errno != errno.ENODEV:
                raise
            with suppress(DeviceFault):
                self.check_fault(ask_driver=True)
            if not isinstance(self.error_state, DriverGone):
                raise

    def on_device_hang(self) -> None:
        """Called by synchronize when a wait failed: keep a fault as it is, turn a time-out into what it is about."""
        error, names = self.error_state, self._in_flight()
        if isinstance(error, DeviceFault):
            return
        if report := self._debugger_report():
            self.error_state = report
        elif isinstance(error, WaitTimeout) and names:
            self.error_state = WaitTimeout(f"{error}; in flight: {', '.join(names[:3])}")
        if self.error_state is not error and self.error_state is not None:
            raise self.error_state

    def _debugger_report(self) -> DeviceFault | None:
        """What a debugger tells of a fault that no notifier told: ours of all SMs, tinygrad's of the first 100."""
        if hasattr(self.iface, "failed_sms"):
            fault = self._fault(None)
            return fault if fault.sm_errors or fault.address is not None else None
        try:
            super().on_device_hang()
        except RuntimeError as report:
            return DeviceFault(None, in_flight=self._in_flight(), report=str(report))
        return None

    def _fault(self, code: int | None) -> DeviceFault:
        errors, found, in_flight = self.iface.failed_sms(), self.iface.fault_report(), self._in_flight()
        kernel = next((name for error in errors if (name := self._kernel_at(error.pc)) is not None), None)
        if kernel is None and found is not None:
            kernel = found.kernel
        if kernel is None and len(in_flight) == 1:
            kernel = in_flight[0]
        address = fault_address(found, errors)
        buffer = None if address is None else self.iface.describe_address(address)
        return DeviceFault(code, kernel=kernel, in_flight=in_flight, buffer=buffer, sm_errors=errors, found=found)

    def _in_flight(self) -> list[str]:
        launches = list(self._launches)  # at once: other threads go on submitting
        return [name for fifo, number, names in launches if number > fifo.done for name in names]

    def _kernel_at(self, pc: int) -> str | None:
        with self.lock:  # other threads go on loading
            programs = list(self._programs)
        for program in programs:
            if 0 <= pc - program.lib_gpu.va_addr < program.lib_gpu.size:
                return str(program.name)
        return None

    # ---- the end

    def close(self) -> None:
        """Wait for the GPU, release everything, and make `Device[...]` open a new device. Closing twice is harmless.

        Tensors, programs and recorded graphs of this device are gone: using them raises DeviceClosed.
        """
        try:
            self.finalize()
        finally:
            _forget(self)

    def finalize(self) -> None:
        """Wait for the GPU and release everything, as tinygrad asks at the end of the process."""
        with self.lock:  # another thread may be about to ring a doorbell
            if self.closed:
                return
            try:
                if self.settled():
                    with suppress(DeviceFault):
                        self.check_fault(ask_driver=True)
            finally:
                self._release()

    def _release(self) -> None:
        gone = isinstance(self.error_state, DriverGone)
        self.closed = True
        self.error_state = None  # from here on everything says that the device is closed
        if hasattr(self, "iface") and hasattr(self.iface, "device_fini"):
            with suppress(DriverError) if gone else nullcontext():
                self.iface.device_fini()


def _release_trouble(error: BaseException) -> str:
    """What the driver's release has to do with an error of opening, and what to do; "" where nothing is known of that.

    A board is of the release that it emulates, whatever this machine has.
    """
    if isinstance(error, DriverError):
        return releases.trouble(None if board_asked() else releases.l4t(), error.name, error.errno)
    refused = isinstance(error, (RuntimeError, OSError)) and not board_asked()
    if refused and (found := releases.desktop()) is not None and found.row.state is releases.State.REFUSED:
        return "this is " + releases.sentence(f"NVIDIA's driver {found.version}", found.row)
    return ""


def reopen(name: str = "NV") -> Any:
    """Close the device, whatever state it is in, and open a new one in this process; the new device.

    The way on after a DeviceFault. Everything that belonged to the old device is gone: its tensors, programs and
    recorded graphs raise DeviceClosed, so make the tensors again from data of the CPU's. A device that is not open is
    simply opened. What opening raises is raised; nothing of the old device stays either way.
    """
    name = Device.canonicalize(name)
    with _opening:
        if (old := _opened.get(name)) is not None:
            old.close()
        return Device[name]


def _wait(tag: tuple[Fifo, int]) -> None:
    fifo, number = tag
    fifo.wait(number)


_opened: dict[str, Any] = {}
"""Devices that are open; tinygrad's own cache cannot forget one of them."""
_opening = threading.RLock()
"""Held while a device is opened: a second one, of another thread, would find the first half made."""


def opened_facts() -> dict[str, Any]:
    """Of the first device that is open: its SMs and, where the driver tells it (nvgpu), its revision; else nothing."""
    for device in list(_opened.values()):
        told = getattr(device.iface, "characteristics", None)
        return {"sms": device.sm_count} | ({"revision": f"{told.rev:#x}"} if told is not None else {})
    return {}


def _forget(device: NVDevice) -> None:
    """Take a device out of tinygrad's tables: devices, peer groups, signal pools, programs, random-number state."""
    for members in HCQCompiled.peer_groups.values():
        if device in members:
            members.remove(device)
    for pool in (HCQCompiled.signal_pages, HCQCompiled.signal_pool):
        for group, buffers in pool.items():
            pool[group] = [buffer for buffer in buffers if buffer.owner is not device]
    name = getattr(device, "device", None)
    for key in [key for key in realize.runtime_cache if key[1] == name]:
        del realize.runtime_cache[key]
    compat.forget_randomness(name)
    if _opened.get(name or "") is device:
        del _opened[name or ""]
        compat.opened_devices().discard(name)


def _after_fork() -> None:
    """In a forked child: the parent's devices stay the parent's; opening one makes the child's own.

    Locks are new: a thread that held one in the parent is none here.
    """
    global _opening
    _opening = threading.RLock()
    for device in list(_opened.values()):
        device.closed = device.forked = True
        device.lock = threading.RLock()
        device.error_state = None
        if hasattr(device.iface, "abandon"):
            device.iface.abandon()
        _forget(device)


os.register_at_fork(after_in_child=_after_fork)


OPEN: Final = "tinygrad.device.Device._Device__get_canonicalized_item"
_stock_open: Any = compat.published(OPEN)


def _open_once(name: str) -> Any:
    """What tinygrad's cache of devices does, with entries that can be dropped for NV."""
    if not compat.is_nv(name):
        return _stock_open(name)
    if (device := _opened.get(name)) is None:
        with _opening:
            if (device := _opened.get(name)) is None:
                device = _opened[name] = _stock_open.__wrapped__(Device, name)
    return device


def bind() -> None:
    """Make tinygrad's NV runtime use our device, allocator, queues and signal. Doing it again changes nothing."""
    ours = {
        "NVDevice": NVDevice, "NVAllocator": make_allocator, "NVComputeQueue": NVComputeQueue,
        "NVCopyQueue": NVCopyQueue, "NVSignal": NVSignal,
    }  # fmt: skip
    for name, one in ours.items():
        compat.replace(f"{compat.NV}.{name}", one)
    compat.replace(OPEN, _open_once)
