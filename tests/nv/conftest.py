"""Devices for the tests: NVDevice on the fake driver of this process, and on emulated boards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake import FakeKernel


@pytest.fixture
def fake_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    """The driver that the next device meets. Nothing may be left open at the end."""
    from tinygrad.helpers import Context

    import tegrad.nv
    from tegrad.nv import iface

    tegrad.nv.install()
    close_device()
    monkeypatch.delenv("TEGRAD_BOARD", raising=False)
    kernel = FakeKernel()
    monkeypatch.setattr(iface, "pick_kernel", lambda: kernel)
    with Context(DEV="NV"):
        yield kernel
        close_device()
    kernel.stop()
    assert set(kernel.held().values()) == {0}


@pytest.fixture
def fake_device(fake_kernel: FakeKernel) -> Any:
    """NVDevice on the fake driver."""
    from tinygrad import Device

    return Device["NV"]


def close_device() -> None:
    """Close the NV device if one is open."""
    from tegrad.nv import device

    if (opened := device._opened.get("NV")) is not None:
        opened.close()


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


@pytest.fixture
def board() -> Iterator[str]:
    """The spec of a board that races; a size of its own keeps it apart from the boards that do not."""
    with use_board("agx-orin-64gb:16GiB", race=20) as spec:
        yield spec
