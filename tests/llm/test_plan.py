"""The many-kernel decode step on the board: a whole small model, token by token, against the float reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import peer
from tiny_llama import SHAPES, TYPE, Shape, write

from tegrad.llm.cache import KvCache
from tegrad.llm.packed import PackedModel
from tegrad.llm.plan import DecodePlan
from tegrad.llm.reference import Reference
from tegrad.llm.state import State, States
from tegrad.nv.replay import Recording

pytestmark = pytest.mark.board

TOKENS = [5, 17, 200, 3, 3, 91, 250, 1, 42, 7]


def decoded(path: Path, device: Any, tokens: Sequence[int], *, q8: bool = False, overlap: bool = False) -> np.ndarray:
    """Logits (len(tokens), vocab) of decode steps, one token each; what `best` says is held against them."""
    found = []
    with PackedModel.load(path, "NV") as model, KvCache(device, model.config, 64, q8=q8) as cache:
        states = States(device)
        with DecodePlan(model, states, cache, overlap=overlap) as plan, Recording(device, plan.launches) as step:
            vocab = model.config.vocab
            for position, token in enumerate(tokens):
                states.write(0, State(position=position, token=token, limit=64, active=1))
                step.wait(step.run())
                logits = read(device, plan.logits, vocab, np.float32)
                rows = read(device, plan.best_row, -(-vocab // 32), np.int32)
                assert list(rows) == [at + logits[at : at + 32].argmax() for at in range(0, vocab, 32)]
                np.testing.assert_array_equal(read(device, plan.best, len(rows), np.float32), logits[rows])
                found.append(logits)
        states.close()
    return np.array(found)


def read(device: Any, buffer: Any, count: int, kind: Any) -> np.ndarray:
    out = bytearray(count * np.dtype(kind).itemsize)
    device.allocator._copyout(memoryview(out), buffer)
    return np.frombuffer(out, kind)


def errors(logits: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """Largest and root mean square difference, in deviations of the exact logits."""
    difference = (logits - exact) / exact.std()
    return float(np.abs(difference).max()), float(np.sqrt((difference**2).mean()))


WIDE = Shape(dim=2048, ffn=4096, heads=16, kv_heads=4, layers=1)
MIXED = {"attn_v": TYPE.Q6_K, "ffn_down": TYPE.Q6_K}
"""What a Q4_K_M file has in other formats: q, k and v are no longer one matrix."""


@pytest.mark.parametrize(
    ("shape", "kind", "kinds", "q8"),
    [
        pytest.param(SHAPES["plain"], TYPE.Q4_K, MIXED, False, id="llama Q4_K_M"),
        pytest.param(SHAPES["qwen2"], TYPE.Q8_0, {}, False, id="qwen2 Q8_0", marks=pytest.mark.long),
        pytest.param(replace(SHAPES["qwen3"], heads=4), TYPE.Q6_K, {}, True, id="qwen3 Q6_K", marks=pytest.mark.long),
        pytest.param(WIDE, TYPE.Q8_0, {}, False, id="rows of whole segments", marks=pytest.mark.long),
        pytest.param(SHAPES["plain"], TYPE.Q5_K, {}, False, id="llama Q5_K", marks=pytest.mark.long),
        pytest.param(SHAPES["plain"], TYPE.Q4_0, {}, False, id="llama Q4_0", marks=pytest.mark.long),
    ],
)
def test_steps_of_a_packed_model_err_less_than_llama_cpps(
    opened: Any, tmp_path: Path, shape: Shape, kind: TYPE, kinds: dict[str, TYPE], q8: bool
) -> None:
    path = write(tmp_path / "model.gguf", shape, kind, kinds=kinds)
    exact = Reference(path).logits(TOKENS)
    largest, mean = errors(decoded(path, opened, TOKENS, q8=q8), exact)
    with peer(path) as theirs:
        their_largest, their_mean = errors(theirs.logits(TOKENS), exact)
    assert mean < 0.03
    assert mean < their_mean, (mean, their_mean)
    assert largest < 1.2 * their_largest, (largest, their_largest)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        pytest.param(SHAPES["gpt2"], TYPE.F16, id="gpt2 F16"),
        pytest.param(replace(SHAPES["gpt2 untied"], layers=1), TYPE.F32, id="gpt2 F32", marks=pytest.mark.long),
        pytest.param(SHAPES["grouped"], TYPE.BF16, id="llama BF16", marks=pytest.mark.long),
    ],
)
def test_steps_of_a_float_model_are_exact(opened: Any, tmp_path: Path, shape: Shape, kind: TYPE) -> None:
    """But for the keys and values, which the cache holds in half precision."""
    path = write(tmp_path / "model.gguf", shape, kind)
    largest, mean = errors(decoded(path, opened, TOKENS), Reference(path).logits(TOKENS))
    assert mean < 1e-3
    assert largest < 4e-3
