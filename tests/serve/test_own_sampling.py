"""What a model's file says of how its tokens are drawn holds in each API where a request says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from rig import Fixed, Scripted, about, served

from tegrad import models
from tegrad.llm.sampler import Settings
from tegrad.serve import anthropic, ollama, openai, responses

OWN = {
    "general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.75,
    "general.sampling.penalty_repeat": 1.25,
}  # fmt: skip
HELLO = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/api/chat": {"messages": HELLO, "stream": False},
    "/api/generate": {"prompt": "Hello", "stream": False},
}
PLAIN = Settings(temperature=0.6, top_k=20, top_p=0.75, repeat=1.25)


@pytest.fixture(scope="module")
def model() -> Iterator[Scripted]:
    plain = about("small", models.SMALL)
    made = Scripted(replace(plain, metadata=plain.metadata | OWN), "Good morning")
    yield made
    assert made.template is not None
    made.template.close()


@pytest.fixture(scope="module")
def http(model: Scripted) -> Iterator[httpx.Client]:
    routes = [route for api in (openai, responses, ollama, anthropic) for route in api.API.routes(Fixed([model]))]
    with served(routes) as found, httpx.Client(base_url=found, timeout=30) as client:
        yield client


def taken(http: httpx.Client, model: Scripted, path: str, **said: Any) -> tuple[Settings, dict[str, Any]]:
    """How a request's tokens were drawn, and its answer; `said` are options of Ollama's, or fields."""
    more = {"options": said} if path.startswith("/api") else said
    answer = http.post(path, json={"model": "small", **ASKED[path], **more})
    assert answer.status_code == 200, answer.text
    return model.asked[-1].rest[1], answer.json()


@pytest.mark.parametrize("path", ASKED)
def test_what_a_request_does_not_say_is_the_models_own(http: httpx.Client, model: Scripted, path: str) -> None:
    assert taken(http, model, path)[0] == PLAIN
    assert taken(http, model, path, temperature=0.9)[0] == replace(PLAIN, temperature=0.9)
    assert taken(http, model, path, top_k=0, top_p=1)[0] == replace(PLAIN, top_k=0, top_p=1.0)
    assert taken(http, model, path, temperature=None, top_k=None)[0] == PLAIN


@pytest.mark.parametrize("path", ASKED)
def test_a_temperature_of_zero_takes_the_likeliest_token(http: httpx.Client, model: Scripted, path: str) -> None:
    """A penalty of the file's would choose another."""
    found = taken(http, model, path, temperature=0)[0]
    assert found.temperature == 0
    assert found.repeat == (1.1 if path.startswith("/api") else 1)  # Ollama's own default


def test_a_response_tells_what_was_taken(http: httpx.Client, model: Scripted) -> None:
    told = [taken(http, model, "/v1/responses", **said)[1] for said in ({}, {"top_p": 0.5})]
    assert [(one["temperature"], one["top_p"]) for one in told] == [(0.6, 0.75), (0.6, 0.5)]
