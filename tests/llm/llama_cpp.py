"""CPU llama.cpp for the tests: pytest.importorskip("llama_cpp") leaves out what needs it.

To the logits that the benches compare it adds states, and answers that llama.cpp continues by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from cyllama.llama import llama_cpp as lib

from tegrad.bench.peers import F16, F32, Q8_0, CpuLlama
from tegrad.llm import numerics

__all__ = ["F16", "F32", "Q8_0", "Chooser", "Peer", "peer", "table_gelu"]

Chooser: TypeAlias = Callable[[np.ndarray, list[int]], int | None]
"""The next token, by its logits and the tokens so far; None ends an answer."""


def table_gelu(x: np.ndarray) -> np.ndarray:
    """As ggml's CPU code computes it: looked up in a table of halves by a half."""
    half = numerics._gelu(x.astype(np.float16).astype(np.float32)).astype(np.float16).astype(np.float32)
    return np.where(np.abs(x) < 10, half, np.maximum(x, 0))


class Peer(CpuLlama):
    """A model in llama.cpp."""

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

    def template(self, name: str, said: Sequence[tuple[str, str]]) -> str:
        """The text of roles and what they said, up to where an answer begins, in a template that llama.cpp names."""
        return str(self.model.chat_apply_template(name, [lib.LlamaChatMessage(*one) for one in said], True))

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


peer = Peer
