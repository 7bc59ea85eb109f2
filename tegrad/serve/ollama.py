"""Ollama's API: its models, chats, texts and vectors; docs/serve-ollama.md tells it all."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from tegrad import __version__
from tegrad.llm.template import KEY
from tegrad.llm.tools import THOUGHTS
from tegrad.serve import conversation, fields
from tegrad.serve.conversation import Called, Part, Prompt, Reply, Said, Scored
from tegrad.serve.exchange import Api, Exchange, Voice, compact
from tegrad.serve.failures import Failure
from tegrad.serve.model import About, Model, Models, UnknownModel
from tegrad.serve.ollama_fields import (
    CHAT,
    EMBED,
    EMBEDDINGS,
    GENERATE,
    NAMED,
    chat_of,
    grammar_of,
    kept,
    name_of,
    prompt_of,
    tagged,
    wanted_of,
)
from tegrad.serve.openai import shortened
from tegrad.serve.openai_answers import scores
from tegrad.serve.openai_fields import JSON

VERSION: Final = "0.13.0"
"""Clients ask for Ollama's version to know what they may send. The newest of the fields taken here, log-probabilities,
came with 0.12.11 (its release notes)."""
NEVER: Final = "9999-12-31T23:59:59Z"
"""When a model leaves that is kept for ever."""
MEDIA: Final = "application/x-ndjson"
UNMANAGED: Final[Mapping[tuple[str, str], str]] = {
    ("POST", "/api/create"): "models are GGUF files: give one to `tegrad serve`",
    ("POST", "/api/copy"): "a model has one name here: ask for that",
    ("DELETE", "/api/delete"): "a model is removed by `tegrad models rm` where the server runs",
    ("POST", "/api/push"): "models are not published from here: use the hub's own tools",
    ("POST", "/api/blobs/{digest}"): "models are not made of parts here: give a GGUF file to `tegrad serve`",
}
"""What Ollama manages models with, and what is done instead."""


def _told(error: Failure) -> JSON:
    return {"error": str(error)}


def _line(event: Mapping[str, Any]) -> bytes:
    return compact(event) + b"\n"


# ---- models


async def _version(models: Models, exchange: Exchange) -> None:
    await exchange.reply({"version": VERSION, "tegrad": __version__})


async def _tags(models: Models, exchange: Exchange) -> None:
    await exchange.reply({"models": [{**_named(one), "modified_at": _when(one.modified)} for one in models.names()]})


async def _loaded(models: Models, exchange: Exchange) -> None:
    rows = [
        {
            **_named(one.about), "size": one.bytes, "size_vram": one.bytes, "context_length": one.context,
            "expires_at": NEVER if one.expires is None else _when(one.expires),
        }
        for one in models.loaded()
    ]  # fmt: skip
    await exchange.reply({"models": rows})


async def _show(models: Models, exchange: Exchange) -> None:
    one = models.find(name_of(await exchange.read(NAMED)) or None)
    template, said = str(one.metadata.get(KEY, "")), {"general.parameter_count": one.parameters, **one.metadata}
    answers = ["completion", *(["tools"] if template else []), *(["thinking"] if _thinks(one) else [])]
    await exchange.reply({
        "license": str(one.metadata.get("general.license", "")), "modelfile": f"FROM {one.name}\n", "parameters": "",
        "template": template, "details": _details(one), "model_info": {
            name: value for name, value in said.items() if name != KEY
        },
        "capabilities": ["embedding"] if one.embeds else answers, "modified_at": _when(one.modified),
    })  # fmt: skip


async def _pull(models: Models, exchange: Exchange) -> None:
    name = name_of(await exchange.read(NAMED))
    try:
        models.find(name)
    except UnknownModel:
        raise Failure(f"there is no model {name!r} here: get it by `tegrad pull` where the server runs") from None
    await exchange.reply({"status": "success"})


async def _unmanaged(why: str, models: Models, exchange: Exchange) -> None:
    raise Failure(why)


def _named(one: About) -> JSON:
    """A model in a list. Its digest tells one state of its file from another, and is none of its bytes."""
    state = json.dumps([one.name, one.size, one.modified])
    digest = hashlib.sha256(state.encode()).hexdigest()
    name = tagged(one.name)
    return {"name": name, "model": name, "size": one.size, "digest": digest, "details": _details(one)}


def _details(one: About) -> JSON:
    units = {10**9: "B", 10**6: "M", 10**3: "K"}
    unit = next((unit for unit in units if one.parameters >= unit), 1)
    return {
        "parent_model": "", "format": "gguf", "family": one.family, "families": [one.family],
        "parameter_size": f"{one.parameters / unit:.2f}{units.get(unit, '')}", "quantization_level": one.quantization,
    }  # fmt: skip


def _thinks(one: About) -> bool:
    """Whether a model's template knows of thoughts."""
    return any(end in str(one.metadata.get(KEY, "")) for _, end in THOUGHTS)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _use(models: Models, body: JSON) -> AbstractAsyncContextManager[Model]:
    return models.use(name_of(body), kept(body["keep_alive"]))


# ---- answers


async def _chat(models: Models, exchange: Exchange) -> None:
    body = await exchange.read(CHAT)
    if not body["messages"]:
        await _resident(models, exchange, body, _message)
        return
    one = models.find(name_of(body))
    chat = await exchange.work(lambda: chat_of(body, one, thinks=_thinks(one)))
    await _answered(models, exchange, body, lambda model: conversation.chat_prompt(model, chat), _message)


async def _generate(models: Models, exchange: Exchange) -> None:
    body = await exchange.read(GENERATE)
    if not body["prompt"]:
        await _resident(models, exchange, body, _response)
        return
    one = models.find(name_of(body))
    chat = prompt_of(body, one, thinks=_thinks(one))

    async def prompt(model: Model) -> Prompt:
        if not body["raw"] and model.template is not None:
            return await conversation.chat_prompt(model, chat)
        system = f"{body['system']}\n" if body["system"] and not body["raw"] else ""
        return await conversation.text_prompt(model, system + body["prompt"], grammar_of(body))

    await _answered(models, exchange, body, prompt, _response)


_Words = Callable[[str, str, Sequence[Called]], JSON]
"""What came of an answer, text, thought and calls, as an endpoint writes it."""


def _message(text: str, thinking: str, calls: Sequence[Called]) -> JSON:
    made: JSON = {"role": "assistant", "content": text, **({"thinking": thinking} if thinking else {})}
    if calls:
        made["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.object}} for call in calls
        ]
    return {"message": made}


def _response(text: str, thinking: str, calls: Sequence[Called]) -> JSON:
    return {"response": text, **({"thinking": thinking} if thinking else {})}


async def _resident(models: Models, exchange: Exchange, body: JSON, words: _Words) -> None:
    """Load a model, or unload it, and say nothing."""
    one, leaves = models.find(name_of(body)), kept(body["keep_alive"]) == 0
    if not leaves or any(each.about.name == one.name for each in models.loaded()):
        async with _use(models, body):
            pass
    reason = "unload" if leaves else "load"
    await exchange.reply({**_head(one), **words("", "", ()), "done": True, "done_reason": reason})


def _head(one: About) -> JSON:
    return {"model": one.name, "created_at": _when(time.time())}


class _Answer:
    """An answer as it comes, and how far it was told. A call is told once all of its arguments are there."""

    def __init__(self, words: _Words, *, thinks: bool) -> None:
        self.said, self._words, self._thinks = Said(), words, thinks
        self._told = (0, 0, 0)
        """Characters of text and of thought, and calls."""

    def add(self, part: Part) -> JSON | None:
        """What is new with a part; None where nothing is."""
        said = self.said
        said.add(part)
        text, thought, calls = self._told
        done = len(said.calls) - (part.ending is None and bool(said.calls))
        self._told = (len(said.text), len(said.thinking) if self._thinks else 0, done)
        if self._told == (text, thought, calls):
            return None
        return self._words(said.text[text:], self._thought(thought), said.calls[calls:done])

    def whole(self) -> JSON:
        """All of it."""
        return self._words(self.said.text, self._thought(0), self.said.calls)

    def _thought(self, begin: int) -> str:
        return self.said.thinking[begin:] if self._thinks else ""


async def _answered(
    models: Models, exchange: Exchange, body: JSON, prompt: Callable[[Model], Awaitable[Prompt]], words: _Words
) -> None:
    """Have the model answer, and write it: whole, or in lines."""
    times = [time.monotonic()]
    answer = _Answer(words, thinks=body["think"] is not False)
    async with _use(models, body) as model:
        times.append(time.monotonic())
        wanted, asked = wanted_of(body, model), await prompt(model)
        times.append(time.monotonic())

        def logs(scored: Sequence[Scored]) -> JSON:
            return {"logprobs": scores(model.tokenizer, scored)} if body["logprobs"] and scored else {}

        with conversation.asked(model, [asked], wanted) as (reply,):
            async with aclosing(reply.parts()) as parts:
                async for part in parts:
                    new, scored = answer.add(part), logs(part.scored)
                    if body["stream"] and (new or scored):
                        line = {**_head(model.about), **(new or words("", "", ())), **scored, "done": False}
                        await exchange.event(line)
            said = answer.said
            reason = "length" if said.ending == "length" else "stop"
            end = {**_head(model.about), "done": True, "done_reason": reason, **_figures(reply, *times)}
            if body["stream"]:
                await exchange.end(_line({**words("", "", ()), **end}))
            else:
                await exchange.reply({**answer.whole(), **logs(said.scored), **end})


def _figures(reply: Reply, begun: float, loaded: float, asked: float) -> JSON:
    """Tokens, and times in nanoseconds; a prompt's has that in it for which it waited for a slot."""
    now, usage = time.monotonic(), reply.usage
    first = reply.first_token if reply.first_token is not None else now - asked
    seconds = {
        "total_duration": now - begun, "load_duration": loaded - begun, "prompt_eval_duration": first,
        "eval_duration": max(now - asked - first, 0.0),
    }  # fmt: skip
    counts = {"prompt_eval_count": usage.prompt, "eval_count": usage.completion}
    return counts | {name: round(value * 1e9) for name, value in seconds.items()}


# ---- vectors


async def _embed(models: Models, exchange: Exchange) -> None:
    body, begun = await exchange.read(EMBED), time.monotonic()
    given = [body["input"]] if isinstance(body["input"], str) else body["input"]
    vectors, count, loaded, name = await _vectors(models, body, [text for text in given if text or len(given) > 1])
    times = {"total_duration": time.monotonic() - begun, "load_duration": loaded - begun}
    await exchange.reply({
        "model": name, "embeddings": vectors, "prompt_eval_count": count,
        **{name: round(value * 1e9) for name, value in times.items()},
    })  # fmt: skip


async def _embeddings(models: Models, exchange: Exchange) -> None:
    body = (await exchange.read(EMBEDDINGS)) | {"truncate": True, "dimensions": None}
    vectors, *_ = await _vectors(models, body, [body["prompt"]] if body["prompt"] else [])
    await exchange.reply({"embedding": vectors[0] if vectors else []})


async def _vectors(models: Models, body: JSON, texts: Sequence[str]) -> tuple[list[list[float]], int, float, str]:
    """The texts' vectors and tokens, when their model was loaded, and its name. No text only loads the model."""
    async with _use(models, body) as model:
        loaded = time.monotonic()
        tokens = await conversation.vector_tokens(model, texts, cut=body["truncate"])
        made = shortened(await model.embed(tokens), body["dimensions"]).tolist() if tokens else []
        return made, sum(map(len, tokens)), loaded, model.about.name


API: Final = Api(Voice(_told, _line, MEDIA, b""), {
    ("GET", "/api/version"): (_version, fields.lookup("The version of Ollama's API")),
    ("GET", "/api/tags"): (_tags, fields.lookup("The models")),
    ("GET", "/api/ps"): (_loaded, fields.lookup("The models in memory")),
    ("POST", "/api/show"): (_show, fields.operation("One model", NAMED)),
    ("POST", "/api/chat"): (_chat, fields.operation("Answer a conversation", CHAT, MEDIA)),
    ("POST", "/api/generate"): (_generate, fields.operation("Answer or continue a text", GENERATE, MEDIA)),
    ("POST", "/api/embed"): (_embed, fields.operation("Vectors of texts", EMBED)),
    ("POST", "/api/embeddings"): (
        _embeddings, fields.operation("The vector of a text, in the older form", EMBEDDINGS)
    ),
    ("POST", "/api/pull"): (_pull, fields.operation("Whether a model is there", NAMED)),
    **{place: (partial(_unmanaged, why), None) for place, why in UNMANAGED.items()},
})  # fmt: skip
