"""Anthropic's API of messages, which coding tools speak; docs/serve-anthropic.md tells it all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Final

from tegrad.llm.answer import Usage
from tegrad.llm.tools import Arguments, Call, Text, Thinking
from tegrad.serve import conversation, fields
from tegrad.serve.anthropic_fields import COUNT, MESSAGES, chat_of, thinks, wanted_of
from tegrad.serve.conversation import Called, Part, Reply
from tegrad.serve.exchange import Api, Exchange, Voice, named
from tegrad.serve.failures import Failure
from tegrad.serve.model import Model, Models
from tegrad.serve.openai_fields import JSON

_KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Kinds of errors by status; others are `invalid_request_error`."""


def _told(error: Failure) -> JSON:
    kind = _KINDS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


async def _count(models: Models, exchange: Exchange) -> None:
    body = await exchange.read(COUNT)
    name = models.find(body["model"]).name
    chat = await exchange.work(lambda: chat_of(body, name))
    async with models.use(body["model"]) as model:
        prompt = await conversation.chat_prompt(model, chat)
    await exchange.reply({"input_tokens": len(prompt.tokens)})


async def _messages(models: Models, exchange: Exchange) -> None:
    body = await exchange.read(MESSAGES)
    name = models.find(body["model"]).name
    chat = await exchange.work(lambda: chat_of(body, name))
    async with models.use(body["model"]) as model:
        wanted = wanted_of(body, model)
        prompt = await conversation.chat_prompt(model, chat)
        message = _Message(model.about.name, thinks=thinks(body))
        with conversation.asked(model, [prompt], wanted) as (reply,):
            async with aclosing(reply.parts()) as parts:
                async for part in parts:
                    for event in message.add(part, reply.usage):
                        if body["stream"]:
                            await exchange.event(event)
            message.end(_reason(model, reply, message, body["max_tokens"]), reply)
            if body["stream"]:
                await exchange.event({
                    "type": "message_delta", "usage": message.whole["usage"],
                    "delta": {name: message.whole[name] for name in ("stop_reason", "stop_sequence")},
                })  # fmt: skip
                await exchange.end(named({"type": "message_stop"}))
            else:
                await exchange.reply(message.whole)


def _reason(model: Model, reply: Reply, message: _Message, most: int) -> str:
    """Why an answer ended."""
    if message.ending == "calls":
        return "tool_use"
    if message.ending == "stop":
        return "end_turn" if reply.stop is None else "stop_sequence"
    usage = reply.usage
    full = usage.completion < most and usage.prompt + usage.completion >= model.context
    return "model_context_window_exceeded" if full else "max_tokens"


class _Message:
    """A message as it comes to be, in blocks, and the events on its way."""

    def __init__(self, model: str, *, thinks: bool) -> None:
        self._thinks = thinks
        self._call: Called | None = None
        """The call that the last block is."""
        self._open = False
        """The last block may grow."""
        self._begun = False
        self.ending: conversation.Ending | None = None
        self._blocks: list[JSON] = []
        self.whole: JSON = {
            "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model,
            "content": self._blocks, "stop_reason": None, "stop_sequence": None, "usage": {},
        }  # fmt: skip

    def add(self, part: Part, usage: Usage) -> Iterator[JSON]:
        """The events of a part, in front of the first one that the message has begun."""
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": {**self.whole, "content": [], "usage": _usage(usage)}}
        for event in part.events:
            match event:
                case Thinking(text):
                    if self._thinks:
                        yield from self._grown("thinking", text)
                case Text(text):
                    yield from self._grown("text", text)
                case Call(_, name):
                    yield from self._closed()
                    self._call = Called(name, id=f"toolu_{secrets.token_hex(12)}")
                    yield from self._opened({"type": "tool_use", "id": self._call.id, "name": name, "input": {}})
                case Arguments(_, text):
                    assert self._call is not None
                    self._call.arguments += text
                    yield self._delta("input_json_delta", "partial_json", text)
        if part.ending is not None:
            self.ending = part.ending
            yield from self._closed()

    def end(self, reason: str, reply: Reply) -> None:
        """Why it ended, and what it took."""
        stop = reply.stop if reason == "stop_sequence" else None
        self.whole |= {"stop_reason": reason, "stop_sequence": stop, "usage": _usage(reply.usage)}

    def _grown(self, kind: str, text: str) -> Iterator[JSON]:
        """Text of the block that is open, or of a new one."""
        if not self._open or self._blocks[-1]["type"] != kind:
            yield from self._closed()
            yield from self._opened({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._blocks[-1][kind] += text
        yield self._delta(f"{kind}_delta", kind, text)

    def _opened(self, block: JSON) -> Iterator[JSON]:
        self._open = True
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, name: str, text: str) -> JSON:
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _closed(self) -> Iterator[JSON]:
        """The event that ends the open block."""
        if not self._open:
            return
        if self._call is not None:
            self._blocks[-1]["input"], self._call = self._call.object, None
        self._open = False
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _usage(usage: Usage) -> JSON:
    """Tokens; those of the prompt that were in the cache count apart."""
    return {
        "input_tokens": usage.prompt - usage.cached, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached, "output_tokens": usage.completion,
    }  # fmt: skip


API: Final = Api(Voice(_told, named, idle=named({"type": "ping"})), {
    ("POST", "/v1/messages"): (_messages, fields.operation("Answer a conversation", MESSAGES)),
    ("POST", "/v1/messages/count_tokens"): (_count, fields.operation("Tokens of a conversation", COUNT)),
})  # fmt: skip
