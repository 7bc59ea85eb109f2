"""`tegrad conformance`: what it lists, runs, writes and answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tegrad import cli, conformance
from tegrad.conformance.rule import Rule

BOARD = {**os.environ, "TEGRAD_BOARD": "agx-orin-64gb:10GiB"}


def command(*arguments: str, folder: Path, environment: dict[str, str] = BOARD) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "tegrad", "conformance", *arguments]
    return subprocess.run(run, capture_output=True, text=True, check=False, env=environment, cwd=folder)


def test_a_section_is_judged_and_reported(tmp_path: Path) -> None:
    done = command("--section", "2.6", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "5 rules: 5 holds. Report: tegrad-conformance.json\n"
    report = json.loads((tmp_path / "tegrad-conformance.json").read_text())
    assert report["counts"] == {"holds": 5}
    assert report["rules"][0]["id"] == "2.6/free-0"
    assert report["machine"]["gpu"]["num_gpc"] == 2
    assert "per_device_identifier" not in report["machine"]["gpu"]


def test_rules_are_listed_without_a_driver(tmp_path: Path) -> None:
    done = command("--list", "--section", "2", folder=tmp_path, environment={**os.environ, "TEGRAD_BOARD": ""})
    assert done.returncode == 0
    assert "2.3/align-not-power-of-two " in done.stdout
    assert all(line.startswith("2.") for line in done.stdout.splitlines())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [("--rule", "2.3/nothing"), ("--section", "99")])
def test_what_does_not_exist_is_a_usage_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = command(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert "tegrad conformance --list" in " ".join(done.stderr.split())


def test_a_machine_without_drivers_gets_one_sentence(tmp_path: Path) -> None:
    if Path("/dev/nvmap").exists():
        pytest.skip("this machine has the drivers")
    done = command(folder=tmp_path, environment={**os.environ, "TEGRAD_BOARD": ""})
    assert done.returncode == 1
    assert "/dev/nvmap does not exist" in done.stderr
    assert not list(tmp_path.iterdir())


def test_differences_are_shown_and_make_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [
        Rule("9.1/good", "9.1", "good", lambda rig: None),
        Rule("9.1/bad", "9.1", "a size of 0 is taken", lambda rig: rig.accepts(rig.nvmap, "NVMAP_CREATE", size=0)),
    ]
    monkeypatch.setattr(conformance, "all_rules", lambda: rules)
    monkeypatch.setenv("TEGRAD_BOARD", BOARD["TEGRAD_BOARD"])
    out = tmp_path / "report.json"
    done = CliRunner().invoke(cli.build(["conformance"]), ["conformance", "--out", str(out)])
    assert done.exit_code == 1
    assert (
        "DIFFERS  9.1/bad: a size of 0 is taken\n         expected NVMAP_CREATE succeeds\n         seen EINVAL"
        in done.output
    )
    (_, row) = json.loads(out.read_text())["rules"]
    assert (row["state"], row["expected"], row["seen"]) == ("differs", "NVMAP_CREATE succeeds", "EINVAL")


def test_ctrl_c_in_the_middle_leaves_a_report_of_what_was_judged(tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    run = [sys.executable, "-m", "tegrad", "conformance"]
    going = subprocess.Popen(run, env=BOARD, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=terminal)
    os.close(terminal)
    told = b""
    try:
        while b"/" not in told:  # the first rule's progress
            told += os.read(ours, 1000)
        going.send_signal(signal.SIGINT)
        going.wait(timeout=60)
        with contextlib.suppress(OSError):  # the terminal's end
            while True:
                told += os.read(ours, 1000)
    finally:
        going.kill()
        os.close(ours)
    assert going.returncode == 130
    assert b"Traceback" not in told
    report = json.loads((tmp_path / "tegrad-conformance.json").read_text())
    assert 0 < len(report["rules"]) < 700
    assert report["counts"].keys() == {"holds"}
