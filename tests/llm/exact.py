"""Logits of a few tokens after a cache in float64, for models of any size: some rows of a matrix at a time.

Weights are expanded to float32, which keeps them to 2^-24 of each; products and all else are float64. Where a decode
step rounds activations, this can round them too, in either plan's way and at one product alone (`Rounding`): that shows
what a rounding does to the logits.

A way through the model is a generator: it asks for products of its own vectors (`Asked`) and is sent them. `together`
runs ways in step, so that each matrix is expanded once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from interpreter import quarters, rescaled, round_scale
from numpy.typing import NDArray

from tegrad.llm.chips import Role
from tegrad.llm.config import Config, tensor_name
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import PLAIN, SET
from tegrad.llm.gguf import Gguf
from tegrad.llm.network import Add, Attend, Convolve, Convolving, Delta, Gate, InputGate, Op, Project, Spec
from tegrad.llm.numerics import ACTIVATIONS, ROTATIONS, ROUNDINGS, attended, capped, sigmoid, softplus
from tegrad.llm.reference import expanded
from tegrad.llm.rope import Rope
from tegrad.llm.schedule import UNIT
from tegrad.llm.schedule_build import deal, units_together

Floats: TypeAlias = NDArray[np.float64]
Stored: TypeAlias = Literal["F32", "F16", "Q8_0"]
Side: TypeAlias = Sequence[NDArray[Any]] | NDArray[Any]
"""Rotated keys, or values, of each KV head (positions, width)."""
Cached: TypeAlias = Callable[[int], tuple[Side, Side]]
"""Of a layer that has a cache of its own: keys and values of the positions before the first token; of one that
convolves what it keeps of them (positions, elements), as if of one head, and nothing, or a delta net's matrices (heads,
keys, values)."""
Kept: TypeAlias = tuple[Floats, Floats]
"""Rotated keys, and values, of tokens (..., tokens, heads, width), as a cache gives them back."""
Read: TypeAlias = Role | Literal["convolution", "inputs"]
"""A product's role; "convolution" instead of "output" where that reads what was convolved; "inputs" of what makes all
layers' own inputs."""
Rounding: TypeAlias = Callable[[Read, Floats], Floats]
"""What a product of packed weights in this role reads of a vector (..., columns)."""

WEIGHTS_AT_ONCE: Final = 1 << 22
"""Weights that are expanded at a time."""
ROLES: Final[tuple[Role, ...]] = ("qkv", "output", "gate", "down", "logits")
"""Those of products whose vectors may be rounded alone."""


class Asked(NamedTuple):
    """Products of vectors (..., columns) with matrices over them, wanted side by side."""

    names: tuple[str, ...]
    x: Floats


T = TypeVar("T")
Way: TypeAlias = Generator[Asked, Floats, T]


class Weights:
    """A file's tensors, expanded when they are asked for by `threads` threads. Use it in a `with`.

    Pairs turn as in a session of `context` positions, our default unless said.

    `pool` runs what waits for nothing else. Where BLAS has threads of its own they only stand in the way
    (OPENBLAS_NUM_THREADS=1).
    """

    def __init__(self, file: Gguf, threads: int, context: int | None = None) -> None:
        self.file = file
        self.config = Config.read(file)
        self.tensors = {info.name: info for info in self.config.tensors(file)}
        self.divisors = self.config.rope_divisors(file).of(self.config.positions(context))
        self.pool = ThreadPoolExecutor(threads)

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()

    def packed(self, name: str) -> bool:
        """Whether a matrix is of blocks, whose products read rounded vectors."""
        return self.tensors[name].type not in PLAIN

    def rows(self, name: str, first: int, count: int) -> Floats:
        """Some rows of a matrix, or of a vector its one row."""
        return expanded(self.file, self.tensors[name], first, count).astype(np.float64)

    def vector(self, name: str) -> Floats:
        """A vector."""
        info = self.tensors[name]
        return self.rows(name, 0, info.rows).reshape(-1)

    def times(self, name: str, x: Floats) -> Floats:
        """The products (n, rows) of vectors (n, columns) with a matrix."""
        info = self.tensors[name]
        step = max(1, WEIGHTS_AT_ONCE // info.columns)
        found = np.empty((len(x), info.rows))

        def multiply(first: int) -> None:
            count = min(step, info.rows - first)
            found[:, first : first + count] = x @ self.rows(name, first, count).T

        list(self.pool.map(multiply, range(0, info.rows, step)))
        return found


def together(weights: Weights, ways: Sequence[Way[Any]]) -> list[Any]:
    """What each way returns. All of them ask for the same matrices in the same order."""
    found: list[Any] = [None] * len(ways)

    def ahead(at: int, products: Floats | None) -> Asked | None:
        try:
            return next(ways[at]) if products is None else ways[at].send(products)
        except StopIteration as end:
            found[at] = end.value
            return None

    with ThreadPoolExecutor(len(ways)) as pool:
        asked = list(pool.map(ahead, range(len(ways)), [None] * len(ways)))
        while any(each is not None for each in asked):
            wanted = [each for each in asked if each is not None]
            names = wanted[0].names
            if len(wanted) < len(ways) or any(each.names != names for each in wanted):
                raise ValueError("ways through a model ask for its matrices in the same order")
            x = np.concatenate([each.x.reshape(-1, each.x.shape[-1]) for each in wanted])
            y = np.concatenate([weights.times(name, x) for name in names], axis=1)
            ends = np.cumsum([each.x.size // each.x.shape[-1] for each in wanted])
            parts = np.split(y, ends[:-1])
            shaped = [part.reshape(*each.x.shape[:-1], -1) for part, each in zip(parts, wanted, strict=True)]
            asked = list(pool.map(ahead, range(len(ways)), shaped))
    return found


# --- a model's parts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """An operation's names of matrices, and its vectors."""

    names: tuple[str, ...]
    norm: Floats | None
    """The weight of the norm in front of a product, or after one that is added."""
    bias: Floats
    query_norm: Floats | None = None
    key_norm: Floats | None = None
    kernel: Floats | None = None
    ends: tuple[Floats, ...] = ()
    """A delta net's bias, decay and norm."""
    scale: Floats | float = 1.0
    """Of the stream, after what is added."""


class Parts:
    """What a way needs of a model beside its matrices. UnsupportedModelError for a family without gate, or with biases.

    Pairs turn as in a session of `context` positions, as the weights' do unless said.
    """

    def __init__(self, weights: Weights, context: int | None = None) -> None:
        self.weights, self.config = weights, weights.config
        self._divisors = weights.divisors if context is None else self.config.rope_divisors(weights.file).of(context)
        net = self.network = self.config.network
        if net.gate.gate is None or net.embed.positions is not None:
            raise UnsupportedModelError(
                f"{self.config.arch.name} is not evaluated so: it has no gate, or has positions"
            )
        self._tables: dict[tuple[Rope, int, int], Floats] = {}
        output = tensor_name(net.logits.matrix)
        self.logits = output if output in weights.tensors else tensor_name(net.embed.table)
        self.output_norm = weights.vector(tensor_name(net.logits.norm.spec)) * net.logits.norm.scale
        for spec, layer in self.config.specs():
            name = tensor_name(spec, layer, "bias")
            added = () if layer is None else (*net.project(layer).matrices, *net.mixers[layer].specs)
            if spec not in added and name in weights.tensors:
                raise UnsupportedModelError(f"{name} is not added here")

    def embedding(self, tokens: Sequence[int]) -> Floats:
        """Rows (tokens, dim)."""
        name = tensor_name(self.network.embed.table)
        rows = np.concatenate([self.weights.rows(name, token, 1) for token in tokens])
        return rows * self.network.embed.scale

    def inputs(
        self, tokens: Sequence[int], stream: Floats, rounded: Callable[[Read, str, Floats], Floats]
    ) -> Way[dict[int, Floats]]:
        """Each layer's own input (..., tokens, elements), if any, by the first stream, which its product reads
        `rounded`."""
        op = self.network.embed.inputs
        if op is None:
            return {}
        table, matrix, norm = map(tensor_name, op.specs)
        weight = self.weights.vector(norm)
        product = yield Asked((matrix,), rounded("inputs", matrix, stream))
        own = product.reshape(*product.shape[:-1], -1, len(weight)) * op.product_scale
        rows = np.concatenate([self.weights.rows(table, token, 1) for token in tokens]) * op.table_scale
        made = (own * self.factor(own) * weight + rows.reshape(own.shape[-3:])) * op.scale
        return dict(enumerate(np.moveaxis(made, -2, 0)))

    def operations(self) -> Iterator[tuple[int, Op, Part]]:
        """Each layer's operations, as they are reached."""
        for at, op in self.network.operations():
            yield at, op, self._part(op, at)

    def _part(self, op: Op, layer: int) -> Part:
        def vector(spec: Spec | None) -> Floats | None:
            return None if spec is None else self.weights.vector(tensor_name(spec, layer))

        if isinstance(op, Attend):
            return Part((), None, np.zeros(0), vector(op.query_norm), vector(op.key_norm))
        if isinstance(op, Convolving):
            rows = self.weights.rows(tensor_name(op.kernel, layer), 0, self.config.convolved(op))
            ends = [self.weights.vector(tensor_name(spec, layer)) for spec in op.specs[1:]]
            return Part((), None, np.zeros(0), kernel=rows, ends=tuple(ends))
        names = tuple(tensor_name(spec, layer) for spec in op.matrices)
        norm = vector(None if op.norm is None else op.norm.spec)
        scale = vector(op.scale) if isinstance(op, Add) else None
        bias = np.concatenate([self._bias(spec, layer) for spec in op.matrices])
        return Part(names, norm, bias, scale=1.0 if scale is None else scale)

    def _bias(self, spec: Spec, layer: int) -> Floats:
        name = tensor_name(spec, layer, "bias")
        there = name in self.weights.tensors
        return self.weights.vector(name) if there else np.zeros(self.config.at(layer).size(spec.shape[0]))

    def centered(self, stream: Floats) -> Floats:
        """The residual stream (..., dim) as norms take it: without its mean where these subtract it."""
        return stream - stream.mean(axis=-1, keepdims=True) if self.network.by_mean else stream

    def factor(self, stream: Floats) -> Floats:
        """What normalizes vectors (..., dim) that are centered: (..., 1)."""
        made: Floats = 1 / np.sqrt((stream * stream).mean(axis=-1, keepdims=True) + self.config.eps)
        return made

    def _turns(self, rope: Rope, first: int, count: int) -> Floats:
        """Cosines and sines (2, count, pairs) of positions, as devices have them."""
        if (key := (rope, first, count)) not in self._tables:
            made = rope.tables(first + count, self._divisors)
            self._tables[key] = made[:, first:].astype(np.float64)
        return self._tables[key]

    def gated(self, op: Gate, products: Floats) -> Floats:
        """activation(gate) * up, of both side by side."""
        gate, up = np.split(products, 2, axis=-1)
        made: Floats = ACTIVATIONS[op.activation](gate) * up
        return made

    def input_gated(self, op: InputGate, products: Floats, own: Floats) -> Floats:
        """activation(gate) * the layer's own input."""
        made: Floats = ACTIVATIONS[op.activation](products) * own
        return made

    def added(self, part: Part, product: Floats) -> Floats:
        """What a product adds to the stream."""
        return product if part.norm is None else product * self.factor(product) * part.norm

    def _heads(self, x: Floats, norm: Floats | None) -> Floats:
        """Queries or keys (..., elements), normalized."""
        if norm is None:
            return x
        parts = x.reshape(*x.shape[:-1], -1, len(norm))
        normed: Floats = (parts * self.factor(parts) * norm).reshape(x.shape)
        return normed

    def convolution(self, op: Convolve, part: Part, products: Floats, kept: Side) -> Floats:
        """What a convolution makes (..., tokens, dim) of products (..., tokens, 3 * dim) of tokens one after the other,
        after those of which there is something `kept`."""
        first, second, third = np.split(products, 3, axis=-1)
        made: Floats = second * self._convolved(op, part, first * third, kept)
        return made

    def _convolved(self, op: Convolving, part: Part, new: Floats, kept: Side) -> Floats:
        """Sums (..., tokens, elements) over tokens' and earlier ones' elements, each times its column."""
        assert part.kernel is not None
        before = np.asarray(kept[0] if len(kept) else np.zeros((0, new.shape[-1])), np.float64)[-(op.taps - 1) :]
        none = np.zeros((*new.shape[:-2], op.taps - 1 - len(before), new.shape[-1]))
        every = np.concatenate([none, np.broadcast_to(before, (*new.shape[:-2], *before.shape)), new], axis=-2)
        count = new.shape[-2]
        taps = (every[..., tap : tap + count, :] * part.kernel[:, tap] for tap in range(op.taps))
        return sum(taps, np.zeros_like(new))

    def delta(self, op: Delta, part: Part, products: Floats, kept: Side, states: Side) -> Floats:
        """What a delta net makes (..., tokens, mixed) of products (..., tokens, projected) of tokens one after the
        other, after those of which there is something `kept`, and `states`."""
        heads, width, _keys = op.heads, op.width, op.key_heads * op.width
        bias, decay, norm = part.ends
        x, gates, beta, own = np.split(products, np.cumsum([op.channels, heads * width, heads]), axis=-1)
        x = ACTIVATIONS["silu"](self._convolved(op, part, x, kept))
        x = x.reshape(*x.shape[:-1], -1, width)
        query, key, value = np.split(x, [op.key_heads, 2 * op.key_heads], axis=-2)
        query, key = (
            np.concatenate(
                [y / np.sqrt((y * y).sum(-1, keepdims=True) + self.config.eps)] * (heads // op.key_heads), -2
            )
            for y in (query, key)
        )
        beta, decay = sigmoid(beta), np.exp(decay * softplus(own + bias))
        state = np.asarray(states, np.float64) if len(states) else np.zeros((heads, width, width))
        mixed = np.empty_like(value)
        for at in range(value.shape[-3]):
            state = state * decay[..., at, :, None, None]
            seen = (state * key[..., at, :, :, None]).sum(-2)
            state = (
                state
                + key[..., at, :, :, None] * ((value[..., at, :, :] - seen) * beta[..., at, :, None])[..., None, :]
            )
            mixed[..., at, :, :] = (state * query[..., at, :, :, None]).sum(-2) / np.sqrt(width)
        made: Floats = mixed * self.factor(mixed) * norm * ACTIVATIONS["silu"](gates.reshape(mixed.shape))
        return made.reshape(*made.shape[:-2], -1)

    def _prepared(self, op: Attend, layer: int, x: Floats, norm: Floats | None, first: int) -> Floats:
        """Queries or keys (..., tokens, elements) as scores take them (..., tokens, KV heads, group, width)."""
        own, tables = self.config.at(layer), self._turns(op.rope, first, x.shape[-2])

        def rotate(x: Floats) -> Floats:
            heads = x.reshape(*x.shape[:-1], own.kv_heads, -1, own.head_dim)
            return ROTATIONS[op.rotation](heads, tables).astype(np.float64, copy=False)

        return op.prepared(x, lambda x: self._heads(x, norm), rotate)

    def kept(self, op: Attend, layer: int, part: Part, qkv: Floats, stored: Stored, first: int) -> Kept:
        """What a cache has of products (..., tokens, qkv) of tokens one after the other, from position `first` on."""
        c, shape, rounded = self.config.at(layer), qkv.shape[:-1], ROUNDINGS[stored]
        ends = np.cumsum([c.sizes["query"] * (1 + op.gated), c.sizes["key"]])
        _, key, value = np.split(qkv, ends, axis=-1)
        value = (key if op.values_are_keys else value).reshape(*shape, c.kv_heads, c.value_dim)
        value = value * self.factor(value) if op.unit_values else value
        key = self._prepared(op, layer, key, part.key_norm, first)[..., 0, :]
        key, value = (rounded(side.astype(np.float32)).astype(np.float64) for side in (key, value))
        return key, value

    def attention(
        self, op: Attend, layer: int, part: Part, qkv: Floats, new: Kept, keys: Side, values: Side, first: int
    ) -> Floats:
        """What attention makes (..., tokens, mixed) of products (..., tokens, qkv) of tokens one after the other.

        The first of them stands at position `first`, after `keys` and `values`; `new` are theirs.
        """
        c, shape = self.config.at(layer), qkv.shape[:-1]
        query, (key, value) = qkv[..., : c.sizes["query"] * (1 + op.gated)], new
        count, gates = shape[-1], 1.0
        if op.gated:
            pairs = query.reshape(*shape, c.heads, 2, c.head_dim)
            query, gates = (np.ascontiguousarray(pairs[..., at, :]).reshape(*shape, -1) for at in (0, 1))
            gates = sigmoid(gates)
        query = self._prepared(op, layer, query, part.query_norm, first) * op.scale
        if op.temperature is not None:
            query *= op.temperature.factors(first, count)[:, None, None, None]
        mixed = np.empty((*shape, c.kv_heads, c.group, c.value_dim))
        held = len(keys[0])
        seen = attended(held, count, op.window)[:, None, :]  # (tokens, 1, positions)

        def attend(head: int) -> None:
            own_q, own_k, own_v = query[..., head, :, :], key[..., head, :], value[..., head, :]
            before = capped(own_q @ np.asarray(keys[head], np.float64).T, op.cap)
            own = capped(own_q @ np.swapaxes(own_k, -1, -2)[..., None, :, :], op.cap)
            before, own = np.where(seen[..., :held], before, -np.inf), np.where(seen[..., held:], own, -np.inf)
            top = own.max(axis=-1, keepdims=True)
            if before.shape[-1]:
                top = np.maximum(top, before.max(axis=-1, keepdims=True))
            before, own = np.exp(before - top), np.exp(own - top)
            total = before.sum(axis=-1, keepdims=True) + own.sum(axis=-1, keepdims=True)
            together = before @ np.asarray(values[head], np.float64) + own @ own_v[..., None, :, :]
            mixed[..., head, :, :] = together / total

        list(self.weights.pool.map(attend, range(c.kv_heads)))
        return mixed.reshape(*shape, -1) * gates


def nothing(config: Config) -> Cached:
    """The cache before the first token."""

    def cached(layer: int) -> tuple[Side, Side]:
        own = config.at(layer)
        empty = np.zeros((own.kv_heads, 0, own.head_dim))
        return (empty, empty) if isinstance(config.network.mixers[layer], Attend) else ((), ())

    return cached


def chain(
    parts: Parts, tokens: Sequence[int], roundings: Sequence[Rounding], cached: Cached, first: int, stored: Stored
) -> Way[Floats]:
    """Logits (roundings, tokens, vocab) after each of some tokens, for each way to round."""
    weights = parts.weights

    def rounded(role: Read, name: str, x: Floats) -> Floats:
        if not weights.packed(name):
            return x
        return np.stack([rounding(role, vectors) for rounding, vectors in zip(roundings, x, strict=True)])

    stream = np.repeat(parts.embedding(tokens)[None], len(roundings), axis=0)
    inputs = yield from parts.inputs(tokens, stream, rounded)
    net, made, new = parts.network, dict[str, Floats](), dict[int, Kept]()  # by what mixers and `Add` read; by layer
    for at, op, part in parts.operations():
        match op:
            case Project() | Gate() | InputGate():
                read = parts.centered(stream)
                x = rounded(op.role, part.names[0], read if part.norm is None else read * part.norm)
                y = (yield Asked(part.names, x)) * (1 if part.norm is None else parts.factor(read)) + part.bias
                if isinstance(op, Project):
                    made["qkv"] = y
                elif isinstance(op, Gate):
                    made["hidden"] = parts.gated(op, y)
                else:
                    made["gated"] = parts.input_gated(op, y, inputs[at])
            case Attend():
                if (kept := net.kept_by(at)) == at:
                    new[at] = parts.kept(op, at, part, made["qkv"], stored, first)
                made["mixed"] = parts.attention(op, at, part, made["qkv"], new[kept], *cached(kept), first)
            case Convolve():
                made["mixed"] = parts.convolution(op, part, made["qkv"], cached(at)[0])
            case Delta():
                made["mixed"] = parts.delta(op, part, made["qkv"], *cached(at))
            case Add():
                mixer = net.mixers[at]
                role: Read = mixer.role if op.reads == "mixed" and isinstance(mixer, Convolve) else op.role
                product = yield Asked(part.names, rounded(role, part.names[0], made[op.reads]))
                stream = (stream + parts.added(part, product)) * part.scale
    read = parts.centered(stream)
    x = rounded("logits", parts.logits, read * parts.output_norm)
    return capped((yield Asked((parts.logits,), x)) * parts.factor(read), net.logits.cap)


# --- what steps round -------------------------------------------------------------------------------------------------


def not_at_all(role: Read, x: Floats) -> Floats:
    """Exact: no rounding."""
    return x


def by_sets(role: Read, x: Floats) -> Floats:
    """As many launches do: int8, with a scale for each 16 elements, a 127th of the largest."""
    sets = x.reshape(*x.shape[:-1], -1, SET)
    scale = np.abs(sets).max(axis=-1, keepdims=True) / 127
    levels = np.divide(sets, scale, out=np.zeros_like(sets), where=scale > 0)
    made: Floats = (np.rint(levels) * scale).reshape(x.shape)
    return made


def by_units(config: Config, ctas: int) -> Rounding:
    """As the step in one launch does on so many CTAs: sets of 16 have a scale of 10 bits, but each half one of its own
    where two CTAs wrote them; what reads them then brings the smaller half to the scale of the larger one, by two bits
    more of each element. A parallel block's gate counts as dealt out evenly, whoever attends. Layers' own inputs are
    made before, as by many launches."""
    adds = [(at, op) for at, op in config.network.operations() if isinstance(op, Add)]
    stream = {config.at(at).size(op.matrix.shape[1]) for at, op in adds}
    """Columns of the matrices that write it."""

    @cache
    def halves(role: Read, units: int) -> NDArray[np.int64]:
        """Which CTA writes each unit of a set."""
        if role == "output":
            return np.zeros((units * UNIT // SET, SET // UNIT), np.int64)  # attention publishes whole heads
        least = units_together(*({config.dim} if role in ("down", "convolution") else stream))
        owners = np.repeat(np.arange(ctas), [count for _, count in deal(units, ctas, least)])
        return owners.reshape(-1, SET // UNIT)

    def rounded(role: Read, x: Floats) -> Floats:
        if role == "inputs":
            return by_sets(role, x)
        units = x.reshape(*x.shape[:-1], -1, SET // UNIT, UNIT)
        peak = np.abs(units).max(axis=-1)
        own = halves(role, x.shape[-1] // UNIT)
        alone = (own != own[:, :1]).any(axis=-1, keepdims=True)
        peak = np.where(alone, peak, peak.max(axis=-1, keepdims=True))
        scale = round_scale(peak)[..., None].astype(np.float64)
        levels = np.divide(units, scale, out=np.zeros_like(units), where=scale > 0)
        q = np.rint(levels)
        larger = scale.max(axis=-2, keepdims=True)
        ratio = np.divide(scale, larger, out=np.ones_like(scale), where=larger > 0)
        made: Floats = (rescaled(q, quarters(levels, q), ratio) * larger).reshape(x.shape)
        return made

    return rounded


def only(rounding: Rounding, role: Role) -> Rounding:
    """A rounding of what one role's products read."""
    roles: tuple[Read, ...] = (role, "convolution") if role == "output" else (role,)
    return lambda at, x: rounding(at, x) if at in roles else x
