"""What it costs to sample a token on the device, for each kind of settings.

    tegrad bench sampling                        a line a vocabulary and kind: launches, microseconds
    tegrad bench sampling 151936 --sequences 8

A time is what the launches of one step add to a recording of dependent ones. Logits are drawn from a normal
distribution, which is flatter than a model's: its top-p keeps thousands of tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from tegrad.bench.dependencies import FORMS, HOPPER, gpu_us, opened
from tegrad.llm.sampling import Sampling, Settings
from tegrad.llm.state import LOGITS_SPEC, States
from tegrad.nv.gpu import Gpu
from tegrad.nv.replay import Dependency

VOCABULARIES: Final = (128256, 151936)
STEPS: Final = (8, 32)
"""Steps of the recordings whose difference is measured."""
KINDS: Final[Mapping[str, Settings]] = {
    "greedy": Settings(),
    "greedy, penalties": Settings(repeat=1.1),
    "top-k 40, top-p, min-p": Settings(0.8, 0.95, 0.05, 40),
    "temperature": Settings(0.8),
    "top-p": Settings(0.8, 0.95),
    "top-k 1000, top-p": Settings(0.8, 0.95, 0.0, 1000),
}


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one step of sampling costs."""

    vocab: int
    sequences: int
    kind: str
    launches: int
    us: float


def row(device: Gpu, dependency: Dependency, vocab: int, sequences: int, kind: str) -> SamplingRow:
    """Measure one kind."""
    settings = [KINDS[kind]] * sequences
    logits = (3 * np.random.default_rng(1).standard_normal((sequences, vocab))).astype(np.float32)
    entries = -(-vocab // 32)
    best_row = np.minimum(np.arange(sequences * entries) % entries * 32, vocab - 1).astype(np.int32)
    best = logits.reshape(sequences, -1)[np.arange(sequences).repeat(entries), best_row]
    with ExitStack() as undo:
        states = States(device, sequences)
        undo.callback(states.close)
        sampling = undo.enter_context(Sampling(device, vocab, (), sequences))
        given = {}
        for name, array in (("logits", logits), ("best", best), ("best_row", best_row)):
            given[name] = device.allocate(array.nbytes, LOGITS_SPEC)
            undo.callback(device.release, given[name], LOGITS_SPEC)
            device.upload(given[name], array.tobytes())
        for slot in range(sequences):
            sampling.set(slot, settings[slot])
            states.begin(slot, [0], 0, 1 << 30, seed=slot)
        launches = sampling.launches(states, settings, **given)
        short, long = (gpu_us(device, launches * count, dependency) for count in STEPS)
    return SamplingRow(vocab, sequences, kind, len(launches), (long - short) / (STEPS[1] - STEPS[0]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what sampling costs on this machine's GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("vocabularies", nargs="*", type=int, default=VOCABULARIES)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--dependency", default="chain-lean", choices=[*FORMS, *HOPPER])
    parser.add_argument("--json", action="store_true", help="a JSON list on the last line")
    asked = parser.parse_args(arguments)
    rows = []
    with opened() as device:
        for vocab in asked.vocabularies:
            for kind in KINDS:
                one = row(device, {**FORMS, **HOPPER}[asked.dependency], vocab, asked.sequences, kind)
                rows.append(one)
                print(
                    f"{vocab:7} x {asked.sequences:<3} {kind:24} {one.launches:2} launches {one.us:8.2f} us", flush=True
                )
    if asked.json:
        print(json.dumps([asdict(one) for one in rows]))


if __name__ == "__main__":
    main()
