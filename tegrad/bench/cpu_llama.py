"""CPU llama.cpp, from the package `cyllama`, as the peer that our logits are held against.

Importing it raises ImportError where the package is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from cyllama.llama import llama_cpp as lib

F32, F16, Q8_0 = 0, 1, 8
"""ggml's type numbers."""


class _Model(lib.LlamaModel):  # type: ignore[misc]
    """cyllama 0.2.18 reads its model's `n_vocab` for the size of the logits, and does not define it."""

    @property
    def n_vocab(self) -> int:
        return int(self.get_vocab().n_vocab)


class Peer:
    """A model in llama.cpp, closed at the end of a `with`.

    It gives logits of every position, without flash attention unless packed values need it.
    """

    def __init__(self, path: Path, context: int = 128, keys: int = F32, values: int = F32, threads: int = 1) -> None:
        lib.disable_logging()
        params = lib.LlamaModelParams()
        params.use_mmap = False
        self.model = _Model(path_model=str(path), params=params, verbose=False)
        self.vocab = self.model.get_vocab()
        self._params = lib.LlamaContextParams()
        self._params.n_ctx = self._params.n_batch = self._params.n_ubatch = context
        self._params.type_k, self._params.type_v = keys, values
        self._params.flash_attn_type = int(values == Q8_0)
        # They spin while they wait for another: one, unless the machine is ours alone.
        self._params.n_threads = self._params.n_threads_batch = threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close()

    def logits(self, tokens: Sequence[int], first: int = 0) -> np.ndarray:
        """Logits (len(tokens), vocab) after each token, the first of which is at the position `first`."""
        context = lib.LlamaContext(model=self.model, params=self._params, verbose=False)
        try:
            batch = lib.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
            batch.set_batch(list(tokens), first, True)
            context.decode(batch)
            logits = np.empty((len(tokens), self.model.n_vocab), np.float32)
            for at in range(len(tokens)):  # one after the other: each is a list of Python's numbers
                logits[at] = context.get_logits_ith(at)
            return logits
        finally:
            context.close()
