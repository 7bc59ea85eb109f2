"""TinyJit's calls, replayed: what it captured becomes recordings, whose inputs are replaced in place.

A TinyJit captures a function's kernels and copies as a list of calls. tinygrad runs that list call by call: kernels in
graphs where several follow each other, a single kernel like any eager launch. Here kernels that follow each other are
one recording (`replay.Recording`), made at the first call after the capture, and a call of the function rings one
doorbell for each recording. Before it does, it stores the addresses of the function's inputs, the values of its
variables, and grid sizes that depend on these.

tinygrad runs in their place, between the recordings, the calls that a recording cannot hold: copies, kernels of other
devices, kernels whose block size depends on a variable; DEBUG=1 prints each with the reason. tinygrad runs everything
while it is to report each kernel (DEBUG=2, PROFILE), and where its JIT level keeps it from making graphs (JIT=2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tinygrad.device import Buffer, Device
from tinygrad.engine.realize import estimate_uop, get_call_arg_uops, get_runtime, resolve_params, run_linear
from tinygrad.helpers import DEBUG, JIT, PROFILE, GlobalCounters
from tinygrad.renderer import Estimates
from tinygrad.runtime.support.hcq import HCQBuffer
from tinygrad.uop.ops import Ops, UOp, buffers, sym_infer

from tegrad.nv import compat, inputs
from tegrad.nv.program import LaunchError
from tegrad.nv.replay import BARRIER, CHAIN, DEPENDENCIES, Argument, Dependency, Launch, Number, Recording, lean, three

if TYPE_CHECKING:
    from tegrad.nv.device import NVDevice

CALL: Final = "tinygrad.engine.jit.CapturedJit.__call__"
FREE: Final = "tinygrad.engine.jit.CapturedJit.free_intermediates"
_stock_call: Any = compat.published(CALL)
_stock_free: Any = compat.published(FREE)
REPLAYS: Final = "_tegrad_replays"
"""The attribute in which a `CapturedJit` keeps its `_Replays`; a pickle does not include it."""
_Place = tuple[int, int, int]
"""An argument that is one of the function's inputs: its position in the launch, the index of the input, and the byte
offset in that input."""
_Changing = tuple[int | None, int | None, UOp]
"""A number that changes from call to call: the index of one of the launch's values, or else the axis of its grid, and
the expression of the function's variables that gives it."""
_Expression: TypeAlias = UOp | int
"""A number, or an expression of the function's variables that gives one."""
MANY: Final = Dependency(CHAIN, BARRIER, fields=lean)
"""How the launches of a recording wait for each other where there are more than FEW_LAUNCHES: as in "chain-lean", but
the constant cache is invalidated before each run, since arguments were stored anew. On an H200 a launch costs 1.4 us
less than with the membar and the invalidations of "chain" (docs/notebook.md)."""
FEW_LAUNCHES: Final = 4
"""The most launches of a recording in which commands wait between launches ("idle"). On an H200 that answered a
network of three launches a microsecond or two sooner than QMDs that start each other, which cost 0.4 us less a launch
(docs/notebook.md)."""
KERNELS_ALONE: Final = 2
"""tinygrad's JIT level that makes no graphs of kernels."""


class _Unheld(Exception):
    """A recording cannot hold a call; the text says why, and DEBUG=1 prints it."""


@dataclass(slots=True)
class _Replay:
    """A step of a TinyJit's call: kernels that follow each other, as one recording."""

    recording: Recording
    given: tuple[int, ...]
    """The indices of the function's inputs that the recording takes, in the recording's order."""
    numbers: tuple[UOp, ...]
    """Expressions of the function's variables that give the recording's numbers."""
    calls: int
    """How many kernels or graphs it stands for in tinygrad's count (GlobalCounters.kernel_count)."""
    operations: _Expression
    """Arithmetic operations of a run, for tinygrad's count."""
    bytes: _Expression
    """Bytes that a run moves, for tinygrad's count."""

    def run(self, device: NVDevice, uops: Sequence[UOp], var_vals: dict[str, int]) -> None:
        """Submit the recording with these inputs and values; does not wait. DeviceFault, DeviceClosed, LaunchError."""
        addresses, name = [], device.device
        for index in self.given:
            buffer = buffers.get(uops[index]) or uops[index].buffer
            memory = compat.memory_on(buffer, name)
            if memory.owner is not device and getattr(memory.owner, "closed", False):
                raise memory.owner.gone("a tensor's memory was released when its device was closed: make it again")
            addresses.append(memory.va_addr)
        self.recording.run(1, tuple(addresses), tuple([int(sym_infer(one, var_vals)) for one in self.numbers]))
        GlobalCounters.kernel_count += self.calls
        GlobalCounters.global_ops += int(sym_infer(self.operations, var_vals))
        GlobalCounters.global_mem += int(sym_infer(self.bytes, var_vals))


@dataclass(slots=True)
class _Call:
    """A step of a TinyJit's call that tinygrad runs."""

    linear: UOp

    def run(self, device: NVDevice, uops: Sequence[UOp], var_vals: dict[str, int]) -> None:
        """Have tinygrad run it, and raise what tinygrad raises."""
        run_linear(self.linear, var_vals, input_uops=uops, jit=True)


@dataclass(frozen=True, slots=True)
class _HeldLaunch:
    """A launch as it is recorded, which of its arguments are inputs, and what of it changes with variables."""

    launch: Launch
    places: list[_Place]
    numbers: list[_Changing]


@dataclass(frozen=True, slots=True)
class _Held:
    """A call that a recording can hold, and its launches."""

    call: UOp
    launches: list[_HeldLaunch]


@dataclass(frozen=True, slots=True)
class _Replays:
    """What a TinyJit captured, as steps in order; there are no steps if none of it can be replayed."""

    device: NVDevice | None
    """None: nothing of it can be replayed, and there are no steps."""
    steps: tuple[_Replay | _Call, ...]
    variables: frozenset[str]
    """The names of the variables that the recordings were made with."""

    def close(self) -> None:
        """Give the recordings' memory back."""
        for step in self.steps:
            if isinstance(step, _Replay):
                step.recording.close()


def call(captured: Any, input_uops: list[UOp], var_vals: dict[str, int]) -> Any:
    """What replaces `CapturedJit.__call__`: run the captured calls with these inputs, and return what the function
    returned when it was captured, whose tensors now hold the new results.

    `var_vals` are the values of variables by name. DeviceFault, DeviceClosed, LaunchError, and what tinygrad raises.
    """
    if DEBUG.value >= 2 or PROFILE.value or JIT.value >= KERNELS_ALONE:
        return _stock_call(captured, input_uops, var_vals)
    replays: _Replays | None = captured.__dict__.get(REPLAYS)
    if replays is None:
        replays = captured.__dict__[REPLAYS] = _taken_apart(captured.linear, input_uops, var_vals)
    device = replays.device
    if device is None or not replays.variables <= var_vals.keys():  # tinygrad's error for one that is missing
        return _stock_call(captured, input_uops, var_vals)
    input_uops = compat.inputs_as_captured(captured, input_uops)
    for step in replays.steps:
        step.run(device, input_uops, var_vals)
    return captured.ret


def free_intermediates(captured: Any) -> None:
    """What replaces `CapturedJit.free_intermediates`: free the memory of intermediate results, and first the recordings
    that use it."""
    if (replays := captured.__dict__.pop(REPLAYS, None)) is not None:
        replays.close()
    _stock_free(captured)


def install() -> None:
    """Have every TinyJit replay, also those that captured before. Doing it again changes nothing.

    Methods of tinygrad's `CapturedJit` are replaced, not the class: pickles of captured functions name it.
    """
    compat.replace(CALL, call)
    compat.replace(FREE, free_intermediates)
    compat.replace(inputs.PREPARE, inputs.prepare)


def _taken_apart(linear: UOp, input_uops: Sequence[UOp], var_vals: dict[str, int]) -> _Replays:
    """Record what can be recorded of a TinyJit's captured calls, and leave the others to tinygrad."""
    if (device := next(_devices_of(linear), None)) is None:
        return _Replays(None, (), frozenset())
    steps: list[_Replay | _Call] = []
    held: list[_Held] = []
    for one in linear.src:
        try:
            held.append(_Held(one, [_launch(device, kernel, input_uops, var_vals) for kernel in kernels_of(one)]))
        except _Unheld as reason:
            steps += _recorded(device, held)
            held = []
            steps.append(_left_to_tinygrad(one, str(reason)))
    steps += _recorded(device, held)
    kept = tuple(steps) if any(isinstance(step, _Replay) for step in steps) else ()
    return _Replays(device if kept else None, kept, frozenset(var_vals))


def _devices_of(linear: UOp) -> Iterator[Any]:
    """The open NV device of each kernel that runs on one, in order."""
    from tegrad.nv.device import NVDevice

    for call in linear.src:
        for kernel in kernels_of(call):
            name = kernel.src[1].device if len(kernel.src) > 1 else None
            if kernel.src[0].op is not Ops.PROGRAM or not isinstance(name, str) or not compat.is_nv(name):
                continue
            if isinstance(device := Device[name], NVDevice):
                yield device


def kernels_of(call: UOp) -> tuple[UOp, ...]:
    """The kernels and copies of a call: those of a graph, or the call itself."""
    inside = call.src[0]
    graph = inside.op is Ops.CUSTOM_FUNCTION and inside.arg == "graph"
    return tuple(inside.src[0].src) if graph else (call,)


def _left_to_tinygrad(call: UOp, reason: str) -> _Call:
    """The step of a call that is not recorded; says so at DEBUG=1."""
    if DEBUG >= 1:
        names = ", ".join(_name(kernel) for kernel in kernels_of(call))
        print(f"tegrad: not replayed, tinygrad runs it: {names}: {reason}")
    return _Call(UOp(Ops.LINEAR, src=(call,)))


def _name(kernel: UOp) -> str:
    program = kernel.src[0]
    return str(program.arg.function_name) if program.op is Ops.PROGRAM else program.op.name


def _recorded(device: NVDevice, held: Sequence[_Held]) -> list[_Replay | _Call]:
    """Calls that follow each other, as one recording; left to tinygrad if there is no memory for it, or a launch is
    one that the device refuses."""
    if not held:
        return []
    launches: list[Launch] = []
    places: dict[int, list[Argument]] = {}
    numbers: dict[UOp, list[Number]] = {}
    for found in (found for one in held for found in one.launches):
        for position, slot, offset in found.places:
            places.setdefault(slot, []).append(Argument(len(launches), position, offset))
        for value, grid, number in found.numbers:
            numbers.setdefault(number, []).append(Number(len(launches), value, grid))
        launches.append(found.launch)
    dependency = DEPENDENCIES["idle"] if len(launches) <= FEW_LAUNCHES else MANY
    given, changing = list(places.values()), list(numbers.values())
    try:
        recording = Recording(device, launches, dependency, inputs=given, numbers=changing)
    except (LaunchError, MemoryError) as error:  # if it still is so then, tinygrad's launches raise it
        return [_left_to_tinygrad(one.call, str(error)) for one in held]
    counts = sum((estimate_uop(kernel) for one in held for kernel in kernels_of(one.call)), Estimates()).simplify()
    return [_Replay(recording, tuple(places), tuple(numbers), len(held), counts.ops, counts.mem)]


def _launch(device: NVDevice, kernel: UOp, input_uops: Sequence[UOp], var_vals: dict[str, int]) -> _HeldLaunch:
    """A kernel as a launch to record, with the places of its inputs and changing numbers. _Unheld if it cannot be."""
    program = kernel.src[0]
    if program.op is Ops.COPY:
        raise _Unheld("a copy is not a kernel")
    if program.op is not Ops.PROGRAM:
        raise _Unheld("not a kernel")
    info = program.arg
    if any(isinstance(size, UOp) for size in info.local_size or ()):
        raise _Unheld("its block size depends on a variable")
    if lacking := [variable.expr for variable in info.vars if variable.expr not in var_vals]:
        raise _Unheld(f"it needs variables that the function was not called with: {', '.join(lacking)}")
    uops = get_call_arg_uops(kernel)
    resolved = resolve_params(kernel, tuple(input_uops))
    memories: list[HCQBuffer] = []
    given: list[_Place] = []
    for position, index in enumerate(info.globals):
        memory = _memory(device, resolved[index])
        if (slot := _input(uops[index])) is not None:
            offset = int(memory.va_addr) - int(_memory(device, input_uops[slot]).va_addr)
            given.append((position, slot, offset))
            memory = HCQBuffer(0, memory.size)  # each run has its own
        memories.append(memory)
    grid, block = info.launch_dims(var_vals)
    values = tuple(int(value) for value in info.vals(var_vals))
    launch = Launch(get_runtime(device.device, program), tuple(memories), three(grid), three(block or ()), values)
    numbers: list[_Changing] = [(at, None, variable) for at, variable in enumerate(info.vars)]
    numbers += [(None, axis, size) for axis, size in enumerate(info.global_size) if isinstance(size, UOp)]
    return _HeldLaunch(launch, given, numbers)


def _memory(device: NVDevice, uop: UOp) -> HCQBuffer:
    """The memory behind an argument. _Unheld unless it is this device's alone."""
    buffer = uop.buffer
    if not isinstance(buffer, Buffer):
        raise _Unheld("it runs on several devices")
    if buffer.device != device.device:
        raise _Unheld(f"it uses memory of {buffer.device}")
    return compat.memory_of(buffer)


def _input(argument: UOp) -> int | None:
    """The index of the function's input that an argument is, or is a fixed part of; None if it is other memory.

    _Unheld for any other view of an input.
    """
    if argument.op is Ops.PARAM:
        return int(argument.arg.slot)
    parameters = [uop for uop in argument.toposort() if uop.op is Ops.PARAM]
    if not parameters:
        return None
    if argument.op is not Ops.SHRINK or argument.src[0] is not parameters[0] or len(parameters) > 1:
        raise _Unheld("it uses a view of an input that is not a fixed part of it")
    return int(parameters[0].arg.slot)
