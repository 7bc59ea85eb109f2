"""All that the APIs say is of the types that the official clients have for it; the clients themselves do not check."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import anthropic.types as anthropics
import httpx
import ollama as ollamas
import openai.types as openais
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel
from rig import Fixed, Scripted, about, served
from told import COUNT, PLACE, SAID, TOOLS

from tegrad import models
from tegrad.serve import anthropic, ollama, openai, responses

SAY: Any = {"model": "small", "messages": [{"role": "user", "content": "What is up?"}]}
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
CUSTOM = [{"type": "custom", "name": "look"}, FUNCTIONS[1]]
LOGS: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
FORM = {"type": "json_schema", "name": "any", "schema": {"type": "object"}}
MESSAGE: Any = {**SAY, "max_tokens": 100}
BLOCKS: Any = {
    "tools": [{"name": "look", "input_schema": PLACE}, {"name": "count", "input_schema": COUNT}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    made = Scripted(about("small", models.SMALL), SAID)
    all_ = Fixed([made])
    with (
        served([route for api in (openai, responses, anthropic, ollama) for route in api.API.routes(all_)]) as url,
        httpx.Client(base_url=url, timeout=30) as asking,
    ):
        yield asking
    assert made.template is not None
    made.template.close()


def members(union: Any) -> dict[str, type[BaseModel]]:
    """The events of a union, by their types."""
    every = [each for each in get_args(get_args(union)[0]) if issubclass(each, BaseModel)]
    return {name: each for each in every for name in get_args(each.model_fields["type"].annotation)}


EVENTS = {"/v1/responses": members(ResponseStreamEvent), "/v1/messages": members(anthropics.RawMessageStreamEvent)}
ASKED: list[tuple[str, Any, type[BaseModel]]] = [
    ("/v1/chat/completions", SAY, ChatCompletion),
    ("/v1/chat/completions", {**SAY, "tools": TOOLS}, ChatCompletion),
    ("/v1/chat/completions", {**SAY, "logprobs": True, "top_logprobs": 2, "n": 2}, ChatCompletion),
    ("/v1/completions", {"prompt": "a", "logprobs": 2, "n": 2}, openais.Completion),
    ("/v1/embeddings", {"input": "a"}, openais.CreateEmbeddingResponse),
    ("/v1/responses", {"input": "a", **LOGS}, Response),
    ("/v1/responses", {"input": "a", "tools": FUNCTIONS, "reasoning": {"effort": "low"}}, Response),
    ("/v1/responses", {"input": "a", "tools": CUSTOM, "instructions": "b", "metadata": {"a": "b"}}, Response),
    ("/v1/responses", {"input": "a", "text": {"format": FORM}, "max_output_tokens": 50}, Response),
    ("/v1/messages", MESSAGE, anthropics.Message),
    ("/v1/messages", {**MESSAGE, **BLOCKS}, anthropics.Message),
    ("/v1/messages/count_tokens", SAY, anthropics.MessageTokensCount),
    ("/api/chat", {**SAY, "tools": TOOLS, "logprobs": True, "stream": False}, ollamas.ChatResponse),
    ("/api/generate", {"model": "small", "prompt": "a", "stream": False}, ollamas.GenerateResponse),
    ("/api/embed", {"model": "small", "input": "a"}, ollamas.EmbedResponse),
    ("/api/show", {"model": "small"}, ollamas.ShowResponse),
]


@pytest.mark.parametrize(("path", "body", "kind"), ASKED, ids=lambda one: one if isinstance(one, str) else "")
def test_an_answer(client: httpx.Client, path: str, body: Any, kind: type[BaseModel]) -> None:
    kind.model_validate(client.post(path, json=body).raise_for_status().json())


@pytest.mark.parametrize(
    ("path", "body"),
    [(path, body) for path, body, _ in ASKED if path in EVENTS or "completions" in path],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_stream(client: httpx.Client, path: str, body: Any) -> None:
    more = {"stream": True, **({"stream_options": {"include_usage": True}} if "completions" in path else {})}
    lines = client.post(path, json={**body, **more}).raise_for_status().text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len(events) > 2
    for event in events:
        if path == "/v1/completions":  # its type is a whole one's, which has an end
            event["choices"] = [{**one, "finish_reason": one["finish_reason"] or "stop"} for one in event["choices"]]
        kind = openais.Completion if path == "/v1/completions" else ChatCompletionChunk
        EVENTS.get(path, {}).get(event.get("type", ""), kind).model_validate(event)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_lines(client: httpx.Client, path: str) -> None:
    kind: type[BaseModel] = ollamas.ChatResponse if path == "/api/chat" else ollamas.GenerateResponse
    lines = client.post(path, json={**SAY, "prompt": "a", "tools": TOOLS}).raise_for_status().text.splitlines()
    assert len(lines) > 1
    for line in lines:
        kind.model_validate_json(line)


def test_models(client: httpx.Client) -> None:
    (one,) = client.get("/v1/models").json()["data"]
    openais.Model.model_validate(one)
    anthropics.ModelInfo.model_validate(one)
    ollamas.ListResponse.model_validate(client.get("/api/tags").json())
    ollamas.ProcessResponse.model_validate(client.get("/api/ps").json())
