"""Recordings with the GPU's clock between launches compute what plain ones do, and tell of every run."""

from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
from boards import open_device, use_board
from kernels import program, words

from tegrad.nv.program import LaunchError
from tegrad.nv.replay import Launch
from tegrad.nv.stamps import StampedRecording, clock_ahead

pytestmark = pytest.mark.board

VALUES = (5, 1, 4, 2, 3)


@pytest.fixture(params=["agx-orin-64gb:18GiB", "gh100"])
def racing(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A device on a board that races."""
    with use_board(request.param, race=9):
        yield open_device()


def mixes(device: Any, buffer: Any) -> list[Launch]:
    """Launches that come out differently in any other order."""
    buffer.cpu_view()[0:256] = bytes(256)
    mix = program(device, "mix")
    return [Launch(mix, (buffer,), (1, 1, 1), (64, 1, 1), (value,)) for value in VALUES]


def mixed(times: int) -> int:
    total = reduce(lambda state, value: (state * 3 + value) & 0xFFFFFFFF, VALUES * times, 0)
    return total - (1 << 32) if total >> 31 else total


def test_launches_run_in_order_and_every_run_is_told_of_once(racing: Any) -> None:
    buffer, runs = racing.allocator.alloc(4096), list[list[int]]()
    with StampedRecording(racing, mixes(racing, buffer), runs.append, depth=3) as recording:
        numbers = [recording.run(), recording.run(3)]
        assert numbers[1] - numbers[0] == 3
        recording.wait(numbers[1])
        assert len(runs) == 4
        recording.run()
    assert words(buffer, 64) == [mixed(5)] * 64
    assert [len(times) for times in runs] == [len(VALUES) + 1] * 5
    every = [time for times in runs for time in times]
    assert every == sorted(every)
    assert all(times[0] < times[-1] for times in runs)


def test_more_runs_at_once_than_may_be_in_flight_are_refused(racing: Any) -> None:
    runs = list[list[int]]()
    with StampedRecording(racing, mixes(racing, racing.allocator.alloc(4096)), runs.append, depth=2) as recording:
        for times in (0, 3):
            with pytest.raises(LaunchError, match=f"{times} runs cannot be submitted at once"):
                recording.run(times)
    assert runs == []


def test_while_tinygrad_reports_kernels_recordings_report_their_launches(racing: Any) -> None:
    from tinygrad.device import Compiled
    from tinygrad.helpers import Context

    buffer = racing.allocator.alloc(4096)
    launches, before = mixes(racing, buffer), len(Compiled.profile_events)
    with Context(PROFILE=1), racing.record(launches) as recording:
        recording.run()
        recording.run()
    told = Compiled.profile_events[before:]
    del Compiled.profile_events[before:]
    assert [(event.device, event.name) for event in told] == [(racing.device, "mix")] * 2 * len(VALUES)
    assert all(event.st <= event.en for event in told)
    assert words(buffer, 64) == [mixed(2)] * 64
    assert not isinstance(racing.record(launches), StampedRecording)


def test_the_clocks_of_cpu_and_gpu_are_held_against_each_other(racing: Any) -> None:
    assert abs(clock_ahead(racing)) < 10e6  # a board's GPU has the CPU's clock; a signal takes less than that
