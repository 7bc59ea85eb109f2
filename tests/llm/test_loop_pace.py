"""How the decode loop waits, by the test's own clock: the GPU always has work, and the host sleeps where it may."""

from dataclasses import dataclass, field

import pytest

from tegrad.llm import loop as module
from tegrad.llm.loop import Loop, Pace

POLL, DOORBELL, RUN, SLEEP, WAKE = 0.5e-6, 4.5e-6, 1e-6, 8e-6, 60e-6
"""Seconds: CPU of a look at the ring, a submission, each run of it and a sleep; from a sleep's end to the waking."""


@dataclass
class World:
    """A host's clock, and a GPU that takes `step` seconds for each submission, one after the other."""

    step: float
    steps_per_submission: int = 1
    first: float = 0.0
    """Seconds that the first step takes more."""
    now: float = 0.0
    cpu: float = 0.0
    sleeps: int = 0
    waits: int = 0
    runs: int = 0
    doorbells: int = 0
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
        self.spend(SLEEP)
        self.now += seconds + WAKE

    # ---- the recording and the states that the loop uses

    def run(self, times: int = 1) -> int:
        self.spend(DOORBELL + RUN * times)
        before = self.ends[-1] if self.ends else self.now
        self.idle += max(0.0, self.now - before)
        begin = max(self.now, before) + (0.0 if self.ends else self.first)
        self.ends += [begin + (at + 1) * self.step for at in range(times * self.steps_per_submission)]
        self.runs += times
        self.doorbells += 1
        return self.runs

    def wait(self, number: int | None = None) -> None:
        if number is None:  # the last of a stream before, of which there is none
            return
        self.waits += 1
        self.now = max(self.now, self.ends[number * self.steps_per_submission - 1])

    def begin(self, *given: object) -> None:
        pass

    def tokens(self, slot: int, first: int, last: int) -> list[int]:
        self.spend(POLL)
        return [7 for end in self.ends[first - 1 : last] if end <= self.now]


def run(
    monkeypatch: pytest.MonkeyPatch, step: float, tokens: int = 400, steps_per_submission: int = 1, first: float = 0.0,
    busy: float = 1e-6, known: float = 0.0,
) -> World:  # fmt: skip
    """Read so many tokens, for each of which the reader is `busy`; the loop has `known` steps of such a length."""
    world = World(step, steps_per_submission, first=first)
    monkeypatch.setattr(module, "time", world)
    loop = Loop.__new__(Loop)
    loop.states = loop.recording = world  # type: ignore[assignment]
    loop._streams, loop._steps_per_submission, loop._pace = 0, steps_per_submission, Pace()
    loop._pace.knows(known, module.AVERAGED_TOKENS // 2)
    for _ in loop._steps([1], 0, 1 << 30, tokens, 0):
        world.late.append(world.now - world.ends[len(world.late)])
        world.spend(busy)
    return world


@pytest.mark.parametrize("steps_per_submission", [1, 2, 3])
@pytest.mark.parametrize("step", [50e-6, 150e-6, 250e-6, 350e-6, 1e-3, 7e-3, 60e-3])
def test_the_gpu_never_waits_for_the_host(
    monkeypatch: pytest.MonkeyPatch, step: float, steps_per_submission: int
) -> None:
    assert run(monkeypatch, step, steps_per_submission=steps_per_submission).idle == 0


@pytest.mark.parametrize("steps_per_submission", [1, 3])
@pytest.mark.parametrize("first", [5e-3, 0.1, 0.7])
@pytest.mark.parametrize("step", [100e-6, 350e-6, 1e-3, 7e-3, 25e-3])
def test_a_slow_first_step_does_not_let_the_host_oversleep_for_long(
    monkeypatch: pytest.MonkeyPatch, step: float, first: float, steps_per_submission: int
) -> None:
    assert run(monkeypatch, step, 500, steps_per_submission, first).idle < 1.5 * first
    assert (
        run(monkeypatch, step, 500, steps_per_submission, first).idle
        - run(monkeypatch, step, 60, steps_per_submission, first).idle
        < 1e-4
    )


@pytest.mark.parametrize("step", [2.5e-3, 7e-3, 15e-3])
def test_the_host_sleeps_about_once_for_a_long_step(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    first, both = run(monkeypatch, step, 100), run(monkeypatch, step, 500)
    assert both.sleeps - first.sleeps <= 1.7 * 400
    assert both.waits == 0


@pytest.mark.parametrize(("step", "each"), [(50e-6, 16), (150e-6, 11), (350e-6, 4.5), (450e-6, 3.5), (900e-6, 1.7)])
def test_the_host_wakes_once_for_all_tokens_of_a_moment(
    monkeypatch: pytest.MonkeyPatch, step: float, each: float
) -> None:
    first, both = run(monkeypatch, step, 100), run(monkeypatch, step, 500)
    assert both.sleeps - first.sleeps <= 400 / each
    assert both.doorbells - first.doorbells <= 2 * 400 / each
    assert both.cpu - first.cpu <= 400 * 1e-6 + (both.sleeps - first.sleeps) * 30e-6 + 400 * 1.5e-6


@pytest.mark.parametrize("step", [50e-6, 150e-6, 300e-6, 450e-6, 900e-6, 2e-3, 7e-3])
def test_no_token_comes_much_later_for_that(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    late = sorted(run(monkeypatch, step, 500).late[50:])
    assert late[-1] < module.TOKEN_DELAY_S + step / 4 + 2 * WAKE
    assert late[len(late) // 2] < module.TOKEN_DELAY_S / 2 + 2 * WAKE


@pytest.mark.parametrize("step", [2.5e-3, 7e-3, 25e-3])
def test_a_token_of_a_long_step_is_seen_soon(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    late = sorted(run(monkeypatch, step, 300).late[50:])
    assert late[-1] < 0.05 * step + 2 * WAKE


@pytest.mark.parametrize("step", [100e-6, 350e-6, 7e-3])
def test_the_first_and_the_last_token_come_at_once(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    late = run(monkeypatch, step, 128, known=step).late
    assert late[0] < 3 * WAKE
    assert late[-1] < step / 2 + 2 * WAKE


def test_the_host_sleeps_for_the_first_token_too_once_it_knows_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, 350e-6, 1).cpu > 200e-6  # it polls, since nobody knows how long that takes
    known = run(monkeypatch, 350e-6, 1, known=350e-6)
    assert (known.sleeps, known.cpu < 40e-6) == (1, True)


@pytest.mark.parametrize("step", [100e-6, 350e-6])
def test_a_slow_reader_does_not_make_the_host_believe_in_fast_steps(
    monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    world = run(monkeypatch, step, 400, busy=3e-3)
    assert world.runs < 400 + 2 * module.TOKENS_TOGETHER
    assert world.sleeps < 50


def test_a_long_wait_is_one_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = run(monkeypatch, 60e-3, 50)
    assert world.waits > 0
    assert world.sleeps < 50 * 3
