"""The figures of what is tried at random: steps that the emulated board stood, and GGUF files that were refused or run.

tests/orin/fuzz/run.py and tests/llm/gguf_fuzz/gguf_run.py do the work, in a checkout: they are no part of the package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tegrad
from tegrad.bench.record import Record, RecordError, Side, make

ROOT = Path(tegrad.__file__).parents[1]
RUN, GGUF_RUN = "tests/orin/fuzz/run.py", "tests/llm/gguf_fuzz/gguf_run.py"
STEPS, SEED = 1_000_000, 1
MUTANTS, FIRST = 6000, 20_261_123
"""How many mutants, and the seed of the first; those of the suite and of the repairs are others."""


def steps() -> Record:
    """Steps of a run without a failure. Takes most of an hour; RecordError where a step fails."""
    arguments = ["--steps", str(STEPS), "--seed", str(SEED)]
    found = _run(RUN, arguments)
    what = "random steps of three clients on the emulated board: no crash, no leak, no memory of another"
    return make("board-fuzz-steps", what, "steps", Side("tegrad", _command(RUN, arguments), [float(found["steps"])]))


def gguf_mutants() -> Record:
    """Mutants of GGUF files of which none was found to do what it must not; 0 where one was. Takes some minutes."""
    arguments = ["--count", str(MUTANTS), "--seed", str(FIRST)]
    found = _run(GGUF_RUN, arguments)
    what = "damaged and hostile GGUF files, all refused in a sentence or run within 10 s and 1 GiB; 0 if one was not"
    count = 0.0 if found["found"] else float(found["mutants"])
    return make("gguf-mutants-first", what, "files", Side("tegrad", _command(GGUF_RUN, arguments), [count]))


def _command(path: str, arguments: list[str]) -> str:
    return " ".join(["python", path, *arguments])


def _run(path: str, arguments: list[str]) -> dict[str, Any]:
    """The JSON of a run's last line. RecordError where there is none, as where a board's step fails."""
    if not (ROOT / path).exists():
        raise RecordError(f"{ROOT / path} is not there: measure this figure in a checkout of the repository")
    done = subprocess.run(
        [sys.executable, str(ROOT / path), *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        command = _command(path, arguments)
        raise RecordError(f"`{command}` failed: what it printed names the seed that does it again") from None
    return found
