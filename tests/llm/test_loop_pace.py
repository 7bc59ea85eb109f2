"""How the decode loop waits, by the test's own clock: the GPU always has work, and the host sleeps where it may."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from tegrad.llm import loop as module
from tegrad.llm.loop import Loop

POLL, SUBMIT, WAKE = 0.5e-6, 4e-6, 60e-6
"""Seconds of a look at the ring, of a submission, and from the end of a sleep to the waking."""


@dataclass
class World:
    """A host's clock, and a GPU that takes `step` seconds for each submission, one after the other."""

    step: float
    joined: int = 1
    first: float = 0.0
    """Seconds that the first step takes more."""
    now: float = 0.0
    cpu: float = 0.0
    sleeps: int = 0
    waits: int = 0
    ends: list[float] = field(default_factory=list)
    idle: float = 0.0
    late: list[float] = field(default_factory=list)

    def spend(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += seconds

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps += 1
        self.spend(2e-6)
        self.now += seconds + WAKE

    # ---- the recording and the states that the loop uses

    def run(self) -> int:
        self.spend(SUBMIT)
        before = self.ends[-1] if self.ends else self.now
        self.idle += max(0.0, self.now - before)
        begin = max(self.now, before) + (0.0 if self.ends else self.first)
        self.ends += [begin + (at + 1) * self.step for at in range(self.joined)]
        return len(self.ends)

    def wait(self, number: int | None = None) -> None:
        if number is None:  # the last of a stream before, of which there is none
            return
        self.waits += 1
        self.now = max(self.now, self.ends[number - 1])

    def begin(self, *given: object) -> None:
        pass

    def token(self, slot: int, count: int) -> int | None:
        self.spend(POLL)
        return 7 if self.ends[count - 1] <= self.now else None


def run(monkeypatch: pytest.MonkeyPatch, step: float, tokens: int = 400, joined: int = 1, first: float = 0.0) -> World:
    world = World(step, first=first)
    monkeypatch.setattr(module, "time", world)
    loop = Loop.__new__(Loop)
    loop.states = loop.recording = world  # type: ignore[assignment]
    loop._in_flight, loop._streams, loop._joined = deque(), 0, joined
    world.joined = joined
    for _ in loop._steps([1], 0, 1 << 30, tokens, 0):
        world.late.append(world.now - world.ends[len(world.late)])
        world.spend(3e-6)
    return world


@pytest.mark.parametrize("joined", [1, 2, 3])
@pytest.mark.parametrize("step", [50e-6, 150e-6, 250e-6, 350e-6, 1e-3, 7e-3, 60e-3])
def test_the_gpu_never_waits_for_the_host(monkeypatch: pytest.MonkeyPatch, step: float, joined: int) -> None:
    assert run(monkeypatch, step, joined=joined).idle == 0


@pytest.mark.parametrize("joined", [1, 3])
@pytest.mark.parametrize("first", [5e-3, 0.1, 0.7])
@pytest.mark.parametrize("step", [100e-6, 350e-6, 1e-3, 7e-3, 25e-3])
def test_a_slow_first_step_does_not_let_the_host_oversleep_for_long(
    monkeypatch: pytest.MonkeyPatch, step: float, first: float, joined: int
) -> None:
    assert run(monkeypatch, step, 500, joined, first).idle < 1.5 * first
    assert run(monkeypatch, step, 500, joined, first).idle - run(monkeypatch, step, 60, joined, first).idle < 1e-4


@pytest.mark.parametrize("step", [300e-6, 350e-6, 1e-3, 7e-3])
def test_the_host_sleeps_about_once_a_token(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    first, both = run(monkeypatch, step, 100), run(monkeypatch, step, 500)
    assert both.sleeps - first.sleeps <= 1.3 * 400
    assert (both.cpu - first.cpu) / 400 < 15e-6
    assert both.waits == 0


@pytest.mark.parametrize(("step", "sleeps"), [(100e-6, 0.45), (300e-6, 0.45), (450e-6, 0.65)])
def test_the_host_wakes_once_for_several_tokens_of_short_steps(
    monkeypatch: pytest.MonkeyPatch, step: float, sleeps: float
) -> None:
    first, both = run(monkeypatch, step, 100), run(monkeypatch, step, 500)
    assert both.sleeps - first.sleeps <= sleeps * 400
    assert (both.cpu - first.cpu) / 400 < 10e-6


@pytest.mark.parametrize("step", [50e-6, 150e-6, 300e-6, 450e-6, 900e-6, 2e-3, 7e-3])
def test_no_token_comes_much_later_for_that(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    late = sorted(run(monkeypatch, step, 500).late[50:])
    assert late[-1] < module.MOMENT + step / 4 + WAKE
    assert late[len(late) // 2] < module.MOMENT / 2 + WAKE


def test_the_host_polls_where_steps_are_very_short(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, 50e-6).sleeps == 0


def test_a_long_wait_is_one_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = run(monkeypatch, 60e-3, 50)
    assert world.waits > 0
    assert world.sleeps < 50 * 3
