"""How a token is chosen from logits, and the host's way of doing it; `sampling` is the device's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.errors import ModelError

TOP: Final = 128
"""The largest top-k that takes the device one launch."""
LARGEST_TOP_K: Final = (1 << 31) - 1
"""The largest top-k: the device counts in 32 bits."""
HISTORY: Final = 1024
"""Tokens of a sequence that penalties may look back on."""
BIASES: Final = 512
"""Tokens of a sequence that may have a bias."""
LIKELIEST: Final = 20
"""The most likeliest tokens of which a sequence is told the probabilities."""
LARGEST_SETTING: Final = 1e9
"""Of any setting that is no probability."""
LEAST_TEMPERATURE: Final = 1e-3
"""Temperatures between 0 and this are refused: the noise would drown in the rounding of logit / temperature."""
LEAST_TOP_P: Final = 1e-6
"""What is taken of a top-p of 0, or less: the likeliest token alone."""
Mask: TypeAlias = Callable[[Sequence[int]], bytes | memoryview | None]
"""What may follow an answer's tokens so far: bit t % 32 of little-endian word t / 32 allows token t, None all."""


SAMPLED: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repeat",
    "presence_penalty": "presence",
    "frequency_penalty": "frequency",
    "repeat_last_n": "last_n",
}
"""Options of commands, requests and programs that are `Settings`' fields."""
OWN: Final[Mapping[str, tuple[str, Callable[[float], float]]]] = {
    "temperature": ("temp", lambda said: said if said >= LEAST_TEMPERATURE else 0.0),
    "top_p": ("top_p", lambda said: min(max(said, LEAST_TOP_P), 1.0)),
    "top_k": ("top_k", lambda said: max(int(said), 0)),
    "min_p": ("min_p", lambda said: min(max(said, 0.0), 1.0)),
    "repeat_penalty": ("penalty_repeat", lambda said: said if said > 0 else 1.0),
    "repeat_last_n": ("penalty_last_n", lambda said: min(int(said), HISTORY) if said >= 0 else HISTORY),
}
"""Options that a model's file may say, its key behind "general.sampling.", and what we take of a number there."""


def own_options(metadata: Mapping[str, object], said: Mapping[str, object]) -> dict[str, Any]:
    """The options that a model's file has for whoever does not say them, as llama.cpp takes them; `said` ones are not
    among them.

    There are none where a temperature of 0 is said: that takes the likeliest token, whatever the file has penalized.
    """
    temperature = said.get("temperature")
    if isinstance(temperature, int | float) and temperature < LEAST_TEMPERATURE:
        return {}
    found: dict[str, Any] = {}
    for name, (key, taken) in OWN.items():
        value = metadata.get(f"general.sampling.{key}")
        if name in said or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if abs(value) <= LARGEST_SETTING:  # nor is what is not a number
            found[name] = taken(value)
    return found


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Settings` that options say, of which all of `SAMPLED` are there."""
    return {field: options[name] for name, field in SAMPLED.items()}


NO_TOKEN: Final = "no token can be taken: the mask and the biases leave none; ask for something else"


@dataclass(frozen=True, slots=True)
class Settings:
    """How a token is drawn; the defaults take the likeliest one. Fields in the order of kernels/sampling.cuh.

    temperature 0 takes the likeliest, after penalties. top_k 0, top_p 1 and min_p 0 keep all. `repeat` divides positive
    logits and multiplies the others, `presence` is subtracted once and `frequency` for each occurrence, of tokens among
    the last `last_n`, the prompt's included. `biases` are pairs of a token and what is added to its logit; a token with
    -inf is never taken. The order is llama.cpp's: biases, penalties, top-k, top-p, min-p, temperature, draw. Of equal
    logits the lower token comes first.

    `masked`: each token is one of a mask of its own, or the next one waits. `logprobs`: with each token comes its
    log-probability, and so many likeliest tokens with theirs (`Logprobs`). ModelError for values without meaning.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repeat: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    last_n: int = 64
    biases: tuple[tuple[int, float], ...] = ()
    masked: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        allowed = {
            f"a temperature of 0 or from {LEAST_TEMPERATURE:g} to {LARGEST_SETTING:g}": (
                self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature <= LARGEST_SETTING
            ),
            "a top-p above 0 and up to 1": 0 < self.top_p <= 1,
            "a min-p from 0 to 1": 0 <= self.min_p <= 1,
            f"a top-k from 0 to {LARGEST_TOP_K}": 0 <= self.top_k <= LARGEST_TOP_K,
            f"a repetition penalty above 0 and up to {LARGEST_SETTING:g}": 0 < self.repeat <= LARGEST_SETTING,
            f"presence and frequency penalties from -{LARGEST_SETTING:g} to {LARGEST_SETTING:g}": (
                abs(self.presence) <= LARGEST_SETTING and abs(self.frequency) <= LARGEST_SETTING
            ),
            f"a window of 0 to {HISTORY} tokens": 0 <= self.last_n <= HISTORY,
            f"at most {BIASES} biases, each of another token": (
                len({token for token, _ in self.biases}) == len(self.biases) <= BIASES
            ),
            f"biases of -inf, or from -{LARGEST_SETTING:g} to {LARGEST_SETTING:g}": all(
                value == -np.inf or abs(value) <= LARGEST_SETTING for _, value in self.biases
            ),
            f"the log-probabilities of 0 to {LIKELIEST} likeliest tokens": 0 <= (self.logprobs or 0) <= LIKELIEST,
        }
        if wrong := [rule for rule, holds in allowed.items() if not holds]:
            raise ModelError(f"cannot sample with {self}: give {' and '.join(wrong)}")

    def without(self, tokens: Collection[int]) -> Settings:
        """The same, but with tokens that are never taken, whatever their biases were. ModelError as for too many."""
        if not tokens:
            return self
        kept = (bias for bias in self.biases if bias[0] not in tokens)
        return replace(self, biases=(*kept, *((token, -np.inf) for token in tokens)))

    def check(self, vocab: int) -> None:
        """ModelError for biases of tokens that a vocabulary of this size has not."""
        if strange := [token for token, _ in self.biases if not 0 <= token < vocab]:
            raise ModelError(f"a bias is given for token {strange[0]}, outside of the vocabulary of {vocab}")

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens matter."""
        return self.last_n > 0 and (self.repeat, self.presence, self.frequency) != (1, 0, 0)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token of the unchanged logits is taken: what the logits kernel found is enough."""
        return self.temperature == 0 and not (self.penalizes or self.biases or self.masked)

    @property
    def narrow(self) -> bool:
        """Whether kernel `sample` does it in one launch."""
        return self.temperature == 0 or 0 < self.top_k <= TOP

    def passes(self, vocab: int) -> tuple[int, ...]:
        """The launches of kernel `sample_wide` that it takes; none where `sample` does it."""
        if self.narrow:
            return ()
        count = (1, 2, 3) if self.top_k < vocab and self.top_k else ()
        return (0, *count, *((4, 5, 6) if self.top_p < 1 else ()), 7)


class Sampler:
    """Draws tokens on the host. Equal seeds and logits give equal tokens on every machine.

    `more` are fields of `Settings`.
    """

    def __init__(self, temperature: float = 0.0, *, seed: int | None = None, **more: Any) -> None:
        self.settings, self.seed = Settings(temperature, **more), seed
        self._random = np.random.default_rng(seed)

    def __call__(
        self, logits: NDArray[np.float32], past: Sequence[int] = (), allowed: bytes | memoryview | None = None
    ) -> int:
        """A token from logits (vocab,); `past` are the tokens so far, which penalties look at, `allowed` a mask.

        ModelError where none can be taken.
        """
        wanted = self.settings
        if wanted.biases:
            logits = _biased(logits, wanted)
        if wanted.penalizes:
            logits = _penalized(logits, wanted, past)
        if allowed is not None:
            bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=logits.size, bitorder="little")
            logits = np.where(bits, logits, np.float32(-np.inf))
        if logits.max() == -np.inf:
            raise ModelError(NO_TOKEN)
        if wanted.temperature == 0:
            return int(np.argmax(logits))
        tokens = np.argsort(-logits, kind="stable")[: wanted.top_k or None]
        chosen = logits[tokens].astype(np.float64)
        if wanted.top_p < 1:
            total = np.cumsum(_softmax(chosen))
            keep = int(np.searchsorted(total, wanted.top_p)) + 1
            tokens, chosen = tokens[:keep], chosen[:keep]
        if wanted.min_p > 0:
            keep = int(np.count_nonzero(chosen >= chosen[0] + np.log(wanted.min_p)))
            tokens, chosen = tokens[:keep], chosen[:keep]
        total = np.cumsum(_softmax(chosen / wanted.temperature))
        return int(
            tokens[min(int(np.searchsorted(total, self._random.random() * total[-1], side="right")), len(tokens) - 1)]
        )


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of one place in a text: of the token that was taken, and the likeliest ones with theirs.

    They are those of the model, log-softmax of its own logits: biases, penalties, masks and temperature do not count.
    """

    taken: float
    likeliest: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, logits: NDArray[np.float32], token: int, count: int = 0) -> Logprobs:
        """Of a token taken from logits (vocab,), with the `count` likeliest; of equals the lower token comes first."""
        wide = logits.astype(np.float64)
        every = wide - wide.max()
        every -= np.log(np.exp(every).sum())
        best = np.argsort(-wide, kind="stable")[:count].tolist()
        return cls(float(every[token]), tuple((at, float(every[at])) for at in best))


def _biased(logits: NDArray[np.float32], wanted: Settings) -> NDArray[np.float32]:
    out = logits.copy()
    for token, value in wanted.biases:
        out[token] += np.float32(value)
    return out


def _penalized(logits: NDArray[np.float32], wanted: Settings, past: Sequence[int]) -> NDArray[np.float32]:
    tokens, counts = np.unique(np.asarray(past[-wanted.last_n :], np.int64), return_counts=True)
    out = logits.copy()
    seen = out[tokens]
    seen = np.where(seen <= 0, seen * wanted.repeat, seen / wanted.repeat)
    out[tokens] = seen - (counts * wanted.frequency + wanted.presence)
    return out


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(values - values.max())
    weights /= weights.sum()
    return weights
