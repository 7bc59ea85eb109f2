"""The graph on a device agrees with llama.cpp and with the float32 reference, in every quantization.

Runs on the emulated board, and with DEV=NV on a real GPU.
"""

from pathlib import Path

import numpy as np
import pytest
from tiny_llama import SHAPES, TYPE, disagreements, rewritten, write

from tegrad import models
from tegrad.llm.model import Model
from tegrad.llm.reference import Reference
from tegrad.llm.session import Session
from tegrad.llm.tokenizer import Tokenizer

pytestmark = pytest.mark.board
llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")

MARGIN = 0.1
"""Standard deviations of the logits: llama.cpp rounds activations to 8 bits before each packed matrix, we do not."""
PRECISION = 1e-3
"""Of the largest logit, between our packed weights and llama.cpp's float32 ones of the same values."""


def session(path: Path, device: str) -> Session:
    from tinygrad import dtypes

    return Session(Model.load(path, device), cache_dtype=dtypes.float32, chunk=16, short=2)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference, in parts of the largest logit."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize(
    "kind", ["Q6_K", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("F16", "F32", "Q8_0", "Q4_K"))]
)
def test_teacher_forced_logits_are_llama_cpps(tmp_path: Path, device: str, kind: str) -> None:
    """Through prefill chunks, a padded one, and steps of one token."""
    packed = write(tmp_path / "packed.gguf", SHAPES["plain"], TYPE[kind])
    expanded = rewritten(packed, tmp_path / "expanded.gguf", expand=True)
    with llama_cpp.peer(packed) as peer:
        tokens = peer.greedy([5, 9, 77], 35)
        theirs = peer.logits(tokens)
    with llama_cpp.peer(expanded) as peer:
        exact = peer.logits(tokens)
    running = session(packed, device)
    ours = np.concatenate([running.feed_all(tokens[:28]), *(running.feed_all([token]) for token in tokens[28:])])
    assert difference(ours, exact) <= PRECISION
    assert disagreements(ours, theirs, MARGIN) == []


def test_the_shipped_models_logits_are_llama_cpps(tmp_path: Path, device: str) -> None:
    tokens = Tokenizer.load(models.SMALL).encode("And it came to pass")
    with llama_cpp.peer(models.SMALL) as peer:
        tokens = peer.greedy(tokens, 32)
        theirs = peer.logits(tokens)
    with llama_cpp.peer(rewritten(models.SMALL, tmp_path / "expanded.gguf", expand=True)) as peer:
        exact = peer.logits(tokens)
    running = Session(Model.load(models.SMALL, device))
    ours = np.stack([running.feed([token]) for token in tokens])
    assert difference(ours, exact) <= PRECISION
    assert disagreements(ours, theirs, MARGIN) == []


LONG = (
    *("odd", "phi3", "granite", "smollm3", "mistral3", "olmo2", "olmo3", "linear rope", "qwen2", "gpt2 untied"),
    *("gemma", "minicpm", "internlm2", "ernie4_5", "qwen2vl", "qwen3vl", "seed_oss", "exaone", "exaone4"),
    *("exaone4 of 64 layers", "chatglm", "sixteen to a group", "nemotron", "arcee"),
    *("gemma4", "maincoder", "pangu", "jais2", "stablelm", "gptneox", "gptneox in sequence", "command-r"),
)
"""Shapes whose operations those of other families have too."""


@pytest.mark.parametrize(
    "shape",
    [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in SHAPES if name != "plain"],
)
def test_every_part_of_the_family_is_computed(tmp_path: Path, device: str, shape: str) -> None:
    path = write(tmp_path / "model.gguf", SHAPES[shape], TYPE.Q8_0)
    tokens = np.random.default_rng(2).integers(0, SHAPES[shape].vocab, 19).tolist()
    assert difference(session(path, device).feed_all(tokens), Reference(path).logits(tokens)) <= PRECISION


def test_neighbours_of_different_packing_share_no_buffer(tmp_path: Path, device: str) -> None:
    kinds = {"attn_v": TYPE.Q6_K, "ffn_down": TYPE.Q6_K, "ffn_up": TYPE.F16, "token_embd": TYPE.Q6_K}
    path = write(tmp_path / "mixed.gguf", SHAPES["plain"], TYPE.Q4_K, kinds=kinds)
    tokens = np.random.default_rng(3).integers(0, SHAPES["plain"].vocab, 9).tolist()
    assert difference(session(path, device).feed_all(tokens), Reference(path).logits(tokens)) <= PRECISION


def test_the_last_tokens_logits_are_those_of_all(tmp_path: Path, device: str) -> None:
    path = write(tmp_path / "model.gguf", SHAPES["plain"], TYPE.Q8_0)
    running = session(path, device)
    for count in (1, 3, 16, 27):
        tokens = np.random.default_rng(count).integers(0, SHAPES["plain"].vocab, count).tolist()
        running.reset()
        every = running.feed_all(tokens)
        running.reset()
        assert np.allclose(running.feed(tokens), every[-1], rtol=1e-4, atol=1e-4)
