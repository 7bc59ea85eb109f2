"""Fields of requests for responses, and what they ask for: items become messages, and tools functions.

Tools that are no functions of the program that asks are left out, as are the items of what other servers did with
such. A custom tool, which takes a text, is a function of one text here, and a namespace's functions have its name in
front of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tegrad.llm.sampler import LIKELIEST
from tegrad.serve import fields
from tegrad.serve.conversation import Chat
from tegrad.serve.fields import Absent, Dictionary, Either, Field, Flag, Listed, Number, Object, Tagged
from tegrad.serve.openai_fields import (
    CONTENT,
    EFFORTS,
    FUNCTION,
    JSON,
    LONGEST_NAME,
    MODE,
    MOST_TOOLS,
    SAMPLED,
    chosen,
    functions,
    grammar_of,
    joined,
    message,
    noted,
    only,
    template_values,
)

LOGPROBS: Final = "message.output_text.logprobs"
"""What `include` has for log-probabilities."""
_ITS_OWN: Final = ("n", "max_tokens", "stop")
_TEXT: Final = Field(fields.Text(), required=True)
_OPTIONAL: Final = Field(fields.Text(), "")
_PART: Final = Object({"text": _TEXT})
_THOUGHTS: Final = Listed(Tagged("type", dict.fromkeys(("reasoning_text", "text"), _PART)))
_CALLS: Final[Mapping[str, Object]] = {
    "function_call": Object({"call_id": _TEXT, "name": _TEXT, "namespace": _OPTIONAL, "arguments": _TEXT}),
    "custom_tool_call": Object({"call_id": _TEXT, "name": _TEXT, "namespace": _OPTIONAL, "input": _TEXT}),
    "local_shell_call": Object({"call_id": _TEXT, "action": Field(Dictionary(), required=True)}),
    "shell_call": Object({"call_id": _TEXT, "action": Field(Dictionary(), required=True)}),
    "apply_patch_call": Object({"call_id": _TEXT, "operation": Field(Dictionary(), required=True)}),
}
_OUTPUTS: Final[Mapping[str, Object]] = {
    **dict.fromkeys(
        ("function_call_output", "custom_tool_call_output", "apply_patch_call_output"),
        Object({"call_id": _OPTIONAL, "output": Field(CONTENT, "")}),
    ),
    "local_shell_call_output": Object({"call_id": _OPTIONAL, "id": _OPTIONAL, "output": _TEXT}),
    "shell_call_output": Object({"call_id": _OPTIONAL, "output": Field(Listed(Dictionary()), ())}),
}
_ITEM: Final = Tagged("type", {
    "message": Object({
        "role": Field(fields.Text(("user", "system", "developer", "assistant")), required=True),
        "content": Field(CONTENT, required=True),
    }),
    "reasoning": Object({"content": Field(_THOUGHTS, ())}),
    **_CALLS,
    **_OUTPUTS,
    "item_reference": Object({"id": Field(Absent("nothing is stored here, send the item itself"))}),
}, default="message", others=True)  # fmt: skip
_NAMED: Final = Object({"name": _TEXT})
_KINDS_OF_TOOLS: Final = ("function", "custom")
_CHOICE: Final = Either((
    fields.Text(("none", "auto", "required")),
    Tagged("type", {**dict.fromkeys(_KINDS_OF_TOOLS, _NAMED), "allowed_tools": Object({
        "mode": MODE,
        "tools": Field(
            Listed(Tagged("type", dict.fromkeys(_KINDS_OF_TOOLS, _NAMED), others=True), most=MOST_TOOLS), required=True
        ),
    })}),
))  # fmt: skip
_FORMAT: Final = Tagged("type", {
    "text": Object({}),
    "json_object": Object({"schema": Field(Dictionary())}),
    "json_schema": Object({"name": Field(fields.Text()), "schema": Field(Dictionary(), required=True)}),
})  # fmt: skip
_CUSTOM: Final = Object({
    "name": Field(fields.Text(most=LONGEST_NAME), required=True),
    "description": Field(fields.Text()),
    "format": Field(Dictionary(), about="of its text, which the model is told of"),
})  # fmt: skip
_ONE: Final[Mapping[str, Object]] = {"function": FUNCTION, "custom": _CUSTOM}
_SPACE: Final = Object({"name": _TEXT, "tools": Field(Listed(Tagged("type", _ONE, others=True), most=MOST_TOOLS), ())})
RESPONSE: Final = Object({
    "model": Field(fields.Text(), about="a name of /v1/models; the first one if left out"),
    "input": Field(Either((fields.Text(), Listed(_ITEM, least=1))), required=True),
    "instructions": Field(fields.Text(), about="in front of the input, as a system message"),
    "stream": Field(Flag(), False),
    **{name: row for name, row in SAMPLED.items() if name not in _ITS_OWN},
    "max_output_tokens": Field(Number(1, (1 << 31) - 1, whole=True)),
    "tools": Field(
        Listed(Tagged("type", {**_ONE, "namespace": _SPACE}, others=True), most=MOST_TOOLS), (),
        about="others than these, which coding tools always send, are left out",
    ),
    "tool_choice": Field(_CHOICE, "auto"),
    "parallel_tool_calls": Field(Flag(), True),
    "text": Field(Object({"format": Field(_FORMAT)}), about="with a format that the text keeps to"),
    "reasoning": Field(Object({"effort": Field(fields.Text(EFFORTS))})),
    "chat_template_kwargs": Field(Dictionary(), about="for the model's template, such as enable_thinking"),
    "include": Field(Listed(fields.Text()), (), about=f'"{LOGPROBS}" is known'),
    "top_logprobs": Field(Number(0, LIKELIEST, whole=True), 0),
    "metadata": Field(Dictionary(), about="comes back as it is"),
    **dict.fromkeys(
        ("previous_response_id", "conversation", "background"),
        Field(Absent("nothing is stored here, send all of the input")),
    ),
})  # fmt: skip


def known_tools(body: JSON) -> list[JSON]:
    """The tools of a request that can be offered, as they were given."""
    return [tool for tool in body["tools"] if tool["type"] in ("function", "custom", "namespace")]


def offered(tools: Sequence[JSON]) -> dict[str, JSON]:
    """What a call becomes, by the name that the model has for it: a head of an item, with the tool's own name."""
    heads = {}
    for space, tool in _apart(tools):
        kind = "function_call" if tool["type"] == "function" else "custom_tool_call"
        head = {"type": kind, "name": tool["name"], **({"namespace": space} if space else {})}
        heads[_name(space, tool["name"])] = head
    return heads


def chat_of(body: JSON, model: str) -> Chat:
    """The conversation of a request to a model; Failure."""
    tools = functions([_function(space, tool) for space, tool in _apart(body["tools"])])
    given = body["tool_choice"]
    if not isinstance(given, str) and given["type"] == "allowed_tools":
        allowed = [one for one in given["tools"] if one["type"] in _KINDS_OF_TOOLS]
        tools, given = only(tools, allowed), given["mode"]
    form = body["text"] and body["text"]["format"]
    if form is not None and form["type"] == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    effort = body["reasoning"] and body["reasoning"]["effort"]
    named = not isinstance(given, str)
    return Chat(
        _messages(body, model), tools, chosen(given["name"] if named else given, tools, named=named),
        body["parallel_tool_calls"], grammar_of(body["grammar"], form),
        template_values(effort, body["chat_template_kwargs"]),
    )  # fmt: skip


def _apart(tools: Sequence[JSON]) -> list[tuple[str, JSON]]:
    """Functions and custom tools, each with its namespace, "" for none."""
    spaces = [(tool["name"], tool["tools"]) if tool["type"] == "namespace" else ("", [tool]) for tool in tools]
    return [(space, tool) for space, inner in spaces for tool in inner if tool["type"] in _KINDS_OF_TOOLS]


def _name(space: str, name: str) -> str:
    return f"{space}__{name}" if space else name


def _function(space: str, tool: JSON) -> JSON:
    """A tool as a function; a custom one takes a text, of whose form the model is told."""
    if tool["type"] == "function":
        return {**tool, "name": _name(space, tool["name"])}
    form = tool["format"] or {}
    told = (
        [f"Its input keeps to this {form.get('syntax')} grammar:\n{form['definition']}"] if "definition" in form else []
    )
    said = "\n".join(filter(None, [tool["description"], *told]))
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"name": _name(space, tool["name"]), "description": said, "parameters": text}


def _messages(body: JSON, model: str) -> list[JSON]:
    """Items as messages: thoughts and calls belong to the assistant's message beside them."""
    items = body["input"]
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": items}]
    made: list[JSON] = []
    if body["instructions"]:
        made.append({"role": "system", "content": body["instructions"]})
    open_ = False
    """The last message is the assistant's, which what follows may belong to."""
    for number, item in enumerate(items):
        kind = item["type"]
        if kind in _OUTPUTS:
            call, output = item["call_id"] or item.get("id", ""), item["output"]
            text = json.dumps(output) if kind == "shell_call_output" else noted(output)
            made.append({"role": "tool", "tool_call_id": call, "content": text})
        elif kind == "message" and item["role"] != "assistant":
            text = joined(item["content"], f"input[{number}].content", model)
            made.append({"role": item["role"], "content": text})
        elif kind == "message" or kind in _CALLS or (kind == "reasoning" and item["content"]):
            if not open_ or kind == "reasoning":
                made.append({"role": "assistant", "content": ""})
            _add(made[-1], item)
        else:
            continue
        open_ = made[-1]["role"] == "assistant"
    return [message(one, "input", model) for one in made]


def _add(said: JSON, item: Mapping[str, Any]) -> None:
    """An item to the assistant's message that it belongs to."""
    kind = item["type"]
    if kind == "message":
        said["content"] += noted(item["content"])
    elif kind == "reasoning":
        said["reasoning_content"] = noted(item["content"])
    else:
        function = {"name": kind.removesuffix("_call"), "arguments": item.get("action") or item.get("operation")}
        if "name" in item:
            given = item["arguments"] if kind == "function_call" else {"input": item["input"]}
            function = {"name": _name(item["namespace"], item["name"]), "arguments": given}
        said.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
