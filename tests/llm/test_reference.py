"""The float32 reference agrees with llama.cpp, so that what agrees with the reference does too."""

from pathlib import Path

import numpy as np
import pytest
from tiny_llama import SHAPES, TYPE, disagreements, write

from tegrad.llm import reference
from tegrad.llm.reference import Past, Reference

llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")

MARGIN = 0.1
"""Standard deviations of the logits: llama.cpp rounds activations to 8 bits before each packed matrix, we do not."""


def table_gelu(x: np.ndarray) -> np.ndarray:
    """As ggml's CPU code computes it: looked up in a table of halves by a half."""
    half = reference._gelu(x.astype(np.float16).astype(np.float32)).astype(np.float16).astype(np.float32)
    return np.where(np.abs(x) < 10, half, np.maximum(x, 0))


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_logits_are_llama_cpps(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reference._ACTIVATIONS, "gelu", table_gelu)
    path = write(tmp_path / "model.gguf", SHAPES[shape], TYPE.F32)
    tokens = np.random.default_rng(1).integers(0, SHAPES[shape].vocab, 60).tolist()
    with llama_cpp.peer(path) as peer:
        theirs = peer.logits(tokens)
    ours = Reference(path).logits(tokens)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K", "Q6_K"])
def test_packed_weights_choose_llama_cpps_tokens(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "model.gguf", SHAPES["plain"], TYPE[kind])
    with llama_cpp.peer(path) as peer:
        tokens = peer.greedy([5, 9, 77], 57)
        theirs = peer.logits(tokens)
    assert disagreements(Reference(path).logits(tokens), theirs, MARGIN) == []


def test_tokens_fed_piece_by_piece_give_the_same_logits(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, SHAPES["plain"], TYPE.F32)
    model, tokens = Reference(path), list(np.random.default_rng(0).integers(0, SHAPES["plain"].vocab, 20))
    past = Past()
    pieces = [model.logits(tokens[start:end], past) for start, end in ((0, 7), (7, 8), (8, 20))]
    whole = model.logits(tokens)
    assert np.abs(np.concatenate(pieces) - whole).max() <= 1e-5 * np.abs(whole).max()
