"""A board with a GPU that executes nothing, shared by the tests of the drivers, and a client on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from driver_user import FAKE_GPU, SPEC, User

from tegrad.orin.client import BoardKernel, board_inject, board_status


@pytest.fixture(scope="session")
def kernel() -> BoardKernel:
    return BoardKernel(SPEC, linger=0.2, gpu=FAKE_GPU)


@pytest.fixture
def user(kernel: BoardKernel) -> Iterator[User]:
    made = User(kernel)
    yield made
    board_inject(SPEC, [])
    made.close_all()


@pytest.fixture
def settled(kernel: BoardKernel) -> Iterator[None]:
    """The test leaves nothing behind in the drivers."""
    before = board_status(SPEC)
    yield
    after = board_status(SPEC)
    assert after["counts"] == before["counts"]
    assert after["files"] == before["files"]
