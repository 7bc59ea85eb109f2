"""tinygrad's own path is measured with a repair and without, each in a process whose variables say so."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tegrad.bench import graph
from tegrad.bench.record import RecordError

sys.path.append(str(Path(__file__).parents[1] / "llm"))


KERNEL = {"name": "r", "launches": 16, "picked": 2e-6, "found": 1e-6, "took": 3.0, "whole": True}
SEARCHED = [KERNEL, {**KERNEL, "found": 3e-6, "whole": False}, {**KERNEL, "found": math.inf, "took": 0, "whole": False}]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environments of the processes that would have been started; a search comes to a third of its kernels."""
    seen: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], stderr: int | None, **_: Any) -> Any:
        seen.append(env)
        searches = "JITBEAM" in env
        assert (stderr is None) == searches, "a search shows how far it is"
        speed = 90.0 if searches else 60.0 if graph.SWITCH not in env else 3.0
        said = {"tok_s": [speed] * 3, "search": SEARCHED if searches else []}
        return subprocess.CompletedProcess(command, 0, "noise\n" + json.dumps(said), None)

    monkeypatch.setattr(subprocess, "run", run)
    for name in (*graph.SEARCH, "BEAM", graph.SWITCH, "PARALLEL"):
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


def test_a_search_says_how_far_it_came_and_with_which_settings(
    processes: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEAM", "4")
    found, plain = graph.searched(Path("/models/some.gguf"))
    assert (found.median, plain.median) == (90.0, 60.0)
    assert found.name == "beam search, 2 of 3 kernels searched (1 to the end), 1 made faster"
    settings = "JITBEAM=2 BEAM_TIMEOUT_SEC=3 TEGRAD_SEARCH_S=75"
    assert found.command == f"{settings} python -m tegrad.bench.graph some.gguf"
    assert ["PARALLEL" in env for env in processes] == [False, True]
    assert not any("BEAM" in env for env in processes)
    assert not any(name in processes[1] for name in graph.SEARCH)


def test_a_side_that_does_not_end_or_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(command: list[str], *, timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(RecordError, match=r"JITBEAM=2 .* did not end in"):
        graph.searched(Path("some.gguf"))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", None))
    with pytest.raises(RecordError, match=r"ended with 1: its errors are above"):
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
