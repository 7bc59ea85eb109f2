"""Small models with random weights, written as GGUF files: what the tests run ours, the reference and llama.cpp on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from gguf.quants import quantize as ggufs_quantize

from tegrad.llm.quantize import quantize

TYPE = GGMLQuantizationType


@dataclass(frozen=True)
class Shape:
    """Sizes of a test model and its family; the defaults divide by every block size."""

    dim: int = 256
    ffn: int = 512
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 300
    layers: int = 2
    head_dim: int | None = None
    context: int = 128
    tied: bool = False
    bias: bool = False
    gate_bias: bool = False
    rope_freqs: bool = False
    rotated: int | None = None
    """Elements of a head that are rotated, where not all are."""
    long_rope: bool = False
    """With divisors for contexts up to the trained one, and others for longer ones."""
    extra: dict[str, Any] = field(default_factory=dict)
    arch: str = "llama"
    eps: float = 1e-5
    taps: int = 0
    """Of the kernels of layers that convolve: two in three, where there are any."""
    delta: tuple[int, int, int] = (0, 0, 0)
    """Heads, heads of keys, and elements of each, of layers that are delta nets, instead."""
    odd: str | None = None
    """A tensor that no family has."""
    local: tuple[int, int] = (0, 0)
    """Elements of a head, and heads of keys, of layers within a window: two in three."""
    layer_input: int = 0
    """Elements of a layer's own input."""
    shared: int = 0
    """Last layers that take keys and values of earlier ones, and whose feed-forward is twice as wide."""

    @property
    def width(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def turned(self) -> int:
        return self.rotated or self.width

    def sized(self, layer: int) -> tuple[int, int, int]:
        """Elements of a layer's heads, its heads of keys, and elements of its feed-forward."""
        width, kv_heads = self.local if self.local[0] and layer % 3 != 2 else (self.width, self.kv_heads)
        return width, kv_heads, self.ffn * (2 if layer >= self.layers - self.shared > 0 and self.shared else 1)

    def convolves(self, layer: int) -> bool:
        return self.taps > 0 and layer % 3 != (2 if self.delta[0] else 1)


LARGE_EPS = 0.2
"""A norm's epsilon without which no logits are right; that of most models vanishes beside their activations."""
GEMMA3 = {
    "gemma3.attention.sliding_window": 9,
    "gemma3.attention.sliding_window_pattern": 3,
    "gemma3.rope.freq_base": 1e6,
    "gemma3.rope.scaling.type": "linear",
    "gemma3.rope.scaling.factor": 8.0,
}
"""Two layers in three within a window, which rotate otherwise than the third."""
GEMMA2 = {
    "gemma2.attention.sliding_window": 7,
    "gemma2.attn_logit_softcapping": 2.0,
    "gemma2.final_logit_softcapping": 3.0,
}
"""Caps so low that no logit is right without them."""
GEMMA4 = {
    "gemma4.attention.sliding_window": 9,
    "gemma4.rope.freq_base": 1e6,
    "gemma4.rope.freq_base_swa": 1e4,
    "gemma4.final_logit_softcapping": 20.0,
}
SHAPES = {
    "plain": Shape(dim=768, ffn=1280, heads=6, kv_heads=3, vocab=317),
    "odd": Shape(dim=96, ffn=160, heads=3, kv_heads=1, vocab=301, tied=True),
    "grouped": Shape(dim=768, ffn=256, heads=6, kv_heads=3, vocab=331, bias=True, rope_freqs=True, tied=True),
    "wide heads": Shape(heads=3, kv_heads=1, head_dim=256, vocab=301),
    "sixteen to a group": Shape(heads=16, kv_heads=1, head_dim=32, vocab=309),
    "yarn": Shape(
        extra={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32,
        }
    ),
    "linear rope": Shape(
        extra={
            "llama.rope.scaling.type": "linear",
            "llama.rope.scaling.factor": 3.0,
            "llama.rope.scaling.attn_factor": 1.25,
            "llama.rope.freq_base": 50000.0,
        }
    ),
    "granite": Shape(
        arch="granite",
        eps=LARGE_EPS,
        vocab=319,
        bias=True,
        tied=True,
        extra={
            "granite.attention.scale": 0.02,
            "granite.embedding_scale": 3.0,
            "granite.residual_scale": 0.4,
            "granite.logit_scale": 2.5,
        },
    ),
    "mistral3": Shape(
        arch="mistral3",
        eps=LARGE_EPS,
        heads=4,
        head_dim=96,
        vocab=331,
        extra={
            "mistral3.rope.scaling.type": "yarn",
            "mistral3.rope.scaling.factor": 8.0,
            "mistral3.rope.scaling.original_context_length": 8,
            "mistral3.rope.scaling.yarn_beta_fast": 4.0,
            "mistral3.rope.scaling.yarn_beta_slow": 0.5,
            "mistral3.rope.scaling.yarn_log_multiplier": 0.7,
            "mistral3.attention.temperature_scale": 0.3,
        },
    ),
    "smollm3": Shape(arch="smollm3", eps=LARGE_EPS, vocab=323, layers=5, tied=True),
    "qwen2": Shape(arch="qwen2", eps=LARGE_EPS, heads=8, kv_heads=2, vocab=301, extra={"qwen2.rope.freq_base": 1e6}),
    "qwen3": Shape(arch="qwen3", eps=LARGE_EPS, heads=3, kv_heads=1, head_dim=128, vocab=307, tied=True),
    "olmo2": Shape(arch="olmo2", eps=LARGE_EPS, heads=4, kv_heads=2, vocab=337),
    "olmo3": Shape(
        arch="olmo2",
        eps=LARGE_EPS,
        heads=4,
        kv_heads=4,
        layers=5,
        vocab=339,
        extra={
            "olmo2.attention.sliding_window": 9,
            "olmo2.rope.freq_base": 5e4,
            "olmo2.rope.scaling.type": "yarn",
            "olmo2.rope.scaling.factor": 8.0,
            "olmo2.rope.scaling.original_context_length": 32,
            "olmo2.rope.scaling.attn_factor": 1.2,
        },
    ),
    "gemma3": Shape(
        arch="gemma3", eps=LARGE_EPS, heads=4, kv_heads=1, head_dim=128, layers=3, vocab=303, tied=True, extra=GEMMA3
    ),
    "gemma4": Shape(
        arch="gemma4",
        eps=LARGE_EPS,
        heads=4,
        kv_heads=2,
        head_dim=128,
        layers=6,
        vocab=309,
        tied=True,
        extra=GEMMA4,
        local=(64, 4),
    ),
    "gemma4 small": Shape(
        arch="gemma4",
        eps=LARGE_EPS,
        heads=4,
        kv_heads=1,
        head_dim=512,
        layers=9,
        vocab=311,
        tied=True,
        extra=GEMMA4,
        local=(256, 1),
        layer_input=64,
        shared=3,
    ),
    "gemma2": Shape(arch="gemma2", eps=LARGE_EPS, vocab=305, tied=True, layers=2, extra=GEMMA2),
    "phi3": Shape(
        arch="phi3",
        eps=LARGE_EPS,
        dim=768,
        ffn=1280,
        heads=6,
        kv_heads=3,
        vocab=317,
        rotated=96,
        long_rope=True,
        extra={
            "phi3.rope.scaling.attn_factor": 1.19,
            "phi3.rope.scaling.original_context_length": 256,  # which llama.cpp rounds contexts up to
            "phi3.attention.sliding_window": 9,
        },
    ),
    "gpt2": Shape(arch="gpt2", eps=LARGE_EPS, ffn=1024, kv_heads=4, vocab=311, tied=True),
    "gemma": Shape(arch="gemma", eps=LARGE_EPS, kv_heads=1, head_dim=128, vocab=341, tied=True),
    "minicpm": Shape(
        arch="minicpm",
        eps=LARGE_EPS,
        vocab=343,
        long_rope=True,
        tied=True,
        extra={
            "minicpm.embedding_scale": 3.0,
            "minicpm.residual_scale": 0.4,
            "minicpm.logit_scale": 2.5,
            "minicpm.rope.scaling.type": "longrope",
            "minicpm.rope.scaling.attn_factor": 1.19,
            "minicpm.rope.scaling.original_context_length": 256,
        },
    ),
    "internlm2": Shape(arch="internlm2", eps=LARGE_EPS, vocab=347, extra={"internlm2.rope.freq_base": 1e6}),
    "ernie4_5": Shape(arch="ernie4_5", eps=LARGE_EPS, vocab=349, head_dim=128, tied=True),
    "qwen2vl": Shape(  # of which llama.cpp reads no epsilon
        arch="qwen2vl", eps=1e-6, vocab=351, extra={"qwen2vl.rope.dimension_sections": [8, 12, 12, 0]}
    ),
    "qwen3vl": Shape(
        arch="qwen3vl",
        eps=LARGE_EPS,
        head_dim=128,
        vocab=353,
        tied=True,
        extra={"qwen3vl.rope.dimension_sections": [24, 20, 20, 0], "qwen3vl.rope.freq_base": 5e6},
    ),
    "hunyuan": Shape(arch="hunyuan-dense", eps=LARGE_EPS, heads=4, head_dim=128, vocab=373, tied=True),
    "seed_oss": Shape(arch="seed_oss", eps=LARGE_EPS, heads=4, head_dim=96, vocab=355),
    "exaone": Shape(arch="exaone", eps=LARGE_EPS, vocab=357, rope_freqs=True, tied=True),
    "exaone4": Shape(arch="exaone4", eps=LARGE_EPS, vocab=359, rope_freqs=True, tied=True),
    "exaone4 of 64 layers": Shape(
        arch="exaone4",
        dim=64,
        ffn=64,
        heads=2,
        kv_heads=1,
        layers=64,
        vocab=301,
        rope_freqs=True,
        extra={"exaone4.attention.sliding_window": 9, "exaone4.rope.freq_base": 1e6},
    ),
    "glm4": Shape(arch="glm4", eps=LARGE_EPS, kv_heads=1, vocab=361, rotated=32),
    "chatglm": Shape(arch="chatglm", eps=LARGE_EPS, vocab=363, rotated=32),
    "nemotron": Shape(arch="nemotron", eps=LARGE_EPS, vocab=369, rotated=32),
    "arcee": Shape(arch="arcee", eps=LARGE_EPS, vocab=371, rope_freqs=True, tied=True),
    "starcoder2": Shape(arch="starcoder2", eps=LARGE_EPS, vocab=367, tied=True),
    "maincoder": Shape(arch="maincoder", eps=LARGE_EPS, vocab=375, tied=True),
    "pangu": Shape(arch="pangu-embedded", eps=LARGE_EPS, ffn=768, vocab=377),
    "jais2": Shape(arch="jais2", eps=LARGE_EPS, kv_heads=4, vocab=379),
    "stablelm": Shape(arch="stablelm", eps=LARGE_EPS, vocab=381, rotated=16),
    "gptneox": Shape(
        arch="gptneox", eps=LARGE_EPS, kv_heads=4, vocab=383, rotated=16, extra={"gptneox.use_parallel_residual": True}
    ),
    "gptneox in sequence": Shape(
        arch="gptneox", eps=LARGE_EPS, kv_heads=4, vocab=385, rotated=16, extra={"gptneox.use_parallel_residual": False}
    ),
    "phi2": Shape(arch="phi2", eps=LARGE_EPS, kv_heads=4, vocab=387, rotated=32),
    "command-r": Shape(
        arch="command-r",
        eps=LARGE_EPS,
        vocab=389,
        tied=True,
        extra={"command-r.logit_scale": 0.25, "command-r.rope.freq_base": 8e6, "command-r.rope.scaling.type": "none"},
    ),
    "cohere2": Shape(
        arch="cohere2",
        eps=LARGE_EPS,
        heads=4,
        kv_heads=1,
        layers=5,
        vocab=391,
        tied=True,
        extra={
            "cohere2.logit_scale": 0.25,
            "cohere2.rope.freq_base": 5e4,
            "cohere2.rope.scaling.type": "none",
            "cohere2.attention.sliding_window": 9,
        },
    ),
    "lfm2": Shape(
        arch="lfm2",
        eps=LARGE_EPS,
        heads=4,
        kv_heads=2,
        layers=5,
        vocab=397,
        tied=True,
        taps=3,
        extra={"lfm2.rope.freq_base": 1e6, "lfm2.shortconv.l_cache": 3},
    ),
    # Its epsilon is a usual one: the llama.cpp of the tests takes another one for lengths than llama.cpp does today.
    "qwen35": Shape(
        arch="qwen35",
        heads=4,
        kv_heads=2,
        layers=5,
        vocab=401,
        tied=True,
        taps=4,
        delta=(4, 2, 64),
        rotated=16,
        extra={
            "qwen35.rope.freq_base": 1e7,
            "qwen35.rope.dimension_sections": [3, 3, 2, 0],
            "qwen35.ssm.conv_kernel": 4,
            "qwen35.ssm.state_size": 64,
            "qwen35.ssm.time_step_rank": 4,
            "qwen35.ssm.group_count": 2,
            "qwen35.ssm.inner_size": 256,
            "qwen35.full_attention_interval": 3,
        },
    ),
    "gpt2 untied": Shape(arch="gpt2", eps=LARGE_EPS, ffn=1024, kv_heads=4, vocab=313),
}
"""Odd sizes, every family and every optional part of one."""
BOTH_WAYS = {
    "gemma-embedding": Shape(
        arch="gemma-embedding",
        eps=LARGE_EPS,
        dim=192,
        heads=3,
        kv_heads=1,
        head_dim=64,
        layers=3,
        vocab=403,
        tied=True,
        extra={
            "gemma-embedding.attention.sliding_window": 9,
            "gemma-embedding.attention.sliding_window_pattern": 3,
            "gemma-embedding.rope.freq_base": 1e6,
            "gemma-embedding.pooling_type": 1,
        },
    ),
    "llama-embed": Shape(
        arch="llama-embed",
        eps=LARGE_EPS,
        vocab=407,
        extra={"llama-embed.attention.causal": False, "llama-embed.pooling_type": 1},
    ),
    "qwen2": Shape(
        arch="qwen2",
        eps=LARGE_EPS,
        vocab=409,
        extra={"qwen2.attention.causal": False, "qwen2.pooling_type": 3},
    ),
}
"""Models whose tokens attend to later ones, too."""
COHERE = ("command-r", "cohere2")
"""Families whose layer norms have no bias."""
UNGATED = ("gpt2", "starcoder2", "nemotron", "arcee", "jais2", "gptneox", "phi2")
BY_MEAN = ("gpt2", "starcoder2", "nemotron", "jais2", "gptneox", "phi2", "stablelm", *COHERE)
"""Families with layer norms."""
ONE_NORM = ("phi2", *COHERE)
"""Families whose attention and feed-forward read the same normalized stream."""
HEAD_NORMS = (
    *("qwen3", "lfm2", "qwen35", "qwen3vl", "hunyuan-dense", "maincoder", "exaone4"),
    *("gemma3", "gemma4", "gemma-embedding"),
)
"""Families that normalize each head's query and key."""
FLOATS = ("position_embd.", "shortconv.conv.weight", "ssm_conv1d.weight")
"""Matrices that are F32 in every file, by their first or last letters."""
UNPACKED = "per_layer_model_proj.weight"
"""One that is never quantized."""
MIXED = {"attn_v": TYPE.Q6_K, "ffn_down": TYPE.Q6_K}
"""What a Q4_K_M file has in other formats: q, k and v are no longer one matrix."""


def disagreements(ours: np.ndarray, theirs: np.ndarray, margin: float) -> list[str]:
    """Where our likeliest token is not theirs and in their logits lies more than `margin` deviations below theirs."""
    found = []
    for at, (own, peer) in enumerate(zip(ours, theirs, strict=True)):
        distance = float(peer.max() - peer[own.argmax()]) / float(theirs.std())
        if distance > margin:
            found.append(f"position {at}: {own.argmax()} for {peer.argmax()}, {distance:.3f} below")
    return found


def weights(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """Random float32 tensors, scaled so that activations neither vanish nor explode and attention is not uniform."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def vector(size: int, around: float) -> np.ndarray:
        return (around + rng.standard_normal(size) * 0.1).astype(np.float32)

    tensors = {"token_embd.weight": matrix(shape.vocab, shape.dim, 16.0)}
    tensors["token_embd_norm.weight" if shape.arch == "lfm2" else "output_norm.weight"] = vector(shape.dim, 1)
    if not shape.tied:
        tensors["output.weight"] = matrix(shape.vocab, shape.dim, 3.0)
    if shape.rope_freqs:
        tensors["rope_freqs.weight"] = rng.uniform(1, 8, shape.turned // 2).astype(np.float32)
    if shape.long_rope:
        for length in ("long", "short"):
            tensors[f"rope_factors_{length}.weight"] = rng.uniform(1, 8, shape.turned // 2).astype(np.float32)
    if shape.odd:
        tensors[shape.odd] = vector(shape.dim, 0)
    llama, qkv = (*["attn"] * shape.bias, *["ffn_gate", "ffn_up"] * shape.gate_bias), ("attn_q", "attn_k", "attn_v")
    biased = {"llama": llama, "granite": llama, "pangu-embedded": ("attn",)}
    biased |= dict.fromkeys(("qwen2", "qwen2vl", "seed_oss", "glm4", "chatglm", "stablelm"), qkv)
    biased |= dict.fromkeys(("gpt2", "starcoder2", "jais2", "gptneox", "phi2"), ("",))
    for at in range(shape.layers):
        width, kv_heads, ffn = shape.sized(at)
        query, key = shape.heads * width, kv_heads * width
        sizes = {
            "attn_q": (query, shape.dim, 2.0), "attn_k": (key, shape.dim, 2.0), "attn_v": (key, shape.dim, 1.0),
            "attn_output": (shape.dim, query, 1.0), "ffn_gate": (ffn, shape.dim, 1.0),
            "ffn_up": (ffn, shape.dim, 1.0), "ffn_down": (shape.dim, ffn, 1.0),
        }  # fmt: skip
        heads, keys, wide = shape.delta
        if shape.arch == "qwen35":
            sizes["attn_q"] = (2 * query, shape.dim, 2.0)
        if shape.convolves(at) and heads:
            channels = (heads + 2 * keys) * wide
            sizes = {name: size for name, size in sizes.items() if name.startswith("ffn")}
            sizes |= {
                "attn_qkv": (channels, shape.dim, 1.0), "attn_gate": (heads * wide, shape.dim, 1.0),
                "ssm_beta": (heads, shape.dim, 1.0), "ssm_alpha": (heads, shape.dim, 1.0),
                "ssm_conv1d": (channels, shape.taps, 1.0), "ssm_out": (shape.dim, heads * wide, 1.0),
            }  # fmt: skip
            tensors[f"blk.{at}.ssm_dt.bias"] = vector(heads, 0.5)
            tensors[f"blk.{at}.ssm_a"] = -np.abs(vector(heads, 0.3))
            tensors[f"blk.{at}.ssm_norm.weight"] = vector(wide, 1)
        elif shape.convolves(at):
            sizes = {name: size for name, size in sizes.items() if name.startswith("ffn")}
            sizes |= {
                "shortconv.in_proj": (3 * shape.dim, shape.dim, 1.0), "shortconv.conv": (shape.dim, shape.taps, 1.0),
                "shortconv.out_proj": (shape.dim, shape.dim, 1.0),
            }  # fmt: skip
        if shape.layer_input:
            sizes |= {"inp_gate": (shape.layer_input, shape.dim, 1.0), "proj": (shape.dim, shape.layer_input, 1.0)}
            tensors[f"blk.{at}.post_norm.weight"] = vector(shape.dim, 1)
        if shape.arch == "gemma4":
            tensors[f"blk.{at}.layer_output_scale.weight"] = vector(1, 0.7)
        shares = at >= shape.layers - shape.shared if shape.shared else False
        for name in ("attn_k", "attn_v") if shares else ("attn_v",) if shape.local[0] and not shape.shared else ():
            if shares or at % 3 == 2:  # values of what keys are made of
                del sizes[name]
        matrices = {name: matrix(*size) for name, size in sizes.items()}
        if shape.arch in ("gpt2", "phi3", "chatglm", "gptneox", "phi2"):
            matrices["attn_qkv"] = np.concatenate([matrices.pop(f"attn_{part}") for part in "qkv"])
        if shape.arch in UNGATED:
            del matrices["ffn_gate"]
        if shape.arch in ("phi3", "glm4", "chatglm"):
            matrices["ffn_up"] = np.concatenate([matrices.pop("ffn_gate"), matrices["ffn_up"]])
        for name, array in matrices.items():
            tensors[f"blk.{at}.{name}.weight"] = array
            if name.startswith(biased.get(shape.arch, ())):
                tensors[f"blk.{at}.{name}.bias"] = vector(len(array), 0)
        second = "post_attention_norm" if shape.arch in ("seed_oss", "qwen35") else "ffn_norm"
        before = ("attn_norm", *[second] * (shape.arch not in ONE_NORM))
        for name in before if shape.arch not in ("olmo2", "exaone4") else ():
            tensors[f"blk.{at}.{name}.weight"] = vector(shape.dim, 1)
        after = shape.arch in ("gemma2", "gemma3", "gemma4", "gemma-embedding", "olmo2", "exaone4", "glm4")
        for name in ("post_attention_norm", "post_ffw_norm") if after else ():
            tensors[f"blk.{at}.{name}.weight"] = vector(shape.dim, 1)
        for name, size in (("attn_q_norm", query), ("attn_k_norm", key)) if shape.arch == "olmo2" else ():
            tensors[f"blk.{at}.{name}.weight"] = vector(size, 1.5)
        for name in ("attn_q_norm", "attn_k_norm") if shape.arch in HEAD_NORMS and not shape.convolves(at) else ():
            if f"blk.{at}.{name.removesuffix('_norm')}.weight" in tensors:
                usual = vector(width, 1.5)  # gemma4 scales no scores
                tensors[f"blk.{at}.{name}.weight"] = usual / np.float32(width**0.25) if shape.local[0] else usual
    if shape.arch == "gpt2":
        tensors["position_embd.weight"] = matrix(shape.context, shape.dim, 8.0)
    if shape.local[0]:
        turned = shape.turned // 8  # of a quarter of a head's pairs, as published
        tensors["rope_freqs.weight"] = np.array([1] * turned + [1e30] * (shape.turned // 2 - turned), np.float32)
    if shape.layer_input:
        tensors["per_layer_token_embd.weight"] = matrix(shape.vocab, shape.layers * shape.layer_input, 16.0)
        tensors["per_layer_model_proj.weight"] = matrix(shape.layers * shape.layer_input, shape.dim)
        tensors["per_layer_proj_norm.weight"] = vector(shape.layer_input, 1)
    if shape.arch == "phi2":
        tensors["output.bias"] = vector(shape.vocab, 0)
    if shape.arch in BY_MEAN and shape.arch not in COHERE:
        for name in [name.removesuffix(".weight") for name in tensors if name.endswith("_norm.weight")]:
            tensors[f"{name}.bias"] = vector(shape.dim, 0)
    return tensors


def pack(array: np.ndarray, kind: TYPE) -> np.ndarray:
    """Rows as blocks of a kind."""
    if kind == TYPE.F32:
        return array.astype(np.float32)
    if kind == TYPE.F16:
        return array.astype(np.float16)
    if kind == TYPE.BF16:
        return ggufs_quantize(array, kind)
    return quantize(array, kind)


_WRITTEN: dict[tuple[str, Any], bytes] = {}
"""The last files by what they were made of: the cases of a test write the same again and again."""


def write(
    path: Path,
    shape: Shape,
    kind: TYPE,
    *,
    seed: int = 0,
    kinds: dict[str, TYPE] | None = None,
    vocabulary: Vocabulary | None = None,
) -> Path:
    """A model with matrices of `kind`, or as `kinds` says by part of name."""
    key = (repr((shape, kind, seed, kinds)), weights)  # a test may put weights of its own into their place
    if vocabulary is None and key in _WRITTEN:
        path.write_bytes(_WRITTEN[key])
        return path
    writer = GGUFWriter(path, shape.arch)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    if shape.arch == "gemma4":
        sized = [shape.sized(at) for at in range(shape.layers)]
        writer.add_feed_forward_length([ffn for *_, ffn in sized] if shape.shared else shape.ffn)
        writer.add_sliding_window_pattern([at % 3 != 2 for at in range(shape.layers)])
        writer.add_key_length_swa(shape.local[0])
        writer.add_value_length_swa(shape.local[0])
        writer.add_rope_dimension_count_swa(shape.local[0])
        writer.add_embedding_length_per_layer_input(shape.layer_input)
        writer.add_shared_kv_layers(shape.shared)
    else:
        writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    kv_heads = [0 if shape.convolves(at) else shape.kv_heads for at in range(shape.layers)]
    if shape.local[0]:
        kv_heads = [shape.sized(at)[1] for at in range(shape.layers)]
    several = set(kv_heads) != {shape.kv_heads} and not shape.delta[0]
    writer.add_head_count_kv(kv_heads if several else shape.kv_heads)
    if shape.arch in BY_MEAN:
        writer.add_layer_norm_eps(shape.eps)
    else:
        writer.add_layer_norm_rms_eps(shape.eps)
    if shape.arch != "gpt2":
        writer.add_rope_dimension_count(shape.turned)
    if shape.head_dim:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    for key, value in shape.extra.items():
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        adders.get(type(value), writer.add_string)(key, value)
    (vocabulary or letters(shape.vocab)).add_to(writer)
    for name, array in weights(shape, seed).items():
        own = kind if array.ndim == 2 and not name.startswith(FLOATS) and not name.endswith(FLOATS) else TYPE.F32
        own = TYPE.BF16 if name == UNPACKED and kind not in (TYPE.F32, TYPE.F16) else own
        own = next((other for part, other in (kinds or {}).items() if part in name), own)
        data = pack(array, own)
        writer.add_tensor(name, data, raw_dtype=own)
    finish(writer)
    if vocabulary is None:
        if len(_WRITTEN) == 8:
            del _WRITTEN[next(iter(_WRITTEN))]
        _WRITTEN[key] = path.read_bytes()
    return path


def rewritten(
    path: Path, target: Path, arch: str | None = None, expand: bool = False, ones: int = 0, **changes: object
) -> Path:
    """A copy of a model: values changed, added, or left out where None; `tensor` left out; all `expand`ed to F32, with
    so many `ones` in front of their shapes."""
    reader = GGUFReader(path)
    writer = GGUFWriter(target, arch or reader.fields["general.architecture"].contents())
    for key, field_ in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or changes.get(key, 0) is None:
            continue
        value, kinds = changes.get(key, field_.contents()), field_.types[:2]
        if isinstance(value, list) and len(kinds) == 1:  # a number's place taken by several
            kinds = [GGUFValueType.ARRAY, *kinds]
        writer.add_key_value(key, value, *kinds)
    for key in changes.keys() - reader.fields.keys() - {"tensor"}:
        value = changes[key]
        whole = writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32
        {str: writer.add_string, float: writer.add_float32, list: writer.add_array}.get(type(value), whole)(key, value)
    for tensor in reader.tensors:
        if tensor.name == changes.get("tensor"):
            continue
        data, kind = np.array(tensor.data), tensor.tensor_type
        if expand:
            data, kind = dequantize(data, kind).astype(np.float32), TYPE.F32
        writer.add_tensor(tensor.name, data.reshape(*[1] * ones, *data.shape), raw_dtype=kind)
    finish(writer)
    return target


def finish(writer: GGUFWriter) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says about its tokens."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    bos: int
    eos: int
    model: str = "gpt2"
    pre: str = "gpt-2"
    scores: list[float] | None = None
    template: str | None = None
    add_bos: bool | None = True

    def add_to(self, writer: GGUFWriter) -> None:
        """Write the values."""
        writer.add_vocab_size(len(self.tokens))
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.scores:
            writer.add_token_scores(self.scores)
        writer.add_bos_token_id(self.bos)
        writer.add_eos_token_id(self.eos)
        if self.add_bos is not None:
            writer.add_add_bos_token(self.add_bos)
        if self.template:
            writer.add_chat_template(self.template)


def letters(size: int) -> Vocabulary:
    """A byte-level BPE vocabulary of that size: the 256 bytes, merges of letters, two control tokens, unused ones."""
    tokens = byte_alphabet()
    merges = [(a, b) for a in "etaoinshr" for b in "etaoinshr"][: max(0, size - len(tokens) - 2)]
    tokens += [a + b for a, b in merges]
    bos = len(tokens)
    tokens += ["<|bos|>", "<|eos|>"]
    kinds = [1] * bos + [3, 3] + [5] * (size - len(tokens))
    tokens += [f"<|unused{at}|>" for at in range(size - len(tokens))]
    return Vocabulary(tokens, kinds, [f"{a} {b}" for a, b in merges], bos, bos + 1)


def byte_alphabet() -> list[str]:
    """The 256 letters that stand for bytes in a byte-level vocabulary, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [letter[byte] for byte in range(256)]
