"""What the benches of a GPU share: whether there is one, its time for launches, processes beside it, lines of a table.

Importing this imports no tinygrad.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tegrad.errors import TegradError
from tegrad.nv.kernel import CTRL_NODE, DESKTOP_NODE, emulated

if TYPE_CHECKING:
    from tegrad.nv.gpu import Gpu
    from tegrad.nv.replay import Dependency, Launch

PASSES: Final = 9
"""Runs of a recording, of which the median counts."""
T = TypeVar("T")


class NoGpu(TegradError):
    """There is nothing to measure."""


def check_gpu() -> None:
    """NoGpu without a GPU; a line on stderr on a board, whose times are an emulation's, the first time."""
    if emulated():
        _say_emulated()
    elif not any(map(os.path.exists, (CTRL_NODE, DESKTOP_NODE))):
        raise NoGpu(
            "this measures a GPU, and none is found here: run it on a Jetson or another machine with an NVIDIA GPU, "
            "or, if it has no peer that needs CUDA, try it with TEGRAD_BOARD=agx-orin-64gb"
        )


@functools.cache
def _say_emulated() -> None:
    print("tegrad: on an emulated board: these times are the emulation's, not a GPU's", file=sys.stderr, flush=True)


def board() -> str:
    """The board that stands for a GPU, for a record; empty where a real one is."""
    name = os.environ.get("TEGRAD_BOARD")
    return f"emulated {name}" if name else ""


@contextmanager
def opened() -> Iterator[Any]:
    """The NV device, for a measurement. NoGpu."""
    check_gpu()
    import tegrad.nv

    tegrad.nv.install()
    from tinygrad import Device

    device = Device["NV"]
    try:
        yield device
    finally:
        device.close()


def gpu_us(device: Gpu, launches: Sequence[Launch], form: Dependency) -> float:
    """Median microseconds of the GPU's clock of a recording of these launches, with what begins and ends it."""
    with device.record(launches, form) as recording:
        recording.wait(recording.run())
        return statistics.median(device.timed(recording.run) for _ in range(PASSES))


def slope(device: Gpu, launches: Sequence[Launch], form: Dependency, few: int, many: int) -> float:
    """Microseconds that one more launch takes: between recordings of the first `few` and of the first `many`."""
    short, long = (gpu_us(device, launches[:count], form) for count in (few, many))
    return (long - short) / (many - few)


def spawned(work: Callable[..., T], jobs: Sequence[tuple[Any, ...]], processes: int | None = None) -> Iterator[T]:
    """What `work` returns for each of the jobs, its arguments, in order; new processes share them, one a core."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, *zip(*jobs, strict=True))


def printed(rows: Iterable[T], line: Callable[[T], str]) -> list[T]:
    """Rows of a bench, a line of each printed as it comes."""
    found = []
    for row in rows:
        found.append(row)
        print(line(row), flush=True)
    return found
