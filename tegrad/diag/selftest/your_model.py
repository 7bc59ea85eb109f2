"""The stage of --model: a file of the user's, by both ways of running a step, and its speed beside llama-bench's."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tegrad.conformance.rule import NotApplicable
from tegrad.diag.selftest import llama_bench
from tegrad.diag.selftest.model import MANY, MOST_LOGIT_ERROR, MOST_REGRET, ONE, distance, regret
from tegrad.diag.selftest.stage import Notes
from tegrad.nv import exercise

CONTEXT = 256
MOST_DIFFERENCE = 2 * MOST_LOGIT_ERROR
"""The largest difference of logits: each way may be off by MOST_LOGIT_ERROR."""
LEAST, MOST = 4, 16
"""Tokens of which both ways are held against each other: as many as are timed, within these."""
PROMPT_TOKENS = 8
"""Tokens of the prompt of a model that is not known."""
PROMPT_PER_DECODED = 4
"""Tokens of the timed prompt for each that is decoded: 512 and 128 on a device, which are llama-bench's own amounts."""
REPETITIONS = 3


@dataclass(frozen=True, slots=True)
class Known:
    """A model whose tokens are known: what its file says of itself, its vocabulary, a prompt, what follows."""

    name: str
    says: Mapping[str, str | int]
    vocab: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    def fits(self, metadata: Mapping[str, Any], vocab: int) -> bool:
        """Whether a file with this header is that model, as far as a header tells."""
        return vocab == self.vocab and all(metadata.get(key) == value for key, value in self.says.items())


KNOWN: Sequence[Known] = (
    Known(
        "Llama 3.2 1B Q6_K",
        {
            "general.architecture": "llama",
            "llama.block_count": 16,
            "llama.embedding_length": 2048,
            "general.file_type": 18,  # LLAMA_FTYPE_MOSTLY_Q6_K
        },
        128256,
        prompt=(128000, 9906),
        tokens=(11, 358, 2846, 3411),
    ),
)


def known(metadata: Mapping[str, Any], vocab: int) -> Known | None:
    """The row of a file, by what its header says; None where nobody knows its tokens."""
    return next((one for one in KNOWN if one.fits(metadata, vocab)), None)


def spread(vocab: int) -> tuple[int, ...]:
    """A prompt for any vocabulary."""
    return tuple((1 + 7919 * at) % vocab for at in range(PROMPT_TOKENS))


@dataclass(slots=True)
class Way:
    """What came of one way of running a step: tokens, logits after prompt and each of the first way's, tok/s."""

    tokens: list[int]
    logits: list[Any]
    rate: float


def your_model(notes: Notes) -> None:
    """Both ways, known tokens, the two against each other, speeds; then llama-bench, with nothing of ours at work."""
    os.environ.setdefault("DEV", "NV")  # tinygrad reads it when it is imported
    import tegrad.nv

    tegrad.nv.install()
    from tegrad.llm.device import open_device
    from tegrad.llm.gguf import Gguf

    path = Path(notes.asked.model)
    with notes.step("the file"):
        file = Gguf.open(path)
    with file:
        metadata, vocab = file.metadata, file.tensor("token_embd.weight").rows
        row = known(metadata, vocab)
        notes.fact("model", path.name)
        notes.fact("it calls itself", str(metadata.get("general.name", "nothing")))
        notes.fact("known as", row.name if row else "no tokens are known for it")
        if row is None:
            notes.line("no tokens are known for this model: the two ways of running a step check each other")
        with notes.step("open"):
            notes.fact("device", open_device())
        ways, prefill, length = _ways(notes, file, row.prompt if row else spread(vocab))
    with notes.step("the tokens"):
        judge(notes, row, ways, str(metadata.get("general.name", "nothing")))
    decode = {name: round(way.rate, 2) for name, way in ways.items()}
    notes.fact("decode tok/s", decode)
    notes.fact(f"prefill of {length} tok/s", prefill)
    with notes.step("close"):
        exercise.close_device()  # what it keeps for reuse would be missing to llama-bench
    with notes.step("llama-bench"):
        _beside_the_peer(notes, path, decode, prefill, length)


def judge(notes: Notes, row: Known | None, ways: Mapping[str, Way], itself: str) -> None:
    """Surprise where tokens are not the known ones, or the ways do not agree; the file calls `itself` so."""
    for name, way in ways.items():
        if row is None:
            break
        notes.expect(
            tuple(way.tokens[: len(row.tokens)]) == row.tokens,
            f"the tokens {row.tokens} of {row.name} after {row.prompt} in {name}",
            way.tokens,
            "compare llama.cpp's at temperature 0: this file has that model's shape and calls itself "
            f"{itself}; trained otherwise, it has other tokens",
        )
    if len(ways) == 2:
        _alike(notes, ways[ONE], ways[MANY])


def _ways(notes: Notes, file: Any, prompt: Sequence[int]) -> tuple[dict[str, Way], float | None, int]:
    """Each way that runs this model; the speed of a prompt, where its kernels run it, and how long that was."""
    from tegrad.llm.engine import Engine
    from tegrad.llm.errors import UnsupportedModelError
    from tegrad.llm.persistent import PersistentPlan
    from tegrad.llm.plan import DecodePlan

    longest = int(file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length", CONTEXT))
    ways: dict[str, Way] = {}
    prefill, length = None, min(PROMPT_PER_DECODED * notes.amount, longest)
    for name, plan in ((ONE, PersistentPlan), (MANY, DecodePlan)):
        try:
            with notes.step(f"a step in {name}: set-up"):
                engine = Engine(file, min(CONTEXT, longest), plan=plan)
        except UnsupportedModelError as error:
            if name == MANY:
                raise NotApplicable(str(error)) from None
            notes.line(f"no step in one launch, so nothing to hold many against: {error}")
            continue
        with engine:
            with notes.step(f"a step in {name}"):
                ways[name] = _way(engine, prompt, notes.amount, ways[ONE].tokens if ONE in ways else None)
                notes.fact(f"{name}: tokens", ways[name].tokens)
            if name == MANY:
                with notes.step(f"a prompt of {length}"), suppress(UnsupportedModelError):
                    prefill = round(_prefill(engine, length), 2)
    return ways, prefill, length


def _way(engine: Any, prompt: Sequence[int], amount: int, first: list[int] | None) -> Way:
    from tegrad.llm.sampling import Settings

    tokens = list(engine.generate(prompt, Settings(), max(LEAST, min(MOST, amount))))
    engine.reset()
    logits = [engine.feed(prompt), *(engine.feed([token]) for token in (first or tokens)[:-1])]
    rates = []
    for _ in range(1 + REPETITIONS):
        engine.reset()
        start = time.perf_counter()
        count = sum(1 for _ in engine.generate(prompt[:1], Settings(), amount))
        rates.append(count / (time.perf_counter() - start))
    return Way(tokens, logits, statistics.median(rates[1:]))


def _prefill(engine: Any, length: int) -> float:
    """Tokens per second of a prompt, from tokens on the host to the last one's logits on the device."""
    from tegrad.llm.cache import KvCache
    from tegrad.llm.prefill import Prefill, chunk_sizes

    tokens = [(1 + 7919 * at) % engine.config.vocab for at in range(length)]
    rates, sizes = [], chunk_sizes(engine.device.arch, length)
    with (
        KvCache(engine.device, engine.config, length, ahead=sizes[-1]) as cache,
        Prefill(engine.model, cache, sizes=sizes) as prefill,
    ):
        for _ in range(1 + REPETITIONS):
            start = time.perf_counter()
            prefill.run(tokens)
            engine.device.synchronize()
            rates.append(length / (time.perf_counter() - start))
    return statistics.median(rates[1:])


def _alike(notes: Notes, one: Way, many: Way) -> None:
    """Logits after the same tokens are near each other, and where the tokens part, both are as likely."""
    import numpy as np

    errors = [distance(mine, other) for mine, other in zip(one.logits, many.logits, strict=True)]
    notes.fact("difference of logits, the largest", round(max(errors), 5))
    at = int(np.argmax(errors))  # where one is no number, that one
    expected = f"logits within {MOST_DIFFERENCE} standard deviations of each other"
    notes.expect(errors[at] < MOST_DIFFERENCE, expected, f"{errors[at]:.4f} after token {at}")
    notes.fact("the same tokens both ways", one.tokens == many.tokens)
    for at, (mine, other) in enumerate(_parting(one.tokens, many.tokens)):
        expected = f"token {other} at {at}, as in {MANY}, or one as likely"
        notes.expect(regret(many.logits[at], mine) < MOST_REGRET, expected, f"{mine} in {ONE}")


def _parting(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of tokens up to the first that differ: after those the texts are not the same."""
    for pair in zip(one, other, strict=False):
        yield pair
        if pair[0] != pair[1]:
            return


def _beside_the_peer(notes: Notes, path: Path, decode: Mapping[str, float], prefill: float | None, length: int) -> None:
    ours = ", ".join(f"{rate} tok/s in {name}" for name, rate in decode.items())
    prompt = "not run by our kernels for prompts" if prefill is None else f"{prefill} tok/s"
    try:
        peer = llama_bench.measure(llama_bench.find(notes.asked.llama_bench), path, prompt=length, tokens=notes.amount)
    except llama_bench.PeerError as error:
        notes.line(f"decode: {ours}; prefill of {length}: {prompt}; nothing beside it: {error}")
        return
    named = f"llama-bench {peer.flags}, {peer.backend}, build {peer.build}"
    notes.fact("llama-bench", {"decode": peer.decode, "prefill": peer.prefill, "flags": peer.flags,
                               "backend": peer.backend, "build": peer.build})  # fmt: skip
    notes.line(f"decode: {ours}; {peer.decode:g} by {named}")
    notes.line(f"prefill of {length}: {prompt}; {peer.prefill:g} by {named}")
