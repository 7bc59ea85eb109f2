"""The runlist of the graphics engine: which TSG's grids run, for how long, and how one gives way to the next.

One TSG is on the engine at a time; all its channels' grids run side by side. When its time slice is over and another
TSG has work, it is asked to give way as its preemption mode says: when its grids have ended (WFI), when the CTAs that
have begun have ended (CTA), at once (CILP). Until it has, the switch is stuck, reported every TIMEOUT_PERIOD_S. A
TSG that is alone is never asked. Source: L4T r36.4.3 nvgpu, common/fifo/runlist.c for the order of the
entries, hal/fifo/ctxsw_timeout_ga10b_fusa.c and fifo.h for the period.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntFlag
from typing import TYPE_CHECKING

from tegrad.ptx import AbortFlag

if TYPE_CHECKING:
    from tegrad.orin.compute import ComputeContext
    from tegrad.orin.host import HostChannel

TIMEOUT_PERIOD_S = 0.1
"""Seconds after which a context switch that has not happened is reported, again and again (CTXSW_TIMEOUT_PERIOD_MS)."""

GIVE_WAY_POLL_S = 0.0005
"""Seconds between two looks at grids that are giving way."""

STARVED_FACTOR = 4
"""How many times as long the board waits where other programs keep its threads from the CPU."""

LOW, MEDIUM, HIGH = range(3)


class Patience:
    """Time that grids have to give way: seconds of the clock in which this process also computed for as long.

    A chip needs no CPU to stop its SMs; here each is a thread that has to get one before it can look.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._start, self._spent = seconds, time.monotonic(), time.process_time()

    @property
    def over(self) -> bool:
        """Whether it has passed, or STARVED_FACTOR times as long by the clock."""
        passed, computed = time.monotonic() - self._start, time.process_time() - self._spent
        return passed >= self._seconds and max(computed, passed / STARVED_FACTOR) >= self._seconds


class Preemption(IntFlag):
    """How grids of a TSG give way, the best of them; the numbers are the driver's."""

    WFI = 1
    CTA = 2
    CILP = 4


@dataclass(eq=False)
class Tsg:
    """A group of channels that share a context; a fault stops all that it has then."""

    id: int
    channels: dict[int, HostChannel] = field(default_factory=dict)
    contexts: dict[int, ComputeContext] = field(default_factory=dict)
    """Compute state by address space: channels of one TSG and VM share it."""
    timeslice: float = 0.001024
    """Seconds."""
    level: int = LOW
    preemption: Preemption = Preemption.WFI

    @property
    def enabled(self) -> bool:
        """Whether the host may load it: one of its channels is enabled."""
        return any(channel.enabled for channel in tuple(self.channels.values()))  # the driver adds some meanwhile


def order(groups: Iterable[Tsg]) -> list[Tsg]:
    """The runlist's entries: higher levels stand between those below, so that they come round more often."""
    by_level: tuple[list[Tsg], list[Tsg], list[Tsg]] = ([], [], [])
    for group in sorted(groups, key=lambda group: group.id):
        by_level[group.level].append(group)
    low, medium, high = by_level
    mediums = [entry for group in medium for entry in (*high, group)]
    return [entry for group in low for entry in (*mediums, *high, group)] or mediums or high


class Runlist:
    """The engine and its queue. `groups` tells the TSGs there are; `stuck` is called for a switch that is overdue.

    Grids come by `grid`, in their channels' threads. Everything else is for the scheduler.
    """

    def __init__(self, groups: Callable[[], Iterable[Tsg]], stuck: Callable[[Tsg], None]) -> None:
        self._groups, self._stuck = groups, stuck
        self._lock = threading.Condition()
        self._owner: Tsg | None = None
        self._since = 0.0
        self._leaving = False
        self._on: dict[Tsg, list[AbortFlag]] = {}
        """Grids that have begun: the owner's run, the others' have given way."""
        self._queue: list[tuple[Tsg, AbortFlag]] = []
        self._held: set[Tsg] = set()
        self._place = -1
        self._keeper: threading.Thread | None = None
        self._closed = False

    # -- grids --------------------------------------------------------------------------------------------------------

    @contextmanager
    def grid(self, tsg: Tsg, flag: AbortFlag) -> Iterator[bool]:
        """Be on the engine inside: waits for the TSG's turn; False if the flag was set before it came."""
        came = self._enter(tsg, flag)
        try:
            yield came
        finally:
            if came:
                self._leave(tsg, flag)

    def _enter(self, tsg: Tsg, flag: AbortFlag) -> bool:
        entry = (tsg, flag)
        with self._lock:
            if self._owner is tsg and not self._leaving:
                self._begin(tsg, flag)
                return True
            self._queue.append(entry)
            try:
                self._settle()
                while not flag.is_set and (self._owner is not tsg or self._leaving):
                    self._lock.wait(TIMEOUT_PERIOD_S)
            finally:
                self._queue.remove(entry)
            if flag.is_set:
                self._settle()
                return False
            self._begin(tsg, flag)
            return True

    def _begin(self, tsg: Tsg, flag: AbortFlag) -> None:
        flag.resume()  # the channel's last grid may have ended while it was asked to give way
        self._on.setdefault(tsg, []).append(flag)

    def _leave(self, tsg: Tsg, flag: AbortFlag) -> None:
        with self._lock:
            grids = self._on[tsg]
            grids.remove(flag)
            if not grids:
                del self._on[tsg]
            if self._queue or self._on or self._held:  # else the engine stays with its owner
                self._settle()

    # -- from the scheduler -------------------------------------------------------------------------------------------

    def off(self, flag: AbortFlag) -> bool:
        """Whether the grid with this flag does not run now: it has not come yet, waits, or has given way."""
        with self._lock:
            if any(waiting is flag for _, waiting in self._queue):
                return True
            tsg = next((tsg for tsg, grids in self._on.items() if any(g is flag for g in grids)), None)
            return tsg is None or tsg is not self._owner

    def hold(self, tsg: Tsg) -> None:
        """Take a TSG off the engine and keep it off until `free`; `off` tells when its grids have given way."""
        with self._lock:
            self._held.add(tsg)
            self._settle()

    def free(self, tsg: Tsg) -> None:
        """Undo `hold`."""
        with self._lock:
            self._held.discard(tsg)
            self._settle()

    def kick(self) -> None:
        """Something that the order depends on has changed: channels came or went, or were enabled."""
        with self._lock:
            self._settle()

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    # -- turns, under the lock ----------------------------------------------------------------------------------------

    def _has_work(self, tsg: Tsg) -> bool:
        return tsg in self._on or any(waiting is tsg for waiting, _ in self._queue)

    def _may_run(self, tsg: Tsg) -> bool:
        return self._has_work(tsg) and tsg.enabled and tsg not in self._held

    def _contended(self) -> bool:
        return any(self._may_run(tsg) for tsg in {*self._on, *(t for t, _ in self._queue)} if tsg is not self._owner)

    def _settle(self) -> None:
        """Give an idle engine to the next TSG that has work; wake the keeper where a switch will be due."""
        owner = self._owner
        if owner is None or (owner not in self._on and (self._leaving or not self._may_run(owner))):
            self._switch()
        if self._owner is not None and (self._owner in self._held or self._contended()) and self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="gpu-runlist", daemon=True)
            self._keeper.start()
        self._lock.notify_all()

    def _switch(self) -> None:
        """The next TSG in the order that has work takes the engine; none if there is none."""
        entries = order(tsg for tsg in self._groups() if self._may_run(tsg))
        self._leaving = False
        self._since = time.monotonic()
        if not entries:
            self._owner = None
            return
        self._place = (self._place + 1) % len(entries)
        if entries[self._place] is self._owner:
            self._place = (self._place + 1) % len(entries)
        self._owner = entries[self._place]
        for flag in self._on.get(self._owner, ()):
            flag.resume()

    # -- time slices --------------------------------------------------------------------------------------------------

    def _due(self, owner: Tsg) -> float | None:
        """Seconds until the owner has to give way; None if nobody wants it to."""
        if owner in self._held:
            return 0.0
        if not self._contended():
            return None
        return max(0.0, self._since + owner.timeslice - time.monotonic())

    def _keep(self) -> None:
        """The thread that ends time slices; it runs while somebody waits for the engine."""
        with self._lock:
            while not self._closed:
                owner = self._owner
                due = None if owner is None else self._due(owner)
                if owner is None or due is None:
                    self._keeper = None
                    return
                if due:
                    self._lock.wait(due)
                elif self._give_way(owner):
                    self._switch()
                    self._lock.notify_all()

    def _give_way(self, owner: Tsg) -> bool:
        """Ask the owner to give way and wait until it has; False if it need not any more."""
        self._leaving = True
        patience = Patience(TIMEOUT_PERIOD_S)
        while not self._closed and self._owner is owner:
            for flag in self._on.get(owner, ()):
                if owner.preemption > Preemption.WFI:
                    flag.pause(between_ctas=not owner.preemption & Preemption.CILP)
            if self._gone(owner):
                return True
            if self._due(owner) is None:
                break
            if patience.over and owner not in self._held:
                patience = Patience(TIMEOUT_PERIOD_S)
                self._stuck(owner)
            self._lock.wait(GIVE_WAY_POLL_S)
        else:
            return False
        self._leaving = False
        for flag in self._on.get(owner, ()):
            flag.resume()
        self._lock.notify_all()
        return False

    def _gone(self, owner: Tsg) -> bool:
        """Whether nothing of a TSG executes: it has no grids, or all have given way."""
        grids = self._on.get(owner, ())
        return not grids or (owner.preemption > Preemption.WFI and not any(flag.running for flag in grids))
