"""A stream while it runs: who leaves cancels, who does not read holds up nobody, and silence has comments."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from rig import Fixed, Scripted, about, served

from tegrad import models
from tegrad.serve import conversation, exchange
from tegrad.serve import openai as api
from tegrad.serve.fields import Field, Flag, Object

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
TEXT = "Good morning, said the moon to the sun. "


class Step:
    """What a model waits for in front of each token: opened `count` times."""

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)
        self.reached = threading.Semaphore(0)

    def __call__(self) -> None:
        self.reached.release()
        assert self.allowed.acquire(timeout=30)

    def open(self, count: int = 1000) -> None:
        for _ in range(count):
            self.allowed.release()


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    made = Scripted(about("small", models.SMALL), TEXT)
    yield made
    assert made.template is not None
    made.template.close()


@pytest.fixture(scope="module")
def served_models(scripted: Scripted) -> Fixed:
    return Fixed([scripted])


@pytest.fixture(scope="module")
def url(served_models: Fixed) -> Iterator[str]:
    with served(api.API.routes(served_models)) as found:
        yield found


@pytest.fixture
def step(scripted: Scripted) -> Iterator[Step]:
    made = scripted.wait = Step()
    yield made
    made.open()
    scripted.wait = lambda: None


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def opened(url: str, body: dict[str, Any]) -> socket.socket:
    """A request that was sent, whose answer nobody has read yet."""
    host, port = url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=20)
    data = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    made.sendall(head.encode() + data)
    return made


def events(answer: str) -> list[dict[str, Any]]:
    """A stream's, without its end."""
    lines = [line.removeprefix("data: ") for line in answer.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 2])
def test_a_client_that_goes_away_cancels_its_answers(
    scripted: Scripted, served_models: Fixed, url: str, step: Step, stream: bool, tokens: int
) -> None:
    """Before the first token or after it, whether it reads a stream or waits for a whole answer."""
    before = len(scripted.asked)
    with closing(opened(url, HELLO | {"stream": stream, "n": 2})) as client:
        for _ in range(2):
            assert step.reached.acquire(timeout=20)
        step.open(2 * tokens)
        if stream and tokens:
            assert client.recv(12) == b"HTTP/1.1 200"
        assert served_models.used == 1
    until(lambda: served_models.used == 0)
    assert [bool(asked.left) for asked in scripted.asked[before:]] == [True, True]
    assert {asked.left[0] for asked in scripted.asked[before:]} == {"cancelled"}


def test_who_does_not_read_holds_up_nobody(scripted: Scripted, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "text", TEXT * 40)
    with closing(opened(url, HELLO | {"stream": True, "n": 8, "logprobs": True, "top_logprobs": 1})):
        for _ in range(3):
            assert httpx.post(url + CHAT, json=HELLO).json()["choices"][0]["message"]["content"] == TEXT * 40


def test_silence_before_the_first_token_has_comments(
    scripted: Scripted, url: str, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the stream, which has begun with them; it goes on as if there were none."""
    monkeypatch.setattr(exchange, "IDLE_S", 0.05)
    with httpx.stream("POST", url + CHAT, json=HELLO | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        parts = answer.iter_text()
        assert next(parts) == ": keep-alive\n\n"
        step.open()
        rest = "".join(parts)
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in events(rest)) == TEXT


def test_a_body_that_was_long_on_its_way_has_no_comment_before_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one, what the checks find would no longer be a status of its own."""
    monkeypatch.setattr(exchange, "IDLE_S", 0.2)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        made = exchange.Exchange(api.API.voice, {}, send)
        await asyncio.sleep(0.3)
        made.body = b'{"stream": true}'
        assert await made.read(Object({"stream": Field(Flag())})) == {"stream": True}
        await asyncio.sleep(0.02)
        assert sent == []
        await asyncio.sleep(0.5)
        made.close()

    asyncio.run(answer())
    assert [message["type"] for message in sent[:1]] == ["http.response.start"]


def test_what_fails_after_a_comment_is_an_event(
    scripted: Scripted, url: str, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "IDLE_S", 0.05)
    monkeypatch.setattr(scripted, "error", RuntimeError("a slip"))
    monkeypatch.setattr(scripted, "text", "")
    with httpx.stream("POST", url + CHAT, json=HELLO | {"stream": True}) as answer:
        parts = answer.iter_text()
        assert next(parts) == ": keep-alive\n\n"
        step.open()
        rest = "".join(parts)
    told = json.loads(rest.split("data: ")[-1])["error"]
    assert (told["type"], told["code"]) == ("server_error", "server_error")


def test_tokens_that_come_together_share_an_event(
    scripted: Scripted, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes here: those that come while the first one's time lasts."""
    monkeypatch.setattr(conversation, "PACE_S", 60.0)
    scripted.wait = lambda: time.sleep(0.002)
    try:
        found = events(httpx.post(url + CHAT, json=HELLO | {"stream": True}).text)
    finally:
        scripted.wait = lambda: None
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in found) == TEXT
    assert len(found) <= 3  # the first ones, all others, and the end


def test_nobody_waits_for_more_after_the_end(scripted: Scripted, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever time tokens have to share an event."""
    monkeypatch.setattr(conversation, "PACE_S", 20.0)
    scripted.wait = lambda: time.sleep(0.002)
    begun = time.monotonic()
    try:
        answer = httpx.post(url + CHAT, json=HELLO).json()
    finally:
        scripted.wait = lambda: None
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert time.monotonic() - begun < 10


def test_tokens_that_come_apart_have_an_event_each(scripted: Scripted, url: str) -> None:
    scripted.wait = scripted.apart
    try:
        found = events(httpx.post(url + CHAT, json=HELLO | {"stream": True}).text)
    finally:
        scripted.wait = lambda: None
    count = len(scripted.tokenizer.encode(TEXT, bos=False))
    assert len(found) == count + 1


def test_only_the_last_chunk_has_the_usage_and_only_if_wanted(url: str) -> None:
    plain = events(httpx.post(url + CHAT, json=HELLO | {"stream": True}).text)
    assert not any("usage" in one for one in plain)
    *rest, last = events(
        httpx.post(url + CHAT, json=HELLO | {"stream": True, "stream_options": {"include_usage": True}}).text
    )
    assert {one["usage"] for one in rest} == {None}
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
