"""What the training machine reads, as one small file: a token stream, where windows may begin, and held-out windows.

Needs numpy alone, so that the training machine needs no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class HeldOut:
    """Held-out text as rows of a context's length: inputs, targets, which targets count, and the bytes they spell."""

    inputs: Tokens
    targets: Tokens
    counted: NDArray[np.bool_]
    text_bytes: int


@dataclass(frozen=True)
class Data:
    """Everything that training reads."""

    stream: Tokens
    """All training documents, each from its begin mark to its end mark."""
    starts: Tokens
    """Positions in the stream where a title, a verse or a conversation begins, a context before the end at least."""
    held: HeldOut
    bos: int
    vocab: int

    @property
    def context(self) -> int:
        """Tokens of a window, its target left out."""
        return int(self.held.inputs.shape[1])

    def batch(self, rng: np.random.Generator, rows: int) -> Tokens:
        """Random windows (rows, context + 1): the begin mark, then the stream from a random start."""
        starts = rng.choice(self.starts, rows)
        body = self.stream[starts[:, None] + np.arange(self.context)]
        return np.concatenate([np.full((rows, 1), self.bos, np.int32), body], axis=1)

    def save(self, path: Path) -> None:
        """Write to an .npz file."""
        held = self.held
        np.savez_compressed(
            path,
            stream=self.stream.astype(np.uint16),
            starts=self.starts,
            inputs=held.inputs.astype(np.uint16),
            targets=held.targets.astype(np.uint16),
            counted=held.counted,
            numbers=np.array([held.text_bytes, self.bos, self.vocab]),
        )

    @classmethod
    def load(cls, path: Path) -> Data:
        """Read what `save` wrote."""
        with np.load(path) as file:
            text_bytes, bos, vocab = (int(number) for number in file["numbers"])
            inputs, targets = file["inputs"].astype(np.int32), file["targets"].astype(np.int32)
            held = HeldOut(inputs, targets, file["counted"], text_bytes)
            return cls(file["stream"].astype(np.int32), file["starts"], held, bos, vocab)
