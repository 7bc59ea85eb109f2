"""The device that the tests of the graph run on."""

import os

import pytest

BOARD = "agx-orin-64gb"
GPU_FILES = ("/dev/nvgpu/igpu0/ctrl", "/dev/nvidiactl")


@pytest.fixture(scope="session")
def device() -> str:
    """tinygrad's default device where DEV chooses one, else NV: this machine's GPU, or an emulated Orin."""
    chosen = os.environ.get("DEV", "")
    if "NV" in (chosen or "NV") and not any(os.path.exists(name) for name in GPU_FILES):
        os.environ.setdefault("TEGRAD_BOARD", BOARD)
    import tegrad.nv

    tegrad.nv.install()
    from tinygrad import Device

    return str(Device.DEFAULT) if chosen else "NV"
