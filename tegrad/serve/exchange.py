"""A request of an API and its response, JSON or a stream, as one coroutine that ends when the client goes away.

An `Api` is what one API can be asked for. Each of its routes has an `Endpoint`: it reads the body, runs the API's own
coroutine with an `Exchange`, and puts whatever that raises into the API's words (`Voice`): as the response, or within a
stream that has begun.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from tegrad.serve.failures import Failure, failure
from tegrad.serve.fields import Object, parsed
from tegrad.serve.log import LOG
from tegrad.serve.model import Models

IDLE_S: Final = 10.0
"""Seconds without an event after which a stream says that it is alive: proxies wait 30 to 60."""
BRIEF: Final = 1 << 15
"""Bytes of a body that is read at once: in some ms, and a thread would take longer to begin."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Voice:
    """How an API words what all APIs have."""

    failure: Callable[[Failure], Mapping[str, Any]]
    """The JSON of a failure."""
    event: Callable[[Mapping[str, Any]], bytes]
    """A stream's part."""
    media: str = "text/event-stream"
    """What a stream is."""
    idle: bytes = b": keep-alive\n\n"
    """What a stream says that has nothing to say; nothing where an API has no such thing."""


def compact(value: object) -> bytes:
    """JSON in ASCII, which can hold what is no character."""
    return json.dumps(value, separators=(",", ":")).encode()


def sse(event: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + compact(event) + b"\n\n"


def named(event: Mapping[str, Any]) -> bytes:
    """A server-sent event with its type as its name."""
    return f"event: {event.get('type', 'error')}\n".encode() + sse(event)


class Exchange:
    """One request, while it is answered."""

    def __init__(self, voice: Voice, scope: Scope, send: Send) -> None:
        self.body = b""
        self.arguments: Mapping[str, Any] = scope.get("path_params", {})
        """Those in the path."""
        self.broken: Callable[[Failure], bytes] = lambda failure: voice.event(voice.failure(failure))
        """What ends a stream that has begun and fails."""
        self._voice, self._send = voice, send
        self._begun = False
        self._last = time.monotonic()
        self._sending = asyncio.Lock()
        self._alive: asyncio.Task[None] | None = None

    async def read(self, kind: Object) -> dict[str, Any]:
        """The body's fields; Failure. Where they ask for a stream, that begins at its first event, or after a while."""
        found: dict[str, Any] = await self.work(lambda: kind.read(parsed(self.body)))
        if found.get("stream") and self._voice.idle:
            self._last = time.monotonic()
            self._alive = asyncio.create_task(self._keep_alive())
        return found

    async def work(self, make: Callable[[], T]) -> T:
        """What is made of the body: in a thread where that is long, so that no other request waits for it."""
        return make() if len(self.body) <= BRIEF else await asyncio.to_thread(make)

    async def reply(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with JSON."""
        data = compact(value)
        await self._begin(status, "application/json", {"content-length": str(len(data)), **(headers or {})})
        await self._send({"type": "http.response.body", "body": data})

    async def event(self, event: Mapping[str, Any]) -> None:
        """A part of the stream. It waits while the client does not read."""
        await self._put(self._voice.event(event))

    async def end(self, last: bytes = b"") -> None:
        """The end of the stream."""
        self.close()
        await self._put(last, more=False)

    async def _put(self, data: bytes, *, more: bool = True) -> None:
        async with self._sending:
            if not self._begun:
                await self._begin(200, self._voice.media, {"cache-control": "no-cache", "x-accel-buffering": "no"})
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            self._last = time.monotonic()

    async def fail(self, error: Exception) -> None:
        """Tell what went wrong, and end."""
        if isinstance(error, HTTPException):
            error = Failure(error.detail, error.status_code)
        told = failure(error)
        if told.status >= 500:
            LOG.error("%s", told, exc_info=error if told.status == 500 else None)
        if self._begun:
            await self.end(self.broken(told))
        else:
            self.close()
            await self.reply(self._voice.failure(told), told.status, told.headers)

    def close(self) -> None:
        """Say nothing more by itself."""
        if self._alive is not None:
            self._alive.cancel()

    async def _begin(self, status: int, media: str, headers: Mapping[str, str]) -> None:
        self._begun = True
        rows = {"content-type": media, **headers}
        encoded = [(name.encode(), value.encode()) for name, value in rows.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._last + IDLE_S - time.monotonic()))
            if time.monotonic() - self._last >= IDLE_S and not self._sending.locked():
                with suppress(OSError):  # the client went away, which others find out, too
                    await self._put(self._voice.idle)


class Endpoint:
    """A route's ASGI application. A client that goes away cancels the coroutine that answers it."""

    def __init__(self, voice: Voice, answer: Callable[[Exchange], Awaitable[None]]) -> None:
        self._voice, self._answer = voice, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._voice, scope, send)
        try:
            exchange.body = await _body(receive)
            tasks = [asyncio.ensure_future(self._answer(exchange)), asyncio.ensure_future(_gone(receive))]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            if not tasks[0].cancelled() and (error := tasks[0].exception()) is not None:
                raise error
        except ConnectionError:  # the client went away while it was sent to, or while it sent
            pass
        except Exception as error:
            await exchange.fail(error)
        finally:
            exchange.close()


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client went away")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Operation: TypeAlias = tuple[Callable[[Models, Exchange], Awaitable[None]], Mapping[str, Any] | None]
"""What answers, and what OpenAPI's document says of it, if anything."""


@dataclass(frozen=True, slots=True)
class Api:
    """An API: how it words what all have, and what it can be asked for, by method and path."""

    voice: Voice
    operations: Mapping[tuple[str, str], Operation]

    def routes(self, models: Models) -> list[Route]:
        """Starlette's."""
        return [
            Route(path, Endpoint(self.voice, partial(answer, models)), methods=[method])
            for (method, path), (answer, _) in self.operations.items()
        ]

    @property
    def paths(self) -> dict[str, Any]:
        """OpenAPI's."""
        return {
            path.replace(":path}", "}"): {method.lower(): told}
            for (method, path), (_, told) in self.operations.items() if told is not None
        }  # fmt: skip
