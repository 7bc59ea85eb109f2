"""`tegrad.record`: a tinygrad function, recorded, with its inputs and outputs as numpy arrays over the GPU's memory.

    r = tegrad.record(policy, np.zeros(12, np.float16))
    r.inputs[0][:] = observation
    r.run()
    action = r.outputs[0]

Where CPU and GPU share memory the arrays are views of the very buffers. On a GPU with memory of its own nothing is
copied either: inputs lie in its memory and the CPU writes them across the bus, where reading is slow; outputs lie in
the host's memory and the kernels write them across the bus.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, TinyJit
from tinygrad.device import Buffer, BufferSpec, MultiBuffer
from tinygrad.engine.jit import JitError
from tinygrad.engine.realize import get_runtime, resolve_params
from tinygrad.helpers import Context
from tinygrad.runtime.support.hcq import HCQBuffer
from tinygrad.uop.ops import Ops, UOp

from tegrad.errors import TegradError
from tegrad.nv import compat
from tegrad.nv.faults import DeviceFault, WaitTimeout
from tegrad.nv.replay import DEPENDENCIES, Dependency, Launch, three
from tegrad.nv.stamps import recorded

if TYPE_CHECKING:
    from tegrad.nv.device import NVDevice

KERNELS_ALONE: Final = 2
"""tinygrad's JIT level that captures kernels and makes no graphs of them."""
INPUT: Final = BufferSpec(cpu_access=True, nolru=True)
OUTPUT: Final = BufferSpec(host=True, cpu_access=True, nolru=True)
LONE: Final = DEPENDENCIES["idle-lean"]
"""How the launches of a call that somebody waits for follow each other. A network of three small kernels took 12.3 us
on an H200 so, and 13.75 us with `replay.DEFAULT`, which is quicker between many launches; 10.3 us since a call does
less by itself (docs/notebook.md)."""


class CannotRecord(TegradError, ValueError):
    """A function does something that a recording cannot replay."""


class Recorded:
    """A recorded function. `run` computes `outputs` from what is in `inputs`; both are tuples of numpy arrays.

    Inputs keep the shapes and types of the examples, outputs come in the order in which the function returns them.
    The arrays are memory of the GPU: they change with every run, and end with the device.
    """

    def __init__(
        self,
        device: NVDevice,
        launches: Sequence[Launch],
        arrays: Sequence[_Array],
        dependency: Dependency,
        keep: object,
    ) -> None:
        """`keep` is whatever holds the memory that the launches use."""
        self._device, self._keep = device, keep
        self._recording = recorded(device, launches, dependency)
        self._inputs = tuple(array.view() for array in arrays if array.given)
        self._outputs = tuple(array.view() for array in arrays if not array.given)

    @property
    def inputs(self) -> tuple[NDArray[Any], ...]:
        """What the next run reads. DeviceClosed."""
        self._device.check_usable()
        return self._inputs

    @property
    def outputs(self) -> tuple[NDArray[Any], ...]:
        """What the last run computed. DeviceClosed."""
        self._device.check_usable()
        return self._outputs

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels, in order."""
        return tuple(launch.program.name for launch in self.launches)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What runs."""
        return self._recording.launches

    def run(self) -> None:
        """Run everything once and return when it is done. DeviceFault, DeviceClosed, RecordingClosed, WaitTimeout."""
        recording = self._recording
        recording.wait(recording.run())

    def close(self) -> None:
        """Give the recording's memory back; that of the arrays goes with the last of them."""
        self._recording.close()

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Memory:
    """A buffer of our own, which goes when nobody has it any more."""

    def __init__(self, device: NVDevice, size: int, spec: BufferSpec) -> None:
        self._device, self._spec = device, spec
        self.buffer: HCQBuffer = device.allocator.alloc(size, spec)

    def __del__(self) -> None:
        if hasattr(self, "buffer"):
            with suppress(DeviceFault, WaitTimeout):
                self._device.allocator.free(self.buffer, self.buffer.size, self._spec)


class _Array:
    """An input or output: a tensor's buffer, and where it lies in the recording."""

    def __init__(self, what: str, tensor: Tensor, given: bool) -> None:
        self.what, self.given = what, given
        kind = compat.numpy_type(tensor.dtype)
        if kind is None or np.dtype(kind).itemsize != tensor.dtype.itemsize:  # tinygrad names float32 for bfloat16
            raise CannotRecord(f"{what} is {tensor.dtype}, a type that numpy lacks: cast it to half or float")
        self.shape, self.dtype = _fixed(what, tensor.shape), np.dtype(kind)
        self.tensor = tensor
        self.buffer = _single(what, tensor.uop)
        self.memory: HCQBuffer = compat.memory_of(self.buffer)
        self.owner: Any = self.buffer

    def move(self, device: NVDevice, moved: dict[int, _Memory]) -> None:
        """Give the array memory that the CPU reaches, with what is in it now; `moved` has it by the old address."""
        base, old = self.memory.base, self.memory
        if base.va_addr not in moved:
            moved[base.va_addr] = _Memory(device, base.size, INPUT if self.given else OUTPUT)
            moved[base.va_addr].buffer.cpu_view()[0 : base.size] = bytes(device.download(base, base.size))
        self.owner = moved[base.va_addr]
        self.memory = self.owner.buffer.offset(old.va_addr - base.va_addr, old.size)

    def view(self) -> NDArray[Any]:
        """The array over its memory, which it keeps alive."""
        size = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        memory = (ctypes.c_uint8 * size).from_address(self.memory.cpu_view().addr)
        memory.owner = self.owner
        return np.frombuffer(memory, self.dtype).reshape(self.shape)


def record(function: Callable[..., Any], *examples: Any, device: str = "NV", dependency: Dependency = LONE) -> Recorded:
    """Record a tinygrad function of tensors: `examples` are arrays or tensors with the shapes and types of its inputs.

    The function, plain or a TinyJit, is called twice with the examples, as TinyJit does; what it computes in Python is
    recorded as it was then. Tensors that it keeps stay where they are, and what it assigns to them goes on from run to
    run. CannotRecord, by name, for copies to other devices, shapes that change, and whatever else is no kernel.
    `dependency` is how each kernel waits for the one before; by default the compute engine waits until it is idle,
    which answers a lone call soonest (LONE).
    """
    opened = Device[device]
    inputs = [_input(opened.device, example) for example in examples]
    captured = _capture(function, inputs)
    opened.synchronize()  # the calls above still run, on memory that is handed out below
    calls = list(_calls(captured.linear))
    outputs = list(_tensors(captured.ret))
    arrays = [_Array(f"input {i}", tensor, given=True) for i, tensor in enumerate(inputs)]
    arrays += [_Array(f"output {i}", tensor, given=False) for i, tensor in enumerate(outputs)]
    for array in arrays:
        if array.buffer.device != opened.device:
            raise CannotRecord(f"{array.what} lies on {array.buffer.device}: only work on {opened.device} is recorded")
    moved: dict[int, _Memory] = {}
    if not getattr(opened.iface, "unified_memory", False):
        for array in arrays:
            array.move(opened, moved)
    uops = tuple(tensor.uop.base for tensor in inputs)
    launches = [_launch(opened, call, uops, moved) for call in calls]
    return Recorded(opened, launches, arrays, dependency, keep=(captured, arrays))


def _input(device: str, example: Any) -> Tensor:
    """A tensor with memory of its own, with an example's shape, type and values."""
    if isinstance(example, Tensor):
        return example.to(device).clone().realize()
    if isinstance(example, np.ndarray):
        return Tensor(np.ascontiguousarray(example), device=device).clone().realize()
    raise CannotRecord(f"an example is a {type(example).__name__}: give numpy arrays or tensors")


def _capture(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """What tinygrad's JIT captures of the function."""
    known: Any = function
    if isinstance(known, _Jit):
        if known.fxn is None:
            raise CannotRecord("the TinyJit was loaded from a file and has no function: record the function itself")
        known = known.fxn
    jit: Any = TinyJit(known)
    try:
        with Context(JIT=KERNELS_ALONE):
            jit(*inputs)
            jit(*inputs)
    except JitError as error:
        raise CannotRecord(f"tinygrad captures nothing, since the function runs no kernel ({error})") from error
    except RuntimeError as error:
        if "unbound Variable" not in str(error):
            raise
        raise CannotRecord(f"a size changes from call to call: {error}; give it a fixed one") from error
    return jit.captured


_Jit: Final = type(TinyJit(lambda: None))


def _tensors(returned: Any) -> Iterator[Tensor]:
    """The tensors in what a function returned, in order."""
    if isinstance(returned, Tensor):
        yield returned
    elif isinstance(returned, (tuple, list)):
        for item in returned:
            yield from _tensors(item)
    elif isinstance(returned, Mapping):
        yield from _tensors(list(returned.values()))


def _fixed(what: str, shape: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(size, int) for size in shape):
        raise CannotRecord(f"{what} has the shape {tuple(map(str, shape))}, which changes: give it a fixed one")
    return tuple(shape)


def _single(what: str, uop: UOp) -> Buffer:
    """The one buffer of a tensor."""
    try:
        buffer = uop.buffer
    except RuntimeError as error:
        raise CannotRecord(f"{what} is a view that is not contiguous: return it .contiguous()") from error
    if isinstance(buffer, MultiBuffer):
        raise CannotRecord(f"{what} is spread over several devices: a recording runs on one")
    return buffer


def _calls(linear: UOp) -> Iterator[UOp]:
    """The kernels of a captured function, in order."""
    for call in linear.src:
        kind = call.src[0]
        if kind.op is Ops.PROGRAM:
            yield call
        elif kind.op is Ops.COPY:
            to, from_ = (argument.device for argument in call.src[1:3])
            raise CannotRecord(f"the function copies from {from_} to {to}: do that outside of it")
        else:
            raise CannotRecord(f"the function does {kind.op.name} {kind.arg or ''}, which is no kernel: leave it out")


def _launch(device: NVDevice, call: UOp, inputs: tuple[UOp, ...], moved: Mapping[int, _Memory]) -> Launch:
    """A kernel with its buffers, in their new memory if they were moved."""
    program = call.src[0]
    info, name, resolved = program.arg, program.arg.function_name, resolve_params(call, inputs)
    buffers = [_single(f"an argument of the kernel {name}", resolved[i]).ensure_allocated() for i in info.globals]
    elsewhere = next((buffer.device for buffer in buffers if buffer.device != device.device), None)
    if elsewhere is not None:
        raise CannotRecord(f"the kernel {name} runs on {elsewhere}: only work on {device.device} is recorded")
    grid, block = info.launch_dims({})  # no variables: it was called without any
    return Launch(
        get_runtime(device.device, program),
        tuple(_moved(compat.memory_of(buffer), moved) for buffer in buffers),
        three(grid),
        three(block or ()),
    )


def _moved(buffer: HCQBuffer, moved: Mapping[int, _Memory]) -> HCQBuffer:
    new = moved.get(buffer.base.va_addr)
    return buffer if new is None else new.buffer.offset(buffer.va_addr - buffer.base.va_addr, buffer.size)
