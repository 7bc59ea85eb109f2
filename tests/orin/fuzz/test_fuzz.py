"""Random calls, valid and not, from several clients: the board never breaks, never leaks, never mixes up memory.

2,500 steps here, eight times as many with `long`; `python tests/orin/fuzz/run.py` does as many as one likes.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from fuzz_world import ACTIONS, Died, Draw, World, seeded
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tegrad.orin.client import board_status

pytestmark = [pytest.mark.board, pytest.mark.klog_errors(".")]  # what the calls provoke is any error there is

STEPS = 200


class Clients(RuleBasedStateMachine):
    """Each rule is one client doing one thing; the seed decides about the details."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize()
    def begin(self) -> None:
        self.world = World()

    @rule(name=st.sampled_from([*ACTIONS, *["any_ioctl"] * 6]), seed=st.integers(0, 2**32 - 1))
    def do(self, name: str, seed: int) -> None:
        assert self.world is not None
        Clients.steps += 1
        self.world.step(name, Draw(random.Random(seed).randrange))

    @invariant()
    def stands(self) -> None:
        if self.world is not None and Clients.steps % 50 == 0:
            self.world.check()

    def teardown(self) -> None:
        if self.world is not None:
            try:
                self.world.end()
            finally:
                for seat in self.world.seats:
                    seat.client.kill()


@pytest.mark.parametrize(
    ("examples", "steps"),
    [pytest.param(16, 2_500, id="2,500"), pytest.param(106, 20_000, id="twenty", marks=pytest.mark.long)],
)
def test_thousands_of_random_steps(examples: int, steps: int) -> None:
    Clients.steps = 0
    run_state_machine_as_test(
        Clients,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Clients.steps >= steps


# ---- the test itself can fail


def finished(world: World) -> None:
    for seat in world.seats:
        seat.client.kill()


def test_another_clients_mark_in_ones_memory_is_noticed() -> None:
    world = World()
    try:
        client = world.seats[0].client
        client.ask("buffer", 4096, 2)
        world.check()
        client.ask("poison", world.seats[1].client.number)
        with pytest.raises(AssertionError, match="sees the memory of"):
            world.check()
    finally:
        finished(world)


def test_a_gpu_that_was_started_anew_is_noticed() -> None:
    world = World()
    try:
        os.kill(world.before["pids"]["gpu"], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while board_status(world.spec)["pids"] == world.before["pids"]:
            assert time.monotonic() < deadline
        with pytest.raises(AssertionError, match="started anew"):
            world.check()
    finally:
        finished(world)


def test_something_left_behind_is_noticed() -> None:
    world = World()
    left = world.kernel.open("/dev/nvmap")
    try:
        with pytest.raises(AssertionError):
            world.end()
    finally:
        world.kernel.close(left)
        finished(world)


def test_a_client_that_dies_by_itself_is_noticed() -> None:
    world = World()
    try:
        with pytest.raises(Died):
            world.seats[0].client.ask("no_such_thing")
        os.kill(world.seats[1].client.pid, signal.SIGKILL)
        with pytest.raises(Died):
            world.seats[1].client.ask("hello")
    finally:
        finished(world)


def test_a_seed_makes_the_same_choices_again() -> None:
    first, second = seeded(7), seeded(7)
    assert [first.below(1000) for _ in range(50)] == [second.below(1000) for _ in range(50)]
