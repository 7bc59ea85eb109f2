"""Products by Hopper's own instructions, against float64 on the same weights, on a board of that chip."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import close_device
from gemm_operands import check, product

from tegrad.llm.formats import BF16, BLOCK_TYPES, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0
from tegrad.llm.gemm import AnyTile, Gemm, SmallMTile, StreamTile, Tile, WgmmaTile, pick_alike

pytestmark = pytest.mark.board


@pytest.fixture(scope="module", params=["", "5"], ids=["", "race"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A board of Hopper's, and one whose engines take liberties."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEGRAD_BOARD", "gh100")
        patch.setenv("HCQDEV_WAIT_TIMEOUT_MS", "60000")
        if request.param:
            patch.setenv("TEGRAD_RACE", request.param)
        import tegrad.nv

        tegrad.nv.install()
        yield "NV"
        gc.collect()
        close_device()


SMALL = WgmmaTile(32, 64, stages=3)
SHORT = {
    "Q4_K": (Gemm(Q4_K, 100, 768), SMALL, 45, 48),
    "three warpgroups, two runs a stage": (Gemm(Q5_K, 70, 768), WgmmaTile(64, 192, units=2, stages=3), 40, 64),
    "one token, a tail of runs": (Gemm(Q4_0, 70, 704), WgmmaTile(32, 64), 1, 32),
    "128 tokens": (Gemm(Q6_K, 70, 512), WgmmaTile(128, 64, stages=3), 131, 160),
    "256 tokens": (Gemm(F16, 70, 512), WgmmaTile(256, 64, stages=3), 300, 300),
    "6 bits, a tail of tokens and rows": (Gemm(Q6_K, 100, 768), SMALL, 45, 48),
    "one stage of columns": (Gemm(BF16, 70, 64), WgmmaTile(32, 64), 17, 32),
    "gated halves, shared tiles": (
        Gemm(Q8_0, 96, 512, gated=True, activation="silu", half_out=True),
        WgmmaTile(64, 128, stages=3, blocks=3),
        50,
        64,
    ),
    "blocks with parts of three tiles, of tokens that are not there, too": (
        Gemm(Q6_K, 200, 512, add=True),
        WgmmaTile(32, 64, stages=3, blocks=5),
        45,
        96,
    ),
}
MORE = {
    **{kind.name: (Gemm(kind, 100, 768), SMALL, 45, 48) for kind in BLOCK_TYPES.values() if kind is not Q4_K},
    "shared tiles, residual, bias": (
        Gemm(Q6_K, 40, 1024, add=True, bias=True),
        WgmmaTile(32, 64, units=2, stages=3, blocks=7),
        33,
        48,
    ),
    "four runs a stage": (Gemm(Q6_K, 70, 1024), WgmmaTile(32, 128, units=4, stages=3), 40, 64),
    "three runs of floats": (Gemm(F32, 70, 192), WgmmaTile(32, 64), 17, 32),
    "shared tiles of gate and up, biases": (
        Gemm(Q4_0, 96, 1024, gated=True, activation="silu", half_out=True, bias=True),
        WgmmaTile(32, 128, units=2, blocks=5),
        33,
        48,
    ),
    "one stage of columns": (Gemm(BF16, 70, 64), WgmmaTile(32, 64), 17, 32),
    "four warpgroups": (Gemm(Q8_0, 300, 512, add=True), WgmmaTile(32, 256, stages=3), 40, 64),
}


@pytest.mark.parametrize(("gemm", "tile", "tokens", "most"), list(SHORT.values()), ids=list(SHORT))
def test_warpgroups_multiply_within_half_precision(
    opened: Any, operands: Any, gemm: Gemm, tile: WgmmaTile, tokens: int, most: int
) -> None:
    ours, expected = product(opened, operands, gemm, tile, tokens, most)
    check(ours, expected)


@pytest.mark.parametrize("tile", [StreamTile(2, stages=3, blocks=2), SmallMTile(2, warps_m=2, warps_k=2)], ids=type)
@pytest.mark.parametrize("overlap", [0, 1])
def test_few_tokens_are_multiplied_when_weights_come_early(
    opened: Any, operands: Any, tile: AnyTile, overlap: int
) -> None:
    """Copies land when they like, and warps give way where they may."""
    gemm = Gemm(Q6_K, 40, 4096, add=True)
    ours, expected = product(opened, operands, gemm, tile, 11, 13, overlap)
    check(ours, expected)


@pytest.mark.parametrize(
    ("largest", "sizes", "kind"),
    [(512, (32, 128, 512), WgmmaTile), (40, (16, 40), WgmmaTile), (32, (8, 16, 32), StreamTile)],
    ids=["chunks", "wide steps", "few"],
)
def test_a_token_has_the_same_sums_in_chunks_and_steps_of_any_size(
    opened: Any, operands: Any, largest: int, sizes: tuple[int, ...], kind: type
) -> None:
    """Bit by bit, by the tiles that are picked for that; the first tokens, of those that each size has room for."""
    gemm, found = Gemm(Q6_K, 40, 2048), []
    for most in sizes:
        tile = pick_alike(largest)(opened, gemm, most)
        assert isinstance(tile, kind)
        found.append(product(opened, operands, gemm, tile, min(most, 20), most)[0])
    for ours in found:
        assert np.array_equal(ours[:8], found[0][:8])


@pytest.mark.long
@pytest.mark.parametrize(("gemm", "tile", "tokens", "most"), list(MORE.values()), ids=list(MORE))
def test_warpgroups_multiply_every_format_and_shape(
    opened: Any, operands: Any, gemm: Gemm, tile: WgmmaTile, tokens: int, most: int
) -> None:
    ours, expected = product(opened, operands, gemm, tile, tokens, most)
    check(ours, expected)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Q6_K", "256 tokens"])
def test_warpgroups_add_as_warps_do(opened: Any, operands: Any, name: str) -> None:
    """The same sums in the same order, in the engine, by a kernel that shares little with it."""
    gemm, tile, tokens, most = {**SHORT, **MORE}[name]
    ours, _ = product(opened, operands, gemm, tile, tokens, most)
    others, _ = product(opened, operands, gemm, Tile(32, 64, 16, 32, stages=tile.stages), tokens, most)
    assert (ours == others).all()
