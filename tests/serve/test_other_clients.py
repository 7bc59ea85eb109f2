"""The clients of Ollama and Anthropic drive `tegrad serve` as a program, with the shipped model and a published one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import ollama
import pytest
import real_models
import tiny_llama
from processes import patience
from program import serving

from tegrad import models

pytestmark = pytest.mark.board

DOCS = Path(__file__).parents[2] / "docs"
PLACE = {"type": "object", "properties": {"at": {"enum": ["sun", "moon"]}}, "required": ["at"]}
SCHEMA = PLACE | {"additionalProperties": False}
LOOK: list[Any] = [{"name": "look", "description": "Look at it", "input_schema": PLACE}]
ASKED: list[Any] = [{"role": "user", "content": "What shines at night?"}]
GREEDY = {"temperature": 0, "num_predict": 12, "repeat_penalty": 1}


@pytest.fixture(scope="module", params=["small", pytest.param("smollm2", marks=pytest.mark.long)])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    plain = tiny_llama.write(folder / "plain.gguf", tiny_llama.SHAPES["qwen3"], tiny_llama.TYPE.Q8_0)
    vectors = tiny_llama.rewritten(plain, folder / "vectors.gguf", **{"qwen3.pooling_type": 3})
    path = models.SMALL if request.param == "small" else real_models.fetched(request.param)
    options = ("--slots", "4", "--context", "512", "--same-answer")
    with serving(folder / "log", str(path), str(vectors), *options) as server:
        yield server.url


@pytest.fixture(scope="module")
def ollamas(url: str) -> ollama.Client:
    return ollama.Client(url, timeout=patience())


@pytest.fixture(scope="module")
def name(ollamas: ollama.Client) -> str:
    return str(ollamas.list().models[0].model)


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=patience()) as made:
        yield made


def test_both_say_the_same_whole_and_as_a_stream(
    ollamas: ollama.Client, claude: anthropic.Anthropic, name: str
) -> None:
    answer = ollamas.chat(model=name, messages=ASKED, options=GREEDY, logprobs=True)
    text = str(answer.message.content)
    assert "".join(one.token for one in answer.logprobs or []) == text
    assert (answer.eval_count, answer.done_reason) == (12, "length")
    streamed = ollamas.chat(model=name, messages=ASKED, options=GREEDY, stream=True)
    assert "".join(line.message.content or "" for line in streamed) == text
    request: dict[str, Any] = {"model": name, "messages": ASKED, "max_tokens": 12, "extra_body": {"temperature": 0}}
    message = claude.messages.create(**request)
    assert [block.text for block in message.content if block.type == "text"] == [text]
    counted = claude.messages.count_tokens(model=name, messages=ASKED).input_tokens
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted
    assert answer.prompt_eval_count == counted
    with claude.messages.stream(**request) as stream:
        assert "".join(stream.text_stream) == text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}], ids=str)
def test_tools_that_must_be_called_are(claude: anthropic.Anthropic, name: str, choice: Any) -> None:
    choice = choice | {"disable_parallel_tool_use": True}
    request: dict[str, Any] = {"model": name, "messages": ASKED, "max_tokens": 60, "tools": LOOK, "tool_choice": choice}
    request["extra_body"] = {"temperature": 0}
    message = claude.messages.create(**request)
    (block,) = message.content
    assert (block.type, message.stop_reason) == ("tool_use", "tool_use")
    assert block.input["at"] in ("sun", "moon")
    with claude.messages.stream(**request) as stream:
        (again,) = stream.get_final_message().content
    assert again.type == "tool_use"
    assert again.input == block.input


def test_answers_keep_to_a_schema(ollamas: ollama.Client, claude: anthropic.Anthropic, name: str) -> None:
    for stream in (False, True):
        made: Any = ollamas.chat(
            model=name, messages=ASKED, format=SCHEMA, options=GREEDY | {"num_predict": 60}, stream=stream
        )  # fmt: skip
        text = "".join(line.message.content or "" for line in (made if stream else [made]))
        assert json.loads(text)["at"] in ("sun", "moon")
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = claude.messages.create(model=name, messages=ASKED, max_tokens=60, output_config=config)
    (block,) = message.content
    assert block.type == "text"
    assert json.loads(block.text)["at"] in ("sun", "moon")


@pytest.mark.parametrize("page", ["serve-ollama", "serve-anthropic"])
def test_the_pages_example_runs(url: str, name: str, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    exec(example.replace("http://127.0.0.1:8080", url).replace('"small"', repr(name)), {})
    assert len(capsys.readouterr().out) > 8


def test_vectors_of_texts(ollamas: ollama.Client) -> None:
    vectors = np.float32(ollamas.embed(model="vectors", input=["the moon", "a moon"]).embeddings)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.allclose(ollamas.embeddings(model="vectors", prompt="a moon").embedding, vectors[1], atol=1e-6)
    assert ollamas.show("vectors").capabilities == ["embedding"]


def test_what_is_wrong_is_an_error_of_the_clients(ollamas: ollama.Client, claude: anthropic.Anthropic) -> None:
    with pytest.raises(ollama.ResponseError, match="choose one of") as raised:
        ollamas.chat(model="none", messages=ASKED)
    assert raised.value.status_code == 404
    with pytest.raises(anthropic.NotFoundError, match="choose one of"):
        claude.messages.create(model="none", messages=ASKED, max_tokens=5)
    with pytest.raises(ollama.ResponseError, match="context"):
        ollamas.generate(model=str(ollamas.list().models[0].model), prompt="the sun and the moon " * 200)
