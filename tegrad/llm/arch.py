"""Model families as data: which tensors with which shapes, which norm, rope and activation; and one model's sizes.

The names are GGUF's (gguf-py's constants); what they mean is as llama.cpp computes the family of that name. A family is
a row of `ARCHES`; what a file has beyond its family's row is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from typing import Any, Final, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.errors import ContextError, GgufError, ModelError, UnsupportedModelError
from tegrad.llm.formats import F32, LANE_WEIGHTS
from tegrad.llm.gguf import Gguf, TensorInfo, shown
from tegrad.llm.network import (
    ActivationKind,
    Add,
    Attend,
    Block,
    Convolve,
    Convolving,
    Delta,
    Embed,
    Gate,
    InputGate,
    LayerInputs,
    Logits,
    Mixer,
    Network,
    Norm,
    NormKind,
    Project,
    Rotation,
    Spec,
    Stack,
)
from tegrad.llm.rope import UNTURNED, Divisors, Rope, Temperature, Yarn

DEFAULT_CONTEXT: Final = 4096
"""Positions of a session unless asked otherwise: bounds the cache of models trained for 128k and more."""

MOST_LAYERS: Final = 1 << 12
"""That a file may have, before its tensors are counted: some thirty times the deepest published models'."""
MOST_TAPS: Final = 16
"""Positions of a kernel, which a thread holds; published models have 3."""
LARGEST_SIZE: Final = (1 << 31) - 1
"""Of any size in a file: kernels count in 32 bits."""
MOST_RESIDUAL_SCALE: Final = 1e4
"""Of what a block adds, and one over it the least."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Bounds of any other number in a file that is not 0, so that no product of some leaves what floats hold."""

T = TypeVar("T", int, float, str)


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What may differ from layer to layer of a model."""

    rope: Rope
    """UNTURNED where the layer rotates nothing."""
    window: int | None = None
    """Positions that a token attends to at most, its own included."""
    instead: bool = False
    """It has `Arch.instead` in the place of attention."""
    head_dim: int | None = None
    """Elements of a head, where they differ from the model's,"""
    kv_heads: int | None = None
    """heads of keys and values,"""
    ffn: int | None = None
    """and the feed-forward's elements."""
    source: int | None = None
    """An earlier layer, whose keys and values it attends to."""
    values_are_keys: bool = False
    """It has no matrix of values: they are what its keys are made of."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """The tensors of layers that convolve, in the place of attention's."""

    project: tuple[Spec, ...]
    kernel: Spec
    output: Spec

    def mixer(self, config: Config) -> Mixer:
        """What such a layer does."""
        return Convolve(self.kernel, config.taps)


@dataclass(frozen=True, slots=True)
class DeltaNet(Convolution):
    """Those of a gated delta net, which convolves too."""

    bias: Spec
    decay: Spec
    norm: Spec

    def mixer(self, config: Config) -> Mixer:
        """What such a layer does."""
        return Delta(
            self.kernel, config.taps, self.bias, self.decay, self.norm, config.delta_heads, config.delta_keys,
            config.state,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Windows:
    """Which layers of a family attend within a sliding window, and how they rotate. A file may say otherwise."""

    period: int
    """Of so many layers the last one attends to all positions, the others to those in the window."""
    window: int | None = None
    """Its positions; None: without a file's, no layer has one."""
    base: float | None = None
    """Of the layers' rope, whose positions nothing scales; None: they rotate as the others do."""
    plain: bool = False
    """Their rope has the others' base, but nothing scales it, nor its cosines and sines."""
    only: bool = False
    """The others rotate nothing."""
    layers: int | None = None
    """A model of so many layers has windows, and no other; None: all have."""


@dataclass(frozen=True, slots=True)
class PerLayer:
    """The tensors of per-layer inputs (`network.LayerInputs`), and of what layers make of them. A model may have
    none."""

    table: Spec
    matrix: Spec
    norm: Spec
    gate: Spec
    output: Spec
    post_norm: Spec


@dataclass(frozen=True, slots=True)
class Arch:
    """A model family: the tensors and kinds that differ from family to family; `Config.network` is what it computes."""

    name: str
    embedding: Spec
    attn_norm: Spec | None
    qkv: tuple[Spec, ...]
    """Three matrices or one; their rows are always the queries', the keys' and the values', in this order."""
    attn_output: Spec
    ffn_norm: Spec | None
    gate: Spec | None
    up: Spec
    down: Spec
    output_norm: Spec
    output: Spec
    rope: Rotation
    activation: ActivationKind
    norm: NormKind
    with_images: Rotation | None = None
    """The rotation in files that say how many pairs rotate by an image's rows and columns; None: `rope`, too."""
    positions: Spec | None = None
    """Learned vectors, one for each position, that are added to the embedding."""
    query_norm: Spec | None = None
    """Each head's query is normalized by its root mean square before it is rotated; or all of them by theirs."""
    key_norm: Spec | None = None
    norms_turned: bool = False
    """Heads are normalized after they are rotated."""
    rope_divisors: tuple[str, ...] = ()
    """Tensors that the file may have, which pairs' frequencies are divided by: in contexts up to the trained one, and,
    where there is another, in longer ones."""
    ignores_window: bool = False
    """Files name a sliding window that llama.cpp has every layer look beyond."""
    attn_post_norm: Spec | None = None
    """Of what attention adds to the stream."""
    ffn_post_norm: Spec | None = None
    """Of what the feed-forward adds."""
    parallel: bool = False
    """The feed-forward reads the stream that attention reads, not what attention has added to it. Of families with
    layer norms, without norms after blocks."""
    parallel_by: str | None = None
    """A value that says, where it is false, that it does read that."""
    instead: Convolution | None = None
    """Of layers that do not attend."""
    gated: bool = False
    """What heads mix is gated (`network.Attend.gated`)."""
    unit_values: bool = False
    """Values are normalized (`network.Attend.unit_values`)."""
    per_layer: PerLayer | None = None
    layer_scale: Spec | None = None
    """What the stream is multiplied by after a layer, which files may lack."""
    score_scale: float | None = None
    """What scores are multiplied by; None: one over the root of a head's size."""
    values: tuple[str, ...] = ()
    """Of `_REFUSED`, those that the family's files may have."""
    needs: tuple[str, ...] = ()
    """Of `SCALES`, those without which a file is incomplete."""
    scaled_embedding: bool = False
    """Rows of the embedding are multiplied by the root of their size."""
    windows: Windows | None = None
    """Which layers attend within a window."""
    unturned: int | None = None
    """Of so many layers the last one rotates nothing."""
    turned_by: str | None = None
    """A value that says, where it is false, that no layer rotates, which we do not run."""
    dim_scaled: int | None = None
    """A model of so many layers divides scores by the root of dim / heads, not by that of a head's size."""
    score_cap: float | None = None
    """The cap of scores where a file says none; None: the family caps none. In a file 0 stands for none."""
    logit_cap: float | None = None
    """That of logits; 0: there is none where a file says none."""
    logits_multiplied: bool = False
    """A file's scale of logits multiplies them instead of dividing them."""

    @property
    def sized(self) -> bool:
        """Whether layers of a model may have sizes of their own."""
        return LOCAL_SIZES[0] in self.values

    @property
    def caps(self) -> Mapping[str, float]:
        """Those that the family has, by the name of their value in a file."""
        caps = {"attn_logit_softcapping": self.score_cap, "final_logit_softcapping": self.logit_cap}
        return {name: cap for name, cap in caps.items() if cap is not None}

    def network(self, config: Config) -> Network:
        """What a model of the family computes."""
        scale = sqrt(config.dim) if self.scaled_embedding else config.embedding_scale
        return Network(
            Embed(self.embedding, self.positions, scale, self._inputs(config)),
            tuple(self._block(config.at(at), form) for at, form in enumerate(config.layer_forms)),
            Logits(Norm(self.output_norm, self.norm, config.logit_scale), self.output, config.logit_cap),
        )

    def _inputs(self, config: Config) -> LayerInputs | None:
        """Per-layer inputs."""
        if self.per_layer is None or not config.layer_input:
            return None
        own = self.per_layer
        return LayerInputs(own.table, own.matrix, own.norm, sqrt(config.layer_input), 1 / sqrt(config.dim))

    def _block(self, config: Config, form: LayerForm) -> Block:
        """The operations of a layer of so many elements."""
        wide = config.layers == self.dim_scaled
        made = 1 if form.source is not None else 2 if form.values_are_keys else len(self.qkv)
        qkv, attn_output = self.qkv[:made], self.attn_output
        mixer: Mixer = Attend(
            self.rope if form.rope.dim else "none",
            form.rope,
            config.attention_scale
            or self.score_scale
            or 1 / sqrt(config.dim // config.heads if wide else config.head_dim),
            self.query_norm,
            self.key_norm if form.source is None else None,
            self.norms_turned,
            form.window,
            config.score_cap,
            config.temperature,
            self.gated,
            form.source,
            form.values_are_keys,
            self.unit_values and form.source is None,
        )
        if form.instead and (own := self.instead) is not None:
            qkv, mixer, attn_output = own.project, own.mixer(config), own.output

        def norm(spec: Spec | None) -> Norm | None:
            return None if spec is None else Norm(spec, self.norm)

        project = Project(norm(self.attn_norm), qkv)
        mixed = Add(attn_output, "mixed", norm(self.attn_post_norm))
        gate = Gate(norm(self.ffn_norm), self.gate, self.up, self.activation)
        hidden = Add(self.down, "hidden", norm(self.ffn_post_norm))
        if self.parallel:
            return project, gate, mixer, hidden, mixed
        if (by := self.per_layer) is None or not config.layer_input:
            return project, mixer, mixed, gate, replace(hidden, scale=self.layer_scale)
        gated = Add(by.output, "gated", norm(by.post_norm), self.layer_scale)
        return project, mixer, mixed, gate, hidden, InputGate(by.gate, self.activation), gated


SCALES: Final = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
"""What scores, embeddings, and what blocks add are multiplied by, and logits divided by, or in some families
multiplied; 0 stands for the usual."""
KV_HEADS: Final = "attention.head_count_kv"
FFN: Final = "feed_forward_length"
PATTERN: Final = "attention.sliding_window_pattern"
"""Which layers attend within a window: one in so many does not; or each layer's yes or no."""
SHARED_LAYERS: Final = "attention.shared_kv_layers"
"""Last layers that take keys and values of earlier ones."""
INPUT_LENGTH: Final = "embedding_length_per_layer_input"
"""Elements of a layer's own input."""
TEMPERATURE: Final = "attention.temperature_scale"
"""`Temperature.scale`; its period is the context before YaRN."""
NEXT: Final = "nextn_predict_layers"
"""How many of a file's blocks, its last ones, guess tokens ahead (EXAONE 4.5): as in llama.cpp, nothing runs them."""
SUPPRESSED: Final = "tokenizer.ggml.suppress_tokens"
"""Tokens that the model's authors never draw."""
LOG_MULTIPLIER: Final = "rope.scaling.yarn_log_multiplier"
"""With it YaRN's growth of cosines and sines is divided by what it would be with so many times the logarithm."""
BASE: Final = ("rope.freq_base", "rope.global.freq_base")
LOCAL_BASE: Final = ("rope.freq_base_swa", "rope.local.freq_base")
"""Of layers within a window. The second names are those of files that were converted for Ollama."""
LOCAL_SIZES: Final = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
"""Of heads of such layers, and of what is rotated of them."""
FREQUENCIES: Final = ("rope_freqs.weight",)
"""Llama 3.1's scaling for long contexts; which pairs of Gemma 4's do not rotate (1e30)."""
LONG_ROPE: Final = ("rope_factors_short.weight", "rope_factors_long.weight")
"""LongRoPE's (arXiv:2402.13753)."""

LLAMA: Final = Arch(
    name="llama",
    embedding=Spec("token_embd", ("vocab", "dim")),
    attn_norm=Spec("attn_norm", ("dim",)),
    qkv=(
        Spec("attn_q", ("query", "dim"), "may"),
        Spec("attn_k", ("key", "dim"), "may"),
        Spec("attn_v", ("value", "dim"), "may"),
    ),
    attn_output=Spec("attn_output", ("dim", "mixed"), "may"),
    ffn_norm=Spec("ffn_norm", ("dim",)),
    gate=Spec("ffn_gate", ("ffn", "dim"), "may"),
    up=Spec("ffn_up", ("ffn", "dim"), "may"),
    down=Spec("ffn_down", ("dim", "ffn"), "may"),
    output_norm=Spec("output_norm", ("dim",)),
    output=Spec("output", ("vocab", "dim")),
    rope="interleaved",
    activation="silu",
    norm="rms",
    rope_divisors=FREQUENCIES,
)
"""Llama 1 to 3 and what is converted to their form: Mistral 7B to Mistral Small 3, SmolLM and others."""

QWEN2: Final = replace(
    LLAMA,
    name="qwen2",
    qkv=tuple(replace(spec, bias="must") for spec in LLAMA.qkv),
    attn_output=Spec("attn_output", ("dim", "mixed")),
    gate=Spec("ffn_gate", ("ffn", "dim")),
    up=Spec("ffn_up", ("ffn", "dim")),
    down=Spec("ffn_down", ("dim", "ffn")),
    rope="halves",
    rope_divisors=(),
)

GEMMA3: Final = replace(
    QWEN2,
    name="gemma3",
    qkv=LLAMA.qkv,
    query_norm=Spec("attn_q_norm", ("head",)),
    key_norm=Spec("attn_k_norm", ("head",)),
    attn_post_norm=Spec("post_attention_norm", ("dim",)),
    ffn_post_norm=Spec("post_ffw_norm", ("dim",)),
    activation="gelu",
    scaled_embedding=True,
    windows=Windows(6, base=10000.0),
    dim_scaled=62,
    logit_cap=0.0,
)
"""Gemma 3's text models, of which the one with 62 layers has 27 billion weights."""

GEMMA: Final = replace(
    GEMMA3,
    name="gemma",
    query_norm=None,
    key_norm=None,
    attn_post_norm=None,
    ffn_post_norm=None,
    windows=None,
    dim_scaled=None,
    logit_cap=None,
)

GEMMA2: Final = replace(
    GEMMA3,
    name="gemma2",
    query_norm=None,
    key_norm=None,
    windows=Windows(2, 4096),
    dim_scaled=46,
    score_cap=50.0,
    logit_cap=30.0,
)

GEMMA4: Final = replace(
    GEMMA3,
    name="gemma4",
    windows=Windows(6, base=10000.0),
    dim_scaled=None,
    score_scale=1.0,
    logit_cap=30.0,
    rope_divisors=FREQUENCIES,
    unit_values=True,
    layer_scale=Spec("layer_output_scale", ("one",)),
    per_layer=PerLayer(
        Spec("per_layer_token_embd", ("vocab", "inputs")),
        Spec("per_layer_model_proj", ("inputs", "dim")),
        Spec("per_layer_proj_norm", ("input",)),
        Spec("inp_gate", ("input", "dim")),
        Spec("proj", ("dim", "input")),
        Spec("post_norm", ("dim",)),
    ),
    values=LOCAL_SIZES,
)
"""Gemma 4's text models without experts. Layers within a window have smaller heads, and may have other numbers of them;
the last ones of the small models take keys and values of earlier ones."""

OLMO2: Final = replace(
    QWEN2,
    name="olmo2",
    attn_norm=None,
    qkv=LLAMA.qkv,
    query_norm=Spec("attn_q_norm", ("query",)),
    key_norm=Spec("attn_k_norm", ("key",)),
    attn_post_norm=Spec("post_attention_norm", ("dim",)),
    ffn_norm=None,
    ffn_post_norm=Spec("post_ffw_norm", ("dim",)),
    windows=Windows(4, plain=True),
)
"""OLMo 2, and OLMo 3, most layers of which attend within a window."""

QWEN3: Final = replace(
    QWEN2,
    name="qwen3",
    qkv=LLAMA.qkv,
    query_norm=Spec("attn_q_norm", ("head",)),
    key_norm=Spec("attn_k_norm", ("head",)),
)

HUNYUAN: Final = replace(QWEN3, name="hunyuan-dense", norms_turned=True, rope_divisors=FREQUENCIES)
"""Hunyuan, without experts."""

MAINCODER: Final = replace(QWEN3, name="maincoder", norms_turned=True, rope="interleaved")

PANGU: Final = replace(
    QWEN2, name="pangu-embedded", qkv=LLAMA.qkv, attn_output=Spec("attn_output", ("dim", "mixed"), "must")
)
"""openPangu Embedded."""

SECTIONS: Final = "rope.dimension_sections"
"""How many pairs of a head rotate by an image's rows, columns and time: for text all three are the position."""
QWEN2_VL: Final = replace(QWEN2, name="qwen2vl", values=(SECTIONS,))
"""The text models of Qwen2-VL and Qwen2.5-VL."""
LFM2: Final = replace(
    QWEN3,
    name="lfm2",
    output_norm=Spec("token_embd_norm", ("dim",)),
    instead=Convolution(
        (Spec("shortconv.in_proj", ("dim+dim+dim", "dim")),),
        Spec("shortconv.conv", ("dim", "taps")),
        Spec("shortconv.out_proj", ("dim", "dim")),
    ),
)
"""LFM2 and LFM2.5, without experts: most layers convolve. The last norm has the embedding's name, as converted."""

QWEN3_5: Final = replace(
    QWEN3,
    name="qwen35",
    qkv=(Spec("attn_q", ("query+query", "dim")), *QWEN3.qkv[1:]),
    ffn_norm=Spec("post_attention_norm", ("dim",)),
    instead=DeltaNet(
        (
            Spec("attn_qkv", ("channels", "dim")),
            Spec("attn_gate", ("inner", "dim")),
            Spec("ssm_beta", ("delta_heads", "dim")),
            Spec("ssm_alpha", ("delta_heads", "dim")),
        ),
        Spec("ssm_conv1d", ("channels", "taps")),
        Spec("ssm_out", ("dim", "inner")),
        Spec("ssm_dt", ("delta_heads",), suffix="bias"),
        Spec("ssm_a", ("delta_heads",), suffix=""),
        Spec("ssm_norm", ("state",)),
    ),
    gated=True,
    values=(SECTIONS,),
)
"""Qwen 3.5, without experts: three layers in four are gated delta nets, the others gate what heads mix."""

QWEN3_VL: Final = replace(QWEN3, name="qwen3vl", values=(SECTIONS,))

SEED_OSS: Final = replace(QWEN2, name="seed_oss", ffn_norm=Spec("post_attention_norm", ("dim",)))

EXAONE: Final = replace(QWEN2, name="exaone", qkv=LLAMA.qkv, rope_divisors=FREQUENCIES)
"""EXAONE 3 and 3.5."""

EXAONE4: Final = replace(
    EXAONE,
    name="exaone4",
    attn_norm=None,
    query_norm=QWEN3.query_norm,
    key_norm=QWEN3.key_norm,
    attn_post_norm=OLMO2.attn_post_norm,
    ffn_norm=None,
    ffn_post_norm=OLMO2.ffn_post_norm,
    windows=Windows(4, 4096, only=True, layers=64),
)
"""EXAONE 4, of which the one with 32 billion weights has windows."""

MINICPM: Final = replace(LLAMA, name="minicpm", values=SCALES[1:], needs=SCALES[1:], rope_divisors=LONG_ROPE)
"""MiniCPM, but not MiniCPM 3. Files of old converters lack its scales."""

GRANITE: Final = replace(LLAMA, name="granite", values=SCALES, turned_by="rope.scaling.finetuned")
"""Granite 3, without experts."""

MISTRAL3: Final = replace(LLAMA, name="mistral3", values=(TEMPERATURE, LOG_MULTIPLIER))
"""Ministral 3, and the text models of Mistral Small 3.1 and later."""

INTERNLM2: Final = replace(
    LLAMA,
    name="internlm2",
    attn_output=QWEN2.attn_output,
    gate=QWEN2.gate,
    up=QWEN2.up,
    down=QWEN2.down,
    rope_divisors=(),
)
"""InternLM 2 and 2.5."""

ERNIE4_5: Final = replace(INTERNLM2, name="ernie4_5")
"""ERNIE 4.5, without experts."""

ARCEE: Final = replace(INTERNLM2, name="arcee", gate=None, activation="relu2", rope_divisors=FREQUENCIES)
"""AFM."""

SMOLLM3: Final = replace(INTERNLM2, name="smollm3", unturned=4)

FUSED: Final = (Spec("attn_qkv", ("query+key+value", "dim"), "may"),)
"""Queries, keys and values in one tensor: phi3's, and those of any family where a converter was asked to."""
FUSED_BIASED: Final = tuple(replace(spec, bias="must") for spec in FUSED)

PHI3: Final = replace(
    QWEN2,
    name="phi3",
    qkv=FUSED,
    gate=Spec("ffn_gate", ("ffn", "dim"), stack=Stack("ffn_up", ("ffn", "ffn"), 0)),
    up=Spec("ffn_up", ("ffn", "dim"), stack=Stack("ffn_up", ("ffn", "ffn"), 1)),
    rope_divisors=LONG_ROPE,
    ignores_window=True,
)
"""Phi-3, Phi-3.5 and Phi-4."""

GLM4: Final = replace(
    PHI3,
    name="glm4",
    qkv=QWEN2.qkv,
    attn_post_norm=OLMO2.attn_post_norm,
    ffn_post_norm=OLMO2.ffn_post_norm,
    rope="interleaved",
    with_images="halves",
    rope_divisors=(),
    ignores_window=False,
    values=(SECTIONS,),
)
"""GLM-4 and GLM-Z1 of April 2025, and the text models of GLM-4.1V and GLM-OCR, whose converter puts pairs elsewhere."""

CHATGLM: Final = replace(GLM4, name="chatglm", qkv=FUSED_BIASED, attn_post_norm=None, ffn_post_norm=None, values=())
"""ChatGLM 3 and GLM-4 of 2024, and GLM-Edge, which has no biases."""

GPT2: Final = Arch(
    name="gpt2",
    embedding=Spec("token_embd", ("vocab", "dim")),
    positions=Spec("position_embd", ("context", "dim")),
    attn_norm=Spec("attn_norm", ("dim",), "must"),
    qkv=FUSED_BIASED,
    attn_output=Spec("attn_output", ("dim", "mixed"), "must"),
    ffn_norm=Spec("ffn_norm", ("dim",), "must"),
    gate=None,
    up=Spec("ffn_up", ("ffn", "dim"), "must"),
    down=Spec("ffn_down", ("dim", "ffn"), "must"),
    output_norm=Spec("output_norm", ("dim",), "must"),
    output=Spec("output", ("vocab", "dim")),
    rope="none",
    activation="gelu",
    norm="layer",
)

STARCODER2: Final = replace(GPT2, name="starcoder2", positions=None, qkv=QWEN2.qkv, rope="halves")

NEMOTRON: Final = replace(
    GPT2,
    name="nemotron",
    positions=None,
    qkv=LLAMA.qkv,
    attn_output=LLAMA.attn_output,
    up=LLAMA.up,
    down=LLAMA.down,
    rope="halves",
    activation="relu2",
)
"""Nemotron-Mini, Minitron and Nemotron 4."""

JAIS2: Final = replace(NEMOTRON, name="jais2", qkv=QWEN2.qkv, attn_output=GPT2.attn_output, up=GPT2.up, down=GPT2.down)

STABLELM: Final = replace(
    INTERNLM2, name="stablelm", attn_norm=GPT2.attn_norm, ffn_norm=GPT2.ffn_norm, output_norm=GPT2.output_norm,
    rope="halves", norm="layer",
)  # fmt: skip
"""StableLM 3B, Zephyr 3B and StableLM 2 1.6B; the one of 12 billion weights normalizes heads in a way of its own."""

GPTNEOX: Final = replace(
    STARCODER2, name="gptneox", qkv=FUSED_BIASED, parallel=True, parallel_by="use_parallel_residual"
)
"""GPT-NeoX and Pythia."""

PHI2: Final = replace(
    STARCODER2,
    name="phi2",
    qkv=FUSED_BIASED,
    ffn_norm=GPT2.attn_norm,
    parallel=True,
    output=Spec("output", ("vocab", "dim"), "must"),
)
"""Phi-1, Phi-1.5 and Phi-2."""

COMMAND_R: Final = replace(
    INTERNLM2, name="command-r", ffn_norm=LLAMA.attn_norm, norm="layer", parallel=True, values=SCALES[3:],
    logits_multiplied=True,
)  # fmt: skip
"""Command R, Aya 23 and Aya Expanse; Command R+ normalizes heads in a way of its own."""

COHERE2: Final = replace(COMMAND_R, name="cohere2", needs=SCALES[3:], windows=Windows(4, 4096, only=True))
"""Command R7B, Command A and Tiny Aya."""

ARCHES: Final[Mapping[str, Arch]] = {
    arch.name: arch
    for arch in (
        *(LLAMA, MISTRAL3, MINICPM, GRANITE, SMOLLM3, INTERNLM2, ERNIE4_5, ARCEE),
        *(QWEN2, QWEN3, QWEN3_5, LFM2, QWEN2_VL, QWEN3_VL, HUNYUAN, SEED_OSS, EXAONE, EXAONE4, PHI3, GLM4, CHATGLM),
        *(MAINCODER, PANGU, OLMO2, GEMMA, GEMMA2, GEMMA3, GEMMA4, GPT2, STARCODER2, NEMOTRON, JAIS2, STABLELM),
        *(GPTNEOX, PHI2, COMMAND_R, COHERE2),
    )
}
"""By `general.architecture`."""

_EPS: Final = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}

_REFUSED: Final[Mapping[str, str]] = {
    "expert_count": "is a mixture of experts",
    "attention.clamp_kqv": "clamps queries, keys and values",
    "attention.max_alibi_bias": "has ALiBi positions",
    "attention.key_length_swa": "has keys of another size in layers within a window",
    "attention.value_length_swa": "has values of another size in layers within a window",
    "rope.dimension_count_swa": "rotates another part of heads in layers within a window",
    SECTIONS: "rotates parts of heads by other positions",
    "attention.scale": "scales attention by a number of its own",
    TEMPERATURE: "scales attention by position",
    "attn_logit_softcapping": "caps attention scores",
    "final_logit_softcapping": "caps logits",
    "logit_scale": "scales logits",
    "embedding_scale": "scales embeddings",
    "residual_scale": "scales residuals",
    LOG_MULTIPLIER: "scales YaRN by a logarithm of its own",
}
"""Values that change what is computed, refused where they are there and not 0."""


class Metadata(Protocol):
    """What sizes are read from: a `Gguf`, or the metadata that one would have."""

    @property
    def path(self) -> object:
        """What errors name."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Values by name."""

    def corrupt(self, what: str) -> GgufError:
        """The error for values that contradict each other."""


@dataclass(frozen=True)
class Config:
    """One model's sizes, read from its metadata and checked against its tensors."""

    arch: Arch
    vocab: int
    context: int
    """The context that the model was trained for."""
    layers: int
    dim: int
    ffn: int
    """The most of any layer."""
    heads: int
    kv_heads: int
    """The most of any layer."""
    head_dim: int
    """Elements of a query or key head, in a layer without a window; `at` has the others'."""
    value_dim: int
    """Elements of a value head."""
    eps: float
    """Of norms, over the square of residual_scale where there is one: the stream is kept divided by that, which its
    norms cannot tell."""
    rope: Rope
    """Of every layer that `forms` has no other for."""
    forms: tuple[LayerForm, ...] = ()
    """Of each layer, where they differ."""
    window: int | None = None
    """Positions that a token attends to at most, in a family without `Windows`: we run contexts within it, in which it
    changes nothing."""
    score_cap: float | None = None
    logit_cap: float | None = None
    attention_scale: float | None = None
    """Scores are scaled by it; None: as the family does."""
    embedding_scale: float = 1.0
    """Over residual_scale."""
    logit_scale: float = 1.0
    """Logits are multiplied by it."""
    temperature: Temperature | None = None
    """Of every layer."""
    taps: int = 0
    """Positions that a layer which convolves reads."""
    delta_heads: int = 0
    """Of a gated delta net: heads of values,"""
    delta_keys: int = 0
    """of queries and keys,"""
    state: int = 0
    """and elements of each."""
    layer_input: int = 0
    """Elements of a layer's own input beside the stream, as Gemma 4 has it."""
    ahead: int = 0
    """Blocks of the file behind its layers, whose tensors are left alone."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never drawn, such as those that stand for pictures."""
    own: Config | None = None
    """The file's sizes, where these are `filled` up."""

    @property
    def head_eps(self) -> float:
        """Of the norms of queries and keys."""
        own, norm = self.own or self, self.arch.query_norm
        filled = own.eps if norm is None else own.eps * self.share(norm.shape[0])
        return own.eps if own is self else max(filled, SMALLEST)  # or heads of zeros were no numbers

    def share(self, size: str) -> float:
        """What part of a vector is the file's."""
        return 1.0 if self.own is None else self.own.size(size) / self.size(size)

    def filled(self) -> Config:
        """The sizes with which our kernels run the model: every row of weights is whole runs of 64.

        Elements and heads of zeros are added to what a file has, which changes no product and no attention. The mean of
        squares that a norm takes is less by `share`: its epsilon is, too, and loading multiplies its weights by the
        root. Layer norms need the mean itself, so that the stream of such a model stays as it is.
        """
        whole = LANE_WEIGHTS // math.gcd(LANE_WEIGHTS, self.group * self.value_dim)  # KV heads
        kv_heads = -(-self.kv_heads // whole) * whole
        dim, ffn = (-(-size // LANE_WEIGHTS) * LANE_WEIGHTS for size in (self.dim, self.ffn))
        dim = self.dim if self.arch.norm == "layer" else dim
        if (dim, ffn, kv_heads) == (self.dim, self.ffn, self.kv_heads):
            return self
        if self.layers_differ:
            raise UnsupportedModelError(
                f"layers of different sizes are run where rows of weights are whole runs of {LANE_WEIGHTS}: choose "
                "another model"
            )
        net = self.network
        return replace(
            self,
            arch=replace(self.arch, scaled_embedding=False),
            dim=dim,
            ffn=ffn,
            heads=kv_heads * self.group,
            kv_heads=kv_heads,
            eps=self.eps * self.dim / dim,
            attention_scale=net.attends[0].scale,
            embedding_scale=net.embed.scale,
            own=self,
        )

    def at(self, layer: int | None) -> Config:
        """The sizes of a layer, or, with None, the model's."""
        return self if layer is None else self._at.get(layer, self)

    @property
    def layers_differ(self) -> bool:
        """Whether a layer has sizes of its own."""
        return bool(self._at)

    @cached_property
    def _at(self) -> Mapping[int, Config]:
        """Of layers whose sizes differ from the model's."""
        names = ("head_dim", "kv_heads", "ffn")
        own = {at: {name: getattr(form, name) for name in names} for at, form in enumerate(self.forms)}
        found = {at: {name: size for name, size in sizes.items() if size is not None} for at, sizes in own.items()}
        return {
            at: replace(self, **sizes, value_dim=sizes.get("head_dim", self.value_dim)) for at, sizes in found.items()
            if sizes
        }  # fmt: skip

    @cached_property
    def network(self) -> Network:
        """What the model computes."""
        return self.arch.network(self)

    @property
    def longest(self) -> int:
        """The longest context that we run."""
        return min(self.context, self.window or self.context)

    def positions(self, asked: int | None = None, prompt: int = 0, room: int = DEFAULT_CONTEXT) -> int:
        """Positions of a session's cache: `asked`, or a bounded default for which there is `room`; raises ContextError
        where they cannot be."""
        longest = self.longest
        if asked is not None and asked < 1:
            raise ContextError(f"a context of {asked} tokens was asked for: give 1 to {longest}")
        if asked is not None and asked > longest:
            what = "the model has" if longest == self.context else "we run the model within its sliding window of"
            raise ContextError(f"a context of {asked} tokens was asked for, {what} {longest}: ask for less")
        positions = asked or min(longest, DEFAULT_CONTEXT, room)
        if prompt > longest:
            raise ContextError(f"{prompt} tokens exceed the context of {longest}: shorten the prompt")
        if prompt > positions:
            default = "" if asked else ", our default" if room >= DEFAULT_CONTEXT else ", for which memory is free"
            raise ContextError(
                f"{prompt} tokens exceed the context of {positions}{default}: ask for a longer one (--context, up to "
                f"{longest}), or shorten the prompt"
            )
        return positions

    def check_prompt(self, tokens: Sequence[int], said: int = 0, context: int | None = None) -> None:
        """ModelError for tokens that the model cannot continue: none, or one outside of its vocabulary; ContextError
        where a `context` does not hold them after so many that were said."""
        if not tokens:
            raise ModelError("there is nothing to continue: give at least one token")
        if not all(0 <= token < self.vocab for token in tokens):
            raise ModelError(
                f"a token lies outside of the vocabulary of {self.vocab}: the tokenizer is not this model's"
            )
        if context is not None and said + len(tokens) > context:
            raise ContextError(f"{said + len(tokens)} tokens exceed the context of {context}: shorten the prompt")

    def check_sampled(self, token: int) -> None:
        """ModelError for what the device publishes where no logit is the largest."""
        if token >= self.vocab:
            raise ModelError(
                "the model's logits are not numbers: its weights or values are broken; download or convert it again"
            )

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that `Spec.shape` names."""
        return {
            "vocab": self.vocab,
            "context": self.context,
            "dim": self.dim,
            "ffn": self.ffn,
            "head": self.head_dim,
            "query": self.heads * self.head_dim,
            "key": self.kv_heads * self.head_dim,
            "value": self.kv_heads * self.value_dim,
            "mixed": self.heads * self.value_dim,
            "taps": self.taps,
            "state": self.state,
            "delta_heads": self.delta_heads,
            "inner": self.delta_heads * self.state,
            "input": self.layer_input,
            "inputs": self.layers * self.layer_input,
            "one": 1,
            "channels": (2 * self.delta_keys + self.delta_heads) * self.state,
        }

    def size(self, name: str) -> int:
        """A size as a `Spec.shape` names it, "a+b" included."""
        return sum(self.sizes[part] for part in name.split("+"))

    def convolved(self, op: Convolving) -> int:
        """Elements that a convolution keeps of a position."""
        return op.channels if isinstance(op, Delta) else self.dim

    @property
    def layer_forms(self) -> tuple[LayerForm, ...]:
        """Each layer's form."""
        return self.forms or (LayerForm(self.rope),) * self.layers

    @property
    def projected(self) -> int:
        """Elements that a layer's `Project` makes, at most."""
        net, layers = self.network, range(self.layers)
        return max(sum(self.at(at).size(spec.shape[0]) for spec in net.project(at).matrices) for at in layers)

    @property
    def queries(self) -> int:
        """Elements of a layer's queries, at most."""
        return max(self.at(at).size("query") for at in range(self.layers))

    @property
    def mixed(self) -> int:
        """Elements that are mixed in a layer, at most."""
        adds = [(at, op) for at, op in self.network.operations() if isinstance(op, Add) and op.reads == "mixed"]
        return max(self.at(at).size(add.matrix.shape[1]) for at, add in adds)

    @classmethod
    def read(cls, file: Gguf) -> Self:
        """The sizes of a file's model; raises UnsupportedModelError or GgufError."""
        config = cls.of(file, lambda spec: file.tensor(tensor_name(spec)).shaped(2).shape)
        config = replace(config, arch=_as_stored(config, file))
        config = replace(config, forms=_with_values(config, file))
        config._check_all(file)
        return config

    @classmethod
    def of(cls, file: Metadata, shape: Callable[[Spec], Sequence[int]]) -> Self:
        """The sizes that metadata tells, with the embedding's `shape`; raises UnsupportedModelError or GgufError."""
        get = _Reader(file)
        if (kind := get.optional("general.type", str, "model")) != "model":  # which may have no architecture
            raise UnsupportedModelError(f"{file.path} is no model but of the type {shown(kind)}: choose a model")
        arch = ARCHES.get(name := get.of("general.architecture", str))
        if arch is None:
            raise UnsupportedModelError(
                f"{file.path} is of the architecture {shown(name)}; we run {', '.join(ARCHES)}: choose another model"
            )
        _refuse(get, arch)
        if arch.with_images is not None and file.metadata.get(f"{name}.{SECTIONS}"):
            arch = replace(arch, rope=arch.with_images)
        if arch.parallel_by is not None and not get.flag(f"{name}.{arch.parallel_by}", default=True):
            arch = replace(arch, parallel=False)
        dim, heads = get.size(f"{name}.embedding_length"), get.size(f"{name}.attention.head_count")
        head_dim = get.size(f"{name}.attention.key_length", dim // heads)
        context, blocks = get.size(f"{name}.context_length"), get.size(f"{name}.block_count")
        if blocks > MOST_LAYERS:
            raise file.corrupt(f"{name}.block_count = {blocks}, at most {MOST_LAYERS} expected")
        ahead = get.optional(f"{name}.{NEXT}", int, 0)
        if not 0 <= ahead < blocks:
            raise file.corrupt(f"{name}.{NEXT} = {ahead} of {blocks} blocks")
        layers = blocks - ahead
        rope = UNTURNED if arch.rope == "none" else _rope(get, arch, head_dim, context)
        caps = {key: get.number(f"{name}.{key}", cap) for key, cap in arch.caps.items()}
        usual = {key: None if key in arch.needs else 0.0 for key in SCALES if key in arch.values}
        scales = {key: get.number(f"{name}.{key}", default) or None for key, default in usual.items()}
        residual = scales.get("residual_scale") or 1.0
        if not 1 / MOST_RESIDUAL_SCALE <= residual <= MOST_RESIDUAL_SCALE:
            raise file.corrupt(f"{name}.residual_scale = {residual:g}")
        config = cls(
            arch=arch,
            vocab=shape(arch.embedding)[0],
            context=context,
            layers=layers,
            dim=dim,
            ffn=max(get.each(f"{name}.{FFN}", layers)) if arch.sized else get.size(f"{name}.{FFN}"),
            heads=heads,
            kv_heads=max(get.each(f"{name}.{KV_HEADS}", layers, heads))
            if arch.sized
            else get.size(f"{name}.{KV_HEADS}", heads, but_zeros=arch.instead is not None),
            head_dim=head_dim,
            value_dim=get.size(f"{name}.attention.value_length", dim // heads),
            eps=get.number(f"{name}.{_EPS[arch.norm]}") / residual**2,
            rope=rope,
            forms=_forms(get, arch, rope, layers),
            window=_window(get, name) if arch.windows is None and not arch.ignores_window else None,
            score_cap=caps.get("attn_logit_softcapping") or None,
            logit_cap=caps.get("final_logit_softcapping") or None,
            attention_scale=scales.get("attention.scale"),
            embedding_scale=(scales.get("embedding_scale") or 1.0) / residual,
            logit_scale=(scales.get("logit_scale") or 1.0) ** (1 if arch.logits_multiplied else -1),
            temperature=_temperature(get, arch, context),
            **_instead(get, arch),
            layer_input=_layer_input(get, arch),
            ahead=ahead,
            suppressed=_suppressed(get, shape(arch.embedding)[0]),
        )
        config = replace(config, forms=_sized(get, config)) if arch.sized else config
        for at, form in enumerate(config.layer_forms):
            own, turned = config.at(at), form.rope.dim
            if own.heads % own.kv_heads or turned % 2 or turned > own.head_dim or not own.head_dim or not own.value_dim:
                raise file.corrupt(f"{heads} heads, {own.kv_heads} key heads of {own.head_dim}, rope over {turned}")
        return config

    def check_tokens(self, file: Gguf) -> None:
        """GgufError if the file's tokenizer lacks tokens that the model may choose, as llama.cpp has it."""
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) < self.vocab:
            raise file.corrupt(f"{len(tokens)} tokens for {self.vocab} rows of {self.arch.embedding.name}")

    def _check_all(self, file: Gguf) -> None:
        """Every tensor of the family and no other but those of blocks `ahead` and of keys and values that a layer takes
        from another, so that nothing is missing after half of the model is loaded."""
        known = set(self.arch.rope_divisors)
        known |= {stored_name(spec, layer) for spec, layer in self.specs()}
        known |= {tensor_name(spec, layer, "bias") for spec, layer in self.specs() if spec.bias != "none"}
        left = tuple(f"blk.{at}." for at in range(self.layers, self.layers + self.ahead))
        left += tuple(
            f"blk.{at}.attn_{side}" for at, form in enumerate(self.forms) if form.source is not None for side in "kv"
        )
        if unknown := [name for name in file.tensors if name not in known and not name.startswith(left)]:
            raise UnsupportedModelError(
                f"{file.path} has the tensor {shown(unknown[0])}, which the family {self.arch.name} as we run it does "
                f"not use: choose another model"
            )
        for _ in self.tensors(file):  # which checks each
            pass

    def specs(self) -> Iterator[tuple[Spec, int | None]]:
        """Every tensor of the model, with its layer, in the order of use; the output at the end."""
        net = self.network
        yield from ((spec, None) for spec in net.once)
        yield from ((spec, layer) for layer in range(self.layers) for spec in net.of_layer(layer))
        yield self.arch.output, None

    def tensors(self, file: Gguf) -> Iterator[TensorInfo]:
        """Where each tensor and bias of the model lies that the file has, by the names of their specs; all checked."""
        for spec, layer in self.specs():
            if spec is self.arch.output and tensor_name(spec) not in file.tensors:
                continue
            yield self.check(file, spec, layer)
            if spec.bias != "none":
                name = tensor_name(spec, layer, "bias")
                if spec.bias == "must":
                    file.tensor(name)
                bias = self.vector(file, name, self.at(layer).size(spec.shape[0]))
                if bias is not None:
                    yield bias

    def check(self, file: Gguf, spec: Spec, layer: int | None = None) -> TensorInfo:
        """The tensor of a spec, its shape checked: its own rows where it lies in a stack."""
        info, stack = file.tensor(stored_name(spec, layer)).shaped(len(spec.shape)), spec.stack
        sizes = self.at(layer)
        own = tuple(sizes.size(name) for name in spec.shape)
        expected = own if stack is None else (sum(map(sizes.size, stack.sizes)), *own[1:])
        if info.shape != expected:
            raise file.corrupt(f"tensor {info.name!r} has the shape {info.shape}, {expected} expected")
        if not spec.multiplied:
            self.vector(file, info.name, *expected)
        if stack is None:
            return info
        return replace(info.cut(map(sizes.size, stack.sizes))[stack.at], name=tensor_name(spec, layer))

    def vector(self, file: Gguf, name: str, *shape: int) -> TensorInfo | None:
        """An optional F32 vector such as a bias, or one for each element, its shape checked."""
        if (info := file.tensors.get(name)) is None:
            return None
        info = info.shaped(len(shape))
        if info.shape != shape or info.type is not F32:
            raise file.corrupt(f"tensor {name!r} is {info.type.name} {info.shape}, F32 {shape} expected")
        return info

    def rope_divisors(self, file: Gguf) -> Divisors:
        """What the file has pairs' frequencies divided by."""
        found = [self._divisors(file, name) for name in self.arch.rope_divisors] or [None]
        trained = self.context
        if len(found) > 1:
            trained = _Reader(file).size(f"{self.arch.name}.rope.scaling.original_context_length", trained)
        return Divisors(found[0], found[-1], trained)

    def _divisors(self, file: Gguf, name: str) -> NDArray[np.float32] | None:
        info = self.vector(file, name, self.rope.dim // 2)
        if info is None:
            return None
        divisors = np.frombuffer(file.read(info.offset, info.nbytes), np.float32)
        if not np.all((divisors >= SMALLEST) & (divisors <= LARGEST)):  # nor is what is not a number
            raise file.corrupt(f"tensor {info.name!r} has values that nothing is divided by")
        return divisors


def tensor_name(spec: Spec, layer: int | None = None, suffix: str | None = None) -> str:
    """A tensor's name in the file, with another suffix than its own where that is given."""
    name = ".".join(filter(None, (spec.name, spec.suffix if suffix is None else suffix)))
    return name if layer is None else f"blk.{layer}.{name}"


def stored_name(spec: Spec, layer: int | None) -> str:
    """The name of the tensor that holds a spec's in the file."""
    return tensor_name(spec if spec.stack is None else Spec(spec.stack.name, spec.shape), layer)


def _refuse(get: _Reader, arch: Arch) -> None:
    """Refuse by name what a file asks for and we do not run."""
    name = arch.name
    for key, what in _REFUSED.items():
        if get.file.metadata.get(f"{name}.{key}", 0) and key not in arch.caps and key not in arch.values:
            raise UnsupportedModelError(f"{get.file.path} {what} ({name}.{key}), which we do not run: choose another")
    if get.file.metadata.get(f"{name}.attention.causal", True) is False:
        raise UnsupportedModelError(f"{get.file.path} attends in both directions, which we do not run: choose another")
    if arch.turned_by is not None and get.file.metadata.get(f"{name}.{arch.turned_by}", True) is False:
        raise UnsupportedModelError(f"{get.file.path} rotates no heads, which we do not run: choose another")


def _as_stored(config: Config, file: Gguf) -> Arch:
    """The family, its queries, keys and values in one tensor or three as the file has them, and with biases or none;
    without the layers' scales where the file has none."""
    arch, first = config.arch, next(at for at, form in enumerate(config.layer_forms) if not form.instead)
    if arch.layer_scale is not None and tensor_name(arch.layer_scale, first) not in file.tensors:
        arch = replace(arch, layer_scale=None)

    def has(name: str) -> bool:
        return f"blk.{first}.{name}" in file.tensors

    one, must = len(arch.qkv) == 1, arch.qkv[0].bias == "must"
    if has("attn_qkv.weight"):
        return arch if one and (has("attn_qkv.bias") or not must) else replace(arch, qkv=FUSED)
    unbiased = must and not has("attn_q.bias")
    return replace(arch, qkv=LLAMA.qkv) if has("attn_q.weight") and (one or unbiased) else arch


def _with_values(config: Config, file: Gguf) -> tuple[LayerForm, ...]:
    """Each layer's form: one with matrices of queries and keys alone takes what its keys are made of as values."""
    if not config.arch.sized or config.arch.qkv != LLAMA.qkv:
        return config.forms
    return tuple(
        replace(form, values_are_keys=form.source is None and f"blk.{at}.attn_v.weight" not in file.tensors)
        for at, form in enumerate(config.layer_forms)
    )


def _suppressed(get: _Reader, vocab: int) -> tuple[int, ...]:
    """Tokens that a file says are never drawn; those that it does not have do not count, as in llama.cpp."""
    listed = get.file.metadata.get(SUPPRESSED, [])
    if not isinstance(listed, list) or any(type(token) is not int for token in listed):
        raise get.file.corrupt(f"{SUPPRESSED} = {shown(listed)}, which are no tokens")
    return tuple(sorted({token for token in listed if 0 <= token < vocab}))


def _layer_input(get: _Reader, arch: Arch) -> int:
    """Elements of a layer's own input."""
    key = f"{arch.name}.{INPUT_LENGTH}"
    return get.size(key) if arch.per_layer is not None and get.optional(key, int, 0) else 0


def _sized(get: _Reader, config: Config) -> tuple[LayerForm, ...]:
    """Each layer's form with its sizes, and with whose keys and values the last ones attend to."""
    name, layers = config.arch.name, config.layers
    kv_heads, ffn = get.each(f"{name}.{KV_HEADS}", layers, config.heads), get.each(f"{name}.{FFN}", layers)
    keys, values, turned = (f"{name}.{key}" for key in LOCAL_SIZES)
    head_dim = get.size(keys, config.head_dim)
    if get.size(values, head_dim) != head_dim or config.value_dim != config.head_dim:
        raise UnsupportedModelError(f"{get.file.path} has values of another size than keys: choose another model")
    forms = [
        replace(
            form if form.window is None
            else replace(form, rope=replace(form.rope, dim=get.size(turned, config.rope.dim), divided=False)),
            head_dim=head_dim if form.window is not None and head_dim != config.head_dim else None,
            kv_heads=kv_heads[at] if kv_heads[at] != config.kv_heads else None,
            ffn=ffn[at] if ffn[at] != config.ffn else None,
        )
        for at, form in enumerate(config.layer_forms)
    ]  # fmt: skip
    key = f"{name}.{SHARED_LAYERS}"
    if (shared := get.optional(key, int, 0)) < 0:
        raise get.file.corrupt(f"{key} = {shared}")
    first = layers - shared
    for at in range(first, layers):
        own = forms[at]
        source = first - (1 if own.window is None else 2)
        like = forms[source] if first >= 2 else None
        if like is None or (like.window, like.head_dim, like.kv_heads) != (own.window, own.head_dim, own.kv_heads):
            raise get.file.corrupt(f"{key} = {shared} of {layers} layers")
        forms[at] = replace(own, source=source)
    return tuple(forms)


def _window(get: _Reader, name: str) -> int | None:
    key = f"{name}.attention.sliding_window"
    if (window := get.optional(key, int, 0)) < 0:
        raise get.file.corrupt(f"{key} = {window}")
    return window or None


def _forms(get: _Reader, arch: Arch, rope: Rope, layers: int) -> tuple[LayerForm, ...]:
    """Each layer's form, or none where all are alike."""
    if isinstance(arch.instead, DeltaNet):
        return _recurrent(get, arch.name, rope, layers)
    if arch.instead is not None:
        return _convolved(get, arch.name, rope, layers)
    if arch.unturned is not None:
        return tuple(LayerForm(rope if (at + 1) % arch.unturned else UNTURNED) for at in range(layers))
    return () if arch.windows is None else _windowed(get, arch.name, arch.windows, rope, layers)


def _instead(get: _Reader, arch: Arch) -> dict[str, Any]:
    """Sizes of layers that do not attend."""
    name = arch.name
    if arch.instead is None:
        return {}
    if not isinstance(arch.instead, DeltaNet):
        return {"taps": _taps(get, f"{name}.shortconv.l_cache")}
    state, heads, keys = (get.size(f"{name}.ssm.{key}") for key in ("state_size", "time_step_rank", "group_count"))
    if heads % keys or get.size(f"{name}.ssm.inner_size") != heads * state:
        raise get.file.corrupt(f"{name}.ssm: {heads} heads of {state}, {keys} of keys")
    taps = _taps(get, f"{name}.ssm.conv_kernel")
    return {"taps": taps, "delta_heads": heads, "delta_keys": keys, "state": state}


def _taps(get: _Reader, key: str) -> int:
    if (taps := get.size(key)) > MOST_TAPS:
        raise UnsupportedModelError(f"{get.file.path} convolves {taps} positions ({key}), {MOST_TAPS} at most are run")
    return taps


def _convolved(get: _Reader, name: str, rope: Rope, layers: int) -> tuple[LayerForm, ...]:
    """Each layer's form in a family some of whose layers convolve: those without key heads."""
    if not isinstance(heads := get.file.metadata.get(key := f"{name}.{KV_HEADS}"), list):
        return ()
    if len(heads) < layers or not any(heads[:layers]):
        raise get.file.corrupt(f"{key} = {shown(heads)} for {layers} layers, of which some attend")
    return tuple(LayerForm(rope, instead=count == 0) for count in heads[:layers])


def _recurrent(get: _Reader, name: str, rope: Rope, layers: int) -> tuple[LayerForm, ...]:
    """Each layer's form in a family some of whose layers are gated delta nets: those that a list names, or all but each
    one of so many."""
    key, every = f"{name}.attention.recurrent_layers", f"{name}.full_attention_interval"
    said = get.file.metadata.get(key)
    if not isinstance(said, list):
        period = get.size(every, 4)
        said = [(at + 1) % period != 0 for at in range(layers)]
    if len(said) < layers or all(said[:layers]):
        raise get.file.corrupt(f"{key} = {shown(said)} for {layers} layers, of which some attend")
    return tuple(LayerForm(rope, instead=bool(one)) for one in said[:layers])


def _windowed(get: _Reader, name: str, windows: Windows, rope: Rope, layers: int) -> tuple[LayerForm, ...]:
    """Each layer's form in a family some of whose layers attend within a window."""
    window = _window(get, name) or windows.window
    if window is None or layers != (windows.layers or layers):
        return ()
    key = f"{name}.{PATTERN}"
    pattern = get.file.metadata.get(key, windows.period)
    if isinstance(pattern, list):
        within = pattern[:layers]
        if len(within) < layers:
            raise get.file.corrupt(f"{key} has {len(within)} entries for {layers} layers")
        if odd := [entry for entry in within if entry not in (0, 1)]:
            raise get.file.corrupt(f"{key} has the entry {shown(odd[0])}, which is no yes or no")
    else:
        period = get.optional(key, int, windows.period)
        if period < 0:
            raise get.file.corrupt(f"{key} = {period}")
        within = [period == 0 or at % period < period - 1 for at in range(layers)]
    own = get.number(get.key(name, *LOCAL_BASE), windows.base or rope.base, above=0.0)
    inside = replace(rope, base=own) if windows.base is None else Rope(rope.dim, own, attention=rope.attention)
    if windows.plain:
        inside = Rope(rope.dim, own)
    outside = LayerForm(UNTURNED if windows.only else rope)
    return tuple(LayerForm(inside, window) if local else outside for local in within)


def _rope(get: _Reader, arch: Arch, head_dim: int, context: int) -> Rope:
    name = arch.name
    kind = get.optional(f"{name}.rope.scaling.type", str, "linear")
    factor = get.number(f"{name}.rope.scaling.factor", 0.0) or get.number(f"{name}.rope.scale_linear", 0.0)
    dim = get.size(f"{name}.rope.dimension_count", head_dim)
    # YaRN divides by the base's logarithm.
    base = get.number(get.key(name, *BASE), 10000.0, above=1.0 if kind == "yarn" else 0.0)
    kinds = ("none", "linear", "yarn", *(["longrope"] if arch.rope_divisors == LONG_ROPE else []))
    if kind not in kinds:
        raise UnsupportedModelError(
            f"{get.file.path} scales its rope by {shown(kind)}; we run {', '.join(kinds)}: choose another model"
        )
    yarn, prefix = None, f"{name}.rope.scaling"
    if kind == "yarn":
        yarn = Yarn(
            trained_context=get.size(f"{prefix}.original_context_length", context),
            beta_fast=get.number(f"{prefix}.yarn_beta_fast", 32.0, above=0.0),
            beta_slow=get.number(f"{prefix}.yarn_beta_slow", 1.0, above=0.0),
        )
    scale = 1.0 / factor if factor and kind != "none" else 1.0
    attention = get.number(f"{prefix}.attn_factor", 1.0, above=0.0)
    if yarn is not None and factor > 1 and LOG_MULTIPLIER in arch.values:
        attention /= 1 + 0.1 * get.number(f"{name}.{LOG_MULTIPLIER}", 0.0) * math.log(factor)
    return Rope(dim, base, scale, yarn, attention)


def _temperature(get: _Reader, arch: Arch, context: int) -> Temperature | None:
    scale = get.number(f"{arch.name}.{TEMPERATURE}", 0.0) if TEMPERATURE in arch.values else 0.0
    period = f"{arch.name}.rope.scaling.original_context_length"
    return Temperature(scale, get.size(period, context)) if scale else None


class _Reader:
    """Typed access to a file's metadata."""

    def __init__(self, file: Metadata) -> None:
        self.file = file

    def key(self, arch: str, *names: str) -> str:
        """The key of a value that has several names: of the first that the file has, or of the first."""
        keys = [f"{arch}.{name}" for name in names]
        return next((key for key in keys if key in self.file.metadata), keys[0])

    def optional(self, key: str, kind: type[T], default: T) -> T:
        return self.of(key, kind) if key in self.file.metadata else default

    def of(self, key: str, kind: type[T]) -> T:
        value = self.file.metadata.get(key)
        if value is None:
            raise GgufError(f"{self.file.path} lacks the value {key!r}; it is incomplete, convert it again")
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.file.corrupt(f"{key} = {shown(value)}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """A yes or no."""
        value = self.file.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.file.corrupt(f"{key} = {shown(value)}, which is no yes or no")
        return value

    def number(self, key: str, default: float | None = None, *, above: float | None = None) -> float:
        """A finite number above a bound, or where there is none one that is not below 0."""
        value = self.of(key, float) if default is None else self.optional(key, float, default)
        unsound = not math.isfinite(value) or (value < 0 if above is None else value <= above)
        if unsound or value > LARGEST or 0 < value < SMALLEST:
            raise self.file.corrupt(f"{key} = {value:g}")
        return value

    def each(self, key: str, count: int, default: int | None = None) -> list[int]:
        """A positive int for each of so many layers, or one for all."""
        value = self.file.metadata.get(key)
        if not isinstance(value, list):
            return [self.size(key, default)] * count
        sizes = [entry for entry in value[:count] if type(entry) is int and 0 < entry <= LARGEST_SIZE]
        if len(sizes) < count:
            raise self.file.corrupt(f"{key} = {shown(value)} for {count} layers")
        return sizes

    def size(self, key: str, default: int | None = None, *, but_zeros: bool = False) -> int:
        """A positive int. A list of one size per layer is accepted where all are equal, or all but zeros."""
        if default is not None and key not in self.file.metadata:
            return default
        value = self.file.metadata.get(key)
        if isinstance(value, list) and but_zeros and any(value):
            value = [entry for entry in value if entry != 0]
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        elif isinstance(value, list):
            raise UnsupportedModelError(
                f"{self.file.path} has layers of different {key}, which we do not run: choose another model"
            )
        else:
            value = self.of(key, int)
        if not isinstance(value, int) or value <= 0:
            raise self.file.corrupt(f"{key} = {shown(value)}")
        if value > LARGEST_SIZE:
            raise self.file.corrupt(f"{key} = {value}, at most {LARGEST_SIZE} expected")
        return value
