"""A loaded model as the server has it: the process of its engine, and here its tokenizer and template.

All of it runs in the event loop, where nothing waits for the engine but a coroutine that wants something of it. When
the process ends, for whatever reason, so does every answer that it owed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

from prometheus_client import Histogram

from tegrad.errors import TegradError
from tegrad.installed import search_path
from tegrad.llm.answer import Answer, Reason
from tegrad.llm.config import Config
from tegrad.llm.errors import ContextError, UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.grammar import Grammar
from tegrad.llm.sampler import Settings
from tegrad.llm.service import Counts, QueueFull, Room, Sink, check
from tegrad.llm.template import Template, TemplateRefusalError
from tegrad.llm.tokenizer import Tokenizer
from tegrad.serve import wire
from tegrad.serve.log import LOG
from tegrad.serve.model import About
from tegrad.serve.plan import Plan
from tegrad.serve.wire import EngineError, Fault

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GREEDY: Final = Settings()
FIRST_TOKEN: Final = Histogram(
    "tegrad:first_token_seconds", "From a request to its first token", ["model"], registry=None,
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)  # fmt: skip
END_S: Final = 10.0
"""Seconds that a process which has closed its socket may take to end."""
ENGINES_QUEUE: Final = 1 << 20
"""Requests that wait in an engine: as many as are sent, as the server bounds them."""


class Link(asyncio.Protocol):
    """The process of an engine, and the socket that leads to it. `came` gets what its steps make."""

    def __init__(self, came: Callable[[wire.Came], None], lost: Callable[[TegradError], None]) -> None:
        self._came, self._lost = came, lost
        self._frames, self._numbers = wire.Frames(), itertools.count()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._loaded: asyncio.Future[wire.Ready] = self._loop.create_future()
        self._process: subprocess.Popen[bytes] | None = None
        """That of this machine."""
        self._transport: asyncio.WriteTransport
        self._reaping: asyncio.Task[None]
        self.error: TegradError | None = None
        """Why there is no process any more."""
        self.ended = asyncio.Event()

    @property
    def waited(self) -> bool:
        """Whether somebody waits for a reply."""
        return bool(self._replies)

    async def load(self, message: wire.Load, sock: socket.socket | None = None) -> wire.Ready:
        """Start the process, or take the one that is at the other end of a socket, and have it load.

        What is wrong with the model is raised, or EngineError.
        """
        if sock is None:
            sock, far = socket.socketpair()
            try:
                with far:
                    self._process = started(far)
            except OSError as error:
                raise EngineError(f"no process for the engine: {error.strerror}; end other programs") from error
        try:
            await self._loop.create_connection(lambda: self, sock=sock)
            self.send(message)
            return await self._loaded
        except BaseException:
            await self.close(drain=False)
            raise

    def send(self, message: object) -> None:
        """From any thread. To a process that is gone nothing is sent."""
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self.send, message)
        elif self.error is None:
            self._transport.write(wire.packed(message))

    async def reply(self, make: Callable[[int], object], *, cancels: bool = False) -> Any:
        """What the engine says to a message, which `make` gives a number; where it `cancels`, the engine is told when
        nobody waits any more. TegradError.
        """
        if self.error is not None:
            raise self.error
        number = next(self._numbers)
        self._replies[number] = self._loop.create_future()
        try:
            self.send(make(number))
            value = await self._replies[number]
        finally:
            if self._replies.pop(number).cancelled() and cancels:
                self.send(wire.Cancel(number, "cancelled"))
        if isinstance(value, Fault):
            raise value.error()
        return value

    async def close(self, *, drain: bool) -> None:
        """End the process, once it has finished what it is asked if it is to `drain`. Wait until it is gone."""
        if drain:
            self.send(wire.Close())
        else:
            self._transport.close()
        await self.ended.wait()

    # ---- the event loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        for message in self._frames.feed(data):
            match message:
                case wire.Came():
                    self._came(message)
                case wire.Reply(number, value):
                    if (waiting := self._replies.get(number)) is not None and not waiting.done():
                        waiting.set_result(value)
                case wire.Ready() if not self._loaded.done():
                    self._loaded.set_result(message)
                case wire.Refused(fault) if not self._loaded.done():
                    self._loaded.set_exception(fault.error())

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self._reaping = self._loop.create_task(self._reap())

    async def _reap(self) -> None:
        """See how the process ended, and tell all who wait for something."""
        how = "its connection broke" if self._process is None else await asyncio.to_thread(_end_of, self._process)
        self.error = EngineError(f"the engine of this model ended ({how}): ask again, and it is loaded anew")
        for waiting in (self._loaded, *self._replies.values()):
            if not waiting.done():
                waiting.set_exception(self.error)
        self._lost(self.error)
        self.ended.set()


def started(far: socket.socket, *pipes: int) -> subprocess.Popen[bytes]:
    """The process of an engine, with its end of a socket, and of a pipe with whose other end it is to end."""
    command = [sys.executable, "-m", "tegrad.serve.engine", str(far.fileno()), *map(str, pipes)]
    environment = {**os.environ, "PYTHONPATH": search_path()}
    return subprocess.Popen(command, pass_fds=(far.fileno(), *pipes), stdin=subprocess.DEVNULL, env=environment)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """How a process ends that has closed its socket."""
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


@dataclass(frozen=True, slots=True)
class Texts:
    """What makes tokens of texts for a model: all that the server's process has of its file."""

    config: Config
    tokenizer: Tokenizer
    template: Template | None

    @classmethod
    def read(cls, about: About) -> Self:
        """From the model's file; the template's process is started. GgufError, UnsupportedModelError."""
        with Gguf.open(about.path) as file:
            config = Config.read(file)
            config.check_tokens(file)
            template = None
            try:
                template = None if about.embeds else Template.of(file)
            except TemplateRefusalError as error:
                LOG.warning("%s has no chat: %s", about.name, error)
            return cls(config, Tokenizer(file), template)


@dataclass(eq=False, slots=True)
class _Owed:
    """A request that the engine has: where its tokens go, when it was asked, and when its first token came."""

    sink: Sink
    asked: float
    begun: float | None = None


class Answering(ABC):
    """What takes requests for a `model.Model`: they are checked and have an `Answer`, wherever its tokens go."""

    def __init__(self, about: About, texts: Texts, deadline: float | None) -> None:
        """`deadline`: seconds that any request may take."""
        self.about, self.deadline = about, deadline
        self.config, self.tokenizer, self.template = texts.config, texts.tokenizer, texts.template

    def submit(
        self,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        settings: Settings = GREEDY,
        *,
        stops: Sequence[str] = (),
        seed: int = 0,
        grammar: Grammar | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """See `model.Model`. QueueFull, ContextError, ModelError, EngineError; a GrammarError ends the answer."""
        if self.about.embeds:
            raise UnsupportedModelError(f"{self.about.name} makes vectors of texts and answers nothing: choose another")
        check(self.config, self.context, tokens, max_tokens, settings)
        answer = Answer(self.tokenizer, len(tokens), stops)
        deadline = min((each for each in (deadline, self.deadline) if each is not None), default=None)
        answer.leave = self.ask(answer, wire.Ask(0, list(tokens), max_tokens, settings, seed, grammar, deadline))
        return answer

    def check_texts(self, texts: Sequence[Sequence[int]]) -> None:
        """ContextError, ModelError, and UnsupportedModelError for a model that makes no vectors."""
        if not self.about.embeds:
            raise UnsupportedModelError(
                f"{self.about.name} was not made for vectors of texts: choose an embedding model"
            )
        for tokens in texts:
            if len(tokens) > self.context:
                raise ContextError(f"a text of {len(tokens)} tokens does not fit a context of {self.context}")
            self.config.check_prompt(tokens)

    def close_template(self) -> None:
        """End the template's process."""
        if self.template is not None:
            with suppress(OSError):
                self.template.close()

    @property
    @abstractmethod
    def context(self) -> int:
        """Tokens of prompt and answer that there is room for."""

    @abstractmethod
    def ask(self, sink: Sink, ask: wire.Ask) -> Callable[[Reason], object]:
        """Have the tokens of a sound request go into a sink; what ends it. QueueFull, EngineError."""


class Remote(Answering):
    """A `model.Model`. Made by `load`; close it."""

    def __init__(self, about: About, plan: Plan, texts: Texts) -> None:
        super().__init__(about, texts, plan.deadline)
        self.plan = plan
        self.link = Link(self._came, self._lost)
        self.device = ""
        self.refused = 0
        """Requests that found the queue full."""
        self._room = Room(plan.slots, plan.queue)
        self._numbers = itertools.count()
        self._owed: dict[int, _Owed] = {}

    @classmethod
    async def load(
        cls, about: About, plan: Plan, texts: Texts | None = None, sock: socket.socket | None = None
    ) -> Self:
        """Load a model into a process of its own, or into the one that a socket leads to.

        GgufError, UnsupportedModelError, OutOfMemory, EngineError.
        """
        texts = await asyncio.to_thread(Texts.read, about) if texts is None else texts
        made = cls(about, plan, texts)
        options: dict[str, Any] = {"context": plan.context, "q8": plan.q8}
        if not about.embeds:
            options = {"queue": ENGINES_QUEUE, "slots": plan.slots, "positions": plan.context, "blocks": plan.blocks}
            options |= {"q8": plan.q8, "same": plan.same}
        try:
            made.device = (await made.link.load(wire.Load(about.path, about.embeds, options), sock)).device
        except BaseException:
            made.close_template()
            raise
        return made

    @property
    def busy(self) -> bool:
        """Whether the engine owes anything."""
        return bool(self._owed or self.link.waited)

    @property
    def error(self) -> TegradError | None:
        """Why it can be asked no more."""
        return self.link.error

    @property
    def replicas(self) -> Mapping[str, Remote]:
        """The engines that it has, by name: one, without a name."""
        return {"": self}

    @property
    def load_now(self) -> int:
        """Requests that run or wait."""
        return len(self._owed)

    @property
    def full(self) -> bool:
        """Whether as many wait as may."""
        return self.load_now >= self.plan.slots + self.plan.queue

    @property
    def context(self) -> int:
        """Tokens of prompt and answer that there is room for."""
        return self.plan.context

    def ask(self, sink: Sink, ask: wire.Ask, *, anyway: bool = False) -> Callable[[Reason], object]:
        """See `Answering`; `anyway` is also where the queue is full."""
        if self.error is not None:
            raise self.error
        try:
            there, slots = self.load_now, self.plan.slots
            if not anyway:
                self._room.check(min(there, slots), max(0, there - slots))
        except QueueFull:
            self.refused += 1
            raise
        number = next(self._numbers)
        self._owed[number] = _Owed(sink, time.monotonic())
        self.link.send(replace(ask, number=number))
        return lambda reason: self.link.send(wire.Cancel(number, reason))

    async def embed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """See `model.Model`. ContextError, ModelError, EngineError."""
        self.check_texts(texts)
        vectors: NDArray[np.float32] = await self.link.reply(lambda number: wire.Embed(number, texts), cancels=True)
        return vectors

    async def counts(self) -> Counts:
        """What the engine has done. EngineError."""
        found: Counts = await self.link.reply(wire.Query)
        return found

    async def close(self, *, drain: bool = False) -> None:
        """End the process and the template's. Answers end with what came, or whole if they may `drain`."""
        await self.link.close(drain=drain)
        self.close_template()

    # ---- what comes

    def _came(self, came: wire.Came) -> None:
        for number, cached in came.begun:
            if (owed := self._owed.get(number)) is not None:
                owed.sink.begin(cached)
                owed.begun = time.monotonic()
                FIRST_TOKEN.labels(self.about.name).observe(owed.begun - owed.asked)
        for number, token, logprobs in came.tokens:
            if (owed := self._owed.get(number)) is not None:
                owed.sink.put(token, logprobs)
        for number, reason, fault in came.ended:
            self._end(number, reason, fault.error() if fault else None)

    def _end(self, number: int, reason: Reason, error: Exception | None) -> None:
        if (owed := self._owed.pop(number, None)) is not None:
            if owed.begun is not None:
                self._room.left(time.monotonic() - owed.begun)
            owed.sink.end(reason, error)

    def _lost(self, error: TegradError) -> None:
        for number in list(self._owed):
            self._end(number, "error", error)
