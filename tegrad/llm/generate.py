"""A prompt's answer: text as it comes, and what it took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, TypeAlias

from tegrad.llm.sampler import Sampler
from tegrad.llm.tokenizer import Stream, Tokenizer

Ending: TypeAlias = Literal["stop", "limit", "context", "open"]


class Speaker(Protocol):
    """A conversation with a model: `session.Session`, or `engine.Engine`."""

    def warm(self) -> None:
        """Compile what a token needs, so that none waits for it later."""

    def generate(
        self, prompt: Sequence[int], sampler: Sampler, limit: int | None = None, stops: frozenset[int] = frozenset()
    ) -> Iterator[int]:
        """Add a prompt and yield new tokens."""


class Reply:
    """Iterate over it once for the pieces of text; the figures are there as far as it has come."""

    def __init__(
        self, session: Speaker, tokenizer: Tokenizer, prompt: Sequence[int], sampler: Sampler, limit: int | None
    ) -> None:
        self.tokens: list[int] = []
        self.ended: Ending = "open"
        self.first_token: float | None = None
        """Seconds from the prompt to its first token, compilation of the kernels included."""
        self._later = 0.0
        self._parts = (session, tokenizer, prompt, sampler, limit)

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first; None where there is only one."""
        return (len(self.tokens) - 1) / self._later if len(self.tokens) > 1 and self._later > 0 else None

    def __iter__(self) -> Iterator[str]:
        session, tokenizer, prompt, sampler, limit = self._parts
        stream = Stream(tokenizer)
        begun = time.perf_counter()
        if limit != 1:
            session.warm()
        for token in session.generate(prompt, sampler, limit, tokenizer.stops):
            now = time.perf_counter()
            self.tokens.append(token)
            if self.first_token is None:
                self.first_token = now - begun
            self._later = now - begun - self.first_token
            if text := stream.push(token):
                yield text
        if text := stream.finish():
            yield text
        self.ended = self._ending(tokenizer, limit)

    def _ending(self, tokenizer: Tokenizer, limit: int | None) -> Ending:
        if self.tokens and self.tokens[-1] in tokenizer.stops:
            return "stop"
        return "limit" if len(self.tokens) == limit else "context"
