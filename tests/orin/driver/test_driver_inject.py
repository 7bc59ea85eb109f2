"""Injected failures: the nth call, a stall, a seeded probability, and nothing once the rules are gone."""

from __future__ import annotations

import errno
import time

import pytest
from driver_user import SPEC, User, refused

from tegrad.orin.client import board_inject, board_status
from tegrad.orin.inject import Injection, Injector
from tegrad.uapi.errors import DriverError


def test_the_nth_call_fails_once_and_changes_nothing(user: User) -> None:
    assert board_inject(SPEC, [Injection("NVMAP_ALLOC", errno=errno.ENOMEM, nth=2)]) == 1
    user.buffer()
    handle = user.create(4096)
    before = board_status(SPEC)["counts"]["memory_bytes"]
    with refused(errno.ENOMEM):
        user.alloc(handle)
    assert board_status(SPEC)["counts"]["memory_bytes"] == before
    user.alloc(handle)


def test_a_pattern_names_several_calls(user: User) -> None:
    board_inject(SPEC, [Injection("GPU_OPEN_*", errno=errno.ENODEV, nth=1, times=0)])
    with refused(errno.ENODEV):
        user.tsg()
    user.open_channel()


def test_a_stall_delays_its_caller_only(user: User) -> None:
    import threading

    board_inject(SPEC, [Injection("NVMAP_CREATE", stall=1.5, nth=1)])
    began = time.monotonic()
    done: list[float] = []
    thread = threading.Thread(target=lambda: (user.create(4096), done.append(time.monotonic() - began)), daemon=True)
    thread.start()
    time.sleep(0.05)
    user.tsg()
    assert not done
    thread.join()
    assert done[0] >= 1.5


def test_interrupted_calls_are_repeated_by_the_kernel_seam(user: User) -> None:
    board_inject(
        SPEC,
        [Injection("NVMAP_CREATE", errno=errno.EINTR, nth=1), Injection("NVMAP_CREATE", errno=errno.EAGAIN, nth=2)],
    )
    assert user.create(4096)


def test_a_probability_repeats_with_its_seed(user: User) -> None:
    def run(seed: int) -> list[bool]:
        board_inject(SPEC, [Injection("NVMAP_FREE", errno=errno.EIO, probability=0.5, seed=seed, times=0)])
        failed = []
        for _ in range(40):
            try:
                user.free(0)
                failed.append(False)
            except DriverError:
                failed.append(True)
        return failed

    first = run(1)
    assert first == run(1)
    assert first != run(2)
    assert 5 < sum(first) < 35


def test_an_answer_is_put_in_place_of_the_driver_s(user: User) -> None:
    board_inject(SPEC, [Injection("NVMAP_CREATE", answer={"handle": 77}, nth=1)])
    assert user.create(4096) == 77
    assert user.create(4096) != 77


@pytest.mark.parametrize("bad", [{"nth": 1}, {"errno": 5}, {"errno": 5, "nth": 1, "probability": 0.5}])
def test_a_rule_must_make_sense(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="an injection rule takes"):
        Injection("X", **bad)  # type: ignore[arg-type]


def test_every_rule_counts_every_call() -> None:
    injector = Injector()
    injector.arm([Injection("A", errno=1, nth=1), Injection("*", errno=2, nth=3)])
    strikes = [injector.strike(name) for name in ("A", "A", "B", "B")]
    assert [s.errno if s else 0 for s in strikes] == [1, 0, 2, 0]
