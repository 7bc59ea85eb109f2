"""Prompts and batches as they are built for Hopper, on a board of that chip."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hopper_board import hopper
from tiny_llama import MIXED, TYPE, Shape, write

from tegrad.nv.replay import DEFAULT, Dependency

pytestmark = [pytest.mark.board, pytest.mark.long]

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=2)


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (replace(SHAPE, ffn=1024), 60),  # down's columns in halves; keys and values among others' rows
        (replace(SHAPE, ffn=1024), 120),
        (replace(SHAPE, ffn=1024), 250),
        # 96 tiles of queries, keys and values, dealt out unevenly over all SMs
        (Shape(dim=3072, ffn=1024, heads=32, kv_heads=8, head_dim=128, vocab=301, layers=1), 60),
    ],
    ids=["64 tokens", "128", "256", "uneven parts"],
)
def test_short_prompts_give_the_references_logits(
    shape: Shape, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the chunks that Hopper has, by the tiles that are picked for them; small models are a mixture of formats.

    Rounding to halves takes one of 250 tokens 0.0286 deviations away, by every kernel.
    """
    hopper(monkeypatch)
    from tegrad.bench.gpu import opened
    from tegrad.llm.cache import KvCache
    from tegrad.llm.packed import PackedModel
    from tegrad.llm.prefill import Prefill, chunk_sizes
    from tegrad.llm.reference import Reference

    mixed = MIXED if shape.dim == SHAPE.dim else {}
    path = write(tmp_path / "model.gguf", shape, TYPE.Q4_K, kinds=mixed)
    fed = np.random.default_rng(4).integers(0, shape.vocab, tokens).tolist()
    expected = Reference(path).logits(fed)
    sizes = chunk_sizes("sm_90", 256)
    with (
        opened() as device,
        PackedModel.load(path, "NV") as model,
        KvCache(device, model.config, 256, ahead=sizes[-1]) as cache,
        Prefill(model, cache, sizes=sizes) as prefill,
    ):
        found = prefill.score(fed)
        assert {size for size, *_ in prefill._recordings} == {next(size for size in sizes if size >= tokens)}
    assert np.abs(found - expected).max() < 0.03 * expected.std()


@pytest.mark.parametrize(
    ("overlap", "dependency", "pick", "early"),
    [(False, None, "mma", 32), (False, DEFAULT, "mma", 0), (True, None, "mma", 2), (True, None, "wgmma", 2)],
)
def test_hoppers_builds_compute_prompts_and_batches(
    overlap: bool, dependency: Dependency | None, pick: str, early: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper(monkeypatch)
    from tegrad.bench.gpu import opened
    from tegrad.llm.batch import Batch
    from tegrad.llm.gemm import PICKS
    from tegrad.llm.packed import PackedModel
    from tegrad.llm.reference import Reference
    from tegrad.llm.rows import floats

    path = write(tmp_path / "model.gguf", SHAPE, TYPE.Q6_K)
    tokens = np.random.default_rng(4).integers(0, SHAPE.vocab, 40).tolist()
    expected = Reference(path).logits(tokens)
    with (
        opened() as device,
        PackedModel.load(path, "NV") as model,
        Batch(
            model, slots=2, positions=48, sizes=(8, 40), pick=PICKS[pick], overlap=overlap, dependency=dependency
        ) as batch,
    ):
        assert [batch._rows.overlaps(width) for width in (early, early + 1)] == [1, 0]  # steps of up to so many
        for size in (40, 7):
            batch.prefill.run(tokens[:size])
            found = floats(device, batch.prefill.logits, SHAPE.vocab)
            assert np.abs(found - expected[size - 1]).max() < 0.02 * expected[size - 1].std()
        for others, least in ((1, 0.02), (0, 0.05)):  # alone its products are those of a conversation
            for at in range(others):
                batch.join(tokens[at : at + 5])
            member = batch.join(tokens, limit=len(tokens))
            while not member.finished:
                batch.step()
            row = floats(device, batch.logits, 2 * SHAPE.vocab).reshape(2, -1)[member.slot]
            assert np.abs(row - expected[-1]).max() < least * expected[-1].std()
            assert member.tokens == [int(expected[-1].argmax())]
            for other in batch.members:
                batch.leave(other)
