"""Fields of Ollama's requests, and what they ask for. Those that are not here are ignored, as Ollama does."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tegrad.llm.grammar import Grammar
from tegrad.llm.sampler import HISTORY, LARGEST_SETTING, LARGEST_TOP_K, LIKELIEST
from tegrad.serve.conversation import Chat, Wanted, resumed
from tegrad.serve.failures import Failure, unread
from tegrad.serve.fields import Anything, Dictionary, Either, Field, Flag, Listed, Number, Object, Tagged, Text
from tegrad.serve.model import LATEST, About, Model
from tegrad.serve.openai_fields import (
    FUNCTION,
    FUNCTION_CALL,
    JSON,
    MOST_TOOLS,
    STOP,
    functions,
    sampled,
    template_values,
    whole,
)

LONGEST_KEEP_S: Final = 1e9
"""Seconds from which on a model is kept for ever."""
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"(\d+\.?\d*|\.\d+)(" + "|".join(_UNITS) + r"|$)")
_INT: Final = Number(-(1 << 63), (1 << 63) - 1, whole=True, near=True)
_ANY: Final = Number(-LARGEST_SETTING, LARGEST_SETTING, near=True)
_SHARE: Final = Number(0, 1, near=True)

OPTIONS: Final = Object({
    "temperature": Field(Number(0, LARGEST_SETTING, near=True), 0.8, about="0 takes the likeliest token", own=True),
    "top_k": Field(Number(0, LARGEST_TOP_K, whole=True, near=True), 40, about="below 1 keeps all", own=True),
    "top_p": Field(_SHARE, 0.9, own=True),
    "min_p": Field(_SHARE, 0.0, own=True),
    "repeat_penalty": Field(Number(1e-3, LARGEST_SETTING), 1.1, own=True),
    "repeat_last_n": Field(
        _INT, 64, about=f"tokens that penalties look back on, up to {HISTORY}; -1 is so many", own=True
    ),
    "presence_penalty": Field(_ANY, 0.0),
    "frequency_penalty": Field(_ANY, 0.0),
    "seed": Field(_INT, about="with it, an answer comes again; below 0 it is taken by chance"),
    "num_predict": Field(_INT, -1, about="tokens at most; below 1 as many as the context holds"),
    "stop": Field(STOP, ()),
})  # fmt: skip
"""Numbers are taken as Ollama does: of a fraction its whole part, and what is too large as the largest."""
_MODEL: Final[Mapping[str, Field]] = {
    "model": Field(Text(), required=True, about="a name of /api/tags"),
    "keep_alive": Field(
        Either((_ANY, Text())),
        about='seconds, or such as "5m"; below 0 is for ever',
    ),
}
_ANSWERED: Final[Mapping[str, Field]] = {
    **_MODEL,
    "stream": Field(Flag(), True),
    "format": Field(Either((Text(("", "json")), Dictionary())), about="json, or the schema that an answer keeps to"),
    "options": Field(OPTIONS, about="how tokens are taken"),
    "think": Field(Either((Flag(), Text(("low", "medium", "high", "max")))), about="for the model's template"),
    "logprobs": Field(Flag(), False),
    "top_logprobs": Field(whole(0, LIKELIEST), 0),
}
_CALL: Final = Object({"id": Field(Text(), ""), "function": Field(FUNCTION_CALL, required=True)})
MESSAGE: Final = Object({
    "role": Field(Text(("system", "developer", "user", "assistant", "tool")), required=True),
    "content": Field(Text(), ""),
    "thinking": Field(Text()),
    "images": Field(Listed(Anything()), ()),
    "tool_calls": Field(Listed(_CALL, most=MOST_TOOLS), ()),
    "tool_name": Field(Text(), about="the function that returned this"),
    "tool_call_id": Field(Text()),
})  # fmt: skip
CHAT: Final = Object({
    **_ANSWERED,
    "messages": Field(Listed(MESSAGE), (), about="none load the model, or unload it with a keep_alive of 0"),
    "tools": Field(
        Listed(Tagged("type", {"function": Object({"function": Field(FUNCTION, required=True)})}, default="function"),
               most=MOST_TOOLS), (),
    ),
})  # fmt: skip
GENERATE: Final = Object({
    **_ANSWERED,
    "prompt": Field(Text(), "", about="an empty one loads the model, or unloads it with a keep_alive of 0"),
    "system": Field(Text(), ""),
    "raw": Field(Flag(), False, about="the prompt is continued as it is, without the model's template"),
    "images": Field(Listed(Anything()), ()),
    "suffix": Field(Text(), "", about="refused"),
    "template": Field(Text(), "", about="refused"),
    "context": Field(Listed(Anything()), (), about="refused"),
})  # fmt: skip
EMBED: Final = Object({
    **_MODEL,
    "input": Field(Either((Text(), Listed(Text(), most=2048))), required=True),
    "truncate": Field(Flag(), True, about="cut texts that the context has no room for"),
    "dimensions": Field(whole(1, 1 << 20), about="the first of them, to length 1 again"),
})  # fmt: skip
EMBEDDINGS: Final = Object({**_MODEL, "prompt": Field(Text(), "")})
NAMED: Final = Object({
    "model": Field(Text()),
    "name": Field(Text(), about="the old name of model"),
})  # fmt: skip


def name_of(body: JSON) -> str:
    """The model that a request means."""
    name: str = body["model"] or body.get("name") or ""
    return name.removesuffix(LATEST)


def tagged(name: str) -> str:
    """A model's name as Ollama lists it: Open WebUI puts the tag behind each name, and looks for that in the list."""
    return name if ":" in name else name + LATEST


def kept(given: float | str | None) -> float | None:
    """Seconds that a model is kept after its use, as `Models.use` has them; Failure."""
    if given is None:
        return None
    seconds = float(given) if not isinstance(given, str) else _seconds(given)
    return seconds if 0 <= seconds < LONGEST_KEEP_S else math.inf


def _seconds(text: str) -> float:
    sign, parts = (-1 if text.startswith("-") else 1), text.lstrip("+-")
    found = _DURATION.findall(parts)
    if not found or "".join(itertools.chain(*found)) != parts:
        raise Failure(f'keep_alive is {text[:40]!r}: give seconds, or such as "5m" or "1h30m"', param="keep_alive")
    return sign * sum(float(number) * _UNITS.get(unit, 1.0) for number, unit in found)


def wanted_of(body: JSON, model: Model) -> Wanted:
    """How a request wants its tokens taken; Failure."""
    given = body["options"] or OPTIONS.read({})
    last_n, limit, seed = given["repeat_last_n"], given["num_predict"], given["seed"]
    rows = {
        **given,
        "max_tokens": min(limit, (1 << 31) - 1) if limit > 0 else None,
        "repeat_last_n": last_n if last_n is None else HISTORY if last_n < 0 else min(last_n, HISTORY),
        "seed": seed if seed is not None and seed >= 0 else None,
    }  # fmt: skip
    return sampled(rows, model, body["top_logprobs"] if body["logprobs"] else None, rows=OPTIONS.fields)


def grammar_of(body: JSON) -> Grammar | None:
    """What an answer keeps to."""
    form = body["format"]
    if not isinstance(form, str):
        return Grammar("schema", json.dumps(form)) if form is not None else None
    return Grammar("json") if form == "json" else None


def chat_of(body: JSON, about: About, *, thinks: bool) -> Chat:
    """The conversation of a request to a model, which thinks or does not; Failure."""
    for at, one in enumerate(body["messages"]):
        if one["images"]:
            raise unread(f"messages[{at}].images", "a picture", about.name)
    messages, begun = resumed(_messages(body["messages"]))
    tools = functions([tool["function"] for tool in body["tools"]])
    return Chat(messages, tools, grammar=grammar_of(body), values=_values(body, about, thinks=thinks), begun=begun)


def prompt_of(body: JSON, about: About, *, thinks: bool) -> Chat:
    """The conversation that a prompt and a system text are; Failure."""
    refused = {
        "suffix": "texts are only continued here", "template": "the model's own is used",
        "context": "send the conversation to /api/chat",
    }  # fmt: skip
    for name, why in refused.items():
        if body[name]:
            raise Failure(f"{name} is given, and {why}: leave it out", param=name)
    if body["images"]:
        raise unread("images", "a picture", about.name)
    said = [("system", body["system"]), ("user", body["prompt"])]
    messages = [{"role": role, "content": text} for role, text in said if text]
    return Chat(messages, grammar=grammar_of(body), values=_values(body, about, thinks=thinks))


def _values(body: JSON, about: About, *, thinks: bool) -> JSON:
    think = body["think"]
    if think and not thinks:
        raise Failure(f"{about.name} does not support thinking: leave think out", param="think")
    if isinstance(think, str):
        return template_values(think, None)
    return {} if think is None else {"enable_thinking": think}


def _messages(given: Sequence[Mapping[str, Any]]) -> list[JSON]:
    """Messages as templates take them: calls and what they returned have ids, which Ollama's need not."""
    made: list[JSON] = []
    numbers = itertools.count()
    open_: list[tuple[str, str]] = []
    """Calls by name and id, of which nothing returned yet."""
    for one in given:
        role = "system" if one["role"] == "developer" else one["role"]
        message: JSON = {"role": role, "content": one["content"]}
        if one["thinking"]:
            message["reasoning_content"] = one["thinking"]
        if one["tool_calls"]:
            message["tool_calls"] = [
                {"id": call["id"] or f"call_{next(numbers)}", "type": "function", "function": call["function"]}
                for call in one["tool_calls"]
            ]
            open_ = [(call["function"]["name"], call["id"]) for call in message["tool_calls"]]
        if one["role"] == "tool":
            asked = next((call for call in open_ if one["tool_name"] in (None, call[0])), (one["tool_name"] or "", ""))
            open_ = [call for call in open_ if call != asked]
            message |= {"name": asked[0], "tool_call_id": one["tool_call_id"] or asked[1]}
        made.append(message)
    return made
