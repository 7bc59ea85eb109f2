"""The oracles' figures: how many recorded cases there are, and how many tegrad answers otherwise.

The PTX engine is held against the record of a GPU, the board against that of nvgpu's own code. Each pair of figures
comes from one run of a comparison in tests/, which needs a checkout.
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
PTX, NVGPU = "tests.ptx.oracle.comparison", "tests.orin.nvgpu_oracle.comparison"
COVERAGE = "tests.ptx.oracle.coverage"


def _command(module: str) -> str:
    return f"python -m {module}"


@functools.cache
def _comparison(module: str) -> dict[str, Any]:
    """What a run over everything recorded counted. RecordError where it cannot run."""
    if not (ROOT / (module.replace(".", "/") + ".py")).exists():
        raise RecordError(
            f"{ROOT / 'tests'} is not there: measure the oracle's figures in a checkout of the repository"
        )
    done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise RecordError(f"`{_command(module)}` failed: {done.stderr.strip().splitlines()[-1:]}") from None
    return found


def cases() -> Record:
    """Inputs of instruction forms whose results a GPU recorded, each of one lane, one warp or one block."""
    what = "cases of PTX instruction forms, recorded on an H200 and compared with the engine"
    return make("ptx-oracle-cases", what, "cases", _side(PTX, "cases"))


def mismatches() -> Record:
    """Cases that differ by more than the ISA's documented errors or the stated tolerance of a sum."""
    what = "recorded cases in which the engine differs beyond documented errors and stated tolerances"
    return make("ptx-oracle-mismatches", what, "cases", _side(PTX, "mismatches"), larger_is_better=False)


def uncovered() -> Record:
    """Opcodes that tinygrad's or tegrad's kernels use and that no recorded form of the oracle has."""
    what = "instruction forms that kernels use and that nothing recorded on a GPU has"
    side = Side("tegrad", _command(COVERAGE), [float(len(_comparison(COVERAGE)["unrecorded"]))])
    return make("ptx-forms-without-oracle", what, "forms", side, larger_is_better=False)


def nvgpu_cases() -> Record:
    """Sequences of questions to nvgpu's own code, built for user space, whose answers are recorded."""
    what = "random cases that nvgpu's own code answered, compared with the board"
    return make("nvgpu-oracle-cases", what, "cases", _side(NVGPU, "cases"))


def nvgpu_mismatches() -> Record:
    """Cases of which the board answers a step otherwise."""
    what = "recorded cases of nvgpu's own code in which the board answers otherwise"
    return make("nvgpu-oracle-mismatches", what, "cases", _side(NVGPU, "mismatches"), larger_is_better=False)


def _side(module: str, count: str) -> Side:
    return Side("tegrad", _command(module), [float(_comparison(module)[count])])
