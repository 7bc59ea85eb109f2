"""Launches recorded once and replayed with one doorbell.

A `Recording` owns all that the GPU reads of it: kernel arguments, launch descriptors (QMDs) and commands lie in one
buffer of its own, written once. To run it is to store the number of the submission, one GPFIFO entry and the doorbell:
no Python per kernel, no system call, no allocation. Each run is ordered after everything submitted before it, and
tinygrad's own work after each run, by the device's timeline.

How a launch waits for the one before it is a `Dependency`. All the forms of `DEPENDENCIES` order launches as a stream
does; what they cost differs by chip (`tegrad.bench.dependencies`).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Any, Final

from tinygrad.device import TinyELF
from tinygrad.helpers import round_up, to_mv
from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface

from tegrad.hw import bank0
from tegrad.hw.classes import COMPUTE, HOST, ComputeMethod, HostMethod
from tegrad.hw.gpfifo import MethodOp, Subchannel, gp_entry, method_header, semaphore
from tegrad.nv import roles
from tegrad.nv.faults import DeviceClosed, DeviceFault, WaitTimeout
from tegrad.nv.program import LaunchError, check_alignment, check_size, check_sizes
from tegrad.nv.qmd import QMD
from tegrad.nv.queues import SUBROUTINE, Fifo, NVComputeQueue
from tegrad.nv.spec import MemorySpec

if TYPE_CHECKING:
    from tegrad.nv.device import NVDevice

RUNS_IN_FLIGHT: Final = 2
"""Runs of one recording that may be in flight."""
QMD_ALIGN: Final = 256
"""What a QMD and constant bank 0 are aligned to."""
QMD_STRIDE: Final = 0x600
"""Bytes from one QMD to what follows: a QMD of any version (384 at most) and room for the prefetcher."""
SPEC: Final = MemorySpec(cpu_access=True, nolru=True, role=roles.RECORDING)
TIMELINE_RELEASE: Final = HOST["SEM_EXECUTE"].pack(
    operation="RELEASE", release_wfi="EN", payload_size="64BIT", release_timestamp="EN"
)
"""What ends every run. With release_wfi the host waits until the engine is idle, makes a membar of the whole system and
then stores (NVIDIA's manual dev_pbdma.ref, GA100): by then what any launch stored is seen outside of the GPU, if that
launch's own membar reached the GPU's point of coherence."""
ACQUIRE: Final = HOST["SEM_EXECUTE"].pack(operation="ACQ_CIRC_GEQ", payload_size="64BIT")
PREFETCH_SCHEDULE: Final = 9
"""PCAS action: fetch the QMD ahead and run it when what is before it allows."""
SCHEDULE: Final = 1
"""Action on a dependent QMD: run it when this one is over."""


class RecordingClosed(LaunchError):
    """A recording was used after its `close`."""


def immediate(method: ComputeMethod | HostMethod, data: int = 0, subchannel: int = Subchannel.COMPUTE) -> int:
    """One word that sends 13 bits of data to a method."""
    return method_header(MethodOp.IMMEDIATE, subchannel, method, data)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a recording: a loaded program, its arguments (buffers, then integers), and its sizes in x, y, z.

    `grid` counts blocks, `block` threads. The buffers stay the caller's, who keeps them while the recording lives.
    """

    program: Any
    buffers: tuple[HCQBuffer, ...]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    values: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a launch stands in a recording, for the functions of a `Dependency`: `index` of `count`."""

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Argument:
    """Where an input of a recording goes: the address of its byte `offset` is argument `position` of a launch."""

    launch: int
    position: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Number:
    """Where a number that each run is given goes: the launch's value `value`, or its blocks along an axis of `grid`."""

    launch: int
    value: int | None = None
    grid: int | None = None


def _nothing(place: Place) -> Mapping[str, int]:
    return {}


def _no_words(place: Place) -> Sequence[int]:
    return ()


@dataclass(frozen=True, slots=True)
class Dependency:
    """How a launch is ordered after the one before it.

    `dependent` names action and prefetch with which each QMD starts the next one; None sends a PCAS for each launch.
    `start` are the words in front of the first launch, `between` gives the words in front of each later one that is
    sent by PCAS, `fields` what to set in each QMD (names as `QMD.write` takes them). `end` are words behind the last
    launch, in front of what tells that the run is over.
    """

    dependent: Mapping[str, int] | None = None
    start: tuple[int, ...] = ()
    between: Callable[[Place], Sequence[int]] = _no_words
    fields: Callable[[Place], Mapping[str, int]] = _nothing
    end: tuple[int, ...] = ()


BARRIER: Final = (
    immediate(
        ComputeMethod.INVALIDATE_SHADER_CACHES_NO_WFI,
        COMPUTE["INVALIDATE_SHADER_CACHES_NO_WFI"].pack(instruction=1, global_data=1, constant=1),
    ),
)
"""What tinygrad sends in front of its launches."""

SYSMEMBAR, GPU_MEMBAR = 1, 3
"""Values of a QMD's cwd_membar_type: a grid's stores are seen by everything, or by this GPU, before what follows."""

LEAN: Final[Mapping[str, int]] = {
    "invalidate_texture_header_cache": 0,
    "invalidate_texture_sampler_cache": 0,
    "invalidate_texture_data_cache": 0,
    "constant_buffer_invalidate_0": 0,
}
"""What a launch of a recording need not do: nobody uses textures, and its constants never change.

What stays is invalidate_shader_data_cache: each launch reads anew what the CPU and the launches before it stored."""


def lean(place: Place) -> Mapping[str, int]:
    """LEAN, and only the last launch makes its stores visible outside of the GPU: its membar, or TIMELINE_RELEASE's."""
    return {**LEAN, "cwd_membar_type": SYSMEMBAR if place.index == place.count - 1 else GPU_MEMBAR}


def within(place: Place) -> Mapping[str, int]:
    """LEAN, and no launch makes its stores visible outside of the GPU: TIMELINE_RELEASE does it once for all."""
    return {**LEAN, "cwd_membar_type": GPU_MEMBAR}


def wait_idle(place: Place) -> Sequence[int]:
    """The compute engine takes no further method before everything before is done."""
    return (immediate(ComputeMethod.WAIT_FOR_IDLE),)


def host_wfi(place: Place) -> Sequence[int]:
    """The host sends no further method before everything before is done."""
    return (immediate(HostMethod.WFI, subchannel=0),)


CHAIN: Final[Mapping[str, int]] = {"action": SCHEDULE, "prefetch": 1}

DEPENDENCIES: Final[Mapping[str, Dependency]] = {
    "chain": Dependency(CHAIN, BARRIER),
    "chain-lean": Dependency(CHAIN, fields=lean),
    "idle": Dependency(start=BARRIER, between=wait_idle),
    "idle-lean": Dependency(between=wait_idle, fields=lean),
    "idle-within": Dependency(between=wait_idle, fields=within),
    "host-wfi": Dependency(start=BARRIER, between=host_wfi),
}
"""`chain`: QMDs that start each other, as tinygrad builds them, which has run on Orin and Hopper. `idle` and
`host-wfi`: commands wait between the launches. The lean forms leave out what a recording does not need."""

DEFAULT: Final = DEPENDENCIES["chain"]


def latched(place: Place, **given: int) -> Mapping[str, int]:
    """Fields of QMD version 4: each launch arrives at a latch of its own, and waits on that of the one before."""
    waits = {"wait_on_latch_valid": 1, "wait_on_latch_id": place.index} if place.index else {}
    arrives = {"arrive_at_latch_valid": 1, "arrive_at_latch_id": place.index + 1}
    return {**lean(place), **waits, **arrives, "latch_acquire_invalidate_shader_data_cache": 1, **given}


AHEAD: Final = Dependency(CHAIN, fields=partial(latched, enable_program_pre_exit=1))
"""Hopper: a launch begins once all blocks of the one before allow it. Only for kernels that wait by themselves
(griddepcontrol): on an H200 those computed what a chain does, and others did not (docs/notebook.md)."""

EARLY: Final = ("enable_program_pre_exit", "pre_exit_at_last_cta_launch", "arrive_at_latch_valid")
"""QMD fields (version 4) of a launch that lets the next one begin before it has ended."""


def up_to(form: Dependency, count: int) -> Dependency:
    """`form` between the first `count` launches, which may wait by themselves; after them the order of a stream."""
    rest = DEPENDENCIES["chain-lean" if form.dependent is not None else "idle-lean"]

    def fields(place: Place) -> Mapping[str, int]:
        if place.index >= count:
            return rest.fields(place)
        given = form.fields(place)
        return given if place.index + 1 < count else {**given, **{name: 0 for name in EARLY if name in given}}

    def between(place: Place) -> Sequence[int]:
        return form.between(place) if place.index < count else rest.between(place)

    return replace(form, fields=fields, between=between)


def repeated(form: Dependency, count: int) -> Dependency:
    """`form` where the same `count` launches stand several times in one recording, each time as if alone in it."""

    def alone(place: Place) -> Place:
        return replace(place, index=place.index % count, count=count)

    return replace(
        form, between=lambda place: form.between(alone(place)), fields=lambda place: form.fields(alone(place))
    )


@dataclass(slots=True)
class _Slot:
    """The commands of one run: their GPFIFO entry, where its words change, and the run that used it last."""

    entry: int
    at: int
    image: int
    """Where its constant banks begin, in 64-bit words; those of all runs where no inputs are given."""
    addresses: tuple[int, ...] | None = None
    """Of the inputs, as they stand in these banks."""
    numbers: tuple[int, ...] | None = None
    """As they stand in these banks and QMDs."""
    number: int = 0
    timeline: Any = None
    """The signal that its release names."""


@dataclass(slots=True)
class _Layout:
    """Where the parts of a recording lie in its buffer: bank and QMD of each launch, commands."""

    banks: list[int] = field(default_factory=list)
    qmds: list[int] = field(default_factory=list)
    size: int = 0


class _Patch:
    """An `Argument`, and where it lies after a run's first constant bank, in 64-bit words."""

    __slots__ = ("align", "offset", "position", "program", "quad")

    def __init__(self, layout: _Layout, launches: Sequence[Launch], argument: Argument) -> None:
        self.program, self.position, self.offset = launches[argument.launch].program, argument.position, argument.offset
        self.quad = (layout.banks[argument.launch] + 4 * len(self.program.cbuf_0)) // 8 + argument.position
        align = self.program.align
        self.align = align[self.position] if self.position < len(align) else 1


_WORD: Final = Struct("<I")
INTEGERS: Final = "?bBhHiIqQ"
"""How `struct` calls the types of numbers that may change. Of floats 0.0 and -0.0 would be taken for the same."""


class _NumberPatch:
    """Where one number lies in the constant banks and QMDs of a run, in which form, and the grids that it is part of
    (program, axis)."""

    __slots__ = ("grids", "stores")

    def __init__(self, layout: _Layout, launches: Sequence[Launch], numbers: Sequence[Number]) -> None:
        self.stores: list[tuple[int, Struct]] = []
        grids: dict[tuple[Any, int], None] = {}
        for number in numbers:
            launch, bank = launches[number.launch], layout.banks[number.launch]
            if number.grid is not None:
                field = launch.program.qmd.field_offset(grid_fields(launch.program.qmd)[number.grid])
                self.stores.append((bank + bank0.GRID_DIM + 4 * number.grid, _WORD))
                self.stores.append((layout.qmds[number.launch] + field, _WORD))
                grids[launch.program, number.grid] = None
            else:
                assert number.value is not None
                at, form = _value_form(launch, number.value)
                self.stores.append((bank + 4 * len(launch.program.cbuf_0) + at, form))
        self.grids = tuple(grids)


def _value_form(launch: Launch, value: int) -> tuple[int, Struct]:
    """Where one of a launch's values lies after the first constant bank, and how it is stored. LaunchError."""
    program, pointers = launch.program, 8 * len(launch.buffers)
    signature = program.signature[len(launch.buffers) :]
    at, kind = list(TinyELF.iter_sig(signature, pointers))[value]
    if kind.fmt is None or kind.fmt not in INTEGERS:
        raise LaunchError(f"{program.name} takes a number of type {kind}: only whole numbers can change between runs")
    return at, Struct(f"<{kind.fmt}")


class Recording:
    """Launches in a buffer of their own, replayed by one doorbell. Up to `depth` runs may be in flight.

    With `inputs`, which say for each where it goes, every run is given their addresses, and with `numbers` as many
    integers. Each of the runs that may be in flight has constant banks and QMDs of its own then, and `dependency` must
    drop old constants, as `DEFAULT` does.
    LaunchError for what cannot be launched, MemoryError, DeviceClosed. Close it, or use it in a `with`; the device's
    end closes it too. Several threads may use it.
    """

    def __init__(
        self,
        device: NVDevice,
        launches: Sequence[Launch],
        dependency: Dependency = DEFAULT,
        *,
        depth: int = RUNS_IN_FLIGHT,
        inputs: Sequence[Sequence[Argument]] = (),
        numbers: Sequence[Sequence[Number]] = (),
    ) -> None:
        if not launches or depth < 1:
            raise LaunchError("a recording needs at least one launch, and a depth of at least 1")
        changes = bool(inputs or numbers)
        if changes and dependency.start[:1] != BARRIER:
            raise LaunchError(
                "a recording with inputs needs a dependency that invalidates constants first: chain, idle or host-wfi"
            )
        for launch in launches:
            _check(device, launch)
        self._device = device
        self._fifo: Fifo = device.compute_gpfifo
        self.launches = tuple(launches)
        """What is recorded; keeps the programs loaded."""
        self._names = [launch.program.name for launch in launches]
        self._next = 0
        self._last = 0
        layout = _lay_out(self.launches)
        tail = [*semaphore(TIMELINE_RELEASE, 0, 0), *self._fifo.release(0, idle=True)]
        words = len(_commands(dependency, layout, 0))
        # The addresses and values of the tail's releases are stored as 64-bit words: they start at multiples of 8.
        shift = 1 - words % 2
        stride = round_up(shift + words + len(tail), 2)
        images = depth if changes else 1
        size = layout.size * images + 4 * depth * stride
        self._inputs = [[_Patch(layout, self.launches, argument) for argument in given] for given in inputs]
        self._numbers = [_NumberPatch(layout, self.launches, given) for given in numbers]
        self._memory: HCQBuffer | None = device.allocator.alloc(size, SPEC)
        try:
            va, view = self._memory.va_addr, self._memory.cpu_view()
            for image in range(0, layout.size * images, layout.size):
                described = _describe(device, self.launches, dependency, layout, va + image)
                view[image : image + layout.size] = bytes(described)
            self._quads = to_mv(view.addr, size).cast("Q")
            self._bytes = to_mv(view.addr, size)
            self._slots = []
            for index in range(depth):
                image = layout.size * (index % images)
                body = [*_commands(dependency, layout, va + image), *tail]
                at = layout.size * images + 4 * (stride * index + shift)
                view[at : at + 4 * len(body)] = array("I", body).tobytes()
                entry = gp_entry(va + at, len(body), level=SUBROUTINE)
                self._slots.append(_Slot(entry, (at + 4 * words + 4) // 8, image // 8))
            self._forget()
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> int:
        """The number of the last submission on the channel that the GPU has finished: runs up to it are over."""
        return self._fifo.done

    def run(self, times: int = 1, addresses: tuple[int, ...] = (), numbers: tuple[int, ...] = ()) -> int:
        """Submit everything, up to `depth` times, with one doorbell; the number to wait for, of the last run.

        The runs before have the numbers below it. `addresses` are those of the inputs, in order, of this GPU's;
        `numbers` in theirs. Waits only if `depth` runs are in flight. DeviceFault as soon as one is known,
        DeviceClosed, RecordingClosed; LaunchError, also for an address that breaks the alignment that a kernel needs,
        for a grid that is empty or too large, and for a number that its kernel's type does not hold.
        """
        device, fifo, slots = self._device, self._fifo, self._slots
        depth = len(slots)
        with device.lock:  # an interrupt after a plain `acquire` would leave it taken
            if device.closed or device.error_state is not None:
                device.check_usable()
            if self._memory is None:
                raise RecordingClosed("this recording was closed: record the launches again")
            if not 0 < times <= depth:
                raise LaunchError(f"{times} runs cannot be submitted at once: this recording takes 1 to {depth}")
            following, number, value = self._next, fifo.submissions, device.timeline_value
            latest = slots[(following + times - 1) % depth].number  # those of the others are lower
            if latest > fifo.progress[0]:
                fifo.wait(latest)
            if self._inputs or addresses:
                for ahead in range(times):
                    slot = slots[(following + ahead) % depth]
                    if slot.addresses != addresses:
                        self._give(slot, addresses)
            if self._numbers or numbers:
                for ahead in range(times):
                    slot = slots[(following + ahead) % depth]
                    if slot.numbers != numbers:
                        self._number(slot, numbers)
            # If something else went out since the last run, it may be on another channel.
            entries = [] if value - 1 == device.computed_value else [after(device, value - 1)]
            quads, timeline, end = self._quads, device.timeline_signal, number + times
            while number < end:
                slot = slots[following]
                following, number = (following + 1) % depth, number + 1
                at = slot.at
                if slot.timeline is not timeline:
                    slot.timeline, quads[at] = timeline, timeline.base_buf.va_addr
                quads[at + 1] = value
                quads[at + 4] = slot.number = number
                entries.append(slot.entry)
                value += 1
            try:
                fifo.enter(entries, times)
            finally:  # an interrupt may come when the GPU is at work already
                if fifo.submissions == number:
                    device.timeline_value = value
                    self._last, self._next = number, following
                    device.replayed(fifo, number, self._names, value - 1)
        return number

    def _give(self, slot: _Slot, addresses: tuple[int, ...]) -> None:
        """Store what changed of the inputs' addresses into the banks of a run that is over."""
        if len(addresses) != len(self._inputs):
            raise LaunchError(f"this recording takes {len(self._inputs)} inputs, {len(addresses)} are given")
        before, slot.addresses = slot.addresses, None  # nobody knows what is there if this ends half way
        for index, (address, patches) in enumerate(zip(addresses, self._inputs, strict=True)):
            if before is None or before[index] != address:
                for patch in patches:
                    if (address + patch.offset) % patch.align:
                        check_alignment(patch.program, patch.position, address + patch.offset)
                    self._quads[slot.image + patch.quad] = address + patch.offset
        slot.addresses = addresses

    def _number(self, slot: _Slot, numbers: tuple[int, ...]) -> None:
        """Store what changed of the numbers into the banks and QMDs of a run that is over."""
        if len(numbers) != len(self._numbers):
            raise LaunchError(f"this recording takes {len(self._numbers)} numbers, {len(numbers)} are given")
        before, slot.numbers, first, memory = slot.numbers, None, 8 * slot.image, self._bytes
        for index, (number, patch) in enumerate(zip(numbers, self._numbers, strict=True)):
            if before is None or before[index] != number:
                for program, axis in patch.grids:
                    check_size(program, "grid", axis, number)
                try:
                    for place, form in patch.stores:
                        form.pack_into(memory, first + place, number)
                except struct_error as error:
                    raise LaunchError(f"a number of this recording cannot be {number}: {error}") from None
        slot.numbers = numbers

    def wait(self, number: int | None = None) -> None:
        """Return when the run with this number, or the last one, is over. DeviceFault, DeviceClosed, WaitTimeout."""
        self._fifo.wait(self._last if number is None else number)

    def close(self) -> None:
        """Wait for what runs and give the memory back; a device that failed or was closed keeps it to its end."""
        device = self._device
        with device.lock:
            memory, self._memory = self._memory, None
            if memory is not None:
                self._quads = self._bytes = memoryview(b"")
                with suppress(DeviceFault, WaitTimeout):
                    if not device.closed and device.error_state is None:
                        self.wait()  # the timeline is there before the last command, which is in this memory
                    device.allocator.free(memory, memory.size, SPEC)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_memory", None) is not None:
            self.close()

    def _forget(self) -> None:
        """Drop what the caches hold of this memory's former content; after it nothing here changes any more."""
        device = self._device
        with device.lock:
            queue = NVComputeQueue().wait(device.timeline_signal, device.timeline_value - 1).memory_barrier()
            queue.signal(device.timeline_signal, device.next_timeline()).submit(device)


def after(device: NVDevice, value: int) -> int:
    """A GPFIFO entry for commands that wait until the timeline has reached a value."""
    va, dwords = device.place_commands(array("I", semaphore(ACQUIRE, device.timeline_signal.value_addr, value)))
    return gp_entry(va, dwords, level=SUBROUTINE)


def _check(device: NVDevice, launch: Launch) -> None:
    """LaunchError, or DeviceClosed, for a launch that cannot be recorded."""
    program = launch.program
    if program.dev is not device:
        raise LaunchError(f"{program.name} was loaded on another device: load it on {device.device}")
    given, wanted = len(launch.buffers) + len(launch.values), len(program.signature)
    if given != wanted:
        raise LaunchError(f"{program.name} takes {wanted} arguments, the launch gives {given}")
    for buffer in launch.buffers:
        if getattr(buffer.owner, "closed", False):
            raise DeviceClosed(f"an argument of {program.name} was released when its device was closed")
    for what, sizes in (("grid", launch.grid), ("block", launch.block)):
        if len(sizes) != 3 or not all(isinstance(size, int) for size in sizes):
            raise LaunchError(f"{program.name}: the {what} is {sizes}; a recording takes three integers")
    check_sizes(program, launch.grid, launch.block)


def three(sizes: Sequence[Any]) -> tuple[int, int, int]:
    """Sizes in x, y, z of as many as are given."""
    x, y, z = (*(int(size) for size in sizes), 1, 1, 1)[:3]
    return x, y, z


def _lay_out(launches: Sequence[Launch]) -> _Layout:
    layout = _Layout()
    at = 0
    for launch in launches:
        layout.banks.append(at)
        at += round_up(launch.program.constbufs[0][1], QMD_ALIGN)
        layout.qmds.append(at)
        at += QMD_STRIDE
    layout.size = at
    return layout


def _describe(
    device: NVDevice, launches: Sequence[Launch], dependency: Dependency, layout: _Layout, va: int
) -> bytearray:
    """Constant banks and QMDs, as they go to the start of the buffer at `va`."""
    image = bytearray(layout.size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(image))
    for index, launch in enumerate(launches):
        program, bank, at = launch.program, layout.banks[index], layout.qmds[index]
        room = at - bank
        buffer = HCQBuffer(va + bank, room, owner=device, view=MMIOInterface(address + bank, room))
        NVComputeQueue().bind_args_state(program.fill_kernargs(launch.buffers, launch.values, buffer))
        bank0.DIMS.pack_into(image, bank + bank0.BLOCK_DIM, *launch.block, *launch.grid)
        place = Place(index, len(launches))
        qmd = _qmd(device, launch, memoryview(image)[at : at + program.qmd.mv.nbytes], va + bank)
        if dependency.dependent is not None and index + 1 < len(launches):
            given = {f"dependent_qmd0_{name}": value for name, value in dependency.dependent.items()}
            qmd.write(dependent_qmd0_pointer=(va + layout.qmds[index + 1]) >> 8, dependent_qmd0_enable=1, **given)
        qmd.write(**dependency.fields(place))
    return image


def image_of(device: NVDevice, launch: Launch, va: int) -> bytearray:
    """Constant bank 0 and, at the next multiple of QMD_ALIGN, the QMD of a launch, as if they were at `va`."""
    return _describe(device, (launch,), DEFAULT, _lay_out((launch,)), va)


def _commands(dependency: Dependency, layout: _Layout, va: int) -> list[int]:
    """The words that launch the QMDs of the buffer at `va`; how many does not depend on `va`."""
    words = list(dependency.start)
    for index, at in enumerate(layout.qmds if dependency.dependent is None else layout.qmds[:1]):
        words += dependency.between(Place(index, len(layout.qmds))) if index else ()
        words += [method_header(MethodOp.INC, Subchannel.COMPUTE, ComputeMethod.SEND_PCAS_A, 1), (va + at) >> 8]
        words.append(immediate(ComputeMethod.SEND_SIGNALING_PCAS2_B, PREFETCH_SCHEDULE))
    return [*words, *dependency.end]


def grid_fields(qmd: QMD) -> tuple[str, str, str]:
    """The QMD's names of how many blocks there are in x, y and z, each in a 32-bit word of its own."""
    if qmd.ver >= 4:
        return "grid_width", "grid_height", "grid_depth"
    return "cta_raster_width", "cta_raster_height", "cta_raster_depth"


def _qmd(device: NVDevice, launch: Launch, view: memoryview, bank: int) -> QMD:
    """The program's QMD, filled in for a launch with constant bank 0 at `bank`."""
    view[:] = launch.program.qmd.mv
    qmd = QMD(device, view=view)
    qmd.write(**dict(zip(grid_fields(qmd), launch.grid, strict=True)))
    qmd.write(**{f"cta_thread_dimension{axis}": size for axis, size in enumerate(launch.block)})
    qmd.set_constant_buf_addr(0, bank)
    return qmd
