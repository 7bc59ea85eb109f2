"""The bench of prompts and batches: it measures what they launch, with tiles that a chip holds."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tegrad.bench import prefill as bench
from tegrad.bench.gpu import opened
from tegrad.bench.models import SHAPES, ModelNameError
from tegrad.bench.models import ModelShape as Published
from tegrad.cli.bench import app
from tegrad.llm.formats import F16, Q4_K, Q6_K, Q8_0
from tegrad.llm.gemm import (
    AnyTile,
    Gemm,
    SmallMTile,
    StreamTile,
    Tile,
    WgmmaTile,
    _deepest,
    pick_quickest,
    pick_tile,
    scratch_bound,
)
from tegrad.nv.replay import DEFAULT, Launch

TINY = Published("llama", 320, 512, 1024, 1, 8, 4, 64, 128, 0, eps=1e-5)


ROOM = {"sm_87": 164 << 10, "sm_90": 228 << 10}
"""Shared memory of an SM."""


def room(tile: AnyTile, gemm: Gemm) -> int:
    """Shared memory that a tile's blocks on an SM take, each with the hardware's KiB."""
    return tile.resident * (tile.shared_bytes(gemm) + 1024)


@pytest.mark.parametrize(("chip", "sms"), [("sm_87", 4), ("sm_87", 14), ("sm_87", 16), ("sm_90", 114), ("sm_90", 132)])
def test_every_tile_fits_an_sm_and_covers_its_product(chip: str, sms: int) -> None:
    for name, kind in (("1b", Q6_K), ("8b", F16), ("qwen3-0.6b", Q8_0), ("qwen2.5-0.5b", Q8_0)):
        for _, gemm in bench.gemms(SHAPES[name].config, kind, chip):
            for tokens in bench.TOKENS:
                tried = bench.candidates(gemm, tokens, chip, sms)
                assert len(tried) == len(set(tried)) > 0, (name, gemm, tokens)
                for tile in tried:
                    assert room(tile, gemm) <= ROOM[chip]
                    assert covers(tile, gemm, tokens)


@pytest.mark.parametrize("chip", ROOM)
@pytest.mark.parametrize(("spare", "blocks"), [(0, 2), (-1, 1)])
def test_two_blocks_of_an_sm_leave_the_hardware_a_kib_each(chip: str, spare: int, blocks: int) -> None:
    @dataclass(frozen=True)
    class Even:
        stages: int = 4
        resident: int = 1

        def shared_bytes(self, gemm: Gemm) -> int:
            return ROOM[chip] // 2 - 1024 - spare

    assert _deepest(SimpleNamespace(arch=chip), Gemm(Q6_K, 2048, 2048), Even()).resident == blocks


@pytest.mark.parametrize(("chip", "sms"), [*(("sm_87", n) for n in (4, 8, 14, 16)), ("sm_90", 114), ("sm_90", 132)])
def test_what_is_picked_fits_an_sm_and_the_room_for_partial_sums(chip: str, sms: int) -> None:
    device = SimpleNamespace(arch=chip, sm_count=sms)
    scratch, counters = scratch_bound(device)
    for name, shape in SHAPES.items():
        for kind in (Q6_K, F16):
            for role, gemm in bench.gemms(shape.config, kind, chip):
                for tokens in (1, 8, 17, 32, 33, 64, 65, 128, 256, 500, 512):
                    for pick in [pick_tile] if chip == "sm_87" else bench.PICKS.values():
                        tile = pick(device, gemm, tokens)
                        at = (name, role, tokens, tile)
                        assert room(tile, gemm) <= ROOM[chip], at
                        assert tile.scratch_bytes(gemm, tokens) <= scratch, at
                        assert 4 * tile.counters(gemm, tokens) <= counters, at
                        assert covers(tile, gemm, tokens), at


def covers(tile: AnyTile, gemm: Gemm, tokens: int) -> bool:
    """Whether the grid has a block for every token and row, and every block a stage of columns."""
    if isinstance(tile, StreamTile):
        return tokens <= 8 * tile.nb and gemm.columns % 2048 == 0 and tile.blocks > 0
    if isinstance(tile, SmallMTile):
        return tokens <= 8 * tile.nb and (tile.splits - 1) * tile.groups(gemm) < -(-gemm.columns // 256)
    steps, (x, y, z) = gemm.columns // 64 // tile.units, tile.grid(gemm, tokens)
    if isinstance(tile, WgmmaTile):
        across, tiles = tile.across(tokens), tile.tiles(gemm, tokens)
        rows = tiles // across * tile.bn // (2 if gemm.gated else 1)
        return across * tile.bm >= tokens and rows >= gemm.rows and (y, z) == (1, 1) and 0 < x <= tiles * steps
    rows = y * tile.bn // (2 if gemm.gated else 1)
    return x * tile.bm >= tokens and rows >= gemm.rows and z <= steps


def test_chunks_take_hoppers_instructions_where_there_are_any() -> None:
    gemm = Gemm(Q6_K, 2048, 2048)
    picked = (("sm_90", 512, WgmmaTile), ("sm_90", 33, WgmmaTile), ("sm_90", 32, StreamTile), ("sm_87", 512, Tile))
    for arch, tokens, kind in picked:
        assert type(pick_quickest(SimpleNamespace(arch=arch, sm_count=132), gemm, tokens)) is kind


@pytest.mark.parametrize(
    ("gemm", "tokens", "shape", "blocks", "resident"),
    [
        (Gemm(Q6_K, 3072, 2048), 64, (64, 64), 96, 2),  # 48 tiles in halves: too few SMs, and thirds were slower
        (Gemm(Q6_K, 2048, 2048), 128, (128, 64), 128, 2),  # 32 in quarters
        (Gemm(Q4_K, 5120, 4096), 256, (256, 128), 120, 1),  # 40 in thirds
        (Gemm(Q4_K, 6144, 3072), 64, (64, 64), 264, 2),  # the same of tests/llm/test_prefill_hopper.py's wide model
        (Gemm(Q4_K, 6144, 4096), 128, (128, 64), 264, 2),  # 96, of which no equal parts keep four fifths busy
        (Gemm(Q4_K, 14336, 4096, gated=True, half_out=True), 128, (128, 128), 0, 2),  # 224: one round of two to an SM
        (Gemm(Q4_K, 14336, 4096, gated=True, half_out=True), 256, (256, 128), 0, 1),  # two rounds of larger ones
        (Gemm(Q4_K, 896, 896), 128, (128, 64), 0, 2),  # 14 steps of columns: a part would have few
    ],
)
def test_a_short_chunks_tiles_are_those_that_an_h200_was_quickest_with(
    gemm: Gemm, tokens: int, shape: tuple[int, int], blocks: int, resident: int
) -> None:
    tile = pick_quickest(SimpleNamespace(arch="sm_90", sm_count=132), gemm, tokens)
    assert isinstance(tile, WgmmaTile)
    assert ((tile.bm, tile.bn), tile.blocks, tile.resident) == (shape, blocks, resident)


@pytest.mark.board
def test_a_product_whose_rows_lie_among_others_is_measured_with_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wrote beyond the results of a Q4_K_M's queries and keys, between which its values lie."""
    monkeypatch.setenv("TEGRAD_BOARD", "gh100")
    monkeypatch.setenv("DEV", "NV")
    monkeypatch.setattr("tegrad.bench.products.ROTATION_BYTES", 4 << 20)
    launches: list[Launch] = []
    monkeypatch.setattr(bench.PrefillBench, "added_us", lambda self, launch, *given: launches.append(launch(0)) or 1.0)
    gemm = Gemm(Q6_K, 1024, 2048, stride=1536)
    with opened() as device, bench.PrefillBench(device, DEFAULT, False) as measured:
        measured.row("tiny", "qkv", gemm, 1, pick_tile(device, gemm, 128), 128)
        assert launches[0].buffers[0].size >= 4 * 128 * 1536


@pytest.mark.board
def test_the_products_of_a_prompt_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    monkeypatch.setenv("DEV", "NV")
    monkeypatch.setenv("HCQDEV_WAIT_TIMEOUT_MS", "60000")
    monkeypatch.setattr("tegrad.bench.products.ROTATION_BYTES", 4 << 20)
    monkeypatch.setattr(bench, "LEAST_LAUNCHES", 1)
    monkeypatch.setattr("tegrad.bench.gpu.PASSES", 1)
    monkeypatch.setitem(SHAPES, "tiny", TINY)  # type: ignore[arg-type]
    command = ["prefill", "tiny-q6k", "--tokens", "8", "--attention", "0", "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    rows = json.loads(done.output.splitlines()[-1])
    assert [row["role"] for row in rows] == ["qkv", "output", "gate", "down", "logits", "attention"]
    assert all(row["us"] == pytest.approx(row["bytes"] / row["gb_s"] / 1e3) for row in rows)


@pytest.mark.board
@pytest.mark.parametrize(
    ("head_dim", "tokens", "form"),
    [(64, 8, "1g tile 128"), (96, 8, "4w tile 64"), (128, 2048, "2g tile 128"), (256, 2048, "1g tile 64")],
)
def test_attention_is_the_kernel_that_prompts_launch(
    head_dim: int, tokens: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is launched but not run, which takes a board long."""
    monkeypatch.setenv("TEGRAD_BOARD", "gh100")
    monkeypatch.setenv("DEV", "NV")
    monkeypatch.setattr("tegrad.bench.products.ROTATION_BYTES", 4 << 20)
    names = []

    def noted(self: bench.PrefillBench, launch: Callable[[int], Launch], *given: int) -> float:
        names.append(launch(0).program.name)
        return 1.0

    monkeypatch.setattr(bench.PrefillBench, "added_us", noted)
    with opened() as device, bench.PrefillBench(device, DEFAULT, False) as measured:
        config = replace(TINY, heads=768 // head_dim, kv_heads=1, head_dim=head_dim).config
        assert measured.attention("tiny", config, tokens, 0).form == f"{form} at 0"
    assert names == ["flash_wgmma" if "g" in form else "flash"]


def test_the_command_hands_every_option_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[bench.Asked] = []
    monkeypatch.setattr(bench, "show", given.append)
    (path := tmp_path / "model.gguf").touch()
    every = ["--tokens", "8", "--tokens", "32", "--attention", "0", "--attention", "64", "--sweep", "3"]
    every += ["--pick", "wgmma", "--dependency", "chain", "--overlap", "--file", str(path), "--json"]
    assert CliRunner().invoke(app, ["prefill", "1b-q6k", "8b-q4k", *every]).exit_code == 0
    assert given[0] == bench.Asked(["1b-q6k", "8b-q4k"], [8, 32], [0, 64], 3, "wgmma", "chain", True, path)
    assert CliRunner().invoke(app, ["prefill", "1b-q6k"]).exit_code == 0
    assert given[1] == bench.Asked(["1b-q6k"])


def test_a_command_without_a_model_or_with_a_wrong_one_is_refused() -> None:
    done = CliRunner().invoke(app, ["prefill"])
    assert done.exit_code == 2
    assert "name a model" in done.output
    assert isinstance(CliRunner().invoke(app, ["prefill", "1b-q7"]).exception, ModelNameError)
