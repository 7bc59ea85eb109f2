"""The suite under load: what keeps the machine busy ends with it, and the report of the tests is read."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import under_load


def test_busy_processes_end_however_the_run_does() -> None:
    with suppress(KeyboardInterrupt), under_load.busy(2) as held:
        assert [process.poll() for process in held] == [None, None]
        raise KeyboardInterrupt
    assert all(process.returncode is not None for process in held)


def test_a_report_is_counted_and_none_is_no_pass(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert under_load.counts(report) == {}
    report.write_text('<testsuites><testsuite tests="5" failures="1" errors="0" skipped="2"/></testsuites>')
    assert under_load.counts(report) == {"tests": 5, "failures": 1, "errors": 0, "skipped": 2}


def test_a_commands_exit_code_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_load, "SAMPLE_S", 0.05)
    code, loads = under_load.watched([sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(3)"])
    assert code == 3
    assert loads
