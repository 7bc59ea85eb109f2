"""The one-launch step with keys and values through the pipeline: right at every depth and every size of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cache_rows import fill, stored
from decode_steps import decode, errors
from hopper_board import hopper
from numpy.typing import NDArray
from small_tunings import LANES, TENSOR
from tiny_llama import SHAPES, TYPE, Shape, write

from tegrad.bench.gpu import opened
from tegrad.llm.cache import KvCache
from tegrad.llm.formats import Q6_K
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import MOST_POSITION_READS, NEAR_POSITIONS, PersistentPlan, Tuning
from tegrad.llm.plan import DecodePlan
from tegrad.llm.reference import Reference
from tegrad.llm.state import States
from tegrad.nv.replay import Recording

pytestmark = pytest.mark.board

GROUPED = Shape(dim=512, ffn=512, heads=8, kv_heads=2, vocab=301, layers=2)
"""Four query heads on each of two KV heads of 64."""
WIDE = replace(SHAPES["qwen3"], heads=6, kv_heads=2)
"""Three query heads on each of two KV heads of 128, normed."""
POSITIONS = 104
TEXT = [int(token) for token in np.random.default_rng(5).integers(1, 300, 90)]
"""Parts are of 32 positions at least: one, two and three of them, in tiles of 16 and their rests."""


@pytest.fixture(autouse=True)
def board(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper(monkeypatch)


def decoded(
    path: Path,
    tunings: Sequence[Tuning | None],
    first: int = 0,
    kept: Sequence[bytes] = (),
    q8: bool = False,
    ctas: int = 7,
) -> Iterator[NDArray[np.float32]]:
    """The logits (steps, vocab) of decode steps with each tuning, or by many kernels, from position `first` to the end
    of the text; `kept` is what the cache of each layer holds before: keys, values and their scales."""
    with opened() as device, PackedModel.load(path, "NV") as model:
        states = States(device)
        for tuning in tunings:
            with (
                KvCache(device, model.config, POSITIONS, q8=q8) as cache,
                DecodePlan(model, states, cache) if tuning is None
                else PersistentPlan(model, states, cache, tuning=tuning, ctas=ctas) as plan,
                Recording(device, plan.launches) as step,
            ):  # fmt: skip
                fill(device, cache, kept)
                places = range(first, len(TEXT))
                yield np.array([decode(device, plan, states, step, at, TEXT[at], POSITIONS) for at in places])
                assert tuning is None or plan.stuck() == []
        states.close()


@pytest.mark.parametrize(
    ("shape", "q8", "tunings"),
    [
        pytest.param(GROUPED, False, [TENSOR, replace(LANES, attention_loads=4)], id="f16"),
        pytest.param(GROUPED, False, [replace(TENSOR, epoch_flags=0)], id="counters", marks=pytest.mark.long),
        pytest.param(GROUPED, False, [replace(TENSOR, head_groups=2)], id="in head groups", marks=pytest.mark.long),
        pytest.param(GROUPED, False, [replace(TENSOR, head_groups=4)], id="in four groups", marks=pytest.mark.long),
        pytest.param(GROUPED, True, [TENSOR], id="q8_0"),
        pytest.param(WIDE, False, [TENSOR], id="heads of 128"),
    ],
)
def test_a_text_is_attended_as_by_the_reference(shape: Shape, q8: bool, tunings: list[Tuning], tmp_path: Path) -> None:
    """Weights are floats, so that little but the cache rounds; of q8_0, where all else is exact, as by many kernels."""
    path = write(tmp_path / "model.gguf", shape, TYPE.F16)
    exact, many, *found = Reference(path).logits(TEXT), *decoded(path, [None, *tunings], q8=q8)
    for got in found:
        largest, mean = errors(got, many)
        assert mean < 2e-4
        assert largest < 4e-3
        if not q8:
            assert errors(got, exact)[1] < 1.3e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "group", "q8"),
    [
        (32, 1, True), (32, 8, False), (80, 1, False), (80, 8, False),
        (96, 1, True), (96, 8, False), (256, 1, False), (256, 8, True),
    ],
)  # fmt: skip
def test_heads_of_any_width_and_group_are_attended_by_lanes(width: int, group: int, q8: bool, tmp_path: Path) -> None:
    """As by many kernels; weights are floats, so that little but the cache rounds."""
    heads = 16 if width == 80 else 8  # rows of the matrix after them are whole lines of it
    shape = replace(GROUPED, heads=heads, kv_heads=heads // group, head_dim=width)
    path = write(tmp_path / "model.gguf", shape, TYPE.F16)
    # Four loads of rows of 96 are a tile whose scales are whole pieces of 16 bytes; two are not.
    tuning = replace(LANES, attention_loads=4 if width == 96 else LANES.attention_loads)
    many, lanes = decoded(path, [None, tuning], len(TEXT) - 8, stored(shape, q8, POSITIONS), q8, ctas=17)
    largest, mean = errors(lanes, many)
    assert mean < (5e-4 if q8 else 1e-4)
    assert largest < 4e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "model.gguf", GROUPED, TYPE.Q6_K)


ROOMY = replace(TENSOR, bulk=0, pipeline_stages=16)
RINGS = {
    "small": replace(TENSOR, pipeline_stages=2, in_flight=8, evict_first=1),
    "three": replace(TENSOR, pipeline_stages=3, in_flight=2, spin_limit=5_000_000),
}
SHORT = [("three", 1, True)]
"""A ring, a seed, whether keys and values are q8_0: those that a text is attended with have none of the three."""


@pytest.mark.parametrize(
    ("ring", "seed", "q8"),
    [
        *SHORT,
        *(
            pytest.param(ring, seed, q8, marks=pytest.mark.long)
            for ring in RINGS
            for seed in (None, *range(1, 9))
            for q8 in (False, True)
            if (ring, seed, q8) not in SHORT
        ),
    ],
)
def test_bulk_copies_in_rings_of_any_size_bring_the_same_keys_and_values(
    model: Path, ring: str, seed: int | None, q8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As copies by lanes bring to a pipeline in which all has room, bit by bit."""
    kept, last = stored(GROUPED, q8, POSITIONS), len(TEXT) - 3
    [known] = decoded(model, [ROOMY], last, kept, q8)
    hopper(monkeypatch, seed)
    for found in decoded(model, [RINGS[ring]], last, kept, q8):
        np.testing.assert_array_equal(found, known)


def test_counters_publish_the_attention_that_packets_do(model: Path) -> None:
    """Of several parts: with counters the last-arriving one joins them, with packets whoever reads them."""
    kept, last = stored(GROUPED, True, POSITIONS), len(TEXT) - 2
    packets, counters = decoded(model, [ROOMY, replace(ROOMY, epoch_flags=0)], last, kept, q8=True)
    assert errors(counters, packets)[1] < 2e-5


FULL = Shape(dim=512, ffn=512, heads=32, kv_heads=8, head_dim=64, vocab=301, layers=1)
"""The heads of a model of 1B."""


@pytest.mark.parametrize(
    ("shape", "ctas", "first", "shares"),
    [
        pytest.param(GROUPED, 15, 470, 4, id="a part for each of four shares"),
        pytest.param(GROUPED, 7, 8190, 1, id="three parts of the positions", marks=pytest.mark.long),
        pytest.param(FULL, 132, 4084, 4, id="four shares in four parts", marks=pytest.mark.long),
        pytest.param(FULL, 132, 4094, 2, id="two shares in eight parts", marks=pytest.mark.long),
        pytest.param(FULL, 132, 16382, 1, id="sixteen parts of a thousand", marks=pytest.mark.long),
        pytest.param(WIDE, 33, 5462, 1, id="heads of 128 in sixteen parts", marks=pytest.mark.long),
        pytest.param(WIDE, 33, 4084, 3, id="heads of 128 in three shares", marks=pytest.mark.long),
    ],
)
def test_a_plan_for_many_positions_takes_keys_and_values_through_the_ring(
    shape: Shape, ctas: int, first: int, shares: int, tmp_path: Path
) -> None:
    """Next to the step of many kernels; weights are floats, so that little rounds."""
    path, positions = write(tmp_path / "model.gguf", shape, TYPE.F16), first + 10
    tuning = Tuning.suited([Q6_K], positions)
    with opened() as device, PackedModel.load(path, "NV") as model:
        states, found = States(device), []
        for kind in (DecodePlan, partial(PersistentPlan, ctas=ctas, tuning=tuning)):
            with (
                KvCache(device, model.config, positions) as cache,
                kind(model, states, cache) as plan,
                Recording(device, plan.launches) as step,
            ):
                fill(device, cache, stored(shape, False, positions))
                steps = [decode(device, plan, states, step, first + at, TEXT[at], positions) for at in range(5)]
                found.append(np.array(steps))
                if isinstance(plan, PersistentPlan):
                    assert (plan.kernel.tuning.attention_pipeline, plan.kernel.program.head_groups) == (2, shares)
        states.close()
    assert errors(found[1], found[0])[1] < 2e-5


def test_tunings_choose_the_ring_for_what_it_can_take() -> None:
    def forms(positions: int, q8: bool = False) -> tuple[int, int]:
        tuning = Tuning.suited([Q6_K], positions, q8=q8)
        return tuning.attention_pipeline, tuning.head_groups

    near = (0, Tuning().head_groups)
    assert [forms(0), forms(NEAR_POSITIONS), forms(NEAR_POSITIONS + 1, q8=True)] == [near] * 3, (
        "scales of q8_0 must be whole pieces"
    )
    assert [
        forms(NEAR_POSITIONS + 8, True)[0],
        forms(MOST_POSITION_READS // 4),
        forms(MOST_POSITION_READS // 4 + 8),
        forms(MOST_POSITION_READS),
    ] == [
        2,
        (2, 4),
        (2, 3),
        (2, 1),
    ]
    assert forms(4 * MOST_POSITION_READS) == (2, 1)
