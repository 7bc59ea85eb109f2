"""Conversations as templates insist on having them: one that a template refuses is told in another way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from tegrad.llm.template import Template, TemplateRefusalError

Message: TypeAlias = Mapping[str, Any]
BETWEEN: Final = "\n\n"
"""Between texts that become one."""


def render(
    template: Template, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **values: Any
) -> str:
    """The text of messages, up to where the answer begins.

    Where the template refuses them, each function gets a description and each call a message of its own, then roles
    take turns, and then the user says what the system does; calls' arguments may be texts all the while.
    TemplateRefusalError, of the messages as they are.
    """
    refused: TemplateRefusalError | None = None
    given: Sequence[Mapping[str, Any]] | None = tools or None
    for repair in (None, _one_by_one, _in_turn, _of_the_user):
        if repair is not None:
            messages, given = repair(messages), [_described(tool) for tool in tools or ()]
        for form in (list, _with_texts) if any(one.get("tool_calls") for one in messages) else (list,):
            try:
                return template.render(form(messages), tools=given, **values)
            except TemplateRefusalError as error:
                refused = refused or error
                if not error.of_messages:
                    raise
    assert refused is not None
    raise refused


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function with a description, which some templates ask for."""
    function = tool.get("function", tool)
    return {**tool, "function": {"description": "", **function}}


def _with_texts(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls have their arguments as texts, as some templates take them alone."""
    return [
        {**one, "tool_calls": [_with_text(call) for call in calls]} if (calls := one.get("tool_calls")) else one
        for one in messages
    ]


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Messages of one call each, what it returned behind it: Llama's templates take no more."""
    made: list[Message] = []
    left = list(messages)
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            made.append(message)
            continue
        for at, call in enumerate(calls):
            made.append({**message, "content": "" if at else message["content"], "tool_calls": [call]})
            found = next((one for one in _returned(left) if one.get("tool_call_id") in (None, call.get("id"))), None)
            if found is not None:
                left.remove(found)
                made.append(found)
    return made


def _returned(messages: Sequence[Message]) -> list[Message]:
    """The results with which messages begin."""
    end = next((at for at, one in enumerate(messages) if one["role"] != "tool"), len(messages))
    return list(messages[:end])


def _in_turn(messages: Sequence[Message]) -> list[Message]:
    """Messages of the user and the assistant in turn, the user's first; only in front of them is the system's."""
    made: list[Message] = []
    for one in messages:
        message = {**one, "role": "user"} if one["role"] == "system" and made else one
        last = made[-1]["role"] if made else "system"
        same = made and (last == message["role"] != "tool" or (last == "tool" and message["role"] == "user"))
        if same and all(isinstance(one.get("content", ""), str) for one in (made[-1], message)):
            made[-1] = _joined(made[-1], message)
        else:
            made += [{"role": "user", "content": ""}] if last == "system" and message["role"] == "assistant" else []
            made.append(message)
    return made


def _of_the_user(messages: Sequence[Message]) -> list[Message]:
    """Messages without the system's, which are the user's."""
    return _in_turn([{**one, "role": "user"} if one["role"] == "system" else one for one in messages])


def _joined(first: Message, second: Message) -> Message:
    """Two messages as one."""
    content = BETWEEN.join(one["content"] for one in (first, second) if one.get("content"))
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    return {**second, **first, "content": content, **({"tool_calls": calls} if calls else {})}
