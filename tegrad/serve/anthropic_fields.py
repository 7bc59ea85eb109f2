"""Fields of Anthropic's requests, and what they ask for. Those that are not here are ignored."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from tegrad.llm.grammar import Grammar
from tegrad.llm.sampler import LARGEST_TOP_K
from tegrad.serve.conversation import Chat, Wanted, resumed
from tegrad.serve.failures import unread
from tegrad.serve.fields import Dictionary, Either, Field, Flag, Listed, Number, Object, Tagged, Text
from tegrad.serve.model import Model
from tegrad.serve.openai_fields import (
    JSON,
    LONGEST_STOP,
    MOST_STOPS,
    MOST_TOOLS,
    SAMPLED,
    chosen,
    functions,
    joined,
    noted,
    sampled,
    whole,
)

_BILLED: Final = re.compile(r"\Ax-anthropic-billing-header:(\s*\w+=[^;\n]*;)*\s*")
"""What Claude Code puts in front of its instructions, for Anthropic: it has a number of each request, behind which no
prompt would be found in the cache."""
_TEXT: Final = Object({"text": Field(Text(), required=True)})
_TEXTS: Final = Either((Text(), Listed(Tagged("type", {"text": _TEXT}, others=True))))
_RESULT: Final = Object({
    "tool_use_id": Field(Text(), required=True),
    "content": Field(_TEXTS, ""),
    "is_error": Field(Flag(), False),
})  # fmt: skip
_USE: Final = Object({
    "id": Field(Text(), required=True),
    "name": Field(Text(), required=True),
    "input": Field(Dictionary(), required=True),
})  # fmt: skip
_SAID: Final = Tagged("type", {
    "text": _TEXT,
    "thinking": Object({"thinking": Field(Text(), required=True)}),
    "redacted_thinking": Object({}),
    "tool_use": _USE,
}, others=True)  # fmt: skip
"""What other servers did with tools of their own is left out."""
_TOLD: Final = Tagged("type", {"text": _TEXT, "tool_result": _RESULT}, others=True)
MESSAGE: Final = Tagged("role", {
    "user": Object({"content": Field(Either((Text(), Listed(_TOLD))), required=True)}),
    "assistant": Object({"content": Field(Either((Text(), Listed(_SAID))), required=True)}),
    "system": Object({"content": Field(_TEXTS, required=True)}),
})  # fmt: skip
TOOL: Final = Tagged("type", {"custom": Object({
    "name": Field(Text(most=128), required=True),
    "description": Field(Text()),
    "input_schema": Field(Dictionary(), required=True),
})}, default="custom")  # fmt: skip
_ONE: Final[Mapping[str, Field]] = {
    "disable_parallel_tool_use": Field(Flag(), False, about="an answer ends with its first call")
}
CHOICE: Final = Tagged("type", {
    "auto": Object(_ONE),
    "any": Object(_ONE),
    "tool": Object({"name": Field(Text(), required=True), **_ONE}),
    "none": Object({}),
})  # fmt: skip
OUTPUT: Final = Object({
    "format": Field(Tagged("type", {"json_schema": Object({"schema": Field(Dictionary(), required=True)})})),
    "effort": Field(Text(("low", "medium", "high", "xhigh", "max")), about="for the model's template"),
})  # fmt: skip
COUNT: Final = Object({
    "model": Field(Text(), required=True, about="a name of /v1/models"),
    "messages": Field(Listed(MESSAGE, least=1), required=True),
    "system": Field(_TEXTS, ""),
    "tools": Field(Listed(TOOL, most=MOST_TOOLS), ()),
    "tool_choice": Field(CHOICE, {"type": "auto", "disable_parallel_tool_use": False}),
    "thinking": Field(
        Tagged("type", {
            name: Object({}) for name in ("enabled", "adaptive", "between_tools", "disabled")
        }),
        about="left out, the model does not think, or its thoughts are left out",
    ),
    "output_config": Field(OUTPUT),
})  # fmt: skip
MESSAGES: Final = Object({
    **COUNT.fields,
    "max_tokens": Field(whole(1, (1 << 31) - 1), required=True),
    "stream": Field(Flag(), False),
    "stop_sequences": Field(Listed(Text(most=LONGEST_STOP), most=MOST_STOPS), ()),
    "temperature": Field(Number(0, 1), 1.0, about="0 takes the likeliest token", own=True),
    "top_p": SAMPLED["top_p"],
    "top_k": Field(whole(0, LARGEST_TOP_K), 0, about="0 keeps all", own=True),
})  # fmt: skip


def wanted_of(body: JSON, model: Model) -> Wanted:
    """How a request wants its tokens taken; Failure."""
    return sampled({**body, "stop": body["stop_sequences"]}, model, None, rows=MESSAGES.fields)


def thinks(body: JSON) -> bool:
    """Whether thoughts are wanted."""
    return body["thinking"] is not None and body["thinking"]["type"] != "disabled"


def chat_of(body: JSON, model: str) -> Chat:
    """The conversation of a request to a model; Failure."""
    tools = functions([
        {"name": one["name"], "description": one["description"], "parameters": one["input_schema"]}
        for one in body["tools"]
    ])  # fmt: skip
    given, output = body["tool_choice"], body["output_config"] or OUTPUT.read({})
    name = {"any": "required"}.get(given["type"], given.get("name", given["type"]))
    choice = chosen(name, tools, named=given["type"] == "tool")
    form = output["format"]
    grammar = Grammar("schema", json.dumps(form["schema"])) if form is not None else None
    values = {"enable_thinking": thinks(body), **({"reasoning_effort": output["effort"]} if output["effort"] else {})}
    messages, begun = resumed(_messages(body, model))
    return Chat(
        messages, tools, choice, not given.get("disable_parallel_tool_use"), grammar, values, begun
    )  # fmt: skip


def _messages(body: JSON, model: str) -> list[JSON]:
    """Messages as templates take them: turns of one role are one, and what tools returned is a message of its own."""
    system = _BILLED.sub("", joined(body["system"], "system", model, "\n"))
    made: list[JSON] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}
    """Functions by the id of their call."""
    for at, one in enumerate(body["messages"]):
        content, role = one["content"], one["role"]
        for number, block in enumerate([{"type": "text", "text": content}] if isinstance(content, str) else content):
            if role != "assistant" and block["type"] not in ("text", "tool_result"):
                raise unread(f"messages[{at}].content[{number}]", block["type"], model)
            if block["type"] == "tool_result":
                name, text = names.get(block["tool_use_id"], ""), noted(block["content"], "\n")
                made.append({"role": "tool", "tool_call_id": block["tool_use_id"], "name": name, "content": text})
                continue
            if not made or made[-1]["role"] != role:
                made.append({"role": role, "content": ""})
            _add(made[-1], block)
            if block["type"] == "tool_use":
                names[block["id"]] = block["name"]
    return made or [{"role": "user", "content": ""}]


def _add(message: JSON, block: Mapping[str, Any]) -> None:
    """A block to the message that it belongs to."""
    kind = block["type"]
    if kind == "text":
        message["content"] = f"{message['content']}\n{block['text']}" if message["content"] else block["text"]
    elif kind == "thinking":
        message["reasoning_content"] = message.get("reasoning_content", "") + block["thinking"]
    elif kind == "tool_use":
        function = {"name": block["name"], "arguments": block["input"]}
        message.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
