"""A conversation with a model: its tokens, their keys and values, and the recorded steps that extend them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, TinyJit, UOp, Variable, dtypes
from tinygrad.dtype import DType

from tegrad.llm.model import Model
from tegrad.llm.rings import Rings
from tegrad.llm.sampler import Logprobs, Mask, Sampler

CHUNK: Final = 32
"""Prompt tokens of one prefill step; the rest of a prompt is padded to a chunk."""
SHORT_PROMPT_TOKENS: Final = 64
"""Fewer tokens than that are done one by one: sooner than the steps for chunks are compiled."""

Logits = NDArray[np.float32]


class Session:
    """Tokens so far and their KV cache. Each kind of step is compiled once and replayed for every position."""

    def __init__(
        self,
        model: Model,
        context: int | None = None,
        *,
        cache_dtype: DType = dtypes.float16,
        chunk: int = CHUNK,
        short: int = SHORT_PROMPT_TOKENS,
    ) -> None:
        self.model = model
        self.context = model.config.positions(context)
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        """Of each token that `generate` yielded last, where its settings ask for them."""
        # What runs along cannot take a chunk's padding back, and a text that is attended to as a whole has none.
        chunk = 1 if model.network.runs_along else chunk if model.config.causal else self.context
        self._chunk, self._short = chunk, short
        # A padded chunk writes beyond the last token, so the cache is longer than the context by as much.
        self._cache = model.cache(self.context + chunk, cache_dtype, chunk)
        rows = [int(layer.shape[1]) for layer in self._cache.layers]
        self._rings = Rings(model.network.mixers, rows, self._cache.positions)
        self._position = Variable("position", 0, self.context)
        self._last = Variable("last", 0, chunk - 1)
        self._step, self._prefill, self._prefill_all = (self._recorded(self._forward) for _ in range(3))
        self._hidden = self._recorded(self._states)

    def reset(self, keep: int = 0) -> None:
        """Forget all tokens but the first `keep`."""
        del self.tokens[keep:]

    def warm(self) -> None:
        """Compile the step for one token, so that none waits for it later. Only before the first token."""
        if not self.tokens and self.model.config.causal:
            self._run([0], every=False)
            self.reset()

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Add tokens and return the logits (vocab,) after the last one; raises ContextError, ModelError."""
        last: Logits = self._feed(tokens, every=False)[-1]
        return last

    def feed_all(self, tokens: Sequence[int]) -> Logits:
        """Add tokens and return the logits (len(tokens), vocab) after each of them."""
        return self._feed(tokens, every=True)

    def hidden(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The states (len(tokens), dim) after the last norm, of a text of its own: what was said before is forgotten.

        ContextError, ModelError.
        """
        self.reset()
        self._check(tokens)
        parts = []
        if not self.model.config.causal:
            return self._states(self._input(tokens, len(tokens)), 0).numpy()  # type: ignore[no-any-return]
        for at in range(0, len(tokens), self._chunk):
            some = tokens[at : at + self._chunk]
            states = self._hidden(self._input(some, self._chunk), self._position.bind(at))
            parts.append(states.numpy()[: len(some)])
        return np.concatenate(parts)

    def generate(
        self, prompt: Sequence[int], sampler: Sampler, limit: int | None = None, stops: frozenset[int] = frozenset(),
        *, mask: Mask | None = None,
    ) -> Iterator[int]:  # fmt: skip
        """Add a prompt and yield up to `limit` new tokens; one of `stops`, yielded too, or a full context ends them."""
        logits, told = self.feed(prompt), sampler.settings.logprobs
        self.logprobs, written = [], list[int]()
        while limit is None or len(written) < limit:
            token = sampler(self._drawable(logits), self.tokens, mask and mask(written))
            self.logprobs += [] if told is None else [Logprobs.of(logits, token, told)]
            written.append(token)
            yield token
            if token in stops or len(self.tokens) >= self.context:
                return
            if len(written) != limit:
                logits = self.feed([token])

    def _drawable(self, logits: Logits) -> Logits:
        """Logits of which tokens that are never drawn have none."""
        if suppressed := self.model.config.suppressed:
            logits = logits.copy()
            logits[list(suppressed)] = -np.inf
        return logits

    def _feed(self, tokens: Sequence[int], *, every: bool) -> Logits:
        self.model.config.check_answers()
        self._check(tokens)
        fed = tokens
        if not self._rings.holds(len(self.tokens)):  # everything anew: the first one attends to what was overwritten
            fed, self.tokens = [*self.tokens, *tokens], []
        if not self.tokens:
            self._rings.begin()
        size = 1 if len(fed) < self._short else self._chunk
        rows = [self._run(fed[at : at + size], every=every) for at in range(0, len(fed), size)]
        return np.concatenate(rows)[-len(tokens) :] if every else rows[-1]

    def _run(self, tokens: Sequence[int], *, every: bool) -> Logits:
        """One step. Returns the logits of every token, or of the last one."""
        position = self._position.bind(len(self.tokens))
        self._rings.wrote(len(self.tokens) + (1 if len(tokens) == 1 else self._chunk))
        if len(tokens) == 1:
            logits = self._step(self._input(tokens, 1), position)
        elif every:
            logits = self._prefill_all(self._input(tokens, self._chunk), position)
        else:
            last = self._last.bind(len(tokens) - 1)
            logits = self._prefill(self._input(tokens, self._chunk), position, last)
        result: Logits = logits.numpy()[: len(tokens)]
        self.tokens += tokens
        return result

    def _recorded(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A pass through the model as a recording, made at its first call."""
        recorded: Callable[..., Tensor] = TinyJit(function)
        # TinyJit spends its first call on realizing what the function needs; a model and its cache are realized.
        recorded.cnt = 1  # type: ignore[attr-defined]
        return recorded

    def _forward(self, tokens: Tensor, position: UOp, last: UOp | None = None) -> Tensor:
        return self.model.forward(tokens, self._cache, position, last)

    def _states(self, tokens: Tensor, position: UOp | int) -> Tensor:
        return self.model.hidden(tokens, self._cache, position)

    def _input(self, tokens: Sequence[int], size: int) -> Tensor:
        padded = np.zeros(size, np.int32)
        padded[: len(tokens)] = tokens
        return Tensor(padded, device=self.model.device).realize()

    def _check(self, tokens: Sequence[int]) -> None:
        self.model.config.check_prompt(tokens, len(self.tokens), self.context)
