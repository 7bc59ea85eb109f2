"""The one-launch step as built for Hopper: its ring is filled by bulk copies, which mbarriers count."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_steps import TOKENS, decoded, errors, read
from hopper_board import hopper
from small_tunings import SMALL
from tiny_llama import SHAPES, TYPE, write

from tegrad.bench.gpu import opened
from tegrad.llm.cache import KvCache
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan, Tuning
from tegrad.llm.reference import Reference
from tegrad.llm.state import State, States
from tegrad.nv.replay import Recording

pytestmark = pytest.mark.board

RUN = TOKENS[:4]
CTAS = 7
TIGHT = replace(SMALL, pipeline_stages=2, in_flight=8, evict_first=1)
"""Two slots, and as many tiles on their way."""


def logits(path: Path, tunings: Sequence[Tuning]) -> list[np.ndarray]:
    """The logits (len(RUN), vocab) of decode steps with each tuning."""
    found = []
    with opened() as device, PackedModel.load(path, "NV") as model, KvCache(device, model.config, 64) as cache:
        states = States(device)
        for tuning in tunings:
            with (
                PersistentPlan(model, states, cache, tuning=tuning, ctas=CTAS) as plan,
                Recording(device, plan.launches) as step,
            ):
                assert tiles(plan) > 8 * tuning.pipeline_stages, "the pipeline does not come round often enough"
                found.append(np.array([one(device, plan, states, step, at) for at in range(len(RUN))]))
                assert plan.stuck() == []
        states.close()
    return found


def one(device: Any, plan: PersistentPlan, states: States, step: Recording, position: int) -> np.ndarray:
    states.write(0, State(position=position, token=RUN[position], limit=64, active=1))
    step.wait(step.run())
    return read(device, plan.logits, plan.config.vocab, np.float32)


def tiles(plan: PersistentPlan) -> int:
    """The fewest tiles of a step that pass through a CTA's ring."""
    count = [0] * plan.kernel.program.ctas
    for stage in plan.kernel.program.stages:
        for ins in stage.instructions:
            count[ins.cta] += sum(-(-run.segments // plan.kernel.tuning.consumers) for run in ins.runs)
    return min(count)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "model.gguf", SHAPES["plain"], TYPE.Q6_K)


@pytest.fixture(scope="module")
def by_lanes(path: Path) -> np.ndarray:
    """What the same kernel computes with 16-byte copies by lanes."""
    with pytest.MonkeyPatch.context() as patch:
        hopper(patch)
        [found] = logits(path, [replace(SMALL, bulk=0)])
    assert errors(found, Reference(path).logits(RUN))[1] < 0.03
    return found


@pytest.mark.parametrize("seed", [None, 1, 2, *(pytest.param(s, marks=pytest.mark.long) for s in range(3, 9))])
def test_bulk_copies_bring_the_step_the_same_weights(
    path: Path, by_lanes: np.ndarray, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper(monkeypatch, seed)
    for found in logits(path, [TIGHT]):
        np.testing.assert_array_equal(found, by_lanes)


@pytest.mark.long
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_rings_of_any_size_hold_the_same_weights(
    path: Path, by_lanes: np.ndarray, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper(monkeypatch, seed)
    tunings = [
        replace(SMALL, pipeline_stages=2, in_flight=1),
        replace(SMALL, pipeline_stages=2, in_flight=2),
        replace(SMALL, pipeline_stages=3, in_flight=1),
        replace(SMALL, pipeline_stages=3, in_flight=2),
        replace(SMALL, pipeline_stages=3, in_flight=3),
        replace(SMALL, pipeline_stages=5, in_flight=4),
        replace(SMALL, pipeline_stages=4, in_flight=3, epoch_flags=0),
        replace(TIGHT, spin_limit=5_000_000),
    ]
    for tuning, found in zip(tunings, logits(path, tunings), strict=True):
        np.testing.assert_array_equal(found, by_lanes, err_msg=str(tuning))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (TYPE.Q6_K, "plain"),
        (TYPE.Q8_0, "plain"),
        (TYPE.F16, "qwen2"),
        (TYPE.Q4_K, "plain"),
        (TYPE.Q4_K, "phi3"),
        (TYPE.Q8_0, "smollm3"),
        (TYPE.Q8_0, "mistral3"),  # whose queries grow from the third token on
        (TYPE.Q6_K, "granite"),
        (TYPE.Q4_K, "gemma3"),
        (TYPE.Q6_K, "gemma2"),
        (TYPE.Q8_0, "olmo3"),
        (TYPE.Q4_K, "lfm2"),
        (TYPE.F16, "qwen35"),
    ],
)
def test_as_many_warps_and_as_much_shared_memory_as_on_an_h200(
    kind: TYPE, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper(monkeypatch)
    extra = {**SHAPES[name].extra, "mistral3.rope.scaling.original_context_length": 2}
    shape = replace(SHAPES[name], bias=False, extra=extra, **({"head_dim": 64} if name == "mistral3" else {}))
    path = write(tmp_path / "model.gguf", shape, kind)
    with opened() as device, PackedModel.load(path, "NV") as model, KvCache(device, model.config, 64) as cache:
        states = States(device)
        tuning = Tuning.suited(matrix.kind for matrix in [model.embedding])
        with (
            PersistentPlan(model, states, cache, tuning=tuning, ctas=8) as plan,
            Recording(device, plan.launches) as step,
        ):
            found = np.array([one(device, plan, states, step, at) for at in range(len(RUN))])
        many = decoded(path, device, RUN)
        states.close()
    exact = Reference(path).logits(RUN)
    assert errors(found, exact)[1] < 0.03
    assert errors(found, many)[1] < 0.03
