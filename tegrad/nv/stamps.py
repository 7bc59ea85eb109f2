"""Recordings with the GPU's clock between their launches, for who wants to know what each of them takes.

Before the first launch and after each one the host of the channel waits until the engine is idle and stores the time.
So the launches run one at a time: each of them takes longer than in a plain recording by what this waiting costs.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tinygrad.device import Compiled
from tinygrad.helpers import PROFILE, ProfileRangeEvent, to_mv
from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.hw.gpfifo import semaphore
from tegrad.nv import roles
from tegrad.nv.faults import DeviceClosed, DeviceFault, WaitTimeout
from tegrad.nv.replay import (
    BARRIER,
    DEFAULT,
    RUNS_IN_FLIGHT,
    TIMELINE_RELEASE,
    Argument,
    Dependency,
    Launch,
    Number,
    Recording,
)
from tegrad.nv.spec import MemorySpec

if TYPE_CHECKING:
    from tegrad.nv.device import NVDevice

SPEC: Final = MemorySpec(host=True, uncached=True, cpu_access=True, nolru=True, role=roles.SIGNALS)
STAMP_BYTES: Final = 16
"""A number, and the time in nanoseconds."""
CLOCK_TRIES: Final = 9
open_recordings: weakref.WeakSet[StampedRecording] = weakref.WeakSet()
"""Those that may have a run to tell of."""


class StampedRecording(Recording):
    """A recording that calls `told` with the GPU's times in ns of each run that is over: one before the first launch,
    and one after each.

    A run begins when the one before it is over, and is told of then, at a wait, or at `collect`.
    """

    _stamps: HCQBuffer | None = None
    _untold = False

    def __init__(
        self, device: NVDevice, launches: Sequence[Launch], told: Callable[[list[int]], None], *,
        depth: int = RUNS_IN_FLIGHT, inputs: Sequence[Sequence[Argument]] = (),
        numbers: Sequence[Sequence[Number]] = (),
    ) -> None:  # fmt: skip
        size = STAMP_BYTES * (len(launches) + 1)
        self.device, self._told, self._depth = device, told, depth
        self._stamps = device.allocator.alloc(size, SPEC)
        self._times = to_mv(self._stamps.cpu_view().addr, size).cast("Q")
        at = self._stamps.va_addr

        def stamp(index: int) -> tuple[int, ...]:
            return semaphore(TIMELINE_RELEASE, at + STAMP_BYTES * index, index)

        between = Dependency(
            start=(*BARRIER, *stamp(0)), between=lambda place: stamp(place.index), end=stamp(len(launches))
        )
        super().__init__(device, launches, between, depth=depth, inputs=inputs, numbers=numbers)
        open_recordings.add(self)

    def run(self, times: int = 1, addresses: tuple[int, ...] = (), numbers: tuple[int, ...] = ()) -> int:
        """See `Recording.run`; all runs but the last are over when this returns."""
        with self.device.lock:
            if not 0 < times <= self._depth:
                return super().run(times, addresses, numbers)  # which refuses it
            for _ in range(times):
                self.collect()
                number = super().run(1, addresses, numbers)
                self._untold = True
        return number

    def wait(self, number: int | None = None) -> None:
        """See `Recording.wait`."""
        super().wait(number)
        if number is None or number >= self._last:
            self.collect()

    def collect(self) -> None:
        """Tell of the last run, once it is over."""
        with self.device.lock:
            if self._untold:
                self._untold = False
                super().wait()
                self._told(self._times.tolist()[1::2])

    def close(self) -> None:
        """See `Recording.close`."""
        with suppress(DeviceClosed, DeviceFault, WaitTimeout):
            self.collect()
        self._untold = False
        super().close()
        stamps, self._stamps = self._stamps, None
        if stamps is not None:
            self._times = memoryview(b"")
            self.device.allocator.free(stamps, stamps.size, SPEC)


def recorded(
    device: NVDevice, launches: Sequence[Launch], dependency: Dependency = DEFAULT, *, depth: int = RUNS_IN_FLIGHT,
    numbers: Sequence[Sequence[Number]] = (),
) -> Recording:  # fmt: skip
    """A recording; while tinygrad reports each kernel (PROFILE) one that reports its launches among them."""
    if not PROFILE.value:
        return Recording(device, launches, dependency, depth=depth, numbers=numbers)
    names, where = [launch.program.name for launch in launches], device.device

    def told(times: list[int]) -> None:
        spans = zip(names, times, times[1:], strict=False)
        Compiled.profile_events += [ProfileRangeEvent(where, name, st / 1e3, en / 1e3) for name, st, en in spans]

    return StampedRecording(device, launches, told, depth=depth, numbers=numbers)


def clock_ahead(device: NVDevice) -> float:
    """Microseconds by which the CPU's clock (perf_counter) is ahead of the GPU's: the median of a few tries."""
    found = []
    for _ in range(CLOCK_TRIES):
        signal = device.new_signal()
        begun = time.perf_counter_ns()
        with device.lock:
            device.hw_compute_queue_t().timestamp(signal).submit(device)
        device.compute_gpfifo.wait(device.compute_gpfifo.submissions)
        found.append((begun + time.perf_counter_ns()) / 2e3 - float(signal.timestamp))
    return statistics.median(found)
