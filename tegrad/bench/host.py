"""What the CPU does for a launch, without a GPU: microseconds from the call until it comes back.

The device is made to look as if its GPU were always done at once: submissions go into the rings as ever and the
doorbell goes nowhere, so that nothing waits. That works on a board, whose emulated GPU would take the time, and tells
nothing of a GPU's share.

    TEGRAD_BOARD=agx-orin-64gb python -m tegrad.bench.host
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from tinygrad import Device, Tensor, TinyJit
from tinygrad.device import TinyELF
from tinygrad.dtype import dtypes
from tinygrad.helpers import Target

import tegrad.nv
from tegrad.bench.mlp import network, policy
from tegrad.bench.rows import MLP_WIDTHS
from tegrad.nv import compilers

BATCHES: Final = 40
CALLS: Final = 200
"""Calls in a batch."""
DONE_VALUE: Final = 1 << 60
SOURCE: Final = 'extern "C" __global__ void add(int *state, int value) { state[threadIdx.x] += value; }'


class _Nowhere:
    """A doorbell page that nobody listens to."""

    def __setitem__(self, index: int, value: int) -> None:
        pass


@contextmanager
def done_at_once(device: Any) -> Iterator[None]:
    """Whatever is submitted in here counts as done, and is never run. After it the device works on as before."""
    device.synchronize()
    before = [(fifo, fifo._doorbell, fifo.put_value) for fifo in device._fifos]
    for fifo, _, _ in before:
        fifo._doorbell, fifo.progress[0] = _Nowhere(), DONE_VALUE
    device.timeline_signal.value = DONE_VALUE
    try:
        yield
    finally:
        device.timeline_signal.value = device.timeline_value - 1
        for fifo, doorbell, put in before:  # where the GPU goes on
            fifo._doorbell, fifo.put_value, fifo._free_from = doorbell, put, put
            fifo._in_flight.clear()
            fifo.progress[0] = fifo.submissions


def calls() -> dict[str, Callable[[], object]]:
    """What is measured, by name, each called a few times already."""
    device = Device["NV"]
    x = Tensor(np.ones(12, np.float32), device="NV").realize()
    one: Any = TinyJit(lambda a: (a + 1).realize())
    weights = [Tensor(layer, device="NV").realize() for layer in network()]
    net: Any = TinyJit(policy(weights))
    turn = [Tensor(np.zeros((1, MLP_WIDTHS[0]), np.float16), device="NV").realize() for _ in range(3)]
    signature = (("state", 0, dtypes.int32, ()), ("value", 1, dtypes.int32, ()))
    image = compilers.compile_cuda(SOURCE, device.arch)
    add = device.runtime(TinyELF(image, "add", Target("NV", arch=device.arch), signature))
    state = device.allocator.alloc(4096)

    def next_input() -> Any:
        turn.append(turn.pop(0))
        return turn[0]

    found: dict[str, Callable[[], object]] = {
        "TinyJit, one kernel": lambda: one(x),
        "TinyJit, 12-128-128-4": lambda: net(turn[0]),
        "TinyJit, 12-128-128-4, inputs in turn": lambda: net(next_input()),
        "program": lambda: add(state, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(1,)),
        "synchronize": device.synchronize,
    }
    for call in found.values():
        for _ in range(4):
            call()
    return found


def timed(call: Callable[[], object], batches: int = BATCHES, count: int = CALLS) -> list[float]:
    """Microseconds of a call, the mean of each batch."""
    found = []
    for _ in range(batches):
        begun = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - begun) / count * 1e6)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each: the best and the median batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=BATCHES)
    asked = parser.parse_args(arguments)
    tegrad.nv.install()
    measured = calls()
    with done_at_once(Device["NV"]):
        for name, call in measured.items():
            samples = timed(call, asked.batches)
            print(f"{name:40} best {min(samples):7.2f} us, median {statistics.median(samples):7.2f} us", flush=True)


if __name__ == "__main__":
    main()
