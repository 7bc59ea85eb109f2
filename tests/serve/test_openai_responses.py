"""Responses by the official client: items and events follow each other as they should, and nothing needs a state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from rig import Direct, Fixed, Scripted, about, served

from tegrad import models
from tegrad.errors import TegradError
from tegrad.serve import responses

GREEDY: dict[str, Any] = {"model": "small", "input": "Tell me a verse.", "temperature": 0, "max_output_tokens": 8}
CALL = 'So be it.<tool_call>\n{"name": "look", "arguments": {"at": "the moon"}}\n</tool_call>'
LOOK: Any = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    made = Scripted(about("small", models.SMALL), "Good morning")
    yield made
    assert made.template is not None
    made.template.close()


@pytest.fixture(scope="module")
def told(scripted: Scripted) -> Iterator[openai.OpenAI]:
    """A client of a model that says what it is told to."""
    with (
        served(responses.API.routes(Fixed([scripted]))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.fixture
def scripted_call(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """It thinks, speaks and calls a function."""
    monkeypatch.setattr(scripted, "text", f"<think>\nHm.\n</think>\n{CALL}")


def prompt(scripted: Scripted) -> str:
    """What the model was asked last."""
    return scripted.tokenizer.decode(scripted.asked[-1].tokens, special=True)


@pytest.mark.board
def test_a_response_says_what_a_chat_says(small: Direct, client: openai.OpenAI) -> None:
    with (
        served(responses.API.routes(Fixed([small]))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as own,
    ):
        made = own.responses.create(**GREEDY)
        chat = client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": GREEDY["input"]}], temperature=0, max_tokens=8
        )
        assert made.output_text == chat.choices[0].message.content
        assert (made.object, made.status, made.store) == ("response", "incomplete", False)
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        assert made.usage is not None
        assert chat.usage is not None
        assert (made.usage.input_tokens, made.usage.output_tokens) == (chat.usage.prompt_tokens, 8)
        *_, last = own.responses.create(**GREEDY, stream=True)
        assert last.type == "response.incomplete"
        assert (last.response.output_text, last.response.usage) == (made.output_text, made.usage)
        drawn = own.responses.create(**GREEDY | {"temperature": 1.2}, extra_body={"seed": 4})
        again = own.responses.create(**GREEDY | {"temperature": 1.2}, extra_body={"seed": 4})
        assert drawn.output_text == again.output_text != made.output_text


def test_events_follow_each_other(scripted: Scripted, told: openai.OpenAI) -> None:
    events = list(told.responses.create(**GREEDY, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Good morning"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "Good morning"


@pytest.mark.usefixtures("scripted_call")
def test_thoughts_texts_and_calls_are_items(told: openai.OpenAI) -> None:
    made = told.responses.create(**GREEDY, tools=[LOOK])
    thought, said, call = made.output
    assert thought.type == "reasoning"
    assert [part.text for part in thought.content or []] == ["Hm."]
    assert said.type == "message"
    assert made.output_text == "So be it."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("look", {"at": "the moon"}, "completed")
    assert made.usage is not None
    assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens


@pytest.mark.usefixtures("scripted_call")
def test_a_streams_events_lead_to_the_same_items(told: openai.OpenAI) -> None:
    with told.responses.stream(**GREEDY, tools=[LOOK]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    whole = told.responses.create(**GREEDY, tools=[LOOK])
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"at": "the moon"}
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Hm."
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    done = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert added == done == [0, 1, 2]


def test_log_probabilities_come_with_the_text(told: openai.OpenAI) -> None:
    wanted: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    made = told.responses.create(**GREEDY | wanted)
    (item,) = made.output
    assert item.type == "message"
    part = item.content[0]
    assert part.type == "output_text"
    assert "".join(one.token for one in part.logprobs or []) == "Good morning"
    streamed = [
        one.token
        for event in told.responses.create(**GREEDY | wanted, stream=True)
        if event.type == "response.output_text.delta"
        for one in event.logprobs
    ]
    assert "".join(streamed) == "Good morning"


def test_items_become_messages(scripted: Scripted, told: openai.OpenAI) -> None:
    items: Any = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "What is "}, {"type": "input_text", "text": "up?"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": "the sky"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "The moon."},
        {"role": "user", "content": "So?"},
    ]
    told.responses.create(model="small", input=items, instructions="Be brief.", tools=[LOOK])
    assert scripted.template is not None
    function = {name: LOOK[name] for name in ("name", "parameters")}
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "the sky"}}}
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is up?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "The moon.", "tool_call_id": "call_1"},
        {"role": "user", "content": "So?"},
    ]
    assert prompt(scripted) == scripted.template.render(said, tools=[{"type": "function", "function": function}])


def test_what_tools_did_becomes_calls_and_what_they_returned(scripted: Scripted, told: openai.OpenAI) -> None:
    """Items that Codex sends back, some of a conversation with another server."""
    picture = {"type": "input_image", "image_url": "data:,"}
    items: Any = [
        {"role": "user", "content": "So?"},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "AA=="},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
        {
            "type": "custom_tool_call_output",
            "call_id": "1",
            "output": [{"type": "input_text", "text": "Done"}, picture],
        },
        {"type": "local_shell_call", "call_id": "2", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "2", "output": "a.txt"},
        {"type": "shell_call", "call_id": "3", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "3", "output": [{"stdout": "a.txt", "stderr": ""}]},
        {"type": "apply_patch_call", "call_id": "4", "operation": {"type": "delete_file", "path": "a.txt"}},
        {"type": "apply_patch_call_output", "call_id": "4", "status": "completed"},
        {"type": "function_call", "call_id": "5", "namespace": "sky", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "output": "The moon."},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "a"}},
        {"type": "compaction", "encrypted_content": "AA=="},
        {"role": "user", "content": "And?"},
    ]
    told.responses.create(model="small", input=items)
    said: list[Any] = [{"role": "user", "content": "So?"}]
    for name, arguments, returned in (
        ("apply_patch", {"input": "*** Begin"}, "Done[input_image left out: only text can be read]"),
        ("local_shell", {"command": ["ls"]}, "a.txt"),
        ("shell", {"commands": ["ls"]}, '[{"stdout": "a.txt", "stderr": ""}]'),
        ("apply_patch", {"type": "delete_file", "path": "a.txt"}, ""),
        ("sky__look", {}, "The moon."),
    ):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        said += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": returned}]
    assert scripted.template is not None
    assert prompt(scripted) == scripted.template.render([*said, {"role": "user", "content": "And?"}])


PATCH: Any = {
    "type": "custom", "name": "apply_patch", "description": "Change files",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "***"'},
}  # fmt: skip


def test_tools_that_are_no_functions_are_left_out(scripted: Scripted, told: openai.OpenAI) -> None:
    others: Any = [{"type": "web_search", "external_web_access": False}, {"type": "local_shell"}]
    prompts = []
    for tools in ([LOOK], [*others, LOOK]):
        response = told.responses.create(model="small", input="So?", tools=tools, reasoning={"effort": "max"})
        assert [tool.type for tool in response.tools] == ["function"]
        prompts.append(prompt(scripted))
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_is_called_with_its_text(
    scripted: Scripted, told: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    text = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** \\"a\\"\\n"}}\n</tool_call>'
    monkeypatch.setattr(scripted, "text", text)
    if stream:
        events = list(told.responses.create(**GREEDY, tools=[PATCH], stream=True))
        kinds = [event.type.removeprefix("response.") for event in events[2:-1]]
        assert kinds == [
            "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"
        ]  # fmt: skip
        assert events[-1].type == "response.completed"
        response = events[-1].response
    else:
        response = told.responses.create(**GREEDY, tools=[PATCH])
    (call,) = response.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("apply_patch", '*** "a"\n')
    assert "Change files" in prompt(scripted)
    assert r"Its input keeps to this lark grammar:\nstart: \"***\"" in prompt(scripted)


def test_of_allowed_tools_the_model_is_told_alone(scripted: Scripted, told: openai.OpenAI) -> None:
    allowed: Any = [{"type": "custom", "name": "apply_patch"}, {"type": "image_generation"}]
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    told.responses.create(**GREEDY, tools=[LOOK, PATCH], tool_choice=choice)
    assert '"look"' not in prompt(scripted)
    assert '"apply_patch"' in prompt(scripted)
    assert "apply_patch" in scripted.asked[-1].more["grammar"].text


def test_a_function_of_a_namespace_is_called_by_its_own_name(
    scripted: Scripted, told: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "text", CALL.replace("look", "sky__look"))
    space: Any = {"type": "namespace", "name": "sky", "description": "", "tools": [LOOK, {"type": "other"}]}
    _, call = told.responses.create(**GREEDY, tools=[space, LOOK]).output
    assert call.type == "function_call"
    assert (call.namespace, call.name, json.loads(call.arguments)) == ("sky", "look", {"at": "the moon"})


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_named(told: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        told.responses.create(**GREEDY | more)
    assert raised.value.param == param


def test_a_failure_ends_a_stream_as_the_client_knows_it(
    scripted: Scripted, told: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "error", TegradError("the GPU failed"))
    with pytest.raises(openai.APIError, match="the GPU failed"):
        list(told.responses.create(**GREEDY, stream=True))
    url = str(told.base_url)
    lines = httpx.post(f"{url}responses", json={"input": "Hello", "stream": True}).text.splitlines()
    *_, error, last = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
    assert (error["type"], error["code"], error["message"]) == ("error", "server_error", "the GPU failed")
    assert last["sequence_number"] == error["sequence_number"] + 1
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the GPU failed"}
