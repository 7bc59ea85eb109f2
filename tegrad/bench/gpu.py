"""Whether there is a GPU to measure, and processes beside it. Imports no tinygrad."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

from tegrad.errors import TegradError
from tegrad.nv.kernel import CTRL_NODE, DESKTOP_NODE, emulated


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


def spawned(work: Callable[..., T], jobs: Sequence[tuple[Any, ...]], processes: int | None = None) -> Iterator[T]:
    """What `work` returns for each of the jobs, its arguments, in order; new processes share them, one for each core."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, *zip(*jobs, strict=True))
