"""tinygrad's own path is measured with a repair and without, each in a process whose variables say so."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tegrad.bench import graph
from tegrad.bench.record import RecordError

sys.path.append(str(Path(__file__).parents[1] / "llm"))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environments of the processes that would have been started."""
    seen: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        seen.append(env)
        said = {"tok_s": [3.0 if graph.SWITCH in env else 60.0] * 3}
        return subprocess.CompletedProcess(command, 0, "noise\n" + json.dumps(said), None)

    monkeypatch.setattr(subprocess, "run", run)
    for name in (*graph.DROPPED, "PARALLEL"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_the_repair_is_switched_off_for_one_side_only(
    processes: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(graph.SWITCH, "matvec")
    monkeypatch.setenv("BEAM", "4")
    with_it, without = graph.repaired(Path("/models/some.gguf"))
    assert (with_it.median, without.median) == (60.0, 3.0)
    assert [env.get(graph.SWITCH) for env in processes] == [None, "matvec"]
    assert not any("BEAM" in env for env in processes)
    assert without.command == "TEGRAD_REPAIRS_OFF=matvec python -m tegrad.bench.graph some.gguf"


def test_a_side_that_does_not_end_or_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(command: list[str], *, timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(RecordError, match=r"graph some.gguf` did not end within"):
        graph.repaired(Path("some.gguf"))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "why"))
    with pytest.raises(RecordError, match=r"ended with 1: why"):
        graph.repaired(Path("some.gguf"))


@pytest.mark.board
@pytest.mark.long
def test_a_process_tells_its_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_llama import TYPE, Shape, write

    path = write(tmp_path / "model.gguf", Shape(layers=1), TYPE.Q8_0)
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    side = graph.side("repaired", path, {})
    assert 1 <= len(side.samples) <= graph.SAMPLES
    assert min(side.samples) > 0
