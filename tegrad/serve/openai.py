"""OpenAI's API: models, chat completions, completions and embeddings; docs/serve-openai.md tells it all."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.grammar import Grammar
from tegrad.serve import conversation, fields
from tegrad.serve.conversation import Prompt, Wanted
from tegrad.serve.exchange import Api, Exchange, Voice, sse
from tegrad.serve.failures import Failure
from tegrad.serve.model import About, Model, Models
from tegrad.serve.openai_answers import Chats, Completions, Echoed, told, usage
from tegrad.serve.openai_fields import (
    CHAT,
    COMPLETION,
    EMBEDDINGS,
    JSON,
    chat_of,
    grammar_of,
    known,
    sampled,
    several,
    wanted_logprobs,
)

DONE: Final = b"data: [DONE]\n\n"


# ---- models


async def _models(models: Models, exchange: Exchange) -> None:
    rows = [_about(one) for one in models.names()]
    ids = [row["id"] for row in rows] or [None]
    await exchange.reply({"object": "list", "data": rows, "has_more": False, "first_id": ids[0], "last_id": ids[-1]})


async def _model(models: Models, exchange: Exchange) -> None:
    await exchange.reply(_about(models.find(exchange.arguments["model"])))


def _about(one: About) -> JSON:
    """A model as OpenAI's clients know it and, at the same path, Anthropic's."""
    meta = {"n_ctx_train": one.context, "n_params": one.parameters, "size": one.size, "quantization": one.quantization}
    modified = datetime.fromtimestamp(one.modified, UTC).isoformat(timespec="seconds")
    return {
        "id": one.name, "object": "model", "created": int(one.modified), "owned_by": "tegrad", "meta": meta,
        "type": "model", "display_name": one.name, "created_at": modified, "lifecycle": "active",
    }  # fmt: skip


# ---- chats


async def _chat(models: Models, exchange: Exchange) -> None:
    body = await exchange.read(CHAT)
    name, logprobs = models.find(body["model"]).name, wanted_logprobs(body)
    chat = await exchange.work(lambda: chat_of(body, name))
    async with models.use(body["model"]) as model:
        wanted = sampled(body, model, logprobs, body["max_completion_tokens"])
        prompt = await conversation.chat_prompt(model, chat)
        await _answered(exchange, model, body, [prompt], wanted, Chats(model))


# ---- completions


async def _completions(models: Models, exchange: Exchange) -> None:
    body = await exchange.read(COMPLETION)
    if body["best_of"] not in (None, body["n"]):
        raise Failure(f"best_of differs from n: all answers are given, set both to {body['best_of']}", param="best_of")
    async with models.use(body["model"]) as model:
        wanted = sampled(body, model, body["logprobs"])
        given, grammar = several(body["prompt"]), grammar_of(body["grammar"], None)
        prompts = [await _prompt(model, one, grammar) for one in given]
        texts = (one if isinstance(one, str) else model.tokenizer.decode(one) for one in given)
        echoed = [Echoed(text) for text in texts] if body["echo"] else []
        if echoed and (logs := body["logprobs"]) is not None:
            scores = await conversation.prompt_scores(model, prompts, logs, wanted.deadline)
            rows = zip(echoed, prompts, scores, strict=True)
            echoed = [Echoed(one.text, prompt.tokens, each) for one, prompt, each in rows]
        await _answered(exchange, model, body, prompts, wanted, Completions(model, echoed, wanted.count))


async def _prompt(model: Model, given: str | list[int], grammar: Grammar | None) -> Prompt:
    if isinstance(given, str):
        return await conversation.text_prompt(model, given, grammar)
    return Prompt(known(given, model.tokenizer, "prompt"), grammar=grammar)


# ---- what both have in common


async def _answered(
    exchange: Exchange,
    model: Model,
    body: JSON,
    prompts: Sequence[Prompt],
    wanted: Wanted,
    writer: Chats | Completions,
) -> None:
    """Have the model answer, and write it."""
    head = {"id": f"{writer.prefix}-{secrets.token_hex(12)}", "object": writer.object, "created": int(time.time())}
    head["model"] = model.about.name
    logs = wanted.settings.logprobs is not None
    with conversation.asked(model, prompts, wanted) as replies:
        if not body["stream"]:
            said = await conversation.whole(replies)
            choices = [writer.whole(at, one, logs=logs) for at, one in enumerate(said)]
            await exchange.reply({**head, "choices": choices, "usage": usage(replies, wanted.count)})
            return
        head["object"] = writer.chunk
        tells = bool(body["stream_options"] and body["stream_options"]["include_usage"])
        if tells:
            head["usage"] = None
        async with aclosing(conversation.merged(replies)) as parts:
            async for at, part in parts:
                await exchange.event({**head, "choices": [writer.part(at, part, logs=logs)]})
        if tells:
            await exchange.event({**head, "choices": [], "usage": usage(replies, wanted.count)})
        await exchange.end(DONE)


# ---- embeddings


async def _embeddings(models: Models, exchange: Exchange) -> None:
    body = await exchange.read(EMBEDDINGS)
    async with models.use(body["model"]) as model:
        given = several(body["input"])
        made = iter(await conversation.vector_tokens(model, [one for one in given if isinstance(one, str)]))
        tokens = [next(made) if isinstance(one, str) else known(one, model.tokenizer, "input") for one in given]
        vectors = await model.embed(tokens)
    data = [
        {"object": "embedding", "index": at, "embedding": _written(vector, body["encoding_format"])}
        for at, vector in enumerate(shortened(vectors, body["dimensions"]))
    ]
    count = sum(map(len, tokens))
    used = {"prompt_tokens": count, "total_tokens": count}
    await exchange.reply({"object": "list", "data": data, "model": model.about.name, "usage": used})


def shortened(vectors: NDArray[np.float32], size: int | None) -> NDArray[np.float32]:
    """The first dimensions of vectors, to length 1 again; Failure where there are fewer."""
    if size is None:
        return vectors
    if size > vectors.shape[1]:
        raise Failure(f"the model's vectors have {vectors.shape[1]} dimensions: ask for no more", param="dimensions")
    cut = vectors[:, :size]
    made: NDArray[np.float32] = (cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-30)).astype(np.float32)
    return made


def _written(vector: Any, form: str) -> str | list[float]:
    if form == "float":
        made: list[float] = vector.tolist()
        return made
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


_ONE: Final = {
    "summary": "One model",
    "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
    "responses": {"200": {"description": "The model"}, **fields.failing(404)},
}
API: Final = Api(Voice(told, sse), {
    ("GET", "/v1/models"): (_models, fields.lookup("The models", "A list")),
    ("GET", "/v1/models/{model:path}"): (_model, _ONE),
    ("POST", "/v1/chat/completions"): (_chat, fields.operation("Answer a conversation", CHAT)),
    ("POST", "/v1/completions"): (_completions, fields.operation("Continue texts", COMPLETION)),
    ("POST", "/v1/embeddings"): (_embeddings, fields.operation("Vectors of texts", EMBEDDINGS)),
})  # fmt: skip
