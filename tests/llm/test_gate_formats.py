"""Gate and up matrices in different formats, or with biases: two products instead of one that takes both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decode_steps import batch, decode, prompt, steps
from numpy.typing import NDArray
from small_tunings import SMALL
from tiny_llama import SHAPES, TYPE, Shape, write

from tegrad.llm.cache import KvCache
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.reference import Reference
from tegrad.llm.state import States
from tegrad.nv.replay import Recording

TOKENS = 30
PLAIN = Shape(dim=256, ffn=320, heads=4, kv_heads=2, vocab=101)
CASES: dict[str, tuple[Shape, TYPE, dict[str, TYPE]]] = {
    "blocks": (PLAIN, TYPE.Q8_0, {"ffn_up": TYPE.Q4_1}),
    "gate in floats": (PLAIN, TYPE.Q8_0, {"ffn_gate": TYPE.F16}),
    "up in floats, down too": (PLAIN, TYPE.Q8_0, {"ffn_up": TYPE.BF16, "ffn_down": TYPE.F16}),
    "norms after blocks": (SHAPES["gemma2"], TYPE.Q8_0, {"ffn_gate": TYPE.Q5_1}),
    "layer norms": (SHAPES["stablelm"], TYPE.Q8_0, {"ffn_up": TYPE.Q5_0}),
    "parallel": (SHAPES["cohere2"], TYPE.Q8_0, {"ffn_up": TYPE.Q4_0}),
    "biases": (replace(PLAIN, gate_bias=True), TYPE.Q8_0, {}),
    "biases and formats": (replace(PLAIN, gate_bias=True), TYPE.F16, {"ffn_up.weight": TYPE.Q8_0}),
}


OFTEN = ("blocks", "gate in floats", "norms after blocks", "biases")


@pytest.mark.board
@pytest.mark.parametrize("way", [steps, prompt, batch])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in CASES]
)
def test_gate_and_up_of_two_formats_or_with_biases_are_two_products(
    name: str, way: Callable[[Path, str, list[int]], NDArray[np.float32]], tmp_path: Path, device: str
) -> None:
    shape, kind, kinds = CASES[name]
    path = write(tmp_path / "model.gguf", shape, kind, kinds=kinds)
    tokens = np.random.default_rng(5).integers(0, shape.vocab, TOKENS).tolist()
    expected = Reference(path).logits(tokens)
    found = way(path, device, tokens)
    off = (found - expected[-len(found) :]) / expected.std()
    assert np.sqrt((off**2).mean()) < (0.05 if way is steps else 5e-3)


@pytest.mark.board
@pytest.mark.parametrize("name", ["blocks", "norms after blocks", "parallel"])
def test_one_launch_keeps_up_rows_for_a_stage_of_gate(name: str, tmp_path: Path, device: str) -> None:
    shape, kind, kinds = CASES[name]
    path = write(tmp_path / "model.gguf", shape, kind, kinds=kinds)
    tokens = np.random.default_rng(5).integers(0, shape.vocab, 12).tolist()
    expected, found = Reference(path).logits(tokens), []
    with PackedModel.load(path, "NV") as model, KvCache(model.device, model.config, 64) as cache:
        states = States(model.device)
        plan = PersistentPlan(model, states, cache, tuning=SMALL, ctas=6)
        with plan, Recording(model.device, plan.launches) as step:
            assert plan.kernel.defines["UPS"] > 0
            found = [decode(model.device, plan, states, step, at, token, 64) for at, token in enumerate(tokens)]
        states.close()
    off = (np.array(found) - expected) / expected.std()
    assert np.sqrt((off**2).mean()) < 0.05


@pytest.mark.board
def test_one_launch_refuses_floats_beside_blocks(tmp_path: Path, device: str) -> None:
    shape, kind, kinds = CASES["gate in floats"]
    path = write(tmp_path / "model.gguf", shape, kind, kinds=kinds)
    with PackedModel.load(path, "NV") as model, KvCache(model.device, model.config, 64) as cache:
        states = States(model.device)
        with pytest.raises(UnsupportedModelError, match=r"multiply one vector, some in blocks and some not"):
            PersistentPlan(model, states, cache)
        states.close()
