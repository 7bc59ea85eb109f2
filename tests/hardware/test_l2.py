"""The emulated board shows what an H200 showed of memory that its L2 may keep, case by case (l2_matrix.py)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from l2_matrix import CASES, RING, VARIES, matrix, outcomes_of, settled

RECORD = json.loads((Path(__file__).resolve().parents[2] / "results/hardware/l2-h200.json").read_text())["cases"]
BOARD = {"TEGRAD_BOARD": "gh100", "TEGRAD_L2": "through"}
ALONE = {"acquire": "unbind", "mem_op_0x15": "illegal_op|set to 32"}
"""Cases after which the channel is of no use, and what the drivers say of that."""


def test_every_case_is_recorded() -> None:
    assert set(RECORD) == {*CASES, RING}


def test_only_a_known_answer_counts_as_another() -> None:
    """What varies from run to run may be any of its answers, and nothing else."""
    for (name, kind, how), possible in VARIES.items():
        for answer in possible:
            other = json.loads(json.dumps(RECORD))
            other[name][kind][how] = answer
            assert settled(other) == settled(RECORD)
        other[name][kind][how] = [0, 0]
        assert settled(other) != settled(RECORD)


@pytest.mark.board
@pytest.mark.parametrize("kind", [pytest.param("volatile", marks=pytest.mark.long), "cached"])
def test_the_board_shows_what_an_h200_showed(kind: str) -> None:
    names = [name for name in CASES if name not in ALONE]
    assert outcomes_of(names, kind == "cached", **BOARD) == {name: RECORD[name][kind] for name in names}


@pytest.mark.board
@pytest.mark.parametrize("kind", ["volatile", "cached"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.klog_errors(said)) for n, said in ALONE.items()])
def test_the_board_ends_a_channel_where_an_h200_does(name: str, kind: str) -> None:
    assert outcomes_of([name], kind == "cached", **BOARD) == {name: RECORD[name][kind]}


@pytest.mark.hardware
@pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="no NVIDIA GPU here")
def test_this_gpu_shows_what_an_h200_showed() -> None:
    assert settled(matrix([])) == settled(RECORD)
