"""Requests that schemathesis makes of the server's own document (request_fuzz): what must not be is not there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import request_fuzz
from request_fuzz import OPERATIONS, Requests
from rig import Asked, Fixed, Scripted, about, served

from tegrad import models
from tegrad.llm.service import QueueFull
from tegrad.serve.app import application
from tegrad.serve.catalogue import Place
from tegrad.serve.config import Config

SECONDS = 10.0
"""That a request may take."""
FEW, MANY = 220, 10_000
OTHERS = "to another: witness-0123456789ab"
ASKED = {"messages": [{"role": "user", "content": "a"}]}


class Server(Fixed):
    """What the application asks of a catalogue besides."""

    loads = False
    places: Sequence[Place] = ()


class Obedient(Scripted):
    """A model that says what an expression asks for, else the same to all."""

    def said(self, asked: Asked) -> str:
        grammar = asked.more.get("grammar")
        return grammar.text if grammar is not None and grammar.kind == "regex" else self.text


@contextmanager
def requests(model: Scripted, seconds: float = SECONDS) -> Iterator[Requests]:
    """To a server of a model."""
    made = Server([model])
    with served(application(made, Config())) as url:
        yield Requests(url, seconds)
    assert made.used == 0
    assert model.template is not None
    model.template.close()


def test_requests_of_the_document_are_answered_as_it_says() -> None:
    with requests(Obedient(about("small", models.SMALL), 'so {"a": [1]} it was')) as made:
        made.send(FEW, 1)
    assert made.found == []
    assert made.count >= FEW
    assert made.words > 0
    assert made.statuses["200"] > FEW // 8 < made.statuses["400"]


@pytest.fixture
def completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other requests."""
    monkeypatch.setattr(request_fuzz, "OPERATIONS", {"POST /v1/completions": OPERATIONS["POST /v1/completions"]})


@pytest.mark.usefixtures("completions")
@pytest.mark.parametrize("text", [OTHERS, "so it was"])
def test_a_word_of_another_client_is_found(text: str) -> None:
    with requests(Scripted(about("small", models.SMALL), text)) as made:
        made.send(30, 1)
    assert any(told.startswith("witness-") for told in made.found)  # those clients
    assert any("another client's text" in told for told in made.found) == (text == OTHERS)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {}), ("/v1/responses", {"input": "a"}),
        ("/api/chat", {}), ("/api/generate", {"prompt": "a"}), ("/v1/messages", {"max_tokens": 20}),
    ],
)  # fmt: skip
def test_a_word_is_found_in_the_pieces_of_a_stream(path: str, more: dict[str, Any]) -> None:
    model = Scripted(about("small", models.SMALL), OTHERS)
    model.wait = lambda: time.sleep(0.02)
    body = {"model": "small", "stream": True, **({} if "prompt" in more or "input" in more else ASKED), **more}
    with requests(model) as made:
        answer = httpx.post(f"{made.url}{path}", json=body).text
    assert OTHERS not in answer.partition("output_text.done")[0]
    assert request_fuzz.tells(answer)


@pytest.mark.usefixtures("completions")
def test_a_fault_of_the_server_and_a_request_that_hangs_are_found() -> None:
    model = Obedient(about("small", models.SMALL), "a")
    with requests(model, 1.0) as made:
        model.wait = lambda: time.sleep(2)
        made.send(20, 1)
        assert any("ReadTimeout" in told for told in made.found)
        model.refusal = RuntimeError("odd")
        made.found.clear()
        made.send(40, 2)
        assert any("500" in told for told in made.found)


@pytest.mark.usefixtures("completions")
def test_a_client_that_is_to_come_later_is_no_fault() -> None:
    model = Obedient(about("small", models.SMALL), "a")
    model.refusal = QueueFull(64, 1.0)
    with requests(model) as made:
        made.send(20, 1)
    assert made.statuses["429"] > 0
    assert (made.words, made.found) == (0, [])


@pytest.mark.board
@pytest.mark.long
def test_ten_thousand_requests_to_the_program() -> None:
    """Beside the figure's, out of another seed."""
    summary, found = request_fuzz.fuzzed(MANY, 1)
    assert found == []
    assert summary["requests"] >= MANY
