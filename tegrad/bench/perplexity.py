"""Perplexity of a model on a named text: ours as `tegrad run` runs it, beside CPU llama.cpp's, on the same file.

Both are fed the same windows of tokens, each of which begins anew, and are asked for each token after the first of it.
Ours keeps keys and values in halves, and so does llama.cpp. Of the files of published models that tools/published.py
fetches, known by their SHA-256, it is a figure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tegrad import models as shipped
from tegrad.bench.gpu import spawned
from tegrad.bench.peers import F16, CpuLlama
from tegrad.bench.record import Record, RecordError, Side, file_hash, make, now, replace_rows, source_digest
from tegrad.llm.quality import negative_log_likelihood
from tegrad.llm.tokenizer import Tokenizer

Score: TypeAlias = Callable[[Sequence[int]], NDArray[np.floating[Any]]]
"""Logits (len(tokens), vocab) after each token of a text that begins here."""

WINDOW: Final = 512
"""Tokens of a window, of which all but the first are predicted."""
TOKENS: Final = 16_384
"""Tokens of the windows of a figure, at least."""
TABLE: Final = "perplexity.json"
MOST_MODEL_BYTES: Final = 4 << 30
"""Bytes of llama.cpp's copies of a model, at most, but for one."""


FOLDER: Final = "TEGRAD_PUBLISHED"
"""The variable that names the folder that they lie in, for `tegrad bench take`."""


@dataclass(frozen=True, slots=True)
class Published:
    """The file of a published model."""

    file: str
    sha256: str
    what: str


PUBLISHED: Final[Mapping[str, Published]] = {
    "smollm2": Published(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2 135M Instruct in Q4_1",
    ),
    "gemma3": Published(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M in Q4_K_M",
    ),
}
"""The figure of each is ppl-NAME."""


def name_of(path: Path) -> str | None:
    """The name in PUBLISHED of a file, whatever it is called."""
    found = file_hash(path)
    return next((name for name, known in PUBLISHED.items() if known.sha256 == found), None)


@dataclass(frozen=True, slots=True)
class Window:
    """Both sides' mean cost of a token of one window, in nats."""

    tokens: int
    """That were predicted."""
    ours: float
    llama_cpp: float


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Both sides' perplexity of a text."""

    tokens: int
    """Of the windows."""
    predicted: int
    ours: float
    llama_cpp: float

    @classmethod
    def of(cls, windows: Sequence[Window], tokens: int) -> Perplexity:
        """That of all windows together."""
        predicted = sum(window.tokens for window in windows)

        def side(costs: Iterator[float]) -> float:
            return math.exp(sum(cost * window.tokens for cost, window in zip(costs, windows, strict=True)) / predicted)

        ours = side(window.ours for window in windows)
        return cls(tokens, predicted, ours, side(window.llama_cpp for window in windows))

    @property
    def ratio(self) -> float:
        """llama.cpp's divided by ours: above 1 ours is the lower, which is the better."""
        return self.llama_cpp / self.ours


def windows(path: Path, count: int) -> list[list[int]]:
    """So many tokens of the named text in windows of WINDOW, the last one shorter; RecordError if it has fewer.

    Each begins with the model's begin token where its texts do.
    """
    tokenizer = Tokenizer.load(path)
    front = [tokenizer.bos] if tokenizer.encode("")[:1] == [tokenizer.bos] and tokenizer.bos is not None else []
    text = tokenizer.encode(shipped.HELD_OUT.read_text(encoding="utf-8").replace("\f", "\n"), bos=False, special=False)
    made: list[list[int]] = []
    while count > len(front) + 1:
        size = min(WINDOW, count) - len(front)
        if len(text) < size:
            raise RecordError(f"{shipped.HELD_OUT.name} has {sum(map(len, made)) + len(text)} tokens: ask for fewer")
        made.append([*front, *text[:size]])
        text, count = text[size:], count - size - len(front)
    return made


def compare(path: Path, score: Score, texts: Sequence[Sequence[int]], threads: int) -> Iterator[Window]:
    """Each window's costs, ours by `score` and llama.cpp's on so many threads; RecordError without llama.cpp.

    llama.cpp's logits come as lists of Python's numbers, which takes longer than they themselves where vocabularies are
    large: several processes share its windows, each with the model in memory.
    """
    if find_spec("cyllama") is None:
        raise RecordError("llama.cpp is missing: pip install cyllama")
    processes = max(1, min(threads, len(texts), MOST_MODEL_BYTES // path.stat().st_size))
    theirs = partial(_llama_cpp, path, max(map(len, texts)), threads // processes)
    for text, peer in zip(texts, spawned(theirs, [(text,) for text in texts], processes), strict=True):
        ours = float(negative_log_likelihood(score(text)[:-1], text[1:]).mean())
        yield Window(len(text) - 1, ours, peer)


def _llama_cpp(path: Path, context: int, threads: int, text: Sequence[int]) -> float:
    """CPU llama.cpp's mean cost of a token of a window."""
    logits = _peer(path, context, threads).logits(text)
    return float(negative_log_likelihood(logits[:-1], text[1:]).mean())


@cache
def _peer(path: Path, context: int, threads: int) -> CpuLlama:
    """The model in llama.cpp, for all windows of a process."""
    return CpuLlama(path, context, F16, F16, threads)


def record(name: str, found: Perplexity, command: str) -> Record:
    """The figure of a published model; RecordError for too short a text."""
    if found.tokens < TOKENS:
        raise RecordError(f"a figure of perplexity takes {TOKENS:,} tokens at least, not {found.tokens:,}")
    known = PUBLISHED[name]
    return make(
        f"ppl-{name}",
        f"perplexity of {known.what} on {found.tokens:,} tokens of {shipped.HELD_OUT.name}, windows of {WINDOW}",
        "perplexity",
        Side("tegrad", command, [found.ours]),
        larger_is_better=False,
        peer=Side(f"CPU llama.cpp (cyllama {version('cyllama')}), f16 cache", "the same windows", [found.llama_cpp]),
    )


def scoring(conversation: Any) -> Score:
    """A conversation that begins anew for each text."""

    def score(tokens: Sequence[int]) -> NDArray[np.floating[Any]]:
        conversation.reset()
        logits: NDArray[np.floating[Any]] = conversation.feed_all(list(tokens))
        return logits

    return score


def merge(path: Path, model: str, device: str, steps: str, found: Perplexity) -> None:
    """Put a result into the table, in place of that of the same model, device and number of tokens."""
    row = {
        "model": model, "device": device, "steps": steps, **dataclasses.asdict(found), "ratio": found.ratio,
        "text": shipped.HELD_OUT.name, "window": WINDOW, "date": now(), "sources": source_digest(),
    }  # fmt: skip
    replace_rows(path, __doc__.split("\n", 1)[0], ("model", "device", "tokens"), [row])
