"""Every family of models on a GPU: `python tests/hardware/families.py [FILE.json]`, beside a GPU of our kernels.

A small random model of each shape of tests/llm/tiny_llama.py, in halves and in a packed format, two whose rows are odd
multiples of 32, in each format of blocks of 32, and some in mixtures of formats go through steps of many launches,
steps of one launch, a prompt in chunks and a batch, in JOBS processes. Each row has the root mean square and the
largest distance of the logits from the float32 reference, over the reference's standard deviation; where a way refuses
the model, what it says. Exit code 1 where a distance is beyond its limit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from tiny_llama import MIXED, SHAPES, TYPE, Shape, write

import tegrad.nv
from tegrad.llm.batch import Batch
from tegrad.llm.cache import KvCache
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.prefill import Prefill
from tegrad.llm.reference import Reference
from tegrad.llm.rows import floats
from tegrad.llm.state import State, States
from tegrad.nv.gpu import opened

TOKENS: Final = 41
JOBS: Final = 8
LIMITS: Final = {
    ("many", "F16"): 2e-3, ("one", "F16"): 2e-3, ("many", "Q8_0"): 0.05, ("one", "Q8_0"): 0.05,
    ("prompt", "F16"): 5e-3, ("batch", "F16"): 5e-3, ("prompt", "Q8_0"): 5e-3, ("batch", "Q8_0"): 7.5e-3,
}  # fmt: skip
"""Of root mean squares. Steps round what packed matrices read to int8; prompts and batches round all that is read to
halves. Q8_0's are those of all packed formats. A batch's are of one token, whose distance varies more."""
DEEP: Final = 3
"""Times as much of a model of many layers, each of which rounds anew: 64, where others have at most five. llama.cpp on
a CPU is as far from the reference on these files as our steps (docs/notebook.md)."""
ODD: Final = {
    "odd rows": Shape(dim=352, ffn=416, head_dim=64),
    "odd rows, tied": Shape(dim=288, ffn=544, head_dim=64, tied=True, arch="qwen3"),
}
MIXED_SHAPES: Final = ("plain", "smollm3", "olmo2", "gemma3", "nemotron", "wide heads", "sixteen to a group")
FED: Final = ("plain", "gemma2", "stablelm", "cohere2", "lfm2", "qwen35")
MIXTURES: Final = {
    "Q4_K_M": (TYPE.Q4_K, MIXED, MIXED_SHAPES),
    "up in Q4_1": (TYPE.Q8_0, {"ffn_up": TYPE.Q4_1}, FED),
    "gate in Q6_K": (TYPE.Q4_K, {"ffn_gate": TYPE.Q6_K}, FED),
    "gate in F16": (TYPE.Q8_0, {"ffn_gate": TYPE.F16}, FED),
    "beta and decay in F32": (TYPE.Q8_0, {"ssm_alpha": TYPE.F32, "ssm_beta": TYPE.F32}, ("qwen35",)),
}  # fmt: skip
"""The format of most matrices, those of others by part of name, and shapes. One launch multiplies queries and keys of
the first mixture in one stage with values."""
BLOCKS_OF_32: Final = (TYPE.Q8_0, TYPE.Q4_0, TYPE.Q4_1, TYPE.Q5_0, TYPE.Q5_1, TYPE.IQ4_NL)


def steps(kind: type[Any], model: PackedModel, tokens: list[int]) -> NDArray[np.float32]:
    """The logits of a step for each token."""
    device, found = model.device, []
    with (
        KvCache(device, model.config, 64) as cache,
        closing(States(device)) as states,
        kind(model, states, cache) as plan,
        device.record(plan.launches) as step,
    ):
        for at, token in enumerate(tokens):
            states.write(0, State(position=at, token=token, limit=64, active=1))
            step.wait(step.run())
            found.append(floats(device, plan.logits, model.config.vocab).copy())
    return np.array(found)


def prompt(model: PackedModel, tokens: list[int]) -> NDArray[np.float32]:
    """The logits of each token, by the kernels for prompts."""
    with KvCache(model.device, model.config, 64) as cache, Prefill(model, cache, sizes=(16, 48)) as prefill:
        return prefill.score(tokens)


def batch(model: PackedModel, tokens: list[int]) -> NDArray[np.float32]:
    """The logits (1, vocab) of the last token in a batch of nine."""
    with Batch(model, slots=9, positions=64, sizes=(48, 9 * 48)) as made:  # all prompts before one step
        members = [made.join(tokens[at:], limit=len(tokens) - at) for at in range(9)]
        while not members[0].finished:
            made.step()
        return floats(model.device, made.logits, model.config.vocab)[None].copy()


WAYS: Final = {
    "many": lambda *given: steps(DecodePlan, *given),
    "one": lambda *given: steps(PersistentPlan, *given),
    "prompt": prompt,
    "batch": batch,
}


def rows(case: tuple[str, str]) -> list[dict[str, Any]]:
    """A shape in a format, each way."""
    with TemporaryDirectory() as folder:
        return list(_rows(Path(folder), *case))


def _rows(folder: Path, name: str, kind: str) -> Iterator[dict[str, Any]]:
    shape = replace((SHAPES | ODD)[name], bias=False)
    most, others, _ = MIXTURES[kind] if kind in MIXTURES else (TYPE[kind], {}, ())
    path = write(folder / "model.gguf", shape, most, kinds=others)
    tokens = np.random.default_rng(5).integers(0, shape.vocab, TOKENS).tolist()
    expected = Reference(path).logits(tokens)
    for way, run in WAYS.items():
        row: dict[str, Any] = {"model": name, "format": kind, "way": way}
        try:
            with PackedModel.load(path, "NV") as model:
                found = run(model, tokens)
        except UnsupportedModelError as refused:
            yield {**row, "refused": str(refused)}
            continue
        off = (found - expected[-len(found) :]) / expected.std()
        yield {**row, "rms": float(np.sqrt((off**2).mean())), "most": float(np.abs(off).max())}


def cases() -> Iterator[tuple[str, str]]:
    """Each shape in its formats."""
    for name in SHAPES | ODD:
        kinds = (TYPE.F16, *(BLOCKS_OF_32 if name in ODD else BLOCKS_OF_32[:1]))
        yield from ((name, kind.name) for kind in kinds)
        yield from ((name, mixture) for mixture, (_, _, shapes) in MIXTURES.items() if name in shapes)


def main() -> int:
    """Print each row, and keep all of them where a file is named."""
    found, far = [], 0
    with ProcessPoolExecutor(JOBS, get_context("spawn"), tegrad.nv.install) as pool:
        for row in (row for made in pool.map(rows, cases()) for row in made):
            limit = LIMITS[row["way"], "F16" if row["format"] == "F16" else "Q8_0"]
            beyond = not row.get("rms", 0.0) <= limit * (DEEP if (SHAPES | ODD)[row["model"]].layers > 6 else 1)
            far += beyond
            print(json.dumps(row), "FAR" if beyond else "", flush=True)
            found.append(row)
    if sys.argv[1:]:
        about = {
            "device": opened("NV").arch,
            "limits": {" ".join(key): limit for key, limit in LIMITS.items()},
            "deep": DEEP,
        }
        Path(sys.argv[1]).write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")
    return int(far > 0)


if __name__ == "__main__":
    tegrad.nv.install()
    sys.exit(main())
