"""The mode that provokes races: programs that synchronise pass under every seed, and each classic mistake shows."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from gpu_rig import STORE, Rig
from test_gpu_launch import ADD_ONE, dependent_fields, release_fields

from tegrad.errors import TegradError
from tegrad.hw.classes import ComputeMethod, HostMethod
from tegrad.hw.gpfifo import Userd
from tegrad.orin.events import FatalEvent
from tegrad.orin.race import Race

SEEDS = range(4)


def caught(mistake: Callable[[Rig], bool]) -> int:
    """Under how many seeds the outcome is wrong."""
    wrong = 0
    for seed in range(8):
        with Rig(race_seed=seed) as rig:
            wrong += not mistake(rig)
            assert not rig.of(FatalEvent)
    return wrong


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("chip", ["agx-orin-64gb", "gh100"])
def test_a_program_that_waits_is_right_under_any_seed(chip: str, seed: int) -> None:
    with Rig(chip, race_seed=seed) as rig:
        channel, out, src = rig.channel().setup(), rig.buffer(), rig.buffer()
        add, store = rig.program(ADD_ONE, "add_one"), rig.program(STORE, "store")
        for i in range(10):
            bank = rig.arguments(out.va, i)
            add_qmd = rig.qmd(add, bank, at=0xA00)
            channel.launch(rig.qmd(store, bank)).method(0, HostMethod.WFI, 0).launch(add_qmd)
            channel.method(1, ComputeMethod.WAIT_FOR_IDLE, 0)
            channel.launch(rig.qmd(add, bank, at=0xC00, **dependent_fields(rig, add_qmd)))
            channel.copy(out.va, src.va, 4)
            assert channel.run()
            assert out.u32() == src.u32() == i + 3


@pytest.mark.parametrize("barrier", ["cwd_membar_type", "release0_membar_type"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_barrier_orders_stores_before_the_release(barrier: str, seed: int) -> None:
    with Rig(race_seed=seed) as rig:
        channel, out = rig.channel().setup(), rig.buffer()
        program, bank = rig.program(STORE, "store"), rig.arguments()
        for i in range(1, 20):
            rig.put_arguments(bank, out.va, i)
            fields = release_fields(rig, 0, out.va + 64, i)
            channel.launch(rig.qmd(program, bank, **fields, **{barrier: 1})).submit()
            assert rig.wait(lambda i=i: out.u32(64) == i)
            assert out.u32() == i
            assert channel.run()


def _reuse_arguments(rig: Rig) -> bool:
    """Two launches through one constant bank with no wait between."""
    channel, out = rig.channel().setup(), rig.buffer()
    program, bank = rig.program(STORE, "store"), rig.arguments(out.va, 1)
    qmd = rig.qmd(program, bank)
    channel.launch(qmd).submit()
    rig.put_arguments(bank, out.va + 4, 2)
    assert channel.launch(qmd).run()
    return (out.u32(), out.u32(4)) == (1, 2)


def _signal_into_a_submitted_qmd(rig: Rig) -> bool:
    """A release written into the descriptor after it was submitted."""
    channel, out = rig.channel().setup(), rig.buffer()
    program, bank = rig.program(STORE, "store"), rig.arguments(out.va, 1)
    channel.launch(rig.qmd(program, bank)).submit()
    time.sleep(0.02)
    rig.qmd(program, bank, **release_fields(rig, 0, out.va + 64, 1))
    assert channel.run()
    return out.u32(64) == 1


def _rewrite_a_submitted_qmd(rig: Rig) -> bool:
    """The next launch's descriptor in the place of one that was submitted."""
    channel, out = rig.channel().setup(), rig.buffer()
    store, add, bank = rig.program(STORE, "store"), rig.program(ADD_ONE, "add_one"), rig.arguments(out.va, 10)
    channel.launch(rig.qmd(store, bank)).submit()
    channel.launch(rig.qmd(add, bank))
    assert channel.run()
    return out.u32() == 11


def _reuse_pushbuffer(rig: Rig) -> bool:
    """Command memory written again right behind the doorbell."""
    channel, out = rig.channel(), rig.buffer()
    channel.release(out.va, 1).submit()
    at = channel._at
    channel._at = 0
    channel.release(out.va + 64, 1).submit()
    channel._at = max(at, channel._at)
    assert channel.run()
    return (out.u64(), out.u64(64)) == (1, 1)


def _trust_gp_get(rig: Rig) -> bool:
    """Taking GP_GET == GP_PUT for the end of the work."""
    channel, out = rig.channel().setup(), rig.buffer()
    channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1))).submit()
    assert rig.wait(lambda: channel.userd.u32(Userd.GP_GET) == channel.put)
    done = out.u32() == 1
    assert channel.run()
    return done


def _release_without_waiting(rig: Rig) -> bool:
    """A pushbuffer release that does not wait for idle, taken for the end of the grid."""
    channel, out = rig.channel().setup(), rig.buffer()
    channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1)))
    channel.release(out.va + 64, 1, 1 | 1 << 24).submit()
    assert rig.wait(lambda: out.u64(64) == 1)
    done = out.u32() == 1
    assert channel.run()
    return done


def _launch_behind_without_waiting(rig: Rig) -> bool:
    """A grid that needs the one before it, with nothing between them."""
    channel, out = rig.channel().setup(), rig.buffer()
    store, add, bank = rig.program(STORE, "store"), rig.program(ADD_ONE, "add_one"), rig.arguments(out.va, 10)
    assert channel.launch(rig.qmd(store, bank)).launch(rig.qmd(add, bank, at=0xA00)).run()
    return out.u32() == 11


def _release_without_a_barrier(rig: Rig) -> bool:
    """A release in the descriptor with no membar, taken for a sign that the grid's stores have arrived."""
    channel, out = rig.channel().setup(), rig.buffer()
    fields = release_fields(rig, 0, out.va + 64, 1)
    channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1), **fields)).submit()
    assert rig.wait(lambda: out.u32(64) == 1)
    done = out.u32() == 1
    assert channel.run()
    return done


MISTAKES = [
    _reuse_arguments,
    _signal_into_a_submitted_qmd,
    _rewrite_a_submitted_qmd,
    _reuse_pushbuffer,
    _trust_gp_get,
    _release_without_waiting,
    _launch_behind_without_waiting,
    _release_without_a_barrier,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__.strip("_"))
def test_a_missing_wait_shows_under_some_seed(mistake: Callable[[Rig], bool]) -> None:
    assert caught(mistake)


def test_the_same_seed_draws_alike() -> None:
    one, two, other = Race(5), Race(5), Race(6)
    draws = [[r.launch_delay() for _ in range(20)] for r in (one, two, other)]
    assert draws[0] == draws[1] != draws[2]


def test_the_environment_turns_the_mode_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEGRAD_RACE", raising=False)
    assert Race.from_environment() is None
    monkeypatch.setenv("TEGRAD_RACE", "5")
    race = Race.from_environment()
    assert race is not None
    assert race.launch_delay() == Race(5).launch_delay()
    monkeypatch.setenv("TEGRAD_RACE", "often")
    with pytest.raises(TegradError, match="whole number"):
        Race.from_environment()
