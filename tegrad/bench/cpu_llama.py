"""CPU llama.cpp, from the package `cyllama`, as the peer that our logits are held against.

Importing it raises ImportError where the package is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
from cyllama.llama import llama_cpp as lib

F32, F16, Q8_0 = 0, 1, 8
"""ggml's type numbers."""


Chooser: TypeAlias = Callable[[np.ndarray, list[int]], int | None]
"""The next token, by its logits and the tokens so far; None ends an answer."""


class _Model(lib.LlamaModel):  # type: ignore[misc]
    """cyllama 0.2.18 reads its model's `n_vocab` for the size of the logits, and does not define it."""

    @property
    def n_vocab(self) -> int:
        return int(self.get_vocab().n_vocab)


class Peer:
    """A model in llama.cpp: logits of every position, without flash attention unless packed values need it."""

    def __init__(self, path: Path, context: int, keys: int = F32, values: int = F32, threads: int = 1) -> None:
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

    def hidden(self, tokens: Sequence[int]) -> np.ndarray:
        """The states (len(tokens), dim) of each token that its vectors of texts are pooled of."""
        self._params.embeddings, self._params.pooling_type = True, 0  # none
        context = lib.LlamaContext(model=self.model, params=self._params, verbose=False)
        try:
            batch = lib.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
            batch.set_batch(list(tokens), 0, True)
            context.decode(batch)
            return np.array([context.get_embeddings_ith(at) for at in range(len(tokens))], np.float32)
        finally:
            context.close()
            self._params.embeddings = False

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The prompt and the tokens that llama.cpp itself continues it with."""
        return [*prompt, *next(self.answers(prompt, count, [lambda logits, _: int(logits.argmax())]))]

    def answers(self, prompt: Sequence[int], count: int, choosers: Iterable[Chooser]) -> Iterator[list[int]]:
        """Up to `count` tokens after a prompt, as each of some choosers takes them."""
        context = lib.LlamaContext(model=self.model, params=self._params, verbose=False)
        kept = 0
        try:
            for choose in choosers:
                said: list[int] = []
                context.memory_seq_rm(0, kept, -1)
                fed, at = list(prompt[kept:]), kept
                while len(said) < count:
                    batch = lib.LlamaBatch(n_tokens=len(fed), embd=0, n_seq_max=1)
                    batch.set_batch(fed, at, False)
                    context.decode(batch)
                    at, kept = at + len(fed), len(prompt) - 1
                    if (token := choose(np.array(context.get_logits_ith(-1), np.float32), said)) is None:
                        break
                    said.append(token)
                    fed = [token]
                yield said
        finally:
            context.close()


@contextmanager
def peer(path: Path, context: int = 128, keys: int = F32, values: int = F32, threads: int = 1) -> Iterator[Peer]:
    """A model in llama.cpp, closed at the end."""
    opened = Peer(path, context, keys, values, threads)
    try:
        yield opened
    finally:
        opened.model.close()
