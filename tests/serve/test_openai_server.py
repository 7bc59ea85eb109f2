"""The official client drives `tegrad serve` as a program, with the shipped model and a published one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import real_models
import tiny_llama
from processes import patience
from program import serving

from tegrad import models

pytestmark = pytest.mark.board

PAGE = Path(__file__).parents[2] / "docs/serve-openai.md"
PLACE = {"type": "object", "properties": {"at": {"enum": ["sun", "moon"]}}, "required": ["at"]}
LOOK: Any = {"type": "function", "function": {"name": "look", "description": "Look at it", "parameters": PLACE}}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}


@pytest.fixture(scope="module", params=["small", pytest.param("smollm2", marks=pytest.mark.long)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def client(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("models")
    plain = tiny_llama.write(folder / "plain.gguf", tiny_llama.SHAPES["qwen3"], tiny_llama.TYPE.Q8_0)
    vectors = tiny_llama.rewritten(plain, folder / "vectors.gguf", **{"qwen3.pooling_type": 3})
    path = models.SMALL if name == "small" else real_models.fetched(name)
    options = ("--slots", "4", "--context", "512", "--same-answer")
    with (
        serving(folder / "log", str(path), str(vectors), *options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=patience()) as made,
    ):
        yield made


@pytest.fixture
def chat(client: openai.OpenAI, name: str) -> Any:
    """An answer to a question."""

    def answered(**more: Any) -> Any:
        asked: list[Any] = [{"role": "user", "content": "What shines at night?"}]
        request = {"model": client.models.list().data[0].id, "messages": asked, "temperature": 0, "max_tokens": 12}
        return client.chat.completions.create(**request | more)

    return answered


def test_a_stream_says_what_a_whole_answer_says(chat: Any) -> None:
    whole = chat(logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert len(text) > 8
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat(stream=True)) == text
    content = whole.choices[0].logprobs.content
    assert "".join(one.token for one in content) == text
    assert all(one.logprob == one.top_logprobs[0].logprob > one.top_logprobs[1].logprob for one in content)
    assert whole.usage.completion_tokens == 12


def test_seeds_repeat_answers(chat: Any) -> None:
    drawn = [chat(temperature=1, seed=seed, n=2, max_tokens=6).choices for seed in (1, 1, 3)]
    texts = [[choice.message.content for choice in choices] for choices in drawn]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=str)
def test_required_tools_are_called_with_what_their_schemas_allow(chat: Any, choice: Any) -> None:
    made = chat(tools=[LOOK], tool_choice=choice, parallel_tool_calls=False, max_tokens=60).choices[0]
    (call,) = made.message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments)["at"] in ("sun", "moon")
    assert made.finish_reason == "tool_calls"
    chunks = chat(tools=[LOOK], tool_choice=choice, parallel_tool_calls=False, max_tokens=60, stream=True)
    pieces = [one.function for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
    assert "".join(piece.arguments for piece in pieces) == call.function.arguments


def test_answers_keep_to_a_schema(chat: Any) -> None:
    made = json.loads(chat(response_format=SCHEMA, max_tokens=60).choices[0].message.content)
    assert made["at"] in ("sun", "moon")


def test_a_response_is_a_chat(client: openai.OpenAI, chat: Any) -> None:
    said = chat().choices[0].message.content
    made = client.responses.create(input="What shines at night?", temperature=0, max_output_tokens=12, model=None)  # type: ignore[arg-type]
    assert made.output_text == said


def test_a_custom_tool_that_must_be_called_has_a_text(client: openai.OpenAI) -> None:
    wanted: Any = {
        "tools": [{"type": "custom", "name": "patch"}, {"type": "web_search"}],
        "tool_choice": {"type": "custom", "name": "patch"},
        "input": [
            {"role": "user", "content": "Change it"},
            {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "a"},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "Done"},
            {"role": "user", "content": "Again"},
        ],
    }
    drawn: Any = {"temperature": 1, "extra_body": {"seed": 2}, "max_output_tokens": 40, "model": None}
    (call,) = client.responses.create(**wanted, **drawn).output
    assert call.type == "custom_tool_call"
    assert call.name == "patch"
    *_, last = client.responses.create(**wanted, **drawn, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output[0].input == call.input


def test_prompts_have_log_probabilities_as_a_harness_asks_for_them(client: openai.OpenAI, name: str) -> None:
    """More at once than there are slots; each alone has the same."""
    texts = [f"In the beginning {name} created" for name in ("God", "Moses", "I", "a", "the")]
    wanted: Any = {"model": client.models.list().data[0].id, "echo": True, "logprobs": 1, "temperature": 0}
    answer = client.completions.create(prompt=texts, max_tokens=1, **wanted)
    sums = []
    for text, choice in zip(texts, answer.choices, strict=True):
        (alone,) = client.completions.create(prompt=text, max_tokens=0, **wanted).choices
        assert choice.logprobs is not None
        assert alone.logprobs is not None
        values = choice.logprobs.token_logprobs or []
        assert values[:-1] == alone.logprobs.token_logprobs
        assert values[0] is None
        assert all(value <= 0 for value in values[1:])
        sums.append(sum(values[1:-1]))
    assert len(set(sums)) == 5
    if name == "small":  # what it was made of
        assert max(sums) == sums[0]


def test_vectors_of_texts(client: openai.OpenAI) -> None:
    data = client.embeddings.create(model="vectors", input=["the moon", "a moon"]).data
    vectors = np.float32([one.embedding for one in data])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert 0 < vectors[0] @ vectors[1] < 0.9999


def test_what_is_wrong_is_an_error_of_the_clients(client: openai.OpenAI, chat: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="choose one of"):
        chat(model="none")
    with pytest.raises(openai.BadRequestError) as raised:
        chat(messages=[{"role": "user", "content": "moon " * 600}])
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="not sound or not supported"):
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "sandwich"}}})
    with pytest.raises(openai.BadRequestError, match="was not made for vectors"):
        client.embeddings.create(model=client.models.list().data[0].id, input="moon")


def test_the_pages_example_runs(client: openai.OpenAI, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    if name == "small":
        assert example.count("max_tokens=32") == 1
        example = example.replace("max_tokens=32", "max_tokens=32, temperature=0")  # by chance it may say nothing
        exec(example.replace("http://127.0.0.1:8080/v1", str(client.base_url)), {})
        assert len(capsys.readouterr().out) > 8
