"""Devices for the tests: NVDevice on the fake driver of this process, and on emulated boards.

Each file of tests leaves nothing on the boards that it ran on.
"""

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from boards import close_device, use_board
from fake import FakeKernel


def held_by_boards() -> dict[str, dict[str, int]]:
    """What the boards that this process is connected to hold, but for what is zero. Starts no board."""
    connection = sys.modules.get("tegrad.orin.connection")
    if connection is None:
        return {}
    from tegrad.orin.wire import Message, Op, from_file

    found = {}
    for spec, board in list(connection._connections.items()):
        if (sock := board._sock) is None:
            continue
        with suppress(OSError):  # a board that is gone
            answer = connection.call(sock.fileno(), Message(Op.STATUS))
            counts = json.loads(from_file(answer.fds[0]))["counts"]
            found[spec] = {name: count for name, count in counts.items() if count}
    return {spec: counts for spec, counts in found.items() if counts}


@pytest.fixture(scope="module", autouse=True)
def nothing_left_on_a_board() -> Iterator[None]:
    """Fail a file of tests that leaves something on a board."""
    yield
    close_device()
    gc.collect()
    assert held_by_boards() == {}


@pytest.fixture
def null_device() -> Iterator[None]:
    """Constants without a device are on NULL: what is only compiled needs neither a GPU nor clang."""
    from tinygrad.helpers import Context

    with Context(DEV="NULL"):
        yield


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
