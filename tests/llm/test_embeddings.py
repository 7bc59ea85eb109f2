"""Vectors of texts are made of the states that llama.cpp makes them of, pooled as the file says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from llama_cpp import peer
from tiny_llama import BOTH_WAYS, LARGE_EPS, SHAPES, TYPE, Shape, letters, rewritten, write

from tegrad.llm.config import MOST_AT_ONCE, Config
from tegrad.llm.embeddings import Pooling, Vectors, pooling, text_tokens
from tegrad.llm.engine import Engine
from tegrad.llm.errors import ContextError, GgufError, ModelError, UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.model import Model
from tegrad.llm.prefill import chunk_sizes, split
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


@pytest.mark.board
@pytest.mark.parametrize(
    "name", ["gemma-embedding", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama-embed", "qwen2"))]
)
def test_states_of_models_that_attend_in_both_directions_are_llama_cpps(device: str, tmp_path: Path, name: str) -> None:
    """In one chunk, a second and shorter text after a longer one; a window is centred on a token."""
    tokens = np.random.default_rng(8).integers(0, 300, 100).tolist()
    path = write(tmp_path / "model.gguf", BOTH_WAYS[name], TYPE.F16)
    with peer(path) as theirs:
        texts = [(some, theirs.hidden(some)) for some in (tokens, tokens[50:71], tokens[:1])]
    session = Session(Model.load(path, device))
    with Gguf.open(path) as file, Engine(file, 128, device=device) as engine:
        for some, expected in texts:
            assert difference(session.hidden(some), expected) < 5e-3
            assert difference(engine.hidden(some), expected) < 5e-3
        for speaker in (session, engine):
            for ask in (speaker.feed, speaker.feed_all):
                with pytest.raises(UnsupportedModelError, match="attends in both directions: it makes vectors"):
                    ask(tokens[:2])
    with (
        Gguf.open(path) as file,
        Engine(file, 128, device=device, chunks=(32,)) as engine,
        pytest.raises(ContextError, match="33 tokens are more than the 32 that attend to each other at most"),
    ):
        engine.hidden(tokens[:33])


def test_windows_and_attention_in_both_directions_are_not_mixed(tmp_path: Path) -> None:
    shape = replace(SHAPES["gemma2"], extra={**SHAPES["gemma2"].extra, "gemma2.attention.causal": False})
    with (
        Gguf.open(write(tmp_path / "model.gguf", shape, TYPE.F32)) as file,
        pytest.raises(UnsupportedModelError, match="attends in both directions, which we run with"),
    ):
        Config.read(file)


def test_texts_of_both_directions_are_as_long_as_what_is_there_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", replace(BOTH_WAYS["llama-embed"], context=9000), TYPE.F32)
    with Gguf.open(path) as file:
        assert Config.read(file).longest == MOST_AT_ONCE == chunk_sizes("sm_87", MOST_AT_ONCE, whole=True)[-1]
    assert [*split(600, chunk_sizes("sm_87", 700, whole=True), whole=True)] == [1024]


def test_vectors_are_multiplied_by_the_files_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, plain = BOTH_WAYS["gemma-embedding"], tiny_llama.weights
    rng = np.random.default_rng(3)
    wide, back = (rng.standard_normal(size).astype(np.float32) for size in ((384, shape.dim), (shape.dim, 384)))
    for matrices in ((wide, back), (back,), (wide,)):
        names = ("dense_2.weight", "dense_3.weight") if len(matrices) > 1 else ("dense_3.weight",)
        more = dict(zip(names, matrices, strict=True))
        monkeypatch.setattr(tiny_llama, "weights", lambda *how, more=more: plain(*how) | more)
        path = write(tmp_path / "model.gguf", shape, TYPE.F32)
        with Gguf.open(path) as file:
            config = Config.read(file)
            if len(matrices) == 1:
                with pytest.raises(GgufError, match=r"vectors of 192 are multiplied by 'dense_3.weight' \("):
                    Vectors.of(file, config)
                continue
            states = rng.standard_normal((3, shape.dim))
            made = Vectors.of(file, config).made(Told(states), TOKENS)
        expected = back @ (wide @ states.astype(np.float32).mean(axis=0))
        assert made == pytest.approx(expected / np.linalg.norm(expected), abs=1e-5)


class Told:
    def __init__(self, states: Any) -> None:
        self.states = np.array(states, np.float32)

    def hidden(self, _: Any) -> np.ndarray:
        return self.states


def test_a_vector_is_pooled_and_has_the_length_1() -> None:
    told = Told([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0]])
    assert Vectors(Pooling.LAST).made(told, TOKENS).tolist() == pytest.approx([0.6, 0.8])
    assert Vectors(Pooling.FIRST).made(Told([[0.6, 0.8], [1.0, 0.0]]), TOKENS).tolist() == pytest.approx([0.6, 0.8])
    mean = [9 / np.hypot(9, 13), 13 / np.hypot(9, 13)]
    assert Vectors(Pooling.MEAN).made(told, TOKENS).tolist() == pytest.approx(mean)
    swapped = Vectors(Pooling.MEAN, (np.array([[0, 2], [1, 0], [0, 0]], np.float32), np.eye(2, 3, dtype=np.float32)))
    assert swapped.made(told, TOKENS).tolist() == pytest.approx([26 / np.hypot(26, 9), 9 / np.hypot(26, 9)])


@pytest.mark.parametrize("state", [0.0, float("nan")])
def test_a_vector_without_a_length_is_no_vector(state: float) -> None:
    with pytest.raises(ModelError, match="has no length"):
        Vectors(Pooling.LAST).made(Told([[state, 0.0]]), TOKENS)


def told(tmp_path: Path, **values: object) -> Path:
    path = write(tmp_path / "model.gguf", SMALL, TYPE.F32, vocabulary=letters(300))
    return rewritten(path, tmp_path / "told.gguf", **{key: value for key, value in values.items() if value is not None})


@pytest.mark.parametrize(
    ("number", "kind"),
    [(None, Pooling.LAST), (0, Pooling.LAST), (1, Pooling.MEAN), (2, Pooling.FIRST), (3, Pooling.LAST)],
)
def test_a_file_says_how_its_states_are_pooled(tmp_path: Path, number: int | None, kind: Pooling) -> None:
    with Gguf.open(told(tmp_path, **{"qwen3.pooling_type": number})) as file:
        assert pooling(file) is kind


@pytest.mark.parametrize(
    ("number", "error", "said"),
    [
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
