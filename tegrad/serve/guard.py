"""What every request passes before it reaches an API: its line in the log, its key, where it comes from, its size."""

from __future__ import annotations

import hmac
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tegrad.serve.config import LOOPBACK
from tegrad.serve.failures import Failure
from tegrad.serve.log import LOG

Told: TypeAlias = Callable[[str, Failure], Mapping[str, Any]]
"""The JSON of a failure, in the words of the API that a path belongs to."""
OPEN: Final = frozenset({"/health", "/ready"})
"""Paths that nobody needs a key for, beside the page's."""
QUIET: Final = frozenset({"/health", "/ready", "/metrics"})
"""Paths whose requests are logged only when they fail: machines ask for them all the time."""
NAMES: Final = (b"x-request-id", b"request-id")
"""Headers of a response in which OpenAI's and Anthropic's clients look for its id."""
_REQUEST: Final = re.compile(r"[\w.:-]{1,64}")


def refusal(path: str, told: Told, failure: Failure) -> Response:
    """The response that a failure is."""
    return Response(json.dumps(told(path, failure)), failure.status, failure.headers, "application/json")


class Logged:
    """Each request gets an id, the client's own if it has one, which stands in its response and its line of the log."""

    def __init__(self, app: ASGIApp, told: Told) -> None:
        self._app, self._told = app, told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. An error of ours becomes a 500, without a traceback for the client."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0
        given = Headers(scope=scope).get("x-request-id", "")
        request = given if _REQUEST.fullmatch(given) else secrets.token_hex(8)

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *((name, request.encode()) for name in NAMES)]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception:
            LOG.exception("request %s failed", request)
            if not status:
                failure = Failure("the server failed: its log has more", 500, code="server_error")
                await refusal(scope["path"], self._told, failure)(scope, receive, sent)
        finally:
            self._log(scope, request, status, 1e3 * (time.perf_counter() - begun))

    def _log(self, scope: Scope, request: str, status: int, ms: float) -> None:
        path, method, client = scope["path"], scope["method"], (scope.get("client") or ("-",))[0]
        if path in QUIET and status < 400:
            return
        row = {"request": request, "client": client, "method": method, "path": path, "status": status, "ms": round(ms)}
        LOG.info("%s %s %s %d %.0f ms %s", client, method, json.dumps(path)[1:-1], status, ms, request, extra=row)


class Guarded:
    """Only who has a key is let in, if there are keys; and no page of another site that was not named."""

    def __init__(
        self, app: ASGIApp, told: Told, *, keys: frozenset[str], origins: Sequence[str], local: bool,
        free: frozenset[str],
    ) -> None:  # fmt: skip
        """`local`: only this machine reaches us, so that no other host's name can be meant. `free` need no key."""
        self._app, self._told, self._origins, self._local = app, told, frozenset(origins), local
        self._keys, self._free = [key.encode() for key in keys], free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and (failure := self._wrong(scope)) is not None:
            await refusal(scope["path"], self._told, failure)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _wrong(self, scope: Scope) -> Failure | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._local and not self._keys and _name(f"//{host}") not in LOOPBACK:
            # A site's name may be made to mean 127.0.0.1: then its pages would be of our own origin.
            return Failure(f"{host!r} is none of this server's names: with --api-key-file it may have any", 403)
        if origin is not None and not self._origins & {"*", origin} and urlsplit(origin).netloc != host:
            return Failure(f"pages of {origin} may not ask this server: start it with --cors {origin}", 403)
        if self._keys and scope["path"] not in self._free and not self._known(headers):
            return Failure("a key is missing or wrong: send Authorization: Bearer KEY", 401, code="invalid_api_key")
        return None

    def _known(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer.strip()] if scheme.lower() == "bearer" else []
        both = [one.encode("utf-8", "replace") for one in (*given, headers.get("x-api-key", ""))]
        return any(hmac.compare_digest(key, one) for key in self._keys for one in both)


class Bounded:
    """No request is larger than allowed."""

    def __init__(self, app: ASGIApp, told: Told, most: int) -> None:
        self._app, self._told, self._most = app, told, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Who reads a body that turns out too long meets the Failure."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        failure = Failure(f"the request has more than {self._most:,} bytes: send less", 413)
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or int(declared) > self._most:
            await refusal(scope["path"], self._told, failure)(scope, receive, send)
            return
        came = 0

        async def received() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > self._most:
                raise failure
            return message

        await self._app(scope, received, send)


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
