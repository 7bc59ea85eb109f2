#!/usr/bin/env python3
"""Bring-up of a Jetson Orin's GPU from the driver's ioctls alone: one line per check, then 'n/m passed'.

    python examples/bringup.py                               the GPU of this machine (/dev/nvgpu, /dev/nvmap)
    TEGRAD_BOARD=agx-orin-64gb python examples/bringup.py    the emulated board
    python examples/bringup.py --trace                       every driver call and doorbell on stderr

No tinygrad: the tables of tegrad.hw, the Kernel of tegrad.uapi, and NVIDIA's compiler for one kernel. Exit code 0 when
all checks passed, 1 otherwise. The order of calls is what nvgpu of L4T r36.4.3 wants.
"""

import argparse
import array
import ctypes
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from bringup_gpu import (
    PAGE,
    THREADS,
    Channel,
    CheckFailed,
    Device,
    Program,
    build_qmd,
    bytes_at,
    constant_bank,
    copy,
    expect,
    launch,
    release,
    setup,
    syncpoint_increment,
)

from tegrad.errors import TegradError
from tegrad.hw.chips import Chip, by_sm_version
from tegrad.hw.faults import read_notifier
from tegrad.nv.kernel import pick_kernel
from tegrad.uapi import constants as c
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s
from tegrad.uapi.kernel import Kernel
from tegrad.uapi.trace import Tracer

CTRL_NODES = ("/dev/nvgpu/igpu0/ctrl", "/dev/nvhost-ctrl-gpu")
NVMAP_NODE = "/dev/nvmap"
FENCE_NODE = "/dev/host1x-fence"

BUFFER_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
COPY_SIZE = (1 << 20) + 52
ELEMENTS, FACTOR = 100_000, 2654435761
FENCE_WAIT_MS = 10_000


class Bringup:
    """The checks in order. A check returns the detail of its line, or raises."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.device = Device(kernel)
        self.undo = ExitStack()
        self.passed = self.total = 0
        self.info = s.GpuCharacteristics()
        self._chip: Chip | None = None
        self._channel: Channel | None = None
        self.veid = 0

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """(name, check), in the order the driver wants."""
        yield "nodes", self.nodes
        yield "characteristics", self.characteristics
        yield "topology", self.topology
        yield "address space", self.address_space
        yield "shader windows", self.windows
        for size in BUFFER_SIZES:
            yield f"buffer {size >> 10} KiB", lambda size=size: self.buffer(size)  # type: ignore[misc]
        yield "TSG", self.time_slice_group
        yield "channel", self.set_up_channel
        yield "preemption mode", self.preemption
        yield "doorbell page", self.doorbell
        yield "NOP push", self.nop
        yield "segments", self.segments
        yield "copy engine", self.copy_engine
        yield "kernel by QMD", self.run_kernel
        yield "syncpoint", self.syncpoint
        yield "channel health", self.health

    def run(self) -> bool:
        """All checks, then the release of everything; whether all passed."""
        fds = self.settled_fds()
        try:
            for name, check in self.checks():
                self.check(name, check)
        finally:
            self.check("release", lambda: self.release(fds))
        print(f"{self.passed}/{self.total} passed")
        return self.passed == self.total

    def check(self, name: str, check: Callable[[], str]) -> None:
        """Run one check and print its line."""
        self.total += 1
        start = time.perf_counter()
        try:
            detail = check()
        except TegradError as error:
            print(f"FAILED {name}: {error}", flush=True)
            return
        self.passed += 1
        print(f"ok     {name}: {detail} [{(time.perf_counter() - start) * 1e3:.1f} ms]", flush=True)

    def settled_fds(self) -> int:
        """This process's open fds, counted when the kernel's own (a board's connection) are there."""
        with ExitStack() as undo:
            if self.kernel.exists(NVMAP_NODE):
                self.device.open(undo, NVMAP_NODE)
        return open_fds()

    @property
    def chip(self) -> Chip:
        """The chip's row; CheckFailed when `characteristics` did not find it."""
        if self._chip is None:
            raise CheckFailed("not tried: the chip is not known")
        return self._chip

    @property
    def channel(self) -> Channel:
        """The channel; CheckFailed when it was not set up."""
        if self._channel is None:
            raise CheckFailed("not tried: there is no channel")
        return self._channel

    def nodes(self) -> str:
        """The two device nodes that a compute client needs."""
        ctrl = next((path for path in CTRL_NODES if self.kernel.exists(path)), CTRL_NODES[0])
        self.device.fds["ctrl"] = self.device.open(self.undo, ctrl)
        self.device.fds["nvmap"] = self.device.open(self.undo, NVMAP_NODE)
        return f"{ctrl} and {NVMAP_NODE}"

    def characteristics(self) -> str:
        """GET_CHARACTERISTICS, against the row of the chip it names."""
        info, size = self.info, ctypes.sizeof(self.info)
        arg = s.GpuGetCharacteristics(
            gpu_characteristics_buf_size=size, gpu_characteristics_buf_addr=ctypes.addressof(info)
        )
        expect(
            self.kernel.ioctl(self.device.fd("ctrl"), io.NVGPU_GPU_IOCTL_GET_CHARACTERISTICS, arg),
            0,
            "bytes not copied",
        )
        expect(arg.gpu_characteristics_buf_size, size, "size of the characteristics")
        try:
            chip = by_sm_version(info.sm_arch_sm_version)
        except KeyError as error:
            raise CheckFailed(error.args[0]) from error
        expect((info.arch, info.impl), (chip.gpu_arch, chip.gpu_impl), "architecture and implementation")
        expect(info.compute_class, chip.compute_class, "compute class")
        expect(info.gpfifo_class, chip.gpfifo_class, "GPFIFO class")
        expect(info.dma_copy_class, chip.dma_class, "copy class")
        expect(info.gpu_va_bit_count, chip.va_bits, "address bits")
        if not info.flags & c.NVGPU_GPU_FLAGS_SUPPORT_USERMODE_SUBMIT:
            raise CheckFailed("this driver has no usermode submission")
        self._chip = chip
        name = bytes(info.chipname).rstrip(b"\0").decode()
        return f"{name}, {chip.arch}, up to {info.max_freq / 1e6:.0f} MHz, L2 {info.L2_cache_size >> 20} MiB"

    def topology(self) -> str:
        """GET_TPC_MASKS and NUM_VSMS agree."""
        masks = (ctypes.c_uint32 * max(1, self.info.max_gpc_count))()
        arg = s.GpuGetTpcMasks(mask_buf_size=ctypes.sizeof(masks), mask_buf_addr=ctypes.addressof(masks))
        self.kernel.ioctl(self.device.fd("ctrl"), io.NVGPU_GPU_IOCTL_GET_TPC_MASKS, arg)
        tpcs = sum(mask.bit_count() for mask in masks)
        sms = s.GpuNumVsms()
        self.kernel.ioctl(self.device.fd("ctrl"), io.NVGPU_GPU_IOCTL_NUM_VSMS, sms)
        expect(sms.num_vsms, tpcs * self.chip.sm_per_tpc, "SMs by NUM_VSMS and by TPC masks")
        return f"{self.info.num_gpc} GPCs, {tpcs} TPCs, {sms.num_vsms} SMs"

    def address_space(self) -> str:
        """ALLOC_AS over the chip's range, which leaves the driver its 4 GiB below 2^40."""
        start, end = self.chip.va_start, self.chip.va_end
        flags = c.NVGPU_GPU_IOCTL_ALLOC_AS_FLAGS_UNIFIED_VA
        arg = s.AllocAs(flags=flags, va_range_start=start, va_range_end=end)
        self.kernel.ioctl(self.device.fd("ctrl"), io.NVGPU_GPU_IOCTL_ALLOC_AS, arg)
        self.device.fds["space"] = self.device.keep(self.undo, arg.as_fd)
        return f"[{start:#x}, {end:#x})"

    def windows(self) -> str:
        """ALLOC_SPACE over the shader windows, so that no buffer ever hides behind one."""
        for base in (self.chip.local_window, self.chip.shared_window):
            flags = c.NVGPU_AS_ALLOC_SPACE_FLAGS_FIXED_OFFSET
            arg = s.AsAllocSpace(pages=self.chip.window_size // PAGE, page_size=PAGE, flags=flags)
            arg.o_a.offset = base
            self.kernel.ioctl(self.device.fd("space"), io.NVGPU_AS_IOCTL_ALLOC_SPACE, arg)
            expect(arg.o_a.offset, base, "reserved address")
        return f"{self.chip.local_window:#x} and {self.chip.shared_window:#x} reserved"

    def buffer(self, size: int) -> str:
        """A buffer of this size: fresh, written and read through two CPU mappings, mapped twice for the GPU."""
        chip = self.chip
        with ExitStack() as undo:
            buffer = self.device.buffer(undo, size)
            second = bytes_at(self.device.map_cpu(undo, buffer.fd, size), size)
            if any(second[:PAGE]) or any(second[-PAGE:]):
                raise CheckFailed("fresh memory is not zero")
            pattern = (bytes((size >> 12) + i & 0xFF for i in range(251)) * (size // 251 + 1))[:size]
            buffer.view()[:] = pattern
            if second != pattern:
                raise CheckFailed("what one mapping wrote the other does not show")
            va = self.device.map_gpu(undo, buffer)
            expect(self.device.map_gpu(undo, buffer), va, "address of the same buffer mapped again")
            behind = [w for w in (chip.local_window, chip.shared_window) if w < va + size and va < w + chip.window_size]
            if behind or not chip.va_start <= va <= chip.va_end - size:
                raise CheckFailed(f"mapped at {va:#x}, outside the range or behind a shader window")
            return f"two mappings agree, GPU address {va:#x}"

    def time_slice_group(self) -> str:
        """OPEN_TSG and an asynchronous subcontext over the address space."""
        arg = s.GpuOpenTsg()
        self.kernel.ioctl(self.device.fd("ctrl"), io.NVGPU_GPU_IOCTL_OPEN_TSG, arg)
        self.device.fds["tsg"] = self.device.keep(self.undo, arg.tsg_fd)
        sub = s.TsgCreateSubcontext(type=c.NVGPU_TSG_SUBCONTEXT_TYPE_ASYNC, as_fd=self.device.fd("space"))
        self.kernel.ioctl(self.device.fd("tsg"), io.NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT, sub)
        self.veid = sub.veid
        expect(self.veid, 1, "first asynchronous subcontext")
        return f"subcontext {self.veid}"

    def set_up_channel(self) -> str:
        """Address space, group, watchdog, SETUP_BIND, engine objects, syncpoint, notifier."""
        self._channel = Channel(self.device, self.undo, self.device.fd("tsg"), self.veid, self.chip)
        expect(self.channel.timed_out(), 0, "GET_TIMEDOUT")
        return f"work-submit token {self.channel.token:#x}, syncpoint {self.channel.syncpoint.syncpoint_id}"

    def preemption(self) -> str:
        """SET_PREEMPTION_MODE: the finest that the driver offers, so that long kernels can be interrupted."""
        channel = self.channel
        offered = self.info.compute_preemption_mode_flags
        modes = {"CILP": c.NVGPU_COMPUTE_PREEMPTION_MODE_CILP, "CTA": c.NVGPU_COMPUTE_PREEMPTION_MODE_CTA}
        name = next((name for name, bit in modes.items() if offered & bit), None)
        if name is None:
            raise CheckFailed(f"the driver offers only {offered:#x}")
        arg = s.PreemptionMode(compute_preempt_mode=modes[name])
        self.kernel.ioctl(channel.fd, io.NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE, arg)
        return name

    def doorbell(self) -> str:
        """The usermode registers; a second mapping of the same fd is refused."""
        channel = self.channel
        bell = self.kernel.doorbell(self.device.fd("ctrl"))
        self.undo.callback(bell.close)
        channel.bell = bell
        try:
            self.kernel.doorbell(self.device.fd("ctrl")).close()
        except TegradError as error:
            expect(getattr(error, "code", ""), "EBUSY", "a second mapping")
            return "mapped once, EBUSY for the second"
        raise CheckFailed("the driver allowed a second mapping of one fd")

    def nop(self) -> str:
        """Engine objects and windows, and nothing else; a semaphore release says that the host took them."""
        seconds = self.channel.run(setup(self.chip))
        stamp = self.channel.semaphore.quad(8).value
        if not stamp:
            raise CheckFailed("the semaphore has no timestamp")
        return f"semaphore after {seconds * 1e6:.0f} us, GPU time {stamp / 1e9:.3f} s"

    def segments(self) -> str:
        """Several ring entries with one doorbell run in order: each writes the same word, the last one stays."""
        channel = self.channel
        scratch = channel.semaphore.va + 64
        channel.run(*(release(scratch, value) for value in (7, 8, 9)))
        expect(channel.semaphore.quad(64).value, 9, "the word that three segments wrote")
        return "three in order"

    def copy_engine(self) -> str:
        """A linear copy of an odd size by the copy engine."""
        channel = self.channel
        with ExitStack() as undo:
            source, target = (self.device.gpu_buffer(undo, COPY_SIZE) for _ in range(2))
            source.view()[:] = (bytes(range(256)) * (COPY_SIZE // 256 + 1))[:COPY_SIZE]
            seconds = channel.run(copy(source.va, target.va, COPY_SIZE - 4))
            expect(bytes(target.view(COPY_SIZE - 4)), bytes(4), "bytes after the copy")
            if target.view(0, COPY_SIZE - 4) != source.view(0, COPY_SIZE - 4):
                raise CheckFailed("the copy differs from its source")
        return f"{COPY_SIZE - 4} bytes in {seconds * 1e6:.0f} us"

    def run_kernel(self) -> str:
        """A kernel compiled by NVRTC, launched by QMD twice with other arguments, its results checked."""
        chip, channel, size = self.chip, self.channel, 4 * ELEMENTS
        program = Program.compile(chip)
        with ExitStack() as undo:
            code = self.device.gpu_buffer(undo, program.size)
            program.load(code)
            source, target, launches = (self.device.gpu_buffer(undo, n) for n in (size, size, 4 * PAGE))
            inputs = array.array("I", (i * i & 0xFFFFFFFF for i in range(ELEMENTS)))
            source.view(0, size)[:] = inputs.tobytes()
            times = []
            for turn, factor in enumerate((FACTOR, 3)):
                # Each launch has its own QMD and constants: the GPU may still hold those of the one before.
                at = 2 * PAGE * turn
                grid = -(-ELEMENTS // THREADS)
                bank = constant_bank(chip, program, grid, target.va, source.va, ELEMENTS, factor)
                launches.view(at + PAGE, len(bank))[:] = bank
                build_qmd(chip, launches.view(at), program, code.va, launches.va + at + PAGE, len(bank), grid)
                times.append(channel.run(launch(launches.va + at)))
                wanted = array.array("I", (x * factor + i & 0xFFFFFFFF for i, x in enumerate(inputs)))
                if target.view(0, size) != memoryview(wanted).cast("B"):
                    raise CheckFailed(f"wrong results with factor {factor}")
        return f"{ELEMENTS} results right, {' and '.join(f'{t * 1e6:.0f}' for t in times)} us"

    def syncpoint(self) -> str:
        """The pushbuffer counts the channel's syncpoint up; a fence fd on it becomes readable then, not before."""
        channel = self.channel
        point = channel.syncpoint
        with ExitStack() as undo:
            node = self.device.open(undo, FENCE_NODE)
            arg = s.Host1xCreateFence(id=point.syncpoint_id, threshold=(point.syncpoint_max + 1) & 0xFFFFFFFF)
            self.kernel.ioctl(node, io.HOST1X_IOCTL_CREATE_FENCE, arg)
            fence = self.device.keep(undo, arg.fence_fd)
            poll = select.poll()
            poll.register(fence, select.POLLIN)
            expect(poll.poll(20), [], "the fence before the increment")
            channel.queue(syncpoint_increment(point.gpu_va))
            channel.ring()
            expect(poll.poll(FENCE_WAIT_MS), [(fence, select.POLLIN)], "the fence after the increment")
        return f"syncpoint {point.syncpoint_id} reached {arg.threshold}"

    def health(self) -> str:
        """No error notifier, not timed out."""
        expect(read_notifier(self.channel.notifier.view(0, 16)).status, 0, "notifier status")
        expect(self.channel.timed_out(), 0, "GET_TIMEDOUT")
        return f"{self.channel.count} pushes, no error"

    def release(self, fds: int) -> str:
        """Undo everything in reverse; no fd may be left."""
        self._channel = None
        self.undo.close()
        expect(open_fds(), fds, "open file descriptors")
        return f"{fds} file descriptors, as before"


def open_fds() -> int:
    """Open file descriptors of this process (one of them is the listing itself)."""
    return len(os.listdir("/proc/self/fd"))


def main() -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description="Bring-up checks of a Jetson Orin's GPU, without tinygrad.")
    parser.add_argument("--trace", action="store_true", help="show every driver call on stderr")
    arguments = parser.parse_args()
    kernel = pick_kernel()
    if arguments.trace:
        kernel = Tracer(kernel, lambda call: print(call, file=sys.stderr, flush=True))
    return 0 if Bringup(kernel).run() else 1


if __name__ == "__main__":
    sys.exit(main())
