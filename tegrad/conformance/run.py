"""Running rules: one at a time, each on a rig of its own, each with a limit of time."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from tegrad.conformance.rig import Rig
from tegrad.conformance.rule import Differs, NotApplicable, Rule
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import Kernel

State = Literal["holds", "differs", "error", "not applicable", "skipped"]
LIMIT_S = 60.0
"""Seconds after which a rule is interrupted; none needs more than a few."""

PATIENCE_S = 10.0
"""Seconds until what a rule waits for is taken not to happen."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a rule. `detail`: why it could not be judged."""

    rule: Rule
    state: State
    expected: str = ""
    seen: str = ""
    detail: str = ""
    seconds: float = 0.0


class Overdue(Exception):
    """A rule took longer than it may."""


def judge(rule: Rule, kernel: Kernel, *, limit: float = LIMIT_S, patience: float = PATIENCE_S) -> Outcome:
    """Run one rule and release what it made, whatever happens to it."""
    start = time.monotonic()
    state: State
    expected = seen = detail = ""
    try:
        with limited(limit), Rig(kernel, patience=patience, hazardous=rule.hazardous) as rig:
            rule.check(rig)
        state = "holds"
    except Differs as difference:
        state, expected, seen = "differs", difference.expected, difference.seen
    except NotApplicable as reason:
        state, detail = "not applicable", str(reason)
    except Overdue:
        state, detail = "error", f"did not end within {limit:g} s"
    except DriverError as error:
        state, detail = "error", f"set-up failed: {error}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        state, detail = "error", f"{type(error).__name__}: {error} ({last.name}, line {last.lineno})"
    return Outcome(rule, state, expected, seen, detail, time.monotonic() - start)


def run(rules: Iterable[Rule], kernel: Kernel, *, hazardous: bool = False) -> Iterator[Outcome]:
    """Judge rules in order; the hazardous ones only where they are asked for."""
    for rule in rules:
        if rule.hazardous and not hazardous:
            yield Outcome(rule, "skipped", detail="hazardous on a real kernel: run it with --hazardous")
        else:
            yield judge(rule, kernel)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Interrupt what takes longer, by a signal that also ends a sleep in an ioctl; only the main thread has one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def overdue(number: int, frame: FrameType | None) -> None:
        raise Overdue

    before = signal.signal(signal.SIGALRM, overdue)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
