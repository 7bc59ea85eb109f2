"""Sampling as kernels/sampling.cuh describes it, in numpy: the filters, Philox, and the draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tegrad.llm.sampling import Settings


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox-4x32-10 of counters (n, 4): random words (n, 4)."""
    c = counter.astype(np.uint64).T.copy()
    low, k = np.uint64(0xFFFFFFFF), [np.uint64(word) for word in key]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = np.stack([(second >> 32) ^ c[1] ^ k[0], second & low, (first >> 32) ^ c[3] ^ k[1], first & low])
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c.T.astype(np.uint32)


def adjusted(
    logits: np.ndarray, settings: Settings, past: Sequence[int], allowed: np.ndarray | None = None
) -> np.ndarray:
    """Logits after biases, penalties and a mask; `past` are all tokens so far."""
    out = logits.copy()
    for token, value in settings.biases:
        out[token] += np.float32(value)
    out = out.astype(np.float64)
    if settings.penalizes:
        tokens, counts = np.unique(np.asarray(past[-settings.last_n :], np.int64), return_counts=True)
        seen = out[tokens]
        seen = np.where(seen <= 0, seen * settings.repeat, seen / settings.repeat)
        out[tokens] = seen - counts * settings.frequency - settings.presence
    if allowed is not None:
        out[~allowed] = -np.inf
    return out


def kept(logits: np.ndarray, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that the filters leave, best first, and the probability that each is drawn with."""
    tokens = np.argsort(-logits, kind="stable")
    if settings.temperature == 0:
        return tokens[:1], np.ones(1)
    tokens = tokens[: settings.top_k or None]
    above = logits[tokens] - logits[tokens[0]]
    total = np.cumsum(np.exp(above))
    count = (
        int(np.searchsorted(total, np.float32(settings.top_p) * total[-1])) + 1 if settings.top_p < 1 else len(tokens)
    )
    if settings.min_p > 0:
        count = min(count, int(np.count_nonzero(above >= np.log(settings.min_p))))
    weights = np.exp(above[:count] / settings.temperature)
    return tokens[:count], weights / weights.sum()


def draw(logits: np.ndarray, settings: Settings, seed: int, position: int) -> int:
    """The token that the device draws from (penalized) logits."""
    tokens, _ = kept(logits, settings)
    if len(tokens) == 1:
        return int(tokens[0])
    counters = np.zeros((len(tokens), 4), np.uint32)
    counters[:, 0], counters[:, 1] = tokens // 4, position
    words = philox(counters, (seed & 0xFFFFFFFF, seed >> 32))[np.arange(len(tokens)), tokens % 4]
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    with np.errstate(divide="ignore"):
        noise = np.log(-np.log1p(-uniform))
    above = (logits[tokens] - logits[tokens[0]]).astype(np.float32)
    return int(tokens[np.argmax(above / np.float32(settings.temperature) - noise)])
