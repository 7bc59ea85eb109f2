"""The engine takes the kind of step that is quickest on its device, and it computes what the model does."""

from pathlib import Path

import numpy as np
import pytest
from tiny_llama import TYPE, Shape, write

from tegrad.bench.boundaries import opened
from tegrad.llm.engine import Engine
from tegrad.llm.gguf import Gguf
from tegrad.llm.persistent import NEAR, PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.reference import Reference
from tegrad.llm.sampling import Settings
from tegrad.nv.replay import AHEAD

pytestmark = pytest.mark.board

LLAMA = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1, context=4 * NEAR)
GPT2 = Shape(arch="gpt2", dim=256, ffn=512, heads=4, kv_heads=4, vocab=301, layers=1, context=64)
PROMPT = [5, 9, 77]


@pytest.mark.parametrize(
    ("board", "shape", "context", "kind"),
    [
        ("gh100", LLAMA, NEAR, PersistentPlan),
        ("gh100", LLAMA, NEAR + 8, PersistentPlan),
        ("gh100", GPT2, 64, DecodePlan),
        ("agx-orin-64gb:41GiB", LLAMA, NEAR, DecodePlan),
    ],
)
def test_the_quickest_step_is_taken(
    board: str, shape: Shape, context: int, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TEGRAD_BOARD", board), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)
    path = write(tmp_path / "model.gguf", shape, TYPE.F16 if shape is GPT2 else TYPE.Q6_K)
    with opened(), Gguf.open(path) as file, Engine(file, context) as engine:
        assert type(engine.plan) is kind
        assert engine._early is (AHEAD if board == "gh100" and kind is DecodePlan else None)
        logits = engine.feed(PROMPT)
        assert len(list(engine.generate([1], Settings(), 3))) == 3
    exact = Reference(path).logits(PROMPT)[-1]
    assert np.sqrt(((logits - exact) ** 2).mean()) < 0.03 * exact.std()
