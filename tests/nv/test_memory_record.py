"""The record of a first boot, and when it decides the memory policy."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest

import tegrad
from tegrad.diag.selftest.stage import Notes
from tegrad.nv import memory_record, roles
from tegrad.nv.memory_record import MemoryRecord
from tegrad.nv.roles import Policy
from tegrad.orin import preload

FAST = MemoryRecord(
    "tegra234", platform.release(), tegrad.__version__, board=False, right=True, faster=True, date="", why=""
)


@pytest.fixture(autouse=True)
def an_orin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_record, "tegra", lambda: "tegra234")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TEGRAD_MEMORY", raising=False)
    monkeypatch.delenv("TEGRAD_BOARD", raising=False)


def test_what_was_seen_right_and_measured_faster_is_chosen() -> None:
    assert roles.policy() is Policy.VOLATILE
    memory_record.store(FAST)
    assert roles.policy() is Policy.CACHED


@pytest.mark.parametrize("what", [{"faster": None}, {"faster": False}, {"right": False}])
def test_what_is_not_both_is_not_chosen(what: dict[str, bool | None]) -> None:
    memory_record.store(replace(FAST, **what))  # type: ignore[arg-type]
    assert roles.policy() is Policy.VOLATILE


@pytest.mark.parametrize("key", [{"chip": "tegra264"}, {"kernel": "5.15.0-other"}, {"tegrad": "0.0.1"}])
def test_another_chip_kernel_or_version_decides_nothing(key: dict[str, str]) -> None:
    memory_record.store(replace(FAST, **key))  # type: ignore[arg-type]
    assert roles.policy() is Policy.VOLATILE


def test_a_boards_record_decides_for_no_device_wherever_it_lies() -> None:
    memory_record.store(replace(FAST, board=True))
    assert memory_record.of_this_device() is None
    assert memory_record.chip(board=True) != memory_record.chip(board=False)
    assert roles.policy() is Policy.VOLATILE


def test_a_devices_record_decides_for_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_record.store(FAST)
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    assert roles.policy() is Policy.VOLATILE


def test_what_runs_under_board_exec_is_on_a_board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory_record.store(FAST)
    for name, value in preload.environment(tmp_path, 1, b"", "", {}).items():
        monkeypatch.setenv(name, value)
    assert Notes(lambda piece: None).board
    assert roles.policy() is Policy.VOLATILE


@pytest.mark.parametrize("said", Policy)
def test_the_variable_overrides_a_record(monkeypatch: pytest.MonkeyPatch, said: Policy) -> None:
    memory_record.store(replace(FAST, right=said is Policy.VOLATILE))
    monkeypatch.setenv("TEGRAD_MEMORY", said)
    assert roles.policy() is said


@pytest.mark.parametrize("text", ["", "{", "[]", '{"chip": "tegra234"}', json.dumps({"right": True, "more": 1})])
def test_a_file_that_is_no_record_says_nothing(text: str) -> None:
    memory_record.store(FAST).write_text(text)
    assert memory_record.of_this_device() is None
    assert roles.policy() is Policy.VOLATILE


def test_a_machine_that_is_no_jetson_has_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_record.store(replace(FAST, chip=""))
    monkeypatch.setattr(memory_record, "tegra", lambda: "")
    assert memory_record.of_this_device() is None


# ---- what later stages add, and the plan of a step


def test_what_is_found_later_is_added_to_the_record() -> None:
    assert memory_record.amend(False, faster=True) is None  # there is none yet
    memory_record.store(replace(FAST, faster=None))
    assert memory_record.amend(False, faster=True) == FAST
    assert roles.policy() is Policy.CACHED
    assert memory_record.amend(False, volatile_packets=True) == replace(FAST, volatile_packets=True)
    assert memory_record.of_this_device() == replace(FAST, volatile_packets=True)


def test_a_board_adds_to_its_own_record_alone() -> None:
    memory_record.store(replace(FAST, faster=None))
    assert memory_record.amend(True, faster=True) is None
    assert roles.policy() is Policy.VOLATILE


@pytest.mark.parametrize("said", [*Policy, None])
@pytest.mark.parametrize("volatile", [True, False, None])
@pytest.mark.parametrize("cached", [True, False, None])
def test_a_step_is_one_launch_where_packets_suit_in_the_memory_that_the_policy_gives(
    said: Policy | None, volatile: bool | None, cached: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert roles.one_launch() is False
    memory_record.store(replace(FAST, volatile_packets=volatile, cached_packets=cached))
    if said is not None:
        monkeypatch.setenv("TEGRAD_MEMORY", said)
    assert roles.one_launch() is ((volatile if said is Policy.VOLATILE else cached) is True)


def test_records_decide_no_plan_on_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    both = replace(FAST, volatile_packets=True, cached_packets=True)
    memory_record.store(both)
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    assert roles.one_launch() is False
    monkeypatch.delenv("TEGRAD_BOARD")
    assert roles.one_launch() is True
    memory_record.store(replace(both, board=True))
    assert roles.one_launch() is False
