"""Attention of a chunk by Hopper's asynchronous tensor cores, against float64, on a board of that chip."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flash_rig import check_chunk
from hopper_board import hopper
from numpy.typing import NDArray
from operands import Operands

from tegrad.bench.gpu import opened
from tegrad.llm.attention import Scoring
from tegrad.llm.flash import Flash

pytestmark = pytest.mark.board

SHORT = {
    "one warpgroup, blocks, past of several tiles": (Flash(6, 2, 64, 320, tile=64, groups=1, blocks=5), 205, 48),
    "two, a ring, capped": (Flash(6, 2, 64, 192, tile=64, groups=2, scoring=Scoring(0.2, 5.0, 100)), 365, 48),
    "in both directions within a window": (
        Flash(6, 2, 64, 64, tile=64, groups=1, scoring=Scoring(window=9, causal=False)), 0, 45
    ),
}  # fmt: skip
MORE = {
    "a ring of an odd number of half tiles, capped": (
        Flash(6, 2, 64, 192, tile=128, groups=2, scoring=Scoring(0.2, 5.0, 100)), 365, 48
    ),
    "heads of 64, group of 3, past of several tiles": (Flash(6, 2, 64, 512, tile=128, groups=2), 400, 48),
    "one token from the start": (Flash(6, 2, 64, 160, tile=128, groups=2), 0, 1),
    "heads of 128, past of three tiles": (Flash(4, 2, 128, 640, tile=128, groups=2), 384, 17),
    "blocks, past of several": (Flash(6, 2, 64, 320, tile=128, groups=2, blocks=5), 205, 48),
    "a window of less than a tile": (Flash(6, 2, 64, 128, tile=128, groups=2, scoring=Scoring(window=20)), 0, 48),
    "the ring's end, heads of 256": (
        Flash(4, 1, 256, 192, tile=64, groups=2, scoring=Scoring(window=100, scale=0.09)), 365, 40
    ),
    "in both directions, past of several tiles": (
        Flash(6, 2, 64, 512, tile=128, groups=2, scoring=Scoring(causal=False)), 300, 45
    ),
    "in both directions within a window, heads of 256": (
        Flash(3, 1, 256, 128, tile=64, groups=2, scoring=Scoring(window=30, causal=False)), 64, 48
    ),
    "one warpgroup, heads of 256": (Flash(4, 2, 256, 320, tile=64, groups=1), 250, 40),
}  # fmt: skip


def check(
    flash: Flash, start: int, count: int, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> NDArray[np.float64]:
    """Copies and products end as late as they may, or as a seed draws."""
    hopper(monkeypatch, seed)
    with opened() as device:
        operands = Operands(device, "end" if seed else "start")
        found = check_chunk(device, operands, flash, start, count)
        operands.check()
        operands.free()
    return found


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("flash", "start", "count"), list(SHORT.values()), ids=list(SHORT))
def test_a_chunk_sees_its_past_and_itself_and_nothing_else(
    flash: Flash, start: int, count: int, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(flash, start, count, seed, monkeypatch)


def test_a_row_is_computed_alike_by_blocks_of_one_warpgroup_and_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit: how many there are depends on the chunk, and answers do not."""
    flash, start, count = SHORT["one warpgroup, blocks, past of several tiles"]
    one, two = (check(replace(flash, groups=groups), start, count, None, monkeypatch) for groups in (1, 2))
    assert np.array_equal(one, two)


@pytest.mark.long
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(("flash", "start", "count"), list(MORE.values()), ids=list(MORE))
def test_warpgroups_attend_in_every_shape(
    flash: Flash, start: int, count: int, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(flash, start, count, seed, monkeypatch)


def test_few_blocks_are_cut_into_more() -> None:
    """Of one warpgroup where two would leave half of the multiprocessors idle; as they are where there are none."""
    gemma, llama = Flash(8, 4, 256, 4096, groups=2), Flash(32, 8, 128, 4096, groups=2)
    assert [gemma.spread(tokens, 132).groups for tokens in (512, 2048)] == [1, 2]
    assert [llama.spread(tokens, 132).groups for tokens in (32, 128, 512)] == [1, 1, 2]
    assert Flash(8, 4, 256, 4096).spread(32, 16).groups == 0
