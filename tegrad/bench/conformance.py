"""The conformance figures: how many rules there are, and which share of their mutants they kill.

Both come from one run of tests/conformance/campaign.py, which needs a checkout: mutants are no part of the package.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tegrad
from tegrad.bench.record import Record, RecordError, Side, make

CAMPAIGN = Path(tegrad.__file__).parents[1] / "tests" / "conformance" / "campaign.py"
COMMAND = "python tests/conformance/campaign.py"


@functools.cache
def _campaign() -> dict[str, Any]:
    """What a run of all rules and all mutants counted. RecordError where it cannot run or a rule does not hold."""
    if not CAMPAIGN.exists():
        raise RecordError(f"{CAMPAIGN} is not there: measure the conformance figures in a checkout of the repository")
    done = subprocess.run([sys.executable, str(CAMPAIGN)], capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise RecordError(f"`{COMMAND}` failed: {done.stderr.strip().splitlines()[-1:]}") from None
    if found["broken"]:
        raise RecordError(f"the board breaks {', '.join(found['broken'])}: repair it before measuring")
    return found


def rules() -> Record:
    """Rules of the driver's facts that the board keeps."""
    count = float(_campaign()["rules"])
    return make("conformance-rules", "rules of the driver's facts, all kept by the board", "rules", _side(count))


def mutants_killed() -> Record:
    """Percent of the mutants that their rule notices; a rule without a mutant counts as a mutant that lives."""
    found = _campaign()
    share = 100.0 * found["killed"] / found["mutants"]
    what = f"mutants of the board that their rule notices, of {found['mutants']}"
    return make("conformance-mutants-killed", what, "percent", _side(share), limit=100.0, limit_note="all of them")


def _side(value: float) -> Side:
    return Side("tegrad", COMMAND, [value])
