"""Eager launches: what is the same from one launch of a program to the next is prepared once.

Little changes between two launches: the pointers and integers, where in the ring of kernel arguments they lie, and the
two numbers that the GPU stores at the end (the timeline's value, the submission's number). `Launcher` keeps constant
bank 0 and the QMD for the grid and block sizes that were launched before, stores what changed by offset, and copies
both into the ring; likewise the commands. What it cannot launch, a queue builds as tinygrad does
(`queues.NVComputeQueue`). The GPU gets the same commands from both but for one: `Launcher` does not have the compute
channel wait for its own earlier work, since a channel runs its submissions in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from struct import Struct, error
from typing import Any, Final

from tinygrad.device import TinyELF
from tinygrad.helpers import PROFILE, round_up

from tegrad.hw.classes import ComputeMethod
from tegrad.hw.gpfifo import SEMAPHORE_HEADER, MethodOp, Subchannel, gp_entry, method_header
from tegrad.nv.faults import DeviceClosed
from tegrad.nv.gpu import words_of
from tegrad.nv.program import LaunchError, check_alignment, check_sizes
from tegrad.nv.queues import RELEASE_AT_ONCE, SUBROUTINE
from tegrad.nv.replay import BARRIER, PREFETCH_SCHEDULE, TIMELINE_RELEASE, Launch, after, image_of, immediate

MOST_SIZES: Final = 16
"""For how many pairs of grid and block a program keeps bank and QMD; one more, and all are dropped. Otherwise sizes
that depend on variables would fill memory."""
PCAS: Final = method_header(MethodOp.INC, Subchannel.COMPUTE, ComputeMethod.SEND_PCAS_A, 1)
START: Final = immediate(ComputeMethod.SEND_SIGNALING_PCAS2_B, PREFETCH_SCHEDULE)
BANK_FIELDS: Final = {3: ("constant_buffer_addr_lower_0", 0), 4: ("constant_buffer_addr_lower_shifted6_0", 6)}
"""By the QMD's version: the 32 bits that hold the address of constant bank 0, and how far it is shifted in them."""


class Launcher:
    """One program's launches. Calls come under the device's lock.

    The program owns its launcher and is passed to each call, not stored: a reference cycle would keep the program's
    memory until Python's garbage collector runs.
    """

    def __init__(self, program: Any) -> None:
        self._device = program.dev
        self._fifo = self._device.compute_gpfifo
        self._names = (program.name,)
        self._images: dict[tuple[Any, Any], tuple[bytes, bytearray]] = {}
        self._qmd_at = round_up(program.constbufs[0][1], 256)
        self._args_at = 4 * len(program.cbuf_0)
        # As much as tinygrad asks for: its own requests rely on the alignment that this leaves.
        self._room = round_up(program.kernargs_alloc_size, 256)
        self._formats: dict[tuple[int, int], Struct | None] = {}
        self._waker = tuple(self._fifo.waker.commands)
        self._words = Struct(f"<4I IQQI IQQI {len(self._waker)}I")
        self._entry = gp_entry(0, self._words.size // 4, level=SUBROUTINE)
        device = self._device
        self._arguments_va, self._commands_va = device.kernargs_buf.va_addr, device.cmdq_page.va_addr
        self._arguments = words_of(device.kernargs_buf, "B")
        self._commands = words_of(device.cmdq_page, "B")
        fields = BANK_FIELDS.get(program.qmd.ver)
        self._bank_at = self._shift = 0
        if fields is not None:
            self._bank_at, self._shift = self._qmd_at + program.qmd.field_offset(fields[0]), fields[1]
        self.able = fields is not None and bool(program.cbuf_0) and self._able()
        """Whether it can launch this program at all; if not, `launch` always returns False."""

    def _able(self) -> bool:
        """Whether no performance counters are on (PMA), and all addresses of the ring, shifted as the QMD holds them,
        have the same upper 32 bits: only the lower ones are stored for each launch."""
        ends = (self._arguments_va, self._arguments_va + len(self._arguments) - 1)
        first, last = (end >> self._shift >> 32 for end in ends)
        return first == last and not self._device.pma_enabled

    def launch(self, program: Any, buffers: Sequence[Any], grid: Any, block: Any, values: Sequence[Any]) -> bool:
        """Submit a launch without waiting for it, and return True. False, with nothing done, for a launch that
        tinygrad's own code has to make or refuse: profiling, sizes or values that are symbols or out of range, local
        memory that must grow.

        `buffers` are HCQBuffers, `values` the kernel's integers. DeviceFault, DeviceClosed; LaunchError for a pointer
        that lacks the alignment that the kernel's vector loads need.
        """
        if PROFILE.value or not self.able:
            return False
        device, fifo = self._device, self._fifo
        if device.closed or device.error_state is not None:
            device.check_usable()
        grid, block = tuple(grid), tuple(block)
        prepared = self._images.get((grid, block)) or self._prepare(program, grid, block)
        if prepared is not None and prepared[0] != program.qmd.mv:  # somebody has written to the QMD
            prepared = self._prepare(program, grid, block)
        if prepared is None:
            return False
        counts = len(buffers), len(values)
        arguments = self._formats.get(counts)
        if arguments is None and (arguments := self._format(program, *counts)) is None:
            return False
        addresses = [buffer.va_addr for buffer in buffers]
        for buffer in buffers:
            if buffer.owner is not device and getattr(buffer.owner, "closed", False):
                gone: DeviceClosed = buffer.owner.gone(
                    "a tensor's memory was released when its device was closed; make it again"
                )
                raise gone
        if program.align:
            for index, address in enumerate(addresses[: len(program.align)]):
                if address % program.align[index]:
                    check_alignment(program, index, address)
        image = prepared[1]
        try:
            arguments.pack_into(image, self._args_at, *addresses, *values)
        except error:  # an address or integer that is a symbol, or that the kernel's types do not hold
            return False
        size = len(image)
        at = device.kernargs_offset_allocator.alloc(self._room, 256)
        bank = self._arguments_va + at
        _WORD.pack_into(image, self._bank_at, bank >> self._shift & 0xFFFFFFFF)
        self._arguments[at : at + size] = image
        number, value = fifo.submissions + 1, device.timeline_value
        commands = device.cmdq_allocator.alloc(self._words.size, 16)
        place = commands - self._commands_va
        self._commands[place : place + self._words.size] = self._words.pack(
            *(BARRIER[0], PCAS, (bank + self._qmd_at) >> 8, START),
            *(SEMAPHORE_HEADER, device.timeline_signal.base_buf.va_addr, value, TIMELINE_RELEASE),
            *(SEMAPHORE_HEADER, fifo.progress_va, number, RELEASE_AT_ONCE),
            *self._waker,
        )
        entry = self._entry | commands
        entries = (entry,) if value - 1 == device.computed_value else (after(device, value - 1), entry)
        try:
            fifo.enter(entries)
        finally:  # an interrupt may come when the GPU is at work already
            if fifo.submissions == number:
                device.timeline_value = value + 1
                device.prof_exec_counter += 1
                device.submitted(fifo, number, self._names, value)
        return True

    def _prepare(self, program: Any, grid: Any, block: Any) -> tuple[bytes, bytearray] | None:
        """A copy of the program's QMD as it is now, by which later changes are noticed, and bank 0 with QMD for these
        sizes. None for sizes that are symbols or that the device refuses, and where local memory must grow."""
        device = self._device
        sizes = (*grid, *block)
        if len(grid) != 3 or len(block) != 3 or not all(isinstance(size, int) for size in sizes):
            return None
        if program.lcmem_usage > device.slm_per_thread:
            return None
        try:
            check_sizes(program, grid, block)
        except LaunchError:
            return None
        if len(self._images) >= MOST_SIZES:
            self._images.clear()
        image = image_of(device, Launch(program, (), grid, block), self._arguments_va)
        made = bytes(program.qmd.mv), image[: self._qmd_at + len(program.qmd.mv)]
        self._images[grid, block] = made
        return made

    def _format(self, program: Any, buffers: int, values: int) -> Struct | None:
        """The layout of this many pointers and integers in constant bank 0; None if the signature does not give it."""
        signature = program.signature
        if values > len(signature):
            return None
        fields = [(8 * index, "Q", 8) for index in range(buffers)]
        if values:
            given = TinyELF.iter_sig(signature[-values:], 8 * buffers)
            fields += [(at, kind.fmt, kind.itemsize) for at, kind in given]
        if any(not kind for _, kind, _ in fields):
            return None
        gaps = [to - at - size for (at, _, size), (to, _, _) in pairwise(fields)]
        made = Struct("<" + "".join(f"{kind}{gap}x" for (_, kind, _), gap in zip(fields, [*gaps, 0], strict=True)))
        if self._args_at + made.size > self._qmd_at:
            return None
        self._formats[buffers, values] = made
        return made


_WORD: Final = Struct("<I")
