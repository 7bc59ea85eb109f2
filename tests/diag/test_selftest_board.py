"""The stages of `tegrad selftest` on a board: right without a fault, and under a fault each says what is wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tegrad.diag.selftest.child import perform
from tegrad.diag.selftest.stages import STAGES
from tegrad.orin.client import board_inject
from tegrad.orin.inject import Rule

pytestmark = pytest.mark.board

SPEC = "agx-orin-64gb:9GiB"
ROWS = {stage.name: stage for stage in STAGES}


class Told:
    """What a stage told."""

    def __init__(self, pieces: list[Mapping[str, Any]]) -> None:
        self.facts = {piece["fact"]: piece["value"] for piece in pieces if "fact" in piece}
        self.lines = [piece["line"] for piece in pieces if "line" in piece]
        self.steps = [piece["step"] for piece in pieces if "step" in piece]
        self.last = pieces[-1]
        self.outcome = self.last["outcome"]


@pytest.fixture(autouse=True)
def a_board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", SPEC)
    monkeypatch.delenv("TEGRAD_MEMORY", raising=False)


@contextmanager
def armed(*rules: Rule) -> Iterator[None]:
    from tegrad.nv.kernel import pick_kernel

    kernel = pick_kernel()
    kernel.close(kernel.open("/dev/nvmap"))  # starts the board
    board_inject(SPEC, rules)
    try:
        yield
    finally:
        board_inject(SPEC, [])


def always(ioctl: str, **strike: Any) -> Rule:
    return Rule(ioctl, probability=1, times=0, **strike)


def run(name: str, *rules: Rule, amount: int | None = None) -> Told:
    """Run a stage in this process, under these faults."""
    pieces: list[Mapping[str, Any]] = []
    row = ROWS[name] if amount is None else replace(ROWS[name], board_amount=amount)
    with armed(*rules):
        perform(row, pieces.append)
    return Told(pieces)


# ---- machine and ioctls


def test_the_machine_is_right_on_a_board() -> None:
    told = run("machine")
    assert told.last == {"outcome": "right"}
    assert told.facts["nodes"]["/dev/host1x-fence"] is True


def test_the_ioctls_are_right_and_give_everything_back() -> None:
    told = run("ioctls")
    assert told.last == {"outcome": "right"}
    assert told.facts["SMs"] == 16


@pytest.mark.parametrize(
    ("call", "step"),
    [
        ("GPU_GET_CHARACTERISTICS", "characteristics"),
        ("NVMAP_ALLOC", "a buffer of 4 KiB: alloc and mmap"),
        ("GPU_ALLOC_AS", "address space"),
        ("AS_MAP_BUFFER_EX", "map and unmap"),
        ("CHANNEL_SETUP_BIND", "TSG and channel, set up and not rung"),
        ("CHANNEL_ALLOC_OBJ_CTX", "engine objects"),
    ],
)
def test_an_ioctl_that_is_refused_is_named_with_its_step(call: str, step: str) -> None:
    told = run("ioctls", Rule(call, errno=errno.EIO, nth=1))
    assert (told.outcome, told.steps[-1]) == ("failed", step)
    assert f"{call}(" in told.last["seen"]
    assert "EIO" in told.last["seen"]


def test_fewer_sms_than_the_chip_has_are_a_fact_and_no_surprise() -> None:
    told = run("ioctls", Rule("GPU_NUM_VSMS", answer={"num_vsms": 3}, nth=1))
    assert (told.outcome, told.facts["SMs"]) == ("right", 3)  # a power mode may gate SMs


# ---- the command


def command(folder: Path, *arguments: str, board: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and page of `tegrad selftest`."""
    out = folder / "report.json"
    line = [sys.executable, "-m", "tegrad", "selftest", "--json", "--out", str(out), *arguments]
    # A file, not a pipe: a board lingers behind its last client.
    with (folder / "stdout").open("w") as stdout:
        environment = {**os.environ, "TEGRAD_BOARD": board, "XDG_CACHE_HOME": str(folder)}
        code = subprocess.run(line, stdout=stdout, env=environment, timeout=120, check=False).returncode
    report = json.loads(out.read_text())
    assert json.loads((folder / "stdout").read_text()) == report
    return code, report, (folder / "report.md").read_text()


@contextmanager
def shared_board(name: str) -> Iterator[str]:
    """A board that several processes reach."""
    from tegrad.hw.chips import CHIPS
    from tegrad.orin import board
    from tegrad.orin.client import board_stop

    board.start(CHIPS["agx-orin-64gb"], 4 << 30, name=name, linger=None)
    try:
        yield name
    finally:
        board_stop(name)


def test_with_all_later_stages_still_report_and_the_report_says_why(tmp_path: Path) -> None:
    with shared_board(f"selftest-{os.getpid()}") as name:
        stages = ("--stage", "machine", "--stage", "ioctls")
        board_inject(name, [Rule("GPU_ALLOC_AS", errno=errno.EIO, nth=1)])
        code, report, page = command(tmp_path, "--all", *stages, board=name)
        board_inject(name, [])
    assert code == 1
    assert [row["state"] for row in report["stages"]] == ["right", "failed"]
    assert report["board"] == name
    failed = report["stages"][1]
    assert failed["step"] == "address space"
    assert failed["means"] in page
    assert failed["next"] in page
