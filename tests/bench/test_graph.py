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
    """The environments of the processes that would have been started; JITBEAM ends in no time, BEAM does not end."""
    seen: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], timeout: float, **_: Any) -> Any:
        seen.append(env)
        if "BEAM" in env:
            raise subprocess.TimeoutExpired(command, timeout)
        speed = 90.0 if "JITBEAM" in env else 60.0 if graph.SWITCH not in env else 3.0
        return subprocess.CompletedProcess(command, 0, "noise\n" + json.dumps({"tok_s": [speed] * 3}), "")

    monkeypatch.setattr(subprocess, "run", run)
    for name in (*graph.BEAM, graph.SWITCH, "PARALLEL"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_the_repair_is_switched_off_for_one_side_only(
    processes: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(graph.SWITCH, "matvec")
    with_it, without = graph.repaired(Path("/models/some.gguf"))
    assert (with_it.median, without.median) == (60.0, 3.0)
    assert [env.get(graph.SWITCH) for env in processes] == [None, "matvec"]
    assert without.command == "TEGRAD_REPAIRS_OFF=matvec python -m tegrad.bench.graph some.gguf"


def test_a_search_that_does_not_end_gives_way_to_another(
    processes: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched, plain = graph.searched(Path("some.gguf"))
    assert (searched.name, searched.median, plain.median) == ("JITBEAM=2", 90.0, 60.0)
    assert ["PARALLEL" in env for env in processes] == [False, True]
    monkeypatch.setattr(graph, "BEAM", ("BEAM", "JITBEAM"))
    assert graph.searched(Path("some.gguf"))[0].name == "JITBEAM=2"
    assert ["BEAM" in env for env in processes[2:]] == [True, False, False]


def test_no_search_that_ends_is_an_error(processes: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "BEAM", ("BEAM",))
    with pytest.raises(RecordError, match=r"BEAM=2 .* did not end in"):
        graph.searched(Path("some.gguf"))


@pytest.mark.board
@pytest.mark.long
def test_a_process_tells_its_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_llama import TYPE, Shape, write

    path = write(tmp_path / "model.gguf", Shape(layers=1), TYPE.Q8_0)
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    side = graph.side("repaired", path, {})
    assert 1 <= len(side.samples) <= graph.SAMPLES
    assert min(side.samples) > 0
