"""Which tile a product gets: by tokens, rows, columns and the chip, with no device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tegrad.hw.chips import CHIPS
from tegrad.llm.formats import LANE_WEIGHTS, Q6_K, Q8_0
from tegrad.llm.gemm import (
    SMALL_M,
    Gemm,
    SmallMTile,
    StreamTile,
    WgmmaTile,
    blocks_held,
    pick_small_m,
    pick_tile,
    pick_wgmma,
)


def _device(chip: str) -> Any:
    return SimpleNamespace(arch=CHIPS[chip].arch, sm_count=CHIPS[chip].sm_count)


@pytest.mark.parametrize(("tokens", "rows"), [(33, 64), (64, 64), (65, 128), (512, 128)])
def test_hoppers_tile_is_as_high_as_the_tokens_need(tokens: int, rows: int) -> None:
    tile = pick_wgmma(_device("gh100"), Gemm(Q6_K, 4096, 4096), tokens)
    assert isinstance(tile, WgmmaTile)
    assert tile.bm == rows


@pytest.mark.parametrize("chip", ["gh100", "agx-orin-64gb"])
def test_up_to_a_batchs_tokens_the_weights_decide(chip: str) -> None:
    device, gemm = _device(chip), Gemm(Q8_0, 4096, 4096)
    assert isinstance(pick_tile(device, gemm, SMALL_M), SmallMTile | StreamTile)
    assert not isinstance(pick_tile(device, gemm, SMALL_M + 1), SmallMTile | StreamTile)
    assert isinstance(pick_wgmma(_device("gh100"), gemm, SMALL_M), SmallMTile | StreamTile)


@pytest.mark.parametrize("chip", ["gh100", "agx-orin-64gb"])
@pytest.mark.parametrize("tokens", [1, 8, 9, 17, 32])
@pytest.mark.parametrize("columns", [192, 576, 704, 1280, 1600, 3200, 8960])
def test_split_columns_divide_evenly_and_leave_no_multiprocessor_two_blocks_more(
    chip: str, tokens: int, columns: int
) -> None:
    device = _device(chip)
    for rows in (64, 512, 4096, 32768):
        gemm = Gemm(Q8_0, rows, columns)
        tile = pick_small_m(device, gemm, tokens)
        assert blocks_held(device.arch, tile.shared_bytes(gemm)) >= 1
        if isinstance(tile, SmallMTile):
            groups = -(-columns // (4 * LANE_WEIGHTS))
            assert groups % tile.splits == 0
            assert tile.splits == 1 or tile.sets(gemm) * tile.splits <= device.sm_count * 5 // 4
            larger = [n for n in (2, 4, 8, 16) if n > tile.splits and groups % n == 0]
            assert all(tile.sets(gemm) * n > device.sm_count * 5 // 4 for n in larger)
