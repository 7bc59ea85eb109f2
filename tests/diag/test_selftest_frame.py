"""The frame of `tegrad selftest`: processes, limits of time, order, reports. No board."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tegrad import cli
from tegrad.diag import drivers
from tegrad.diag.selftest import child, client, ending, machine, report, runner, stages
from tegrad.diag.selftest.child import perform
from tegrad.diag.selftest.place import Place, place
from tegrad.diag.selftest.stage import Asked, Notes, Stage
from tegrad.nv import exercise
from tegrad.nv.roles import PolicyError
from tegrad.orin.board import BoardError

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
    Stage(f.__name__, "", f, 600, "", "") for f in (good, wrong, hangs, deaf, crashes)
]
main(*sys.argv[-2:])
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Stages of CHILD's in place of the table's; the processes that were started, and have told something since.

    Their time begins then: Python's own start may take longer.
    """
    started = []

    def popen(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        started.append(process := real([command[0], "-c", CHILD, *command[-2:]], **more))
        until = time.monotonic() + 60
        while not Path(command[-1]).read_text() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
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
    assert found[2].detail == "not tried after wrong failed; --all goes on"
    assert [one.state for one in runner.run([stage(name) for name in names], go_on=True)] == [
        "right",
        "failed",
        "right",
    ]


def test_a_hang_is_an_outcome_that_says_where(processes: list[subprocess.Popen[bytes]]) -> None:
    found = runner.perform(stage("hangs", limit_s=0.3))
    assert (found.state, found.step, found.stuck) == ("hung", "a long sleep", False)
    assert "in hangs" in found.detail  # the frame, by faulthandler
    assert processes[0].poll() is not None


def test_a_signal_while_a_hung_stage_says_where_it_is_loses_no_outcome(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = time.sleep

    def interrupted(seconds: float) -> None:
        if seconds == 0.1:
            signal.raise_signal(signal.SIGTERM)
        sleep(seconds)

    monkeypatch.setattr(runner.time, "sleep", interrupted)
    with ending.ending():
        found = runner.perform(stage("hangs", limit_s=1.5))
    assert (found.state, found.ended, found.stuck) == ("interrupted", signal.SIGTERM, False)


def test_a_crash_is_an_outcome_that_names_the_signal(processes: list[subprocess.Popen[bytes]]) -> None:
    found = runner.perform(stage("crashes"))
    assert (found.state, found.step) == ("crashed", "a bad pointer")
    assert "SIGSEGV" in found.seen
    assert "in crashes" in found.detail


def test_a_process_that_does_not_listen_is_killed_with_what_it_started(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "END_TIMEOUT_S", 1.0)
    found = runner.perform(stage("deaf", limit_s=0.3))
    assert (found.state, found.stuck) == ("hung", False)
    assert all(_gone(pid) for pid in _of_session(processes[0].pid))


def test_what_cannot_be_killed_ends_the_run_even_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = runner.Outcome(stage("a"), "hung", stuck=True)
    monkeypatch.setattr(runner, "perform", lambda one, asked: stuck)
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


HOPPER = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Nov  4 2025",
    "proc/driver/nvidia/gpus/0000:19:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 0\nGPU UUID: \t GPU-1\n",
    **dict.fromkeys(("dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia3"), ""),
}
"""What a server with an H200 shows of it in a container."""
ORIN = {"dev/nvgpu/igpu0/ctrl": "", "dev/nvmap": "", "dev/nvidiactl": "", "proc/driver/nvidia/version": "540.4.0"}
"""A Jetson, whose display has NVIDIA's driver of desktops."""
BARE_ORIN = {"proc/device-tree/compatible": "nvidia,p3701\0nvidia,tegra234", "dev/nvidiactl": ""}


@pytest.mark.parametrize(
    ("files", "board", "found"),
    [
        (HOPPER, "", Place.SERVER),
        (HOPPER, "gh100", Place.ORIN),
        (ORIN, "", Place.ORIN),
        (BARE_ORIN, "", Place.ORIN),
        ({}, "", Place.ORIN),
    ],
)
def test_the_driver_below_is_told_by_the_machine(
    files: Mapping[str, str], board: str, found: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", board)
    for path, text in files.items():
        put(tmp_path, path, text)
    assert place(tmp_path) is found


def test_a_server_runs_what_has_meaning_there_and_says_so_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        runner, "perform", lambda one, asked: runner.Outcome(one, "right", facts={"chip": "NVIDIA H200"})
    )
    found = list(runner.run(stages.STAGES, asked=Asked(model="a.gguf"), here=Place.SERVER))
    ran = {one.stage.name for one in found if one.state == "right"}
    assert ran >= {"machine", "one-liner", "launches", "kernels", "model"}
    assert not ran & {"ioctls", "coherence", "bringup", "conformance", "fences"}
    others = [one for one in found if one.stage.name not in ran]
    assert {(one.state, one.bad) for one in others} == {("not applicable", False)}
    assert all("only an Orin has this" in one.detail for one in others)
    assert [one.stage for one in found] == list(stages.STAGES)
    assert report.document(found, ABOUT, "")["chip"] == "NVIDIA H200"
    assert "NVIDIA H200" in report.page(found, ABOUT, "")
    assert "only an Orin has this" in report.page(found, ABOUT, "")
    here = runner.run(stages.STAGES, asked=Asked(model="a.gguf"), here=Place.ORIN)
    assert {one.state for one in here} == {"right"}


def test_the_clients_stages_do_on_a_server_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def launches(count: int, progress: Callable[[int], object]) -> exercise.Rounds:
        counts.append(count)
        return exercise.Rounds(1, 1, 1)

    monkeypatch.setenv("TEGRAD_BOARD", "")
    monkeypatch.setattr(client, "place", lambda: Place.SERVER)
    for name, value in (("open_device", "sm_90, 132 SMs"), ("ring_entries", 65536), ("spill", 1), ("all_shared", 2)):
        monkeypatch.setattr(exercise, name, lambda value=value: value)
    monkeypatch.setattr(exercise, "launches", launches)
    assert told(client.launches, amount=20_000, unit="launches")[-1] == {"outcome": "right"}
    assert counts[0] > 65536  # its ring is longer than a Jetson's
    *_, line, last = told(client.kernels)
    assert "only an Orin" in line["line"]
    assert last == {"outcome": "right"}


def test_a_stage_that_asks_for_something_says_how_to_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "perform", lambda one, asked: runner.Outcome(one, "right"))
    wants = stage("wants", asks="model")
    (without,) = runner.run([wants])
    assert (without.state, without.bad) == ("not run", False)
    assert without.detail == "it runs only with --model FILE"
    assert [one.state for one in runner.run([wants], asked=Asked(model="a.gguf"))] == ["right"]


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
    bad = runner.Outcome(
        stage("it"),
        "failed",
        1.0,
        "the second step",
        "a",
        "b",
        facts={"rate": [1, {"x": 2}], "flags": {"kernel": {"no flush": True}}},
    )
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
    assert "| flags | kernel: yes: no flush |" in page
    document = report.document([bad, good], ABOUT, "agx-orin-64gb")
    assert document["board"] == "agx-orin-64gb"
    first, second = document["stages"]
    assert (first["means"], first["next"], first["seen"]) == ("it is broken", "mend it", "b")
    assert second["amount"] == {"unit": "launches", "here": 3, "on a device": 20}


@pytest.mark.parametrize(
    ("states", "board", "texts"),
    [
        (["failed", "hung"], "", ["a failed: mend a", "b hung: mend b", "send the JSON report"]),
        (["right", "not run"], "", ["nothing that was tried went wrong: `tegrad run`", "send the JSON report"]),
        (
            ["right", "right"],
            "agx-orin-64gb",
            ["nothing that was tried went wrong on the board: run"],
        ),
        (["interrupted", "not run"], "agx-orin-64gb", ["the run was ended by a signal: start it again"]),
    ],
)
def test_the_page_begins_with_what_to_do_next(states: list[runner.State], board: str, texts: list[str]) -> None:
    outcomes = [runner.Outcome(stage(name), state) for name, state in zip("ab", states, strict=True)]
    outcomes[0].ended = signal.SIGINT if states[0] == "interrupted" else 0
    advice = report.page(outcomes, ABOUT, board).split("## ")[1].splitlines()
    assert advice[0] == "What to do next"
    told = [line for line in advice if line.startswith("- ")]
    assert len(told) == len(texts)
    assert all(line.startswith(f"- {text}") for line, text in zip(told, texts, strict=True))


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


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("TEGRAD_MEMORY", "fast", PolicyError),
        ("TEGRAD_BOARD", "no-such-board", BoardError),
        ("TEGRAD_BOARD", "agx-orin-64gb:3Q", BoardError),
    ],
)
def test_a_wrong_variable_of_the_user_is_no_finding(
    variable: str, value: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, value)
    assert isinstance(command("--stage", "machine").exception, error)
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


INTERRUPTED = f"""{CHILD.replace("main(*sys.argv[-2:])", "")}
import subprocess
real = subprocess.Popen
subprocess.Popen = lambda command, **more: real([sys.executable, "-c", {CHILD!r}, *command[-2:]], **more)
from tegrad.cli import main
sys.argv = ["tegrad", "selftest", *sys.argv[1:]]
main()
"""
"""The command, whose stages are CHILD's."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_the_stage_with_the_run_and_leaves_a_report(number: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    first = ["good"] if number == signal.SIGINT else []  # a process less
    chosen = [word for name in (*first, "hangs", "crashes") for word in ("--stage", name)]
    command = [sys.executable, "-c", INTERRUPTED, *chosen]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    until = time.monotonic() + 60
    while "long sleep" not in _told(tmp_path) and time.monotonic() < until:
        time.sleep(0.02)
    (child,) = _children(process.pid)
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] is not None
    assert _gone(child)
    if number == signal.SIGKILL:
        return
    assert process.returncode == 128 + number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tegrad-selftest.json", "tegrad-selftest.md"]
    rows = json.loads((tmp_path / "tegrad-selftest.json").read_text())["stages"]
    assert [row["state"] for row in rows] == [*(["right"] if first else []), "interrupted", "not run"]
    assert rows[-2]["step"] == "a long sleep"
    assert number.name in (tmp_path / "tegrad-selftest.md").read_text()


def test_a_second_process_of_a_rule_does_not_outlive_the_first() -> None:
    code = "import time\nfrom tegrad.conformance.process import Child\n"
    code += "class Rig:\n    def in_child(self): time.sleep(60)\n"
    code += "print(Child(Rig(), None).pid, flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not _ended(pid)
        process.kill()
    assert _gone(pid)


def test_what_tidies_up_is_not_interrupted_and_an_ignored_signal_stays_so() -> None:
    before = signal.getsignal(signal.SIGTERM)
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending.ending():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(ending.Ended) as ended:
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        assert ended.value.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGHUP, hup)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _of_session(leader: int) -> list[int]:
    """Processes of a session, however they are."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(process.name))
    return found


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _gone(pid: int) -> bool:
    """Whether a process ends in a moment."""
    until = time.monotonic() + 30
    while not _ended(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return _ended(pid)


def _told(folder: Path) -> str:
    """What stages have told, whose folders go with them."""
    said = ""
    for told in folder.glob("tegrad-selftest-*/told"):
        with suppress(OSError):
            said += told.read_text()
    return said


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
    assert facts["clocks"] == {"17000000.gpu": {"now": 306000000}}


def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: str) -> list[Mapping[str, Any]]:
    monkeypatch.setenv("TEGRAD_BOARD", "")
    for path, text in {**HOPPER, **changes}.items():
        put(tmp_path, path, text)
    return machine_told(tmp_path)


def test_a_server_tells_its_chip_and_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = server(tmp_path, monkeypatch)
    facts = {piece["fact"]: piece["value"] for piece in told if "fact" in piece}
    assert told[-1] == {"outcome": "right"}
    assert facts["chip"] == "NVIDIA H200"
    assert facts["driver"].startswith("NVIDIA's driver 580.159.04")
    assert "dev/nvidia3" in facts["nodes"]
    assert "GPU-1" not in json.dumps(told)


@pytest.mark.parametrize(
    ("path", "text", "seen", "next_step"),
    [
        ("proc/driver/nvidia/version", "Kernel Module  535.129.03", "535", "580"),
        ("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "", "MIG", "-mig 0"),
    ],
)
def test_what_stops_a_server_is_named(
    path: str, text: str, seen: str, next_step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, last = server(tmp_path, monkeypatch, **{path: text})
    assert last["outcome"] == "failed"
    assert seen in last["seen"]
    assert next_step in last["next"]


def test_a_node_that_a_server_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "NVIDIA_NODES", (*drivers.NVIDIA_NODES, "dev/nvidia-another"))
    *_, last = server(tmp_path, monkeypatch)
    assert last["outcome"] == "failed"
    assert "dev/nvidia-another is missing" in last["seen"]
    assert "nvidia-modprobe" in last["next"]
