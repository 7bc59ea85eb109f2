"""The engine takes the kind of step that is quickest on its device, and it computes what the model does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_llama import SHAPES, TYPE, Shape, write

from tegrad.bench.gpu import opened
from tegrad.llm.engine import Engine
from tegrad.llm.gguf import Gguf
from tegrad.llm.persistent import NEAR_POSITIONS, PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.reference import Reference
from tegrad.llm.sampling import Settings
from tegrad.nv.replay import AHEAD

pytestmark = pytest.mark.board

LLAMA = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1, context=4 * NEAR_POSITIONS)
NARROW = replace(LLAMA, dim=320, heads=5, kv_heads=1)
GPT2 = Shape(arch="gpt2", dim=256, ffn=512, heads=4, kv_heads=4, vocab=301, layers=1, context=64)
WHOLE = replace(LLAMA, arch="olmo2", context=64)
SIZED = replace(SHAPES["gemma4"], layers=2, context=64)
SIZED_BLOCKS = replace(SIZED, vocab=301)
PROMPT = [5, 9, 77]


@pytest.mark.parametrize(
    ("board", "shape", "context", "kind"),
    [
        pytest.param("gh100", LLAMA, NEAR_POSITIONS, PersistentPlan, marks=pytest.mark.long),
        ("gh100", LLAMA, NEAR_POSITIONS + 8, PersistentPlan),
        ("gh100", NARROW, NEAR_POSITIONS, DecodePlan),
        ("gh100", GPT2, 64, DecodePlan),
        ("gh100", WHOLE, 64, PersistentPlan),
        ("gh100", SIZED, 64, DecodePlan),  # floats
        pytest.param("gh100", SIZED_BLOCKS, 64, PersistentPlan, marks=pytest.mark.long),
        ("agx-orin-64gb:41GiB", LLAMA, NEAR_POSITIONS, DecodePlan),
    ],
)
def test_the_quickest_step_is_taken(
    board: str, shape: Shape, context: int, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TEGRAD_BOARD", board), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)
    plain = TYPE.F16 if shape in (GPT2, WHOLE, SIZED) else TYPE.Q6_K
    path = write(tmp_path / "model.gguf", shape, TYPE.Q8_0 if shape is NARROW else plain)
    with opened(), Gguf.open(path) as file, Engine(file, context) as engine:
        assert type(engine.plan) is kind
        assert engine._overlapped is (AHEAD if board == "gh100" and kind is DecodePlan else None)
        logits = engine.feed(PROMPT)
        assert len(list(engine.generate([1], Settings(), 3))) == 3
    exact = Reference(path).logits(PROMPT)[-1]
    assert np.sqrt(((logits - exact) ** 2).mean()) < 0.03 * exact.std()


@pytest.mark.parametrize(
    ("shape", "q8"),
    [
        (replace(SIZED_BLOCKS, layers=3, local=(128, 2)), False),  # values are keys, and heads are alike
        (replace(SHAPES["gemma4 small"], layers=4, shared=1, local=(128, 1), context=600), True),
        (replace(SHAPES["gemma4 small"], layers=2, shared=0, layer_input=640), False),  # more than the feed-forward has
    ],
    ids=["alike", "small heads in rings", "wide inputs"],
)
def test_layers_of_different_sizes_are_run_in_one_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape, q8: bool
) -> None:
    for name, value in (("TEGRAD_BOARD", "gh100"), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)
    path = write(tmp_path / "model.gguf", shape, TYPE.Q8_0)
    with opened(), Gguf.open(path) as file, Engine(file, shape.context, q8=q8) as engine:
        assert engine.plan_name == "one launch"
        logits = np.array([engine.feed([token]) for token in PROMPT])
    exact = Reference(path).logits(PROMPT)
    assert np.sqrt(((logits - exact) ** 2).mean()) < 0.05 * exact.std()


@pytest.mark.parametrize(
    ("board", "sms"),
    [
        pytest.param("orin-nano-4gb:3GiB", 4, marks=pytest.mark.long),
        ("agx-orin-32gb:3GiB", 14),
        pytest.param("h100-pcie:3GiB", 114, marks=pytest.mark.long),
    ],
)
def test_a_step_in_one_launch_takes_the_sms_that_the_device_has(
    board: str, sms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TEGRAD_BOARD", board), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)
    path = write(tmp_path / "model.gguf", LLAMA, TYPE.Q6_K)
    with opened() as device, Gguf.open(path) as file, Engine(file, NEAR_POSITIONS, plan=PersistentPlan) as engine:
        assert (device.sm_count, engine.plan.kernel.grid) == (sms, (sms, 1, 1))
        logits = engine.feed(PROMPT)
    exact = Reference(path).logits(PROMPT)[-1]
    assert np.sqrt(((logits - exact) ** 2).mean()) < 0.03 * exact.std()


def test_a_short_text_has_a_step_of_its_own_until_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step for few positions loads keys and values itself; the tokens are those of the step for all of them."""
    for name, value in (("TEGRAD_BOARD", "gh100"), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)
    path = write(tmp_path / "model.gguf", LLAMA, TYPE.F16)
    with opened(), Gguf.open(path) as file:
        said, forms = [], []
        for reach in (None, 64):
            with Engine(file, 2 * NEAR_POSITIONS, reach=reach) as engine:
                for limit in (3, 5, NEAR_POSITIONS):  # the last one only might be too long
                    forms.append(engine.plan.kernel.tuning.attention_pipeline)
                    stream = engine.generate(PROMPT, Settings(), limit)
                    said.append([next(stream) for _ in range(3)])
                    stream.close()
                forms.append(engine.plan.kernel.tuning.attention_pipeline)
    assert forms == [2, 2, 2, 2, 0, 0, 0, 2]
    assert said[:3] == said[3:]


def test_a_short_text_that_grows_keeps_its_step_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TEGRAD_BOARD", "gh100"), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)
    path = write(tmp_path / "model.gguf", LLAMA, TYPE.F16)

    def full(*_: object) -> None:
        raise MemoryError("no room")

    with opened(), Gguf.open(path) as file, Engine(file, 2 * NEAR_POSITIONS, reach=64) as engine:
        first = engine.plan
        monkeypatch.setattr(PersistentPlan, "__init__", full)
        said = [token for token, _ in zip(engine.generate(PROMPT, Settings()), range(4), strict=False)]
        assert engine.plan is first
    assert len(said) == 4


def test_a_q8_0_cache_of_any_head_width_has_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's scales of heads of 96 are no whole pieces of 16 bytes, of which a ring's copies are."""
    for name, value in (("TEGRAD_BOARD", "gh100"), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)
    shape = Shape(dim=512, ffn=512, heads=8, kv_heads=2, head_dim=96, vocab=301, layers=1, context=2 * NEAR_POSITIONS)
    path = write(tmp_path / "model.gguf", shape, TYPE.Q8_0)
    with opened(), Gguf.open(path) as file, Engine(file, q8=True) as engine:
        assert engine.plan_name == "one launch"
        logits = engine.feed(PROMPT)
    exact = Reference(path).logits(PROMPT)[-1]
    assert np.sqrt(((logits - exact) ** 2).mean()) < 0.05 * exact.std()
