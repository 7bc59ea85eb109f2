"""Whatever a body is, each API answers it or says in its own shape what is wrong, and its document describes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rig import Fixed, Scripted, about, served

from tegrad import models
from tegrad.serve import anthropic, ollama, openai, responses

HELLO = {"model": "small", "messages": [{"role": "user", "content": "Hello"}]}
FUNCTION = {"type": "function", "function": {"name": "look"}}
OPENAI = {
    **HELLO, "temperature": 1, "stop": ["a"], "n": 2, "logprobs": True, "top_logprobs": 1, "seed": 1,
    "tools": [FUNCTION], "tool_choice": "auto", "response_format": {"type": "text"}, "logit_bias": {"1": 1},
    "stream": True, "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_effort": "low", "max_tokens": 5, "parallel_tool_calls": False, "grammar": None,
}  # fmt: skip
OLLAMA = {
    "model": "small", "stream": True, "format": {"type": "object"}, "keep_alive": "5m", "think": True,
    "logprobs": True, "top_logprobs": 2,
    "options": {
        "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.1, "repeat_last_n": -1,
        "seed": 3, "num_predict": 5, "num_ctx": 8192, "stop": ["a"],
    },
}  # fmt: skip
OLLAMA_CHAT = [
    {"role": "assistant", "thinking": "Hm", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}]},
    {"role": "tool", "tool_name": "look", "content": "blue"},
    {"role": "user", "content": "Hello", "images": []},
]
ANTHROPIC = {
    "model": "small", "max_tokens": 5, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "stop_sequences": ["a"],
    "stream": True, "system": [{"type": "text", "text": "Be old."}], "thinking": {"type": "enabled"},
    "tools": [{"name": "look", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"},
    "messages": [
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "1", "name": "look", "input": {"at": 1}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "blue"}]},
    ],
}  # fmt: skip
RESPONSES = {
    "model": "small", "instructions": "Be old.", "stream": True, "max_output_tokens": 5, "metadata": {"a": "b"},
    "tools": [
        {"type": "function", "name": "look"}, {"type": "custom", "name": "patch", "format": {"type": "text"}},
        {"type": "namespace", "name": "sky", "tools": [{"type": "function", "name": "look"}]}, {"type": "web_search"},
    ],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_image"}]},
        {"type": "shell_call", "call_id": "2", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "2", "output": [{"stdout": "a"}]},
        {"type": "web_search_call", "id": "ws_1"},
    ],
}  # fmt: skip
SOUND: list[tuple[str, Any]] = [
    ("/v1/chat/completions", OPENAI),
    ("/v1/completions", {"prompt": "a", "echo": True, **OPENAI, "logprobs": 2}),
    ("/v1/embeddings", {"input": ["a"]}),
    ("/v1/responses", RESPONSES),
    ("/api/chat", OLLAMA | {"messages": OLLAMA_CHAT, "tools": [FUNCTION]}),
    ("/api/generate", OLLAMA | {"prompt": "Hello", "system": "Be old.", "raw": False}),
    ("/api/embed", {"model": "small", "input": ["a", "b"], "dimensions": 2, "truncate": True}),
    ("/v1/messages", ANTHROPIC),
    ("/v1/messages/count_tokens", ANTHROPIC),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ANSWERED = {200, 400, 404}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    one = Scripted(about("small", models.SMALL), "Good morning")
    made = Fixed([one])
    routes = [route for api in (openai, responses, ollama, anthropic) for route in api.API.routes(made)]
    with served(routes) as found, httpx.Client(base_url=found, timeout=30) as client:
        yield client
    assert made.used == 0
    assert one.template is not None
    one.template.close()


@pytest.mark.parametrize(("path", "sound"), SOUND)
def test_the_bodies_are_sound_as_they_are(http: httpx.Client, path: str, sound: dict[str, Any]) -> None:
    answer = http.post(path, json=sound)
    assert answer.status_code == 200, answer.text
    assert not re.search('"error":["{]', answer.text)


@pytest.mark.parametrize(("path", "sound"), SOUND)
@settings(
    max_examples=30, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_no_body_makes_the_server_fail(
    http: httpx.Client, path: str, sound: dict[str, Any], data: st.DataObject
) -> None:
    """A sound request with a part of it replaced by anything, however deep it lies."""
    body = json.loads(json.dumps(sound))
    at: Any = body
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not at[key] or not isinstance(at[key], dict | list) or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(JSON)
    answer = http.post(path, content=json.dumps(body))
    assert answer.status_code in ANSWERED, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error if path.startswith("/api") else error["message"]


PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}
PICTURES: list[tuple[str, str, Any]] = [
    ("/v1/chat/completions", "messages[0].content[0]", {"messages": [{"role": "user", "content": [PICTURE]}]}),
    ("/v1/responses", "input[0].content[0]", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("/v1/messages", "messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("/v1/messages", "system[0]", {"system": [{"type": "image"}]}),
    ("/api/chat", "messages[0].images", {"messages": [{"role": "user", "content": "a", "images": ["AA=="]}]}),
    ("/api/generate", "images", {"prompt": "a", "images": ["AA=="]}),
]


@pytest.mark.parametrize(("path", "at", "more"), PICTURES)
def test_a_picture_is_refused_and_the_model_named(http: httpx.Client, path: str, at: str, more: Any) -> None:
    answer = http.post(path, json=HELLO | {"max_tokens": 5} | more)
    assert answer.status_code == 400
    error = answer.json()["error"]
    said = error if isinstance(error, str) else error["message"]
    assert said.startswith(f"{at} is ")
    assert said.endswith(", and small reads text alone: leave it out")


@pytest.mark.parametrize(("api", "bodies"), [(openai, 3), (responses, 1), (ollama, 6), (anthropic, 2)])
def test_the_document_is_sound(api: Any, bodies: int) -> None:
    """As far as its schemas are JSON Schema, which the sound bodies keep to."""
    operations = [one for path in api.API.paths.values() for one in path.values()]
    found = [one["requestBody"]["content"]["application/json"]["schema"] for one in operations if "requestBody" in one]
    assert len(found) == bodies
    for schema in found:
        jsonschema_rs.meta.validate(schema)
    for path, sound in SOUND:
        if path in api.API.paths:
            schema = api.API.paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            jsonschema_rs.validate(schema, sound)
