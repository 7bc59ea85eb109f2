"""The device that the tests of the graph run on."""

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BOARD = "agx-orin-64gb"
PATIENCE_MS = "200000"
"""A prompt is seconds of kernels on a board, and more where other work shares the cores."""
GPU_FILES = ("/dev/nvgpu/igpu0/ctrl", "/dev/nvidiactl")
HERE = Path(__file__).parent
CHOSEN = os.environ.get("DEV", "")
"""Before any test runs: tinygrad puts its default device into the environment once somebody asks for it."""


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    """tinygrad's default device where DEV chooses one, else NV: this machine's GPU, or an emulated Orin."""
    with pytest.MonkeyPatch.context() as patch:
        if "TEGRAD_BOARD" not in os.environ and not any(os.path.exists(name) for name in GPU_FILES):
            patch.setenv("TEGRAD_BOARD", BOARD)
            patch.setenv("HCQDEV_WAIT_TIMEOUT_MS", os.environ.get("HCQDEV_WAIT_TIMEOUT_MS", PATIENCE_MS))
        import tegrad.nv

        tegrad.nv.install()
        close_device()
        from tinygrad import Device
        from tinygrad.helpers import Context

        with Context(DEV=CHOSEN or "NV"):
            yield str(Device.DEFAULT)
        gc.collect()  # buffers go before their device
        close_device()


@pytest.fixture(scope="module")
def opened(device: str) -> Any:
    """That device, opened."""
    from tinygrad import Device

    return Device[device]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Operands lie at either side of their pages, by turns of a test's cases; at both sides where time is plenty."""
    sides: defaultdict[Any, tuple[list[pytest.Item], list[pytest.Item]]] = defaultdict(lambda: ([], []))
    for item in items:
        spec = getattr(item, "callspec", None)
        if item.path.parent == HERE and spec and "operands" in spec.params:
            sides[item.function][spec.params["operands"] == "start"].append(item)  # type: ignore[attr-defined]
    for ends, starts in sides.values():
        if len(ends) == len(starts):
            for at, both in enumerate(zip(ends, starts, strict=True)):
                both[1 - at % 2].add_marker(pytest.mark.long)


@pytest.fixture(params=["end", "start"])
def operands(opened: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Buffers flush to the end of their pages, then to the start, and the check that nothing beside them was stored."""
    from operands import Operands

    made = Operands(opened, request.param)
    yield made
    made.check()
    made.free()


def close_device() -> None:
    """Close the NV device if one is open."""
    from tegrad.nv import device

    if (opened := device._opened.get("NV")) is not None:
        opened.close()
