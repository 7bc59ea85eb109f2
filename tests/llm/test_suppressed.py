"""Tokens that a model's file says are never drawn: whoever draws, and whatever a request says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_llama import SHAPES, TYPE, rewritten, write

from tegrad.llm.batch import Batch
from tegrad.llm.config import Config
from tegrad.llm.engine import Engine
from tegrad.llm.errors import GgufError, ModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.model import Model
from tegrad.llm.packed import PackedModel
from tegrad.llm.reference import Reference
from tegrad.llm.sampler import BIASES, Sampler, Settings
from tegrad.llm.session import Session

KEY = "tokenizer.ggml.suppress_tokens"
PROMPT = [1, 2, 3]
AMOUNT = 5
WISHED = 7.0
"""A bias that a request gives such a token."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("suppressed") / "model.gguf", SHAPES["odd"], TYPE.Q8_0)


@pytest.fixture(scope="module")
def likeliest(path: Path) -> list[int]:
    """Some of the likeliest tokens after the prompt; what comes next is clear."""
    logits = Reference(path).logits(PROMPT)[-1]
    order = np.argsort(-logits)
    margins = logits[order[:50]] - logits[order[1:51]]
    return [int(token) for token in order[: 10 + int(np.argmax(margins[10:]))]]


@pytest.fixture(scope="module")
def without(path: Path, likeliest: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewritten(path, tmp_path_factory.mktemp("suppressed") / "without.gguf", **{KEY: likeliest})


def expected(path: Path, likeliest: list[int]) -> int:
    logits = Reference(path).logits(PROMPT)[-1]
    logits[likeliest] = -np.inf
    return int(np.argmax(logits))


def test_a_file_lists_them_and_others_than_its_tokens_do_not_count(path: Path, tmp_path: Path) -> None:
    with Gguf.open(rewritten(path, tmp_path / "model.gguf", **{KEY: [9, 5, 100000, 5]})) as file:
        assert Config.read(file).suppressed == (5, 9)


def test_a_list_of_something_else_is_refused(path: Path, tmp_path: Path) -> None:
    changed = rewritten(path, tmp_path / "model.gguf", **{KEY: ["a"]})
    with Gguf.open(changed) as file, pytest.raises(GgufError, match="which are no tokens"):
        Config.read(file)


def test_settings_lose_what_they_said_of_such_tokens() -> None:
    settings = Settings(biases=((4, WISHED), (5, 1.0)))
    assert settings.without(()) is settings
    assert settings.without((4, 6)).biases == ((5, 1.0), (4, -np.inf), (6, -np.inf))
    with pytest.raises(ModelError, match=f"at most {BIASES} biases"):
        settings.without(range(10, 10 + BIASES))


@pytest.mark.board
def test_an_engine_draws_none(path: Path, without: Path, likeliest: list[int], device: str) -> None:
    with Gguf.open(without) as file, Engine(file, 64, device=device, short=8, chunks=(16,)) as engine:
        for settings in (Settings(), Settings(logprobs=2), Settings(biases=((likeliest[0], WISHED),))):
            engine.reset(0)
            tokens = list(engine.generate(PROMPT, settings, AMOUNT, seed=1))
            assert tokens[0] == expected(path, likeliest)
            assert not set(tokens) & set(likeliest)


@pytest.mark.board
def test_a_batch_draws_none(path: Path, without: Path, likeliest: list[int], device: str) -> None:
    with PackedModel.load(without, "NV") as model, Batch(model, slots=2, positions=64, sizes=(48,)) as batch:
        member = batch.join(PROMPT, limit=len(PROMPT) + AMOUNT)
        other = batch.join(PROMPT, limit=len(PROMPT) + AMOUNT, settings=Settings(temperature=1.5), seed=3)
        while not (member.finished and other.finished):
            batch.step()
        assert member.tokens[0] == expected(path, likeliest)
        assert not {*member.tokens, *other.tokens} & set(likeliest)


def test_a_session_of_tinygrads_draws_none(path: Path, without: Path, likeliest: list[int]) -> None:
    session = Session(Model.load(without, "CPU"), 64)
    tokens = list(session.generate(PROMPT, Sampler(), 2))
    assert tokens[0] == expected(path, likeliest)
    assert not set(tokens) & set(likeliest)
