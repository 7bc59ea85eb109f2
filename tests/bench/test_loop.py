"""The bench of the decode loop runs a model and reports each figure."""

import json
import sys
from pathlib import Path

import pytest

from tegrad.bench import loop

sys.path.append(str(Path(__file__).parents[1] / "llm"))

from tiny_llama import TYPE, Shape, write

pytestmark = pytest.mark.board

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=2, context=48)


def test_a_model_is_measured_at_every_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "model.gguf", SHAPE, TYPE.Q6_K, kinds={"attn_v": TYPE.Q4_K})
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    monkeypatch.setenv("DEV", "NV")
    monkeypatch.setattr(loop, "JOINED", 3)
    loop.main(["--file", str(path), "--depth", "0", "9", "--tokens", "4", "--repetitions", "1", "--json"])
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert [(row["depth"], row["launches"], row["boundary"]) for row in found] == [(0, 13, "chain"), (9, 13, "chain")]
    assert all(row["tok_s"] > 0 and row["submit_us"] > 0 and row["host_us"] > 0 for row in found)
    assert "tok/s" in lines[0]
