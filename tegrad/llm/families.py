"""Model families, a row of `ARCHES` each: which tensors with which shapes, which norm, rope and activation.

The names are GGUF's (gguf-py's constants); what they mean is as llama.cpp computes the family of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from tegrad.llm.arch import LOCAL_SIZES, Arch, Convolution, DeltaNet, PerLayer, Windows
from tegrad.llm.network import Spec, Stack

SCALES: Final = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
"""What scores, embeddings, and what blocks add are multiplied by, and logits divided by, or in some families
multiplied; 0 stands for the usual."""
TEMPERATURE: Final = "attention.temperature_scale"
"""`Temperature.scale`; its period is the context before YaRN."""
LOG_MULTIPLIER: Final = "rope.scaling.yarn_log_multiplier"
"""With it YaRN's growth of cosines and sines is divided by what it would be with so many times the logarithm."""
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

LLAMA_EMBED: Final = replace(LLAMA, name="llama-embed")
"""Llama-Embed-Nemotron, whose files say that tokens attend to those after them."""

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

GEMMA_EMBEDDING: Final = replace(
    GEMMA3, name="gemma-embedding", dim_scaled=None, logit_cap=None, causal=False,
    dense=("dense_2.weight", "dense_3.weight"),
)  # fmt: skip
"""EmbeddingGemma."""

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
        *(LLAMA, LLAMA_EMBED, MISTRAL3, MINICPM, GRANITE, SMOLLM3, INTERNLM2, ERNIE4_5, ARCEE),
        *(QWEN2, QWEN3, QWEN3_5, LFM2, QWEN2_VL, QWEN3_VL, HUNYUAN, SEED_OSS, EXAONE, EXAONE4, PHI3, GLM4, CHATGLM),
        *(
            MAINCODER,
            PANGU,
            OLMO2,
            GEMMA,
            GEMMA2,
            GEMMA3,
            GEMMA4,
            GEMMA_EMBEDDING,
            GPT2,
            STARCODER2,
            NEMOTRON,
            JAIS2,
            STABLELM,
        ),
        *(GPTNEOX, PHI2, COMMAND_R, COHERE2),
    )
}
"""By `general.architecture`."""
