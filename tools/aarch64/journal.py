"""A pytest plugin that writes down what became of each test, line by line, so that a run that is cut off can go on.

Loaded in the root with `-p journal`. AARCH64_JOURNAL names the file; what an earlier run settled does not run again,
nor, without AARCH64_AGAIN, what it saw fail. What left_out.py names is left out with its cause.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from left_out import cause_of
from outcomes import SETTLED, outcomes, write

REASON = 4000
"""Characters kept of a failure."""

_path = Path(os.environ["AARCH64_JOURNAL"])
_again = "AARCH64_AGAIN" in os.environ
_seconds: dict[str, float] = {}
_worst: dict[str, tuple[str, str]] = {}
_absent: dict[str, str] = {}
"""Files that are skipped as a whole, and why."""


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that does not want to be collected here."""
    if report.skipped:
        _absent[report.nodeid] = _why(report)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that this run is to answer, and note which ones there are in all."""
    write(_path, collected=[*(item.nodeid for item in items), *_absent])
    for file, why in _absent.items():
        write(_path, test=file, outcome="skipped", reason=why, seconds=0.0)
    known = {test for test, line in outcomes(_path).items() if line["outcome"] in SETTLED or not _again}
    wanted, dropped = [], []
    for item in items:
        if cause := cause_of(item.nodeid):
            write(_path, test=item.nodeid, outcome="left out", reason=cause, seconds=0.0)
        (dropped if cause or item.nodeid in known else wanted).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = wanted


def pytest_runtest_logstart(nodeid: str) -> None:
    """Name the test that is about to run: what a signal ends is the last one named."""
    _seconds[nodeid] = 0.0
    _worst[nodeid] = ("passed", "")
    write(_path, start=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the worst of a test's three phases."""
    _seconds[report.nodeid] += report.duration
    if report.failed:
        _worst[report.nodeid] = ("failed", f"{report.when}: {report.longreprtext[-REASON:]}")
    elif report.skipped and _worst[report.nodeid][0] == "passed":
        _worst[report.nodeid] = ("skipped", _why(report))


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(getattr(report, "wasxfail", ""))
    return reason.removeprefix("Skipped: ")


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Write down what became of the test."""
    outcome, reason = _worst.pop(nodeid)
    write(_path, test=nodeid, outcome=outcome, reason=reason, seconds=round(_seconds.pop(nodeid), 3))
