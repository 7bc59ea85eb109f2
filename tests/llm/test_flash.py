"""Attention of a chunk over the cache, against float64 on the same halves, on the board."""

from __future__ import annotations

from typing import Any

import pytest
from flash_rig import check_chunk
from operands import Operands

from tegrad.llm.attention import Scoring
from tegrad.llm.flash import Flash

pytestmark = pytest.mark.board


CASES = {
    "f16, group of 3, past of two tiles": (Flash(6, 2, 64, 160, warps=2, tile=32), 45, 17),
    "the same from the start": (Flash(6, 2, 64, 160, warps=2, tile=32), 0, 1),
    "q8_0, heads of 128": (Flash(4, 2, 128, 64, q8=True, warps=2, tile=32), 30, 34),
    "blocks, past of several": (Flash(6, 2, 64, 192, warps=2, tile=32, blocks=3), 141, 17),
    "q8_0 in blocks, a tile to each": (Flash(4, 2, 64, 192, q8=True, warps=2, tile=64, blocks=3), 100, 34),
    "a window of less than a tile": (Flash(6, 2, 64, 96, warps=2, tile=32, scoring=Scoring(window=20)), 0, 48),
    "the ring's end, heads of 256": (
        Flash(4, 1, 256, 128, warps=2, tile=32, scoring=Scoring(window=70, scale=0.09)), 365, 40
    ),
    "in both directions": (Flash(6, 2, 64, 96, warps=2, tile=32, scoring=Scoring(causal=False)), 0, 45),
    "in both directions within a window, heads of 256": (
        Flash(3, 1, 256, 96, warps=2, tile=32, scoring=Scoring(window=9, causal=False)), 0, 48
    ),
    "q8_0 in a ring, capped": (Flash(4, 2, 64, 128, q8=True, warps=2, tile=32, scoring=Scoring(0.2, 5.0, 64)), 200, 48),
}  # fmt: skip


@pytest.mark.parametrize(("flash", "start", "count"), list(CASES.values()), ids=list(CASES))
def test_a_chunk_sees_its_past_and_itself_and_nothing_else(
    opened: Any, operands: Operands, flash: Flash, start: int, count: int
) -> None:
    check_chunk(opened, operands, flash, start, count)
