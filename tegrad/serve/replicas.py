"""A model that several replicas answer, each on a GPU of its own: which one is asked, and what becomes of its requests
when it dies.

Replicas call the server and join when they have loaded the model. The draws of an answer depend on its seed and the
position alone, so that another replica goes on with an answer where the first one left it: nothing of it is lost. Where
equal seeds have to give equal answers it makes the answer anew, and what had come is left out.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from tegrad.errors import TegradError
from tegrad.llm.answer import Reason
from tegrad.llm.sampler import Logprobs
from tegrad.llm.service import QueueFull, Sink
from tegrad.serve import wire
from tegrad.serve.config import Bounds
from tegrad.serve.log import LOG
from tegrad.serve.model import About
from tegrad.serve.plan import Plan, Wanted
from tegrad.serve.prefixes import Prefixes
from tegrad.serve.remote import Answering, Remote, Texts
from tegrad.serve.replica import CALL_S, Call, Here, authenticate, first_words, keep_alive
from tegrad.serve.wire import EngineError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TRIES: Final = 3
"""Replicas that a request is given to at most: it may be what ends them."""
START_S: Final = 900.0
"""Seconds that replicas have to load a model, kernels compiled included."""
WAIT_S: Final = 120.0
"""Seconds that a request waits while no replica is there."""
MARGIN: Final = 4
"""A replica that knows a prompt's beginning may have more requests than another one: one for so many slots."""


class Home(Protocol):
    """What starts replicas."""

    bounds: Bounds
    host: str
    """This machine's address, as replicas reach it."""

    def start(self, call: Call) -> None:
        """Have replicas made, which call back, and others in place of those that end. TegradError."""

    def stop(self, app: str) -> None:
        """End the replicas."""


@dataclass(eq=False)
class _Request:
    """A request, and the sink of whichever replica has it."""

    owner: Replicated
    sink: Sink
    ask: wire.Ask
    end_at: float | None
    """In the time of `time.monotonic`."""
    came: list[int] = field(default_factory=list)
    again: int = 0
    """Of those that came, how many are made once more."""
    tries: int = 0
    leave_replica: Callable[[Reason], object] | None = None
    left: Reason | None = None
    timer: asyncio.TimerHandle | None = None

    def begin(self, cached: int) -> None:
        """See `service.Sink`."""
        if not self.came:
            self.sink.begin(cached)

    def put(self, token: int, logprobs: Logprobs | None) -> None:
        """See `service.Sink`."""
        if self.again:
            self.again -= 1
            return
        self.came.append(token)
        self.sink.put(token, logprobs)

    def end(self, reason: Reason, error: Exception | None = None) -> None:
        """See `service.Sink`; a replica that fails is no end."""
        self.leave_replica = None
        if self.left is not None and reason == "error":
            self.sink.end(self.left)
        elif isinstance(error, EngineError) and (ended := self._ended) is not None:
            self.sink.end(ended)
        elif isinstance(error, EngineError) and self.tries < TRIES:
            self.owner.give(self, again=True)
        else:
            self.sink.end(reason, error)

    @property
    def _ended(self) -> Reason | None:
        """How the answer ends, if its last token came: a replica says so only a step later."""
        if self.came and self.came[-1] in self.owner.tokenizer.stops:
            return "stop"
        done, most = len(self.came), self.ask.max_tokens
        full = len(self.ask.tokens) + done > self.owner.context
        return "length" if full or (most is not None and done >= most) else None

    def leave(self, reason: Reason) -> None:
        """Nobody wants more of it."""
        self.left = self.left or reason
        if self.leave_replica is not None:
            self.leave_replica(reason)
        else:
            self.owner.drop(self, reason)

    def rest(self, *, same: bool) -> wire.Ask:
        """What is still to be answered; all of it where the answer has to be the `same`.

        A prompt's products add up in another order than a step's, so that tokens that were fed as part of one would
        leave other roundings in the cache.
        """
        left = None if self.end_at is None else max(0.0, self.end_at - time.monotonic())
        self.again = len(self.came) if same else 0
        if same:
            return replace(self.ask, deadline=left)
        most, done = self.ask.max_tokens, len(self.came)
        return replace(
            self.ask, tokens=[*self.ask.tokens, *self.came], max_tokens=None if most is None else most - done,
            deadline=left, answered=done,
        )  # fmt: skip


class Replicated(Answering):
    """A `model.Model`. Made by `load`; close it."""

    def __init__(self, about: About, wanted: Wanted, texts: Texts, home: Home) -> None:
        super().__init__(about, texts, wanted.deadline)
        self.bounds = home.bounds
        self.app = f"tegrad-{secrets.token_hex(4)}"
        self.error: TegradError | None = None
        """Why it can be asked no more."""
        self.retried = 0
        """How often a request was given to another replica."""
        self._wanted, self._texts, self._home = wanted, replace(texts, template=None), home
        self._remotes: dict[str, Remote] = {}
        self._plan: Plan
        """Of the replica that came last."""
        self._prefixes, self._failures = Prefixes(), Counter[str]()
        self._waiting: deque[_Request] = deque()
        self._enough: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._secret = secrets.token_bytes(32)
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def load(cls, about: About, wanted: Wanted, home: Home, memory: int | None = None) -> Self:
        """Have replicas load a model, and wait until there are as many as there have to be.

        What keeps one of them from loading it is raised: GgufError, UnsupportedModelError, OutOfMemory, EngineError.
        """
        made = cls(about, wanted, await asyncio.to_thread(Texts.read, about), home)
        try:
            sock = socket.create_server((home.host, 0))
            sock.setblocking(False)
            made._begin(made._take_calls(sock))
            call = Call(
                made.app, (home.host, sock.getsockname()[1]), made._secret, about.name, about.path, about.size,
                about.embeds, wanted, memory,
            )  # fmt: skip
            await asyncio.to_thread(home.start, call)
            await asyncio.wait_for(made._enough, START_S)
        except TimeoutError:
            await made.close()
            raise EngineError(
                f"{len(made.replicas)} of {home.bounds.least} replicas loaded {about.name} within {START_S:.0f} s: "
                "`ray status` tells which machines and GPUs there are"
            ) from None
        except BaseException:
            await made.close()
            raise
        return made

    # ---- what a catalogue and the metrics see

    @property
    def replicas(self) -> Mapping[str, Remote]:
        """Those that can be asked, by name."""
        return {name: remote for name, remote in self._remotes.items() if remote.error is None}

    @property
    def plan(self) -> Plan:
        """That of one replica, the smallest; while none is there, of the last that was."""
        plans = [remote.plan for remote in self._remotes.values()]
        return min(plans, key=lambda plan: plan.context) if plans else self._plan

    @property
    def context(self) -> int:
        """Tokens of prompt and answer that any replica has room for."""
        return min((one.context for one in self._remotes.values()), default=self._wanted.context or self.about.context)

    @property
    def device(self) -> str:
        """In words."""
        names = ", ".join(f"{name} ({one.device})" for name, one in self.replicas.items())
        return f"{len(self.replicas)} of {self.bounds.most} replicas, {names}"

    @property
    def busy(self) -> bool:
        """Whether anything is owed."""
        return bool(self._waiting) or any(remote.busy for remote in self._remotes.values())

    # ---- a Model

    def ask(self, sink: Sink, ask: wire.Ask) -> Callable[[Reason], object]:
        """See `Answering`."""
        request = _Request(self, sink, ask, None if ask.deadline is None else time.monotonic() + ask.deadline)
        self.give(request)
        return request.leave

    def give(self, request: _Request, *, again: bool = False) -> None:
        """Give a request to the replica that suits it best, or have it wait for one.

        QueueFull, unless it was taken before and is asked `again`.
        """
        there, ask = self.replicas, request.rest(same=self._wanted.same)
        if not there:
            self._wait(request, again=again)
            return
        margin = max(1, min(remote.plan.slots for remote in there.values()) // MARGIN)
        order = self._prefixes.order(ask.tokens, {name: one.load_now for name, one in there.items()}, margin)
        name = next((name for name in order if not there[name].full), order[0])
        request.leave_replica = there[name].ask(request, ask, anyway=again)
        self.retried += request.tries > 0
        request.tries += 1
        self._prefixes.met(ask.tokens, name)

    async def embed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """See `model.Model`, and `Remote.embed`."""
        self.check_texts(texts)
        for left in reversed(range(TRIES)):
            await self._some()
            remote = min(self.replicas.values(), key=lambda remote: remote.link.waited)
            try:
                return await remote.embed(texts)
            except EngineError:
                if not left:
                    raise
                self.retried += 1
        raise AssertionError

    async def close(self, *, drain: bool = False) -> None:
        """End all replicas and the template. Answers end with what came, or whole if they may `drain`."""
        self.error = EngineError(f"{self.about.name} was unloaded: ask again, and it is loaded anew")
        await asyncio.gather(*(remote.close(drain=drain) for remote in self._remotes.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for request in list(self._waiting):
            self.drop(request, "error", self.error)
        await asyncio.to_thread(self._home.stop, self.app)
        self.close_template()

    # ---- requests that wait while no replica is there

    def _wait(self, request: _Request, *, again: bool) -> None:
        if self.error is not None:
            request.sink.end("error", self.error)
            return
        if len(self._waiting) >= self._wanted.slots + self._wanted.queue and not again:
            raise QueueFull(len(self._waiting), 10.0)
        error = EngineError(f"no replica of {self.about.name} came back within {WAIT_S:.0f} s: see the server's log")
        request.timer = asyncio.get_running_loop().call_later(WAIT_S, self.drop, request, "error", error)
        self._waiting.append(request)

    def drop(self, request: _Request, reason: Reason, error: Exception | None = None) -> None:
        """End a request that waits, if it does."""
        with suppress(ValueError):
            self._taken(request)
            request.sink.end(reason, error)

    def _taken(self, request: _Request) -> None:
        """A request waits no more. ValueError for one that did not."""
        self._waiting.remove(request)
        if request.timer is not None:
            request.timer.cancel()

    async def _some(self) -> None:
        """Wait until a replica is there."""
        begun = time.monotonic()
        while not self.replicas:
            if self.error is not None or time.monotonic() > begun + WAIT_S:
                raise self.error or EngineError(f"no replica of {self.about.name} is there: see the server's log")
            await asyncio.sleep(0.1)

    # ---- replicas that come and go

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_calls(self, sock: socket.socket) -> None:
        with sock:
            while True:
                taken, _ = await asyncio.get_running_loop().sock_accept(sock)
                self._begin(self._have(taken))

    async def _have(self, sock: socket.socket) -> None:
        """Have a replica load the model, and ask it until it is gone."""
        try:
            words = await asyncio.to_thread(_greeted, sock, self._secret)
        except OSError as error:
            sock.close()
            LOG.warning("a call to the replicas' port was refused: %s", error)
            return
        if isinstance(words, wire.Refused):
            sock.close()
            self._failed(words.fault.error())
            return
        assert isinstance(words, Here)
        name = words.name
        try:
            while (before := self._remotes.get(name)) is not None:
                await before.link.ended.wait()
                await asyncio.sleep(0)
            await asyncio.sleep(min(30, 5 * self._failures[name]))
        except asyncio.CancelledError:
            sock.close()
            raise
        try:
            remote = await Remote.load(replace(self.about, path=words.path), words.plan, self._texts, sock)
        except TegradError as error:
            self._failures[name] += 1
            self._failed(type(error)(f"{name}: {error}"))
            return
        self._failures[name] = 0
        self._remotes[name] = remote
        self._plan = remote.plan
        self._came()
        LOG.info("%s: replica %s is there, %d of %d", self.about.name, name, len(self.replicas), self.bounds.most)
        try:
            await remote.link.ended.wait()
        finally:
            del self._remotes[name]
            self._prefixes.forget(name)
        if self.error is None:
            LOG.warning("%s: replica %s is gone, %d left", self.about.name, name, len(self.replicas))

    def _came(self) -> None:
        """A replica is there: for those that wait for one, and for who loads the model."""
        if len(self._remotes) >= self.bounds.least and not self._enough.done():
            self._enough.set_result(None)
        for request in list(self._waiting):
            self._taken(request)
            self.give(request, again=True)

    def _failed(self, error: TegradError) -> None:
        """A replica cannot load the model: an error of the load, or else there are fewer replicas."""
        if self._enough.done():
            LOG.error("a replica of %s cannot load it: %s", self.about.name, error)
        else:
            self._enough.set_exception(error)


def _greeted(sock: socket.socket, secret: bytes) -> object:
    """What who has called says first, once it has proved that it may. OSError."""
    sock.settimeout(CALL_S)
    authenticate(sock, secret, calls=False)
    words = first_words(sock)
    keep_alive(sock)
    return words
