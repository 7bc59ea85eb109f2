"""tinygrad through NV beside a peer: both do the same work in turn, and what they compute is compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tegrad.bench import rows, versus
from tegrad.bench.record import RecordError
from tegrad.bench.versus import Compared, Party
from tegrad.cli.bench import app

BOARD = "agx-orin-64gb:44GiB"


@pytest.fixture
def on_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours by NVRTC, the peer by the other renderer: other kernels, the same numbers."""
    monkeypatch.setenv("TEGRAD_BOARD", BOARD)
    monkeypatch.setitem(versus.PEERS, "cuda", Party("by PTX", "rows.py", {"DEV": "NV:PTX"}))
    monkeypatch.setattr(versus, "USUAL_SAMPLES", 1)
    monkeypatch.setattr(versus, "SAMPLES", {"launch": 3, "stream": 1})


SMALL = ("launch", "mlp", "matmul-f16-256", "exp-1m", "copyin-1mb", "copyout-1mb", "copy-1mb", "alloc-1mb")


@pytest.mark.board
@pytest.mark.parametrize("model", ["gpt2-f16-tiny", pytest.param("gpt2-f32-tiny", marks=pytest.mark.long)])
def test_rows_are_the_same_work_whoever_does_it(on_a_board: None, model: str) -> None:
    found = list(versus.measured([*SMALL, model], "cuda", rounds=2))
    assert [one.row for one in found if isinstance(one, Compared)] == [*SMALL, model]
    for one in found:
        assert isinstance(one, Compared)
        assert [len(side) for side in (one.ours, one.peer)] == [2, 2]
        assert one.ratio() > 0
        assert all(loop > 0 for side in versus.as_json(one)["loop_us"].values() for loop in side)


def script(folder: Path, body: str) -> Party:
    path = folder / "peer.py"
    path.write_text(f"import json, sys\nfor line in sys.stdin:\n    asked = json.loads(line)\n    {body}\n")
    return Party("a script", str(path), {})


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            'print(json.dumps({"us": [1.0], "loop_us": 2.0, "values": [1.0, 2.5]}), flush=True)',
            "launch: value 1 is 2.0 through NV",
        ),
        (
            'print(json.dumps({"us": [1.0], "loop_us": 2.0, "values": [1.0]}), flush=True)',
            "launch: 2 values through NV and 1",
        ),
        ("sys.exit(3)", "launch: a script ended with exit code 3; its error is above"),
    ],
)
def test_a_peer_that_computes_something_else_or_dies_gives_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, sentence: str
) -> None:
    (tmp_path / "ours").mkdir()
    good = 'print(json.dumps({"us": [1.0], "loop_us": 2.0, "values": [1.0, 2.0]}), flush=True)'
    monkeypatch.setattr(versus, "OURS", script(tmp_path / "ours", good))
    monkeypatch.setitem(versus.PEERS, "cuda", script(tmp_path, body))
    found = list(versus.measured(["launch", "mlp"], "cuda", rounds=1))
    assert [type(one) for one in found] == [RecordError] * (1 if "exit" in body else 2)  # it would not do the next one
    assert str(found[0]).startswith(sentence)


def test_the_error_of_a_peer_that_cannot_start_names_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours").mkdir()
    good = 'print(json.dumps({"us": [1.0], "loop_us": 2.0, "values": [1.0]}), flush=True)'
    monkeypatch.setattr(versus, "OURS", script(tmp_path / "ours", good))
    for name, needs in (("cuda", "libcuda.so"), ("torch", "pip install torch"), ("torch-graphs", "pip install torch")):
        broken = replace(script(tmp_path, "sys.exit(1)"), needs=versus.PEERS[name].needs)
        monkeypatch.setitem(versus.PEERS, name, broken)
        (found,) = versus.measured(["launch"], name, rounds=1)
        assert needs in str(found)


@pytest.mark.parametrize(
    ("chosen", "ours"),
    [(":1+NV", ":1+NV:CUDA"), ("NVK:1+NV:PTX;CPU", "NVK:1+NV:CUDA"), ("CPU", "NV:CUDA"), (":1+AMD", "NV:CUDA")],
)
def test_the_gpu_that_was_chosen_is_ours_and_the_peer_keeps_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, ours: str
) -> None:
    monkeypatch.setenv("DEV", chosen)
    path = tmp_path / "told.py"
    path.write_text("import json, os\ninput()\nprint(json.dumps({'device': os.environ['DEV']}))\n")
    for party, device in ((versus.OURS, ours), (versus.PEERS["cuda"], "CUDA:CUDA")):
        worker = versus.Worker(replace(party, script=str(path)))
        assert worker.ask("launch", 1) == {"device": device}
        worker.close()


def test_ctrl_c_ends_a_side_without_a_traceback() -> None:
    body = "import os, signal; from tegrad.bench import rows; rows.serve(lambda _: os.kill(os.getpid(), signal.SIGINT))"
    asked = '{"row": "launch", "samples": 1}\n'
    done = subprocess.run([sys.executable, "-c", body], input=asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_sides_take_turns_and_each_begins_half_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Side:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, row: str, samples: int) -> dict[str, Any]:
            asked.append(self.name)
            return {"us": [1.0] * samples, "loop_us": 2.0, "values": [1.0]}

    versus.compare("launch", Side("ours"), Side("peer"), rounds=4)  # type: ignore[arg-type]
    assert asked == ["ours", "peer", "peer", "ours"] * 2


def test_a_figure_is_the_medians_of_the_rounds_and_tails_are_each_rounds_own() -> None:
    calls = [[float(x) for x in range(100)], [10.0] * 100, [30.0] * 100]
    launch = Compared("launch", calls, [[2 * x for x in one] for one in calls])
    made = {record.id: record for record in versus.records({"launch": launch}, "a command")}
    assert set(made) == {"launch-median-nv-vs-cuda", "launch-p99-nv-vs-cuda"}
    assert made["launch-median-nv-vs-cuda"].ours.samples == [50.0, 10.0, 30.0]
    assert made["launch-p99-nv-vs-cuda"].ours.samples == [99.0, 10.0, 30.0]
    assert launch.ratio() == launch.ratio(0.99) == 2


def test_a_figure_of_several_rows_adds_them_up() -> None:
    one = {row: Compared(row, [[1.0]], [[3.0]]) for row in versus.FIGURES["elementwise-10m-nv-vs-cuda"].rows}
    (record,) = versus.records(one, "a command")
    assert record.peer is not None
    assert (record.ours.samples, record.peer.samples) == ([4.0], [12.0])


def test_every_figure_is_of_rows_that_are_measured() -> None:
    for figure in versus.FIGURES.values():
        assert set(figure.rows) <= set(versus.ROWS)


def test_the_command_names_what_it_knows() -> None:
    done = CliRunner().invoke(app, ["tinygrad", "no-such-row"])
    assert done.exit_code == 2
    assert "no-such-row" in done.output
    done = CliRunner().invoke(app, ["tinygrad", "--vs", "opencl"])
    assert done.exit_code == 2
    assert "torch-graphs" in done.output


def test_what_is_measured_on_a_board_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", BOARD)
    one = Compared("launch", [[1.0]], [[3.0]])
    monkeypatch.setattr(versus, "measured", lambda *_: iter([one]))
    done = CliRunner().invoke(app, ["tinygrad", "launch", "--json", "--results", str(tmp_path / "results")])
    assert done.exit_code == 0
    assert json.loads(done.output.strip().splitlines()[-1])[0]["ratio"] == 3
    assert not (tmp_path / "results").exists()
    CliRunner().invoke(app, ["tinygrad", "launch", "--out", str(tmp_path / "out")])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "launch-median-nv-vs-cuda.json",
        "launch-p99-nv-vs-cuda.json",
    }


def test_gpt2s_weights_are_of_its_size() -> None:
    count = sum(weight.size for weight in rows.gpt2_weights("tiny", half=True))
    assert count == 256 * 32 + rows.POSITIONS * 32 + 2 * 12 * 32 * 32
    assert all(weight.dtype == np.float16 for weight in rows.gpt2_weights("tiny", half=True))


def test_a_side_goes_on_where_the_loop_is_quickest_and_may_go_anywhere_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from tegrad.bench import rows

    asked: list[set[int]] = []
    monkeypatch.setattr(rows.os, "sched_getaffinity", lambda _: {3, 5, 7})
    monkeypatch.setattr(rows.os, "sched_setaffinity", lambda _, cores: asked.append(set(cores)))
    monkeypatch.setattr(rows, "loop_us", lambda: {3: 90.0, 5: 70.0, 7: 120.0}[next(iter(asked[-1]))])
    rows.take_quickest_core()
    assert asked == [{3}, {5}, {7}, {5}, {3, 5, 7}]


def test_rows_are_kept_as_they_are_done_with_what_they_were_measured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", BOARD)
    monkeypatch.setenv("BEAM", "2")
    monkeypatch.setenv("NOOPT", "0")
    kept, seen = tmp_path / "rows.json", []

    def measured(*_: object) -> Iterator[Compared | RecordError]:
        yield Compared("launch", [[1.0]], [[3.0]])
        seen.append(json.loads(kept.read_text()))
        yield RecordError("mlp: value 0 is 1 through NV and 2 through the peer")

    monkeypatch.setattr(versus, "measured", measured)
    done = CliRunner().invoke(app, ["tinygrad", "launch", "mlp", "--record", str(kept), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    whole = json.loads(kept.read_text())
    assert [row["ratio"] for row in seen[0]["rows"]] == [row["ratio"] for row in whole["rows"]] == [3]
    assert whole["failed"] == ["mlp: value 0 is 1 through NV and 2 through the peer"]
    assert (whole["settings"], whole["peer"], whole["unit"]) == ({"BEAM": "2"}, "tinygrad, CUDA", "us a call")
    assert {"date", "machine", "versions", "command"} <= whole.keys()
    assert not (tmp_path / "out").exists()  # searched kernels are no figure


def test_fewer_rounds_than_a_figure_has_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", BOARD)
    monkeypatch.setattr(versus, "measured", lambda *_: iter([Compared("launch", [[1.0]], [[3.0]])]))
    CliRunner().invoke(app, ["tinygrad", "launch", "--rounds", "1", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
