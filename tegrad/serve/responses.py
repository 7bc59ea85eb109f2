"""OpenAI's API of responses, without state: nothing is stored, and each request has all of its conversation.

A reply's parts become output items, thoughts, messages and calls, in the order in which they come. The events of a
stream are the steps of that; an answer in one piece is what they lead to.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any, Final

from tegrad.llm.answer import Usage
from tegrad.llm.tokenizer import Tokenizer
from tegrad.llm.tools import Arguments, Call, Text, Thinking
from tegrad.serve import conversation, fields
from tegrad.serve.conversation import Called, Part, Scored
from tegrad.serve.exchange import Api, Exchange, Voice, named
from tegrad.serve.failures import Failure
from tegrad.serve.model import Models
from tegrad.serve.openai_answers import scores, told
from tegrad.serve.openai_fields import JSON, sampled
from tegrad.serve.responses_fields import LOGPROBS, RESPONSE, chat_of, known_tools, offered


async def _response(models: Models, exchange: Exchange) -> None:
    body = await exchange.read(RESPONSE)
    body["tools"] = known_tools(body)
    name = models.find(body["model"]).name
    chat = await exchange.work(lambda: chat_of(body, name))
    events = _Events(body, name)
    exchange.broken = events.failed
    async with models.use(body["model"]) as model:
        logprobs = body["top_logprobs"] if LOGPROBS in body["include"] else None
        wanted = sampled(body, model, logprobs, body["max_output_tokens"])
        events.response |= {name: getattr(wanted.settings, name) for name in ("temperature", "top_p")}
        prompt = await conversation.chat_prompt(model, chat)
        output = _Output(events, body["tools"], model.tokenizer)
        with conversation.asked(model, [prompt], wanted) as (reply,):
            async with aclosing(reply.parts()) as parts:
                async for part in parts:
                    for event in output.add(part):
                        if body["stream"]:
                            await exchange.event(event)
            whole, end = output.end(reply.usage)
            await (exchange.end(named(end)) if body["stream"] else exchange.reply(whole))


class _Events:
    """A response, and the events that tell of it."""

    def __init__(self, body: JSON, model: str) -> None:
        self._numbers = itertools.count()
        self.response: JSON = {
            "id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time()),
            "status": "in_progress", "background": False, "error": None, "incomplete_details": None,
            "instructions": body["instructions"], "max_output_tokens": body["max_output_tokens"], "model": model,
            "output": [], "parallel_tool_calls": body["parallel_tool_calls"], "previous_response_id": None,
            "reasoning": {"effort": body["reasoning"] and body["reasoning"]["effort"], "summary": None},
            "store": False, "temperature": body["temperature"], "top_p": body["top_p"],
            "tool_choice": body["tool_choice"],
            "text": {"format": (body["text"] and body["text"]["format"]) or {"type": "text"}},
            "tools": body["tools"], "truncation": "disabled",
            "top_logprobs": body["top_logprobs"], "usage": None, "metadata": body["metadata"] or {},
        }  # fmt: skip

    def event(self, kind: str, **more: Any) -> JSON:
        """The next one."""
        return {"type": kind, "sequence_number": next(self._numbers), **more}

    def failed(self, failure: Failure) -> bytes:
        """The events that end a stream that failed: OpenAI's client raises the first, Codex reads but the second."""
        error = told(failure)["error"] | {"code": failure.code or "server_error"}
        self.response |= {"status": "failed", "error": {name: error[name] for name in ("code", "message")}}
        flat = {name: error[name] for name in ("code", "message", "param")}
        first = self.event("error", **flat, error=error)
        return named(first) + named(self.event("response.failed", response=self.response))


class _Output:
    """A response as it comes to be, and the events on its way."""

    def __init__(self, events: _Events, tools: Sequence[JSON], tokenizer: Tokenizer) -> None:
        self._event, self._response, self._tokenizer = events.event, events.response, tokenizer
        self._items: list[JSON] = []
        self._open: str | None = None
        """The kind of the last item, while it may grow."""
        self._heads, self._input = offered(tools), Called("")
        """What calls become, and the one of a custom tool, which is told once all of its text is there."""
        self._thought, self._begun = "", False
        self._ending = "stop"

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
                    self._input = call = Called(name)
                    head = self._heads[name]
                    custom = head["type"] == "custom_tool_call"
                    item = {**head, "id": f"{'ctc' if custom else 'fc'}_{secrets.token_hex(12)}", "call_id": call.id}
                    rest = {"input": ""} if custom else {"arguments": ""}
                    yield from self._opened({**item, **rest, "status": "in_progress"})
                case Arguments(_, text) if self._open == "custom_tool_call":
                    self._input.arguments += text
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
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
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
        elif item["type"] == "custom_tool_call":
            given = self._input.object.get("input", self._input.arguments)
            item["input"] = text = given if isinstance(given, str) else self._input.arguments
            yield self._event("response.custom_tool_call_input.delta", **self._place(), delta=text)
            yield self._event("response.custom_tool_call_input.done", **self._place(), input=text)
        else:
            part = item["content"][0]
            logs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            place = {**self._place(), "content_index": 0}
            yield self._event(f"response.{part['type']}.done", **place, text=part["text"], **logs)
            yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> JSON:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}


API: Final = Api(Voice(told, named), {
    ("POST", "/v1/responses"): (_response, fields.operation("Answer, without state", RESPONSE)),
})  # fmt: skip
