"""One board for all rules and mutants of a test process, replaced where a test has spoilt it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mutant_board import MutableBoard


@pytest.fixture(scope="session")
def board_of_the_session() -> Iterator[MutableBoard]:
    made = MutableBoard()
    yield made
    made.stop()


@pytest.fixture
def board(board_of_the_session: MutableBoard) -> MutableBoard:
    board_of_the_session.ready()
    return board_of_the_session
