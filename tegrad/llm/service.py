"""Requests of many threads to one model: a bounded queue in front of a `Batch`, in a thread of its own.

`Service.submit` gives an `Answer`, from which a thread or a coroutine reads text as it comes. The service's thread only
stores tokens there; the reader makes text of them and looks for stop strings, so that one that is slow, or does not
read at all, holds up nobody: its tokens wait, at most as many as it asked for. `ask` has tokens go elsewhere.

Requests begin in the order in which they came. One that finds no room in the batch waits for it, as do those behind it.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any, Final, Protocol, Self

from tegrad import nv
from tegrad.errors import TegradError
from tegrad.llm import rows
from tegrad.llm.answer import Answer, Piece, Reason, Usage
from tegrad.llm.batch import GREEDY, Batch, Member
from tegrad.llm.config import Config
from tegrad.llm.errors import ContextError, ModelError, NoRoom
from tegrad.llm.gguf import Gguf
from tegrad.llm.packed import PackedModel
from tegrad.llm.sampler import Mask
from tegrad.llm.sampling import Logprobs, Settings
from tegrad.llm.tokenizer import Tokenizer

__all__ = ["QUEUE", "Answer", "Counts", "Mask", "Order", "Piece", "QueueFull", "Reason", "Room", "Service", "Sink",
           "Usage", "check"]  # fmt: skip

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


class Room:
    """How many requests may be there, and when somebody who finds no room is to come again."""

    def __init__(self, slots: int, queue: int) -> None:
        self.slots, self._most = slots, slots + queue
        self._seconds = LEAST_WAIT_S
        """What a request takes once it has begun, of the last ones."""

    def check(self, running: int, waiting: int) -> None:
        """QueueFull where another one would be too many."""
        if running + waiting >= self._most:
            turns = 1 + waiting // self.slots
            raise QueueFull(waiting, max(LEAST_WAIT_S, turns * self._seconds))

    def left(self, seconds: float) -> None:
        """A request is over that ran for so long."""
        self._seconds += (seconds - self._seconds) / self.slots


class Sink(Protocol):
    """Where what is made for a request goes, such as an `Answer`. All is called in the service's thread."""

    def begin(self, cached: int) -> None:
        """The first token comes next, of a prompt so many of whose tokens were found in the cache."""

    def put(self, token: int, logprobs: Logprobs | None) -> None:
        """A token, and its log-probabilities where the settings ask for them."""

    def end(self, reason: Reason, error: Exception | None = None) -> None:
        """No more comes."""


@dataclass(eq=False, slots=True)
class Order:
    """A request as a service has it; see `Service.submit`. `limit` is where the sequence is to end."""

    sink: Sink
    tokens: list[int]
    limit: int | None
    settings: Settings
    seed: int
    mask: Mask | None
    deadline: float
    """In the time of `time.monotonic`."""
    member: Member | None = None
    joined: float = 0.0
    begun: bool = False
    """Its first token came."""
    asked: Reason | None = None
    """Why it is to end."""

    @property
    def over(self) -> Reason | None:
        """Why it is to end now: somebody asked for that, or it is late."""
        return self.asked or ("timeout" if time.monotonic() >= self.deadline else None)

    def cancel(self, reason: Reason = "cancelled") -> None:
        """End it soon, from any thread."""
        self.asked = self.asked or reason


def check(
    config: Config, positions: int, tokens: Sequence[int], max_tokens: int | None, settings: Settings
) -> int | None:
    """What a request may be of a model whose cache holds so many positions; where its sequence is to end.

    ContextError, ModelError.
    """
    if len(tokens) > positions:
        raise ContextError(f"a prompt of {len(tokens)} tokens does not fit a context of {positions}")
    config.check_prompt(tokens)
    settings.check(config.vocab)
    if max_tokens is not None and max_tokens < 1:
        raise ModelError(f"an answer of {max_tokens} tokens was asked for: give 1 or more")
    return None if max_tokens is None else len(tokens) + max_tokens - 1


class Service:
    """One model for many threads. Close it, or use it in a `with`.

    `options` are those of `Batch`. Up to `queue` requests wait beside as many as there are slots. What PackedModel and
    Batch raise is raised; once it runs, an error of the device ends the answers that are there, and the next request
    has the device opened and the model loaded anew. `after` is called in the service's thread after each step. `warm`
    has all that requests may need compiled first (`Batch.warm`). `known` is told the tokenizer, and how many logits the
    model has, before it is loaded.
    """

    def __init__(
        self, path: str | PathLike[str], device: str | None = None, *, queue: int = QUEUE,
        after: Callable[[], object] = lambda: None, warm: bool = False,
        known: Callable[[Tokenizer, int], object] = lambda tokenizer, vocab: None, **options: Any,
    ) -> None:  # fmt: skip
        with Gguf.open(path) as file:
            rows.check(file)  # before a device is opened
            self.tokenizer = Tokenizer(file)
            (config := Config.read(file)).check_answers()
            known(self.tokenizer, config.vocab)
        self._open = partial(_opened, path, device, ends=sorted(self.tokenizer.stops), warm=warm, **options)
        self._batch: Batch | None = self._open()
        self.config, self.slots, self.positions = self._batch.config, self._batch.slots, self._batch.cache.positions
        self._device, self._after = self._batch.device, after
        self._changed = threading.Condition()
        self._waiting: deque[Order] = deque()
        self._running: dict[Member, Order] = {}
        self._full = False
        """The first that waits found no room, and nobody has left since."""
        self._closing = False
        self._counts = Counts()
        self._room = Room(self.slots, queue)
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

        `mask` is called in the service's thread: be quick. After `deadline` seconds it ends, wherever it is. QueueFull;
        ContextError for a prompt that the context has no room for; ModelError for what the model cannot continue or
        sample, and for a closed service.
        """
        answer = Answer(self.tokenizer, len(tokens), stops)
        answer.leave = self.ask(
            answer, tokens, max_tokens, settings, seed=seed, mask=mask, deadline=deadline
        ).cancel  # fmt: skip
        return answer

    def ask(
        self,
        sink: Sink,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        settings: Settings = GREEDY,
        *,
        seed: int = 0,
        mask: Mask | None = None,
        deadline: float | None = None,
    ) -> Order:
        """As `submit`, with an answer that goes into `sink`."""
        limit = check(self.config, self.positions, tokens, max_tokens, settings)
        settings = replace(settings, masked=mask is not None)
        end = math.inf if deadline is None else time.monotonic() + deadline
        order = Order(sink, list(tokens), limit, settings, seed, mask, end)
        with self._changed:
            if self._closing:
                raise ModelError("this service was closed: make a new one")
            try:
                self._room.check(len(self._running), len(self._waiting))
            except QueueFull:
                self._counts.refused += 1
                raise
            self._waiting.append(order)
            self._changed.notify()
        return order

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
            for order in () if drain else (*self._running.values(), *self._waiting):
                order.cancel()
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
            self._after()
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
        for order in (*self._running.values(), *self._waiting):
            if reason := order.over:
                self._end(order, reason)
        while self._waiting and not self._full:
            first = self._waiting[0]
            if reason := first.over:  # it came since
                self._end(first, reason)
            else:
                self._join(self._batch, first)
        if self._running:
            self._step(self._batch)

    def _join(self, batch: Batch, order: Order) -> None:
        """Have the first that waits begin, if there is room."""
        try:
            member = batch.join(order.tokens, order.limit, order.settings, order.seed)
        except NoRoom:
            self._full = True
            return
        except ModelError as error:
            self._end(order, "error", error)
            return
        order.member, order.joined = member, time.monotonic()
        with self._changed:
            self._waiting.popleft()
            self._running[member] = order
        self._give_mask(batch, member, order)

    def _step(self, batch: Batch) -> None:
        came = batch.step(wait=False)
        with self._changed:
            self._counts.widths.update([len(came)] if came else ())
            self._counts.completion_tokens += len(came)
        for member, token in came:
            if (order := self._running.get(member)) is None:
                continue
            if not order.begun:
                self._begin(member, order)
            order.sink.put(token, member.logprobs[-1] if order.settings.logprobs is not None else None)
            self._give_mask(batch, member, order)
        for member in [member for member in self._running if member.finished]:
            stopped = member.tokens and member.tokens[-1] in self.tokenizer.stops
            reason: Reason = "error" if member.error else "stop" if stopped else "length"
            self._end(self._running[member], reason, member.error)

    def _begin(self, member: Member, order: Order) -> None:
        """Its first token came."""
        order.begun = True
        order.sink.begin(member.reused)
        with self._changed:
            self._counts.prompt_tokens += len(member.prompt) + 1
            self._counts.cached_tokens += member.reused

    def _give_mask(self, batch: Batch, member: Member, order: Order) -> None:
        """Say what its next token may be; an error of who knows that is an error of this answer."""
        if order.mask is not None and not member.finished:
            try:
                batch.mask(member, order.mask(member.tokens))
            except Exception as error:
                self._end(order, "error", error)

    def _end(self, order: Order, reason: Reason, error: Exception | None = None) -> None:
        """Take a request out, wherever it is."""
        member = order.member
        if member is not None and self._batch is not None:
            self._batch.leave(member)
        with self._changed:
            if member is None:
                self._waiting.remove(order)
            else:
                del self._running[member]
                self._room.left(time.monotonic() - order.joined)
            self._counts.ended[reason] += 1
        self._full = False
        order.sink.end(reason, error)

    def _fail(self, error: Exception) -> None:
        """The batch cannot go on: all requests end."""
        with self._changed:
            orders = (*self._running.values(), *self._waiting)
            self._running.clear()
            self._waiting.clear()
            self._counts.ended["error"] += len(orders)
        self._full = False
        with suppress(Exception):  # told already
            self._free()
        for order in orders:
            order.sink.end("error", error)

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


def _opened(path: str | PathLike[str], device: str | None, *, warm: bool, **options: Any) -> Batch:
    model = PackedModel.load(path, device)
    try:
        batch = Batch(model, **options)
        if warm:
            batch.warm()
        return batch
    except BaseException:
        model.close()
        raise
