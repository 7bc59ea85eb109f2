"""What is wrong with a request is told in OpenAI's shape: status, code, field and a line with the next step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from rig import Fixed, Scripted, about, served

from tegrad import models
from tegrad.errors import TegradError
from tegrad.llm.errors import ContextError, OutOfMemory, UnsupportedModelError
from tegrad.llm.service import QueueFull
from tegrad.serve import openai as api
from tegrad.serve.model import About

CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
FUNCTION = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    made = Scripted(about("small", models.SMALL), "Good morning")
    yield made
    assert made.template is not None
    made.template.close()


@pytest.fixture(scope="module")
def http(scripted: Scripted) -> Iterator[httpx.Client]:
    made = Fixed([scripted])
    with served(api.API.routes(made)) as found, httpx.Client(base_url=found, timeout=30) as client:
        yield client
    assert made.used == 0


@pytest.fixture
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def model(scripted: Scripted) -> Iterator[Scripted]:
    yield scripted
    scripted.refusal = scripted.error = None
    scripted.reason = "stop"


def content(one: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": one}]}


WRONG: list[tuple[str, Any, str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hello"}, "messages"),
    (CHAT, {"messages": ["Hello"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "Hello"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "function", "content": "1"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, content(5), "messages[0].content"),
    (CHAT, content([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0]"),
    (CHAT, content([{"type": "text"}]), "messages[0].content[0].text"),
    (CHAT, HELLO | {"temperature": 3}, "temperature"),
    (CHAT, HELLO | {"temperature": "hot"}, "temperature"),
    (CHAT, HELLO | {"temperature": True}, "temperature"),
    (CHAT, HELLO | {"top_p": -0.1}, "top_p"),
    (CHAT, HELLO | {"top_k": 1.5}, "top_k"),
    (CHAT, HELLO | {"min_p": 2}, "min_p"),
    (CHAT, HELLO | {"presence_penalty": 9}, "presence_penalty"),
    (CHAT, HELLO | {"frequency_penalty": -9}, "frequency_penalty"),
    (CHAT, HELLO | {"repeat_penalty": 0}, "repeat_penalty"),
    (CHAT, HELLO | {"repeat_last_n": 1e9}, "repeat_last_n"),
    (CHAT, HELLO | {"seed": "one"}, "seed"),
    (CHAT, HELLO | {"timeout": -1}, "timeout"),
    (CHAT, HELLO | {"max_tokens": 0}, "max_tokens"),
    (CHAT, HELLO | {"max_completion_tokens": -2}, "max_completion_tokens"),
    (CHAT, HELLO | {"n": 0}, "n"),
    (CHAT, HELLO | {"n": 1000}, "n"),
    (CHAT, HELLO | {"stop": [1]}, "stop[0]"),
    (CHAT, HELLO | {"stop": "a" * 1000}, "stop"),
    (CHAT, HELLO | {"logit_bias": {"1": 101}}, "logit_bias.1"),
    (CHAT, HELLO | {"logit_bias": {"hello": 1}}, "logit_bias"),
    (CHAT, HELLO | {"logit_bias": {"2048": 1}}, "logit_bias"),
    (CHAT, HELLO | {"logit_bias": {"²": 1}}, "logit_bias"),
    (CHAT, HELLO | {"logprobs": 5}, "logprobs"),
    (CHAT, HELLO | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, HELLO | {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, HELLO | {"stream": "yes"}, "stream"),
    (CHAT, HELLO | {"stream_options": 1}, "stream_options"),
    (CHAT, HELLO | {"model": 5}, "model"),
    (CHAT, HELLO | {"tools": [{"type": 5}]}, "tools[0].type"),
    (CHAT, HELLO | {"tools": [FUNCTION] * 1025}, "tools"),
    (CHAT, HELLO | {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, HELLO | {"tools": [FUNCTION, FUNCTION]}, "tools"),
    (CHAT, HELLO | {"tool_choice": "required"}, "tool_choice"),
    (CHAT, HELLO | {"tool_choice": FUNCTION}, "tool_choice"),
    (CHAT, HELLO | {"tools": [FUNCTION], "tool_choice": "look"}, "tool_choice"),
    (CHAT, HELLO | {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, HELLO | {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, HELLO | {"response_format": {"type": "json_object"}, "grammar": "start: /a/"}, "grammar"),
    (CHAT, HELLO | {"grammar": {"kind": "gbnf", "text": "a"}}, "grammar.kind"),
    (CHAT, HELLO | {"reasoning_effort": "most"}, "reasoning_effort"),
    (CHAT, HELLO | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": 5}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt[0]"),
    (TEXT, {"prompt": [1, 2048]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt[0]"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
    (TEXT, {"prompt": "a", "best_of": 2}, "best_of"),
    (TEXT, {"prompt": "a", "max_tokens": -2}, "max_tokens"),
    (TEXT, {"prompt": "a", "logprobs": True}, "logprobs"),
    (VECTORS, {}, "input"),
    (VECTORS, {"input": []}, "input"),
    (VECTORS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    (VECTORS, {"input": "a", "dimensions": 5}, "dimensions"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=lambda one: str(one)[:60])
def test_a_wrong_field_is_named(http: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert len(error["message"]) < 250
    assert ": " in error["message"]  # the cause, and what to do


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"a"', b"\xff", b'{"messages": NaN}', b"[" * 100_000, b'{"n": ' + b"1" * 5000 + b"}"],
    ids=lambda body: str(body[:12]),
)
def test_a_body_that_is_no_object_is_refused(http: httpx.Client, body: bytes) -> None:
    answer = http.post(CHAT, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body ")


@pytest.mark.parametrize("depth", [300, 600, 5000, 20_000])
def test_what_is_nested_deeply_is_answered_or_refused(http: httpx.Client, depth: int) -> None:
    schema = '{"items": ' * depth + "{}" + "}" * depth
    tools = f'"tools": [{{"type": "function", "function": {{"name": "look", "parameters": {schema}}}}}]'
    form = f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "a", "schema": {schema}}}}}'
    thinking = '"chat_template_kwargs": {"enable_thinking": true}'
    values = f'"chat_template_kwargs": {schema}'
    for fields in (tools, f'{tools}, "tool_choice": "required"', f"{form}, {thinking}", values):
        answer = http.post(CHAT, content=f"{{{fields}, {json.dumps(HELLO)[1:]}")
        assert answer.status_code in (200, 400), answer.text


SENT: list[tuple[str, Any]] = [
    (CHAT, HELLO | {"reasoning_effort": "max"}),
    (CHAT, HELLO | {"logprobs": False, "top_logprobs": 0}),
    (CHAT, HELLO | {"stop": [f"<{at}>" for at in range(64)]}),  # completions of code have words of a language
    (CHAT, HELLO | {"tools": [{"type": "function", "function": {"name": "get_" * 30}}]}),
    (CHAT, HELLO | {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}),
    (CHAT, {"messages": [*HELLO["messages"], {"role": "tool", "tool_call_id": "call_1", "content": None}]}),
    (CHAT, content([{"type": "input_text", "text": "Hello"}])),
    (
        CHAT,
        {"messages": [*HELLO["messages"], {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}]},
    ),
    (TEXT, {"prompt": "a", "max_tokens": -1}),
    (TEXT, {"prompt": ["a", "b"], "max_tokens": 0, "n": 2}),
]


@pytest.mark.parametrize(("path", "body"), SENT, ids=lambda one: str(one)[:80])
def test_what_clients_send_is_taken(http: httpx.Client, path: str, body: Any) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_minus_one_is_the_contexts(http: httpx.Client, model: Scripted, name: str) -> None:
    assert http.post(CHAT, json=HELLO | {name: -1}).status_code == 200
    assert model.asked[-1].rest[0] is None


def test_a_refusal_is_what_the_assistant_said(http: httpx.Client, model: Scripted) -> None:
    prompts = []
    for part in ({"type": "refusal", "refusal": "I will not."}, {"type": "text", "text": "I will not."}):
        said = [*HELLO["messages"], {"role": "assistant", "content": [part]}, *HELLO["messages"]]
        assert http.post(CHAT, json={"messages": said}).status_code == 200
        prompts.append(model.asked[-1].tokens)
    assert prompts[0] == prompts[1]


def test_a_model_is_told_of_by_every_name_that_finds_it(scripted: Scripted) -> None:
    class Named(Fixed):
        def find(self, name: str | None) -> About:
            return super().find(name and name.lower())

    with served(api.API.routes(Named([scripted]))) as url:
        assert httpx.get(f"{url}/v1/models/Small").json()["id"] == "small"


def test_null_is_as_if_left_out(http: httpx.Client) -> None:
    nothing = dict.fromkeys(["temperature", "tools", "stop", "n", "stream", "logit_bias", "response_format", "seed"])
    assert http.post(CHAT, json=HELLO | nothing).status_code == 200


REFUSALS: list[tuple[Exception, int, str | None, str | None]] = [
    (QueueFull(70, 3.4), 429, "rate_limit_exceeded", "3"),
    (ContextError("a prompt of 9 tokens does not fit a context of 8"), 400, "context_length_exceeded", None),
    (OutOfMemory("no room"), 503, "out_of_memory", "1"),
    (UnsupportedModelError("it cannot"), 400, None, None),
    (TegradError("the device failed"), 503, "server_error", "1"),
    (ValueError("a slip"), 500, "server_error", None),
]


@pytest.mark.parametrize(("refusal", "status", "code", "wait"), REFUSALS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_model_refuses_has_a_status_and_code(
    model: Scripted, http: httpx.Client, refusal: Exception, status: int, code: str, wait: str, stream: bool
) -> None:
    model.refusal = refusal
    answer = http.post(CHAT, json=HELLO | {"stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers.get("retry-after") == wait
    assert ("slip" in answer.text) == (status != 500 and "slip" in str(refusal))  # what we did not foresee is not shown


def test_the_client_raises_its_own_errors(model: Scripted, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'large'"):
        client.chat.completions.create(model="large", messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(openai.NotFoundError, match="no model 'a/b'"):
        client.models.retrieve("a/b")
    model.refusal = ContextError("too long")
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="small", prompt="Hello")
    assert raised.value.code == "context_length_exceeded"
    model.refusal = QueueFull(1, 2)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="small", prompt="Hello")


def test_a_queue_with_room_for_one_takes_neither_of_two(model: Scripted, http: httpx.Client) -> None:
    before = len(model.asked)
    submit = model.submit

    def second_is_refused(*rest: Any, **more: Any) -> Any:
        if len(model.asked) > before:
            raise QueueFull(1, 1)
        return submit(*rest, **more)

    model.submit = second_is_refused  # type: ignore[method-assign]
    try:
        assert http.post(CHAT, json=HELLO | {"n": 2}).status_code == 429
    finally:
        del model.submit  # type: ignore[method-assign]
    assert model.asked[before].left == ["cancelled"]


@pytest.mark.parametrize(
    ("reason", "error"), [("error", TegradError("the GPU failed")), ("cancelled", None), ("timeout", None)]
)
def test_an_answer_that_fails_before_it_begins_is_no_answer(
    model: Scripted, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, reason: Any, error: Any
) -> None:
    monkeypatch.setattr(model, "text", "")
    model.reason, model.error = reason, error
    answer = http.post(CHAT, json=HELLO)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_one_that_runs_out_of_time_is_cut_off(model: Scripted, http: httpx.Client) -> None:
    model.reason = "timeout"
    choice = http.post(CHAT, json=HELLO).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Good morning", "length")


def test_a_failure_within_a_stream_is_an_event_and_its_end(
    model: Scripted, http: httpx.Client, client: openai.OpenAI
) -> None:
    model.error = TegradError("the GPU failed")
    lines = http.post(CHAT, json=HELLO | {"stream": True}).text.split("\n\n")
    *came, last = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in came) == "Good morning"
    assert last["error"]["message"] == "the GPU failed"
    chunks = client.chat.completions.create(model="small", messages=[{"role": "user", "content": "Hi"}], stream=True)
    with pytest.raises(openai.APIError, match="the GPU failed"):
        list(chunks)


def test_a_chat_with_a_model_without_a_template_says_what_to_do(
    model: Scripted, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "template", None)
    answer = http.post(CHAT, json=HELLO)
    assert answer.status_code == 400
    assert "ask for the completion of a text" in answer.json()["error"]["message"]
