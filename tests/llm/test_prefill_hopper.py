"""Prompts and batches as they are built for Hopper, on a board of that chip."""

from pathlib import Path

import numpy as np
import pytest
from tiny_llama import TYPE, Shape, write

from tegrad.nv.replay import DEFAULT, Dependency

pytestmark = [pytest.mark.board, pytest.mark.long]

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=2)


@pytest.mark.parametrize(
    ("overlap", "dependency", "pick", "early"),
    [(False, None, "mma", 32), (False, DEFAULT, "mma", 0), (True, None, "mma", 2), (True, None, "wgmma", 2)],
)
def test_hoppers_builds_compute_prompts_and_batches(
    overlap: bool, dependency: Dependency | None, pick: str, early: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "gh100")
    monkeypatch.setenv("DEV", "NV")
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
