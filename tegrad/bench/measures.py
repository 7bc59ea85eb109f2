"""How each figure is measured: a table from a figure's id to the function that takes its samples."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final

import tegrad
from tegrad.bench import decode, engine, limits, mlp, versus
from tegrad.bench.figures import TARGETS
from tegrad.bench.perplexity import FOLDER, PUBLISHED, name_of
from tegrad.bench.record import Record, RecordError, Side, make, output
from tegrad.hw.chips import CHIPS
from tegrad.models import SMALL

REPETITIONS: Final = 5
"""Of `tegrad run`, each in a process of its own."""
CHECKOUT: Final = Path(tegrad.__file__).parents[1] / "tools" / "checkout_figures.py"
"""Takes the figures of what is no part of the package; not there where the package is installed."""


@dataclass(frozen=True)
class Measure:
    """A figure that can be measured: what it is, whether it needs a real GPU, and the function that does it.

    `path` names the environment variable that says where something lies that is not part of the repository. What takes
    `long` is measured only when it is asked for by name, and what is of a `checkout` only in one.
    """

    id: str
    what: str
    needs_gpu: bool
    take: Callable[[], Record]
    path: str = ""
    long: bool = False
    checkout: bool = False

    @property
    def ready(self) -> bool:
        """Whether it can be measured anywhere, now."""
        there = (not self.path or self.path in os.environ) and (not self.checkout or CHECKOUT.exists())
        return not self.needs_gpu and not self.long and there


def _tegrad(*arguments: str) -> str:
    """What `tegrad` prints with these arguments in a process of its own."""
    return output([sys.executable, "-m", "tegrad", *arguments], f"`tegrad {shlex.join(arguments)}`")


def first_run() -> Record:
    """Tokens per second of `tegrad run` with the shipped model, a process per repetition, device as found."""
    arguments = ["run", "In the beginning", "--max-tokens", "128", "--temperature", "0", "--json"]
    answers = [json.loads(_tegrad(*arguments).strip().splitlines()[-1]) for _ in range(REPETITIONS)]
    if len({answer["text"] for answer in answers}) > 1:
        raise RecordError("`tegrad run` wrote other words each time, though it takes the likeliest: no figure of that")
    device = str(answers[0]["device"])
    limit, note = _byte_limit(device, SMALL.stat().st_size)
    return make(
        "first-run-tok-s",
        f"decode of the shipped model by `tegrad run`, 128 tokens, {answers[0]['steps']} through NV",
        "tok/s",
        Side("tegrad", "tegrad " + shlex.join(arguments), [float(a["tok_s"]) for a in answers]),
        limit=limit,
        limit_note=note,
    )


def _byte_limit(device: str, size: int) -> tuple[float | None, str]:
    """Tokens per second if the model's bytes were read once a token at the chip's peak; nothing for an emulated one."""
    if "emulated" in device:
        return None, ""
    chip = next((chip for chip in CHIPS.values() if chip.arch in device), None)
    if chip is None:
        return None, ""
    return chip.mem_bandwidth / size, f"{size} bytes of the file at {chip.mem_bandwidth / 1e9:g} GB/s (data sheet peak)"


def perplexity(name: str) -> Record:
    """Both sides' perplexity with a published model's file, in a process of its own."""
    known, folder = PUBLISHED[name], os.environ.get(FOLDER)
    if not folder:
        raise RecordError(f"ppl-{name} needs {known.file} (tools/published.py): name its folder by {FOLDER}")
    path = Path(folder) / known.file
    if not path.exists() or name_of(path) != name:
        raise RecordError(f"{path} is not {known.what}: fetch it by tools/published.py")
    with tempfile.TemporaryDirectory() as place:
        _tegrad("bench", "perplexity", str(path), "--out", place)
        return Record.load(Path(place) / f"ppl-{name}.json")


def in_checkout(id: str) -> Record:
    """A figure of what is no part of the package."""
    if not CHECKOUT.exists():
        raise RecordError(f"{id} is measured in a checkout of the repository only: run `tegrad bench take {id}` there")
    if str(CHECKOUT.parent) not in sys.path:
        sys.path.append(str(CHECKOUT.parent))
    taken: Record = import_module(CHECKOUT.stem).FIGURES[id]()
    return taken


def _checkout(id: str, what: str, path: str = "", *, long: bool = False) -> Measure:
    return Measure(id, what, False, partial(in_checkout, id), path, long, checkout=True)


def _of(
    id: str, what: str, take: Callable[..., Record], *how: object, gpu: bool = False, long: bool = False
) -> Measure:
    """A figure whose function takes its id, too."""
    return Measure(id, what, gpu, partial(take, id, *how), long=long)


_ORIN: Final = CHIPS["agx-orin-64gb"]

MEASURES: dict[str, Measure] = {
    m.id: m
    for m in (
        Measure("first-run-tok-s", "`tegrad run` with the shipped model", True, first_run),
        *(
            _of(f"engine-{loop}-glane-per-core", f"the PTX engine's loop {loop!r}", engine.rate, loop)
            for loop in ("alu", "load", "gather")
        ),
        _of("engine-compile-ms", "the PTX engine's compile time, cold", engine.compile_record, False),
        _of("engine-compile-cached-ms", "the PTX engine's load time from its cache", engine.compile_record, True),
        _of("replay-mlp-us", "a recorded network's call, and a CUDA graph's", mlp.against_graph, gpu=True),
        _of("replay-mlp-p99-us", "the same, 99th percentile", mlp.slowest_against_graph, gpu=True),
        _of("replay-mlp-jit-us", "a recorded network's call, and TinyJit's", mlp.against_jit, gpu=True),
        _of(
            "orin-agx-estimate-tok-s",
            "an estimate of decode on AGX Orin 64GB with volatile weights, from bytes, issue rates and launch costs",
            limits.estimate_record, _ORIN, limits.VOLATILE, long=True,
        ),
        _of(
            "orin-agx-estimate-cached-tok-s", "the same with cached weights",
            limits.estimate_record, _ORIN, limits.CACHED, long=True,
        ),
        *(_of(target.id, target.what, decode.take, gpu=True) for target in TARGETS.values()),
        *(
            Measure(
                f"ppl-{name}", f"perplexity of {known.what}, ours and llama.cpp's", True, partial(perplexity, name),
                FOLDER, long=True,
            )
            for name, known in PUBLISHED.items()
        ),
        *(
            _of(id, f"{figure.what}, through NV and through CUDA", versus.take, gpu=True)
            for id, figure in versus.FIGURES.items()
        ),
        _checkout("ptx-oracle-cases", "cases of PTX instructions that the H200 recorded"),
        _checkout("ptx-oracle-mismatches", "of them, those that the engine answers otherwise"),
        _checkout("ptx-forms-without-oracle", "forms that kernels use and no GPU recorded"),
        _checkout("nvgpu-oracle-cases", "cases that nvgpu's own code answered"),
        _checkout("nvgpu-oracle-mismatches", "of them, those that the board answers otherwise"),
        _checkout("aarch64-tests-passed", "tests that passed on emulated aarch64"),
        _checkout("aarch64-tests-failed", "of them, those that failed"),
        _checkout("conformance-rules", "rules of the driver's facts that the board keeps", long=True),
        _checkout("conformance-mutants-killed", "mutants that rules notice", long=True),
        _checkout("ci-minutes", "minutes of linters and tests", long=True),
        _checkout("random-mutants-killed", "random changes that tests notice", long=True),
        _checkout("board-fuzz-steps", "random steps that the board stands", long=True),
        _checkout("gguf-mutants-first", "hostile GGUF files that do no harm", long=True),
        _checkout("gguf-mutants-families", "hostile GGUF files that do a server no harm", long=True),
        _checkout("serve-fuzz-requests", "random requests to a server that do no harm", long=True),
        _checkout("upstream-test-ops-board-minutes", "upstream's test_ops on the board", "TEGRAD_UPSTREAM"),
        _checkout("board-l2-cost-percent", "what the board's L2 costs", "TEGRAD_BEFORE", long=True),
        _checkout("upstream-test-ops-board-failed", "tests of it that fail", "TEGRAD_UPSTREAM"),
    )
}  # fmt: skip
