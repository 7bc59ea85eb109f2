"""BF16 weights that do not fit a product of halves are found at the load, and prompts run all the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from operands import Operands
from tiny_llama import TYPE, Shape, write

from tegrad.llm import packing
from tegrad.llm.batch import Batch
from tegrad.llm.engine import Engine
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.gguf import BF16, F16, Gguf
from tegrad.llm.packed import LargeWeights
from tegrad.llm.reference import Reference

pytestmark = pytest.mark.board

BELOW, LIMIT, INFINITE, NAN = 0x437F, 0x4380, 0x7F80, 0x7FC0
"""Bits of 255, of 256, and of what is no number."""
SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1, context=64)
PROMPT = [(7 * at) % 300 for at in range(30)]


@pytest.mark.parametrize("count", [1, 9])
def test_a_single_large_weight_is_found_wherever_it_lies(opened: Any, operands: Operands, count: int) -> None:
    rng, size = np.random.default_rng(count), count * packing.SEGMENT
    small = (rng.integers(0, BELOW + 1, size) | rng.integers(0, 2, size) << 15).astype(np.uint16)
    small[:2] = BELOW, BELOW | 0x8000
    flag = operands.zeros(1, np.int32)
    for at, bits in ((None, 0), (0, LIMIT), (size - 1, LIMIT | 0x8000), (size // 2 + 9, INFINITE), (size - 2, NAN)):
        weights = small.copy()
        if at is not None:
            weights[at] = bits
        look, matrix = LargeWeights(opened, flag), operands.put(weights)
        look(F16, matrix, count)
        assert not look.any()
        look(BF16, matrix, count)
        assert look.any() == (at is not None)


@pytest.mark.parametrize(("largest", "stepped"), [(255.0, False), (-320.0, True)])
def test_prompts_of_models_with_large_weights_are_fed_a_step_each(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, largest: float, stepped: bool
) -> None:
    sound = tiny_llama.weights

    def weights(*given: Any) -> dict[str, np.ndarray]:
        made = sound(*given)
        made["blk.0.ffn_down.weight"][5, 7] = largest
        return made

    monkeypatch.setattr(tiny_llama, "weights", weights)
    path = write(tmp_path / "model.gguf", SHAPE, TYPE.BF16)
    expected = Reference(path).logits(PROMPT)
    with Gguf.open(path) as file, Engine(file, device=device, short=8, chunks=(32,)) as engine:
        logits = engine.feed_all(PROMPT)
        assert np.abs(logits - expected).max() < 0.05 * expected.std()
        assert engine._stepped == stepped
        if stepped:
            with pytest.raises(UnsupportedModelError, match="weights of 256 or more"):
                Batch(engine.model, slots=1, positions=48, sizes=(32,))
