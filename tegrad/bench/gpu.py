"""Whether there is a GPU to measure. Imports no tinygrad."""

from __future__ import annotations

import functools
import os
import sys

from tegrad.errors import TegradError
from tegrad.nv.kernel import CTRL_NODE, DESKTOP_NODE, emulated


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
