"""Signals that end a run in order: what was at work is ended, and the report of what was done is written."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that mean the end of a run: Ctrl-C, `kill`, a terminal that closes."""


class Ended(KeyboardInterrupt):
    """A signal asks for the end; its number."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = int(number)


@contextlib.contextmanager
def ending() -> Iterator[Callable[[], None]]:
    """The first of the signals that mean the end is raised as Ended, further ones are not: what tidies up has limits.

    Gives what makes none be raised any more. A signal that is ignored, as under nohup, stays so.
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    heard = [number for number in ENDING if before[number] is not signal.SIG_IGN]

    def ignore() -> None:
        for one in heard:
            signal.signal(one, signal.SIG_IGN)

    def end(number: int, frame: FrameType | None) -> None:
        ignore()
        raise Ended(number)

    for number in heard:
        signal.signal(number, end)
    try:
        yield ignore
    finally:
        for number in heard:
            signal.signal(number, before[number])
