"""The many-kernel decode step as compiled for Hopper, whose launches may wait by themselves for the one before."""

from pathlib import Path

import pytest
from decode_steps import TOKENS, decoded, errors
from tiny_llama import SHAPES, TYPE, write

from tegrad.bench.gpu import opened
from tegrad.llm.reference import Reference

pytestmark = [pytest.mark.board, pytest.mark.long]


@pytest.mark.parametrize(("shape", "overlap"), [("plain", False), ("plain", True), ("gemma3", True), ("odd", True)])
def test_hoppers_builds_compute_the_step(
    shape: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TEGRAD_BOARD", "gh100"), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)
    path, tokens = write(tmp_path / "model.gguf", SHAPES[shape], TYPE.Q8_0), TOKENS[:4]
    with opened() as device:
        logits = decoded(path, device, tokens, overlap=overlap)
    assert errors(logits, Reference(path).logits(tokens))[1] < 0.03
