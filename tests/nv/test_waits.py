"""How a wait without the driver's help sleeps, by a clock that stands still but for its own sleeps."""

from __future__ import annotations

from typing import Any

import pytest

from tegrad.nv import waits

TURN_S = 5e-6
"""What a look takes."""


class Time:
    """A clock: a look at it takes a while, and a sleep as long as was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        self.now += TURN_S
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def waited(monkeypatch: pytest.MonkeyPatch, ends_at: float, prompt: bool) -> Time:
    time = Time()
    monkeypatch.setattr(waits, "time", time)
    waits.wait_until(None, lambda: int(time.now >= ends_at), 1, prompt=prompt)
    return time


@pytest.mark.parametrize("ends_at", [100e-6, 231e-6, 2e-3, 20e-3])
def test_a_prompt_wait_is_late_by_a_sixty_fourth_at_most(monkeypatch: pytest.MonkeyPatch, ends_at: float) -> None:
    time = waited(monkeypatch, ends_at, prompt=True)
    assert time.now - ends_at <= ends_at * waits.PROMPT_SHARE + 2 * TURN_S


def test_a_prompt_wait_lets_others_run_and_sleeps_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    time = waited(monkeypatch, 1e-3, prompt=True)
    assert time.slept
    assert set(time.slept) == {0}
    assert sum(waited(monkeypatch, 1.0, prompt=True).slept) > 0.9


def test_other_waits_leave_the_core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step's is one of them: a core for every step would be a core for nothing."""
    time = waited(monkeypatch, 1e-3, prompt=False)
    assert sum(time.slept) > 0.8e-3
    assert len(time.slept) < 40


def test_synchronize_is_prompt(fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr("tegrad.nv.queues.wait_until", lambda *_, prompt=False, **__: given.append(prompt))
    fake_device.timeline_signal.wait(1 << 40)
    fifo = fake_device.compute_gpfifo
    fifo.wait(fifo.submissions + 1)
    assert given == [True, False]


@pytest.mark.parametrize("ms", ["100", "200"])
def test_each_test_has_the_patience_that_it_sets(monkeypatch: pytest.MonkeyPatch, ms: str) -> None:
    """tinygrad remembers what it has read; a short patience of one test would be that of all after it."""
    monkeypatch.setenv("HCQDEV_WAIT_TIMEOUT_MS", ms)
    assert waits.getenv("HCQDEV_WAIT_TIMEOUT_MS", 30000) == int(ms)
