"""The bench of the decode loop runs a model and reports each figure."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tegrad.bench import steps
from tegrad.cli.bench import app

sys.path.append(str(Path(__file__).parents[1] / "llm"))

from tiny_llama import TYPE, Shape, write

pytestmark = pytest.mark.board

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=2, context=48)


SHORT = ("--tokens", "4", "--repetitions", "1", "--json")


@pytest.mark.parametrize(("plan", "count"), [("many", 13), pytest.param("one", 1, marks=pytest.mark.long)])
def test_a_model_is_measured_at_a_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, count: int) -> None:
    path = write(tmp_path / "model.gguf", SHAPE, TYPE.Q6_K, kinds={"attn_v": TYPE.Q4_K})
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    monkeypatch.setenv("DEV", "NV")
    monkeypatch.setattr(steps, "JOINED_STEPS", 3)
    done = CliRunner().invoke(
        app, ["loop", "--file", str(path), "--depth", "9", "--plan", plan, *SHORT], catch_exceptions=False
    )
    lines = done.stdout.splitlines()
    (row,) = json.loads(lines[-1])
    assert (row["depth"], row["plan"], row["launches"], row["dependency"]) == (9, plan, count, "chain")
    assert min(row["tok_s"], row["submit_us"], row["host_us"]) > 0
    assert "tok/s" in lines[0]
