"""Decoding through tinygrad's operations (`llm.session`), with and without what is done to make it fast.

    python -m tegrad.bench.graph MODEL.gguf           tokens per second here and now, as JSON

Repairs and beam search are settled when a process starts, so that each form has a process of its own. A search has
so many seconds (`tegrad.nv.search`) and says on stderr what it does.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tegrad.bench.record import RecordError, Side
from tegrad.nv.codegen import SWITCH
from tegrad.nv.search import SECONDS

TOKENS: Final = 16
"""Of one sample."""
SAMPLES: Final = 5
SAMPLING_LIMIT_S: Final = 20.0
"""Seconds after which no further sample is begun."""
PROCESS_LIMIT_S: Final = 240
"""Seconds for a process, compilation and search included."""
SEARCH: Final[Mapping[str, str]] = {"JITBEAM": "2", "BEAM_TIMEOUT_SEC": "3", SECONDS: "75"}
"""The recorded step's kernels by beams of two; no candidate compiles for longer than some seconds, which a round waits
for its slowest; and the search has an end.
"""


def measure(path: Path) -> dict[str, Any]:
    """Seconds to load and to compile the step, then tokens per second of each sample, and what was searched."""
    from tegrad.llm.model import Model
    from tegrad.llm.sampler import Sampler
    from tegrad.llm.session import Session
    from tegrad.nv.search import outcomes

    begun = time.perf_counter()
    session = Session(Model.load(path, "NV"), TOKENS + 2)
    loaded = time.perf_counter()
    session.warm()
    samples: list[float] = []
    compiled = time.perf_counter()
    while not samples or (len(samples) < SAMPLES and time.perf_counter() - compiled < SAMPLING_LIMIT_S):
        session.reset()
        start = time.perf_counter()
        for _ in session.generate([1], Sampler(0), TOKENS):
            pass
        samples.append(TOKENS / (time.perf_counter() - start))
    search = [asdict(outcome) for outcome in outcomes]
    return {"load_s": loaded - begun, "compile_s": compiled - loaded, "tok_s": samples, "search": search}


def side(name: str, model: Path, settings: Mapping[str, str]) -> Side:
    """The samples of a process with these variables; RecordError where it fails or does not end in time."""
    dropped = (*SEARCH, "BEAM", SWITCH)
    searches = settings.keys() >= SEARCH.keys()
    environment = {"DEV": "NV", **{key: value for key, value in os.environ.items() if key not in dropped}, **settings}
    if not searches:
        environment.setdefault("PARALLEL", "0")  # the workers of a search; else each would import tinygrad first
    arguments = ["-m", "tegrad.bench.graph", str(model)]
    shown = shlex.join([*(f"{key}={value}" for key, value in settings.items()), "python", *arguments[:-1], model.name])
    errors = None if searches else subprocess.PIPE  # a search shows how far it is
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE, stderr=errors, text=True, check=False, timeout=PROCESS_LIMIT_S, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RecordError(f"`{shown}` did not end in {PROCESS_LIMIT_S} s") from error
    if done.returncode:
        said = (done.stderr or "its errors are above").strip()[-400:]
        raise RecordError(f"`{shown}` ended with {done.returncode}: {said}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return Side(name + (f", {_searched(result['search'])}" if searches else ""), shown, result["tok_s"])


def _searched(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """How far a search came, and how many kernels it made faster."""
    whole, some = sum(kernel["whole"] for kernel in outcomes), sum(kernel["took"] > 0 for kernel in outcomes)
    faster = sum(kernel["found"] < kernel["picked"] for kernel in outcomes)
    return f"{some} of {len(outcomes)} kernels searched ({whole} to the end), {faster} made faster"


def repaired(model: Path) -> tuple[Side, Side]:
    """With the repair of matrix-vector products, and without."""
    return side("repaired", model, {}), side("without the repair", model, {SWITCH: "matvec"})


def searched(model: Path) -> tuple[Side, Side]:
    """With a search, which ends by itself, and without."""
    return side("beam search", model, SEARCH), side("no search", model, {})


def main(arguments: Sequence[str] | None = None) -> None:
    """Print `measure` of a model as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    asked = parser.parse_args(arguments)
    import tegrad.nv

    tegrad.nv.install()
    print(json.dumps(measure(asked.model)))


if __name__ == "__main__":
    main()
