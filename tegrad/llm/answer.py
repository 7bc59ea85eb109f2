"""What is asked for of a model and read as it comes: an answer's text, its tokens and how it ended.

Whoever makes tokens only stores them here, in any thread; who reads makes text of them and looks for stop strings.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from tegrad.llm.generate import Until
from tegrad.llm.sampler import Logprobs
from tegrad.llm.tokenizer import Stream, Tokenizer

Reason: TypeAlias = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What came at once: tokens, and the text that they complete, either possibly empty."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    """Of each token, where the settings ask for them."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: its prompt's, how many of these were found in the cache, and those of its answer so far."""

    prompt: int
    cached: int
    completion: int


class Answer:
    """Iterate over it once, with `for` or `async for`, for what comes; then `finish_reason` tells how it ended.

    "stop": a token that ends texts, or a stop string, in front of which the text ends. "length": `max_tokens`, or the
    context. "error": see `error`. Leaving the loop, or the task that is in it, cancels the request.
    """

    leave: Callable[[Reason], object]
    """Has no more tokens made, for a reason."""

    def __init__(self, tokenizer: Tokenizer, prompt: int, stops: Sequence[str]) -> None:
        """To a prompt of so many tokens, which is yet to be asked."""
        self.finish_reason: Reason | None = None
        """Set once all of the answer was read."""
        self.error: Exception | None = None
        self.first_token: float | None = None
        """Seconds from the request to its first token."""
        self._begun = time.monotonic()
        self._prompt, self._cached, self._read = prompt, 0, 0
        self._stream, self._until = Stream(tokenizer), Until(stops)
        self._came: deque[tuple[int, Logprobs | None]] = deque()
        self._ended: Reason | None = None
        """Set after the last token was stored."""
        self._wakers: deque[Callable[[], object]] = deque(maxlen=1)
        """What wakes a reader that waits; called once."""
        self._at_end: Callable[[], object] = lambda: None

    @property
    def usage(self) -> Usage:
        """Tokens, as far as they were read."""
        return Usage(self._prompt, self._cached, self._read)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._until.found

    def cancel(self) -> None:
        """End it, from any thread; what came before can be read."""
        self.leave("cancelled")

    def __iter__(self) -> Iterator[Piece]:
        news = threading.Event()
        try:
            while self.finish_reason is None:
                news.clear()
                self._wakers.append(news.set)
                if piece := self._take():
                    yield piece
                elif self.finish_reason is None:
                    news.wait()
        finally:
            self._left()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        news, loop, thread = asyncio.Event(), asyncio.get_running_loop(), threading.get_ident()

        def wake() -> None:
            if threading.get_ident() == thread:
                news.set()
            else:
                loop.call_soon_threadsafe(news.set)

        try:
            while self.finish_reason is None:
                news.clear()
                self._wakers.append(wake)
                if piece := self._take():
                    yield piece
                elif self.finish_reason is None:
                    await news.wait()
        finally:
            self._left()

    async def pause(self, seconds: float) -> None:
        """Read nothing for so long, or until no more tokens come."""
        over = asyncio.Event()
        self._at_end = partial(asyncio.get_running_loop().call_soon_threadsafe, over.set)
        # Looked at once `_at_end` is there, which is called once `_ended` is set.
        if self._ended is None and self.finish_reason is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), seconds)

    # ---- who makes the tokens

    def begin(self, cached: int) -> None:
        """Its first token is about to come; so many of the prompt's were in the cache."""
        self.first_token, self._cached = time.monotonic() - self._begun, cached

    def put(self, token: int, logprobs: Logprobs | None) -> None:
        """A token."""
        self._came.append((token, logprobs))
        self._wake()

    def end(self, reason: Reason, error: Exception | None = None) -> None:
        """No more tokens come."""
        self.error = error
        self._ended = reason
        with suppress(RuntimeError):  # the reader's loop was closed
            self._at_end()
        self._wake()

    def _wake(self) -> None:
        with suppress(IndexError, RuntimeError):  # nobody waits; the reader's loop was closed
            self._wakers.pop()()

    # ---- who reads

    def _take(self) -> Piece | None:
        """What came since the last time; None where nothing did."""
        ended = self._ended  # before the look at tokens, which are stored before it
        tokens, logprobs, text = [], [], ""
        while self._came and self._until.found is None:
            token, logs = self._came.popleft()
            tokens.append(token)
            logprobs += [logs] if logs is not None else []
            text += self._until.push(self._stream.push(token))
        self._read += len(tokens)
        if ended is not None and self._until.found is None:
            text += self._until.push(self._stream.finish()) + self._until.finish()
            self.finish_reason = ended
        if self._until.found is not None:
            self.finish_reason = "stop"
            self.leave("stop")
        return Piece(text, tuple(tokens), tuple(logprobs)) if tokens or text else None

    def _left(self) -> None:
        if self.finish_reason is None:
            self.cancel()
            self.finish_reason = "cancelled"
