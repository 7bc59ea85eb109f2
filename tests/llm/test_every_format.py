"""Whole small models in every packed format: steps of many launches and of one, prompts and batches, on the board."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from decode_steps import TOKENS, decoded, errors, read
from llama_cpp import peer
from small_tunings import SMALL
from tiny_llama import SHAPES, TYPE, Shape, write

from tegrad.llm import formats
from tegrad.llm.batch import Batch
from tegrad.llm.cache import KvCache
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import BlockType
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.prefill import Prefill
from tegrad.llm.reference import Reference
from tegrad.llm.state import State, States
from tegrad.nv.replay import Recording

pytestmark = pytest.mark.board

NARROW = Shape(dim=576, ffn=640, heads=9, kv_heads=3, layers=1, vocab=301, tied=True)
"""Rows of 9 and 10 runs, which are no whole K-quant blocks; the embedding is the output, too."""
WIDE = Shape(dim=512, ffn=768, heads=8, kv_heads=4, layers=1, vocab=301, tied=True)
PROMPT = [(7 * at) % 300 for at in range(40)]


def one_launch(opened: Any, model: PackedModel, tokens: list[int]) -> np.ndarray:
    """Logits of steps in one launch each."""
    got, states = [], States(opened)
    with (
        KvCache(opened, model.config, 64) as cache,
        PersistentPlan(model, states, cache, tuning=SMALL, ctas=4) as plan,
        Recording(opened, plan.launches) as step,
    ):
        for position, token in enumerate(tokens):
            states.write(0, State(position=position, token=token, limit=64, active=1))
            step.wait(step.run())
            got.append(read(opened, plan.logits, model.config.vocab, np.float32))
    states.close()
    return np.array(got)


def prompted(opened: Any, model: PackedModel, tokens: list[int]) -> np.ndarray:
    """Logits after the tokens as a prompt, and those of a batch of one after them."""
    vocab, got = model.config.vocab, []
    with KvCache(opened, model.config, 64) as cache, Prefill(model, cache, sizes=(48,)) as prefill:
        prefill.run(tokens, 0)
        got.append(read(opened, prefill.logits, vocab, np.float32))
    with Batch(model, slots=1, positions=64, sizes=(48,)) as batch:
        member = batch.join(tokens, limit=len(tokens))
        while not member.finished:
            batch.step()
        got.append(read(opened, batch.logits, vocab, np.float32))
    return np.array(got)


def check(path: Path, opened: Any, refused: str = "") -> None:
    """A step rounds activations to 8 bits, prompts and batches to halves: no format errs by more than that.

    `refused` is why there is no step in one launch.
    """
    exact, after = Reference(path).logits(TOKENS), Reference(path).logits(PROMPT)[-1]
    found = {"many": decoded(path, opened, TOKENS)}
    with PackedModel.load(path, "NV") as model:
        if refused := refused or "code books" * model.embedding.kind.booked:
            with pytest.raises(UnsupportedModelError, match=refused):
                one_launch(opened, model, TOKENS)
        else:
            found["one"] = one_launch(opened, model, TOKENS)
        prompts = prompted(opened, model, PROMPT)
    for name, logits in found.items():
        largest, mean = errors(logits, exact)
        assert mean < 0.03, (name, mean)
        assert largest < 0.15, (name, largest)
    for logits in prompts:
        assert np.sqrt(((logits - after) ** 2).mean()) < 0.02 * after.std()


@pytest.mark.long
@pytest.mark.parametrize("kind", formats.PACKED, ids=lambda kind: kind.name)
def test_a_model_of_one_format_runs_every_way(opened: Any, tmp_path: Path, kind: BlockType) -> None:
    check(write(tmp_path / "model.gguf", WIDE, TYPE[kind.name]), opened)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [kind for kind in formats.PACKED if NARROW.dim % kind.elements == 0], ids=lambda kind: kind.name
)
def test_rows_of_no_whole_k_quant_block_run(opened: Any, tmp_path: Path, kind: BlockType) -> None:
    check(write(tmp_path / "model.gguf", NARROW, TYPE[kind.name]), opened)


ODD = SHAPES["odd"]
"""Every row of weights is an odd multiple of 32."""
FFN = Shape(ffn=288, layers=1, vocab=301)
FALLEN_BACK = {"ffn_down": TYPE.Q5_1, "attn_v": TYPE.Q6_K, "token_embd": TYPE.IQ4_NL, "output.": TYPE.Q6_K}
"""A mixture: rows of the feed-forward's width alone are no whole blocks of a K-quant, nor runs of 64."""


@pytest.mark.parametrize(
    ("shape", "kind", "kinds"),
    [
        pytest.param(ODD, "Q4_0", {}, id="all odd"),
        pytest.param(FFN, "Q8_0", {"ffn_down": TYPE.Q5_1}, id="only the feed-forward odd", marks=pytest.mark.long),
        pytest.param(FFN, "Q4_K", FALLEN_BACK, id="Q4_K_M, only the feed-forward odd", marks=pytest.mark.long),
        pytest.param(ODD, "Q5_1", {"attn_v": TYPE.MXFP4, "attn_output": TYPE.MXFP4, "ffn_down": TYPE.Q8_0},
                     id="a mixture, all odd", marks=pytest.mark.long),
        *(pytest.param(ODD, kind.name, {}, id=kind.name, marks=pytest.mark.long)
          for kind in (*formats.PACKED, formats.F16, formats.BF16) if kind.elements <= 32),
        *(pytest.param(replace(SHAPES[name], dim=96, ffn=160, heads=3, kv_heads=kv_heads, head_dim=32, bias=False),
                       "Q8_0", {}, id=f"{name}, {kv_heads} KV heads", marks=pytest.mark.long)
          for name, kv_heads in (("qwen2", 1), ("granite", 1), ("smollm3", 3), ("olmo2", 3), ("gemma3", 1),
                                 ("gemma2", 1), ("yarn", 1))),
        pytest.param(replace(SHAPES["phi3"], dim=96, ffn=160, heads=3, kv_heads=3, rotated=16), "Q8_0", {}, id="phi3",
                     marks=pytest.mark.long),
        pytest.param(replace(SHAPES["gpt2"], ffn=160), "F16", {}, id="gpt2", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_rows_of_odd_multiples_of_32_run_every_way(
    opened: Any, tmp_path: Path, shape: Shape, kind: str, kinds: dict[str, TYPE]
) -> None:
    path = write(tmp_path / "model.gguf", shape, TYPE[kind], kinds=kinds)
    check(path, opened, "positions differ" if shape.arch == "gpt2" else "512 bytes" * (kind in ("F16", "BF16")))
    with peer(path) as theirs:
        rounded = theirs.logits(TOKENS)
    exact = Reference(path).logits(TOKENS)
    assert errors(decoded(path, opened, TOKENS), exact)[1] < max(1.5 * errors(rounded, exact)[1], 1e-3)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_queries_keys_and_values_in_one_tensor_run_every_way(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Rotated by neighbours and by halves, without biases and with them."""
    apart = tiny_llama.weights

    def fused(shape: Shape, seed: int) -> dict[str, np.ndarray]:
        tensors = apart(shape, seed)
        for name in [name for name in tensors if ".attn_q." in name]:
            parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
        return tensors

    monkeypatch.setattr(tiny_llama, "weights", fused)
    check(write(tmp_path / "model.gguf", replace(WIDE, arch=arch), TYPE.Q8_0), opened)
