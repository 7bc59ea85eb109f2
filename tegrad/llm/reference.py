"""The plain twin of `model`: the same description of a family, evaluated in float32 numpy, all positions at once.

Slow and simple; for tests. `Reference(path).logits(tokens)` is what the device must compute.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tegrad.llm.arch import Arch, Config, Spec, tensor_name
from tegrad.llm.gguf import Gguf

Floats: TypeAlias = NDArray[np.floating[Any]]


class Past:
    """The rotated keys and the values (positions, kv_heads, 1, width) of the tokens that came before, by layer."""

    def __init__(self) -> None:
        self.keys: dict[int, Floats] = {}
        self.values: dict[int, Floats] = {}
        self.count = 0

    def extend(self, layer: int, key: Floats, value: Floats) -> tuple[Floats, Floats]:
        """Add a layer's new keys and values; returns all of them."""
        for kept, new in ((self.keys, key), (self.values, value)):
            kept[layer] = np.concatenate([kept[layer], new]) if layer in kept else new
        return self.keys[layer], self.values[layer]


class Reference:
    """A model, its weights expanded to float32 in memory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with Gguf.open(path) as file:
            self.config = Config.read(file)
            self.divisors = self.config.rope_divisors(file)
            self.weights = {name: _expand(file, name) for name in file.tensors}

    def logits(self, tokens: Sequence[int], past: Past | None = None) -> Floats:
        """Logits (len(tokens), vocab) after each token; with `past`, of tokens that follow those already fed to it."""
        arch, past = self.config.arch, past or Past()
        tables = self.config.rope.tables(past.count + len(tokens), self.divisors)[:, past.count :]
        x = self.weights[tensor_name(arch.embedding)][np.asarray(tokens)]
        for layer in range(self.config.layers):
            x = x + self._attention(arch, layer, self._norm(x, arch.attn_norm, layer), tables, past)
            x = x + self._ffn(arch, layer, self._norm(x, arch.ffn_norm, layer))
        past.count += len(tokens)
        output = self.weights.get(tensor_name(arch.output), self.weights[tensor_name(arch.embedding)])
        return self._norm(x, arch.output_norm) @ output.T

    def _norm(self, x: Floats, spec: Spec, layer: int | None = None) -> Floats:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32) + np.float32(self.config.eps))
        return x * scale * self.weights[tensor_name(spec, layer)]

    def _linear(self, x: Floats, spec: Spec, layer: int) -> Floats:
        y = x @ self.weights[tensor_name(spec, layer)].T
        bias = self.weights.get(tensor_name(spec, layer, "bias"))
        return y if bias is None else y + bias

    def _attention(self, arch: Arch, layer: int, x: Floats, tables: Floats, past: Past) -> Floats:
        c, count = self.config, len(x)
        query = self._linear(x, arch.query, layer).reshape(count, c.kv_heads, c.group, c.head_dim)
        key = self._linear(x, arch.key, layer).reshape(count, c.kv_heads, 1, c.head_dim)
        value = self._linear(x, arch.value, layer).reshape(count, c.kv_heads, 1, c.value_dim)
        rotate = _ROTATIONS[arch.rope]
        query = rotate(query, tables)
        key, value = past.extend(layer, rotate(key, tables), value)
        # By kv head, group, position: products that BLAS computes, unlike einsum.
        scores = query.transpose(1, 2, 0, 3) @ key.transpose(1, 2, 3, 0) / np.float32(np.sqrt(c.head_dim))
        scores = np.where(np.tri(count, len(key), past.count, dtype=bool), scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = weights @ value.transpose(1, 2, 0, 3)
        mixed = mixed.transpose(2, 0, 1, 3).reshape(count, c.heads * c.value_dim)
        return self._linear(mixed, arch.attn_output, layer)

    def _ffn(self, arch: Arch, layer: int, x: Floats) -> Floats:
        gate = _ACTIVATIONS[arch.activation](self._linear(x, arch.gate, layer))
        return self._linear(gate * self._linear(x, arch.up, layer), arch.down, layer)


def _rotate(x: Floats, tables: Floats) -> Floats:
    """Rotate neighbouring pairs of the last axis of x (tokens, heads, group, dim), as far as the tables go."""
    cos, sin = tables[:, :, None, None, :]
    width = 2 * cos.shape[-1]
    even, odd = x[..., 0:width:2], x[..., 1:width:2]
    pairs = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return np.concatenate([pairs.reshape(*x.shape[:-1], width), x[..., width:]], axis=-1)


def _silu(x: Floats) -> Floats:
    y: Floats = x / (1 + np.exp(-x))
    return y


_ROTATIONS: Final[Mapping[str, Callable[[Floats, Floats], Floats]]] = {"interleaved": _rotate}
_ACTIVATIONS: Final[Mapping[str, Callable[[Floats], Floats]]] = {"silu": _silu}


def _expand(file: Gguf, name: str) -> Floats:
    """A tensor as float32 in its own shape."""
    info = file.tensors[name]
    data = np.frombuffer(file.read(info.offset, info.nbytes), np.uint8).reshape(info.rows, -1)
    values: Floats = dequantize(data, GGMLQuantizationType[info.type.name]).astype(np.float32)
    return values.reshape(info.shape)
