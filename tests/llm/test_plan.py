"""The many-kernel decode step on the board: a whole small model, token by token, against the float reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decode_steps import TOKENS, decoded, errors
from llama_cpp import peer
from tiny_llama import MIXED, SHAPES, TYPE, Shape, write

from tegrad.llm.reference import Reference

pytestmark = pytest.mark.board


NARROW = Shape(dim=576, ffn=768, heads=9, kv_heads=3, vocab=301, tied=True)
FALLEN_BACK = {
    "attn_v": TYPE.Q8_0, "token_embd": TYPE.Q8_0, "0.ffn_down": TYPE.Q6_K, "1.ffn_down": TYPE.Q4_K, "ffn_up": TYPE.Q5_1,
    "ffn_gate": TYPE.Q5_1,
}  # fmt: skip
"""What llama.cpp's Q4_K_M and Q5_K_M take besides Q5_0 where rows of 576 are no whole K-quant blocks."""
GEMMA = replace(SHAPES["gemma3"], dim=256, ffn=512)
WIDE = Shape(dim=2048, ffn=4096, heads=16, kv_heads=4, layers=1)


@pytest.mark.parametrize(
    ("shape", "kind", "kinds", "q8"),
    [
        pytest.param(SHAPES["plain"], TYPE.Q4_K, MIXED, False, id="llama Q4_K_M"),
        pytest.param(NARROW, TYPE.Q5_0, FALLEN_BACK, False, id="llama Q4_K_M, rows of 576"),
        pytest.param(SHAPES["qwen2"], TYPE.Q8_0, {}, False, id="qwen2 Q8_0", marks=pytest.mark.long),
        pytest.param(replace(SHAPES["qwen3"], heads=4), TYPE.Q6_K, {}, True, id="qwen3 Q6_K", marks=pytest.mark.long),
        pytest.param(SHAPES["phi3"], TYPE.Q4_K, {"ffn_down": TYPE.Q6_K}, False, id="phi3 Q4_K", marks=pytest.mark.long),
        pytest.param(SHAPES["smollm3"], TYPE.Q4_K, {}, False, id="smollm3 Q4_K", marks=pytest.mark.long),
        pytest.param(SHAPES["olmo2"], TYPE.Q8_0, {}, False, id="olmo2 Q8_0"),
        pytest.param(SHAPES["olmo3"], TYPE.Q4_K, {}, False, id="olmo3 Q4_K", marks=pytest.mark.long),
        pytest.param(WIDE, TYPE.Q8_0, {}, False, id="rows of whole segments", marks=pytest.mark.long),
        pytest.param(SHAPES["plain"], TYPE.Q5_K, {}, False, id="llama Q5_K", marks=pytest.mark.long),
        pytest.param(SHAPES["plain"], TYPE.Q4_0, {}, False, id="llama Q4_0", marks=pytest.mark.long),
        pytest.param(GEMMA, TYPE.Q4_K, {"ffn_down": TYPE.Q6_K, "token_embd": TYPE.Q8_0}, False, id="gemma3 Q4_K_M"),
        pytest.param(SHAPES["gemma2"], TYPE.Q6_K, {}, True, id="gemma2 Q6_K", marks=pytest.mark.long),
        pytest.param(SHAPES["granite"], TYPE.Q8_0, {}, False, id="granite Q8_0", marks=pytest.mark.long),
        pytest.param(SHAPES["glm4"], TYPE.Q8_0, {}, False, id="glm4 Q8_0"),
        pytest.param(SHAPES["sixteen to a group"], TYPE.Q4_K, {}, True, id="Q4_K, group of 16", marks=pytest.mark.long),
        pytest.param(SHAPES["chatglm"], TYPE.Q4_0, {}, False, id="chatglm Q4_0", marks=pytest.mark.long),
        pytest.param(SHAPES["gemma"], TYPE.Q4_K, {}, False, id="gemma Q4_K", marks=pytest.mark.long),
        pytest.param(SHAPES["minicpm"], TYPE.Q8_0, {}, False, id="minicpm Q8_0", marks=pytest.mark.long),
        pytest.param(SHAPES["exaone4"], TYPE.Q6_K, {}, False, id="exaone4 Q6_K", marks=pytest.mark.long),
        pytest.param(SHAPES["seed_oss"], TYPE.Q5_0, {}, False, id="seed_oss Q5_0", marks=pytest.mark.long),
        pytest.param(SHAPES["starcoder2"], TYPE.Q4_K, {}, False, id="starcoder2 Q4_K"),
        pytest.param(SHAPES["hunyuan"], TYPE.Q8_0, {}, False, id="hunyuan Q8_0", marks=pytest.mark.long),
        pytest.param(SHAPES["nemotron"], TYPE.Q6_K, {}, True, id="nemotron Q6_K", marks=pytest.mark.long),
        pytest.param(SHAPES["arcee"], TYPE.Q4_K, {}, False, id="arcee Q4_K", marks=pytest.mark.long),
        pytest.param(SHAPES["cohere2"], TYPE.Q4_K, {"ffn_down": TYPE.Q6_K}, False, id="cohere2 Q4_K"),
        pytest.param(SHAPES["command-r"], TYPE.Q6_K, {}, True, id="command-r Q6_K", marks=pytest.mark.long),
        pytest.param(SHAPES["phi2"], TYPE.Q8_0, {}, False, id="phi2 Q8_0", marks=pytest.mark.long),
        pytest.param(SHAPES["gptneox"], TYPE.Q4_K, {}, False, id="gptneox Q4_K", marks=pytest.mark.long),
        pytest.param(SHAPES["stablelm"], TYPE.Q5_K, {}, False, id="stablelm Q5_K", marks=pytest.mark.long),
        pytest.param(SHAPES["jais2"], TYPE.Q6_K, {}, False, id="jais2 Q6_K", marks=pytest.mark.long),
        pytest.param(SHAPES["pangu"], TYPE.Q8_0, {}, False, id="pangu Q8_0", marks=pytest.mark.long),
        pytest.param(SHAPES["maincoder"], TYPE.Q8_0, {}, False, id="maincoder Q8_0", marks=pytest.mark.long),
        pytest.param(SHAPES["qwen35"], TYPE.Q4_K, {"ffn_down": TYPE.Q6_K}, False, id="qwen35 Q4_K"),
        pytest.param(
            SHAPES["gemma4 small"],
            TYPE.Q4_K,
            {"proj.weight": TYPE.Q8_0, "per_layer_token": TYPE.Q5_0},
            False,
            id="gemma4 small Q4_K",
        ),
        pytest.param(SHAPES["gemma4"], TYPE.Q6_K, {}, True, id="gemma4 Q6_K", marks=pytest.mark.long),
        pytest.param(SHAPES["lfm2"], TYPE.Q4_K, {"ffn_down": TYPE.Q6_K}, False, id="lfm2 Q4_K"),
        pytest.param(
            replace(SHAPES["lfm2"], dim=96, heads=3, kv_heads=1),
            TYPE.Q8_0,
            {"out_proj": TYPE.F16},
            False,
            id="lfm2 Q8_0, rows of 96, and some floats",
            marks=pytest.mark.long,
        ),
        pytest.param(
            SHAPES["phi2"],
            TYPE.Q8_0,
            {"ffn_up.weight": TYPE.F16},
            False,
            id="one norm, for packed rows and for floats",
            marks=pytest.mark.long,
        ),
        pytest.param(
            SHAPES["gpt2"],
            TYPE.Q5_0,
            {"attn_qkv.weight": TYPE.F16, "ffn_up.weight": TYPE.F16},
            False,
            id="gpt2, only some packed",
            marks=pytest.mark.long,
        ),
        pytest.param(
            SHAPES["starcoder2"],
            TYPE.Q8_0,
            {"attn_q.weight": TYPE.F16},
            True,
            id="packed and not in one product",
            marks=pytest.mark.long,
        ),
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
        pytest.param(SHAPES["starcoder2"], TYPE.F16, id="starcoder2 F16", marks=pytest.mark.long),
        pytest.param(SHAPES["cohere2"], TYPE.F16, id="cohere2 F16", marks=pytest.mark.long),
        pytest.param(SHAPES["phi2"], TYPE.F16, id="phi2 F16", marks=pytest.mark.long),
        pytest.param(SHAPES["mistral3"], TYPE.F16, id="mistral3 F16", marks=pytest.mark.long),
        pytest.param(SHAPES["olmo2"], TYPE.F16, id="olmo2 F16", marks=pytest.mark.long),
        pytest.param(SHAPES["qwen35"], TYPE.F16, id="qwen35 F16", marks=pytest.mark.long),
        pytest.param(SHAPES["gemma4"], TYPE.F16, id="gemma4 F16", marks=pytest.mark.long),
        pytest.param(SHAPES["gemma4 small"], TYPE.F16, id="gemma4 small F16", marks=pytest.mark.long),
        pytest.param(SHAPES["lfm2"], TYPE.F16, id="lfm2 F16", marks=pytest.mark.long),
        pytest.param(SHAPES["gemma2"], TYPE.F16, id="gemma2 F16"),
        pytest.param(GEMMA, TYPE.F32, id="gemma3 F32", marks=pytest.mark.long),
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
