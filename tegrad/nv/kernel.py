"""Which Kernel the NV device talks to: this machine's drivers, or an emulated board where the user asked for one.

`TEGRAD_BOARD` names a chip row (a private board) or a running board. The import of the board's client stands inside the
function: nothing of orin/ is loaded by a program that runs on a real GPU.
"""

import functools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from tegrad.uapi.kernel import Kernel, LinuxKernel

BOARD_VARIABLE = "TEGRAD_BOARD"
EXEC_VARIABLE = "TEGRAD_EXEC"
"""Set for what runs under `tegrad board exec`, which finds a board's nodes where a Jetson has its own."""
TRACE_VARIABLE = "TEGRAD_TRACE"
"""A file to which every call is appended."""
PROFILE_VARIABLE = "TEGRAD_PROFILE"
"""A folder in which every process leaves what it spent its time on (`profiling`)."""
CTRL_NODE = "/dev/nvgpu/igpu0/ctrl"
"""A Jetson's GPU."""
DESKTOP_NODE = "/dev/nvidiactl"
"""A desktop's."""
DESKTOP_DRIVER = Path("/sys/module/nvidia/version")


def board_asked() -> bool:
    """Whether the user asked for a board: then no real GPU may answer in its place."""
    return bool(os.environ.get(BOARD_VARIABLE))


def emulated() -> bool:
    """Whether a board answers here, asked for or not: what is found then says nothing of this machine's GPU."""
    return board_asked() or bool(os.environ.get(EXEC_VARIABLE))


def desktop_driver() -> int:
    """The major version of NVIDIA's desktop driver in the kernel that `pick_kernel` gives; 0 where it has none."""
    if not board_asked():
        with suppress(OSError, ValueError):
            return int(DESKTOP_DRIVER.read_text().split(".")[0])
    return 0


def pick_kernel() -> Kernel:
    """The Kernel for this process: LinuxKernel, or the board that `TEGRAD_BOARD` names.

    A board is picked once per name, so that a device that is closed and opened again meets the same board. With
    `TEGRAD_TRACE` every call is written to the file that it names.
    """
    spec = os.environ.get(BOARD_VARIABLE, "")
    kernel = _board(spec) if spec else LinuxKernel()
    return _traced(kernel, path) if (path := os.environ.get(TRACE_VARIABLE, "")) else kernel


def board_counts() -> dict[str, Any] | None:
    """What the board that was asked for has counted of its GPU's work (orin/gpu.py, `stats`); None without one."""
    if not board_asked():
        return None
    from tegrad.orin.client import board_status

    counts: dict[str, Any] = board_status(os.environ[BOARD_VARIABLE])["gpu"]
    return counts


@functools.cache
def _board(spec: str) -> Kernel:
    from tegrad.orin.client import BoardKernel

    return BoardKernel(spec)


def _traced(kernel: Kernel, path: str) -> Kernel:
    from tegrad.uapi.trace import Tracer
    from tegrad.uapi.tracefile import sink

    return Tracer(kernel, sink(path))
