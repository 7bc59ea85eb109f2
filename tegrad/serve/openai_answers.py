"""What OpenAI's API says: choices of chats and completions, whole or in parts, usage and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tegrad.llm.sampler import Logprobs
from tegrad.llm.tokenizer import Stream, Tokenizer
from tegrad.llm.tools import Arguments, Call, Text, Thinking
from tegrad.serve.conversation import Called, Part, Reply, Said, Scored
from tegrad.serve.failures import Failure
from tegrad.serve.model import Model
from tegrad.serve.openai_fields import JSON

LEAST_LOGPROB: Final = -9999.0
"""What stands for the logarithm of 0, which JSON cannot write."""


def told(error: Failure) -> JSON:
    """The JSON of a failure, in OpenAI's shape."""
    kind = {429: "rate_limit_error", 401: "authentication_error", 403: "permission_error"}.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


class Chats:
    """Replies to chats as OpenAI writes them, whole or in parts: the choices of an answer."""

    prefix, object = "chatcmpl", "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, model: Model) -> None:
        self._tokenizer = model.tokenizer
        self._called: dict[int, int] = {}
        """Replies that a part of came, with their calls so far."""

    def whole(self, at: int, said: Said, *, logs: bool) -> JSON:
        message: JSON = {"role": "assistant", "content": said.text or (None if said.calls else "")}
        message["refusal"] = None
        if said.thinking:
            message["reasoning_content"] = said.thinking
        if said.calls:
            message["tool_calls"] = [call_of(call) for call in said.calls]
        return {
            "index": at, "message": message, "logprobs": self._logs(said.scored) if logs else None,
            "finish_reason": ENDINGS[said.ending or "stop"],
        }  # fmt: skip

    def part(self, at: int, part: Part, *, logs: bool) -> JSON:
        delta: JSON = {} if at in self._called else {"role": "assistant", "content": ""}
        self._called.setdefault(at, 0)
        calls: dict[int, JSON] = {}
        for event in part.events:
            match event:
                case Text(text):
                    delta["content"] = delta.get("content", "") + text
                case Thinking(text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case Call(index, name):
                    calls[index] = {"index": index, **call_of(Called(name))}
                case Arguments(index, text):
                    one = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    one["function"]["arguments"] += text
        if calls:
            delta["tool_calls"] = list(calls.values())
        return {
            "index": at, "delta": delta, "logprobs": self._logs(part.scored) if logs and part.scored else None,
            "finish_reason": part.ending and ENDINGS[part.ending],
        }  # fmt: skip

    def _logs(self, scored: Sequence[Scored]) -> JSON:
        return {"content": scores(self._tokenizer, scored), "refusal": None}


def scores(tokenizer: Tokenizer, scored: Sequence[Scored]) -> list[JSON]:
    """Tokens with their log-probabilities and those of the likeliest ones."""

    def one(token: int, logprob: float) -> JSON:
        data = tokenizer.piece(token, special=True)
        return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}

    return [
        {**one(each.token, each.logprobs.taken), "top_logprobs": [one(*likely) for likely in each.logprobs.likeliest]}
        for each in scored
    ]


ENDINGS: Final[Mapping[str, str]] = {"stop": "stop", "length": "length", "calls": "tool_calls"}


def call_of(call: Called) -> JSON:
    """A call as OpenAI writes it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def finite(logprob: float) -> float:
    """As JSON can write it."""
    return max(logprob, LEAST_LOGPROB)


@dataclass(frozen=True, slots=True)
class Echoed:
    """A prompt that stands in front of its answers."""

    text: str
    tokens: Sequence[int] = ()
    scores: Sequence[Logprobs] = ()
    """Of the tokens but the first, of which nothing is known."""


class Completions:
    """The same of replies to texts."""

    prefix = "cmpl"
    object = chunk = "text_completion"

    def __init__(self, model: Model, echoed: Sequence[Echoed], count: int) -> None:
        self._tokenizer = model.tokenizer
        self._echoed = {at * count + of: one for at, one in enumerate(echoed) for of in range(count)}
        """Prompts whose replies have not begun."""
        self._offsets: dict[int, int] = {}

    def whole(self, at: int, said: Said, *, logs: bool) -> JSON:
        return self.part(at, Part([Text(said.text)], said.scored, said.ending), logs=logs)

    def part(self, at: int, part: Part, *, logs: bool) -> JSON:
        text = "".join(event.text for event in part.events if isinstance(event, Text))
        scores: JSON = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if (before := self._echoed.pop(at, None)) is not None:
            text, self._offsets[at] = before.text + text, len(before.text)
            self._add_prompt(scores, before)
        self._offsets.setdefault(at, 0)
        for one in part.scored:
            self._add(scores, one.token, one.logprobs, self._offsets[at])
            self._offsets[at] += len(self._text(one.token))
        told = scores if logs and scores["tokens"] else None
        return {"index": at, "text": text, "logprobs": told, "finish_reason": part.ending and ENDINGS[part.ending]}

    def _add_prompt(self, scores: JSON, prompt: Echoed) -> None:
        stream, offset = Stream(self._tokenizer), 0
        for token, logprobs in zip(prompt.tokens, (None, *prompt.scores), strict=False):
            self._add(scores, token, logprobs, min(offset, len(prompt.text)))
            offset += len(stream.push(token))

    def _add(self, scores: JSON, token: int, logprobs: Logprobs | None, offset: int) -> None:
        """A token, with its log-probability if it has one."""
        scores["tokens"].append(self._text(token))
        scores["token_logprobs"].append(logprobs and finite(logprobs.taken))
        likeliest = logprobs and {self._text(likely): finite(value) for likely, value in logprobs.likeliest}
        scores["top_logprobs"].append(likeliest)
        scores["text_offset"].append(offset)

    def _text(self, token: int) -> str:
        return self._tokenizer.piece(token, special=True).decode(errors="replace")


def usage(replies: Sequence[Reply], count: int) -> JSON:
    """Tokens of all replies; of `count` to one prompt it counts once, and what was found of it by the first."""
    firsts, made = [one.usage for one in replies[::count]], sum(one.usage.completion for one in replies)
    prompt, cached = sum(one.prompt for one in firsts), sum(one.cached for one in firsts)
    return {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip
