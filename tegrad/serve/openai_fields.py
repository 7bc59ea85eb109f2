"""Fields of OpenAI's requests, and what they ask for: a `Chat`, how tokens are taken, what an answer keeps to.

Fields are OpenAI's, with what llama.cpp's server and vLLM have besides: `top_k`, `min_p`, `repeat_penalty`,
`repeat_last_n`, `grammar`, `chat_template_kwargs`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from tegrad.llm.errors import ModelError
from tegrad.llm.grammar import Grammar
from tegrad.llm.sampler import (
    BIASES,
    HISTORY,
    LARGEST_TOP_K,
    LEAST_TEMPERATURE,
    LEAST_TOP_P,
    LIKELIEST,
    own_options,
)
from tegrad.llm.sampling import Settings
from tegrad.llm.tokenizer import Tokenizer
from tegrad.serve.conversation import Chat, Wanted
from tegrad.serve.failures import SHOWN, Failure, unread
from tegrad.serve.fields import Absent, Dictionary, Either, Field, Flag, Listed, Number, Object, Tagged, Text
from tegrad.serve.model import Model

JSON: TypeAlias = dict[str, Any]

MOST_ANSWERS: Final = 64
MOST_TOOLS: Final = 1024
"""More than the 128 that OpenAI takes, as others do: coding tools have those of all their servers."""
LONGEST_NAME: Final = 128
"""Characters of a function's: those that programs make of paths are longer than the 64 that OpenAI allows."""
MOST_STOPS: Final = 64
LONGEST_STOP: Final = 256
"""Characters; each piece of text is compared with every beginning of it."""
BAN: Final = -100.0
"""The bias that OpenAI's documentation says bans a token."""


def whole(low: int, high: int) -> Number:
    """A whole number."""
    return Number(low, high, whole=True)


STOP: Final = Either((Text(most=LONGEST_STOP), Listed(Text(most=LONGEST_STOP), most=MOST_STOPS)))
GRAMMAR: Final = Either((
    Text(),
    Object({
        "kind": Field(Text(("lark", "regex", "schema", "json")), required=True),
        "text": Field(Text(), ""),
    }),
))  # fmt: skip
LIMIT: Final = Either((whole(-1, -1), whole(1, (1 << 31) - 1)))
"""Tokens of an answer; the samples of LM Studio and llama.cpp have -1."""
SAMPLED: Final[Mapping[str, Field]] = {
    "temperature": Field(Number(0, 2), 1.0, about="0 takes the likeliest token", own=True),
    "top_p": Field(Number(0, 1), 1.0, own=True),
    "top_k": Field(whole(-1, LARGEST_TOP_K), 0, about="0 and -1 keep all", own=True),
    "min_p": Field(Number(0, 1), 0.0, own=True),
    "presence_penalty": Field(Number(-2, 2), 0.0),
    "frequency_penalty": Field(Number(-2, 2), 0.0),
    "repeat_penalty": Field(Number(1e-3, 1e3), 1.0, own=True),
    "repeat_last_n": Field(whole(0, HISTORY), 64, about="tokens that penalties look back on", own=True),
    "logit_bias": Field(
        Dictionary(Number(BAN, -BAN), most=BIASES), about="by token; the least one bans the token"
    ),
    "seed": Field(whole(-(1 << 63), (1 << 64) - 1), about="with it, an answer comes again"),
    "stop": Field(STOP, ()),
    "max_tokens": Field(LIMIT, about="-1, or none, is as many as the context holds"),
    "n": Field(whole(1, MOST_ANSWERS), 1, about="answers"),
    "timeout": Field(Number(0, 86400), about="seconds after which an answer ends, wherever it is"),
    "grammar": Field(GRAMMAR, about="that the answer keeps to: in llguidance's Lark dialect, or of another kind"),
}  # fmt: skip
"""How tokens are taken, of all requests for an answer."""
STREAMED: Final[Mapping[str, Field]] = {
    "model": Field(Text(), about="a name of /v1/models; the first one if left out"),
    "stream": Field(Flag(), False),
    "stream_options": Field(Object({"include_usage": Field(Flag(), False)})),
}
_PART: Final = Object({"text": Field(Text(), required=True)})
_REFUSED: Final = Object({"refusal": Field(Text(), required=True)})
_TEXTS: Final = frozenset({"text", "refusal"})
"""What a part of a message has that is text."""
_KINDS: Final = {**dict.fromkeys(("text", "input_text", "output_text"), _PART), "refusal": _REFUSED}
CONTENT: Final = Either((Text(), Listed(Tagged("type", _KINDS, others=True))))
"""Of a chat or a response, whose names of parts programs mix."""
NAMED: Final[Mapping[str, Field]] = {"name": Field(Text())}
FUNCTION_CALL: Final = Object({
    "name": Field(Text(), required=True),
    "arguments": Field(Either((Text(), Dictionary())), "{}"),
})  # fmt: skip
CALL: Final = Object({
    "id": Field(Text(), ""),
    "type": Field(Text(("function",)), "function"),
    "function": Field(FUNCTION_CALL, required=True),
})  # fmt: skip
_TOLD: Final = Object({"content": Field(CONTENT, required=True), **NAMED})
MESSAGE: Final = Tagged("role", {
    "system": _TOLD,
    "developer": _TOLD,
    "user": _TOLD,
    "assistant": Object({
        "content": Field(CONTENT, ""),
        "reasoning_content": Field(Text()),
        "tool_calls": Field(Listed(CALL, most=MOST_TOOLS)),
        **NAMED,
    }),
    "tool": Object({"content": Field(CONTENT, ""), "tool_call_id": Field(Text()), **NAMED}),
})  # fmt: skip
FUNCTION: Final = Object({
    "name": Field(Text(most=LONGEST_NAME), required=True),
    "description": Field(Text()),
    "parameters": Field(Dictionary()),
    "strict": Field(Flag()),
})  # fmt: skip
TOOL: Final = Tagged("type", {"function": Object({"function": Field(FUNCTION, required=True)})}, others=True)
_NAME: Final = Object({"name": Field(Text(), required=True)})
MODE: Final = Field(Text(("auto", "required")), required=True)
_CHOSEN: Final = Object({"function": Field(_NAME, required=True)})
_ALLOWED: Final = Object({
    "mode": MODE,
    "tools": Field(Listed(Tagged("type", {"function": _CHOSEN}, others=True), most=MOST_TOOLS), required=True),
})  # fmt: skip
CHOICE: Final = Either((
    Text(("none", "auto", "required")),
    Tagged("type", {"function": _CHOSEN, "allowed_tools": Object({"allowed_tools": Field(_ALLOWED, required=True)})}),
))  # fmt: skip
SCHEMA: Final = Object({"name": Field(Text()), "schema": Field(Dictionary(), about="else any object")})
FORMAT: Final = Tagged("type", {
    "text": Object({}),
    "json_object": Object({"schema": Field(Dictionary())}),
    "json_schema": Object({"json_schema": Field(SCHEMA, required=True)}),
})  # fmt: skip
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
RESERVED: Final = frozenset({"messages", "tools", "reply", "add_generation_prompt", "documents", "self"})
"""What a template is given by itself."""
CHAT: Final = Object({
    **STREAMED,
    "messages": Field(Listed(MESSAGE, least=1), required=True),
    **SAMPLED,
    "max_completion_tokens": Field(LIMIT, about="the newer name of max_tokens"),
    "logprobs": Field(Flag(), False),
    "top_logprobs": Field(whole(0, LIKELIEST)),
    "tools": Field(Listed(TOOL, most=MOST_TOOLS), (), about="functions; others are left out"),
    "tool_choice": Field(CHOICE, "auto"),
    "parallel_tool_calls": Field(Flag(), True),
    "response_format": Field(FORMAT),
    "reasoning_effort": Field(Text(EFFORTS), about='"none" has the template leave out thoughts'),
    "chat_template_kwargs": Field(Dictionary(), about="for the model's template, such as enable_thinking"),
})  # fmt: skip
TOKEN: Final = whole(0, (1 << 31) - 1)
PROMPT: Final = Either((
    Text(),
    Listed(Text(), 1, MOST_ANSWERS),
    Listed(TOKEN, 1),
    Listed(Listed(TOKEN, 1), 1, MOST_ANSWERS),
))  # fmt: skip
COMPLETION: Final = Object({
    **STREAMED,
    "prompt": Field(PROMPT, required=True, about="a text or its tokens, or several"),
    **SAMPLED,
    "max_tokens": Field(whole(-1, (1 << 31) - 1), 16, about="-1 is as many as the context holds"),
    "best_of": Field(whole(1, MOST_ANSWERS)),
    "echo": Field(Flag(), False, about="the prompt comes first, with logprobs of its own"),
    "suffix": Field(Absent("texts are only continued here, leave it out")),
    "logprobs": Field(whole(0, LIKELIEST), about="with so many likeliest tokens"),
})  # fmt: skip
EMBEDDINGS: Final = Object({
    "model": STREAMED["model"],
    "input": Field(
        Either((Text(), Listed(Text(), 1, 2048), Listed(TOKEN, 1), Listed(Listed(TOKEN, 1), 1, 2048))),
        required=True,
    ),
    "encoding_format": Field(Text(("float", "base64")), "float"),
    "dimensions": Field(whole(1, 1 << 20), about="the first of them, to length 1 again"),
})  # fmt: skip


def sampled(
    body: Mapping[str, Any], model: Model, logprobs: int | None, limit: int | None = None,
    rows: Mapping[str, Field] = SAMPLED,
) -> Wanted:  # fmt: skip
    """How a request wants its tokens taken, by the fields of `SAMPLED` that it has, `rows` in their place; Failure.

    What it leaves out is the model's own, or else the default.
    """
    tokenizer, usual = model.tokenizer, {**SAMPLED, **rows}
    said = {name: body[name] for name in SAMPLED if body.get(name) is not None}
    own = own_options(model.about.metadata, said)
    body = {**{name: usual[name].default for name in SAMPLED}, **own, **said}
    temperature = body["temperature"]
    try:
        settings = Settings(
            temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
            top_p=max(body["top_p"], LEAST_TOP_P),
            min_p=body["min_p"],
            top_k=max(body["top_k"], 0),
            repeat=body["repeat_penalty"],
            presence=body["presence_penalty"],
            frequency=body["frequency_penalty"],
            last_n=body["repeat_last_n"],
            biases=_biases(body["logit_bias"] or {}, tokenizer),
            logprobs=logprobs,
        )
    except ModelError as error:
        raise Failure(str(error)) from error
    stops = list(filter(None, [body["stop"]] if isinstance(body["stop"], str) else body["stop"]))
    seed = None if body["seed"] is None else body["seed"] % (1 << 63)
    most = limit or body["max_tokens"]
    return Wanted(
        settings, None if most == -1 else most, [stop for stop in stops if stop], seed, body["n"], body["timeout"]
    )


def _biases(given: Mapping[str, float], tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for name, value in given.items():
        token = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else -1
        if not 0 <= token < len(tokenizer):
            shown = name[:SHOWN]
            raise Failure(f"logit_bias names {shown!r}: give tokens from 0 to {len(tokenizer) - 1}", param="logit_bias")
        found[token] = -np.inf if value <= BAN else value
    return tuple(found.items())


def wanted_logprobs(body: JSON) -> int | None:
    """Of a chat: how many likeliest tokens come with each; None where no probabilities are wanted."""
    if body["top_logprobs"] and not body["logprobs"]:
        raise Failure("top_logprobs is given without logprobs: set logprobs to true", param="top_logprobs")
    return (body["top_logprobs"] or 0) if body["logprobs"] else None


def chat_of(body: JSON, model: str) -> Chat:
    """The conversation of a request to a model; Failure."""
    tools, given = functions(_functions(body["tools"])), body["tool_choice"]
    if not isinstance(given, str) and given["type"] == "allowed_tools":
        allowed = given["allowed_tools"]
        tools, given = only(tools, _functions(allowed["tools"])), allowed["mode"]
    choice = given if isinstance(given, str) else given["function"]["name"]
    messages = [message(one, f"messages[{at}]", model) for at, one in enumerate(body["messages"])]
    return Chat(
        messages, tools, chosen(choice, tools, named=not isinstance(given, str)),
        body["parallel_tool_calls"], grammar_of(body["grammar"], body["response_format"]),
        template_values(body["reasoning_effort"], body["chat_template_kwargs"]),
    )  # fmt: skip


def message(one: Mapping[str, Any], at: str, model: str) -> JSON:
    """A message as templates take it; Failure for what is no text, unless a tool returned it, or the assistant said it,
    such as a thought in a form that others have: that is left out."""
    made = {name: value for name, value in one.items() if value is not None}
    made["role"] = "system" if made["role"] == "developer" else made["role"]
    content = made["content"]
    if made["role"] == "assistant" and not isinstance(content, str):
        content = [part for part in content if _TEXTS & part.keys()]
    made["content"] = noted(content) if made["role"] == "tool" else joined(content, f"{at}.content", model)
    return made


def joined(content: str | Sequence[Mapping[str, Any]], at: str, model: str, between: str = "") -> str:
    """The text of content, which may have parts; Failure for one that is no text, such as a picture."""
    for number, part in enumerate(() if isinstance(content, str) else content):
        if not _TEXTS & part.keys():
            raise unread(f"{at}[{number}]", part["type"], model)
    return noted(content, between)


def noted(content: str | Sequence[Mapping[str, Any]], between: str = "") -> str:
    """The text of content; what is no text is named, so that a conversation in which a tool returned it can go on."""
    return content if isinstance(content, str) else between.join(map(_text, content))


def _text(part: Mapping[str, Any]) -> str:
    found: str | None = part.get("text", part.get("refusal"))
    return f"[{part['type']} left out: only text can be read]" if found is None else found


def functions(given: Sequence[Mapping[str, Any]]) -> list[JSON]:
    """Functions as templates take them; Failure for two of one name."""
    names = Counter(one["name"] for one in given)
    if double := {name for name, count in names.items() if count > 1}:
        raise Failure(
            f"the tools have several functions named {min(double)!r}, or none: give each a name", param="tools"
        )
    nothing = {"type": "object", "properties": {}}
    return [
        {
            "type": "function",
            "function": {
                "name": one["name"],
                **({"description": one["description"]} if one["description"] else {}),
                "parameters": nothing if one["parameters"] is None else one["parameters"],
            },
        }
        for one in given
    ]


def _functions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of tools that are functions."""
    return [tool["function"] for tool in tools if tool["type"] == "function"]


def only(tools: Sequence[JSON], allowed: Sequence[Mapping[str, Any]]) -> list[JSON]:
    """Functions of which only some may be called: the model is told of no others."""
    names = {one["name"] for one in allowed}
    return [tool for tool in tools if tool["function"]["name"] in names]


def chosen(choice: str, tools: Sequence[JSON], *, named: bool) -> str:
    """Which function must be called; Failure where there is none."""
    if named and choice not in [tool["function"]["name"] for tool in tools]:
        raise Failure(f"tool_choice names {choice!r}, which tools do not have: give that tool", param="tool_choice")
    if choice == "required" and not tools:
        raise Failure("tool_choice requires a call and there are no tools: give some", param="tool_choice")
    return choice


def grammar_of(grammar: Any, form: Mapping[str, Any] | None) -> Grammar | None:
    """What an answer keeps to."""
    kind = "text" if form is None else form["type"]
    if grammar is not None and kind != "text":
        raise Failure("grammar and response_format are both given: choose one", param="grammar")
    if grammar is not None:
        return Grammar("lark", grammar) if isinstance(grammar, str) else Grammar(grammar["kind"], grammar["text"])
    if form is None or kind == "text":
        return None
    schema = form["schema"] if kind == "json_object" else form["json_schema"]["schema"]
    return Grammar("json") if schema is None else Grammar("schema", json.dumps(schema))


def template_values(effort: str | None, more: Mapping[str, Any] | None) -> JSON:
    """What a template is told besides."""
    if taken := sorted(RESERVED & set(more or {})):
        raise Failure(
            f"chat_template_kwargs has {taken[0]!r}, which the server gives: leave it out", param="chat_template_kwargs"
        )
    told = {"enable_thinking": effort != "none", "reasoning_effort": effort} if effort is not None else {}
    return {**told, **(more or {})}


def several(given: Any) -> list[Any]:
    """Texts or lists of tokens, of one or several."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def known(tokens: list[int], tokenizer: Tokenizer, param: str) -> list[int]:
    """Tokens, all of the vocabulary; Failure."""
    if (largest := max(tokens)) >= len(tokenizer):
        raise Failure(f"{param} has token {largest}: the vocabulary has {len(tokenizer)}", param=param)
    return tokens
