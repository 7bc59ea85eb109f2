"""A board with a GPU that executes nothing, shared by the tests of the drivers, and a client on it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from driver_user import FAKE_GPU, SPEC, User

from tegrad.hw.chips import CHIPS
from tegrad.orin import board
from tegrad.orin.client import BoardKernel, board_inject, board_status, board_stop


@pytest.fixture(scope="session")
def kernel() -> BoardKernel:
    return BoardKernel(SPEC, linger=0.2, gpu=FAKE_GPU)


@pytest.fixture
def shared_board() -> Iterator[str]:
    """The name of a board that nobody has used yet, where several processes may meet."""
    name = f"test-{os.getpid()}"
    board.start(CHIPS["orin-nano-8gb"], 1 << 30, name=name, linger=None, gpu=FAKE_GPU)
    yield name
    board_stop(name)
    assert name not in board.running()


@pytest.fixture
def fresh(shared_board: str) -> Iterator[User]:
    """The first client of a board: ids are the ones that a driver gives out first."""
    made = User(BoardKernel(shared_board))
    yield made
    made.close_all()


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
