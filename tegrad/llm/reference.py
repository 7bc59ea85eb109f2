"""The plain twin of `model`: the same description of a family, evaluated in float32 numpy, all positions at once.

Slow and simple; for tests. `Reference(path).logits(tokens)` is what the device must compute.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tegrad.llm.arch import Arch, Config, Spec, tensor_name
from tegrad.llm.gguf import Gguf

Floats: TypeAlias = NDArray[np.floating[Any]]


class Reference:
    """A model, its weights expanded to float32 in memory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with Gguf.open(path) as file:
            self.config = Config.read(file)
            self.divisors = self.config.rope_divisors(file)
            self.weights = {name: _expand(file, name) for name in file.tensors}

    def logits(self, tokens: Sequence[int]) -> Floats:
        """Logits (len(tokens), vocab) after each token."""
        arch, count = self.config.arch, len(tokens)
        tables = self.config.rope.tables(count, self.divisors)
        x = self.weights[tensor_name(arch.embedding)][np.asarray(tokens)]
        for layer in range(self.config.layers):
            x = x + self._attention(arch, layer, self._norm(x, arch.attn_norm, layer), tables)
            x = x + self._ffn(arch, layer, self._norm(x, arch.ffn_norm, layer))
        output = self.weights.get(tensor_name(arch.output), self.weights[tensor_name(arch.embedding)])
        return self._norm(x, arch.output_norm) @ output.T

    def _norm(self, x: Floats, spec: Spec, layer: int | None = None) -> Floats:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32) + np.float32(self.config.eps))
        return x * scale * self.weights[tensor_name(spec, layer)]

    def _linear(self, x: Floats, spec: Spec, layer: int) -> Floats:
        y = x @ self.weights[tensor_name(spec, layer)].T
        bias = self.weights.get(tensor_name(spec, layer, "bias"))
        return y if bias is None else y + bias

    def _attention(self, arch: Arch, layer: int, x: Floats, tables: Floats) -> Floats:
        c, count = self.config, len(x)
        query = self._linear(x, arch.query, layer).reshape(count, c.kv_heads, c.group, c.head_dim)
        key = self._linear(x, arch.key, layer).reshape(count, c.kv_heads, 1, c.head_dim)
        value = self._linear(x, arch.value, layer).reshape(count, c.kv_heads, c.value_dim)
        query, key = _rotate(query, tables), _rotate(key, tables)
        scores = np.einsum("tkgd,skd->kgts", query, key[:, :, 0]) / np.float32(np.sqrt(c.head_dim))
        scores = np.where(np.tri(count, dtype=bool), scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("kgts,skd->tkgd", weights, value).reshape(count, c.heads * c.value_dim)
        return self._linear(mixed, arch.attn_output, layer)

    def _ffn(self, arch: Arch, layer: int, x: Floats) -> Floats:
        gate = self._linear(x, arch.gate, layer)
        return self._linear(gate / (1 + np.exp(-gate)) * self._linear(x, arch.up, layer), arch.down, layer)


def _rotate(x: Floats, tables: Floats) -> Floats:
    """Rotate neighbouring pairs of the last axis of x (tokens, heads, group, dim), as far as the tables go."""
    cos, sin = tables[:, :, None, None, :]
    width = 2 * cos.shape[-1]
    even, odd = x[..., 0:width:2], x[..., 1:width:2]
    pairs = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return np.concatenate([pairs.reshape(*x.shape[:-1], width), x[..., width:]], axis=-1)


def _expand(file: Gguf, name: str) -> Floats:
    """A tensor as float32 in its own shape."""
    info = file.tensors[name]
    data = np.frombuffer(file.read(info.offset, info.nbytes), np.uint8).reshape(info.rows, -1)
    values: Floats = dequantize(data, GGMLQuantizationType[info.type.name]).astype(np.float32)
    return values.reshape(info.shape)
