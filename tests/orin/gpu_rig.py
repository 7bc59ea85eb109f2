"""A GPU in this process, with buffers, channels and hand-made programs: what a driver and a client would set up."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tegrad.hw import bank0, ptxsection
from tegrad.hw.chips import CHIPS, Chip
from tegrad.hw.classes import ComputeMethod, CopyMethod, HostMethod
from tegrad.hw.gpfifo import DOORBELL, MethodOp, Subchannel, Userd, gp_entry, method_header
from tegrad.hw.qmd import LAYOUTS, Qmd
from tegrad.orin.events import FatalEvent, GpuEvent
from tegrad.orin.gpu import Gpu
from tegrad.ptx.l2 import Mode

PAGE = 4096
BACKSTOP_S = 60.0
"""When what must happen is taken not to happen: long, since the machine may be busy."""
PARAM_BASE = {"V3": 0x160, "V4": 0x210}

STORE = """
.version 7.5
.target sm_80
.address_size 64
.visible .entry store(.param .u64 p, .param .u64 v)
{
    .reg .b64 %a; .reg .b64 %v; .reg .b32 %w;
    ld.param.u64 %a, [p];
    ld.param.u64 %v, [v];
    cvt.u32.u64 %w, %v;
    st.global.u32 [%a], %w;
    ret;
}
"""
"""Store the low word of v at p."""


@dataclass
class Buffer:
    """A memfd mapped at `va` on the GPU and in this process."""

    va: int
    size: int
    fd: int
    mem: mmap.mmap = field(repr=False)

    def u32(self, offset: int = 0) -> int:
        """A word, as the CPU sees it."""
        return int(struct.unpack_from("<I", self.mem, offset)[0])

    def u64(self, offset: int = 0) -> int:
        """A double word, as the CPU sees it."""
        return int(struct.unpack_from("<Q", self.mem, offset)[0])

    def put(self, data: bytes, offset: int = 0) -> None:
        """Store bytes from the CPU."""
        self.mem[offset : offset + len(data)] = data

    def put64(self, value: int, offset: int = 0) -> None:
        """Store a double word from the CPU."""
        self.put(struct.pack("<Q", value), offset)


class Rig:
    """One VM, one TSG; channels on demand. Use as a context manager."""

    def __init__(
        self, chip: str = "agx-orin-64gb", *, race_seed: int | None = None, l2_mode: Mode | None = None
    ) -> None:
        self.chip: Chip = CHIPS[chip]
        self.events: list[GpuEvent] = []
        read_fd, self.doorbell_fd = os.pipe()
        self._read_fd = read_fd
        self.gpu = Gpu(self.chip, self.events.append, read_fd, race_seed=race_seed, l2_mode=l2_mode)
        self.gpu.vm_create(1)
        self.gpu.tsg_create(1)
        self._next_va = 0x10000000
        self._buffers: list[Buffer] = []
        self._chids = 511
        self.layout = LAYOUTS[self.chip.qmd]
        self.param_base = PARAM_BASE[self.chip.qmd]

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down."""
        self.gpu.close()
        for buffer in self._buffers:
            buffer.mem.close()
            os.close(buffer.fd)
        os.close(self.doorbell_fd)
        os.close(self._read_fd)

    def buffer(
        self,
        size: int = PAGE,
        *,
        va: int | None = None,
        writable: bool = True,
        vm: int = 1,
        cached: bool = False,
        of: Buffer | None = None,
        label: str = "",
    ) -> Buffer:
        """A mapped buffer; without `va`, at the next free place. With `of`, that buffer's memory mapped once more."""
        size = (size + PAGE - 1) // PAGE * PAGE
        if va is None:
            va = self._next_va
            self._next_va += (size + 0x200000) & ~0xFFFFF
        if of is None:
            fd = os.memfd_create("rig")
            os.ftruncate(fd, size)
        else:
            fd = os.dup(of.fd)
        self.gpu.map(vm, va, size, fd, 0, writable, cached, label)
        buffer = Buffer(va, size, fd, mmap.mmap(fd, size))
        self._buffers.append(buffer)
        return buffer

    def channel(
        self,
        *,
        entries: int = 64,
        tsg: int = 1,
        vm: int = 1,
        contexts: Sequence[int] | None = None,
        runlist: int = 0,
        cached: bool = False,
    ) -> ChannelRig:
        """A channel in service, with both its objects' contexts unless told otherwise; `cached` is its GPFIFO."""
        chid = self._chids
        self._chids -= 1
        ring, userd = self.buffer(entries * 8, vm=vm, cached=cached), self.buffer()
        self.gpu.channel_create(chid, tsg, vm, runlist, ring.va, entries, userd.fd)
        for class_id in (self.chip.compute_class, self.chip.dma_class) if contexts is None else contexts:
            self.gpu.object_ctx(chid, class_id)
        return ChannelRig(self, chid, runlist, ring, userd, entries, vm)

    def program(self, ptx: str, name: str, *, code: bytes = b"", symbols: dict[str, int] | None = None) -> int:
        """Load machine code that stands for `ptx`, with its section; returns the program address."""
        code = code or (name.encode() * 64)[:256]
        at = (len(code) + 127) // 128 * 128
        section = bytearray(ptxsection.pack(name, code, ptx, symbols=tuple(symbols or ()), param_base=self.param_base))
        image = self.buffer(at + len(section) + PAGE)
        struct.pack_into("<Q", section, ptxsection.ENTRY_SLOT, image.va)
        for i, value in enumerate((symbols or {}).values()):
            struct.pack_into("<Q", section, ptxsection.symbol_slot(i), value)
        image.put(code)
        image.put(bytes(section), at)
        return image.va

    def arguments(self, *words: int) -> Buffer:
        """A constant bank 0 with these 64-bit parameters; room for a QMD after it, at 0x800."""
        bank = self.buffer()
        self.put_arguments(bank, *words)
        return bank

    def put_arguments(self, bank: Buffer, *words: int) -> None:
        """Store parameters into a bank."""
        bank.put(struct.pack(f"<{len(words)}Q", *words), self.param_base)

    def qmd(self, program: int, bank: Buffer, *, at: int = 0x800, grid: Any = (1, 1, 1), **fields: int) -> int:
        """Write a launch descriptor into `bank`, and its dimensions where machine code reads them.

        `fields` add to the descriptor or change it. Returns its address.
        """
        v3 = self.chip.qmd == "V3"
        block = dict(
            zip(("cta_thread_dimension0", "cta_thread_dimension1", "cta_thread_dimension2"), (1, 1, 1), strict=True)
        )
        names = (
            ("cta_raster_width", "cta_raster_height", "cta_raster_depth")
            if v3
            else ("grid_width", "grid_height", "grid_depth")
        )
        base = {
            "qmd_major_version": self.layout.major,
            "program_address_upper": program >> 32,
            "program_address_lower": program & 0xFFFFFFFF,
            "shared_memory_size": 0x400,
            "register_count_v" if v3 else "register_count": 32,
            "sass_version": self.chip.sass_version,
            "constant_buffer_valid_0": 1,
            "constant_buffer_invalidate_0": 1,
            "constant_buffer_size_shifted4_0": 0x400 >> 4,
            **dict(zip(names, grid, strict=True)),
            **block,
        }
        if v3:
            base |= {
                "constant_buffer_addr_upper_0": bank.va >> 32,
                "constant_buffer_addr_lower_0": bank.va & 0xFFFFFFFF,
            }
        else:
            shifted = bank.va >> 6
            base |= {"qmd_type": 2, "constant_buffer_addr_upper_shifted6_0": shifted >> 32}
            base |= {"constant_buffer_addr_lower_shifted6_0": shifted & 0xFFFFFFFF}
        mem = bytearray(self.layout.size)
        Qmd(self.layout, mem).write(**(base | fields))
        bank.put(bytes(mem), at)
        dims = (fields.get(name, value) for name, value in (*block.items(), *zip(names, grid, strict=True)))
        bank.put(bank0.DIMS.pack(*dims), bank0.BLOCK_DIM)
        return bank.va + at

    def wait(self, condition: Callable[[], object], seconds: float = BACKSTOP_S) -> bool:
        """Poll until `condition()`; False when it does not come true in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    def of(self, kind: type[GpuEvent]) -> list[GpuEvent]:
        """Events of a kind, so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def fatal(self) -> FatalEvent:
        """The one fatal event, once it has come."""
        assert self.wait(lambda: self.of(FatalEvent)), "no fault came"
        time.sleep(0.003)
        (event,) = self.of(FatalEvent)
        assert isinstance(event, FatalEvent)
        return event


class ChannelRig:
    """A channel's client side: builds pushbuffers and rings the doorbell."""

    def __init__(
        self, rig: Rig, chid: int, runlist: int, ring: Buffer, userd: Buffer, entries: int, vm: int = 1
    ) -> None:
        self.rig, self.chid, self.ring, self.userd, self.entries = rig, chid, ring, userd, entries
        self.token = chid | runlist << 16
        self.put = 0
        self.words: list[int] = []
        self._pushed = rig.buffer(1 << 16, vm=vm)
        self._at = 0
        self.fence = rig.buffer(vm=vm)
        self._fence = 0

    # -- building -----------------------------------------------------------------------------------------------------

    def method(self, subch: int, offset: int, *data: int, op: MethodOp = MethodOp.INC) -> ChannelRig:
        """Add a method with its data."""
        self.words += [method_header(op, subch, offset, len(data)), *data]
        return self

    def setup(self) -> ChannelRig:
        """Bind both objects and set the windows."""
        chip = self.rig.chip
        self.method(Subchannel.COMPUTE, HostMethod.SET_OBJECT, chip.compute_class)
        self.method(Subchannel.COPY, HostMethod.SET_OBJECT, chip.dma_class)
        for offset, window in (
            (ComputeMethod.SET_SHADER_SHARED_MEMORY_WINDOW_A, chip.shared_window),
            (ComputeMethod.SET_SHADER_LOCAL_MEMORY_WINDOW_A, chip.local_window),
        ):
            self.method(Subchannel.COMPUTE, offset, window >> 32, window & 0xFFFFFFFF)
        return self

    def release(self, va: int, value: int, execute: int = 0x03100001) -> ChannelRig:
        """SEM_EXECUTE; the default is the field sequence: release, WFI, 64 bits, timestamp."""
        return self.method(
            0,
            HostMethod.SEM_ADDR_LO,
            va & 0xFFFFFFFF,
            va >> 32,
            value & 0xFFFFFFFF,
            value >> 32,
            execute,
        )

    def acquire(self, va: int, value: int, op: int = 3, *, wide: bool = True) -> ChannelRig:
        """Acquire: circular >= unless told otherwise."""
        return self.release(va, value, op | wide << 24)

    def launch(self, qmd: int, action: int = 9) -> ChannelRig:
        """Schedule a QMD."""
        self.method(Subchannel.COMPUTE, ComputeMethod.SEND_PCAS_A, qmd >> 8)
        return self.method(Subchannel.COMPUTE, ComputeMethod.SEND_SIGNALING_PCAS2_B, action)

    def copy(self, src: int, dst: int, size: int, launch: int = 0x182) -> ChannelRig:
        """A linear copy."""
        self.method(
            Subchannel.COPY, CopyMethod.OFFSET_IN_UPPER, src >> 32, src & 0xFFFFFFFF, dst >> 32, dst & 0xFFFFFFFF
        )
        self.method(Subchannel.COPY, CopyMethod.LINE_LENGTH_IN, size)
        return self.method(Subchannel.COPY, CopyMethod.LAUNCH_DMA, launch)

    # -- submitting ---------------------------------------------------------------------------------------------------

    def submit(self, *, ring: bool = True) -> ChannelRig:
        """Put what was built into memory, one entry for it into the ring, and ring the doorbell."""
        data = struct.pack(f"<{len(self.words)}I", *self.words)
        if self._at + len(data) > self._pushed.size:
            self._at = 0
        self._pushed.put(data, self._at)
        self.entry(gp_entry(self._pushed.va + self._at, len(self.words)))
        self._at += (len(data) + 15) // 16 * 16
        self.words = []
        if ring:
            self.doorbell()
        return self

    def entry(self, raw: int) -> ChannelRig:
        """Put one raw entry into the ring."""
        self.ring.put64(raw, self.put * 8)
        self.put = (self.put + 1) % self.entries
        self.userd.put(struct.pack("<I", self.put), Userd.GP_PUT)
        return self

    def doorbell(self) -> ChannelRig:
        """Store the token to the usermode page."""
        os.write(self.rig.doorbell_fd, struct.pack("<II", DOORBELL, self.token))
        return self

    def run(self, seconds: float = BACKSTOP_S) -> bool:
        """Submit with a fence after it and wait for that; False if it does not come."""
        self._fence += 1
        self.release(self.fence.va, self._fence).submit()
        return self.rig.wait(lambda: self.fence.u64() >= self._fence, seconds)
