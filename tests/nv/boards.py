"""Opening tinygrad's NV device on a private emulated board, and closing it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def close_device() -> None:
    """Close the NV device if one is open."""
    from tegrad.nv import device

    if (opened := device._opened.get("NV")) is not None:
        opened.close()


def open_device() -> Any:
    """The NV device, opened if it is not."""
    from tinygrad import Device

    return Device["NV"]


def own_counts() -> dict[str, int]:
    """Open fds and shared mappings of this process; those of buffers are shared."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {"fds": len(os.listdir("/proc/self/fd")), "maps": sum(line.split()[1].endswith("s") for line in maps)}


@contextmanager
def use_board(spec: str, renderer: str = "", race: int | None = None) -> Iterator[str]:
    """Let the next NV device open on a private board of this spec; closes it at the end.

    With a `race` seed the board's GPU takes every liberty that silicon may take: it reads late, early, out of step.
    """
    from tinygrad.helpers import Context

    import tegrad.nv
    from tegrad.nv import iface
    from tegrad.orin.client import BoardKernel

    tegrad.nv.install()
    close_device()
    kernel = BoardKernel(spec)
    with pytest.MonkeyPatch.context() as patch, Context(DEV=f"NV:{renderer}" if renderer else "NV"):
        if race is not None:
            patch.setenv("TEGRAD_RACE", str(race))
        patch.setattr(iface, "pick_kernel", lambda: kernel)
        try:
            yield spec
        finally:
            close_device()
