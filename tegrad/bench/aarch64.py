"""The figures of the suite on emulated aarch64, out of results/aarch64.json, which `make test-aarch64` writes.

A run takes hours and needs root, so that measuring them here means to read what the last one recorded.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import tegrad
from tegrad.bench.record import Record, RecordError, Side, make

RECORD = Path(tegrad.__file__).parents[1] / "results" / "aarch64.json"
COMMAND = "make test-aarch64"


def passed(path: Path = RECORD) -> Record:
    """Tests that passed there. RecordError where no run is recorded."""
    return _record("aarch64-tests-passed", "passed", ("passed",), path)


def failed(path: Path = RECORD) -> Record:
    """Tests that failed there, or were ended by a signal or their time limit."""
    return _record("aarch64-tests-failed", "failed", ("failed", "killed"), path)


def _record(name: str, verb: str, kinds: tuple[str, ...], path: Path) -> Record:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        count = float(sum(found["totals"][kind] for kind in kinds))
        made = make(
            name,
            f"tests that {verb} on aarch64: Debian {found['debian']} under qemu-user",
            "tests",
            Side("tegrad", COMMAND, [count]),
            larger_is_better=verb == "passed",
        )
        machine = {**found["machine"], "python": found["python"].removeprefix("Python "), "gpu": "", "driver": ""}
        return dataclasses.replace(made, machine=machine, date=found["ended"])
    except (OSError, ValueError, KeyError) as error:
        raise RecordError(f"{path} is no record of a run ({error}); `{COMMAND}` makes it, in a checkout") from error
