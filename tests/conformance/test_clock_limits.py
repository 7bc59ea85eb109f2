"""The rules of the clock hold where Linux keeps it within limits, as nvpmodel and jetson_clocks make it do."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutant_board import MutableBoard
from mutation import Edit

from tegrad.conformance import all_rules, s3_ctrl

RULES = {rule.id: rule for rule in all_rules()}
RULES_OF_THE_CLOCK = [id for id in RULES if id.startswith("3.6/")]
LEAST, MOST = 306, 1300
"""MHz: what an AGX Orin's arbiter has."""


def cut(board: MutableBoard, monkeypatch: pytest.MonkeyPatch, root: Path, low: int, high: int) -> None:
    """Let the board's arbiter, and the devfreq that the rules see, stay within so many MHz."""
    device = root / "17000000.gpu"
    device.mkdir()
    (device / "min_freq").write_text(f"{low}500000\n")
    (device / "max_freq").write_text(f"{high}500000\n")
    monkeypatch.setattr(s3_ctrl, "DEVFREQ", root)
    clamped = f"min(max(wanted or self.most, {low}_000_000), {high}_000_000)"
    board.mutate(
        Edit("tegrad.orin.arbiter.Arbiter.run", "min(max(wanted or self.most, self.least), self.most)", clamped)
    )


@pytest.mark.parametrize("limits", [(MOST, MOST), (LEAST, 612)], ids=["jetson_clocks", "nvpmodel"])
@pytest.mark.parametrize("id", RULES_OF_THE_CLOCK)
def test_a_clock_within_limits_is_no_difference(
    board: MutableBoard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, id: str, limits: tuple[int, int]
) -> None:
    cut(board, monkeypatch, tmp_path, *limits)
    try:
        done = board.judge(RULES[id], patience=1)
    finally:
        board.mutate()
    assert done.state in ("holds", "not applicable"), (
        f"{done.rule.sentence}: expected {done.expected}, seen {done.seen}"
    )


def test_a_clock_that_is_pinned_is_told(board: MutableBoard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cut(board, monkeypatch, tmp_path, MOST, MOST)
    try:
        done = board.judge(RULES["3.6/clock-held"], patience=1)
    finally:
        board.mutate()
    assert (done.state, "jetson_clocks" in done.detail) == ("not applicable", True)
