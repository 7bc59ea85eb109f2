"""The figures of the tests themselves: how long they take, and how many random changes of the source they notice."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import tegrad
from tegrad.bench.record import Record, RecordError, Side, make

ROOT = Path(tegrad.__file__).parents[1]
MUTANTS = ROOT / "results" / "random-mutants.json"
RUN = "python tools/mutants/run.py"
EQUIVALENT_SHARE = 0.05
"""The most that may be called equivalent, each with a proof: mutants that change nothing that a test could see."""


def minutes() -> Record:
    """Minutes that `make check` and `make test` take in a checkout, its .venv made before. RecordError: one fails."""
    _made("make .venv/.dev")
    start = time.monotonic()
    _made("make check")
    _made("make test")
    side = Side("tegrad", "make check && make test", [(time.monotonic() - start) / 60])
    return make("ci-minutes", "linters and tests of a clean checkout", "min", side, larger_is_better=False)


def _made(command: str) -> None:
    done = subprocess.run(command.split(), cwd=ROOT, check=False)
    if done.returncode:
        raise RecordError(f"`{command}` in {ROOT} ended with {done.returncode}")


def mutants_killed(path: Path = MUTANTS) -> Record:
    """Percent of the random mutants that tests notice, out of results/random-mutants.json, which tools/mutants writes.

    Mutants that are proved equivalent do not count; RecordError where there are more of them than EQUIVALENT_SHARE.
    """
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text())["mutants"]
        killed = sum(row["outcome"] == "killed" for row in rows)
    except (OSError, ValueError, KeyError) as error:
        raise RecordError(f"{path} is no record of a run ({error}); `{RUN}` makes it, in a checkout") from error
    equivalent = sum(row["outcome"] != "killed" and "equivalent" in row for row in rows)
    if equivalent > EQUIVALENT_SHARE * len(rows):
        raise RecordError(
            f"{equivalent} of {len(rows)} mutants are called equivalent, at most {EQUIVALENT_SHARE:.0%} may"
        )
    percent = 100 * killed / (len(rows) - equivalent)
    what = (
        f"of {len(rows)} random mutants, drawn before any was run, those that a test notices ({equivalent} equivalent)"
    )
    return make("random-mutants-killed", what, "%", Side("tegrad", RUN, [percent]))
