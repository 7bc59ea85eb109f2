"""Weights and activations that do not fit products of halves are found, and prompts are right all the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from gguf import GGMLQuantizationType
from operands import Operands
from tiny_llama import TYPE, Shape, write

from tegrad.llm import formats, packing, quantize
from tegrad.llm.batch import Batch
from tegrad.llm.engine import Engine
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import BF16, F16, Q2_K, BlockType
from tegrad.llm.gguf import Gguf
from tegrad.llm.packed import PackedModel, arranging
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.programs import Programs
from tegrad.llm.reference import Reference
from tegrad.llm.sampling import Settings

pytestmark = pytest.mark.board

BELOW, LIMIT, INFINITE, NAN = 0x437F, 0x4380, 0x7F80, 0x7FC0
"""Bits of 255, of 256, and of what is no number."""
SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1, context=64)
PROMPT = [(7 * at) % 300 for at in range(30)]


def look(device: Any, kind: BlockType, packed: Any, segments: int, flag: Any) -> bool:
    """Whether a large weight is found among packed segments."""
    device.upload(flag, bytes(4))
    launches = arranging(Programs(device), kind, packed, segments, flag)
    for one in launches[kind.layout is not None :]:  # they are in our order
        one.program(*one.buffers, global_size=one.grid, local_size=one.block, vals=one.values)
    return any(device.download(flag, 4))


@pytest.mark.parametrize("count", [1, 9])
def test_a_single_large_weight_is_found_wherever_it_lies(opened: Any, operands: Operands, count: int) -> None:
    rng, size = np.random.default_rng(count), count * formats.SEGMENT
    small = (rng.integers(0, BELOW + 1, size) | rng.integers(0, 2, size) << 15).astype(np.uint16)
    small[:2] = BELOW, BELOW | 0x8000
    flag = operands.zeros(1, np.int32)
    for at, bits in ((None, 0), (0, LIMIT), (size - 1, LIMIT | 0x8000), (size // 2 + 9, INFINITE), (size - 2, NAN)):
        weights = small.copy()
        if at is not None:
            weights[at] = bits
        matrix = operands.put(weights)
        assert not look(opened, F16, matrix, count, flag)
        assert look(opened, BF16, matrix, count, flag) == (at is not None)


def blocks(kind: BlockType, largest: float) -> np.ndarray:
    """A packed matrix of small weights but for one block, of which the largest is so large."""
    rows, columns = 3, 2048
    values = np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)
    values[1, 512:768] *= largest / np.abs(values[1, 512:768]).max()
    raw = quantize.quantize(values, GGMLQuantizationType[kind.name])
    return packing.pack(kind, raw.view(np.uint8), rows, columns)


@pytest.mark.parametrize("kind", formats.PACKED, ids=lambda kind: kind.name)
def test_blocks_whose_scales_allow_a_large_weight_are_found(opened: Any, operands: Operands, kind: BlockType) -> None:
    """By their scales: beyond the limit always, and never far below it. Scales that are no numbers are, too."""
    flag = operands.zeros(1, np.int32)
    # Few levels, or few choices for several weights, miss 262 by more than the limit's distance.
    beside = 300.0 if kind is Q2_K or kind.booked else 262.0
    for largest in (1.0, 200.0, beside, -beside, 3000.0, np.nan, np.inf):
        packed = blocks(kind, largest if np.isfinite(largest) else 1.0)
        if not np.isfinite(largest):  # the first d of the second row
            raw = packing.unpack(kind, packed, 3, 2048).copy()
            kind.layout.spread.scale(raw[1:, : kind.size], np.array([[largest]]))
            packed = packing.pack(kind, raw, 3, 2048)
        else:
            weights = packing.dequantize_packed(kind, packed, 3, 2048)
            assert (np.abs(weights).max() >= 255.9) == (abs(largest) > 256)
        assert look(opened, kind, operands.put(packed), 3, flag) == (not abs(largest) < 255), largest


@pytest.mark.parametrize(
    ("kind", "largest", "stepped"),
    [
        (TYPE.BF16, 255.0, False),
        (TYPE.BF16, -320.0, True),
        (TYPE.Q8_0, 240.0, False),
        (TYPE.Q8_0, -320.0, True),
        pytest.param(TYPE.Q4_0, 320.0, True, marks=pytest.mark.long),
        (TYPE.Q4_K, 320.0, True),
    ],
)
def test_prompts_of_models_with_large_weights_are_fed_a_step_each(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, kind: TYPE, largest: float, stepped: bool
) -> None:
    sound = tiny_llama.weights

    def weights(*given: Any) -> dict[str, np.ndarray]:
        made = sound(*given)
        made["blk.0.ffn_down.weight"][5, 7] = largest
        return made

    monkeypatch.setattr(tiny_llama, "weights", weights)
    path = write(tmp_path / "model.gguf", SHAPE, kind)
    expected = Reference(path).logits(PROMPT)
    with Gguf.open(path) as file, Engine(file, device=device, short=8, chunks=(32,)) as engine:
        logits = engine.feed_all(PROMPT)
        # A step's bytes for activations err by what the large weight makes of it.
        assert np.sqrt(((logits - expected) ** 2).mean()) < (0.1 if stepped else 0.02) * expected.std()
        engine.reset()
        engine.feed(PROMPT)
        assert engine._stepped == stepped
        if stepped:
            with pytest.raises(UnsupportedModelError, match="weights of 255 or more"):
                Batch(engine.model, slots=1, positions=48, sizes=(32,))


def with_large_values(monkeypatch: pytest.MonkeyPatch, path: Path, layers: int, layer: int) -> Path:
    """A model of which gate times up passes what halves hold for some tokens, and its product with down is moderate."""
    sound = tiny_llama.weights

    def weights(*given: Any) -> dict[str, np.ndarray]:
        made = sound(*given)
        for name in ("ffn_gate", "ffn_up"):
            made[f"blk.{layer}.{name}.weight"][5] *= 600
        made[f"blk.{layer}.ffn_down.weight"][:, 5] *= 3e-5
        return made

    with monkeypatch.context() as patch:
        patch.setattr(tiny_llama, "weights", weights)
        return write(path, replace(SHAPE, layers=layers), TYPE.BF16)


@pytest.mark.parametrize("layer", [0, 1], ids=["first layer", "last layer"])
def test_prompts_whose_values_do_not_fit_halves_are_fed_a_step_each(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """Of the last layer only those count that have logits. The next prompt goes in chunks as ever."""
    path = with_large_values(monkeypatch, tmp_path / "model.gguf", 2, layer)
    expected = Reference(path).logits(PROMPT)
    with Gguf.open(path) as file, Engine(file, device=device, short=8, chunks=(32,)) as engine:
        assert not engine._stepped
        far = np.abs(engine._prompts().score(PROMPT) - expected)
        assert engine._prompts().lost
        assert not far.max() < expected.std()
        assert np.abs(engine.feed_all(PROMPT) - expected).max() < 0.1 * expected.std()
        engine.reset()
        assert np.abs(engine.feed(PROMPT) - expected[-1]).max() < 0.1 * expected.std()
        assert engine._prompts().lost == (layer == 0)
        assert engine.tokens == PROMPT
        assert not engine._stepped


SETTINGS = {"greedy": Settings(), "penalties": Settings(0.9, top_k=20, repeat=1.3)}


@pytest.mark.parametrize("plan", [DecodePlan, PersistentPlan])
@pytest.mark.parametrize("settings", list(SETTINGS.values()), ids=list(SETTINGS))
def test_answers_to_such_prompts_are_those_of_steps(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, plan: Any, settings: Settings
) -> None:
    path = with_large_values(monkeypatch, tmp_path / "model.gguf", 2, 0)
    found = []
    with Gguf.open(path) as file:
        for short in (len(PROMPT), 8):
            with Engine(file, device=device, short=short, chunks=(32,), plan=plan) as engine:
                first = list(engine.generate(PROMPT[:20], settings, 6, seed=1))
                found.append((first, list(engine.generate(PROMPT[5:], settings, 6, seed=2))))
                assert (engine._prefill is None) == (short != 8)
    assert found[0] == found[1]


def test_a_batch_says_that_a_sequences_values_do_not_fit(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_large_values(monkeypatch, tmp_path / "model.gguf", 2, 0)
    monkeypatch.setattr("tegrad.llm.batch.MASK_PATIENCE_S", 0.05)  # no sequence waits for a mask, however long it takes
    with PackedModel.load(path, device) as model, Batch(model, slots=1, positions=48, sizes=(32,)) as batch:
        member = batch.join(PROMPT)
        assert batch.step() == []
        assert "pass 65504, which batches do not hold (run the sequence alone)" in str(member.error)
