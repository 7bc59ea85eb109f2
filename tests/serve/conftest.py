"""The device."""

import gc
import os
from collections.abc import Iterator

import pytest

BOARD = "agx-orin-64gb"


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    """An emulated Orin."""
    with pytest.MonkeyPatch.context() as patch:
        if "TEGRAD_BOARD" not in os.environ:
            patch.setenv("TEGRAD_BOARD", BOARD)
        import tegrad.nv
        from tegrad.nv import device

        tegrad.nv.install()
        from tinygrad import Device
        from tinygrad.helpers import Context

        with Context(DEV="NV"):
            yield str(Device.DEFAULT)
        gc.collect()  # buffers go before their device
        if (opened := device._opened.get("NV")) is not None:
            opened.close()
