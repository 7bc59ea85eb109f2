"""Requests of many threads to one model: a bounded queue in front of a `Batch`, in a thread of its own.

`Service.submit` gives an `Answer`, from which a thread or a coroutine reads text as it comes. The service's thread only
stores tokens there; the reader makes text of them and looks for stop strings, so that one that is slow, or does not
read at all, holds up nobody: its tokens wait, at most as many as it asked for.

Requests begin in the order in which they came. One that finds no room in the batch waits for it, as do those behind it.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any, Final, Literal, Self, TypeAlias

from tegrad import nv
from tegrad.errors import TegradError
from tegrad.llm.batch import GREEDY, Batch, Member
from tegrad.llm.errors import ContextError, ModelError, NoRoom
from tegrad.llm.generate import Until
from tegrad.llm.packed import PackedModel
from tegrad.llm.sampling import Logprobs, Settings
from tegrad.llm.tokenizer import Stream, Tokenizer

Reason: TypeAlias = Literal["stop", "length", "cancelled", "timeout", "error"]
Mask: TypeAlias = Callable[[Sequence[int]], bytes | memoryview | None]
"""What may follow the tokens so far, as `Batch.mask` takes it. Called in the service's thread: be quick."""

QUEUE: Final = 64
"""Requests that wait beside those that all slots take."""
LEAST_WAIT_S: Final = 1.0
"""The shortest wait that somebody is told who finds the queue full."""
_reopening: Final = threading.Lock()
"""Services of one device open it again one after the other."""


class QueueFull(NoRoom):
    """As many requests wait as may; try again after `retry_after` seconds."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(f"{waiting} requests wait already: try again in {retry_after:.0f} s")


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


@dataclass(slots=True)
class Counts:
    """What a service has done since it began, and what it does now."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    """Of prompts whose first token came."""
    cached_tokens: int = 0
    """Those of these that were found in the cache."""
    completion_tokens: int = 0
    widths: Counter[int] = field(default_factory=Counter)
    """Steps by the number of sequences that they gave a token."""
    ended: Counter[Reason] = field(default_factory=Counter)
    refused: int = 0
    """Requests that found the queue full."""
    reopened: int = 0


class Answer:
    """Iterate over it once, with `for` or `async for`, for what comes; then `finish_reason` tells how it ended.

    "stop": a token that ends texts, or a stop string, in front of which the text ends. "length": `max_tokens`, or the
    context. "error": see `error`. Leaving the loop, or the task that is in it, cancels the request.
    """

    def __init__(
        self, tokenizer: Tokenizer, tokens: Sequence[int], limit: int | None, settings: Settings, seed: int,
        stops: Sequence[str], mask: Mask | None, deadline: float | None,
    ) -> None:  # fmt: skip
        self.finish_reason: Reason | None = None
        """Set once all of the answer was read."""
        self.error: Exception | None = None
        self.first_token: float | None = None
        """Seconds from the request to its first token."""
        self._begun = self._joined = time.monotonic()
        self._member: Member | None = None
        self._request = (tokens, limit, settings, seed)
        self._mask, self._logs = mask, settings.logprobs is not None
        self._deadline = math.inf if deadline is None else self._begun + deadline
        self._cached = self._read = 0
        self._stream, self._until = Stream(tokenizer), Until(stops)
        self._came: deque[tuple[int, Logprobs | None]] = deque()
        self._ended: Reason | None = None
        """Set after the last token was stored."""
        self._asked: Reason | None = None
        """Why the reader wants it to end."""
        self._wakers: deque[Callable[[], object]] = deque(maxlen=1)
        """What wakes a reader that waits; called once."""

    @property
    def usage(self) -> Usage:
        """Tokens, as far as they were read."""
        return Usage(len(self._request[0]), self._cached, self._read)

    def cancel(self) -> None:
        """End it, from any thread; what came before can be read."""
        self._asked = self._asked or "cancelled"

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
            self._leave()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        news, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            while self.finish_reason is None:
                news.clear()
                self._wakers.append(partial(loop.call_soon_threadsafe, news.set))
                if piece := self._take():
                    yield piece
                elif self.finish_reason is None:
                    await news.wait()
        finally:
            self._leave()

    # ---- the reader's side

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
            self.finish_reason = self._asked = "stop"
        return Piece(text, tuple(tokens), tuple(logprobs)) if tokens or text else None

    def _leave(self) -> None:
        if self.finish_reason is None:
            self.cancel()
            self.finish_reason = "cancelled"

    # ---- the service's side

    def _put(self, token: int, logprobs: Logprobs | None) -> None:
        self._came.append((token, logprobs))
        self._wake()

    def _end(self, reason: Reason, error: Exception | None = None) -> None:
        self.error = error
        self._ended = reason
        self._wake()

    def _wake(self) -> None:
        with suppress(IndexError, RuntimeError):  # nobody waits; the reader's loop was closed
            self._wakers.pop()()


class Service:
    """One model for many threads. Close it, or use it in a `with`.

    `options` are those of `Batch`. Up to `queue` requests wait beside as many as there are slots. What PackedModel and
    Batch raise is raised; once it runs, an error of the device ends the answers that are there, and the next request
    has the device opened and the model loaded anew.
    """

    def __init__(
        self, path: str | PathLike[str], device: str | None = None, *, queue: int = QUEUE, **options: Any
    ) -> None:
        self.tokenizer = Tokenizer.load(path)
        self._open = partial(_opened, path, device, ends=sorted(self.tokenizer.stops), **options)
        self._batch: Batch | None = self._open()
        self.config, self.slots, self.positions = self._batch.config, self._batch.slots, self._batch.cache.positions
        self._device, self._queue = self._batch.device, queue
        self._changed = threading.Condition()
        self._waiting: deque[Answer] = deque()
        self._running: dict[Member, Answer] = {}
        self._full = False
        """The first that waits found no room, and nobody has left since."""
        self._closing = False
        self._counts = Counts()
        self._seconds = LEAST_WAIT_S
        """What a request takes once it has begun, of the last ones."""
        self._thread = threading.Thread(target=self._run, name="tegrad-service", daemon=True)
        self._thread.start()
        atexit.register(self.close, drain=False)

    def submit(
        self,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        settings: Settings = GREEDY,
        *,
        stops: Sequence[str] = (),
        seed: int = 0,
        mask: Mask | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """Ask for what follows `tokens`: at most `max_tokens`, or as many as the context has room for.

        After `deadline` seconds it ends, wherever it is. QueueFull; ContextError for a prompt that the context has no
        room for; ModelError for what the model cannot continue or sample, and for a closed service.
        """
        self.config.check_prompt(tokens)
        settings.check(self.config.vocab)
        if len(tokens) > self.positions:
            raise ContextError(f"a prompt of {len(tokens)} tokens does not fit a context of {self.positions}")
        if max_tokens is not None and max_tokens < 1:
            raise ModelError(f"an answer of {max_tokens} tokens was asked for: give 1 or more")
        settings = replace(settings, masked=mask is not None)
        limit = None if max_tokens is None else len(tokens) + max_tokens - 1
        answer = Answer(self.tokenizer, list(tokens), limit, settings, seed, stops, mask, deadline)
        with self._changed:
            if self._closing:
                raise ModelError("this service was closed: make a new one")
            if len(self._waiting) + len(self._running) >= self.slots + self._queue:
                self._counts.refused += 1
                turns = 1 + len(self._waiting) // self.slots
                raise QueueFull(len(self._waiting), max(LEAST_WAIT_S, turns * self._seconds))
            self._waiting.append(answer)
            self._changed.notify()
        return answer

    @property
    def counts(self) -> Counts:
        """A copy of what is counted."""
        with self._changed:
            now, running, waiting = self._counts, len(self._running), len(self._waiting)
            widths, ended = now.widths.copy(), now.ended.copy()
            return replace(now, running=running, waiting=waiting, widths=widths, ended=ended)

    def close(self, *, drain: bool = True) -> None:
        """Take no more requests, finish those that are there or else cancel them, and free everything.

        Closing twice is harmless; closing without `drain` ends a close with it that waits.
        """
        with self._changed:
            self._closing = True
            for answer in () if drain else (*self._running.values(), *self._waiting):
                answer.cancel()
            self._changed.notify()
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(drain=kind is None)

    # ---- the service's thread

    def _run(self) -> None:
        while self._wanted():
            try:
                self._turn()
            except Exception as error:
                self._fail(error)
        self._free()

    def _wanted(self) -> bool:
        """Wait for requests; False once the service is to end and none is left."""
        with self._changed:
            while not (self._waiting or self._running or self._closing):
                self._changed.wait()
            return bool(self._waiting or self._running)

    def _turn(self) -> None:
        """One step, with what readers want before it."""
        if self._batch is None:
            self._batch = self._reopened()
        now = time.monotonic()
        for answer in (*self._running.values(), *self._waiting):
            if reason := answer._asked or ("timeout" if now > answer._deadline else None):
                self._end(answer, reason)
        while self._waiting and not self._full:
            self._join(self._batch, self._waiting[0])
        if self._running:
            self._step(self._batch)

    def _join(self, batch: Batch, answer: Answer) -> None:
        """Have the first that waits begin, if there is room."""
        try:
            member = batch.join(*answer._request)
        except NoRoom:
            self._full = True
            return
        except ModelError as error:
            self._end(answer, "error", error)
            return
        answer._member, answer._joined = member, time.monotonic()
        with self._changed:
            self._waiting.popleft()
            self._running[member] = answer
        self._give_mask(batch, member, answer)

    def _step(self, batch: Batch) -> None:
        came = batch.step()
        with self._changed:
            self._counts.widths.update([len(came)] if came else ())
            self._counts.completion_tokens += len(came)
        for member, token in came:
            if (answer := self._running.get(member)) is None:
                continue
            if answer.first_token is None:
                self._begin(member, answer)
            answer._put(token, member.logprobs[-1] if answer._logs else None)
            self._give_mask(batch, member, answer)
        for member in [member for member in self._running if member.finished]:
            stopped = member.tokens and member.tokens[-1] in self.tokenizer.stops
            reason: Reason = "error" if member.error else "stop" if stopped else "length"
            self._end(self._running[member], reason, member.error)

    def _begin(self, member: Member, answer: Answer) -> None:
        """Its first token came."""
        answer.first_token = time.monotonic() - answer._begun
        answer._cached = member.reused
        with self._changed:
            self._counts.prompt_tokens += len(member.prompt) + 1
            self._counts.cached_tokens += member.reused

    def _give_mask(self, batch: Batch, member: Member, answer: Answer) -> None:
        """Say what its next token may be; an error of who knows that is an error of this answer."""
        if answer._mask is not None and not member.finished:
            try:
                batch.mask(member, answer._mask(member.tokens))
            except Exception as error:
                self._end(answer, "error", error)

    def _end(self, answer: Answer, reason: Reason, error: Exception | None = None) -> None:
        """Take an answer out, wherever it is."""
        member = answer._member
        if member is not None and self._batch is not None:
            self._batch.leave(member)
        with self._changed:
            if member is None:
                self._waiting.remove(answer)
            else:
                del self._running[member]
                self._seconds += (time.monotonic() - answer._joined - self._seconds) / self.slots
            self._counts.ended[reason] += 1
        self._full = False
        answer._end(reason, error)

    def _fail(self, error: Exception) -> None:
        """The batch cannot go on: all answers end."""
        with self._changed:
            answers = (*self._running.values(), *self._waiting)
            self._running.clear()
            self._waiting.clear()
            self._counts.ended["error"] += len(answers)
        self._full = False
        with suppress(Exception):  # told already
            self._free()
        for answer in answers:
            answer._end("error", error)

    def _free(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            try:
                batch.close()
            finally:
                batch.model.close()

    def _reopened(self) -> Batch:
        """The model on a device that works: the one of before, or a new one."""
        with _reopening:
            try:
                self._device.check_usable()
            except TegradError:
                if not self._device.closed:  # else somebody has opened it again, or the load does
                    nv.reopen(self._device.device)
        batch = self._open()
        self._device = batch.device
        with self._changed:
            self._counts.reopened += 1
        return batch


def _opened(path: str | PathLike[str], device: str | None, **options: Any) -> Batch:
    model = PackedModel.load(path, device)
    try:
        return Batch(model, **options)
    except BaseException:
        model.close()
        raise
