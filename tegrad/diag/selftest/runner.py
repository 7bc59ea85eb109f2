"""Runs stages, each in a process of its own with its limit of time: a hang or a crash is an outcome like any other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tegrad.conformance.process import bound
from tegrad.diag.selftest.ending import Ended
from tegrad.diag.selftest.place import Place, place
from tegrad.diag.selftest.stage import Asked, Stage
from tegrad.installed import search_path

State = Literal["right", "failed", "hung", "crashed", "interrupted", "not here", "not applicable", "not run"]
BAD: frozenset[State] = frozenset({"failed", "hung", "crashed"})
END_TIMEOUT_S = 5.0
"""Seconds that a process has to end: first when it is asked to, then when it is killed."""
STDERR_CHARACTERS = 2000
"""Characters of stderr that are kept of a stage that hung or crashed."""


@dataclass(slots=True)
class Outcome:
    """What came of a stage. `step`: what it was at when it went wrong; `stuck`: its process cannot be killed.

    `ended`: the signal that ended the run meanwhile.
    """

    stage: Stage
    state: State
    seconds: float = 0.0
    step: str = ""
    expected: str = ""
    seen: str = ""
    detail: str = ""
    next_step: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    stuck: bool = False
    ended: int = 0

    @property
    def bad(self) -> bool:
        """Whether it is a surprise."""
        return self.state in BAD


def run(
    stages: Sequence[Stage], *, go_on: bool = False, asked: Asked | None = None, here: Place | None = None
) -> Iterator[Outcome]:
    """Run stages in order up to the first surprise, or all of them; those after it are reported as not run.

    A stage that has no meaning `here`, which is this machine unless said, is told as not applicable.
    """
    asked, here = asked or Asked(), here or place()
    stopped = ""
    for stage in stages:
        if here not in stage.places:
            yield Outcome(stage, "not applicable", detail=f"only {_only(stage)} has this; here is {here}")
            continue
        if stage.asks and not getattr(asked, stage.asks):
            yield Outcome(stage, "not run", detail=f"it runs only with --{stage.asks} FILE")
            continue
        if stopped:
            yield Outcome(stage, "not run", detail=stopped)
            continue
        outcome = perform(stage, asked)
        yield outcome
        if outcome.stuck:
            stopped = f"the process of {stage.name} cannot be ended; reboot first"
        elif outcome.ended:
            stopped = f"the run was ended by {signal.Signals(outcome.ended).name}"
        elif outcome.bad and not go_on:
            stopped = f"not tried after {stage.name} {outcome.state}; --all goes on"


def _only(stage: Stage) -> str:
    return "an Orin" if stage.places == (Place.ORIN,) else " or ".join(stage.places)


def perform(stage: Stage, asked: Asked | None = None) -> Outcome:
    """Run one stage; its process is gone afterwards, also when this is interrupted or dies."""
    with tempfile.TemporaryDirectory(prefix="tegrad-selftest-") as folder:
        told, errors = Path(folder) / "told", Path(folder) / "stderr"
        told.touch()
        start = time.monotonic()
        given = json.dumps(asdict(asked or Asked()))
        hung = stuck = False
        ended = 0
        with errors.open("wb") as stderr, Path(folder, "stdout").open("wb") as stdout:
            process = subprocess.Popen(
                [sys.executable, "-m", "tegrad.diag.selftest.child", given, stage.name, str(told)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": search_path()},
                start_new_session=True,
                preexec_fn=bound(),
            )
            try:
                try:
                    process.wait(stage.limit_s)
                except subprocess.TimeoutExpired:
                    hung = True
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGUSR1)  # it writes where it is
                        time.sleep(0.1)
            except Ended as signalled:
                ended = signalled.number
            finally:
                try:
                    stuck = not _end(process)
                except Ended as signalled:  # the only one: no further signal is raised
                    ended, stuck = signalled.number, not _end(process)
        outcome = _outcome(stage, told.read_text(), time.monotonic() - start)
        where = errors.read_text(errors="replace")[-STDERR_CHARACTERS:]
    outcome.stuck, outcome.ended = stuck, ended
    if ended and outcome.state == "crashed":
        outcome.state, outcome.detail = "interrupted", f"{signal.Signals(ended).name} ended the run meanwhile"
    elif hung:
        outcome.state, outcome.expected = "hung", f"the end of the stage within {stage.limit_s:g} s"
        outcome.seen, outcome.detail = "it was still at work", where
    elif outcome.state == "crashed":
        outcome.expected, outcome.detail = "an outcome", where
        code = process.returncode or 0
        outcome.seen = f"its process ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return outcome


def _end(process: subprocess.Popen[bytes]) -> bool:
    """End a process and whatever it started, by asking first; whether it is gone."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
            if number == signal.SIGINT:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it started
            return True
    return False


def _outcome(stage: Stage, told: str, seconds: float) -> Outcome:
    """What a stage told; crashed where no outcome is among it."""
    made = Outcome(stage, "crashed", seconds)
    for text in told.splitlines():
        try:
            piece = json.loads(text)
        except ValueError:  # the last line of a process that was killed
            continue
        if "fact" in piece:
            made.facts[piece["fact"]] = piece["value"]
        elif "line" in piece:
            made.lines.append(piece["line"])
        elif "step" in piece:
            made.step = piece["step"]
        elif "outcome" in piece:
            made.state = piece["outcome"]
            made.expected, made.seen = piece.get("expected", ""), piece.get("seen", "")
            made.detail, made.next_step = piece.get("detail", ""), piece.get("next", "")
    return made
