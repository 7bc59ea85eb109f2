"""A model's graph in tinygrad operations: packed weights, a KV cache per session, one step for any number of tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import sqrt
from typing import Self

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import DType

from tegrad.llm.arch import Config
from tegrad.llm.gguf import Gguf, Progress
from tegrad.llm.weights import Linear, Loader, Matrix


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block's weights."""

    attn_norm: Tensor
    qkv: Linear
    attn_output: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of one session's tokens, one pair a layer: (kv_heads, positions, head_dim or value_dim)."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    rope: Tensor
    """Cosines and sines (2, positions, pairs)."""

    @property
    def nbytes(self) -> int:
        return sum(int(tensor.nbytes()) for tensor in (*self.keys, *self.values, self.rope))


class Model:
    """A GGUF model on a device."""

    def __init__(self, file: Gguf, device: str | None = None, progress: Progress | None = None) -> None:
        self.device = device or Device.DEFAULT
        self.config = config = Config.read(file)
        self.metadata = file.metadata
        self._divisors = config.rope_divisors(file)
        load, arch = Loader(file, config, self.device, progress), config.arch
        self.embedding = load.matrix(arch.embedding)
        self.layers = [
            Layer(
                attn_norm=load.vector(arch.attn_norm, at),
                qkv=load.linear((arch.query, arch.key, arch.value), at),
                attn_output=load.linear((arch.attn_output,), at),
                ffn_norm=load.vector(arch.ffn_norm, at),
                gate_up=load.linear((arch.gate, arch.up), at),
                down=load.linear((arch.down,), at),
            )
            for at in range(config.layers)
        ]
        self.output_norm = load.vector(arch.output_norm)
        tied = f"{arch.output.name}.weight" not in file.tensors
        self.output: Matrix = self.embedding if tied else load.matrix(arch.output)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | None = None, progress: Progress | None = None) -> Self:
        """Read a file to a device; raises GgufError or UnsupportedModelError."""
        with Gguf.open(path) as file:
            return cls(file, device, progress)

    def cache(self, positions: int, dtype: DType = dtypes.float16) -> Cache:
        """An empty cache for so many positions."""
        c = self.config

        def zeros(width: int) -> tuple[Tensor, ...]:
            shape = (c.kv_heads, positions, width)
            return tuple(
                Tensor.zeros(*shape, dtype=dtype, device=self.device).contiguous().realize() for _ in self.layers
            )

        rope = Tensor(c.rope.tables(positions, self._divisors), device=self.device).realize()
        return Cache(zeros(c.head_dim), zeros(c.value_dim), rope)

    def forward(self, tokens: Tensor, cache: Cache, start: UOp | int, last: UOp | int | None = None) -> Tensor:
        """Logits after tokens (count,) at positions from `start`, which are added to the cache.

        Of every token (count, vocab), or where `last` is given of the token at that index only (1, vocab).
        """
        x = self.embedding.rows(tokens)
        for at, layer in enumerate(self.layers):
            x = self._block(layer, x, cache, at, start)
        if last is not None and tokens.shape[0] != 1:
            x = x[last : last + 1]
        return self.output.apply(self._norm(x, self.output_norm))

    def _block(self, layer: Layer, x: Tensor, cache: Cache, at: int, start: UOp | int) -> Tensor:
        mixed = self._attention(layer, self._norm(x, layer.attn_norm), cache, at, start)
        (y,) = layer.attn_output(mixed)
        x = (x + y).contiguous()
        gate, up = layer.gate_up(self._norm(x, layer.ffn_norm))
        (y,) = layer.down(gate.silu() * up)
        return (x + y).contiguous()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(axis=-1, keepdim=True) + self.config.eps).rsqrt() * weight

    def _attention(self, layer: Layer, x: Tensor, cache: Cache, at: int, start: UOp | int) -> Tensor:
        """Mixed values (count, heads * value_dim) of normalized x; writes the new keys and values to the cache."""
        c, count = self.config, x.shape[0]
        query, key, value = layer.qkv(x)
        end = start + count
        rope = cache.rope[:, start:end]
        query = _rotate(query.reshape(count, c.heads, c.head_dim), rope)
        key = _rotate(key.reshape(count, c.kv_heads, c.head_dim), rope)
        keys = _append(cache.keys[at], key, start)[:, :end]
        values = _append(cache.values[at], value.reshape(count, c.kv_heads, c.value_dim), start)[:, :end]
        query = query.reshape(count, c.kv_heads, c.group, 1, c.head_dim).permute(1, 2, 0, 3, 4)
        scores = (query * keys.reshape(c.kv_heads, 1, 1, end, c.head_dim).float()).sum(axis=-1) / sqrt(c.head_dim)
        if count != 1:
            position = Tensor.arange(count).reshape(1, 1, count, 1) + start
            scores = (Tensor.arange(end).reshape(1, 1, 1, end) <= position).where(scores, float("-inf"))
        weights = scores.softmax(axis=-1).reshape(c.kv_heads, c.group, count, end, 1)
        mixed = (weights * values.reshape(c.kv_heads, 1, 1, end, c.value_dim).float()).sum(axis=3)
        return mixed.permute(2, 0, 1, 3).reshape(count, c.heads * c.value_dim)


def _append(cache: Tensor, new: Tensor, start: UOp | int) -> Tensor:
    """The cache (heads, positions, width) after new (count, heads, width) is stored from position `start` on."""
    place = cache[:, start : start + new.shape[0]]
    return Tensor(cache.uop.after(place.uop.store(new.permute(1, 0, 2).cast(cache.dtype).uop)))


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last axis of x (count, heads, width), as far as rope (2, count, pairs) goes."""
    count, heads, width = x.shape
    pairs = rope.shape[2]
    cos, sin = (rope[at].reshape(count, 1, pairs, 1) for at in (0, 1))
    turned = x[:, :, : 2 * pairs].reshape(count, heads, pairs, 2)
    crossed = turned[..., 1:].neg().cat(turned[..., :1], dim=-1)
    result = (turned * cos + crossed * sin).reshape(count, heads, 2 * pairs)
    return result if 2 * pairs == width else result.cat(x[:, :, 2 * pairs :], dim=-1)
