"""The bench of a decode step, on Hopper's board, with launches that wait by themselves for the one before."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from tiny_llama import TYPE, Shape, write

from tegrad.bench import step


@pytest.mark.board
@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--boundary", "chain-lean", "--overlap", "--depth", "40", "--q8")])
def test_a_step_and_its_kinds_of_launches_are_measured(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("TEGRAD_BOARD", "gh100"), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tegrad.bench.boundaries.PASSES", 1)
    path = write(tmp_path / "model.gguf", Shape(layers=1), TYPE.Q8_0)
    step.main([str(path), *flags, "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found) == ["step", "embed", "qkv", "attention", "output", "gate", "down", "logits", "sample"]
    assert found["step"] > 0
