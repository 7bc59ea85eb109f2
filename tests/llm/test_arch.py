"""What a family does not have is refused by name, and what it must have is missed by name."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_llama import SHAPES, TYPE, Shape, rewritten, write

from tegrad.llm.arch import ARCHES, Config
from tegrad.llm.errors import ContextError, GgufError, ModelError, UnsupportedModelError
from tegrad.llm.gguf import Gguf

SMALL = Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1)


def read(path: Path) -> Config:
    with Gguf.open(path) as file:
        return Config.read(file)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.type", "adapter", "no model but of the type 'adapter'"),
        ("llama.attention.causal", False, "both directions"),
        ("llama.attention.scale", 0.5, r"scales attention by a number of its own \(llama.attention.scale\)"),
        ("llama.final_logit_softcapping", 30.0, "caps logits"),
        ("llama.attention.max_alibi_bias", 8.0, "ALiBi"),
        ("llama.logit_scale", 0.25, "scales logits"),
    ],
)
def test_values_that_change_the_numbers_are_refused(tmp_path: Path, key: str, value: object, said: str) -> None:
    path = write(tmp_path / "model.gguf", replace(SMALL, extra={key: value}), TYPE.F32)
    with pytest.raises(UnsupportedModelError, match=said):
        read(path)


def test_values_that_change_nothing_are_not(tmp_path: Path) -> None:
    extra = {"llama.attention.causal": True, "llama.expert_count": 0, "llama.logit_scale": 0.0, "general.type": "model"}
    assert read(write(tmp_path / "model.gguf", replace(SMALL, extra=extra), TYPE.F32)).rope.dim == 32


@pytest.mark.parametrize("name", ARCHES)
def test_a_tensor_that_the_family_does_not_use_is_refused(tmp_path: Path, name: str) -> None:
    shape = replace(SMALL, arch=name)
    odd = "blk.0.attn_sinks.weight" if name == "llama" else "rope_freqs.weight"
    path = write(tmp_path / "model.gguf", shape, TYPE.F32)
    assert read(path).arch is ARCHES[name]
    with pytest.raises(UnsupportedModelError, match=f"the tensor '{odd}', which the family {name}"):
        read(write(tmp_path / "odd.gguf", replace(shape, odd=odd), TYPE.F32))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen2", "blk.0.attn_k.bias"),
        ("qwen3", "blk.0.attn_q_norm.weight"),
        ("gpt2", "position_embd.weight"),
        ("gpt2", "blk.0.attn_qkv.weight"),
        ("gpt2", "blk.0.ffn_norm.bias"),
        ("gpt2", "output_norm.bias"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, tensor: str) -> None:
    path = write(tmp_path / "model.gguf", replace(SMALL, arch=name), TYPE.F32)
    with pytest.raises(GgufError, match=f"lacks the tensor '{tensor}'"):
        read(rewritten(path, tmp_path / "less.gguf", tensor=tensor))


def test_another_familys_tensors_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", replace(SHAPES["gpt2"], layers=1), TYPE.F32)
    with pytest.raises(ModelError):
        read(rewritten(path, tmp_path / "wrong.gguf", "llama"))


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    shape = replace(SMALL, extra={"llama.attention.sliding_window": 48})
    config = read(write(tmp_path / "model.gguf", shape, TYPE.F32))
    assert (config.context, config.window, config.longest, config.positions()) == (128, 48, 48, 48)
    assert config.positions(48) == 48
    with pytest.raises(ContextError, match="sliding window of 48"):
        config.positions(49)
    wide = replace(SMALL, extra={"llama.attention.sliding_window": 4096})
    assert read(write(tmp_path / "wide.gguf", wide, TYPE.F32)).positions() == 128
