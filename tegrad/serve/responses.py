"""OpenAI's API of responses, without state: nothing is stored, and each request has all of its conversation.

A reply's parts become output items, thoughts, messages and calls, in the order in which they come. The events of a
stream are the steps of that; an answer in one piece is what they lead to.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from starlette.routing import Route

from tegrad.llm.answer import Usage
from tegrad.llm.sampler import LIKELIEST
from tegrad.llm.tokenizer import Tokenizer
from tegrad.llm.tools import Arguments, Call, Text, Thinking
from tegrad.serve import conversation, fields
from tegrad.serve.conversation import Called, Chat, Part, Scored
from tegrad.serve.exchange import Endpoint, Exchange, Voice, compact
from tegrad.serve.fields import Absent, Dictionary, Either, Field, Flag, Listed, Number, Object, Tagged
from tegrad.serve.model import Models
from tegrad.serve.openai_answers import scores, told
from tegrad.serve.openai_fields import (
    EFFORTS,
    FUNCTION,
    JSON,
    MOST_TOOLS,
    REFUSED,
    SAMPLED,
    chosen,
    functions,
    grammar_of,
    joined,
    message,
    sampled,
    template_values,
)

LOGPROBS: Final = "message.output_text.logprobs"
"""What `include` has for log-probabilities."""
_ITS_OWN: Final = ("n", "max_tokens", "stop")
_PART: Final = Object({"text": Field(fields.Text(), required=True)})
_PARTS: Final = Listed(
    Tagged("type", {**dict.fromkeys(("input_text", "output_text", "text"), _PART), "refusal": REFUSED})
)
_CONTENT: Final = Either((fields.Text(), _PARTS))
_THOUGHTS: Final = Listed(Tagged("type", {"reasoning_text": _PART}))
_ITEM: Final = Tagged("type", {
    "message": Object({
        "role": Field(fields.Text(("user", "system", "developer", "assistant")), required=True),
        "content": Field(_CONTENT, required=True),
    }),
    "reasoning": Object({"content": Field(_THOUGHTS, ())}),
    "function_call": Object({
        "call_id": Field(fields.Text(), required=True),
        "name": Field(fields.Text(), required=True),
        "arguments": Field(fields.Text(), required=True),
    }),
    "function_call_output": Object({
        "call_id": Field(fields.Text(), required=True),
        "output": Field(_CONTENT, required=True),
    }),
}, default="message")  # fmt: skip
_CHOICE: Final = Either((
    fields.Text(("none", "auto", "required")),
    Tagged("type", {"function": Object({"name": Field(fields.Text(), required=True)})}),
))  # fmt: skip
_FORMAT: Final = Tagged("type", {
    "text": Object({}),
    "json_object": Object({"schema": Field(Dictionary())}),
    "json_schema": Object({"name": Field(fields.Text()), "schema": Field(Dictionary(), required=True)}),
})  # fmt: skip
RESPONSE: Final = Object({
    "model": Field(fields.Text(), about="a name of /v1/models; the first one if left out"),
    "input": Field(Either((fields.Text(), Listed(_ITEM, least=1))), required=True),
    "instructions": Field(fields.Text(), about="in front of the input, as a system message"),
    "stream": Field(Flag(), False),
    **{name: row for name, row in SAMPLED.items() if name not in _ITS_OWN},
    "max_output_tokens": Field(Number(1, (1 << 31) - 1, whole=True)),
    "tools": Field(
        Listed(Tagged("type", {"function": FUNCTION}, others=True), most=MOST_TOOLS), (),
        about="functions; others, which coding tools always send, are left out",
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


def routes(models: Models) -> list[Route]:
    """The API's routes."""
    return [Route("/v1/responses", Endpoint(VOICE, partial(_response, models)), methods=["POST"])]


def named(event: Mapping[str, Any]) -> bytes:
    """A server-sent event with its type as its name."""
    return f"event: {event.get('type', 'error')}\n".encode() + b"data: " + compact(event) + b"\n\n"


VOICE: Final = Voice(told, named)
OPENAPI: Final[Mapping[str, Any]] = {
    "/v1/responses": {"post": fields.operation("Answer, without state", RESPONSE, streams=True)}
}
"""The paths of this API."""


async def _response(models: Models, exchange: Exchange) -> None:
    body = exchange.read(RESPONSE)
    body["tools"] = [tool for tool in body["tools"] if tool["type"] == "function"]
    chat = _chat(body)
    if body["stream"]:
        exchange.stream()
    async with models.use(body["model"]) as model:
        logprobs = body["top_logprobs"] if LOGPROBS in body["include"] else None
        wanted = sampled(body, model.tokenizer, logprobs, body["max_output_tokens"])
        prompt = await conversation.chat_prompt(model, chat)
        output = _Output(body, model.about.name, model.tokenizer)
        with conversation.asked(model, [prompt], wanted) as (reply,):
            async with aclosing(reply.parts()) as parts:
                async for part in parts:
                    for event in output.add(part):
                        if body["stream"]:
                            await exchange.event(event)
            whole, end = output.end(reply.usage)
            await (exchange.end(named(end)) if body["stream"] else exchange.reply(whole))


def _chat(body: JSON) -> Chat:
    tools = functions(body["tools"])
    given = body["tool_choice"]
    form = body["text"] and body["text"]["format"]
    if form is not None and form["type"] == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    effort = body["reasoning"] and body["reasoning"]["effort"]
    named = not isinstance(given, str)
    return Chat(
        _messages(body), tools, chosen(given["name"] if named else given, tools, named=named),
        body["parallel_tool_calls"], grammar_of(body["grammar"], form),
        template_values(effort, body["chat_template_kwargs"]),
    )  # fmt: skip


def _messages(body: JSON) -> list[JSON]:
    """Items as messages: thoughts and calls belong to the assistant's message beside them."""
    items = body["input"]
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": items}]
    made: list[JSON] = []
    if body["instructions"]:
        made.append({"role": "system", "content": body["instructions"]})
    open_ = False
    """The last message is the assistant's, which what follows may belong to."""
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            made.append({"role": "tool", "tool_call_id": item["call_id"], "content": joined(item["output"])})
        elif kind == "message" and item["role"] != "assistant":
            made.append({"role": item["role"], "content": joined(item["content"])})
        else:
            if not open_ or kind == "reasoning":
                made.append({"role": "assistant", "content": ""})
            _add(made[-1], item)
        open_ = kind in ("reasoning", "function_call") or (kind == "message" and item["role"] == "assistant")
    return [message(one) for one in made]


def _add(said: JSON, item: Mapping[str, Any]) -> None:
    """An item to the assistant's message that it belongs to."""
    if item["type"] == "message":
        said["content"] += joined(item["content"])
    elif item["type"] == "reasoning":
        said["reasoning_content"] = joined(item["content"]) or None
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        said.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


class _Output:
    """A response as it comes to be, and the events on its way."""

    def __init__(self, body: JSON, model: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._numbers = itertools.count()
        self._items: list[JSON] = []
        self._open: str | None = None
        """The kind of the last item, while it may grow."""
        self._thought, self._begun = "", False
        self._ending = "stop"
        self._response: JSON = {
            "id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time()),
            "status": "in_progress", "background": False, "error": None, "incomplete_details": None,
            "instructions": body["instructions"], "max_output_tokens": body["max_output_tokens"], "model": model,
            "output": [], "parallel_tool_calls": body["parallel_tool_calls"], "previous_response_id": None,
            "reasoning": {"effort": body["reasoning"] and body["reasoning"]["effort"], "summary": None},
            "store": False, "temperature": body["temperature"], "top_p": body["top_p"],
            "tool_choice": body["tool_choice"],
            "text": {"format": (body["text"] and body["text"]["format"]) or {"type": "text"}},
            "tools": [{"type": "function", **tool} for tool in body["tools"]], "truncation": "disabled",
            "top_logprobs": body["top_logprobs"], "usage": None, "metadata": body["metadata"] or {},
        }  # fmt: skip

    def add(self, part: Part) -> Iterator[JSON]:
        """The events of a part, in front of the first one that the response has begun."""
        for name in () if self._begun else ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response)
        self._begun = True
        scored = part.scored
        for event in part.events:
            match event:
                case Thinking(text):
                    self._thought += text
                    yield from self._grown("reasoning", text, ())
                case Text(text):
                    yield from self._grown("message", text, scored)
                    scored = ()
                case Call(_, name):
                    yield from self._closed()
                    call = Called(name)
                    item = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": call.id}
                    yield from self._opened({**item, "name": name, "arguments": "", "status": "in_progress"})
                case Arguments(_, text):
                    self._items[-1]["arguments"] += text
                    yield self._event("response.function_call_arguments.delta", **self._place(), delta=text)
        if part.ending is not None:
            self._ending = part.ending
            yield from self._closed()

    def end(self, usage: Usage) -> tuple[JSON, JSON]:
        """The response, and the event with it."""
        status = "incomplete" if self._ending == "length" else "completed"
        thought = len(self._tokenizer.encode(self._thought, bos=False)) if self._thought else 0
        self._response |= {
            "status": status, "output": self._items,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion, "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": usage.prompt + usage.completion,
            },
        }  # fmt: skip
        return self._response, self._event(f"response.{status}", response=self._response)

    def _grown(self, kind: str, text: str, scored: Sequence[Scored]) -> Iterator[JSON]:
        """Text of a message or a thought, of the item that is open or a new one."""
        name, prefix = ("reasoning_text", "rs") if kind == "reasoning" else ("output_text", "msg")
        if self._open != kind:
            yield from self._closed()
            more: JSON = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            item = {"type": kind, "id": f"{prefix}_{secrets.token_hex(12)}", "status": "in_progress", **more}
            yield from self._opened({**item, "content": []})
            part: JSON = {"type": name, "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            yield self._event("response.content_part.added", **self._place(), content_index=0, part=dict(part))
            self._items[-1]["content"].append(part)
        part = self._items[-1]["content"][0]
        part["text"] += text
        logs = {"logprobs": scores(self._tokenizer, scored)} if kind == "message" else {}
        if scored:
            part["logprobs"] += logs["logprobs"]
        yield self._event(f"response.{name}.delta", **self._place(), content_index=0, delta=text, **logs)

    def _opened(self, item: JSON) -> Iterator[JSON]:
        self._open = item["type"]
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))

    def _closed(self) -> Iterator[JSON]:
        """The events that end the open item."""
        if self._open is None:
            return
        item = self._items[-1]
        self._open, item["status"] = None, "incomplete" if self._ending == "length" else "completed"
        if item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._place(), **whole)
        else:
            part = item["content"][0]
            logs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            place = {**self._place(), "content_index": 0}
            yield self._event(f"response.{part['type']}.done", **place, text=part["text"], **logs)
            yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> JSON:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **more: Any) -> JSON:
        return {"type": kind, "sequence_number": next(self._numbers), **more}
