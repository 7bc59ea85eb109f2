"""A model's graph in tinygrad operations: packed weights, a KV cache per session, one step for any number of tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, Final, Self, TypeVar

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import DType

from tegrad.llm.arch import Config, Spec, tensor_name
from tegrad.llm.errors import OutOfMemory
from tegrad.llm.gguf import Gguf, Progress
from tegrad.llm.weights import Joined, LayerNorm, Loader, Matrix, Norm

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block's weights."""

    attn_norm: Norm | LayerNorm
    qkv: Joined
    query_norm: Norm | None
    key_norm: Norm | None
    attn_output: Matrix
    ffn_norm: Norm | LayerNorm
    gate: Matrix | None
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of one session's tokens: a layer's are (kv_heads, positions, head_dim + value_dim)."""

    layers: tuple[Tensor, ...]
    rope: Tensor | None
    """Cosines and sines (2, positions, pairs), where anything is rotated."""


class Model:
    """A GGUF model on a device."""

    def __init__(self, file: Gguf, device: str | None = None, progress: Progress | None = None) -> None:
        self.device = device or Device.DEFAULT
        self.config = Config.read(file)
        self.metadata = file.metadata
        self._divisors = self.config.rope_divisors(file)
        try:
            self._load(file, progress)
        except MemoryError as error:
            raise self._out_of_memory(str(file.path), file.size, "choose a smaller model") from error

    def _load(self, file: Gguf, progress: Progress | None) -> None:
        config, arch = self.config, self.config.arch
        load = Loader(file, config, self.device, progress)
        self.embedding = load.matrix(arch.embedding)
        self.positions = _optional(load.matrix, arch.positions)
        self.layers = [
            Layer(
                attn_norm=load.norm(arch.attn_norm, at),
                qkv=load.joined(arch.qkv, at),
                query_norm=_optional(load.head_norm, arch.query_norm, at),
                key_norm=_optional(load.head_norm, arch.key_norm, at),
                attn_output=load.matrix(arch.attn_output, at),
                ffn_norm=load.norm(arch.ffn_norm, at),
                gate=_optional(load.matrix, arch.gate, at),
                up=load.matrix(arch.up, at),
                down=load.matrix(arch.down, at),
            )
            for at in range(config.layers)
        ]
        self.output_norm = load.norm(arch.output_norm)
        tied = tensor_name(arch.output) not in file.tensors
        self.output = self.embedding if tied else load.matrix(arch.output)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | None = None, progress: Progress | None = None) -> Self:
        """Read a file to a device; raises GgufError, UnsupportedModelError or OutOfMemory."""
        with Gguf.open(path) as file:
            return cls(file, device, progress)

    def _out_of_memory(self, what: str, size: int, advice: str) -> OutOfMemory:
        return OutOfMemory(f"{what} needs {size / 2**20:,.0f} MiB, more than {self.device} has free: {advice}")

    def cache(self, positions: int, dtype: DType = dtypes.float16) -> Cache:
        """A cache for so many positions, none of which is read before it was written; raises OutOfMemory."""
        c = self.config
        shape = (c.kv_heads, positions, c.head_dim + c.value_dim)
        layers = tuple(Tensor.empty(*shape, dtype=dtype, device=self.device).realize() for _ in self.layers)
        try:
            tables = c.rope.tables(positions, self._divisors) if c.rope.dim else None
            rope = None if tables is None else Tensor(tables, device=self.device).realize()
            for layer in layers:
                layer.uop.buffer.ensure_allocated()
        except MemoryError as error:
            size = prod(shape) * dtype.itemsize * len(layers)
            raise self._out_of_memory(f"a context of {positions} tokens", size, "ask for a smaller one") from error
        return Cache(layers, rope)

    def forward(self, tokens: Tensor, cache: Cache, start: UOp | int, last: UOp | int | None = None) -> Tensor:
        """Realized logits after tokens (count,) at positions from `start`, which are added to the cache.

        Of every token (count, vocab), or where `last` is given of the token at that index only (1, vocab).
        """
        # Layers are realized one by one: alike, they are scheduled once.
        x = self._embed(tokens, start).contiguous().realize()
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            mixed = self._attention(layer, x, kept, cache.rope, start)
            x = (x + layer.attn_output.apply(mixed)).contiguous()
            x = (x + layer.down.apply(self._inner(layer, x).contiguous())).contiguous().realize()
        if last is not None and tokens.shape[0] != 1:
            x = x[last : last + 1]
        return self.output.apply(x, self.output_norm).contiguous().realize()

    def _embed(self, tokens: Tensor, start: UOp | int) -> Tensor:
        x = self.embedding.rows(tokens)
        if self.positions is None:
            return x
        # A padded chunk reaches beyond the last position.
        at = (Tensor.arange(tokens.shape[0]) + start).minimum(self.config.context - 1)
        return x + self.positions.rows(at)

    def _inner(self, layer: Layer, x: Tensor) -> Tensor:
        """What the feed-forward's last product multiplies."""
        activate = _ACTIVATIONS[self.config.arch.activation]
        up = layer.up.apply(x, layer.ffn_norm)
        return activate(up) if layer.gate is None else activate(layer.gate.apply(x, layer.ffn_norm)) * up

    def _attention(self, layer: Layer, x: Tensor, kept: Tensor, rope: Tensor | None, start: UOp | int) -> Tensor:
        """Mixed values (count, heads * value_dim) of x; adds the new keys and values to those kept."""
        c, count = self.config, x.shape[0]
        query, key, value = layer.qkv.apply(x, layer.attn_norm)
        end = start + count
        rotate, turns = _ROTATIONS[c.arch.rope], None if rope is None else rope[:, start:end]
        key = key.reshape(count, c.kv_heads, c.head_dim)
        key = rotate(layer.key_norm.apply(key) if layer.key_norm else key, turns)
        new = key.cat(value.reshape(count, c.kv_heads, c.value_dim), dim=-1).permute(1, 0, 2).cast(kept.dtype)
        positions = Tensor.arange(kept.shape[1])[:end]  # of a fixed length first, which folds into an index
        kept = Tensor(kept.uop.after(kept[:, start:end].uop.store(new.uop)))[:, :end].float()
        keys = kept[:, :, : c.head_dim].reshape(c.kv_heads, 1, 1, end, c.head_dim)
        values = kept[:, :, c.head_dim :].reshape(c.kv_heads, 1, 1, end, c.value_dim)

        query = query.reshape(count, c.heads, c.head_dim)
        query = rotate(layer.query_norm.apply(query) if layer.query_norm else query, turns)
        query = query.reshape(count, c.kv_heads, c.group, 1, c.head_dim).permute(1, 2, 0, 3, 4)
        scores = (query * keys).sum(axis=-1) / sqrt(c.head_dim)
        if count != 1:
            own = Tensor.arange(count).reshape(1, 1, count, 1) + start
            scores = (positions.reshape(1, 1, 1, end) <= own).where(scores, float("-inf"))
        scores = scores.contiguous()
        # The sum of the weights runs over the same positions as the weighted sum, in the same kernel.
        weights = (scores - scores.max(axis=-1, keepdim=True)).exp().unsqueeze(-1)
        mixed = (weights * values).sum(axis=3) / weights.expand(*weights.shape[:-1], c.value_dim).sum(axis=3)
        return mixed.permute(2, 0, 1, 3).reshape(count, c.heads * c.value_dim).contiguous()


def _optional(load: Callable[[Spec, int | None], T], spec: Spec | None, layer: int | None = None) -> T | None:
    return None if spec is None else load(spec, layer)


def _rotate_neighbours(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1) of the last axis of x (count, heads, width), as far as rope (2, count, pairs) goes."""
    count, heads, width = x.shape
    pairs = rope.shape[2]
    cos, sin = (rope[at].reshape(count, 1, pairs, 1) for at in (0, 1))
    turned = x[:, :, : 2 * pairs].reshape(count, heads, pairs, 2)
    crossed = turned[..., 1:].neg().cat(turned[..., :1], dim=-1)
    result = (turned * cos + crossed * sin).reshape(count, heads, 2 * pairs)
    return result if 2 * pairs == width else result.cat(x[:, :, 2 * pairs :], dim=-1)


def _rotate_halves(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate pairs (i, i + pairs) of the last axis of x (count, heads, width), for rope (2, count, pairs)."""
    count, heads, width = x.shape
    pairs = rope.shape[2]
    cos, sin = (rope[at].reshape(count, 1, 1, pairs) for at in (0, 1))
    turned = x[:, :, : 2 * pairs].reshape(count, heads, 2, pairs)
    crossed = turned[:, :, 1:].neg().cat(turned[:, :, :1], dim=2)
    result = (turned * cos + crossed * sin).reshape(count, heads, 2 * pairs)
    return result if 2 * pairs == width else result.cat(x[:, :, 2 * pairs :], dim=-1)


_ROTATIONS: Final[Mapping[str, Callable[[Tensor, Any], Tensor]]] = {
    "interleaved": _rotate_neighbours,
    "halves": _rotate_halves,
    "none": lambda x, _: x,
}
_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"silu": Tensor.silu, "gelu": Tensor.gelu}
