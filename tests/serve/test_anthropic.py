"""Anthropic's API by its official client: messages, streams, tools, thoughts, and what is wrong with a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from processes import patience
from rig import Direct, Fixed, Scripted, about, served
from told import CALLS, COUNT, PLACE, SAID

from tegrad import models
from tegrad.errors import TegradError
from tegrad.llm.errors import ContextError
from tegrad.llm.service import QueueFull
from tegrad.serve import anthropic as api
from tegrad.serve import openai

HELLO: list[Any] = [{"role": "user", "content": "What is up?"}]
ASKED: dict[str, Any] = {"model": "small", "messages": HELLO, "max_tokens": 100}
TOOLS: list[Any] = [
    {"name": "look", "description": "Look somewhere", "input_schema": PLACE},
    {"type": "custom", "name": "count", "input_schema": COUNT},
]
THINK: Any = {"type": "enabled", "budget_tokens": 1024}
THOUGHT = "Hm, the moon."
SAID_OPEN = SAID.removeprefix("<think>\n")
"""Behind a prompt that ends within a thought."""


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    made = Scripted(about("small", models.SMALL), SAID)
    yield made
    assert made.template is not None
    made.template.close()


@pytest.fixture(scope="module")
def url(scripted: Scripted) -> Iterator[str]:
    made = Fixed([scripted])
    with served([*api.API.routes(made), *openai.API.routes(made)]) as found:
        yield found
    assert made.used == 0


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=patience(30)) as made:
        yield made


@pytest.fixture
def model(scripted: Scripted) -> Iterator[Scripted]:
    yield scripted
    scripted.text, scripted.refusal, scripted.error, scripted.reason = SAID, None, None, "stop"


def prompt(model: Scripted) -> str:
    """What the model was asked last."""
    return model.tokenizer.decode(model.asked[-1].tokens, special=True)


def blocks(message: Any) -> list[tuple[Any, ...]]:
    """Of each block what stands in it."""
    rows = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("name", "input")}
    return [(block.type, *(getattr(block, name) for name in rows[block.type])) for block in message.content]


def test_the_models_are_listed(client: anthropic.Anthropic, scripted: Scripted) -> None:
    page = client.models.list()
    (one,) = page
    assert (one.id, one.type, one.display_name, page.has_more, page.last_id) == (
        "small", "model", "small", False, "small",
    )  # fmt: skip
    assert one.created_at.timestamp() == int(scripted.about.modified)
    assert client.models.retrieve("small") == one


def test_text_and_calls_are_blocks(client: anthropic.Anthropic, model: Scripted) -> None:
    message = client.messages.create(**ASKED, tools=TOOLS)
    assert blocks(message) == [
        ("text", "I look."), ("tool_use", "look", {"at": "the moon"}), ("tool_use", "count", {"to": 3})
    ]  # fmt: skip
    assert (message.type, message.role, message.model, message.stop_reason) == (
        "message", "assistant", "small", "tool_use",
    )  # fmt: skip
    assert (message.usage.input_tokens, message.usage.output_tokens) == (
        len(model.asked[-1].tokens), len(model.tokenizer.encode(SAID, bos=False)),
    )  # fmt: skip
    assert len({block.id for block in message.content if block.type == "tool_use"}) == 2
    assert "Look somewhere" in prompt(model)


def test_thoughts_come_where_they_are_wanted(client: anthropic.Anthropic, model: Scripted) -> None:
    model.text = SAID_OPEN
    message = client.messages.create(**ASKED, tools=TOOLS, thinking=THINK)
    assert blocks(message)[:2] == [("thinking", THOUGHT), ("text", "I look.")]
    assert prompt(model).rstrip().endswith("<think>")
    model.text = SAID
    for more in ({}, {"thinking": {"type": "disabled"}}):
        assert "thinking" not in [kind for kind, *_ in blocks(client.messages.create(**ASKED, **more))]
        assert not prompt(model).rstrip().endswith("<think>")


def test_a_stream_says_the_same(client: anthropic.Anthropic, model: Scripted) -> None:
    model.text, model.wait = SAID_OPEN, model.apart
    try:
        whole = client.messages.create(**ASKED, tools=TOOLS, thinking=THINK)
        with client.messages.stream(**ASKED, tools=TOOLS, thinking=THINK) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
    finally:
        model.wait = lambda: None
    assert blocks(streamed) == blocks(whole)
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert len(kinds) > 15
    assert {"thinking", "text", "input_json"} <= set(kinds)  # the client's own, of what grows


def test_the_events_of_a_stream(url: str, model: Scripted) -> None:
    """Each is named for its type; blocks are opened and closed one after the other."""
    answer = httpx.post(f"{url}/v1/messages", json=ASKED | {"stream": True, "tools": TOOLS})
    assert answer.headers["content-type"].startswith("text/event-stream")
    rows = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in rows]
    assert [name for name, _ in rows] == [f"event: {event['type']}" for event in events]
    order = [(event["type"], event.get("index")) for event in events if event["type"] != "content_block_delta"]
    assert order == [
        ("message_start", None),
        *((f"content_block_{what}", index) for index in range(3) for what in ("start", "stop")),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    assert events[0]["message"]["content"] == []
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["text", "tool_use", "tool_use"]
    assert (starts[0]["text"], starts[1]["input"]) == ("", {})
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_why_an_answer_ended(client: anthropic.Anthropic, model: Scripted) -> None:
    model.text = "Good morning to you"
    assert client.messages.create(**ASKED).stop_reason == "end_turn"
    stopped = client.messages.create(**ASKED, stop_sequences=["never", " to"])
    assert (blocks(stopped), stopped.stop_reason, stopped.stop_sequence) == (
        [("text", "Good morning")], "stop_sequence", " to",
    )  # fmt: skip
    model.reason = "length"
    said = len(model.tokenizer.encode(model.text, bos=False))
    assert client.messages.create(**ASKED | {"max_tokens": said}).stop_reason == "max_tokens"
    room = model.context - len(model.asked[-1].tokens) - said
    model.text += " a" * room
    assert len(model.tokenizer.encode(model.text, bos=False)) == said + room
    assert client.messages.create(**ASKED | {"max_tokens": 5000}).stop_reason == "model_context_window_exceeded"


def test_how_tokens_are_taken(client: anthropic.Anthropic, model: Scripted) -> None:
    client.messages.create(**ASKED, extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 9})
    limit, taken = model.asked[-1].rest
    assert (limit, taken.temperature, taken.top_p, taken.top_k) == (100, 0.5, 0.25, 9)
    client.messages.create(**ASKED)
    taken = model.asked[-1].rest[1]
    assert (taken.temperature, taken.top_p, taken.top_k, taken.repeat) == (1.0, 1.0, 0, 1.0)


def test_the_conversation_is_told_to_the_model(client: anthropic.Anthropic, model: Scripted) -> None:
    """Texts of a turn are joined, turns of one role are one, and results of calls are messages of their own."""
    said: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Look up", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "please"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I do."},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "the sky"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "It is blue."}]},
            {"type": "text", "text": "And now?"},
        ]},
    ]  # fmt: skip
    system: list[Any] = [{"type": "text", "text": "You are old."}, {"type": "text", "text": "You see."}]
    client.messages.create(**ASKED | {"messages": said}, system=system, tools=TOOLS)
    asked = prompt(model)
    assert "You are old.\nYou see." in asked
    assert "<|im_start|>user\nLook up\nplease<|im_end|>" in asked
    assert '<think>\nHm.\n</think>\nI do.<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}' in asked
    assert "<tool_response>\nIt is blue.\n</tool_response>" in asked
    assert asked.endswith("<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")


def test_a_prompt_begins_the_same_whatever_claude_code_bills(client: anthropic.Anthropic, model: Scripted) -> None:
    """Its first block has a number of the request, behind which nothing would be found in the cache."""
    bill, said = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={};", "You are old; a=b;"
    parts: Any = [{"type": "text", "text": bill.format("a5145")}, {"type": "text", "text": said}]
    for system in (said, bill.format("eb6c6") + said, f"{bill.format('00000')}\n{said}", parts):
        client.messages.create(**ASKED, system=system)
    first, *others = (asked.tokens for asked in model.asked[-4:])
    assert others == [first] * 3
    client.messages.create(**ASKED, system=f"Say {bill}")
    assert bill in prompt(model)


def test_an_answer_goes_on_from_what_the_assistant_said(client: anthropic.Anthropic, model: Scripted) -> None:
    said = [*HELLO, {"role": "assistant", "content": "The best answer is ("}]
    client.messages.create(**ASKED | {"messages": said})
    assert prompt(model).endswith("<|im_start|>assistant\nThe best answer is (")
    client.messages.create(**ASKED | {"messages": said}, thinking=THINK)
    assert prompt(model).endswith("<think>\n\n</think>\n\nThe best answer is (")


def test_a_picture_that_a_tool_returned_does_not_end_the_conversation(
    client: anthropic.Anthropic, model: Scripted
) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a.png"}, picture]}
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "a.png"}}
    said: Any = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    client.messages.create(**ASKED | {"messages": said}, tools=TOOLS)
    assert "a.png\n[image left out: only text can be read]" in prompt(model)


def test_a_call_may_be_wanted(client: anthropic.Anthropic, model: Scripted) -> None:
    choices: list[tuple[Any, bool]] = [
        ({"type": "auto"}, False), ({"type": "none"}, False), ({"type": "any"}, True),
        ({"type": "tool", "name": "count"}, True),
    ]  # fmt: skip
    for choice, held in choices:
        client.messages.create(**ASKED, tools=TOOLS, tool_choice=choice)
        assert (model.asked[-1].more["grammar"] is not None) == held
        assert ("Look somewhere" in prompt(model)) == (choice["type"] != "none")
    assert "look" not in model.asked[-1].more["grammar"].text
    one = client.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [kind for kind, *_ in blocks(one)] == ["text", "tool_use"]


@pytest.mark.parametrize("arguments", ['{"at": "the', '{"at": 1e999}'])
def test_arguments_that_are_no_object_are_told_as_their_text(
    client: anthropic.Anthropic, model: Scripted, arguments: str
) -> None:
    model.text = f'<tool_call>\n{{"name": "look", "arguments": {arguments}'
    model.reason = "length"
    message = client.messages.create(**ASKED, tools=TOOLS)
    assert blocks(message) == [("tool_use", "look", {"text": arguments})]
    assert message.stop_reason == "max_tokens"


def test_a_format_holds_the_answer(client: anthropic.Anthropic, model: Scripted) -> None:
    model.text = '{"at": "home"}'
    config: Any = {"format": {"type": "json_schema", "schema": PLACE}, "effort": "high"}
    client.messages.create(**ASKED, output_config=config)
    grammar = model.asked[-1].more["grammar"]
    assert (grammar.kind, json.loads(grammar.text)) == ("schema", PLACE)


def test_tokens_are_counted_without_an_answer(client: anthropic.Anthropic, model: Scripted) -> None:
    client.messages.create(**ASKED, system="You are old.", tools=TOOLS)
    asked = len(model.asked)
    counted = client.messages.count_tokens(model="small", messages=HELLO, system="You are old.", tools=TOOLS)
    assert counted.input_tokens == len(model.asked[-1].tokens)
    assert len(model.asked) == asked


WRONG: list[tuple[Any, int, str, str]] = [
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is missing"),
    ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    ({"messages": []}, 400, "invalid_request_error", "messages"),
    ({"model": "claude"}, 404, "not_found_error", "claude"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "content[0]"),
    ({"messages": [{"role": "bard", "content": ""}]}, 400, "invalid_request_error", "messages[0].role"),
    ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
    ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, 400, "invalid_request_error", "tools[0].type"),
    ({"tools": [{"type": None, "name": "s"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, 400, "invalid_request_error", "tool_choice"),
    ({"stop_sequences": "a"}, 400, "invalid_request_error", "stop_sequences"),
    ({"thinking": {"type": "some"}}, 400, "invalid_request_error", "thinking.type"),
]


@pytest.mark.parametrize(("change", "status", "kind", "says"), WRONG)
def test_what_is_wrong_is_told_in_a_line(url: str, change: Any, status: int, kind: str, says: str) -> None:
    answer = httpx.post(f"{url}/v1/messages", json=ASKED | change)
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert says in body["error"]["message"]
    assert "\n" not in body["error"]["message"]


def test_failures_are_the_clients_exceptions(client: anthropic.Anthropic, model: Scripted) -> None:
    model.refusal = QueueFull(3, 4.0)
    with pytest.raises(anthropic.RateLimitError) as raised:
        client.messages.create(**ASKED)
    assert raised.value.response.headers["retry-after"] == "4"
    model.refusal = ContextError("a prompt of 600 tokens does not fit a context of 512")
    with pytest.raises(anthropic.BadRequestError, match="does not fit"):
        client.messages.create(**ASKED, stream=True)
    model.refusal = TegradError("the GPU failed: try again")
    with pytest.raises(anthropic.InternalServerError, match="overloaded_error"):
        client.messages.create(**ASKED)


def test_a_failure_within_a_stream_is_an_event(client: anthropic.Anthropic, model: Scripted) -> None:
    model.text, model.error = "Good morning", TegradError("the GPU failed: try again")
    events = iter(client.messages.create(**ASKED, stream=True))
    assert next(events).type == "message_start"
    with pytest.raises(anthropic.APIStatusError, match="the GPU failed"):
        list(events)


def test_marks_are_text_without_tools(client: anthropic.Anthropic, model: Scripted) -> None:
    assert blocks(client.messages.create(**ASKED)) == [("text", f"I look.{CALLS}")]


# ---- a model


@pytest.fixture(scope="module")
def real(small: Direct) -> Iterator[anthropic.Anthropic]:
    """In front of the model that the package carries."""
    with (
        served(api.API.routes(Fixed([small]))) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=patience(120)) as made,
    ):
        yield made


@pytest.mark.board
def test_a_model_answers(real: anthropic.Anthropic, small: Direct) -> None:
    assert small.template is not None
    tokens = small.tokenizer.encode(small.template.render(HELLO), bos=False)
    expected = small.tokenizer.decode([token for piece in small.service.submit(tokens, 12) for token in piece.tokens])
    greedy: dict[str, Any] = ASKED | {"max_tokens": 12, "extra_body": {"temperature": 0}}
    message = real.messages.create(**greedy)
    assert (blocks(message), message.stop_reason) == ([("text", expected)], "max_tokens")
    with real.messages.stream(**greedy) as stream:
        assert "".join(stream.text_stream) == expected


@pytest.mark.board
def test_what_was_in_the_cache_counts_apart(real: anthropic.Anthropic) -> None:
    long = ASKED | {"messages": [{"role": "user", "content": "And Moses went up unto God. " * 12}], "max_tokens": 1}
    first, second = (real.messages.create(**long).usage for _ in range(2))
    assert (first.cache_read_input_tokens, second.cache_read_input_tokens) == (0, 64)
    assert first.input_tokens == second.input_tokens + 64


@pytest.mark.board
def test_a_call_that_must_come_is_valid(real: anthropic.Anthropic) -> None:
    message = real.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "tool", "name": "look"})
    (block,) = message.content
    assert (block.type, message.stop_reason) == ("tool_use", "tool_use")
    assert len(block.input["at"]) <= 8
