"""How a token is chosen from logits, and the host's way of doing it; `sampling` is the device's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.errors import ModelError

TOP: Final = 128
"""The largest top-k that takes the device one launch."""
LARGEST_TOP_K: Final = (1 << 31) - 1
"""The largest top-k: the device counts in 32 bits."""
HISTORY: Final = 1024
"""Tokens of a sequence that penalties may look back on."""
LARGEST_SETTING: Final = 1e9
"""Of any setting that is no probability."""
LEAST_TEMPERATURE: Final = 1e-3
"""Temperatures between 0 and this are refused: the noise would drown in the rounding of logit / temperature."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a token is drawn; the defaults take the likeliest one. Fields in the order of kernels/sampling.cuh.

    temperature 0 takes the likeliest, after penalties. top_k 0, top_p 1 and min_p 0 keep all. `repeat` divides positive
    logits and multiplies the others, `presence` is subtracted once and `frequency` for each occurrence, of tokens among
    the last `last_n`, the prompt's included. The order is llama.cpp's: penalties, top-k, top-p, min-p, temperature,
    draw. Of equal logits the lower token comes first. ModelError for values without meaning.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repeat: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    last_n: int = 64

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
        }
        if wrong := [rule for rule, holds in allowed.items() if not holds]:
            raise ModelError(f"cannot sample with {self}; give {' and '.join(wrong)}")

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens matter."""
        return self.last_n > 0 and (self.repeat, self.presence, self.frequency) != (1, 0, 0)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token of the unchanged logits is taken: what the logits kernel found is enough."""
        return self.temperature == 0 and not self.penalizes

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

    def __call__(self, logits: NDArray[np.float32], past: Sequence[int] = ()) -> int:
        """A token from logits (vocab,); `past` are the tokens so far, which penalties look at."""
        wanted = self.settings
        if wanted.penalizes:
            logits = _penalized(logits, wanted, past)
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
