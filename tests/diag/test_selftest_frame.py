"""The frame of `tegrad selftest`: processes, limits of time, order, reports. No board."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tegrad import cli
from tegrad.diag.selftest import child, machine, report, runner, stages
from tegrad.diag.selftest.child import perform
from tegrad.diag.selftest.stage import Notes, Stage

ABOUT = {
    "date": "2026-01-01T00:00:00Z",
    "versions": {"tegrad": "0.1", "tegrad_sources": "0123"},
    "machine": {"kernel": "5.15.148-tegra", "python": "3.12.3"},
}
CHILD = """
import ctypes, os, signal, sys, time
import tegrad.diag.selftest.stages as stages
from tegrad.diag.selftest.child import main
from tegrad.diag.selftest.stage import Stage

def good(notes): notes.fact("answer", 42)
def wrong(notes):
    with notes.step("a second look"):
        notes.expect(False, "one thing", "another")
def hangs(notes):
    with notes.step("a long sleep"):
        time.sleep(600)
def deaf(notes):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600.25")
    hangs(notes)
def crashes(notes):
    with notes.step("a bad pointer"):
        ctypes.string_at(0)
stages.STAGES = [
    Stage(f.__name__, "", f, 9, "", "") for f in (good, wrong, hangs, deaf, crashes)
]
main(*sys.argv[-2:])
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Stages of CHILD's in place of the table's; the processes that were started."""
    started = []

    def popen(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        started.append(process := real([command[0], "-c", CHILD, *command[-2:]], **more))
        return process

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


def stage(name: str, run: Callable[[Notes], None] = lambda notes: None, **more: Any) -> Stage:
    return Stage(name, f"{name}.", run, more.pop("limit_s", 10), f"{name} is broken", f"mend {name}", **more)


def told(run: Callable[[Notes], None], **more: Any) -> list[Mapping[str, Any]]:
    pieces: list[Mapping[str, Any]] = []
    perform(stage("it", run, **more), pieces.append)
    return pieces


def test_the_first_surprise_stops_and_all_goes_on(processes: list[subprocess.Popen[bytes]]) -> None:
    names = ["good", "wrong", "good"]
    found = list(runner.run([stage(name) for name in names]))
    assert [one.state for one in found] == ["right", "failed", "not run"]
    assert found[0].facts == {"answer": 42}
    assert (found[1].step, found[1].expected, found[1].seen) == ("a second look", "one thing", "another")
    assert "--all" in found[2].detail
    assert [one.state for one in runner.run([stage(name) for name in names], go_on=True)] == [
        "right",
        "failed",
        "right",
    ]


def test_a_hang_is_an_outcome_that_says_where(processes: list[subprocess.Popen[bytes]]) -> None:
    found = runner.perform(stage("hangs", limit_s=1.5))
    assert (found.state, found.step, found.stuck) == ("hung", "a long sleep", False)
    assert "in hangs" in found.detail  # the frame, by faulthandler
    assert processes[0].poll() is not None


def test_a_crash_is_an_outcome_that_names_the_signal(processes: list[subprocess.Popen[bytes]]) -> None:
    found = runner.perform(stage("crashes"))
    assert (found.state, found.step) == ("crashed", "a bad pointer")
    assert "SIGSEGV" in found.seen
    assert "in crashes" in found.detail


def test_a_process_that_does_not_listen_is_killed_with_what_it_started(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "END_S", 0.3)
    found = runner.perform(stage("deaf", limit_s=1))
    assert (found.state, found.stuck) == ("hung", False)
    sleeping = subprocess.run(["pgrep", "-f", "sleep 600.25"], capture_output=True, text=True, check=False)
    assert sleeping.stdout == ""


def test_what_cannot_be_killed_ends_the_run_even_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = runner.Outcome(stage("a"), "hung", stuck=True)
    monkeypatch.setattr(runner, "perform", lambda one: stuck)
    found = list(runner.run([stage("a"), stage("b")], go_on=True))
    assert [one.state for one in found] == ["hung", "not run"]
    assert "reboot" in found[1].detail


def test_an_exception_of_python_is_told_with_its_place() -> None:
    def slips(notes: Notes) -> None:
        raise KeyError("gone")

    (last,) = told(slips)
    assert last["outcome"] == "failed"
    assert "KeyError: 'gone' (test_selftest_frame.py, line" in last["seen"]


def test_a_stage_without_what_it_needs_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "NEEDS", {"compilers": lambda: "no compilers"})
    assert told(lambda notes: 1 / 0, needs=("compilers",)) == [{"outcome": "not here", "detail": "no compilers"}]


@pytest.mark.parametrize(("board", "amount"), [("", 20), ("agx-orin-64gb", 3)])
def test_a_row_says_how_much_a_board_does(monkeypatch: pytest.MonkeyPatch, board: str, amount: int) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", board)
    pieces = told(lambda notes: notes.fact("did", notes.amount), amount=20, board_amount=3, unit="launches")
    assert pieces[0] == {"fact": "did", "value": amount}


def test_every_row_tells_what_its_failure_means_and_what_to_do() -> None:
    assert len({one.name for one in stages.STAGES}) == len(stages.STAGES)
    for one in stages.STAGES:
        assert one.sentence, one.name
        assert one.means, one.name
        assert one.next_step, one.name
        assert one.limit_s > 0, one.name
        assert set(one.needs) <= set(child.NEEDS), one.name
        assert bool(one.unit) == bool(one.amount), one.name


def test_page_and_report_say_cause_next_step_and_that_a_board_is_no_jetson() -> None:
    bad = runner.Outcome(stage("it"), "failed", 1.0, "the second step", "a", "b", facts={"rate": [1, {"x": 2}]})
    good = runner.Outcome(stage("other", unit="launches", amount=20, board_amount=3), "right", 1.0)
    page = report.page([bad, good], ABOUT, "agx-orin-64gb")
    for piece in (
        "says nothing of a Jetson",
        "the second step",
        "it is broken",
        "next: mend it",
        "3 launches here, 20",
    ):
        assert piece in page
    assert "| rate | 1 x: 2 |" in page
    document = report.document([bad, good], ABOUT, "agx-orin-64gb")
    assert document["board"] == "agx-orin-64gb"
    first, second = document["stages"]
    assert (first["means"], first["next"], first["seen"]) == ("it is broken", "mend it", "b")
    assert second["amount"] == {"unit": "launches", "here": 3, "on a device": 20}


# ---- the command


def command(*arguments: str) -> Any:
    return CliRunner().invoke(cli.build(["selftest"]), ["selftest", *arguments])


def test_list_names_every_stage_and_runs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = command("--list")
    assert [line.split()[0] for line in done.output.splitlines()] == [one.name for one in stages.STAGES]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--stage", "nothing"), ("--out", "no/folder/x.json")])
def test_bad_usage_is_exit_code_2(arguments: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(*arguments).exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(Path("/dev/nvmap").exists(), reason="this machine has the device nodes")
def test_a_machine_without_a_gpu_is_told_how_to_use_a_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "")
    out = tmp_path / "report.json"
    done = command("--out", str(out))
    assert done.exit_code == 1
    assert "TEGRAD_BOARD=agx-orin-64gb tegrad selftest" in done.output
    rows = json.loads(out.read_text())["stages"]
    assert [row["state"] for row in rows] == ["failed"] + ["not run"] * (len(rows) - 1)
    assert "tegrad_sources" in json.loads(out.read_text())["versions"]
    assert "| page size |" in (tmp_path / "report.md").read_text()


def test_ctrl_c_ends_the_stage_and_leaves_a_report(tmp_path: Path) -> None:
    slow = CHILD.replace("main(*sys.argv[-2:])", "")
    code = f"""{slow}
import subprocess
from tegrad.diag.selftest import runner
real = subprocess.Popen
subprocess.Popen = lambda command, **more: real([sys.executable, "-c", {CHILD!r}, *command[-2:]], **more)
from tegrad.cli import main
sys.argv = ["tegrad", "selftest", "--stage", "good", "--stage", "hangs"]
main()
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    until = time.monotonic() + 30
    while not any("long sleep" in told.read_text() for told in _told(tmp_path)) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] is not None
    assert process.returncode == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tegrad-selftest.json", "tegrad-selftest.md"]
    (row,) = json.loads((tmp_path / "tegrad-selftest.json").read_text())["stages"]
    assert (row["name"], row["state"]) == ("good", "right")


def _told(folder: Path) -> Iterator[Path]:
    return folder.glob("tegrad-selftest-*/told")


# ---- stage 1


def machine_told(root: Path) -> list[Mapping[str, Any]]:
    return told(lambda notes: machine.machine(notes, root))


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_refused_release_fails_first_and_says_what_to_install(tmp_path: Path) -> None:
    put(tmp_path, "etc/nv_tegra_release", "# R35 (release), REVISION: 4.1, GCID: 1")
    *_, last = machine_told(tmp_path)
    assert last["outcome"] == "failed"
    assert "OPEN_TSG" in last["seen"]
    assert "JetPack 6" in last["next"]


@pytest.mark.skipif(Path("/dev/nvmap").exists(), reason="this machine has the device nodes")
def test_power_mode_and_clocks_are_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "")
    put(tmp_path, "etc/nv_tegra_release", "# R36 (release), REVISION: 4.3, GCID: 1")
    put(tmp_path, "var/lib/nvpmodel/status", "pmode:0002")
    put(tmp_path, "etc/nvpmodel.conf", "< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=2 NAME=MODE_30W >\n")
    put(tmp_path, "sys/class/devfreq/17000000.gpu/cur_freq", "306000000\n")
    facts = {piece["fact"]: piece["value"] for piece in machine_told(tmp_path) if "fact" in piece}
    assert facts["l4t"] == "r36.4.3 (JetPack 6), by /etc/nv_tegra_release"
    assert facts["power mode"] == "2 (MODE_30W)"
    assert facts["clocks"] == {"17000000.gpu": {"cur_freq": "306000000"}}
