"""Vectors of texts are made of the states that llama.cpp makes them of, pooled as the file says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import peer
from tiny_llama import LARGE_EPS, SHAPES, TYPE, Shape, letters, rewritten, write

from tegrad.llm.embeddings import Pooling, embed, pooling, text_tokens
from tegrad.llm.engine import Engine
from tegrad.llm.errors import GgufError, ModelError, UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.model import Model
from tegrad.llm.session import Session
from tegrad.llm.tokenizer import Tokenizer

SMALL = Shape(arch="qwen3", dim=64, ffn=64, heads=2, kv_heads=1, layers=1, eps=LARGE_EPS)
TOKENS = np.random.default_rng(7).integers(0, 300, 11).tolist()


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.board
@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", "granite", "olmo2", "odd"))]
)
def test_states_are_llama_cpps_by_kernels_and_by_operations(device: str, tmp_path: Path, name: str) -> None:
    """In several chunks, the last of them padded; and again, whatever was said before."""
    path = write(tmp_path / "model.gguf", SHAPES[name], TYPE.F16)
    with peer(path) as theirs:
        expected = theirs.hidden(TOKENS)
    session = Session(Model.load(path, device), chunk=8)
    session.feed(TOKENS[:1])
    assert difference(session.hidden(TOKENS), expected) < 5e-3
    with Gguf.open(path) as file, Engine(file, 64, device=device, chunks=(8,)) as engine:
        for tokens in (TOKENS[4:], TOKENS):
            states = engine.hidden(tokens)
        assert difference(states, expected) < 1e-2
        assert engine.tokens == []


class Told:
    def __init__(self, states: Any) -> None:
        self.states = np.array(states, np.float32)

    def hidden(self, _: Any) -> np.ndarray:
        return self.states


def test_a_vector_is_pooled_and_has_the_length_1() -> None:
    told = Told([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0]])
    assert embed(told, TOKENS, Pooling.LAST).tolist() == pytest.approx([0.6, 0.8])
    assert embed(told, TOKENS, Pooling.MEAN).tolist() == pytest.approx([9 / np.hypot(9, 13), 13 / np.hypot(9, 13)])


@pytest.mark.parametrize("state", [0.0, float("nan")])
def test_a_vector_without_a_length_is_no_vector(state: float) -> None:
    with pytest.raises(ModelError, match="has no length"):
        embed(Told([[state, 0.0]]), TOKENS, Pooling.LAST)


def told(tmp_path: Path, **values: object) -> Path:
    path = write(tmp_path / "model.gguf", SMALL, TYPE.F32, vocabulary=letters(300))
    return rewritten(path, tmp_path / "told.gguf", **{key: value for key, value in values.items() if value is not None})


@pytest.mark.parametrize(
    ("number", "kind"), [(None, Pooling.LAST), (0, Pooling.LAST), (1, Pooling.MEAN), (3, Pooling.LAST)]
)
def test_a_file_says_how_its_states_are_pooled(tmp_path: Path, number: int | None, kind: Pooling) -> None:
    with Gguf.open(told(tmp_path, **{"qwen3.pooling_type": number})) as file:
        assert pooling(file) is kind


@pytest.mark.parametrize(
    ("number", "error", "said"),
    [
        (2, UnsupportedModelError, "takes the first token's state"),
        (4, UnsupportedModelError, r"ranks texts \(qwen3.pooling_type = 4\)"),
        (9, GgufError, "qwen3.pooling_type = 9"),
        ("mean", GgufError, "qwen3.pooling_type = 'mean'"),
    ],
)
def test_other_poolings_are_refused_by_name(tmp_path: Path, number: object, error: type[Exception], said: str) -> None:
    with Gguf.open(told(tmp_path, **{"qwen3.pooling_type": number})) as file, pytest.raises(error, match=said):
        pooling(file)


def test_a_text_ends_as_the_file_wants_it(tmp_path: Path) -> None:
    with Gguf.open(told(tmp_path)) as file:
        tokenizer = Tokenizer(file)
        plain = text_tokens(file, tokenizer, "tea")
        file.metadata["tokenizer.ggml.add_eos_token"] = True
        assert text_tokens(file, tokenizer, "tea") == [*plain, tokenizer.eos]
        assert text_tokens(file, tokenizer, "")[-1] == tokenizer.eos
        file.metadata["tokenizer.ggml.add_eos_token"] = file.metadata["tokenizer.ggml.add_bos_token"] = False
        with pytest.raises(ModelError, match="an empty text"):
            text_tokens(file, Tokenizer(file), "")


@pytest.mark.board
@pytest.mark.long
def test_the_command_prints_a_vector_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", SMALL, TYPE.F16)
    told = subprocess.run(
        [sys.executable, "-m", "tegrad", "embed", str(path), "-"], input="tea\nthe\u2028sea\x0c\ntea\n",
        encoding="utf-8", capture_output=True, check=True, env={**os.environ, "TEGRAD_BOARD": "agx-orin-64gb"},
    )  # fmt: skip
    first, other, same = (np.array(json.loads(line)) for line in told.stdout.splitlines())
    assert first.shape == (64,)
    assert first @ same == pytest.approx(1)
    assert first @ other < 0.99
