"""One board for all rules and mutants of a test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mutant_board import MutableBoard


@pytest.fixture(scope="session")
def board() -> Iterator[MutableBoard]:
    made = MutableBoard()
    yield made
    made.stop()
