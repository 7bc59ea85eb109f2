"""A model's graph in tinygrad operations: packed weights, a KV cache per session, one step for any number of tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Self

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import DType

from tegrad.llm.config import Config, tensor_name
from tegrad.llm.errors import OutOfMemory
from tegrad.llm.gguf import Gguf, Progress
from tegrad.llm.network import (
    Add,
    Attend,
    Convolve,
    Convolving,
    Delta,
    Gate,
    Inner,
    InputGate,
    LayerInputs,
    Project,
    Spec,
    present,
)
from tegrad.llm.rings import rows_of
from tegrad.llm.rope import Rope
from tegrad.llm.weights import Joined, LayerNorm, Loader, Matrix, Norm


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, by the names of their specs."""

    qkv: Joined
    """Those of `Project`."""
    matrices: Mapping[str, Matrix]
    """The others."""
    norms: Mapping[str, Norm | LayerNorm]
    """Of the residual stream."""
    head_norms: Mapping[str, Norm]
    plain: Mapping[str, Tensor]
    """float32s of mixers: kernels of convolutions, and what delta nets have; and what the stream is multiplied by."""

    def norm(self, op: Project | Gate | Add) -> Norm | LayerNorm | None:
        """An operation's, if it has one."""
        return None if op.norm is None else self.norms[op.norm.spec.name]

    def heads(self, x: Tensor, norm: Spec | None) -> Tensor:
        """Queries or keys (count, elements), or their heads, normalized, lazily."""
        if norm is None:
            return x
        weights = self.head_norms[norm.name]
        return weights.apply(x.reshape(x.shape[0], -1, weights.weight.shape[0]))


@dataclass(frozen=True, slots=True)
class Inputs:
    """Per-layer inputs (`network.LayerInputs`) are made of these."""

    table: Matrix
    matrix: Matrix
    norm: Norm

    def of(self, op: LayerInputs, tokens: Tensor, x: Tensor) -> list[Tensor]:
        """Each layer's (count, elements), realized; x is the first stream."""
        count, size = tokens.shape[0], self.norm.weight.shape[0]
        own = (self.matrix.apply(x).reshape(count, -1, size) * op.product_scale).contiguous()
        rows = self.table.rows(tokens).reshape(own.shape) * op.table_scale
        both = ((self.norm.apply(own) + rows) * op.scale).permute(1, 0, 2).contiguous().realize()
        return [both[at] for at in range(both.shape[0])]


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of one session's tokens: a layer's are (kv_heads, rows, head_dim + value_dim), or those of the
    layer from which it takes them. What a convolution keeps is float32 (1, rows, elements).

    Rows are positions, but of layers within a window or that convolve, which have position p in row p % rows.
    """

    positions: int
    layers: tuple[Tensor, ...]
    states: tuple[Tensor | None, ...]
    """float32 (2, heads, width, width) of layers that are delta nets: of even positions, and of odd ones."""
    turns: Mapping[Rope, Tensor]
    """Cosines and sines (2, positions, pairs) of every rope that rotates anything."""


class Model:
    """A GGUF model on a device."""

    def __init__(self, file: Gguf, device: str | None = None, progress: Progress | None = None) -> None:
        self.device = device or Device.DEFAULT
        self.config = Config.read(file)
        self.network = self.config.network
        self.metadata = file.metadata
        self._divisors = self.config.rope_divisors(file)
        try:
            self._load(file, progress)
        except MemoryError as error:
            raise self._out_of_memory(str(file.path), file.size, "choose a smaller model") from error

    def _load(self, file: Gguf, progress: Progress | None) -> None:
        config, net = self.config, self.network
        load = Loader(file, config, self.device, progress)
        self.embedding = load.matrix(net.embed.table)
        self.positions = None if net.embed.positions is None else load.matrix(net.embed.positions)
        self.inputs = None
        if (own := net.embed.inputs) is not None:
            self.inputs = Inputs(load.matrix(own.table), load.matrix(own.matrix), load.head_norm(own.norm))
        self.layers = [self._layer(load, at) for at in range(config.layers)]
        self.output_norm = load.norm(net.logits.norm)
        tied = tensor_name(net.logits.matrix) not in file.tensors
        self.output = self.embedding if tied else load.matrix(net.logits.matrix)

    def _layer(self, load: Loader, at: int) -> Layer:
        net = self.network
        qkv = load.joined(net.project(at).matrices, at)
        matrices: dict[str, Matrix] = {}
        norms: dict[str, Norm | LayerNorm] = {}
        head_norms: dict[str, Norm] = {}
        plain: dict[str, Tensor] = {}
        for op in net.blocks[at]:
            match op:
                case Attend():
                    head_norms |= {spec.name: load.head_norm(spec, at) for spec in op.specs}
                case Convolving():
                    plain |= {spec.name: load.plain(spec, at) for spec in op.specs}
                case Gate() | InputGate():
                    matrices |= {spec.name: load.matrix(spec, at) for spec in op.matrices}
                case Add():
                    matrices[op.matrix.name] = load.matrix(op.matrix, at)
                    plain |= {spec.name: load.plain(spec, at) for spec in present(op.scale)}
            if isinstance(op, Project | Gate | Add) and op.norm is not None:
                norms[op.norm.spec.name] = load.norm(op.norm, at)
        return Layer(qkv, matrices, norms, head_norms, plain)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | None = None, progress: Progress | None = None) -> Self:
        """Read a file to a device; raises GgufError, UnsupportedModelError or OutOfMemory."""
        with Gguf.open(path) as file:
            return cls(file, device, progress)

    def _out_of_memory(self, what: str, size: int, advice: str) -> OutOfMemory:
        return OutOfMemory(f"{what} needs {size / 2**20:,.0f} MiB, more than {self.device} has free: {advice}")

    def cache(self, positions: int, dtype: DType = dtypes.float16, ahead: int = 1) -> Cache:
        """A cache for so many positions, none of which is read before it was written; raises OutOfMemory.

        Up to `ahead` of them may be written at once.
        """
        mixers, own = self.network.mixers, self.network.keeping
        forms: list[tuple[tuple[int, ...], DType]] = [
            ((c.kv_heads, rows, c.head_dim + c.value_dim), dtype) if isinstance(op, Attend)
            else ((1, rows, c.convolved(op)), dtypes.float32)
            for at, op in own.items() for rows, c in ((rows_of(op, positions, ahead), self.config.at(at)),)
        ]  # fmt: skip
        forms += [((2, op.heads, op.width, op.width), dtypes.float32) for op in mixers if isinstance(op, Delta)]
        buffers = [Tensor.empty(*shape, dtype=kind, device=self.device).realize() for shape, kind in forms]
        kept, states = dict(zip(own, buffers, strict=False)), iter(buffers[len(own) :])
        layers = tuple(kept[self.network.kept_by(at)] for at in range(len(mixers)))
        try:
            ropes = {op.rope for op in self.network.attends if op.rope.dim}
            turns = {rope: self._turns(rope, positions) for rope in ropes}
            for buffer in buffers:
                buffer.uop.buffer.ensure_allocated()
        except MemoryError as error:
            size = sum(prod(shape) * kind.itemsize for shape, kind in forms)
            raise self._out_of_memory(f"a context of {positions} tokens", size, "ask for a smaller one") from error
        run_along = tuple(next(states) if isinstance(op, Delta) else None for op in mixers)
        return Cache(positions, layers, run_along, turns)

    def _turns(self, rope: Rope, positions: int) -> Tensor:
        return Tensor(rope.tables(positions, self._divisors.of(positions)), device=self.device).realize()

    def forward(self, tokens: Tensor, cache: Cache, start: UOp | int, last: UOp | int | None = None) -> Tensor:
        """Realized logits after tokens (count,) at positions from `start`, which are added to the cache.

        Of every token (count, vocab), or where `last` is given of the token at that index only (1, vocab).
        """
        x = self._stream(tokens, cache, start)
        if last is not None and tokens.shape[0] != 1:
            x = x[last : last + 1]
        return _capped(self.output.apply(x, self.output_norm), self.network.logits.cap).contiguous().realize()

    def hidden(self, tokens: Tensor, cache: Cache, start: UOp | int) -> Tensor:
        """Realized states (count, dim) after the last norm, of tokens (count,) that are added to the cache."""
        states = self.output_norm.apply(self._stream(tokens, cache, start))
        return (states / self.network.logits.norm.scale).contiguous().realize()

    def _stream(self, tokens: Tensor, cache: Cache, start: UOp | int) -> Tensor:
        """What the last norm reads (count, dim), realized."""
        # Layers are realized one by one: alike, they are scheduled once.
        x = self._embed(tokens, start).contiguous().realize()
        op = self.network.embed.inputs
        inputs = self.inputs.of(op, tokens, x) if self.inputs is not None and op is not None else []
        for at in range(len(self.layers)):
            x = self._block(at, x, cache, start, inputs[at] if inputs else None).realize()
        return x

    def _block(self, at: int, x: Tensor, cache: Cache, start: UOp | int, own: Tensor | None) -> Tensor:
        """The stream after a layer, whose own input beside it is `own`."""
        layer = self.layers[at]
        qkv: list[Tensor] = []
        made: dict[Inner, Tensor] = {}
        for op in self.network.blocks[at]:
            match op:
                case Project():
                    qkv = layer.qkv.apply(x, layer.norm(op))
                case Attend():
                    kept, turns = cache.layers[at], cache.turns.get(op.rope)
                    ring = kept.shape[1] < cache.positions
                    made["mixed"] = self._attention(op, self.config.at(at), layer, qkv, kept, turns, start, ring=ring)
                case Convolve():
                    made["mixed"] = _convolution(op, layer.plain[op.kernel.name], qkv, cache.layers[at], start)
                case Delta():
                    made["mixed"] = self._delta(op, layer, qkv, cache.layers[at], cache.states[at], start)
                case Gate():
                    made["hidden"] = self._gated(op, layer, x).contiguous()
                case InputGate():
                    assert own is not None
                    gate = layer.matrices[op.gate.name].apply(x)
                    made["gated"] = (_ACTIVATIONS[op.activation](gate) * own).contiguous()
                case Add():
                    y = layer.matrices[op.matrix.name].apply(made[op.reads])
                    norm = layer.norm(op)
                    x = (x + (y if norm is None else norm.apply(y.contiguous()))).contiguous()
                    x = x if op.scale is None else (x * layer.plain[op.scale.name].reshape(1)).contiguous()
        return x

    def _embed(self, tokens: Tensor, start: UOp | int) -> Tensor:
        x, scale = self.embedding.rows(tokens), self.network.embed.scale
        x = x if scale == 1 else x * scale
        if self.positions is None:
            return x
        # A padded chunk reaches beyond the last position.
        at = (Tensor.arange(tokens.shape[0]) + start).minimum(self.config.context - 1)
        return x + self.positions.rows(at)

    def _gated(self, op: Gate, layer: Layer, x: Tensor) -> Tensor:
        """What the feed-forward's last product multiplies."""
        activate, norm = _ACTIVATIONS[op.activation], layer.norm(op)
        up = layer.matrices[op.up.name].apply(x, norm)
        return activate(up) if op.gate is None else activate(layer.matrices[op.gate.name].apply(x, norm)) * up

    def _attention(
        self, op: Attend, c: Config, layer: Layer, qkv: Sequence[Tensor], kept: Tensor, rope: Tensor | None,
        start: UOp | int, *, ring: bool,
    ) -> Tensor:  # fmt: skip
        """Mixed values (count, heads * value_dim); adds the new keys and values, if there are any, to those kept."""
        queries, own = qkv[: len(qkv) - op.made], qkv[len(qkv) - op.made :]
        count, query, gates = qkv[0].shape[0], queries[0], None
        if op.gated:
            both = queries[0].cat(*queries[1:], dim=1).reshape(count, c.heads, 2, c.head_dim)
            query, gates = (both[:, :, at].reshape(count, -1) for at in range(2))
        end = start + count
        turns = None if rope is None else rope[:, start:end]

        def rotate(x: Tensor) -> Tensor:
            return _ROTATIONS[op.rotation](x.reshape(count, -1, c.head_dim), turns)

        new = None
        if own:
            value = own[-1].reshape(count, c.kv_heads, c.value_dim)
            if op.unit_values:
                value = (value * (value.square().mean(axis=-1, keepdim=True) + c.eps).rsqrt()).contiguous()
            key = op.prepared(own[0], lambda x: layer.heads(x, op.key_norm), rotate)
            new = key.cat(value, dim=-1).permute(1, 0, 2).cast(kept.dtype)
        kept, positions = (_around if ring else _appended)(kept, new, start, count)
        rows = kept.shape[1]
        keys = kept[:, :, : c.head_dim].reshape(c.kv_heads, 1, 1, rows, c.head_dim)
        values = kept[:, :, c.head_dim :].reshape(c.kv_heads, 1, 1, rows, c.value_dim)

        query = op.prepared(query, lambda x: layer.heads(x, op.query_norm), rotate)
        if op.temperature is not None:
            periods = ((Tensor.arange(count) + start) // op.temperature.period).reshape(count, 1, 1)
            query = query * ((periods + 1).float().log() * op.temperature.scale + 1)
        query = query.reshape(count, c.kv_heads, c.group, 1, c.head_dim).permute(1, 2, 0, 3, 4)
        scores = _capped((query * keys).sum(axis=-1) * op.scale, op.cap)
        own, positions = Tensor.arange(count).reshape(1, 1, count, 1) + start, positions.reshape(1, 1, 1, rows)
        if count != 1 and op.causal:
            scores = (positions <= own).where(scores, float("-inf"))
        if op.window is not None:
            seen = (positions > own - op.window) & (positions >= 0)
            seen = seen if op.causal else seen & (positions < own + op.window)
            scores = seen.where(scores, float("-inf"))
        scores = scores.contiguous()
        # The sum of the weights runs over the same positions as the weighted sum, in the same kernel.
        weights = (scores - scores.max(axis=-1, keepdim=True)).exp().unsqueeze(-1)
        mixed = (weights * values).sum(axis=3) / weights.expand(*weights.shape[:-1], c.value_dim).sum(axis=3)
        mixed = mixed.permute(2, 0, 1, 3).reshape(count, c.heads * c.value_dim)
        return (mixed if gates is None else mixed * gates.sigmoid()).contiguous()

    def _delta(
        self, op: Delta, layer: Layer, products: Sequence[Tensor], kept: Tensor, states: Tensor | None,
        start: UOp | int,
    ) -> Tensor:  # fmt: skip
        """Mixed values (1, heads * width) of one token; its convolved elements and its state are kept."""
        assert states is not None
        x, gates, beta, own = products
        assert x.shape[0] == 1, "a session of such a model takes a token at a time"
        plain, eps = layer.plain, self.config.eps
        x = _convolved(op, plain[op.kernel.name], x, kept, start).silu().contiguous()
        keys, times = op.key_heads * op.width, op.heads // op.key_heads

        def heads(part: Tensor) -> Tensor:
            part = part.reshape(op.key_heads, op.width)
            return (part * (part.square().sum(-1, keepdim=True) + eps).rsqrt()).repeat(times, 1).contiguous()

        query, key = heads(x[:, :keys]), heads(x[:, keys : 2 * keys]).reshape(op.heads, op.width, 1)
        value = x[:, 2 * keys :].reshape(op.heads, 1, op.width)
        decay = (plain[op.decay.name].reshape(-1) * (own + plain[op.bias.name].reshape(-1)).softplus()).exp()
        decay, beta = (one.reshape(op.heads, 1, 1).contiguous() for one in (decay, beta.sigmoid()))
        # The state before the token is in the place of its position's parity, and goes on in the other.
        at = (Tensor.arange(1) + start).reshape(1, 1, 1)
        odd = at % 2 == 1
        before = (at > 0).where(odd.where(states[1], states[0]), 0.0) * decay
        delta = ((value - (before * key).sum(1, keepdim=True)) * beta).contiguous()
        new = before + key * delta
        both = odd.where(new, states[0]).unsqueeze(0).cat(odd.where(states[1], new).unsqueeze(0), dim=0)
        states = Tensor(states.uop.after(states.uop.store(both.uop)))
        mixed = (odd.where(states[0], states[1]) * query.reshape(op.heads, op.width, 1)).sum(1) * op.width**-0.5
        normed = mixed * (mixed.square().mean(-1, keepdim=True) + eps).rsqrt() * plain[op.norm.name].reshape(-1)
        return (normed.reshape(1, -1) * gates.silu()).contiguous()


def _appended(kept: Tensor, new: Tensor | None, start: UOp | int, count: int) -> tuple[Tensor, Tensor]:
    """All keys and values (kv_heads, positions so far, width) with those of `count` new tokens, which are there already
    where they are not given; and their positions."""
    end = start + count
    positions = Tensor.arange(kept.shape[1])[:end]  # of a fixed length first, which folds into an index
    if new is not None:
        kept = Tensor(kept.uop.after(kept[:, start:end].uop.store(new.uop)))
    return kept[:, :end].float(), positions


def _around(kept: Tensor, new: Tensor | None, start: UOp | int, count: int) -> tuple[Tensor, Tensor]:
    """The same of the rows of a ring: positions below 0 are none."""
    rows = kept.shape[1]
    last = start + (count - 1)
    positions = (Tensor.arange(rows) * -1 + (last + rows)) % rows * -1 + last
    if new is None:
        return kept.float(), positions
    fresh = positions - start
    spread = new if count == 1 else new[:, fresh.maximum(0)]
    whole = (fresh >= 0).reshape(1, rows, 1).where(spread, kept)
    return Tensor(kept.uop.after(kept.uop.store(whole.uop))).float(), positions


def _convolution(op: Convolve, kernel: Tensor, products: Sequence[Tensor], kept: Tensor, start: UOp | int) -> Tensor:
    """Mixed values (count, dim)."""
    first, second, third = products
    return (second * _convolved(op, kernel, first * third, kept, start)).contiguous()


def _convolved(op: Convolving, kernel: Tensor, x: Tensor, kept: Tensor, start: UOp | int) -> Tensor:
    """Sums (count, elements) of x and of what is kept (1, rows, elements) of the tokens before, by a kernel; adds x to
    that."""
    count = x.shape[0]
    kept, _ = _around(kept, x.contiguous().unsqueeze(0), start, count)
    rows = kept.shape[1]
    own = Tensor.arange(count) + (start + rows)
    made = Tensor.zeros_like(x)
    for tap in range(op.taps):
        back = op.taps - 1 - tap
        there = kept[0, (own - back) % rows]
        made = made + (own - rows >= back).reshape(count, 1).where(there, 0.0) * kernel[:, tap]
    return made


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else (x / cap).tanh() * cap


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
_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "silu": Tensor.silu,
    "gelu": Tensor.gelu,
    "relu2": lambda x: x.relu().square(),
}
