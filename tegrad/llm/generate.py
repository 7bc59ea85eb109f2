"""A prompt's answer: text as it comes, and what it took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, TypeAlias

from tegrad.llm.sampler import Logprobs, Mask, Sampler
from tegrad.llm.tokenizer import Stream, Tokenizer

Ending: TypeAlias = Literal["stop", "limit", "context", "open"]


class Speaker(Protocol):
    """A conversation with a model: `session.Session`, or `engine.Engine`."""

    logprobs: list[Logprobs]

    def warm(self) -> None:
        """Compile what a token needs, so that none waits for it later."""

    def generate(
        self, prompt: Sequence[int], sampler: Sampler, limit: int | None = None, stops: frozenset[int] = frozenset(),
        *, mask: Mask | None = None,
    ) -> Iterator[int]:  # fmt: skip
        """Add a prompt and yield new tokens, each of them one that `mask` allows."""


class Until:
    """Text as it comes, up to the first of some strings: what may yet become one of them is held back."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None
        """The string that ended the text."""

    def push(self, text: str) -> str:
        """What of all text so far is sure, and new; nothing once a string was found."""
        if self.found is not None:
            return ""
        text = self._held + text
        # The one that is complete first, however the text is cut.
        if ends := [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]:
            end, size, self.found = min(ends)
            return text[: end + size]
        most = len(text) + 1
        begun = (size for stop in self._stops for size in range(1, min(len(stop), most)) if text.endswith(stop[:size]))
        sure = len(text) - max(begun, default=0)
        self._held = text[sure:]
        return text[:sure]

    def finish(self) -> str:
        """What is held back, when no more text comes."""
        return "" if self.found is not None else self._held


class Reply:
    """Iterate over it once for the pieces of text; the figures are there as far as it has come.

    The text ends in front of the first of `stops`, as it does at a token that ends texts.
    """

    def __init__(
        self,
        session: Speaker,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampler: Sampler,
        limit: int | None,
        stops: Sequence[str] = (),
        mask: Mask | None = None,
    ) -> None:
        self.tokens: list[int] = []
        self.ended: Ending = "open"
        self.first_token: float | None = None
        """Seconds from the prompt to its first token, compilation of the kernels included."""
        self._later = 0.0
        self._parts = (session, tokenizer, prompt, sampler, limit, mask)
        self._until = Until(stops)

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first; None where there is only one."""
        return (len(self.tokens) - 1) / self._later if len(self.tokens) > 1 and self._later > 0 else None

    def __iter__(self) -> Iterator[str]:
        session, tokenizer, prompt, sampler, limit, mask = self._parts
        stream = Stream(tokenizer)
        begun = time.perf_counter()
        if limit != 1:
            session.warm()
        for token in session.generate(prompt, sampler, limit, tokenizer.stops, mask=mask):
            now = time.perf_counter()
            self.tokens.append(token)
            if self.first_token is None:
                self.first_token = now - begun
            self._later = now - begun - self.first_token
            if text := self._until.push(stream.push(token)):
                yield text
            if self._until.found is not None:
                break
        if text := self._until.push(stream.finish()) + self._until.finish():
            yield text
        self.ended = self._ending(tokenizer, limit)

    def _ending(self, tokenizer: Tokenizer, limit: int | None) -> Ending:
        if self._until.found is not None or (self.tokens and self.tokens[-1] in tokenizer.stops):
            return "stop"
        return "limit" if len(self.tokens) == limit else "context"
