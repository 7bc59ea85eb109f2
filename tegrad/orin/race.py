"""Provokes races that silicon allows and an orderly emulation hides. The liberties, and what takes each away:

    the doorbell is seen late, GP_GET moves on early            wait for a release, never for GP_GET
    grids and copies start late                                 a release that waits for idle (or a wait for idle)
    launches with nothing between them run in any order         WFI, WAIT_FOR_IDLE, a dependent QMD
    pipelined copies run in any order                           a non-pipelined one, or a wait for idle
    a QMD is read when announced, when prefetched, or late      it stays untouched until the grid is over
    a prefetched QMD stays as it was fetched                    an invalidating action, INVALIDATE_SKED_CACHES
    a QMD's release is seen before the grid's stores            a membar in the QMD
    a QMD's second release is read when the first was made      it stays untouched until the last is seen
    a copy's semaphore is seen before its data                  FLUSH in its LAUNCH_DMA
    constants and instructions are fetched anew or not          invalidate before, and leave alone what is in flight
    a kept sector leaves the L2 by itself                       never count on what is kept, or on what is not
    a bulk copy in a kernel lands at once, late, out of order   its mbarrier; nobody still reads where it goes
    in a kernel with mbarriers any warp stands still            what the warps wait for

Everything here is a legal outcome on hardware. What a program gets wrong under any seed, it gets wrong. A board is put
into this mode by the environment variable `TEGRAD_RACE`, whose value is the seed.
"""

from __future__ import annotations

import os
import random
import threading

from tegrad.errors import SettingError

VARIABLE = "TEGRAD_RACE"
DELAY_S = 0.003
"""The longest time for which the GPU puts something off."""


class Race:
    """Seeded choices. Two runs with one seed choose alike where their threads come to choose in the same order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls) -> Race | None:
        """The mode that the environment asks for. SettingError for a seed that is not a number."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        try:
            return cls(int(text))
        except ValueError:
            raise SettingError(f"{VARIABLE}={text} is no seed: set it to a whole number, or unset it") from None

    def _draw(self) -> float:
        with self._lock:
            return self._random.random()

    def _pause(self) -> float:
        """Seconds, up to DELAY_S; 0 half of the time."""
        return max(0.0, self._draw() - 0.5) * 2 * DELAY_S

    def fetch_delay(self) -> float:
        """Seconds from a doorbell to the fetch of GP_PUT; often 0."""
        return self._pause()

    def launch_delay(self) -> float:
        """Seconds from the launch method to the start of the grid."""
        return self._draw() * DELAY_S

    def pick(self, count: int) -> int:
        """Which of `count` launches that wait side by side goes first."""
        return int(self._draw() * count)

    def early_get(self) -> bool:
        """Whether GP_GET moves on when an entry is fetched, before its methods are executed."""
        return self._draw() < 0.5

    def early_release(self) -> bool:
        """Whether a release that no barrier orders after the grid's stores is seen before them."""
        return self._draw() < 0.5

    def late_release(self) -> float:
        """Seconds from one release of a QMD to the next, which is then read from memory again; 0: it was read before.

        On an Orin 2 of 200 such signals were lost where the QMD was filled again after the first.
        """
        return self._pause()

    def forgets(self) -> bool:
        """Whether a cache that may keep what it fetched happens to fetch it anew."""
        return self._draw() < 0.3

    def copies_seed(self) -> int:
        """What a grid draws from, in which copies land early, bulk ones out of order, and wgmma runs early; not 0."""
        return 1 + int(self._draw() * 0x7FFFFFFE)

    def evictions_seed(self) -> int:
        """What the L2 draws from to let sectors go by themselves."""
        return int(self._draw() * 0x7FFFFFFF)

    def early_qmd(self) -> bool:
        """Whether a QMD is read when it is announced, before the grid's turn comes, or only then."""
        return self._draw() < 0.3
