"""Devices for the tests: NVDevice on the fake driver of this process."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from fake import FakeKernel

os.environ.setdefault("DEV", "NV")


@pytest.fixture
def fake_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    """The driver that the next device meets. Nothing may be left open at the end."""
    import tegrad.nv
    from tegrad.nv import iface

    tegrad.nv.install()
    kernel = FakeKernel()
    monkeypatch.setattr(iface, "pick_kernel", lambda: kernel)
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
