"""The GPU as our own kernels see it: memory, programs, order. What llm asks of a device is here, with types.

An opened `nv.device.NVDevice` is one, and so is a device of the benches that only keeps books.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from tinygrad import Device
from tinygrad.device import TinyELF
from tinygrad.dtype import dtypes
from tinygrad.helpers import Target, to_mv
from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.nv import compat
from tegrad.nv.replay import DEFAULT, RUNS_IN_FLIGHT, Dependency, Launch, Number, Recording
from tegrad.nv.spec import MemorySpec
from tegrad.nv.stamps import recorded

if TYPE_CHECKING:
    from tegrad.nv.device import NVDevice

Buffer: TypeAlias = HCQBuffer
"""Memory of a GPU: `va_addr`, `size`, and `offset(at, size)` for a part of it."""
Bytes: TypeAlias = bytes | bytearray | memoryview


class Program(Protocol):
    """A kernel that is loaded."""

    name: str

    def __call__(
        self,
        *buffers: Any,
        global_size: tuple[int, ...],
        local_size: tuple[int, ...],
        vals: tuple[int, ...] = (),
        wait: bool = False,
    ) -> float | None:
        """Launch it on a grid of CTAs of so many threads; with `wait`, seconds on the GPU."""  # fmt: skip


class Gpu(Protocol):
    """An opened device. Its errors are DeviceClosed and DeviceFault, besides those that are named."""

    device: str
    """As tinygrad names it, "NV:1"."""
    arch: str
    """Such as "sm_87"."""
    closed: bool

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors that work."""

    def allocate(self, size: int, spec: MemorySpec) -> Buffer:
        """A buffer of `size` bytes. MemoryError."""

    def release(self, buffer: Buffer, spec: MemorySpec) -> None:
        """Give a buffer back, with the spec that it was allocated with."""

    def upload(self, buffer: Buffer, data: Bytes) -> None:
        """Copy bytes to the beginning of a buffer, after what was submitted before."""

    def download(self, buffer: Buffer, size: int) -> bytearray:
        """The first bytes of a buffer, after what was submitted before."""

    @property
    def lends(self) -> bool:
        """Whether the CPU can write buffers where they are (`lend`): it shares the GPU's memory."""

    def lend(self, buffers: Iterable[Buffer]) -> list[memoryview]:
        """The bytes of buffers for the CPU, until the next launches that use them."""

    def copy_parts(self, parts: Iterable[tuple[Buffer, Buffer, int]]) -> int:
        """Have the copy engine copy (target, source, bytes), after what was submitted; what `wait_for` takes."""

    def wait_for(self, copied: int) -> None:
        """Wait until copies are done. WaitTimeout."""

    def record(
        self, launches: Sequence[Launch], dependency: Dependency = DEFAULT, *, depth: int = RUNS_IN_FLIGHT,
        numbers: Sequence[Sequence[Number]] = (),
    ) -> Recording:  # fmt: skip
        """Launches that are replayed with one doorbell, up to `depth` runs in flight. LaunchError, MemoryError.

        Each run is given as many `numbers`, which say where they go.
        """

    def load_program(self, cubin: bytes, name: str, buffers: int, values: int = 0) -> Program:
        """A kernel of a cubin that takes `buffers` pointers and then `values` 32-bit integers."""

    def synchronize(self) -> None:
        """Wait for all that was submitted."""

    def timed(self, submit: Callable[[], object]) -> float:
        """Microseconds by the GPU's clock from before the launches that `submit` submits to after them; waits."""

    def gone(self, closed: str) -> Exception:
        """The error of something of a device that is closed: `closed` in words, or that a fork left it behind."""

    def check_usable(self) -> None:
        """Raise what keeps the device from being used, if anything does."""


def opened(name: str | None = None) -> Gpu:
    """tinygrad's device of that name, the default one unless given, which is a `Gpu` where it is NV's."""
    device: Gpu = Device[name or Device.DEFAULT]
    return device


def words_of(buffer: Buffer, kind: str) -> memoryview:
    """A buffer that the CPU sees, as words of a kind of `struct`'s, such as "Q"."""
    words: memoryview = to_mv(buffer.cpu_view().addr, buffer.size).cast(kind)
    return words


class GpuMethods:
    """A `Gpu`'s memory and programs by tinygrad's allocator and runtime."""

    allocator: Any
    arch: str
    runtime: Any

    def allocate(self, size: int, spec: MemorySpec) -> Buffer:
        """See `Gpu`."""
        return self.allocator.alloc(size, spec)

    def release(self, buffer: Buffer, spec: MemorySpec) -> None:
        """See `Gpu`."""
        self.allocator.free(buffer, buffer.size, spec)

    def upload(self, buffer: Buffer, data: Bytes) -> None:
        """See `Gpu`."""
        compat.copy_in(self.allocator, buffer, memoryview(data))

    def download(self, buffer: Buffer, size: int) -> bytearray:
        """See `Gpu`."""
        out = bytearray(size)
        compat.copy_out(self.allocator, memoryview(out), buffer)
        return out

    @property
    def lends(self) -> bool:
        """See `Gpu`."""
        return hasattr(self.allocator, "lend")

    def lend(self, buffers: Iterable[Buffer]) -> list[memoryview]:
        """See `Gpu`."""
        lent: list[memoryview] = self.allocator.lend(buffers)
        return lent

    def record(
        self, launches: Sequence[Launch], dependency: Dependency = DEFAULT, *, depth: int = RUNS_IN_FLIGHT,
        numbers: Sequence[Sequence[Number]] = (),
    ) -> Recording:  # fmt: skip
        """See `Gpu`."""
        return recorded(cast("NVDevice", self), launches, dependency, depth=depth, numbers=numbers)

    def load_program(self, cubin: bytes, name: str, buffers: int, values: int = 0) -> Program:
        """See `Gpu`."""
        signature: list[tuple[str, int, Any, tuple[int, ...]]]
        signature = [(f"p{at}", at, dtypes.char, (1,)) for at in range(buffers)]
        signature += [(f"v{at}", buffers + at, dtypes.int32, ()) for at in range(values)]
        program: Program = self.runtime(TinyELF(cubin, name, Target("NV", arch=self.arch), tuple(signature)))
        return program
