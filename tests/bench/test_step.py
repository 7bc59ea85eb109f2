"""The bench of a decode step, on Hopper's board, with launches that wait by themselves for the one before."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from tiny_llama import TYPE, Shape, write
from typer.testing import CliRunner

from tegrad.cli.bench import app


@pytest.mark.board
@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--dependency", "chain-lean", "--overlap", "--depth", "40", "--q8")])
def test_a_step_and_its_kinds_of_launches_are_measured(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TEGRAD_BOARD", "gh100"), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tegrad.bench.gpu.PASSES", 1)
    path = write(tmp_path / "model.gguf", Shape(layers=1), TYPE.Q8_0)
    done = CliRunner().invoke(app, ["step", str(path), *flags, "--json"], catch_exceptions=False)
    found = json.loads(done.output.splitlines()[-1])
    assert list(found) == ["step", "embed", "qkv", "attention", "output", "gate", "down", "logits", "sample"]
    assert found["step"] > 0
