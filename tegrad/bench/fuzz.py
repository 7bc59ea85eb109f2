"""The figure of the random clients: how many steps in a row the emulated board stood.

tests/orin/fuzz/run.py does the work, in a checkout: the random clients are no part of the package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tegrad
from tegrad.bench.record import Record, RecordError, Side, make

RUN = Path(tegrad.__file__).parents[1] / "tests" / "orin" / "fuzz" / "run.py"
STEPS, SEED = 1_000_000, 1
COMMAND = f"python tests/orin/fuzz/run.py --steps {STEPS} --seed {SEED}"


def steps() -> Record:
    """Steps of a run without a failure. Takes most of an hour; RecordError where a step fails."""
    if not RUN.exists():
        raise RecordError(f"{RUN} is not there: measure this figure in a checkout of the repository")
    command = [sys.executable, str(RUN), "--steps", str(STEPS), "--seed", str(SEED)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RecordError(f"`{COMMAND}` failed: what it printed names the seed that does it again")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    what = "random steps of three clients on the emulated board: no crash, no leak, no memory of another"
    return make("board-fuzz-steps", what, "steps", Side("tegrad", COMMAND, [float(found["steps"])]))
