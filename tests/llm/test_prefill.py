"""A prompt in chunks gives the logits of the reference, on the board."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from tiny_llama import TYPE, Shape

from tegrad.llm.cache import KvCache
from tegrad.llm.packed import PackedModel
from tegrad.llm.prefill import Prefill, split
from tegrad.llm.reference import Reference
from tegrad.llm.rows import floats

pytestmark = pytest.mark.board

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=2)


def test_a_prompt_is_split_into_few_chunks() -> None:
    assert list(split(700, (32, 128, 512))) == [512, 512]
    assert list(split(560, (32, 128, 512))) == [512, 128]
    assert list(split(33, (32, 128, 512))) == [128]
    assert list(split(1, (32, 128, 512))) == [32]


def test_chunks_of_a_prompt_give_the_references_logits(device: str, tmp_path: Path) -> None:
    """11 + 21 tokens in chunks of 16: a full one and padded ones, of which the later see the earlier."""
    path = tiny_llama.write(tmp_path / "model.gguf", SHAPE, TYPE.Q6_K, kinds={"attn_v": TYPE.Q4_K})
    tokens = np.random.default_rng(1).integers(0, SHAPE.vocab, 32)
    expected = Reference(path).logits(tokens.tolist())
    found = []
    with (
        PackedModel.load(path, device) as model,
        KvCache(model.device, model.config, 48, slots=2) as cache,
        Prefill(model, cache, sizes=(16,)) as prefill,
    ):
        for first, last in ((0, 11), (11, 32)):
            prefill.run(tokens[first:last].tolist(), first, slot=1)
            found.append((floats(model.device, prefill.logits, SHAPE.vocab), expected[last - 1]))
    for ours, theirs in found:
        assert np.abs(ours - theirs).max() < 0.02 * theirs.std()
