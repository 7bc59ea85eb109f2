"""Trained weights to a GGUF file of at most 4,000,000 bytes, in Q6_K and Q8_0, with vocabulary and chat template."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tokenizers import Tokenizer

from small_model import vocabulary
from small_model.corpus import PACKAGE
from small_model.network import Sizes, Weights
from tegrad.llm.quantize import quantize

LIMIT = 4_000_000
"""Bytes that the file may have."""

KINDS = {"attn_v": Kind.Q8_0, "ffn_down": Kind.Q8_0}
"""Matrices that suffer most from rounding; the others are Q6_K, and the norms F32."""


def tensors(sizes: Sizes, weights: Weights) -> dict[str, NDArray[np.float32]]:
    """By GGUF name: the fused matrices of the network cut into what llama.cpp calls them.

    The network rotates neighbouring pairs, as llama.cpp does for this architecture, so no row changes its place.
    """
    kv = sizes.kv_heads * sizes.head_dim
    cuts = {
        "attn_qkv": {"attn_q": sizes.dim, "attn_k": kv, "attn_v": kv},
        "ffn_gate_up": {"ffn_gate": sizes.ffn, "ffn_up": sizes.ffn},
    }
    out: dict[str, NDArray[np.float32]] = {}
    for name, weight in weights.items():
        prefix, _, last = name.rpartition(".")
        parts = cuts.get(last, {last: len(weight)})
        pieces = np.split(weight.astype(np.float32), np.cumsum(list(parts.values()))[:-1])
        out |= {f"{prefix}.{part}".lstrip(".") + ".weight": piece for part, piece in zip(parts, pieces, strict=True)}
    return out


def kind_of(name: str, weight: NDArray[np.float32]) -> Kind:
    """How a tensor is stored."""
    return Kind.F32 if weight.ndim == 1 else KINDS.get(name.split(".")[-2], Kind.Q6_K)


def write(path: Path, sizes: Sizes, weights: Weights, tokenizer: Tokenizer) -> int:
    """Write the file whole or not at all; returns its bytes. Raises ValueError where it would exceed LIMIT."""
    partial = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(partial, "llama")
    try:
        _describe(writer, sizes)
        _add_vocabulary(writer, tokenizer)
        for name, weight in tensors(sizes, weights).items():
            kind = kind_of(name, weight)
            if kind == Kind.F32:
                writer.add_tensor(name, weight)
            else:
                writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        size = partial.stat().st_size
        if size > LIMIT:
            raise ValueError(f"the file would have {size} bytes, {LIMIT} are allowed: make the network smaller")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return size


def _describe(writer: gguf.GGUFWriter, sizes: Sizes) -> None:
    writer.add_name("tegrad small")
    writer.add_description(f"A small llama trained on the King James Bible (Debian's package {PACKAGE}).")
    writer.add_license("MIT")
    writer.add_languages(["en"])
    writer.add_tags(["text-generation"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q6_K)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(sizes.context)
    writer.add_embedding_length(sizes.dim)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.ffn)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_rope_dimension_count(sizes.head_dim)
    writer.add_rope_freq_base(sizes.rope_base)
    writer.add_layer_norm_rms_eps(sizes.eps)
    writer.add_vocab_size(sizes.vocab)


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    words = vocabulary.GgufVocabulary.of(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.PRE)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    writer.add_bos_token_id(tokenizer.token_to_id(vocabulary.BOS))
    writer.add_eos_token_id(tokenizer.token_to_id(vocabulary.EOS))
    writer.add_eot_token_id(tokenizer.token_to_id(vocabulary.TURN_END))
    writer.add_pad_token_id(tokenizer.token_to_id(vocabulary.PAD))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(vocabulary.TEMPLATE)
