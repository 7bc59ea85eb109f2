"""Completions, embeddings and the list of models by the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
import tiny_llama
from rig import Direct, Embedder, Fixed, about, served

from tegrad import models
from tegrad.llm import embeddings
from tegrad.llm.gguf import Gguf
from tegrad.llm.reference import Reference
from tegrad.llm.sampler import Logprobs
from tegrad.serve import ollama as other
from tegrad.serve import openai as api

pytestmark = pytest.mark.board

START = "In the beginning"
GREEDY: dict[str, Any] = {"model": "small", "prompt": START, "temperature": 0, "max_tokens": 6}


def text(client: openai.OpenAI, **more: Any) -> str:
    return str(client.completions.create(**GREEDY | more).choices[0].text)


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    (one,) = client.models.list().data
    assert (one.id, one.object, one.owned_by) == ("small", "model", "tegrad")
    assert client.models.retrieve("small") == one


def test_a_text_is_continued(client: openai.OpenAI, small: Direct) -> None:
    tokens = small.tokenizer.encode(START)
    said = [token for piece in small.service.submit(tokens, 6) for token in piece.tokens]
    answer = client.completions.create(**GREEDY)
    assert (answer.object, answer.choices[0].text) == ("text_completion", small.tokenizer.decode(said))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), 6)
    assert text(client, prompt=tokens) == answer.choices[0].text
    assert text(client, echo=True) == START + answer.choices[0].text


def test_sixteen_tokens_unless_asked_for_more(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="small", prompt=START, seed=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_several_prompts_have_several_answers_each(client: openai.OpenAI, small: Direct) -> None:
    prompts = [START, "And the king said"]
    answer = client.completions.create(**GREEDY | {"prompt": prompts, "n": 2, "temperature": 1.3, "seed": 5})
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.choices[2].text == text(client, prompt=prompts[1], temperature=1.3, seed=5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == sum(len(small.tokenizer.encode(prompt)) for prompt in prompts)
    as_tokens = [small.tokenizer.encode(prompt) for prompt in prompts]
    again = client.completions.create(**GREEDY | {"prompt": as_tokens, "n": 2, "temperature": 1.3, "seed": 5})
    assert again.choices == answer.choices


def test_a_stream_says_what_a_whole_completion_says(client: openai.OpenAI) -> None:
    request = GREEDY | {"prompt": [START, "And"], "n": 2, "echo": True, "logprobs": 2, "temperature": 1, "seed": 2}
    whole = client.completions.create(**request)
    texts: dict[int, str] = {}
    ends: dict[int, str | None] = {}
    logs: dict[int, list[Any]] = {}
    for chunk in client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ends[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                logs.setdefault(choice.index, []).extend(choice.logprobs.text_offset or [])
    for one in whole.choices:
        assert (texts[one.index], ends[one.index]) == (one.text, one.finish_reason)
        assert one.logprobs is not None
        assert logs[one.index] == one.logprobs.text_offset


def test_logprobs_have_the_offsets_of_their_tokens(client: openai.OpenAI) -> None:
    choice = client.completions.create(**GREEDY | {"logprobs": 3}).choices[0]
    logs = choice.logprobs
    assert logs is not None
    assert logs.text_offset is not None
    for at, token, value, likely in zip(
        logs.text_offset, logs.tokens or [], logs.token_logprobs or [], logs.top_logprobs or [], strict=True
    ):
        assert choice.text[at:].startswith(token)
        assert likely[token] == value == max(likely.values())
        assert len(likely) == 3


@pytest.mark.parametrize("ends", [False, True], ids=["a text", "tokens that end texts among others"])
def test_a_prompts_tokens_have_their_log_probabilities(client: openai.OpenAI, small: Direct, ends: bool) -> None:
    """As lm-evaluation-harness asks for them: of the prompt alone, or with a token of the answer."""
    tokens = small.tokenizer.encode(f"{START} God created the heaven.")
    tokens = [*tokens, min(small.tokenizer.stops), *tokens[1:]] if ends else tokens
    logits = Reference(models.SMALL).logits(tokens).astype(np.float32)
    expected = [Logprobs.of(row, token, 2) for row, token in zip(logits[:-1], tokens[1:], strict=True)]
    wanted = GREEDY | {"prompt": tokens, "echo": True, "logprobs": 2}
    answer = client.completions.create(**wanted | {"max_tokens": 0})
    (choice,) = answer.choices
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), 0)
    assert (choice.text, choice.finish_reason) == (small.tokenizer.decode(tokens), "length")
    logs = choice.logprobs
    assert logs is not None
    assert logs.tokens == [small.tokenizer.piece(token, special=True).decode() for token in tokens]
    (none, *values), (nothing, *likeliest) = logs.token_logprobs or [], logs.top_logprobs or []
    assert none is nothing is None
    assert values == pytest.approx([one.taken for one in expected], abs=0.05)
    for likely, one in zip(likeliest, expected, strict=True):
        assert list(likely.values()) == pytest.approx([value for _, value in one.likeliest], abs=0.05)
    for at, token in zip(logs.text_offset or [], logs.tokens, strict=True):
        assert choice.text[at:].startswith(token) or token.startswith("<")
    with_one = client.completions.create(**wanted | {"max_tokens": 1}).choices[0]
    alone = client.completions.create(**wanted | {"max_tokens": 1, "echo": False}).choices[0]
    assert with_one.logprobs is not None
    assert alone.logprobs is not None
    assert with_one.text == choice.text + alone.text
    assert with_one.logprobs.token_logprobs == [*(logs.token_logprobs or []), *(alone.logprobs.token_logprobs or [])]


def test_stop_and_bias_are_taken(client: openai.OpenAI, small: Direct) -> None:
    plain = text(client)
    stop = plain.split()[-1]
    assert text(client, stop=stop) == plain[: plain.index(stop)]
    (token,) = small.tokenizer.encode(" king", bos=False)
    assert text(client, logit_bias={str(token): 100}, max_tokens=2) == " king king"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    plain = tiny_llama.write(folder / "plain.gguf", tiny_llama.SHAPES["qwen3"], tiny_llama.TYPE.Q8_0)
    return tiny_llama.rewritten(plain, folder / "vectors.gguf", **{"qwen3.pooling_type": 3})


def test_vectors_of_texts(device: str, small: Direct, path: Path) -> None:
    """As the library makes them, in floats or base64, cut to fewer dimensions; not of a model that is not for it."""
    model = Embedder(about("vectors", path, embeds=True), device)
    made = Fixed([small, model])
    with (
        served([*api.API.routes(made), *other.API.routes(made)]) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        texts = ["tea", "a tent"]
        with Gguf.open(path) as file:
            tokens = [embeddings.text_tokens(file, model.tokenizer, text) for text in texts]
            expected = [model._vectors.made(model._speaker, one) for one in tokens]
        answer = client.embeddings.create(model="vectors", input=texts)  # the client asks for base64
        assert np.array_equal(np.float32([one.embedding for one in answer.data]), np.stack(expected))
        assert [one.index for one in answer.data] == [0, 1]
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
        ollamas = ollama.Client(url)
        assert np.array_equal(np.float32(ollamas.embed(model="vectors", input=texts).embeddings), np.stack(expected))
        assert ollamas.embed(model="vectors", input="tea " * 100).prompt_eval_count == model.context
        (floats,) = client.embeddings.create(model="vectors", input=tokens[0], encoding_format="float").data
        assert np.array_equal(np.float32(floats.embedding), expected[0])
        (cut,) = client.embeddings.create(model="vectors", input="tea", dimensions=8).data
        short = expected[0][:8] / np.linalg.norm(expected[0][:8])
        assert np.allclose(cut.embedding, short, atol=1e-6)
        with pytest.raises(openai.BadRequestError, match="was not made for vectors of texts"):
            client.embeddings.create(model="small", input="tea")
        with pytest.raises(openai.BadRequestError, match="makes vectors of texts alone"):
            client.completions.create(model="vectors", prompt="tea")
