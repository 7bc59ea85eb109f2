"""Exercises of the device as tinygrad sees it, for a first boot: one sum, and launches until every ring has wrapped."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tegrad.errors import TegradError

THREADS = 32
CHECK_EVERY = 500
"""Launches between two looks at the results."""
SOURCE = """extern "C" __global__ void exercise(int *state, int value) {
    state[threadIdx.x] = state[threadIdx.x] * 3 + value + threadIdx.x;
}"""
"""A launch that is lost, doubled or out of order changes every later result."""


class WrongResult(TegradError, RuntimeError):
    """What the GPU computed is not what it should have."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often each ring began anew."""

    gpfifo: int
    commands: int
    arguments: int


def _nv() -> Any:
    """The NV device of this process, through tegrad."""
    import tegrad.nv

    tegrad.nv.install()
    from tinygrad import Device

    return Device["NV"]


def open_device() -> None:
    """Open the device ahead, so that what follows can be timed."""
    _nv()


def one_liner() -> list[int]:
    """README's one-liner: a sum of two tensors on the GPU. WrongResult where it is wrong."""
    from tinygrad import Tensor

    name = _nv().device
    found = (Tensor([1, 2, 3], device=name) + Tensor([4, 5, 6], device=name)).tolist()
    if found != [5, 7, 9]:
        raise WrongResult(f"[1, 2, 3] + [4, 5, 6] came to {found}, not to [5, 7, 9]")
    return [int(value) for value in found]


def launches(count: int, progress: Callable[[int], object] = lambda done: None) -> Rounds:
    """Launch a small kernel so many times and check what all of them together left. WrongResult says from where on."""
    from tinygrad.device import TinyELF
    from tinygrad.dtype import dtypes
    from tinygrad.helpers import Target

    from tegrad.nv import compilers

    device = _nv()
    signature = (("state", 0, dtypes.int32, ()), ("value", 1, dtypes.int32, ()))
    target = Target(device="NV", arch=device.arch)
    program = device.runtime(TinyELF(compilers.compile_cuda(SOURCE, device.arch), "exercise", target, signature))
    buffer = device.allocator.alloc(4 * THREADS)
    device.allocator._copyin(buffer, memoryview(bytearray(4 * THREADS)))
    wanted = [0] * THREADS
    for done in range(1, count + 1):
        program(buffer, global_size=(1, 1, 1), local_size=(THREADS, 1, 1), vals=(done,))
        wanted = [(word * 3 + done + i) & 0xFFFFFFFF for i, word in enumerate(wanted)]
        if done % CHECK_EVERY == 0 or done == count:
            progress(done)
            device.synchronize()
            out = memoryview(bytearray(4 * THREADS))
            device.allocator._copyout(out, buffer)
            if (found := list(out.cast("I"))) != wanted:
                lane = next(i for i in range(THREADS) if found[i] != wanted[i])
                raise WrongResult(
                    f"between launches {max(0, done - CHECK_EVERY)} and {done}, thread {lane} came to "
                    f"{found[lane]:#x}, not to {wanted[lane]:#x}"
                )
    device.allocator.free(buffer, 4 * THREADS)
    fifo = device.compute_gpfifo
    return Rounds(
        fifo.put_value // fifo.entries_count, device.cmdq_allocator.turns, device.kernargs_offset_allocator.turns
    )
