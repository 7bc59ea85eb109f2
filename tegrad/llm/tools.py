"""Tools and thoughts of a model by its template: told to it, read out of its answers, and asked for by a grammar.

`forms` is the table of how families write calls, `reader` reads them; a template's source tells which form it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from tegrad.llm.forms import FORMS, MARKS, THOUGHTS, Form
from tegrad.llm.grammar import Grammar, GrammarError, prepared, schema_of
from tegrad.llm.reader import Arguments, Call, Event, Reader, Said, Text, Thinking, ToolCall
from tegrad.llm.tokenizer import Kind, Tokenizer

__all__ = [
    "THOUGHTS",
    "Arguments",
    "Call",
    "Event",
    "Format",
    "Message",
    "Reader",
    "Said",
    "Text",
    "Thinking",
    "Tool",
    "ToolCall",
]

Tool: TypeAlias = Mapping[str, Any]
"""A function as OpenAI describes it: {"type": "function", "function": {"name", "description", "parameters"}}."""
Message: TypeAlias = Mapping[str, Any]

MOST_CALLS: Final = 8
"""Calls of an answer that has to call: a weak model would never stop."""


class Format:
    """How the model of a template writes thoughts and calls."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._source = source
        self.form = next(form for form in FORMS if all(mark in source for mark in form.marks))
        self.thought = next((marks for marks in THOUGHTS if marks[1] in source), None)
        apart = (Kind.CONTROL, Kind.USER_DEFINED)
        self._tokens = {tokenizer.tokens[at]: at for at, kind in enumerate(tokenizer.kinds) if kind in apart}
        self._control = {text for text, at in self._tokens.items() if tokenizer.kinds[at] == Kind.CONTROL}

    @classmethod
    def of(cls, template_source: str, tokenizer: Tokenizer) -> Format:
        """Of a template's source, "" for none."""
        return cls(template_source, tokenizer)

    def thinks(self, prompt: str) -> bool:
        """Whether a rendered prompt ends within an open thought."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought[0])

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[Message]:
        """Messages as the template wants them: arguments are objects, ids are what it allows, and a template that does
        not tell the model of tools, and of what they returned, has that said in texts.
        """
        ids = "length != 9" in self._source or "length == 9" in self._source
        made = [_with_objects(message, short_ids=ids) for message in (_with_ids(messages) if ids else messages)]
        knows = re.search(r"\{[%{][^}]*\btools\b", self._source) is not None
        if self.form.observed and knows:
            made = _as_observed(made)
            told = tools and re.search(r"item\[[\"']tools[\"']", self._source)  # GLM-4 of 2024: in a message
            return _in_system(made, {"tools": list(tools)}) if tools and told else made
        if "tool_calls" not in self._source or not knows:
            made = _as_texts(made, self.form, returned=not knows)
        if not tools:
            return made
        if re.search(r"message\[?.?[\"']tools[\"']", self._source):  # Phi-4-mini: in the system message
            return _in_system(made, {"tools": json.dumps([_function(tool) for tool in tools])})
        return made if knows else self._told(made, tools)

    def reader(self, tools: Sequence[Tool] | None, *, thinking: bool = False) -> Reader:
        """For one answer; `thinking`: the prompt ends within an open thought."""
        names = {one["name"]: _properties(one) for one in map(_function, tools or ())}
        return Reader(self.form, self.thought, names, thinking=thinking)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: str,
        parallel: bool = True,
        *,
        thinking: bool = False,
        answer: Grammar | None = None,
    ) -> Grammar | None:
        """What an answer may be that has to call: any function if `choice` is "required", or the one of that name.

        With "auto" it calls or keeps to `answer`; None where there is none. Several calls only where `parallel` and the
        form allow it. `thinking`: the prompt ends within an open thought, which comes first. GrammarError for a
        function that is not there.
        """
        if choice == "auto" and answer is None:
            return None
        every = [_function(tool) for tool in tools]
        functions = [one for one in every if choice in ("auto", "required", one["name"])]
        if not functions:
            names = ", ".join(one["name"] for one in every)
            raise GrammarError(f"there is no tool {choice!r} to be called: choose among {names or 'none'}")
        form, rules = self.form, []
        parallel = parallel and bool(form.join) and choice in ("auto", "required")
        many = f" ({self._lark(form.join)} call){{0,{MOST_CALLS - 1}}}" if parallel else ""
        thought = "thought " if thinking and self.thought else ""
        if thought:
            rules.append(self._thought())
        if choice == "auto" and answer is not None:
            rules += [f"start: {thought}(calls | answer)", f"answer: {_rule(answer)}"]
        else:
            rules.append(f"start: {thought}calls")
        rules.append(f"calls: {self._lark(form.before)} call{many} {self._lark(form.after)}")
        rules.append("call: " + " | ".join(f"call{at}" for at in range(len(functions))))
        for at, one in enumerate(functions):
            head, _, tail = form.call.rpartition("ARGS")
            head = head.replace("NAME", json.dumps(one["name"], ensure_ascii=False)[1:-1])
            rules.append(f"call{at}: {self._lark(head)} args{at} {self._lark(tail)}")
            rules.append(f"args{at}: %json {json.dumps(_arguments(one))}")
        return Grammar("lark", "\n".join(rules))

    def after_thought(self, grammar: Grammar) -> Grammar:
        """What an answer may be of which only what follows its thought keeps to a grammar."""
        if self.thought is None:
            return grammar
        return Grammar("lark", f"start: thought answer\n{self._thought()}\nanswer: {_rule(grammar)}")

    def _thought(self) -> str:
        """The rule of what remains of a thought, with its end and the lines after it."""
        assert self.thought is not None
        close = self.thought[1]
        if close in self._control:
            return f"thought: /(?s:.*)/ {self._lark(close)} /\\n{{0,2}}/"
        escaped = re.sub(r"([/.|\[\]])", r"\\\1", close)
        return f"thought: thinking /\\n{{0,2}}/\nthinking[lazy]: /(?s:.*){escaped}/"

    def _lark(self, text: str) -> str:
        """A text in Lark, in which tokens of their own are named by their numbers."""
        parts = re.split("(" + "|".join(map(re.escape, sorted(MARKS, key=len, reverse=True))) + ")", text)
        return " ".join(
            f"<[{self._tokens[part]}]>" if part in self._tokens else json.dumps(part, ensure_ascii=False)
            for part in parts if part
        )  # fmt: skip

    def _told(self, messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
        """Messages that begin with what the model has to know of its tools."""
        lines = "\n".join(json.dumps(_function(tool), ensure_ascii=False) for tool in tools)
        call = self.form.call.replace('"NAME"', "function name").replace("ARGS", "object of its arguments")
        told = f"You may call functions. They are:\n{lines}\nTo call one, reply with nothing but\n{call}"
        return _in_system(messages, told, user="system" not in self._source or "not supported" in self._source)


def _rule(grammar: Grammar) -> str:
    """A grammar as the right side of a rule."""
    if grammar.kind in ("json", "schema"):
        return f"%json {json.dumps(schema_of(grammar))}"
    if grammar.kind == "regex":
        return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", grammar.text) + "/"
    return f"%lark {{\n{grammar.text}\n}}"


def _function(tool: Tool) -> dict[str, Any]:
    """A tool's name, description and parameters."""
    return dict(tool.get("function", tool))


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of a function's parameters, as far as they are any."""
    schema = function.get("parameters")
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _arguments(function: Mapping[str, Any]) -> Any:
    """The schema of arguments as a grammar has it: in the form in which templates write JSON, and nothing unknown."""
    schema = function.get("parameters") or {"properties": {}}
    if not isinstance(schema, Mapping):
        raise GrammarError(f"the parameters of the tool {function['name']} are no JSON schema")
    schema = {"type": "object", **schema}
    return prepared(schema, whitespace_flexible=False, item_separator=", ", key_separator=": ")


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """Messages in which each call has an id, and what it returned the same: the next one's where none is said."""
    made, open_ = list[Message](), list[str]()
    for at, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            named = [{**call, "id": call.get("id") or f"call_{at}_{number}"} for number, call in enumerate(calls)]
            message, open_ = {**message, "tool_calls": named}, [call["id"] for call in named]
        elif message.get("role") == "tool":
            found = message.get("tool_call_id") or next(iter(open_), "")
            message, open_ = {**message, "tool_call_id": found}, [one for one in open_ if one != found]
        made.append(message)
    return made


def _with_objects(message: Message, *, short_ids: bool) -> Message:
    """A message whose calls' arguments are objects, and whose ids have nine letters where they must."""
    made = dict(message)
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_with_object(call, short_ids=short_ids) for call in calls]
        made["content"] = message.get("content") or ""
    if short_ids and isinstance(made.get("tool_call_id"), str):
        made["tool_call_id"] = _short(made["tool_call_id"])
    return made


def _with_object(call: Mapping[str, Any], *, short_ids: bool) -> Mapping[str, Any]:
    function = dict(call.get("function", call))
    given = function.get("arguments") or {}
    try:
        function["arguments"] = json.loads(given) if isinstance(given, str) else given
    except ValueError:  # the model's, which made it wrong
        function["arguments"] = {"text": given}
    made = {"type": "function", **call, "function": function}
    if short_ids:
        made["id"] = _short(str(call.get("id", "")))
    return made


def _short(name: str) -> str:
    """Nine letters for an id, which Mistral's templates insist on."""
    return name if len(name) == 9 and name.isalnum() else hashlib.sha256(name.encode()).hexdigest()[:9]


def _as_texts(messages: Sequence[Message], form: Form, *, returned: bool = True) -> list[Message]:
    """Calls as the model's texts and, with `returned`, what they returned as the user's."""
    made: list[Message] = []
    for message in messages:
        role, text = message.get("role"), message.get("content") or ""
        if calls := [_written(form, call["function"]) for call in message.get("tool_calls") or ()]:
            text = f"{text}\n{form.before}{(form.join or chr(10)).join(calls)}{form.after}".lstrip("\n")
        if role == "tool" and returned:
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            if made and made[-1]["role"] == "user" and isinstance(made[-1]["content"], str):  # turns take turns
                text = f"{made.pop()['content']}\n{text}"
        made.append({"role": role, "content": text} if calls or role != message.get("role") else message)
    return made


def _as_observed(messages: Sequence[Message]) -> list[Message]:
    """Calls as messages of their own, and what they returned as observations."""
    made: list[Message] = []
    for message in messages:
        calls, text = message.get("tool_calls") or (), message.get("content")
        if message.get("role") == "tool":
            message = {**message, "role": "observation"}
        if text or not calls:
            made.append({name: value for name, value in message.items() if name != "tool_calls"})
        for function in (call["function"] for call in calls):
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            made.append({"role": "assistant", "metadata": function["name"], "content": arguments})
    return made


def _written(form: Form, function: Mapping[str, Any]) -> str:
    """A call as the model wrote it."""
    given = function["arguments"]
    if form.earlier is not None and isinstance(given, Mapping):
        words = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
        head, _, tail = form.earlier.rpartition("WORDS")
        return head.replace("NAME", function["name"]) + words + tail
    head, _, tail = form.call.rpartition("ARGS")
    return head.replace("NAME", function["name"]) + json.dumps(given, ensure_ascii=False) + tail


def _in_system(messages: list[Message], more: str | Mapping[str, Any], *, user: bool = False) -> list[Message]:
    """Messages with more, a text or values, in the first one, which is the system's or, if `user`, the user's."""
    values = {} if isinstance(more, str) else more
    text = more if isinstance(more, str) else ""
    if messages and messages[0].get("role") == ("user" if user else "system"):
        first, rest = messages[0], messages[1:]
        said = first.get("content") or ""
        parts = [text, said] if user else [said, text]
        content = "\n\n".join(filter(None, parts)) if isinstance(said, str) else [{"type": "text", "text": text}, *said]
        return [{**first, "content": content, **values}, *rest]
    return [{"role": "user" if user else "system", "content": text, **values}, *messages]
