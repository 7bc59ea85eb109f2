"""The self-test's stages in the tests: the rows, what one told, a fault that stays, a board for several processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tegrad.diag.selftest.stages import STAGES
from tegrad.orin.inject import Injection

ROWS = {stage.name: stage for stage in STAGES}
"""Stages by name."""


class Told:
    """What a stage told."""

    def __init__(self, pieces: list[Mapping[str, Any]]) -> None:
        self.facts = {piece["fact"]: piece["value"] for piece in pieces if "fact" in piece}
        self.lines = [piece["line"] for piece in pieces if "line" in piece]
        self.steps = [piece["step"] for piece in pieces if "step" in piece]
        self.last = pieces[-1]
        self.outcome = self.last["outcome"]


def always(ioctl: str, **strike: Any) -> Injection:
    """A rule that strikes each call."""
    return Injection(ioctl, probability=1, times=0, **strike)


@contextmanager
def shared_board(name: str) -> Iterator[str]:
    """A board that several processes reach."""
    from tegrad.hw.chips import CHIPS
    from tegrad.orin import board
    from tegrad.orin.client import board_stop

    board.start(CHIPS["agx-orin-64gb"], 4 << 30, name=name, linger=None)
    try:
        yield name
    finally:
        board_stop(name)
