"""Sequences that sample from given logits on a device. Needs no pytest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from operands import Operands

from tegrad.llm.sampling import Sampling, Settings
from tegrad.llm.state import States
from tegrad.nv.replay import Recording

VOCAB = 2603
"""Three chunks, and no multiple of what a thread takes."""
NARROW = (
    Settings(1.0, top_k=40),
    Settings(0.7, top_p=0.9, min_p=0.05, top_k=40),
    Settings(1.5, top_p=0.5, top_k=128),
    Settings(0.8, min_p=0.2, top_k=5),
    Settings(1.0, top_k=1),
    Settings(0.0),
)
WIDE = (
    Settings(1.0),
    Settings(0.7, top_p=0.95),
    Settings(1.2, min_p=0.1),
    Settings(1.0, top_k=600),
    Settings(1.0, top_p=0.9, top_k=600, min_p=0.001),
    Settings(2.0, top_p=0.02),
    Settings(1.0, top_k=VOCAB + 5, top_p=0.8),
)


class Rig:
    """Sequences with settings of their own that sample from given logits (slots, vocab)."""

    def __init__(
        self, operands: Operands, settings: Sequence[Settings], logits: np.ndarray, ends: Sequence[int] = ()
    ) -> None:
        self.operands, self.settings = operands, list(settings)
        self.device, self.vocab = operands.device, logits.shape[-1]
        self.recordings: dict[bool, Recording] = {}
        slots = len(self.settings)
        self.states = States(self.device, slots)
        self.sampling = Sampling(self.device, self.vocab, ends, slots)
        for slot, one in enumerate(self.settings):
            self.sampling.set(slot, one)
        self.logits = operands.put(logits)
        padded = np.full((slots, -(-self.vocab // 32) * 32), -np.inf, np.float32)
        padded[:, : self.vocab] = logits
        parts = padded.reshape(slots, -1, 32)
        self.best = operands.put(parts.max(-1))
        self.best_row = operands.put((parts.argmax(-1) + 32 * np.arange(parts.shape[1])).astype(np.int32))

    def begin(self, slot: int, position: int = 0, seed: int = 0, limit: int = 1 << 20, token: int = 0) -> None:
        self.states.begin(slot, [token], position, limit, seed)

    def step(self, logits: np.ndarray | None = None, greedy: bool = False) -> None:
        """One step of all slots, from other logits if given."""
        if logits is not None:
            self.device.allocator._copyin(self.logits, memoryview(np.ascontiguousarray(logits).tobytes()))
        if greedy not in self.recordings:
            best = {"best": self.best, "best_row": self.best_row} if greedy else {}
            launches = self.sampling.launches(self.states, self.settings, logits=self.logits, **best)
            self.recordings[greedy] = Recording(self.device, launches)
        recording = self.recordings[greedy]
        recording.wait(recording.run())

    def mask(self, slot: int, number: int, allowed: np.ndarray | None) -> None:
        """Give a mask of token `number`: true for each token of the vocabulary that is allowed."""
        self.sampling.mask(slot, number, None if allowed is None else bits(allowed))

    def tokens(self) -> list[int]:
        """What each slot would embed next."""
        return [self.states.read(slot).token for slot in range(len(self.settings))]

    def close(self) -> None:
        for recording in self.recordings.values():
            recording.close()
        self.sampling.close()
        self.states.close()


def bits(allowed: np.ndarray) -> bytes:
    """A mask as it is given: a bit for each token, in whole words."""
    return np.packbits(np.pad(allowed, (0, -len(allowed) % 32)), bitorder="little").tobytes()


def random_logits(slots: int, vocab: int = VOCAB, seed: int = 3) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((slots, vocab))).astype(np.float32)
