"""Whole small models in every packed format: steps of many launches and of one, prompts and batches, on the board."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from decode_steps import TOKENS, decoded, errors, read
from small_tunings import SMALL
from tiny_llama import TYPE, Shape, write

from tegrad.llm import formats
from tegrad.llm.batch import Batch
from tegrad.llm.cache import KvCache
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import BlockType
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.prefill import Prefill
from tegrad.llm.reference import Reference
from tegrad.llm.state import State, States
from tegrad.nv.replay import Recording

pytestmark = pytest.mark.board

NARROW = Shape(dim=576, ffn=640, heads=9, kv_heads=3, layers=1, vocab=301, tied=True)
"""Rows of 9 and 10 runs, which are no whole K-quant blocks; the embedding is the output, too."""
WIDE = Shape(dim=512, ffn=768, heads=8, kv_heads=4, layers=1, vocab=301, tied=True)
PROMPT = [(7 * at) % 300 for at in range(40)]


def one_launch(opened: Any, model: PackedModel, tokens: list[int]) -> np.ndarray:
    """Logits of steps in one launch each."""
    got, states = [], States(opened)
    with (
        KvCache(opened, model.config, 64) as cache,
        PersistentPlan(model, states, cache, tuning=SMALL, ctas=4) as plan,
        Recording(opened, plan.launches) as step,
    ):
        for position, token in enumerate(tokens):
            states.write(0, State(position=position, token=token, limit=64, active=1))
            step.wait(step.run())
            got.append(read(opened, plan.logits, model.config.vocab, np.float32))
    states.close()
    return np.array(got)


def prompted(opened: Any, model: PackedModel, tokens: list[int]) -> np.ndarray:
    """Logits after the tokens as a prompt, and those of a batch of one after them."""
    vocab, got = model.config.vocab, []
    with KvCache(opened, model.config, 64) as cache, Prefill(model, cache, sizes=(48,)) as prefill:
        prefill.run(tokens, 0)
        got.append(read(opened, prefill.logits, vocab, np.float32))
    with Batch(model, slots=1, positions=64, sizes=(48,)) as batch:
        member = batch.join(tokens, limit=len(tokens))
        while not member.finished:
            batch.step()
        got.append(read(opened, batch.logits, vocab, np.float32))
    return np.array(got)


def check(path: Path, opened: Any) -> None:
    """A step rounds activations to 8 bits, prompts and batches to halves: no format errs by more than that."""
    exact, after = Reference(path).logits(TOKENS), Reference(path).logits(PROMPT)[-1]
    found = {"many": decoded(path, opened, TOKENS)}
    with PackedModel.load(path, "NV") as model:
        if model.embedding.kind.booked:
            with pytest.raises(UnsupportedModelError, match="code books"):
                one_launch(opened, model, TOKENS)
        else:
            found["one"] = one_launch(opened, model, TOKENS)
        prompts = prompted(opened, model, PROMPT)
    for name, logits in found.items():
        largest, mean = errors(logits, exact)
        assert mean < 0.03, (name, mean)
        assert largest < 0.15, (name, largest)
    for logits in prompts:
        assert np.sqrt(((logits - after) ** 2).mean()) < 0.02 * after.std()


@pytest.mark.long
@pytest.mark.parametrize("kind", formats.PACKED, ids=lambda kind: kind.name)
def test_a_model_of_one_format_runs_every_way(opened: Any, tmp_path: Path, kind: BlockType) -> None:
    check(write(tmp_path / "model.gguf", WIDE, TYPE[kind.name]), opened)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [kind for kind in formats.PACKED if NARROW.dim % kind.elements == 0], ids=lambda kind: kind.name
)
def test_rows_of_no_whole_k_quant_block_run(opened: Any, tmp_path: Path, kind: BlockType) -> None:
    check(write(tmp_path / "model.gguf", NARROW, TYPE[kind.name]), opened)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_queries_keys_and_values_in_one_tensor_run_every_way(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Rotated by neighbours and by halves, without biases and with them."""
    apart = tiny_llama.weights

    def fused(shape: Shape, seed: int) -> dict[str, np.ndarray]:
        tensors = apart(shape, seed)
        for name in [name for name in tensors if ".attn_q." in name]:
            parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
        return tensors

    monkeypatch.setattr(tiny_llama, "weights", fused)
    check(write(tmp_path / "model.gguf", replace(WIDE, arch=arch), TYPE.Q8_0), opened)
