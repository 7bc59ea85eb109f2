"""The next token from logits: the likeliest, or one drawn by temperature, top-k and top-p."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.errors import ModelError


class Sampler:
    """Draws tokens. Equal seeds and logits give equal tokens on every machine.

    temperature 0 takes the likeliest token; top_k 0 and top_p 1 keep all of them. The order is llama.cpp's: top-k,
    top-p, temperature, draw.
    """

    def __init__(
        self, temperature: float = 0.0, *, top_k: int = 0, top_p: float = 1.0, seed: int | None = None
    ) -> None:
        if not temperature >= 0 or top_k < 0 or not 0 < top_p <= 1:
            raise ModelError(
                f"cannot sample with temperature {temperature}, top-k {top_k}, top-p {top_p}; "
                "give a temperature from 0, a top-k from 0 and a top-p above 0 and up to 1"
            )
        self.temperature, self.top_k, self.top_p, self.seed = temperature, top_k, top_p, seed
        self._random = np.random.default_rng(seed)

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """A token from logits (vocab,)."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        tokens = np.argsort(-logits, kind="stable")[: self.top_k or None]
        chosen = logits[tokens].astype(np.float64)
        if self.top_p < 1:
            total = np.cumsum(_softmax(chosen))
            keep = int(np.searchsorted(total, self.top_p)) + 1
            tokens, chosen = tokens[:keep], chosen[:keep]
        total = np.cumsum(_softmax(chosen / self.temperature))
        return int(
            tokens[min(int(np.searchsorted(total, self._random.random() * total[-1], side="right")), len(tokens) - 1)]
        )


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(values - values.max())
    weights /= weights.sum()
    return weights
