"""What a decode step of the many-kernel plan takes on the GPU, and what each kind of launch adds to it.

    python -m tegrad.bench.step 1b-q6k.gguf                       at position 0
    python -m tegrad.bench.step 1b-q6k.gguf --depth 4096          with so many positions to attend to
    python -m tegrad.bench.step 1b-q6k.gguf --dependency latch-program --overlap

A step is the embedding, the layers, the logits and the greedy choice, recorded and submitted as in the decode loop.
A kind of launch adds the difference between the step and one without it. Times are the GPU's, medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tegrad.bench.dependencies import FORMS, HOPPER, gpu_us, opened
from tegrad.llm.cache import KvCache
from tegrad.llm.packed import PackedModel
from tegrad.llm.plan import DecodePlan
from tegrad.llm.sampling import Sampling, Settings
from tegrad.llm.state import State, States
from tegrad.nv.gpu import Gpu
from tegrad.nv.replay import Dependency

SPARE_POSITIONS: Final = 256
"""Positions after `depth`: a measurement is a few steps, each of which goes on by one."""


def measure(
    device: Gpu, path: Path, *, depth: int = 0, dependency: Dependency, overlap: bool = False, q8: bool = False
) -> dict[str, float]:
    """Microseconds of a step at position `depth`, as "step", and what each kind of launch adds to it."""
    with ExitStack() as undo:
        model = undo.enter_context(PackedModel.load(path, device.device))
        cache = undo.enter_context(KvCache(device, model.config, depth + SPARE_POSITIONS, q8=q8))
        states = States(device)
        undo.callback(states.close)
        plan = undo.enter_context(DecodePlan(model, states, cache, overlap=overlap))
        sampling = undo.enter_context(Sampling(device, model.config.vocab))
        chosen = sampling.launches(states, [Settings()], logits=plan.logits, best=plan.best, best_row=plan.best_row)
        launches = [*plan.launches, *chosen]
        kinds = [*plan.kinds, *("sample" for _ in chosen)]

        def us(without: str = "") -> float:
            states.write(0, State(position=depth, limit=cache.positions, active=1))
            kept = [launch for launch, kind in zip(launches, kinds, strict=True) if kind != without]
            return gpu_us(device, kept, dependency)

        step = us()
        return {"step": step, **{kind: step - us(kind) for kind in dict.fromkeys(kinds)}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what a step of a model costs on this machine's GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--depth", type=int, default=0, help="positions before the token's")
    parser.add_argument("--dependency", default="chain", choices=[*FORMS, *HOPPER])
    parser.add_argument("--overlap", action="store_true", help="launches wait by themselves for the one before")
    parser.add_argument("--q8", action="store_true", help="a q8_0 cache")
    parser.add_argument("--json", action="store_true", help="a JSON object on the last line")
    asked = parser.parse_args(arguments)
    with opened() as device:
        found = measure(
            device, asked.model, depth=asked.depth, dependency={**FORMS, **HOPPER}[asked.dependency],
            overlap=asked.overlap, q8=asked.q8,
        )  # fmt: skip
    step = found["step"]
    print(f"{asked.model.stem} at {asked.depth}, {asked.dependency}: {step:.1f} us, {1e6 / step:.0f} tok/s")
    for kind, us in found.items():
        if kind != "step":
            print(f"  {kind:10} {us:8.1f} us {100 * us / step:5.1f}%")
    if asked.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
