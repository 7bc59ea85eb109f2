"""Tools, thoughts and answers that keep to a schema: what a model is told, what is read out of what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from rig import Direct, Fixed, Scripted, about, served
from told import CALLS, SAID, TOOLS

from tegrad import models
from tegrad.serve import openai as api

ASKED: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "What is up?"}]}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    made = Scripted(about("small", models.SMALL), SAID)
    yield made
    assert made.template is not None
    made.template.close()


@pytest.fixture(scope="module")
def told(scripted: Scripted) -> Iterator[openai.OpenAI]:
    """A client of a model that says what it is told to."""
    with (
        served(api.API.routes(Fixed([scripted]))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def prompt(scripted: Scripted) -> str:
    """What the model was asked last."""
    return scripted.tokenizer.decode(scripted.asked[-1].tokens, special=True)


def calls(message: ChatCompletionMessage) -> list[tuple[str, Any]]:
    found = [call for call in message.tool_calls or [] if call.type == "function"]
    return [(call.function.name, json.loads(call.function.arguments)) for call in found]


def test_thoughts_text_and_calls_come_apart(told: openai.OpenAI) -> None:
    choice = told.chat.completions.create(**ASKED, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content == "Hm, the moon."  # type: ignore[attr-defined]
    assert calls(choice.message) == [("look", {"at": "the moon"}), ("count", {"to": 3})]
    assert len({call.id for call in choice.message.tool_calls or []}) == 2


def test_a_stream_of_calls_says_the_same(scripted: Scripted, told: openai.OpenAI) -> None:
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    text = thought = ""
    reason = None
    for chunk in told.chat.completions.create(**ASKED, tools=TOOLS, stream=True):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            assert (call.id is not None) == (call.function.name is not None) == (call.index not in names)
            names.setdefault(call.index, call.function.name or "")
            arguments.setdefault(call.index, []).append(call.function.arguments or "")
    assert (text, thought, reason) == ("I look.", "Hm, the moon.", "tool_calls")
    assert names == {0: "look", 1: "count"}
    assert [json.loads("".join(arguments[at])) for at in range(2)] == [{"at": "the moon"}, {"to": 3}]


def test_arguments_come_as_they_are_made(scripted: Scripted, told: openai.OpenAI) -> None:
    scripted.wait = scripted.apart
    try:
        chunks = list(told.chat.completions.create(**ASKED, tools=TOOLS, stream=True))
    finally:
        scripted.wait = lambda: None
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert sum(bool(delta.tool_calls) for delta in deltas) > 6


def test_one_call_at_a_time(scripted: Scripted, told: openai.OpenAI) -> None:
    choice = told.chat.completions.create(**ASKED, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert calls(choice.message) == [("look", {"at": "the moon"})]
    assert choice.finish_reason == "tool_calls"


def test_without_tools_their_marks_are_text(scripted: Scripted, told: openai.OpenAI) -> None:
    """Also with some of which none may be called, of which the model is not told then."""
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = told.chat.completions.create(**ASKED | more).choices[0]
        assert choice.message.content == f"I look.{CALLS}"
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert "look" not in prompt(scripted)


def test_the_model_is_told_of_tools_calls_and_results(scripted: Scripted, told: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "the sky"}'}}
    messages: list[Any] = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "The moon."},
    ]
    told.chat.completions.create(**ASKED | {"messages": messages}, tools=TOOLS)
    said = prompt(scripted)
    assert all(json.dumps(tool) in said for tool in TOOLS)
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>' in said
    assert "<think>\nHm.\n</think>" in said
    assert "<tool_response>\nThe moon.\n</tool_response>" in said


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_allowed_tools_the_model_is_told_alone(scripted: Scripted, told: openai.OpenAI, mode: Any) -> None:
    allowed: Any = [{"type": "function", "function": {"name": "look"}}, {"type": "mcp", "server_label": "sky"}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    answer = told.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice).choices[0]
    assert calls(answer.message) == [("look", {"at": "the moon"})]
    assert '"count"' not in prompt(scripted).split(SAID)[0]
    grammar = scripted.asked[-1].more["grammar"]
    assert (grammar is not None) == (mode == "required")
    told.chat.completions.create(**ASKED, tools=TOOLS[:1], tool_choice=mode)
    assert (scripted.asked[-1].tokens, scripted.asked[-1].more["grammar"]) == (scripted.asked[-2].tokens, grammar)


def test_more_tools_than_openai_takes_are_taken_and_others_than_functions_left_out(
    scripted: Scripted, told: openai.OpenAI
) -> None:
    many: Any = [{"type": "function", "function": {"name": f"t{at}"}} for at in range(140)]
    others: Any = [{"type": "custom", "custom": {"name": "patch"}}]
    told.chat.completions.create(**ASKED, tools=[*others, *many])
    said = prompt(scripted)
    assert all(f'"t{at}"' in said for at in range(140))
    assert "patch" not in said


@pytest.mark.parametrize(
    ("more", "thinks"),
    [
        ({}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
    ids=str,
)
def test_thinking_is_the_templates_to_begin(
    scripted: Scripted, told: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], thinks: bool
) -> None:
    """An answer to a prompt that ends within a thought begins with the rest of it."""
    monkeypatch.setattr(scripted, "text", "It is late.\n</think>\nGood night" if thinks else "Good night")
    message = told.chat.completions.create(**ASKED, extra_body=more).choices[0].message
    assert prompt(scripted).endswith("<think>\n") == thinks
    assert message.content == "Good night"
    assert getattr(message, "reasoning_content", None) == ("It is late." if thinks else None)


@pytest.mark.board
@pytest.mark.parametrize("seed", range(3))
def test_required_calls_keep_to_their_schemas(client: openai.OpenAI, seed: int) -> None:
    """Of a model that would never call anything by itself."""
    drawn = ASKED | {"tools": TOOLS, "temperature": 1.5, "seed": seed, "max_tokens": 60}
    named: Any = {"type": "function", "function": {"name": "count"}}
    choice = client.chat.completions.create(**drawn, tool_choice=named).choices[0]
    ((name, arguments),) = calls(choice.message)
    assert name == "count"
    assert arguments["to"] in (1, 2, 3)
    choice = client.chat.completions.create(**drawn, tool_choice="required", parallel_tool_calls=False).choices[0]
    ((name, arguments),) = calls(choice.message)
    assert arguments.keys() == {"look": {"at"}, "count": {"to"}}[name]
    assert choice.finish_reason == "tool_calls"


@pytest.mark.board
def test_an_answer_keeps_to_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"book": {"enum": ["Genesis", "Exodus"]}, "verse": {"type": "integer", "maximum": 50}},
        "required": ["book", "verse"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "verse", "schema": schema}}
    for stream in (False, True):
        drawn = ASKED | {"temperature": 1, "seed": 1, "max_tokens": 60, "response_format": form}
        if stream:
            chunks = client.chat.completions.create(**drawn, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = str(client.chat.completions.create(**drawn).choices[0].message.content)
        made = json.loads(text)
        assert made["book"] in ("Genesis", "Exodus")
        assert isinstance(made["verse"], int)


@pytest.mark.board
@pytest.mark.long
def test_a_hundred_of_a_hundred_calls_are_valid(client: openai.OpenAI) -> None:
    """Eight at once, required or named, half of them streams; the model is hot and knows nothing of tools."""

    def valid(seed: int) -> bool:
        name = ("look", "count", None)[seed % 3]
        choice: Any = {"type": "function", "function": {"name": name}} if name else "required"
        drawn = ASKED | {"tools": TOOLS, "tool_choice": choice, "temperature": 2, "seed": seed, "max_tokens": 400}
        if seed % 2:
            said = [(call.function.name, call.function.arguments) for call in function_calls(client, drawn)]
        else:
            said = streamed_calls(client, drawn)
        assert 1 <= len(said) <= (1 if name else 8)
        assert not name or said[0][0] == name
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        return all(jsonschema_rs.is_valid(schemas[called], json.loads(arguments)) for called, arguments in said)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(valid, range(100))) == [True] * 100


def function_calls(client: openai.OpenAI, request: dict[str, Any]) -> list[Any]:
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.finish_reason == "tool_calls"
    return list(choice.message.tool_calls or [])


def streamed_calls(client: openai.OpenAI, request: dict[str, Any]) -> list[tuple[str, str]]:
    found: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**request, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            parts = found.setdefault(call.index, [call.function.name or "", ""])
            parts[1] += call.function.arguments or ""
    return [(name, arguments) for name, arguments in found.values()]


@pytest.mark.board
def test_with_tools_it_calls_or_keeps_to_the_schema(client: openai.OpenAI, small: Direct) -> None:
    """It calls of itself, and without the mark of calls it has to say something."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "sure", "schema": {"enum": ["yes", "no"]}}}
    wanted = ASKED | {"tools": TOOLS, "parallel_tool_calls": False, "response_format": form, "temperature": 0}
    assert len(calls(client.chat.completions.create(**wanted, max_tokens=60).choices[0].message)) == 1
    mark = str(small.tokenizer.tokens.index("<tool_call>"))
    said = client.chat.completions.create(**wanted, logit_bias={mark: -100}).choices[0]
    assert said.message.content in ('"yes"', '"no"')
    assert said.finish_reason == "stop"


@pytest.mark.board
def test_an_answer_keeps_to_a_grammar_or_expression(client: openai.OpenAI) -> None:
    lark = 'start: "yes" | "no"'
    for grammar in (lark, {"kind": "lark", "text": lark}, {"kind": "regex", "text": "yes|no"}):
        chat = client.chat.completions.create(**ASKED, extra_body={"grammar": grammar}).choices[0]
        assert chat.message.content in ("yes", "no")
        assert chat.finish_reason == "stop"
        made = client.completions.create(model="small", prompt="Is it?", extra_body={"grammar": grammar})
        assert made.choices[0].text in ("yes", "no")


@pytest.mark.board
def test_json_mode_begins_an_object(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(**ASKED, response_format={"type": "json_object"}, max_tokens=10, seed=1)
    assert str(made.choices[0].message.content).startswith("{")


@pytest.mark.board
@pytest.mark.parametrize(
    "more",
    [
        {"grammar": "start: nothing"},
        {"grammar": {"kind": "regex", "text": "(("}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "sandwich"}}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_is_not_sound_is_refused(client: openai.OpenAI, more: dict[str, Any], stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="not sound or not supported"):
        client.chat.completions.create(**ASKED, extra_body=more, stream=stream)  # type: ignore[call-overload]
