"""Devices for the tests: NVDevice on the fake driver of this process, and on emulated boards."""

from collections.abc import Iterator
from typing import Any

import pytest
from boards import close_device, use_board
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


@pytest.fixture
def board() -> Iterator[str]:
    """The spec of a board that races; a size of its own keeps it apart from the boards that do not."""
    with use_board("agx-orin-64gb:16GiB", race=20) as spec:
        yield spec
