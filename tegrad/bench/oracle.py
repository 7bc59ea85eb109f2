"""The PTX oracle's figures: how many recorded cases there are, and how many the engine answers otherwise.

Both come from one run of tests/ptx/oracle/comparison.py against the committed record of a GPU, which needs a checkout.
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

ROOT = Path(tegrad.__file__).parents[1]
MODULE = "tests.ptx.oracle.comparison"
COMMAND = f"python -m {MODULE}"


@functools.cache
def _comparison() -> dict[str, Any]:
    """What a run over all recorded forms counted. RecordError where it cannot run."""
    if not (ROOT / (MODULE.replace(".", "/") + ".py")).exists():
        raise RecordError(
            f"{ROOT / 'tests'} is not there: measure the oracle's figures in a checkout of the repository"
        )
    done = subprocess.run([sys.executable, "-m", MODULE], cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise RecordError(f"`{COMMAND}` failed: {done.stderr.strip().splitlines()[-1:]}") from None
    return found


def cases() -> Record:
    """Inputs of instruction forms whose results a GPU recorded, each of one lane, one warp or one block."""
    what = "cases of PTX instruction forms, recorded on an H200 and compared with the engine"
    return make("ptx-oracle-cases", what, "cases", _side(_comparison()["cases"]))


def mismatches() -> Record:
    """Cases that differ by more than the ISA's documented errors or the stated tolerance of a sum."""
    what = "recorded cases in which the engine differs beyond documented errors and stated tolerances"
    return make("ptx-oracle-mismatches", what, "cases", _side(_comparison()["mismatches"]), larger_is_better=False)


def _side(value: float) -> Side:
    return Side("tegrad", COMMAND, [float(value)])
