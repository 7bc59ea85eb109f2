"""The process of one stage: runs it and appends what it tells to a file, a line of JSON each.

    python -m tegrad.diag.selftest.child ASKED STAGE FILE

ASKED is what the user gave, in JSON.

SIGUSR1 makes it write on stderr where it is; a crash does as well.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from tegrad.conformance.rule import Differs, NotApplicable
from tegrad.diag.selftest.stage import Asked, Notes, Stage, Surprise, Value
from tegrad.errors import TegradError
from tegrad.nv.kernel import emulated


def _no_compilers() -> str:
    from tegrad.nv.compilers import describe

    try:
        describe()
    except TegradError as error:
        return f"no compilers: {error}"
    return ""


def _no_tinygrad() -> str:
    return "" if importlib.util.find_spec("tinygrad") else "tinygrad is not installed"


NEEDS: Mapping[str, Callable[[], str]] = {"compilers": _no_compilers, "tinygrad": _no_tinygrad}
"""What a stage may need: why it is not there, "" where it is."""


def perform(stage: Stage, emit: Callable[[Mapping[str, Value]], object], asked: Asked | None = None) -> None:
    """Run a stage and emit what it tells, and its outcome last."""
    notes = Notes(emit, stage.share(emulated()), asked)
    if lacking := "; ".join(filter(None, (NEEDS[need]() for need in stage.needs))):
        emit({"outcome": "not here", "detail": lacking})
        return
    try:
        stage.run(notes)
    except Surprise as found:
        emit({"outcome": "failed", "expected": found.expected, "seen": found.seen, "next": found.next_step})
    except Differs as found:
        emit({"outcome": "failed", "expected": found.expected, "seen": found.seen})
    except NotApplicable as reason:
        emit({"outcome": "not here", "detail": str(reason)})
    except TegradError as error:
        emit({"outcome": "failed", "expected": "no error", "seen": str(error)})
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        emit({"outcome": "failed", "expected": "no error", "seen": f"{type(error).__name__}: {error} ({where})"})
    else:
        emit({"outcome": "right"})


def main(name: str, path: str, asked: str = "{}") -> None:
    """Run the stage of this name; what it tells goes to the file."""
    from tegrad.diag.selftest.stages import STAGES

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    with Path(path).open("a") as file:

        def emit(piece: Mapping[str, Value]) -> None:
            file.write(json.dumps(piece) + "\n")
            file.flush()

        perform(next(stage for stage in STAGES if stage.name == name), emit, Asked(**json.loads(asked)))


if __name__ == "__main__":
    given, chosen, file = sys.argv[1:]
    main(chosen, file, given)
