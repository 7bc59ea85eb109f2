"""How each figure is measured: a table from a figure's id to the function that takes its samples."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tegrad.bench.record import Record, RecordError, Side, make


@dataclass(frozen=True)
class Measure:
    """A figure that can be measured: what it is, whether it needs a real GPU, and the function that does it."""

    id: str
    what: str
    needs_gpu: bool
    take: Callable[[], Record]


def _run_json(arguments: list[str]) -> dict[str, float | str | int]:
    """`tegrad run --json` with these arguments in a process of its own; its last line of output, parsed."""
    done = subprocess.run([sys.executable, "-m", "tegrad", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RecordError(f"`tegrad {shlex.join(arguments)}` failed: {done.stderr.strip().splitlines()[-1:]}")
    answer: dict[str, float | str | int] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def first_run(repetitions: int = 5) -> Record:
    """Tokens per second of `tegrad run` with the shipped model, a process per repetition, device as found."""
    arguments = ["run", "In the beginning", "--max-tokens", "128", "--temperature", "0", "--json"]
    answers = [_run_json(arguments) for _ in range(repetitions)]
    return make(
        "first-run-tok-s",
        "decode of the shipped model by `tegrad run`, 128 tokens, tinygrad operations through NV",
        "tok/s",
        Side("tegrad", "tegrad " + shlex.join(arguments), [float(a["tokens_per_second"]) for a in answers]),
        gpu=str(answers[0]["device"]),
    )


MEASURES: dict[str, Measure] = {
    m.id: m for m in (Measure("first-run-tok-s", "`tegrad run` with the shipped model", True, first_run),)
}
