"""Logits of a packed model by decode steps, a prompt or a batch, and how far they are from others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.batch import Batch
from tegrad.llm.cache import KvCache
from tegrad.llm.packed import PackedModel
from tegrad.llm.plan import DecodePlan
from tegrad.llm.prefill import Prefill
from tegrad.llm.rows import floats
from tegrad.llm.state import State, States
from tegrad.nv.gpu import opened
from tegrad.nv.replay import Recording

TOKENS = [5, 17, 200, 3, 3, 91, 250, 1, 42, 7]
"""A text."""


def read(device: Any, buffer: Any, count: int, kind: Any) -> np.ndarray:
    """The first `count` numbers of a buffer."""
    out = bytearray(count * np.dtype(kind).itemsize)
    device.allocator._copyout(memoryview(out), buffer)
    return np.frombuffer(out, kind)


def decode(
    device: Any, plan: Any, states: States, step: Recording, position: int, token: int, limit: int
) -> NDArray[np.float32]:
    """The logits of one step."""
    states.write(0, State(position=position, token=token, limit=limit, active=1))
    step.wait(step.run())
    return read(device, plan.logits, plan.config.vocab, np.float32)


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


def far(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference, in deviations of theirs."""
    return float(np.abs(ours - theirs).max() / theirs.std())


def errors(logits: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """Largest and root mean square difference, in deviations of the exact logits."""
    difference = (logits - exact) / exact.std()
    return float(np.abs(difference).max()), float(np.sqrt((difference**2).mean()))


def steps(path: Path, device: str, tokens: list[int]) -> NDArray[np.float32]:
    """Every token's, by steps of many launches."""
    return decoded(path, opened(device), tokens)


def prompt(path: Path, device: str, tokens: list[int]) -> NDArray[np.float32]:
    """Every token's, in chunks of 16."""
    with (
        PackedModel.load(path, "NV") as model,
        KvCache(model.device, model.config, 64) as cache,
        Prefill(model, cache, sizes=(16,)) as prefill,
    ):
        return prefill.score(tokens)


def batch(path: Path, device: str, tokens: list[int]) -> NDArray[np.float32]:
    """The last token's, beside two others."""
    with PackedModel.load(path, "NV") as model, Batch(model, slots=3, positions=64, sizes=(48,)) as made:
        first, *_ = [made.join(tokens[at:], limit=len(tokens) - at) for at in range(3)]
        while not first.finished:
            made.step()
        return floats(model.device, made.logits, model.config.vocab)[None].copy()
