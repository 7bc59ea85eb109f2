"""What the objects of the drivers (address spaces, channels, groups) need of whoever keeps them.

`state` keeps them all. Each object names in its own module the tables that it enters itself into.
"""

from __future__ import annotations

from typing import Any, Protocol

from tegrad.hw.chips import Chip
from tegrad.orin.klog import KernelLog


class Keeper(Protocol):
    """What they all need: the chip, the kernel log, the GPU."""

    @property
    def chip(self) -> Chip: ...

    @property
    def log(self) -> KernelLog: ...

    def tell_gpu(self, method: str, *args: object, fd: int | None = None) -> Any:
        """Call the GPU. Raises GpuError when it has no room, Errno(ENODEV) when there is none any more."""
