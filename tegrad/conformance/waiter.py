"""A CHANNEL_WAIT that sleeps while the rule goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tegrad.conformance.rig import Rig, code
from tegrad.uapi.errors import DriverError

LOOKS, LOOK_S = 10, 0.002
"""A thread that sleeps at so many looks in a row, so far apart, is in the call: what it does before that is short."""


class Waiter:
    """CHANNEL_WAIT with these fields in a thread, which sleeps in it, or is over, when this returns.

    Its time is `rig.patience`, or `times` as long: a rule that asks whether something wakes the call, and not its time,
    needs more than the patience of `result`. The channel is reset when the rule ends and the call still sleeps.
    """

    def __init__(self, rig: Rig, channel: int, fields: Mapping[str, int], *, times: int = 1) -> None:
        self._rig, self._channel, self._result = rig, channel, "nothing in time"
        self._fields = {**fields, "timeout": int(1000 * rig.patience * times)}
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        rig.at_end(self._end)
        self._thread.start()
        self._begun.wait()
        looks, deadline = 0, time.monotonic() + rig.patience
        while self.asleep and looks < LOOKS and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            looks = looks + 1 if self._blocked() else 0

    @property
    def asleep(self) -> bool:
        """Whether the call has not returned."""
        return self._thread.is_alive()

    def result(self) -> str:
        """What the call returned, `success` or an errno's name, looked for as long as patience lasts."""
        self._thread.join(self._rig.patience)
        return self._result

    def _run(self) -> None:
        self._begun.set()
        try:
            self._rig.call(self._channel, "CHANNEL_WAIT", self._fields)
            self._result = "success"
        except DriverError as error:
            self._result = code(error.errno or 0)

    def _blocked(self) -> bool:
        """Whether the kernel says that the thread sleeps."""
        try:
            stat = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("S", "D")

    def _end(self) -> None:
        if self.asleep:
            with contextlib.suppress(DriverError):
                self._rig.call(self._channel, "CHANNEL_FORCE_RESET")
            self._thread.join()
