"""A model's graph in tinygrad operations: packed weights, a KV cache per session, one step for any number of tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import Final, Self

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import DType

from tegrad.llm.arch import Config, tensor_name
from tegrad.llm.errors import RoomError
from tegrad.llm.gguf import Gguf, Progress
from tegrad.llm.weights import Joined, Loader, Matrix, Norm


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block's weights."""

    attn_norm: Norm
    qkv: Joined
    attn_output: Matrix
    ffn_norm: Norm
    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of one session's tokens: a layer's are (kv_heads, positions, head_dim + value_dim)."""

    layers: tuple[Tensor, ...]
    rope: Tensor
    """Cosines and sines (2, positions, pairs)."""


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
            raise self._no_room(str(file.path), file.size, "choose a smaller model") from error

    def _load(self, file: Gguf, progress: Progress | None) -> None:
        config, arch = self.config, self.config.arch
        load = Loader(file, config, self.device, progress)
        self.embedding = load.matrix(arch.embedding)
        self.layers = [
            Layer(
                attn_norm=load.norm(arch.attn_norm, at),
                qkv=load.joined((arch.query, arch.key, arch.value), at),
                attn_output=load.matrix(arch.attn_output, at),
                ffn_norm=load.norm(arch.ffn_norm, at),
                gate=load.matrix(arch.gate, at),
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
        """Read a file to a device; raises GgufError, UnsupportedModelError or RoomError."""
        with Gguf.open(path) as file:
            return cls(file, device, progress)

    def _no_room(self, what: str, size: int, advice: str) -> RoomError:
        return RoomError(f"{what} needs {size / 2**20:,.0f} MiB, more than {self.device} has free: {advice}")

    def cache(self, positions: int, dtype: DType = dtypes.float16) -> Cache:
        """A cache for so many positions, none of which is read before it was written; raises RoomError."""
        c = self.config
        shape = (c.kv_heads, positions, c.head_dim + c.value_dim)
        layers = tuple(Tensor.empty(*shape, dtype=dtype, device=self.device).realize() for _ in self.layers)
        try:
            rope = Tensor(c.rope.tables(positions, self._divisors), device=self.device).realize()
            for layer in layers:
                layer.uop.buffer.ensure_allocated()
        except MemoryError as error:
            size = prod(shape) * dtype.itemsize * len(layers)
            raise self._no_room(f"a context of {positions} tokens", size, "ask for a smaller one") from error
        return Cache(layers, rope)

    def forward(self, tokens: Tensor, cache: Cache, start: UOp | int, last: UOp | int | None = None) -> Tensor:
        """Realized logits after tokens (count,) at positions from `start`, which are added to the cache.

        Of every token (count, vocab), or where `last` is given of the token at that index only (1, vocab).
        """
        activate = _ACTIVATIONS[self.config.arch.activation]
        # Layers are realized one by one: alike, they are scheduled once.
        x = self.embedding.rows(tokens).contiguous().realize()
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            mixed = self._attention(layer, x, kept, cache.rope, start)
            x = (x + layer.attn_output.apply(mixed)).contiguous()
            inner = activate(layer.gate.apply(x, layer.ffn_norm)) * layer.up.apply(x, layer.ffn_norm)
            x = (x + layer.down.apply(inner.contiguous())).contiguous().realize()
        if last is not None and tokens.shape[0] != 1:
            x = x[last : last + 1]
        return self.output.apply(x, self.output_norm).contiguous().realize()

    def _attention(self, layer: Layer, x: Tensor, kept: Tensor, rope: Tensor, start: UOp | int) -> Tensor:
        """Mixed values (count, heads * value_dim) of x; adds the new keys and values to those kept."""
        c, count = self.config, x.shape[0]
        query, key, value = layer.qkv.apply(x, layer.attn_norm)
        end = start + count
        rotate, turns = _ROTATIONS[c.arch.rope], rope[:, start:end]
        key = rotate(key.reshape(count, c.kv_heads, c.head_dim), turns)
        new = key.cat(value.reshape(count, c.kv_heads, c.value_dim), dim=-1).permute(1, 0, 2).cast(kept.dtype)
        positions = Tensor.arange(kept.shape[1])[:end]  # of a fixed length first, which folds into an index
        kept = Tensor(kept.uop.after(kept[:, start:end].uop.store(new.uop)))[:, :end].float()
        keys = kept[:, :, : c.head_dim].reshape(c.kv_heads, 1, 1, end, c.head_dim)
        values = kept[:, :, c.head_dim :].reshape(c.kv_heads, 1, 1, end, c.value_dim)

        query = rotate(query.reshape(count, c.heads, c.head_dim), turns)
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


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last axis of x (count, heads, width), as far as rope (2, count, pairs) goes."""
    count, heads, width = x.shape
    pairs = rope.shape[2]
    cos, sin = (rope[at].reshape(count, 1, pairs, 1) for at in (0, 1))
    turned = x[:, :, : 2 * pairs].reshape(count, heads, pairs, 2)
    crossed = turned[..., 1:].neg().cat(turned[..., :1], dim=-1)
    result = (turned * cos + crossed * sin).reshape(count, heads, 2 * pairs)
    return result if 2 * pairs == width else result.cat(x[:, :, 2 * pairs :], dim=-1)


_ROTATIONS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {"interleaved": _rotate}
_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"silu": Tensor.silu}
