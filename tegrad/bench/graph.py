"""Decoding through tinygrad's operations (`llm.session`), with and without what is done to make it fast.

    python -m tegrad.bench.graph MODEL.gguf           tokens per second here and now, as JSON

Repairs are settled when a process starts, so that each form has a process of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tegrad.bench.record import Side, output
from tegrad.nv.codegen import SWITCH

TOKENS: Final = 16
"""Of one sample."""
SAMPLES: Final = 5
SAMPLING_LIMIT_S: Final = 20.0
"""Seconds after which no further sample is begun."""
PROCESS_LIMIT_S: Final = 240
"""Seconds for a process, compilation included."""
DROPPED: Final = ("BEAM", "JITBEAM", SWITCH)
"""Variables of the caller's that neither side is to have."""


def measure(path: Path) -> dict[str, Any]:
    """Seconds to load and to compile the step, then tokens per second of each sample."""
    from tegrad.llm.model import Model
    from tegrad.llm.sampler import Sampler
    from tegrad.llm.session import Session

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
    return {"load_s": loaded - begun, "compile_s": compiled - loaded, "tok_s": samples}


def side(name: str, model: Path, settings: Mapping[str, str]) -> Side:
    """The samples of a process with these variables; RecordError where it fails or does not end in time."""
    environment = {"DEV": "NV", **{key: value for key, value in os.environ.items() if key not in DROPPED}, **settings}
    environment.setdefault("PARALLEL", "0")  # the workers of a search; else each would import tinygrad first
    arguments = ["-m", "tegrad.bench.graph", str(model)]
    shown = shlex.join([*(f"{key}={value}" for key, value in settings.items()), "python", *arguments[:-1], model.name])
    said = output([sys.executable, *arguments], f"`{shown}`", PROCESS_LIMIT_S, env=environment)
    result = json.loads(said.strip().splitlines()[-1])
    return Side(name, shown, result["tok_s"])


def repaired(model: Path) -> tuple[Side, Side]:
    """With the repair of matrix-vector products, and without."""
    return side("repaired", model, {}), side("without the repair", model, {SWITCH: "matvec"})


if __name__ == "__main__":
    import tegrad.nv

    tegrad.nv.install()
    print(json.dumps(measure(Path(sys.argv[1]))))
