"""How good a model is on a text: bits per byte, and the share of its own words that the text's language has. And how
near an engine's logits are to exact ones.

All need only logits, so that the same figures come from a device and from the float32 reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.errors import ModelError
from tegrad.llm.reference import Past, Reference
from tegrad.llm.sampler import Sampler
from tegrad.llm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tegrad.llm.engine import Engine
    from tegrad.llm.session import Session

OVERLAP_TOKENS: Final = 128
"""Tokens of a window that repeat the one before: they give context and are not counted again."""
SAMPLE_TOKENS: Final = 250
"""Tokens of one sampled text, at most."""

_WORD: Final = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")


class Runner(Protocol):
    """A model as the measurements need it."""

    @property
    def context(self) -> int:
        """The most tokens of one window."""

    def score(self, tokens: Sequence[int]) -> NDArray[np.floating[Any]]:
        """Logits (len(tokens), vocab) after each token of a text that begins here."""

    def generate(self, prompt: Sequence[int], sampler: Sampler, limit: int, stops: frozenset[int]) -> Iterator[int]:
        """Up to `limit` tokens after a prompt; ends after one of `stops`, which is yielded too."""


class ReferenceRunner:
    """The float32 numpy reference."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    @property
    def context(self) -> int:
        """Tokens that the model sees at once."""
        return self._reference.config.longest

    def score(self, tokens: Sequence[int]) -> NDArray[np.floating[Any]]:
        """Logits (len(tokens), vocab) after each token."""
        return self._reference.logits(tokens)

    def generate(self, prompt: Sequence[int], sampler: Sampler, limit: int, stops: frozenset[int]) -> Iterator[int]:
        """Up to `limit` tokens after a prompt; one of `stops`, which is yielded too, ends them."""
        past, fed = Past(), prompt
        for _ in range(min(limit, self.context - len(prompt))):
            token = sampler(self._reference.logits(fed, past)[-1].astype(np.float32))
            yield token
            if token in stops:
                return
            fed = [token]


class SessionRunner:
    """A conversation on a device, begun anew for each text."""

    def __init__(self, session: Engine | Session) -> None:
        self._session = session

    @property
    def context(self) -> int:
        """Tokens that the model sees at once."""
        return self._session.context

    def score(self, tokens: Sequence[int]) -> NDArray[np.floating[Any]]:
        """Logits (len(tokens), vocab) after each token."""
        self._session.reset()
        return self._session.feed_all(tokens)

    def generate(self, prompt: Sequence[int], sampler: Sampler, limit: int, stops: frozenset[int]) -> Iterator[int]:
        """Up to `limit` tokens after a prompt; one of `stops`, which is yielded too, ends them."""
        self._session.reset()
        return self._session.generate(prompt, sampler, limit, stops)


class EngineRunner(SessionRunner):
    """An engine. It draws by seed and position alone, so that each text gets a seed of its own, from the sampler's."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._engine, self._texts = engine, 0

    def generate(self, prompt: Sequence[int], sampler: Sampler, limit: int, stops: frozenset[int]) -> Iterator[int]:
        """Up to `limit` tokens after a prompt; one of `stops`, which is yielded too, ends them."""
        self._engine.reset()
        seed = None
        if sampler.seed is not None:
            seed = int(np.random.SeedSequence([sampler.seed, self._texts]).generate_state(1, np.uint64)[0])
        self._texts += 1
        return self._engine.generate(prompt, sampler, limit, stops, seed=seed)


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a document that fits the context: all but its first `known` tokens are to be predicted."""

    tokens: list[int]
    known: int


def windows(document: Sequence[int], bos: int, context: int) -> Iterator[Window]:
    """Cut a tokenized document, which begins with `bos`, so that every other token is predicted once.

    A window holds context + 1 tokens at most, as its last one is only a target; from the second one on it begins with
    `bos` and OVERLAP_TOKENS that are known.
    """
    overlap = min(OVERLAP_TOKENS, context // 2)
    done = 1
    while done < len(document):
        known = 1 if done == 1 else overlap + 1
        start = 0 if done == 1 else done - overlap
        head = [] if start == 0 else [bos]
        body = document[start : start + context + 1 - len(head)]
        yield Window([*head, *body], known)
        done = start + len(body)


@dataclass(frozen=True, slots=True)
class Loss:
    """The cost of a text under a model."""

    nats: float
    tokens: int
    text_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits for each byte of the text."""
        return self.nats / log(2) / self.text_bytes


def loss(model: Runner, tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[Loss]:
    """The cost of documents, each with its end mark where the model has one; yields the sum so far after each."""
    if tokenizer.bos is None:
        raise ModelError("the model has no begin-of-text token, from which its loss is measured: choose another model")
    nats, count, size = 0.0, 0, 0
    for text in documents:
        end = [] if tokenizer.eos is None else [tokenizer.eos]
        document = [*tokenizer.encode(text, bos=True, special=False), *end]
        for window in windows(document, tokenizer.bos, model.context):
            cost = negative_log_likelihood(model.score(window.tokens[:-1]), window.tokens[1:])[window.known - 1 :]
            nats, count = nats + float(cost.sum()), count + len(cost)
        size += len(text.encode())
        yield Loss(nats, count, size)


def negative_log_likelihood(logits: NDArray[np.floating[Any]], targets: Sequence[int]) -> NDArray[np.float64]:
    """Nats of each target (n,) under logits (n, vocab)."""
    nats = np.empty(len(logits))
    for at, (row, target) in enumerate(zip(logits, targets, strict=True)):  # a vocabulary at a time stays in the cache
        raised = row.astype(np.float64) - row.max()
        nats[at] = np.log(np.exp(raised).sum()) - raised[target]
    return nats


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near logits are to exact ones, teacher-forced: both after the same tokens."""

    positions: int
    max_error: float
    """Largest difference of a logit."""
    mean_error: float
    """Mean magnitude of the differences."""
    divergence: float
    """Mean Kullback-Leibler divergence of the distributions from the exact ones, in nats a token."""
    top1: float
    """Share of the positions whose likeliest token is the exact one's."""

    def no_worse(self, other: Agreement) -> bool:
        """Whether it is as near or nearer, over the same positions.

        By mean error and divergence; and by what single logits decide as far as chance allows between equals: a largest
        error up to a quarter larger, and as many more wrong first choices as twice their standard deviation.
        """
        misses = [round((1 - side.top1) * side.positions) for side in (self, other)]
        chance = 2 * sqrt(sum(misses))
        near = self.mean_error <= other.mean_error and self.divergence <= other.divergence
        return near and self.max_error <= 1.25 * other.max_error and misses[0] - misses[1] <= chance


def agreement(logits: NDArray[np.floating[Any]], exact: NDArray[np.floating[Any]]) -> Agreement:
    """How near logits (positions, vocab) are to exact ones; raises ModelError where one is not a number."""
    if not np.isfinite(logits).all():
        raise ModelError("a logit is infinite or not a number: the engine is broken, or the model's weights are")
    error = np.abs(logits.astype(np.float64) - exact)
    own, wanted = log_softmax(logits), log_softmax(exact)
    return Agreement(
        positions=len(logits),
        max_error=float(error.max()),
        mean_error=float(error.mean()),
        divergence=max(0.0, float((np.exp(wanted) * (wanted - own)).sum(axis=-1).mean())),
        top1=float((logits.argmax(axis=-1) == exact.argmax(axis=-1)).mean()),
    )


def log_softmax(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Logarithms of the probabilities that logits (..., vocab) stand for."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    total: NDArray[np.float64] = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    result: NDArray[np.float64] = shifted - total
    return result


def sample(model: Runner, tokenizer: Tokenizer, sampler: Sampler, count: int) -> Iterator[tuple[str, int]]:
    """Texts that the model writes from nothing, `count` tokens in all; yields each with its tokens.

    A text that was cut off loses its last word, which may be half of one.
    """
    if tokenizer.bos is None:
        raise ModelError("the model has no begin-of-text token, from which it could write: choose another model")
    while count > 0:
        tokens = list(model.generate([tokenizer.bos], sampler, min(count, SAMPLE_TOKENS), tokenizer.stops))
        text = tokenizer.decode(tokens)
        if tokens[-1] not in tokenizer.stops:
            text = text[: max((match.end() for match in re.finditer(r"\S+(?=\s)", text)), default=0)]
        yield text, len(tokens)
        count -= len(tokens)


def words(text: str) -> list[str]:
    """Runs of letters, with the apostrophes between them."""
    return _WORD.findall(text)
