"""Any model, measured as llama-bench does it: loading, prompts, decoding, after a depth, several sequences at once.

    tegrad bench model model.gguf -p 512 -n 128 -d 0,4096          rows with llama-bench's columns
    tegrad bench model model.gguf -n 128 --sequences 8 -o json     eight sequences together
    tegrad bench model model.gguf --vs llama.cpp                   and llama-bench's own rows below
    tegrad bench loading model.gguf --readers 2 --mib 4            how the reading of its file is best cut

Tokens are random, and those that are decoded are greedy ones by the engine of `tegrad run`; the first repetition of
each test is not counted. A prompt's time ends when its last logits are on the host.

A load of `tegrad bench loading` is opening the file, allocating every buffer, reading, copying and repacking, to the
last repacked byte on the device; the first may be from a cold page cache. Times are the clock's on the wall.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np

import tegrad
from tegrad.bench import peers
from tegrad.bench.columns import Case, Subject, row
from tegrad.bench.gpu import board, opened, printed
from tegrad.bench.prefill import together
from tegrad.bench.record import RecordError, machine, now, versions
from tegrad.llm import packed, stream
from tegrad.llm.config import DEFAULT_CONTEXT
from tegrad.llm.engine import Engine
from tegrad.llm.gguf import Gguf
from tegrad.llm.packed import PackedModel
from tegrad.llm.sampling import Settings
from tegrad.nv.gpu import Gpu

FIRST_TOKEN: Final = 1
SPARE: Final = 8
"""Positions beyond those that a test uses."""
FLASH: Final = "0,1"
"""llama.cpp's best setting of flash attention counts, test by test."""


def cases(
    prompts: Sequence[int], generated: Sequence[int], depths: Sequence[int], sequences: Sequence[int]
) -> list[Case]:
    """All tests, in llama-bench's order; a 0 among prompts or generated leaves that kind out."""
    made = [Case(prompt=count, depth=depth) for depth, count in product(depths, prompts) if count]
    made += [
        Case(generated=count, depth=depth, sequences=together)
        for together, depth, count in product(sequences, depths, generated)
        if count
    ]
    return made


def measured(
    path: Path, wanted: Sequence[Case], repetitions: int, command: Sequence[str], *, q8: bool = False
) -> Iterator[dict[str, Any]]:
    """A row for the loading of a model, and for each test as it is done. TegradError where the model does not run."""
    subject = Subject.of(path)
    with opened():
        alone = [case for case in wanted if case.sequences == 1]
        if alone:
            yield from _alone(subject, alone, repetitions, command, q8)
        for case in wanted:
            if case.sequences > 1:
                speeds = together(path, case.sequences, case.generated, repetitions, prompt=max(1, case.depth), q8=q8)
                yield row(subject, case, [case.tokens / speed for speed in speeds], about(command, q8))


def _alone(
    subject: Subject, wanted: Sequence[Case], repetitions: int, command: Sequence[str], q8: bool
) -> Iterator[dict[str, Any]]:
    """Tests of one conversation, by one engine."""
    reach = max(case.depth + case.tokens for case in wanted) + SPARE
    context = reach if reach > DEFAULT_CONTEXT else None
    begun = time.perf_counter()
    with Gguf.open(subject.path) as file, Engine(file, context, device="NV", q8=q8, reach=reach) as engine:
        engine.device.synchronize()
        yield row(subject, Case(), [time.perf_counter() - begun], about(command, q8))
        rng, filled = np.random.default_rng(4), 0
        for case in sorted(wanted, key=lambda case: case.depth):
            engine.reset(filled)
            if case.depth > filled:
                engine.feed(rng.integers(0, engine.config.vocab, case.depth - filled).tolist())
                filled = case.depth
            seconds = [_seconds(engine, case) for _ in range(repetitions + 1)][1:]
            yield row(subject, case, seconds, about(command, q8))


def _seconds(engine: Engine, case: Case) -> float:
    """One repetition."""
    tokens = np.random.default_rng(2).integers(0, engine.config.vocab, case.prompt).tolist()
    engine.reset(case.depth)
    begun = time.perf_counter()
    if case.prompt:
        engine.feed(tokens)
    else:
        came = len(list(engine.generate([FIRST_TOKEN], Settings(), case.generated)))
        if came < case.generated:
            raise RecordError(f"{case}: {came} of {case.generated} tokens came")
    return time.perf_counter() - begun


def about(command: Sequence[str], q8: bool) -> dict[str, Any]:
    """What all rows of a run share."""
    on, kind = machine(board()), "q8_0" if q8 else "f16"
    return {
        "build_commit": tegrad.__version__, "build_number": 0, "cpu_info": on["cpu"], "gpu_info": on["gpu"],
        "backends": "tegrad", "type_k": kind, "type_v": kind, "test_time": now(), "machine": on,
        "versions": versions(), "command": shlex.join(command),
    }  # fmt: skip


# ---- llama.cpp's own


def peer(path: Path, wanted: Sequence[Case], repetitions: int, *, q8: bool = False) -> Iterator[dict[str, Any]]:
    """llama-bench's rows of the same tests, each with the better setting; llama-batched-bench's for several sequences.

    RecordError where a program is not on the PATH, nor in TEGRAD_LLAMA, or fails.
    """
    kind = "q8_0" if q8 else "f16"
    for case in wanted:
        if case.sequences > 1:
            side = peers.batch(path, case.sequences, case.generated, prompt=max(1, case.depth), kind=kind)
            made = row(Subject.of(path), case, [case.tokens / one for one in side.samples], about([], q8))
            yield {**made, "backends": peers.LLAMA, "build_commit": "", "command": side.command}
            continue
        arguments = ["-m", str(path), "-p", str(case.prompt), "-n", str(case.generated), "-d", str(case.depth)]
        arguments += ["-ngl", "99", "-fa", FLASH if kind == "f16" else "1", "-ctk", kind, "-ctv", kind]
        arguments += ["-r", str(repetitions), "-o", "json"]
        best = max(peers.tests(peers.run("llama-bench", arguments)), key=lambda test: float(test["avg_ts"]))
        yield {
            **best, "model_filename": path.name, "n_seqs": 1, "test": str(case),
            "backends": f"{best['backends']}, {peers.LLAMA}", "machine": machine(),
            "command": peers.shown("llama-bench", arguments, path),
        }  # fmt: skip


# ---- loads of a model


LOADS: Final = 3


@dataclass(frozen=True, slots=True)
class Load:
    """One load: how it was cut, its seconds, and those until the first byte had arrived."""

    readers: int
    mib: int
    seconds: float
    first: float
    gb_s: float


def load(path: Path, device: Gpu, readers: int, mib: int) -> Load:
    """Load a model once, with so many reading threads and pieces of so many MiB."""
    arrived: list[float] = []

    def progress(done: int, total: int) -> None:
        if not arrived:
            arrived.append(time.perf_counter())

    size = mib << 20
    with (
        patch.multiple(stream, READERS=readers, HOST_BLOCKS=2 * readers, PIECE_BYTES=size),
        patch.object(packed, "PIECE_BYTES", size),
    ):
        begun = time.perf_counter()
        with PackedModel.load(path, device.device, progress):
            seconds = time.perf_counter() - begun
    return Load(readers, mib, seconds, arrived[0] - begun, path.stat().st_size / seconds / 1e9)


def loads(device: Gpu, path: Path, readers: Sequence[int], sizes: Sequence[int]) -> Iterator[Load]:
    """LOADS loads of every cut."""
    for count, mib, _ in product(readers, sizes, range(LOADS)):
        yield load(path, device, count, mib)


def show_loading(path: Path, readers: Sequence[int], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Print the loads of a model on this machine's GPU, by default as it is loaded; the rows."""

    def line(row: Load) -> str:
        what = f"{row.readers} readers, {row.mib} MiB: {row.seconds:.3f} s"
        return f"{what}, first after {row.first:.3f} s, {row.gb_s:.1f} GB/s"

    with opened() as device:
        rows = loads(device, path, readers or [stream.READERS], sizes or [stream.PIECE_BYTES >> 20])
        return [asdict(row) for row in printed(rows, line)]
