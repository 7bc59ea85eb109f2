"""One token's attention over the cache, against float64, on the board."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_rig import PUBLISHED, Bench
from operands import Operands

from tegrad.llm.attention import Attention, Scoring
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.programs import compile_kernel
from tegrad.nv.cubin import read_ptx

pytestmark = pytest.mark.board


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_the_cache_is_not_read_as_memory_that_never_changes(variant: str) -> None:
    """Launches of a recording drop L1's global data only, which need not be where ld.global.nc keeps its lines."""
    section = read_ptx(compile_kernel("attention", "sm_87", **VARIANTS[variant].defines))
    assert section is not None
    assert "ld.global.L1::no_allocate" in section.ptx
    assert "ld.global.nc" not in section.ptx


def few(warps: int, **more: int) -> dict[str, int]:
    """Tuning with few warps, so that short sequences have several parts."""
    return {"ATTENTION_WARPS": warps, **more}


LLAMA = Attention(8, 2, 64, 2600, sms=18, sequences=3, floats=True, tuning=few(4))
"""Groups of 4 on three sequences, up to 3 parts a KV head."""
VARIANTS = {
    "llama": LLAMA,
    "qwen3": Attention(
        4, 2, 128, 1100, "halves", eps=0.5, cache="q8_0", sms=10, floats=True, tuning=few(2, ATTENTION_LOADS=4)
    ),
    "group1": Attention(3, 3, 64, 1100, "none", sms=18, floats=True, tuning=few(2, ATTENTION_LOADS=2)),
    "group8": Attention(16, 2, 64, 1100, "halves", 16, sms=18, floats=True, tuning=few(2, ATTENTION_LOADS=2)),
    "group16": Attention(16, 1, 64, 1100, sms=18, floats=True, tuning=few(2, ATTENTION_LOADS=2)),
    "window": Attention(
        4, 1, 256, 192, "halves", eps=0.5, sms=5, floats=True, sequences=2, tuning=few(2), turned=900,
        scoring=Scoring(window=100, scale=0.1),
    ),
    "window-q8_0-capped": Attention(
        4, 2, 64, 128, cache="q8_0", sms=6, floats=True, tuning=few(2, ATTENTION_LOADS=2), turned=900,
        scoring=Scoring(window=128, cap=2.0),
    ),
    "blocks": Attention(8, 2, 64, 1088, sms=18, sequences=3, floats=True, tuning=few(4), blocks=17),
    "blocks-q8_0": Attention(
        4, 2, 128, 640, "halves", eps=0.5, cache="q8_0", sms=10, floats=True, sequences=2, tuning=few(2), blocks=10
    ),
}  # fmt: skip
MORE = {
    "head16": Attention(4, 2, 16, 1100, sms=18, floats=True, sequences=2, tuning=few(2)),
    "head32-q8_0-group7": Attention(14, 2, 32, 1100, cache="q8_0", sms=18, floats=True, sequences=2, tuning=few(2)),
    "head80-group3": Attention(6, 2, 80, 1100, sms=18, floats=True, sequences=2, tuning=few(2)),
    "head96-q8_0": Attention(4, 2, 96, 1100, cache="q8_0", sms=18, floats=True, sequences=2, tuning=few(2)),
    "head256": Attention(4, 2, 256, 1100, sms=18, floats=True, sequences=2, tuning=few(2)),
    "group8": Attention(16, 2, 64, 1100, sms=18, floats=True),
    "group8-q8_0": Attention(16, 2, 64, 1100, cache="q8_0", sms=18, floats=True),
    "group9-q8_0": Attention(18, 2, 64, 1100, cache="q8_0", sms=18, floats=True, sequences=2),
    "group11": Attention(22, 2, 32, 1100, sms=44, floats=True),
    "group16, blocks": Attention(32, 2, 64, 320, sms=18, floats=True, sequences=2, tuning=few(2), blocks=5),
    "norms of rotated heads": Attention(8, 2, 64, 300, "halves", eps=0.5, norms="turned", sms=18, floats=True),
    "group16, whole norms": Attention(32, 2, 64, 1100, eps=0.5, norms="whole", sms=18, floats=True, sequences=2),
    "twelve-warps": Attention(8, 2, 64, 1100, sms=8, arch="sm_90", floats=True),
    "halves": Attention(4, 2, 64, 1100, sms=18, quantized=False, halves=True, sequences=2, tuning=few(2)),
    "blocks of heads of 16": Attention(16, 8, 16, 320, sms=18, floats=True, tuning=few(2), blocks=5),
    "blocks, shared by groups": Attention(8, 2, 64, 320, sms=18, floats=True, tuning=few(2, HEAD_GROUPS=2), blocks=5),
    "one-part": Attention(8, 2, 64, 1100, sms=1, floats=True),
    "seven-groups": Attention(14, 2, 64, 700, sms=42, floats=True, tuning={"HEAD_GROUPS": 7}),
}


def tile_rows(at: Attention) -> int:
    """Positions that a warp takes at a time."""
    return 32 // (1 << (at.head_dim // 8 - 1).bit_length()) * at.loads


def around_borders(at: Attention) -> list[int]:
    """Positions where a part, or a tile, begins to be full, is full, and has just one position too many."""
    tile = tile_rows(at)
    part = tile * at.warps
    borders = {0, 1, tile - 1, tile, tile + 1, part - 1, part, part + 1, 2 * part, 2 * part + 1, at.splits * part + 1}
    last = (at.turned or at.positions) - 1
    if (window := at.scoring.window) is not None:  # where it leaves positions behind, and where the ring begins anew
        around = (window, at.positions, at.positions + window, 2 * at.positions)
        borders |= {border + more for border in around for more in (-1, 0, 1)}
    return [*sorted(p for p in borders if p < last), last]


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_is_that_of_float64_around_every_border(opened: Any, operands: Operands, name: str) -> None:
    at = VARIANTS[name]
    bench = Bench(at, at.load(opened), operands)
    for position in around_borders(at):
        bench.run([position, None, position * 2 // 3][: at.sequences])


def test_another_part_begins_where_all_warps_of_the_ones_before_have_a_tile(opened: Any, operands: Operands) -> None:
    """A part that is taken alone leaves the workspace as it was; others leave one row each for each KV head."""
    at = replace(LLAMA, sequences=1)
    part, row = tile_rows(at) * at.warps, at.kv_groups * at.group * (at.head_dim + 2)
    bench = Bench(at, at.load(opened), operands)
    for position, parts in ((part, 0), (part + 1, 2), (2 * part, 2), (2 * part + 1, 3)):
        bench.copy("workspace", bench.given["workspace"])
        bench.run([position])
        left = operands.get(bench.buffers["workspace"], bench.given["workspace"].shape, np.float32)
        assert np.isfinite(left).sum() == parts * row


def test_more_parts_than_a_warp_has_lanes_are_joined(opened: Any, operands: Operands) -> None:
    """As where an H200 goes through the one KV head of a model."""
    at = Attention(2, 1, 64, 700, sms=70, floats=True, tuning=few(2, ATTENTION_LOADS=1))
    part = tile_rows(at) * at.warps
    assert at.splits > 2 * 32
    bench = Bench(at, at.load(opened), operands)
    for position in (32 * part, 33 * part, 66 * part, at.positions - 1):
        bench.run([position])


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_attention_of_other_sizes(opened: Any, operands: Operands, name: str) -> None:
    at = MORE[name]
    bench = Bench(at, at.load(opened), operands)
    for position in around_borders(at):
        bench.run([position, position // 3][: at.sequences])


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_attention_as_an_h200_cuts_it(opened: Any, operands: Operands, name: str) -> None:
    at = PUBLISHED[name]
    bench = Bench(at, at.load(opened), operands)
    for position in (0, 100, at.positions // 2, at.positions - 1):
        bench.run([position])


def test_more_heads_than_sms_share_an_sm() -> None:
    """A CTA of 12 warps takes an SM's registers: 256 of them would come in two waves, which those of 4 need not."""
    few, many = (Attention(32, 8, 64, 512, sms=132, sequences=count, arch="sm_90") for count in (2, 32))
    assert (few.warps, many.warps) == (12, 4)


@pytest.mark.parametrize("sms", [4, 8, 14, 16, 114, 132])
def test_one_wave_of_parts_on_any_number_of_sms(sms: int) -> None:
    """As many parts as SMs go around for, and one for each head where there are fewer SMs than heads."""
    for kv_heads, sequences in ((8, 1), (2, 1), (3, 1), (8, 4)):
        across, *heads = Attention(8 * kv_heads, kv_heads, 64, 512, sms=sms, sequences=sequences).grid
        work = kv_heads * sequences
        assert (heads, across >= 1) == ([kv_heads, sequences], True)
        assert across * work <= max(sms, work) < (across + 1) * work


def test_on_hopper_ctas_share_the_heads_of_a_short_cache() -> None:
    """Each reads all keys and values: of a long cache that would cost more than it saves."""
    short, long = (Attention(14, 2, 64, positions, sms=132, arch="sm_90") for positions in (4096, 16384))
    assert (short.head_groups, short.group, short.grid) == (7, 1, (132 // 14, 14, 1))
    assert (long.head_groups, long.group, long.grid) == (1, 7, (66, 2, 1))
    assert replace(short, arch="sm_87").head_groups == replace(short, sequences=2).head_groups == 1


def test_no_cta_has_more_than_eight_heads() -> None:
    """What one holds of each is in registers."""
    for heads, group in ((16, 8), (12, 6), (10, 5), (9, 3), (11, 1)):
        for sequences, arch in ((1, "sm_87"), (3, "sm_87"), (3, "sm_90")):
            assert Attention(2 * heads, 2, 64, 4096, sms=132, sequences=sequences, arch=arch).group == group


def test_one_sequence_on_hopper_has_more_rows_in_flight_and_fewer_warps() -> None:
    one, two = (Attention(32, 8, 64, 512, sms=132, sequences=count, arch="sm_90") for count in (1, 2))
    assert (one.warps, one.loads) == (8, 8)
    assert (two.warps, two.loads) == (12, 4)


def test_a_token_that_outweighs_all_before_it(opened: Any, operands: Operands) -> None:
    """Scores that grow along the sequence, by more than float32's exponents hold."""
    bench = Bench(LLAMA, LLAMA.load(opened), operands)
    ramp = np.linspace(0, 60, LLAMA.positions, dtype=np.float32)[:, None]
    for direction in (ramp, ramp[::-1]):
        keys = bench.case.qkv[0, :1] * direction
        bench.case.k.raw[:] = keys.astype(np.float16)
        bench.copy("k", bench.case.k.raw)
        bench.run([LLAMA.positions - 2, 1500, None])


@pytest.mark.parametrize(
    "settings",
    [
        {"rope": "spiral"},
        {"cache": "q4_0"},
        {"heads": 7},
        {"head_dim": 72},
        {"head_dim": 528},
        {"head_dim": 80, "cache": "q8_0"},
    ],
)
def test_what_the_kernel_lacks_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no attention kernel|blocks of 32"):
        Attention(**{"heads": 8, "kv_heads": 2, "head_dim": 64, "positions": 128, **settings})
