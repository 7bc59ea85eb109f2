"""Models of random weights with the exact shapes of published ones, so that anybody can measure the same work.

`python -m tegrad.bench.models 1b-q6k --out DIR` writes DIR/1b-q6k.gguf and prints its path; a name is SHAPE-FORMAT, of
one format, or of a mixture of them as llama-quantize makes it and published files have it.
What a file computes is meaningless but finite: blocks are random bits, whose scales are set so that a product keeps the
size of its input. Every file has a valid vocabulary of the true size. Equal names give equal bytes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod, sqrt
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias
from zlib import crc32

import numpy as np
import typer
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from tegrad import kept
from tegrad.errors import TegradError
from tegrad.llm.arch import LOCAL_SIZES
from tegrad.llm.config import FFN, INPUT_LENGTH, KV_HEADS, PATTERN, SHARED_LAYERS, Config, stored_name, tensor_name
from tegrad.llm.errors import GgufError
from tegrad.llm.families import ARCHES, LONG_ROPE
from tegrad.llm.formats import F32, PACKED, PLAIN, BlockType
from tegrad.llm.network import Spec

TYPE: TypeAlias = GGMLQuantizationType
Array: TypeAlias = NDArray[Any]
Value: TypeAlias = int | float | str | list[int] | list[bool]


class ModelNameError(TegradError):
    """A name that is not SHAPE-FORMAT."""


# --- which format each matrix has in a mixture ------------------------------------------------------------------------
#
# "Q4_K_M" is no format: such a file has Q4_K, Q6_K for what is worth more bits, and other formats where a row is no
# multiple of 256 weights. The rules were read in llama.cpp's src/llama-quant.cpp (llama_tensor_get_type_impl and
# tensor_type_fallback, ggml 0.25.3), for models without experts and without an importance matrix.


@dataclass(frozen=True, slots=True)
class Place:
    """A matrix in a model."""

    name: str
    """Without layer and ".weight"."""
    columns: int
    layer: int = 0
    layers: int = 1
    group: int = 1
    """Query heads for each key head."""
    output: bool = False
    """It makes the logits: the output matrix, or the embedding of a file without one."""


Rule: TypeAlias = Callable[[Place], str | None]
"""A format by its short name, or None for that of the mixture."""


def _worth_more(place: Place) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    eighth = place.layers // 8
    return place.layer < eighth or place.layer >= 7 * place.layers // 8 or (place.layer - eighth) % 3 == 2


def _more(kind: str) -> Rule:
    return lambda place: kind if _worth_more(place) else None


def _always(kind: str) -> Rule:
    return lambda place: kind


@dataclass(frozen=True, slots=True)
class Mixture:
    """A base format, that of the output, and what has others."""

    base: str
    rules: Mapping[str, Rule] = field(default_factory=dict)
    output: str = "q6k"


MIXTURES: Final[Mapping[str, Mixture]] = {
    "q4_1": Mixture("q4_1"),
    "q5_0": Mixture("q5_0"),
    "q3km": Mixture("q3k", {
        "attn_v": lambda place: "q5k" if place.layer < 2 else "q4k",
        "attn_qkv": _always("q4k"),
        "attn_output": _always("q4k"),
        "ffn_down": lambda place: "q5k" if place.layer < place.layers // 16 else "q4k",
    }),
    "q4km": Mixture("q4k", {"attn_v": _more("q6k"), "attn_qkv": _always("q5k"), "ffn_down": _more("q6k")}),
    "q5km": Mixture("q5k", {"attn_v": _more("q6k"), "attn_qkv": _always("q6k"), "ffn_down": _more("q6k")}),
    "iq4xs": Mixture("iq4_xs", {
        "attn_v": lambda place: "q5k" if place.group >= 4 else None,
        "ffn_down": lambda place: "q5k" if place.layer < place.layers // 8 else None,
    }),
}  # fmt: skip
"""By the end of a model's name: Q4_1, Q5_0, Q3_K_M, Q4_K_M, Q5_K_M, IQ4_XS."""

INSTEAD: Final[Mapping[str, str]] = {"q3k": "q4_0", "q4k": "q5_0", "q5k": "q5_1", "q6k": "q8_0", "iq4_xs": "iq4_nl"}
"""What a format of blocks of 256 becomes where a row is no multiple of them."""
LARGE_BLOCK: Final = 256


def format_of(mixture: Mixture, place: Place) -> str:
    """The format of a matrix, by its short name."""
    whole = place.columns % LARGE_BLOCK == 0
    if place.output:
        return mixture.output if whole else INSTEAD[mixture.output]
    rule = mixture.rules.get(place.name)
    chosen = (rule(place) if rule else None) or mixture.base
    return chosen if whole else INSTEAD.get(chosen, chosen)


# --- shapes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a published model's configuration file says."""

    arch: str
    vocab: int
    dim: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    specials: int
    """The first control token, of which there are as many as the vocabulary then has room for."""
    tied: bool = True
    eps: float = 1e-5
    base: float = 10000.0
    stretch: float | None = None
    """Llama 3's rope scaling: the factor of the slow pairs, of a context of 8192."""
    pieces: str = "llama-bpe"
    """How text is cut (tokenizer.ggml.pre), or "spm" for a SentencePiece vocabulary."""
    own: Mapping[str, Value] = field(default_factory=dict)
    """What only its family says, by the names after the family's."""
    attends: tuple[int, ...] = ()
    """Layers that do, where the others convolve."""
    values_are_keys: bool = False
    """Layers that attend to all positions have no matrix of values."""
    path: str = "a shape"
    """What errors name."""

    @property
    def metadata(self) -> dict[str, Value]:
        """Everything that the file says but its vocabulary."""
        sizes: dict[str, Value] = {
            "context_length": self.context,
            "embedding_length": self.dim,
            "block_count": self.layers,
            FFN: self.ffn,
            "attention.head_count": self.heads,
            KV_HEADS: self.kv_heads,
        }
        if self.attends:
            sizes[KV_HEADS] = [self.kv_heads * (at in self.attends) for at in range(self.layers)]
        if ARCHES[self.arch].norm == "layer":
            sizes["attention.layer_norm_epsilon"] = self.eps
        else:
            sizes |= {
                "attention.layer_norm_rms_epsilon": self.eps,
                "attention.key_length": self.head_dim,
                "attention.value_length": self.head_dim,
                "rope.dimension_count": self.head_dim,
                "rope.freq_base": self.base,
            }
        named = {f"{self.arch}.{name}": value for name, value in (sizes | dict(self.own)).items()}
        return {"general.architecture": self.arch, **named}

    def corrupt(self, what: str) -> GgufError:
        """The error for sizes that contradict each other."""
        return GgufError(f"{self.path}: {what}")

    @property
    def config(self) -> Config:
        """The sizes as the loader reads them from the file."""
        made = Config.of(self, lambda spec: (self.vocab, self.dim))
        if not self.values_are_keys:
            return made
        return replace(made, forms=tuple(replace(form, values_are_keys=form.window is None) for form in made.forms))

    def format(self, kind: str, spec: Spec, layer: int | None) -> BlockType:
        """The format of a matrix where the model has that format, or mixture."""
        arch, config = ARCHES[self.arch], self.config
        sizes = config.at(layer or 0).size
        if spec is arch.positions:
            return F32
        if arch.per_layer is not None and spec is arch.per_layer.matrix and kind not in map(short, PLAIN):
            return FORMATS["bf16"]
        if kind not in MIXTURES:
            return FORMATS[kind]
        tables = (arch.embedding, arch.per_layer and arch.per_layer.table)
        output = spec is arch.output or (self.tied and spec in tables)
        name = spec.stack.name if spec.stack else spec.name
        at, layers = layer or 0, self.layers
        if name == "attn_v":  # counted where a file has any, be they read or not, beside those of all three
            net, joined = config.network, False
            having = [at for at in range(layers) if spec in net.project(at).matrices or net.kept_by(at) != at]
            if arch.instead is not None:
                joined = any(one.name == "attn_qkv" for one in arch.instead.project)
            at, layers = having.index(at), layers if joined else len(having)
        place = Place(name, sizes(spec.shape[-1]), at, layers, config.at(0).group, output)
        return FORMATS[format_of(MIXTURES[kind], place)]


_QWEN: Final = 151643
_GEMMA4: Final[Mapping[str, Value]] = {
    **dict.fromkeys(LOCAL_SIZES, 256), "rope.freq_base_swa": 10000.0, "final_logit_softcapping": 30.0, INPUT_LENGTH: 0,
}  # fmt: skip
# fmt: off
SHAPES: Final[Mapping[str, ModelShape]] = {
    "1b": ModelShape("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 128000, base=5e5, stretch=32),
    "3b": ModelShape("llama", 128256, 3072, 8192, 28, 24, 8, 128, 131072, 128000, base=5e5, stretch=32),
    "8b": ModelShape("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 128000, tied=False, base=5e5, stretch=8),
    "mistral-7b": ModelShape("llama", 32768, 4096, 14336, 32, 32, 8, 128, 32768, 1, tied=False, base=1e6, pieces="spm"),
    "qwen2.5-0.5b": ModelShape(
        "qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, _QWEN, eps=1e-6, base=1e6, pieces="qwen2"
    ),
    "qwen3-0.6b": ModelShape(
        "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, _QWEN, eps=1e-6, base=1e6, pieces="qwen2"
    ),
    "qwen3-1.7b": ModelShape(
        "qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 40960, _QWEN, eps=1e-6, base=1e6, pieces="qwen2"
    ),
    "gemma2-2b": ModelShape(
        "gemma2", 256000, 2304, 9216, 26, 8, 4, 256, 8192, 0, eps=1e-6, pieces="spm",
        own={
            "attention.sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3-1b": ModelShape(
        "gemma3", 262144, 1152, 6912, 26, 4, 1, 256, 32768, 0, eps=1e-6, base=1e6, pieces="spm",
        own={"attention.sliding_window": 512},
    ),
    "gemma3-4b": ModelShape(
        "gemma3", 262208, 2560, 10240, 34, 8, 4, 256, 131072, 0, eps=1e-6, base=1e6, pieces="spm",
        own={"attention.sliding_window": 1024, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gemma4-e2b": ModelShape(
        "gemma4", 262144, 1536, 6144, 35, 8, 1, 512, 131072, 0, eps=1e-6, base=1e6, pieces="spm",
        own={**_GEMMA4,
            PATTERN: [at % 5 != 4 for at in range(35)], "attention.sliding_window": 512,
            SHARED_LAYERS: 20, FFN: [6144] * 15 + [12288] * 20,
            INPUT_LENGTH: 256,
        },
    ),
    "gemma4-e4b": ModelShape(
        "gemma4", 262144, 2560, 10240, 42, 8, 2, 512, 131072, 0, eps=1e-6, base=1e6, pieces="spm",
        own={**_GEMMA4,
            PATTERN: [at % 6 != 5 for at in range(42)], "attention.sliding_window": 512,
            SHARED_LAYERS: 18, INPUT_LENGTH: 256,
        },
    ),
    "gemma4-31b": ModelShape(
        "gemma4", 262144, 5376, 21504, 60, 32, 4, 512, 262144, 0, eps=1e-6, base=1e6, pieces="spm",
        own={**_GEMMA4,
            PATTERN: [at % 6 != 5 for at in range(60)], "attention.sliding_window": 1024,
            KV_HEADS: [4 if at % 6 == 5 else 16 for at in range(60)],
        },
        values_are_keys=True,
    ),
    "phi4-mini": ModelShape(
        "phi3", 200064, 3072, 8192, 32, 24, 8, 128, 131072, 199999, pieces="gpt-4o",
        own={
            "rope.dimension_count": 96, "rope.scaling.original_context_length": 4096,
            "rope.scaling.attn_factor": 1.1902379989624023,  # as 32 bits hold it
            "attention.sliding_window": 262144,
        },
    ),
    "smollm3-3b": ModelShape(
        "smollm3", 128256, 2048, 11008, 36, 16, 4, 128, 65536, 128000, eps=1e-6, base=5e6, pieces="smaug-bpe"
    ),
    "granite3.1-2b": ModelShape(
        "granite", 49155, 2048, 8192, 40, 32, 8, 64, 131072, 49152, base=5e6, pieces="refact",
        own={
            "attention.scale": 0.015625, "embedding_scale": 12.0, "residual_scale": 0.2199999988079071,
            "logit_scale": 8.0,
        },
    ),
    "olmo2-1b": ModelShape(
        "olmo2", 100352, 2048, 8192, 16, 16, 16, 128, 4096, 100257, tied=False, eps=1e-6, base=5e5, pieces="dbrx"
    ),
    "olmo2-7b": ModelShape(
        "olmo2", 100352, 4096, 11008, 32, 32, 32, 128, 4096, 100257, tied=False, eps=1e-6, base=5e5, pieces="dbrx"
    ),
    "ministral3-3b": ModelShape(
        "mistral3", 131072, 3072, 9216, 26, 32, 8, 128, 262144, 1000, base=1e6, pieces="tekken",
        own={
            "rope.scaling.type": "yarn", "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 16384, "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.10000000149011612,
        },
    ),
    "gemma-2b": ModelShape("gemma", 256000, 2048, 16384, 18, 8, 1, 256, 8192, 0, eps=1e-6, pieces="spm"),
    "minicpm-2b": ModelShape(
        "minicpm", 122753, 2304, 5760, 40, 36, 36, 64, 4096, 1, pieces="spm",
        own={"embedding_scale": 12.0, "residual_scale": 0.22135943174362183, "logit_scale": 9.0},
    ),
    "internlm2.5-1.8b": ModelShape(
        "internlm2", 92544, 2048, 8192, 24, 16, 8, 128, 32768, 1, tied=False, base=1e6, pieces="spm"
    ),
    "ernie4.5-0.3b": ModelShape(
        "ernie4_5", 103424, 1024, 3072, 18, 16, 2, 128, 131072, 1, base=5e5, pieces="spm"
    ),
    "qwen2.5-vl-3b": ModelShape(
        "qwen2vl", 151936, 2048, 11008, 36, 16, 2, 128, 128000, _QWEN, eps=1e-6, base=1e6, pieces="qwen2",
        own={"rope.dimension_sections": [16, 24, 24, 0]},
    ),
    "qwen3-vl-2b": ModelShape(
        "qwen3vl", 151936, 2048, 6144, 28, 16, 8, 128, 262144, _QWEN, eps=1e-6, base=5e6, pieces="qwen2",
        own={"rope.dimension_sections": [24, 20, 20, 0]},
    ),
    "hunyuan-1.8b": ModelShape(
        "hunyuan-dense", 120818, 2048, 6144, 32, 16, 4, 128, 262144, 120000, base=11158840.0, pieces="hunyuan-dense"
    ),
    "seed-oss-36b": ModelShape(
        "seed_oss", 155136, 5120, 27648, 64, 80, 8, 128, 524288, 155000, tied=False, eps=1e-6, base=1e7,
        pieces="seed-coder",
    ),
    "exaone3.5-2.4b": ModelShape(
        "exaone", 102400, 2560, 7168, 30, 32, 8, 80, 32768, 102000, base=1e6, stretch=8, pieces="exaone"
    ),
    "exaone3.5-7.8b": ModelShape(
        "exaone", 102400, 4096, 14336, 32, 32, 8, 128, 32768, 102000, tied=False, base=1e6, stretch=8, pieces="exaone"
    ),
    "exaone4-1.2b": ModelShape(
        "exaone4", 102400, 2048, 4096, 30, 32, 8, 64, 65536, 102000, base=1e6, stretch=16, pieces="exaone4"
    ),
    "glm4-9b": ModelShape(
        "glm4", 151552, 4096, 13696, 40, 32, 2, 128, 32768, 151329, tied=False, pieces="glm4",
        own={"rope.dimension_count": 64},
    ),
    "glm4-9b-2024": ModelShape(
        "chatglm", 151552, 4096, 13696, 40, 32, 2, 128, 131072, 151329, tied=False, eps=1.5625e-07, base=5e6,
        pieces="chatglm-bpe", own={"rope.dimension_count": 64},
    ),
    "qwen3.5-0.8b": ModelShape(
        "qwen35", 248320, 1024, 3584, 24, 8, 2, 256, 262144, 248044, eps=1e-6, base=1e7, pieces="qwen35",
        own={
            "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 4,
            "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 16,
            "ssm.inner_size": 2048,
        },
    ),
    "qwen3.5-4b": ModelShape(
        "qwen35", 248320, 2560, 9216, 32, 16, 4, 256, 262144, 248044, eps=1e-6, base=1e7, pieces="qwen35",
        own={
            "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 4,
            "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32,
            "ssm.inner_size": 4096,
        },
    ),
    "lfm2-350m": ModelShape(
        "lfm2", 65536, 1024, 4608, 16, 16, 8, 64, 128000, 65000, base=1e6, pieces="lfm2",
        own={"shortconv.l_cache": 3}, attends=(2, 5, 8, 10, 12, 14),
    ),
    "lfm2-1.2b": ModelShape(
        "lfm2", 65536, 2048, 8192, 16, 32, 8, 64, 128000, 65000, base=1e6, pieces="lfm2",
        own={"shortconv.l_cache": 3}, attends=(2, 5, 8, 10, 12, 14),
    ),
    "lfm2-2.6b": ModelShape(
        "lfm2", 65536, 2048, 10752, 30, 32, 8, 64, 128000, 65000, base=1e6, pieces="lfm2",
        own={"shortconv.l_cache": 3}, attends=(2, 5, 9, 13, 17, 21, 24, 27),
    ),
    "starcoder2-3b": ModelShape(
        "starcoder2", 49152, 3072, 12288, 30, 24, 2, 128, 16384, 49000, base=999999.4375, pieces="starcoder",
        own={"rope.dimension_count": 128, "rope.freq_base": 999999.4375},
    ),
    "nemotron-mini-4b": ModelShape(
        "nemotron", 256000, 3072, 9216, 32, 24, 8, 128, 4096, 1, tied=False, pieces="spm",
        own={"rope.dimension_count": 64, "rope.freq_base": 10000.0},
    ),
    "tiny-aya": ModelShape(
        "cohere2", 262144, 2048, 11008, 36, 16, 4, 128, 500000, 262000, pieces="tiny_aya",
        own={
            "rope.dimension_count": 128, "rope.freq_base": 50000.0, "rope.scaling.type": "none", "logit_scale": 1.0,
            "attention.sliding_window": 4096,
        },
    ),
    "command-r7b": ModelShape(
        "cohere2", 256000, 4096, 14336, 32, 32, 8, 128, 8192, 255000, pieces="command-r",
        own={
            "rope.dimension_count": 128, "rope.freq_base": 50000.0, "rope.scaling.type": "none", "logit_scale": 0.25,
            "attention.sliding_window": 4096,
        },
    ),
    "aya-expanse-8b": ModelShape(
        "command-r", 256000, 4096, 14336, 32, 32, 8, 128, 8192, 255000, pieces="command-r",
        own={"rope.dimension_count": 128, "rope.freq_base": 10000.0, "rope.scaling.type": "none", "logit_scale": 0.125},
    ),
    "pythia-1b": ModelShape(
        "gptneox", 50304, 2048, 8192, 16, 8, 8, 256, 2048, 50254, tied=False, pieces="gpt-2",
        own={"rope.dimension_count": 64, "use_parallel_residual": True},
    ),
    "jais2-8b": ModelShape(
        "jais2", 150272, 3328, 26624, 32, 26, 26, 128, 8192, 150000, tied=False, pieces="jais-2",
        own={"rope.dimension_count": 128},
    ),
    "phi2": ModelShape(
        "phi2", 51200, 2560, 10240, 32, 32, 32, 80, 2048, 50256, tied=False, pieces="phi-2",
        own={"rope.dimension_count": 32},
    ),
    "stablelm-3b": ModelShape(
        "stablelm", 50304, 2560, 6912, 32, 32, 32, 80, 4096, 50254, tied=False, pieces="gpt-2",
        own={"rope.dimension_count": 20},
    ),
    "afm-4.5b": ModelShape("arcee", 128004, 2560, 18432, 36, 20, 4, 128, 65536, 128000, tied=False, base=1e4),
    "gpt2": ModelShape("gpt2", 50257, 768, 3072, 12, 12, 12, 64, 1024, 50256, pieces="gpt-2"),
}
# fmt: on
"""Llama 3.2 1B and 3B, Llama 3.1 8B, Mistral 7B v0.3, Qwen 2.5 and 3, Gemma 2 to 4 (text), Phi-4-mini, SmolLM3,
Granite 3.1, OLMo 2, Ministral 3 (text), Gemma, MiniCPM, InternLM 2.5, ERNIE 4.5, Qwen 2.5 VL and 3 VL (text),
Qwen 3.5 (text), Hunyuan, LFM2, Seed-OSS, EXAONE 3.5 and 4, GLM-4, StarCoder 2, Nemotron-Mini, Tiny Aya, Command R7B,
Aya Expanse, Pythia, Jais 2, Phi-2, StableLM 3B, AFM and GPT-2 124M: from their config.json."""


def short(kind: BlockType) -> str:
    """A format as names of models have it, such as q4_0 and q6k."""
    return kind.name.lower().replace("_k", "k")


BLOCKS: Final[Mapping[str, BlockType]] = {short(kind): kind for kind in reversed(PACKED)}
"""The packed formats."""
FORMATS: Final[Mapping[str, BlockType]] = {**BLOCKS, **{short(kind): kind for kind in PLAIN}}
NAMES: Final = tuple(dict.fromkeys((*FORMATS, *MIXTURES)))
"""What a model's name may end with. A name of both is the mixture: Q4_1, whose output is Q6_K."""

_GAINS: Final[Mapping[str, float]] = {"token_embd": 3.0, "output": 3.0, "attn_q": 1.5, "attn_k": 1.5}
"""How much larger than its input a product is: so that attention and the logits are not uniform."""
_MEANS: Final[Mapping[str, tuple[float, float]]] = {"ssm_dt": (0.5, 0.1), "ssm_a": (-0.1, 0.01)}
"""Mean and deviation of vectors that are no norms' weights: a delta net's states fade within some tens of tokens."""


def parse(name: str) -> tuple[ModelShape, str]:
    """A name's shape and format; raises ModelNameError."""
    shape, _, kind = name.rpartition("-")
    if shape not in SHAPES or kind not in NAMES:
        raise ModelNameError(
            f"no model {name!r}: give SHAPE-FORMAT, a shape of {', '.join(SHAPES)} and a format of {', '.join(NAMES)}"
        )
    return SHAPES[shape], kind


def formats(name: str) -> Callable[[Spec, int | None], BlockType]:
    """The format of each matrix, by its spec and layer, of a model such as "1b-q4km"; raises ModelNameError."""
    shape, kind = parse(name)
    return partial(shape.format, kind)


def kinds(name: str) -> set[BlockType]:
    """The formats of the matrices that a step in one launch multiplies by."""
    shape, kind = parse(name)
    beside = shape.config.network.embed.inputs
    left_out = beside.specs if beside else ()
    return {shape.format(kind, spec, layer) for spec, layer in _matrices(shape) if spec not in left_out}


def _matrices(shape: ModelShape) -> Iterator[tuple[Spec, int | None]]:
    """Every matrix in the file with its layer."""
    left_out = ARCHES[shape.arch].output if shape.tied else None
    yield from ((spec, at) for spec, at in shape.config.specs() if spec.multiplied and spec is not left_out)


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/tegrad/models or ~/.cache/tegrad/models."""
    return kept.cache_folder() / "tegrad" / "models"


def provide(name: str, folder: Path | None = None) -> Path:
    """The file of that name in a folder (the cache's if left out), written if it is not there yet."""
    shape, kind = parse(name)
    path = (folder or cache_dir()) / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(f".{os.getpid()}.partial")
        try:
            write(begun, shape, kind)
            begun.replace(path)
        finally:
            begun.unlink(missing_ok=True)
    return path


def write(path: Path, shape: ModelShape, kind: str) -> None:
    """Write a model of a format or mixture; learned positions, norms and biases are F32."""
    writer = GGUFWriter(path, shape.arch)
    for key, value in shape.metadata.items():
        if key != "general.architecture":  # the writer has said it
            writer.add_key_value(
                key, value, GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
            )
    _add_vocabulary(writer, shape)
    tensors = list(_tensors(shape, kind))
    for tensor in tensors:
        nbytes = prod(tensor.shape) * tensor.dtype.itemsize
        writer.add_tensor_info(tensor.name, tensor.shape, tensor.dtype, nbytes, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for data in _in_order(tensors):
        writer.write_tensor_data(data)
    writer.close()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to be written: the shape of the array that `fill` makes of random numbers, and its type."""

    name: str
    kind: TYPE
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Callable[[np.random.Generator], Array]

    def make(self) -> Array:
        """The tensor's values, which follow from its name."""
        rng = np.random.Generator(np.random.SFC64(crc32(self.name.encode())))
        return self.fill(rng).view(self.dtype).reshape(self.shape)


def _tensors(shape: ModelShape, kind: str) -> Iterator[_Tensor]:
    config = shape.config
    for name, divisors in _divisors(shape, config.rope.dim // 2):
        yield _fixed(name, divisors)
    heads = () if config.arch.score_scale is None else (config.arch.query_norm, config.arch.key_norm)
    for name, spec, layer, sizes in stored(config, shape.tied):
        if not spec.multiplied:
            mean, deviation = (0.0, sizes[-1] ** -0.5) if len(sizes) > 1 else _MEANS.get(spec.name, (1.0, 0.1))
            if spec in heads:  # in the place of what scores are multiplied by
                mean, deviation = (number * sizes[-1] ** -0.25 for number in (mean, deviation))
            yield _plain(name, TYPE.F32, sizes, mean, deviation)
        else:
            deviation, form = _gain(config, spec) / sizes[-1] ** 0.5, shape.format(kind, spec, layer)
            if form.layout is None:
                yield _plain(name, TYPE(form.number), sizes, 0.0, deviation)
            else:
                yield _packed(name, form, sizes, deviation)
        if spec.bias == "must":
            yield _plain(tensor_name(spec, layer, "bias"), TYPE.F32, sizes[:1], 0.0, 0.1)


def _gain(config: Config, spec: Spec) -> float:
    """Of a matrix's product. A scaled embedding begins the stream as large as what blocks add to it where nothing norms
    that, or a tied output finds the token itself the likeliest."""
    plain = config.arch.scaled_embedding and config.arch.attn_post_norm is None
    return 1.0 if plain and spec is config.arch.embedding else _GAINS.get(spec.name, 1.0)


def stored(config: Config, tied: bool) -> Iterator[tuple[str, Spec, int | None, tuple[int, ...]]]:
    """The tensors of a file but for biases: name, spec, layer and sizes of each; a stack is one, by its first spec."""
    for spec, layer in config.specs():
        if (spec is config.arch.output and tied) or (spec.stack and spec.stack.at):
            continue
        rows, size = spec.stack.sizes if spec.stack else spec.shape[:1], config.at(layer or 0).size
        yield stored_name(spec, layer), spec, layer, (sum(map(size, rows)), *map(size, spec.shape[1:]))


def _divisors(shape: ModelShape, pairs: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """What divides rope frequencies: Gemma 4's, of whose pairs a quarter turns, Llama 3's, or for short and long
    contexts 1 and, made up, 1 to 32."""
    names = ARCHES[shape.arch].rope_divisors
    if ARCHES[shape.arch].sized:
        yield names[0], np.where(np.arange(pairs) < pairs // 4, 1, 1e30).astype(np.float32)
    elif shape.stretch is not None:
        yield names[0], llama3_divisors(pairs, shape.base, shape.stretch)
    elif names == LONG_ROPE and "rope.scaling.original_context_length" in shape.own:
        yield from zip(names, (np.ones(pairs, np.float32), np.linspace(1, 32, pairs, dtype=np.float32)), strict=True)


def _fixed(name: str, values: NDArray[np.float32]) -> _Tensor:
    return _Tensor(name, TYPE.F32, values.shape, values.dtype, lambda _: values)


def _plain(name: str, kind: TYPE, shape: tuple[int, ...], mean: float, deviation: float) -> _Tensor:
    """A tensor of uniform numbers."""

    def fill(rng: np.random.Generator) -> Array:
        values = _random_bytes(rng, prod(shape) * 2).view(np.int16).astype(np.float32)
        values *= np.float32(deviation / (65536 / sqrt(12)))
        values += np.float32(mean)
        if kind is TYPE.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(np.float16) if kind is TYPE.F16 else values

    if kind is TYPE.BF16:  # which numpy does not know, so that its bytes are written
        return _Tensor(name, kind, (*shape[:-1], shape[-1] * 2), np.dtype(np.uint8), fill)
    return _Tensor(name, kind, shape, np.dtype(np.float16 if kind is TYPE.F16 else np.float32), fill)


def _packed(name: str, kind: BlockType, shape: tuple[int, ...], deviation: float) -> _Tensor:
    """A tensor of blocks of random bits."""
    assert kind.layout is not None
    spread = kind.layout.spread
    if shape[-1] % kind.elements:
        raise ModelNameError(
            f"rows of {shape[-1]} weights are no multiple of {kind.name}'s {kind.elements}: choose another format"
        )
    stored = (*shape[:-1], kind.row_bytes(shape[-1]))

    def fill(rng: np.random.Generator) -> Array:
        blocks = _random_bytes(rng, prod(stored)).reshape(-1, kind.size)
        d = rng.uniform(0.5, 1.5, (len(blocks), 1)) * (deviation / spread.deviation)
        if spread.either_sign:
            d *= rng.choice((-1.0, 1.0), d.shape)
        spread.scale(blocks, d)
        return blocks

    return _Tensor(name, TYPE(kind.number), stored, np.dtype(np.uint8), fill)


def _random_bytes(rng: np.random.Generator, size: int) -> NDArray[np.uint8]:
    return rng.integers(0, 1 << 64, size=-(-size // 8), dtype=np.uint64).view(np.uint8)[:size]


def llama3_divisors(pairs: int, base: float, factor: float) -> NDArray[np.float32]:
    """rope_freqs as Llama 3.1 has them.

    1 for pairs that turn four times or more within 8192 tokens, `factor` for those that do not turn once, and in
    between the inverse of a line between the two.
    """
    turns = 8192 * base ** -(np.arange(pairs) / pairs) / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    divisors: NDArray[np.float32] = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return divisors


def _in_order(tensors: list[_Tensor]) -> Iterator[Array]:
    """The tensors' values, made by several threads, of which only a few wait in memory."""
    workers = min(8, len(os.sched_getaffinity(0)))
    waiting: deque[Future[Array]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for tensor in tensors:
            waiting.append(pool.submit(tensor.make))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# --- vocabularies -----------------------------------------------------------------------------------------------------

NORMAL, CONTROL, BYTE = 1, 3, 6
"""`tokenizer.ggml.token_type`."""
ASCII: Final = 94
"""Printable bytes of it."""


def pieces(alphabet: list[str], count: int) -> Iterator[tuple[str, str]]:
    """`count` texts as (left, right): all pairs of letters, then all pairs with a letter more, and so on.

    Both sides are letters or earlier texts, so that each is one merge.
    """
    texts = list(alphabet)
    for at in range(count):
        left, right = texts[at // len(alphabet)], alphabet[at % len(alphabet)]
        texts.append(left + right)
        yield left, right


def _add_vocabulary(writer: GGUFWriter, shape: ModelShape) -> None:
    add = _add_sentencepiece if shape.pieces == "spm" else _add_byte_level
    writer.add_vocab_size(shape.vocab)
    add(writer, shape)


def _add_byte_level(writer: GGUFWriter, shape: ModelShape) -> None:
    """The 256 bytes, merges of ASCII's up to the first control token, control tokens.

    Few tokens then end within a character, whose text a server would hold back.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(byte) for byte in printable] + [chr(256 + at) for at in range(256 - len(printable))]
    merges = list(pieces(letters[:ASCII], shape.specials - 256))
    controls = [f"<|control {at}|>" for at in range(shape.vocab - shape.specials)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.pieces)
    writer.add_token_list([*letters, *(left + right for left, right in merges), *controls])
    writer.add_token_types([NORMAL] * shape.specials + [CONTROL] * len(controls))
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(shape.specials)
    writer.add_eos_token_id(shape.vocab - 1)
    writer.add_add_bos_token(shape.pieces == "llama-bpe")


def _add_sentencepiece(writer: GGUFWriter, shape: ModelShape) -> None:
    """Unknown, begin and end, the 256 bytes, and pieces of letters whose scores fall with their number."""
    letters = ["\u2581", *(chr(code) for code in range(ord("a"), ord("z") + 1)), ".", ","]
    texts = [*letters, *(left + right for left, right in pieces(letters, shape.vocab - 259 - len(letters)))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *texts])
    writer.add_token_scores([0.0] * 259 + [-float(at) for at in range(len(texts))])
    writer.add_token_types([2, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(texts))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)


def main(
    name: Annotated[str, typer.Argument(help="SHAPE-FORMAT, such as 1b-q6k.")],
    out: Annotated[Path | None, typer.Option(help="The folder; the cache's if left out.")] = None,
) -> None:
    """Write a model of random weights unless it is there, and print its path."""
    try:
        typer.echo(provide(name, out))
    except ModelNameError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
