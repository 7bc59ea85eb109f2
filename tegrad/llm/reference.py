"""The plain form of `model`: the same description of a family, evaluated in float32 numpy, all positions at once.

Slow and simple; for tests. `Reference(path).logits(tokens)` is what the device must compute.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tegrad.llm.arch import Arch, Config, Spec, tensor_name
from tegrad.llm.gguf import Gguf

Floats: TypeAlias = NDArray[np.floating[Any]]


class Past:
    """The rotated keys and the values (positions, kv_heads, 1, width) of the tokens that came before, by layer.

    They are rounded as a cache of the kind `stored` rounds them. `first` is the position of the first token.
    """

    def __init__(self, stored: Literal["F32", "F16", "Q8_0"] = "F32", first: int = 0) -> None:
        self.keys: dict[int, Floats] = {}
        self.values: dict[int, Floats] = {}
        self.count, self.first = 0, first
        self._round = ROUNDINGS[stored]

    def extend(self, layer: int, key: Floats, value: Floats) -> tuple[Floats, Floats]:
        """Add a layer's new keys and values; returns all of them."""
        for kept, new in ((self.keys, key), (self.values, value)):
            rounded = self._round(new)
            kept[layer] = np.concatenate([kept[layer], rounded]) if layer in kept else rounded
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
        start = past.first + past.count
        tables = self.config.rope.tables(start + len(tokens), self.divisors)[:, start:]
        x = self.weights[tensor_name(arch.embedding)][np.asarray(tokens)]
        if arch.positions is not None:
            x = x + self.weights[tensor_name(arch.positions)][start : start + len(tokens)]
        for layer in range(self.config.layers):
            x = x + self._attention(arch, layer, self._norm(x, arch.attn_norm, layer), tables, past)
            x = x + self._ffn(arch, layer, self._norm(x, arch.ffn_norm, layer))
        past.count += len(tokens)
        output = self.weights.get(tensor_name(arch.output), self.weights[tensor_name(arch.embedding)])
        return self._norm(x, arch.output_norm) @ output.T

    def _norm(self, x: Floats, spec: Spec, layer: int | None = None) -> Floats:
        if self.config.arch.norm == "layer":
            x = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
        return self._biased(self._unit(x) * self.weights[tensor_name(spec, layer)], spec, layer)

    def _unit(self, x: Floats) -> Floats:
        """x with a root mean square of 1 along its last axis."""
        square = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        y: Floats = x / np.sqrt(square + np.float32(self.config.eps))
        return y

    def _linear(self, x: Floats, spec: Spec, layer: int) -> Floats:
        return self._biased(x @ self.weights[tensor_name(spec, layer)].T, spec, layer)

    def _biased(self, y: Floats, spec: Spec, layer: int | None) -> Floats:
        bias = self.weights.get(tensor_name(spec, layer, "bias"))
        return y if bias is None else y + bias

    def _qkv(self, arch: Arch, layer: int, x: Floats) -> tuple[Floats, Floats, Floats]:
        """Queries, keys and values (tokens, kv_heads, heads of the group, width) of x, not rotated."""
        c, count = self.config, len(x)
        joined = np.concatenate([self._linear(x, spec, layer) for spec in arch.qkv], axis=1)
        query, key, value = np.split(joined, np.cumsum([c.sizes["query"], c.sizes["key"]]), axis=1)
        query = query.reshape(count, c.kv_heads, c.group, c.head_dim)
        key = key.reshape(count, c.kv_heads, 1, c.head_dim)
        if arch.query_norm is not None:
            query = self._unit(query) * self.weights[tensor_name(arch.query_norm, layer)]
        if arch.key_norm is not None:
            key = self._unit(key) * self.weights[tensor_name(arch.key_norm, layer)]
        return query, key, value.reshape(count, c.kv_heads, 1, c.value_dim)

    def _attention(self, arch: Arch, layer: int, x: Floats, tables: Floats, past: Past) -> Floats:
        c, count = self.config, len(x)
        query, key, value = self._qkv(arch, layer, x)
        rotate = ROTATIONS[arch.rope]
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
        inner = self._linear(x, arch.up, layer)
        activate = ACTIVATIONS[arch.activation]
        inner = activate(inner) if arch.gate is None else activate(self._linear(x, arch.gate, layer)) * inner
        return self._linear(inner, arch.down, layer)


def _rotate_neighbours(x: Floats, tables: Floats) -> Floats:
    """Rotate pairs (2i, 2i + 1) of the last axis of x (tokens, heads, group, dim), as far as the tables go."""
    cos, sin = tables[:, :, None, None, :]
    width = 2 * cos.shape[-1]
    even, odd = x[..., 0:width:2], x[..., 1:width:2]
    pairs = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return np.concatenate([pairs.reshape(*x.shape[:-1], width), x[..., width:]], axis=-1)


def _rotate_halves(x: Floats, tables: Floats) -> Floats:
    """Rotate pairs (i, i + n) of the last axis of x (tokens, heads, group, dim), n being the width of the tables."""
    cos, sin = tables[:, :, None, None, :]
    n = cos.shape[-1]
    first, second = x[..., :n], x[..., n : 2 * n]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos, x[..., 2 * n :]], axis=-1)


def _silu(x: Floats) -> Floats:
    y: Floats = x / (1 + np.exp(-x))
    return y


def _gelu(x: Floats) -> Floats:
    y: Floats = np.float32(0.5) * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))
    return y


def _round_q8_0(x: Floats) -> Floats:
    """Blocks of 32: a half, the largest magnitude over 127, times integers, ties away from zero (ggml's q8_0)."""
    blocks = x.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    levels = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0)
    rounded = np.trunc(levels + np.copysign(np.float32(0.5), levels))
    y: Floats = rounded * scale.astype(np.float16).astype(np.float32)
    return y.reshape(x.shape)


ROUNDINGS: Final[Mapping[str, Callable[[Floats], Floats]]] = {
    "F32": lambda x: x,
    "F16": lambda x: x.astype(np.float16).astype(np.float32),
    "Q8_0": _round_q8_0,
}
"""What a cache of a kind gives back of what was stored in it."""

ROTATIONS: Final[Mapping[str, Callable[[Floats, Floats], Floats]]] = {
    "interleaved": _rotate_neighbours,
    "halves": _rotate_halves,
    "none": lambda x, _: x,
}
ACTIVATIONS: Final[Mapping[str, Callable[[Floats], Floats]]] = {"silu": _silu, "gelu": _gelu}


def _expand(file: Gguf, name: str) -> Floats:
    """A tensor as float32 in its own shape."""
    info = file.tensors[name]
    data = np.frombuffer(file.read(info.offset, info.nbytes), np.uint8).reshape(info.rows, -1)
    values: Floats = dequantize(data, GGMLQuantizationType[info.type.name]).astype(np.float32)
    return values.reshape(info.shape)
