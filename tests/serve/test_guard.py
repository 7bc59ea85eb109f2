"""What requests pass on their way: keys, origins, sizes; their ids and lines of the log."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tegrad.llm.errors import ContextError, ModelError
from tegrad.llm.serial import ClosedError
from tegrad.serve import log
from tegrad.serve.failures import Failure, failure
from tegrad.serve.guard import OPEN, Bounded, Guarded, Logged
from tegrad.serve.wire import EngineError

HOST = "http://127.0.0.1:8080"


def told(path: str, failure: Failure) -> dict[str, Any]:
    return {"path": path, "said": str(failure)}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body's size; fails at /broken."""
    if scope["path"] == "/broken":
        raise ValueError("a bug")
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def ask(app: ASGIApp, path: str = "/v1/models", url: str = HOST, method: str = "GET", **options: Any) -> httpx.Response:
    async def asked() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url) as client:
            return await client.request(method, path, **options)

    return asyncio.run(asked())


def guarded(**options: Any) -> Guarded:
    given = {"keys": frozenset[str](), "origins": (), "local": True, "free": OPEN} | options
    return Guarded(echo, told, **given)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic secret"}, 401),
        ({"authorization": "Bearer sec\xe9t"}, 401),
        ({"authorization": "bearer secret"}, 200),
        ({"authorization": "Bearer other"}, 200),
        ({"x-api-key": "secret"}, 200),
        ({"x-api-key": ""}, 401),
        ({"authorization": "Bearer of another server", "x-api-key": "secret"}, 200),
    ],
)
def test_a_key_lets_in(headers: dict[str, str], status: int) -> None:
    app = guarded(keys=frozenset({"secret", "other"}))
    found = ask(app, headers={name: value.encode("latin-1") for name, value in headers.items()})
    assert found.status_code == status
    assert ask(app, "/health").status_code == 200


@pytest.mark.parametrize(
    ("url", "origin", "options", "status"),
    [
        (HOST, None, {}, 200),
        (HOST, "http://127.0.0.1:8080", {}, 200),
        ("http://[::1]:8080", None, {}, 200),
        ("http://localhost", "http://localhost", {}, 200),
        (HOST, "https://example.com", {}, 403),
        (HOST, "null", {}, 403),
        (HOST, "http://127.0.0.1:9999", {}, 403),
        (HOST, "https://example.com", {"origins": ["https://example.com"]}, 200),
        (HOST, "https://example.com", {"origins": ["*"]}, 200),
        ("http://evil.example", "http://evil.example", {}, 403),  # a name that was made to mean 127.0.0.1
        ("http://evil.example", None, {}, 403),
        ("http://board.lan:8080", None, {"local": False}, 200),
        ("http://proxy.example", None, {"keys": frozenset({"secret"})}, 200),
    ],
)
def test_a_page_of_another_site_is_kept_out(url: str, origin: str | None, options: dict[str, Any], status: int) -> None:
    headers = {"authorization": "Bearer secret", **({"origin": origin} if origin else {})}
    assert ask(guarded(**options), url=url, headers=headers).status_code == status


def test_a_body_is_bounded_whether_its_length_is_told_or_not() -> None:
    app = Bounded(Logged(echo, told), told, 10)

    async def chunks(count: int) -> Any:
        for _ in range(count):
            yield b"12345"

    assert ask(app, method="POST", content=b"1234567890").text == "10"
    assert ask(app, method="POST", content=b"12345678901").status_code == 413
    assert ask(app, method="POST", content=chunks(2)).text == "10"
    assert ask(app, method="POST", content=b"", headers={"content-length": "-1"}).status_code == 413

    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(Failure) as caught:
            await echo(scope, receive, send)
        await send({"type": "http.response.start", "status": caught.value.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert ask(Bounded(fails, told, 10), method="POST", content=chunks(3)).status_code == 413


def test_each_request_has_an_id_and_a_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    app = Logged(guarded(keys=frozenset({"secret"})), told)
    monkeypatch.setattr(log.LOG, "propagate", True)
    with caplog.at_level(logging.INFO, "tegrad.serve"):
        found = [ask(app, headers={"x-request-id": given}) for given in ("mine-1", "not\tone", "x" * 65)]
        assert ask(app, "/health").headers["x-request-id"]
    ids = [one.headers["x-request-id"] for one in found]
    assert ids == [one.headers["request-id"] for one in found]  # where Anthropic's clients look for it
    assert ids[0] == "mine-1"
    assert len({*ids}) == 3
    assert all(len(one) == 16 for one in ids[1:])
    rows = [json.loads(log._Json().format(record)) for record in caplog.records]
    assert [(row["request"], row["path"], row["status"]) for row in rows] == [(one, "/v1/models", 401) for one in ids]
    assert {"time", "level", "client", "method", "ms"} <= rows[0].keys()


def test_a_bug_is_a_500_that_tells_the_client_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log.LOG, "propagate", True)
    found = ask(Logged(echo, told), "/broken")
    assert found.status_code == 500
    assert found.json() == {"path": "/broken", "said": "the server failed: its log has more"}
    assert "a bug" in log._Text().format(caplog.records[0])


@pytest.mark.parametrize(
    ("error", "status"),
    [(ContextError("long"), 400), (ClosedError("closed"), 503), (ModelError("wrong"), 400), (EngineError("gone"), 503)],
)
def test_an_error_is_the_clients_or_the_servers(error: Exception, status: int) -> None:
    """What was closed under a request is no fault of who asked."""
    assert failure(error).status == status
