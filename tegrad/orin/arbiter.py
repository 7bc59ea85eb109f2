"""The arbiter of the GPC clock: what the clock can be, and who asked for what.

A ctrl fd is a session with a target; a request of CLK_SET_INFO sets it and holds the clock while its completion fd is
open. The arbiter takes the highest target.

Source: L4T r36.4.3 nvgpu, common/clk_arb/clk_arb_gp10b.c.
"""

from __future__ import annotations

from typing import Protocol

from tegrad.hw.chips import Chip

MHZ = 1_000_000
IDLE_MHZ, STEP_MHZ = 306, 102
MAX_FREQ_POINTS = 15


def clock_points(chip: Chip) -> list[int]:
    """The frequencies of the GPC clock, in Hz: steps of 102 MHz and the maximum."""
    most = chip.max_freq_hz // MHZ
    return [mhz * MHZ for mhz in [*range(IDLE_MHZ, most, STEP_MHZ), most][-MAX_FREQ_POINTS:]]


class Session(Protocol):
    """A ctrl fd, with the clock that it has asked for last: 0 for none."""

    target_mhz: int


class Arbiter:
    """The clock arbiter of a board: sessions with targets, and the requests whose completion fds are open."""

    def __init__(self, chip: Chip) -> None:
        points = clock_points(chip)
        self.least, self.most = points[0], points[-1]
        self.sessions: list[Session] = []
        self.requests: list[object] = []
        self.actual = self.most
        """What the arbiter set last, in Hz; it stays when the last request is gone."""

    @property
    def effective(self) -> int:
        """The clock in Hz: the arbiter's while a request is open, else the governor's, which is the maximum here."""
        return self.actual if self.requests else self.most

    def run(self) -> None:
        """Set the highest target, within what the clock can do; without one, the maximum."""
        wanted = max((session.target_mhz for session in self.sessions), default=0) * MHZ
        self.actual = min(max(wanted or self.most, self.least), self.most)
