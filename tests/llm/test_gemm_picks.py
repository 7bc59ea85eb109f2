"""Which tile a product gets: by tokens, rows, columns and the chip, with no device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tegrad.hw.chips import CHIPS
from tegrad.llm.formats import LANE_WEIGHTS, PACKED, Q4_K, Q6_K, Q8_0, BlockType
from tegrad.llm.gemm import (
    SMALL_M,
    Gemm,
    SmallMTile,
    StreamTile,
    Tile,
    WgmmaTile,
    blocks_held,
    pick_alike,
    pick_quickest,
    pick_small_m,
    pick_tile,
    pick_wgmma,
    scratch_bound,
)


def _device(chip: str) -> Any:
    return SimpleNamespace(arch=CHIPS[chip].arch, sm_count=CHIPS[chip].sm_count)


@pytest.mark.parametrize(("tokens", "rows"), [(33, 64), (64, 64), (65, 128), (512, 128)])
def test_hoppers_tile_is_as_high_as_the_tokens_need(tokens: int, rows: int) -> None:
    tile = pick_wgmma(_device("gh100"), Gemm(Q6_K, 4096, 2048), tokens)
    assert isinstance(tile, WgmmaTile)
    assert tile.bm == rows


PICKED = {
    "a round and two thirds, shared by all": (14336, 4096, 512, (256, 128, 132)),
    "the same of short rows, smaller ones": (14336, 2560, 512, (128, 128, 0)),
    "whole rounds": (16384, 2048, 512, (256, 128, 0)),
    "small tiles that all SMs hold at once": (3072, 3072, 512, (128, 64, 0)),
    "nearly a small tile too many, of more tokens": (4480, 3072, 512, (256, 64, 0)),
    "a large one for most SMs": (5120, 3072, 512, (256, 128, 0)),
    "long rows, shared by all": (4096, 14336, 512, (256, 128, 132)),
    "long rows, four blocks a tile": (2048, 8192, 512, (256, 128, 128)),
    "long rows, few of them": (896, 4864, 512, (128, 64, 224)),
    "long rows, fewer": (512, 8192, 512, (128, 64, 128)),
    "a long chunk's, a large one to each": (2048, 8192, 2048, (256, 128, 0)),
    "a long chunk's, shared by all": (2560, 10240, 2048, (256, 128, 132)),
}


@pytest.mark.parametrize("name", PICKED)
def test_hoppers_tiles_keep_all_multiprocessors_busy(name: str) -> None:
    """As an H200 was found to be quickest."""
    rows, columns, tokens, expected = PICKED[name]
    tile = pick_wgmma(_device("gh100"), Gemm(Q6_K, rows, columns), tokens)
    assert isinstance(tile, WgmmaTile)
    assert (tile.bm, tile.bn, tile.blocks) == expected
    assert tile.resident == (1 if tile.bm * tile.bn > 128 * 128 else 2)


@pytest.mark.parametrize("tokens", [33, 65, 128, 512, 2048])
@pytest.mark.parametrize("columns", [64, 896, 4864, 8192])
@pytest.mark.parametrize("rows", [16, 512, 4096, 151936])
def test_partial_sums_have_room(tokens: int, columns: int, rows: int) -> None:
    device, gemm = _device("gh100"), Gemm(Q8_0, rows, columns)
    tile = pick_wgmma(device, gemm, tokens)
    scratch, counters = scratch_bound(device)
    assert tile.scratch_bytes(gemm, tokens) <= scratch
    assert 4 * tile.counters(gemm, tokens) <= counters
    assert tile.grid(gemm, tokens)[0] >= 1


@pytest.mark.parametrize("chip", ["gh100", "agx-orin-64gb"])
def test_up_to_a_batchs_tokens_the_weights_decide(chip: str) -> None:
    device, gemm = _device(chip), Gemm(Q8_0, 4096, 4096)
    assert isinstance(pick_tile(device, gemm, SMALL_M), SmallMTile | StreamTile)
    assert not isinstance(pick_tile(device, gemm, SMALL_M + 1), SmallMTile | StreamTile)
    assert isinstance(pick_wgmma(_device("gh100"), gemm, SMALL_M), SmallMTile | StreamTile)


@pytest.mark.parametrize("chip", ["gh100", "agx-orin-64gb"])
def test_stages_hold_the_eight_tokens_that_come_through_them(chip: str) -> None:
    """Few bits a weight make small stages; kernels/gemm_stream.cu would not compile."""
    for kind in PACKED:
        for tokens in (8, 16, 32):
            tile = pick_small_m(_device(chip), gemm := Gemm(kind, 2048, 2048), tokens)
            if isinstance(tile, StreamTile):
                assert tile.stage_bytes(gemm) >= 8 * 8 * 256 * 2, (kind.name, tokens)


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


@pytest.mark.parametrize("chip", ["gh100", "agx-orin-64gb"])
@pytest.mark.parametrize(("columns", "rows"), [(2048, 2048), (8192, 2048), (4096, 14336), (1024, 3072), (2048, 128256)])
@pytest.mark.parametrize("most", [12, 32, 64, 128, 512, 2048])
def test_tiles_that_add_up_alike_have_one_kernel_and_one_cut_of_columns_and_fit(
    chip: str, columns: int, rows: int, most: int
) -> None:
    device, gemm = _device(chip), Gemm(Q6_K, rows, columns)
    scratch, counters = scratch_bound(device)
    orders = set()
    for tokens in (8, 12, 16, 32, 40, 64, 128, 512, 2048):
        if tokens > most:
            continue
        tile = pick_alike(most)(device, gemm, tokens)
        assert blocks_held(device.arch, tile.shared_bytes(gemm)) >= tile.resident
        assert tile.scratch_bytes(gemm, tokens) <= scratch
        assert 4 * tile.counters(gemm, tokens) <= counters
        match tile:
            case StreamTile():
                orders.add((StreamTile, tile.parts))
            case SmallMTile():
                orders.add((SmallMTile, tile.splits, tile.warps_k))
            case Tile():
                orders.add((Tile, tile.splits, tile.units))
            case WgmmaTile():
                orders.add((WgmmaTile, tile.blocks, tile.units))
    assert len(orders) == 1


def test_wide_steps_that_add_up_alike_share_tiles_as_the_quickest_do() -> None:
    """Whole tiles would leave three quarters of the SMs without work, of this product."""
    device, gemm = _device("gh100"), Gemm(Q6_K, 2048, 8192)
    for tokens in (8, 40, 64):
        assert pick_alike(64)(device, gemm, tokens) == pick_quickest(device, gemm, 64)
    tile = pick_quickest(device, gemm, 64)
    assert isinstance(tile, WgmmaTile)
    assert tile.blocks == 4 * tile.tiles(gemm, 64) == 128


@pytest.mark.parametrize("kind", [Q4_K, Q6_K, Q8_0])
def test_half_of_x_of_32_tokens_leaves_room_for_weights_that_come_early(kind: BlockType) -> None:
    gemm = Gemm(kind, 4096, 4096)
    tile = pick_small_m(_device("gh100"), gemm, 32)
    assert isinstance(tile, StreamTile)
    one = tile.stage_bytes(gemm) // tile.stages
    half = 2 * 8 * 4096
    assert half + one <= tile.stage_bytes(gemm) < half + 2 * one
