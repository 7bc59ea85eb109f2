"""The persistent kernel's instructions in numpy: what each of them reads, computes and publishes.

`Interpreter` executes a program one instruction at a time, in any order that the waits allow; what it reads must be of
the stage that the instruction waits for. Products are in float64 of the quantized inputs, so that a kernel differs from
it by its rounding only. Quantized units and sums of squares are bit for bit those of kernels/publish.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.formats import PLAIN, SET
from tegrad.llm.network import Add, Attend, Convolve, Delta, Gate, InputGate, Logits, Norm, Project, Spec
from tegrad.llm.numerics import ACTIVATIONS, ROTATIONS, Floats, capped, sigmoid, softplus, unit
from tegrad.llm.schedule import (
    FLOAT_UNIT,
    QUANTIZED_UNIT,
    SOURCE,
    UNIT,
    Instruction,
    Op,
    Program,
    ScheduleError,
    Span,
    Vector,
    Wait,
    head_spans,
    key_of,
    run_rows,
    stream_segment,
)

# --- how vectors travel -----------------------------------------------------------------------------------------------


def round_scale(peak: Floats) -> Floats:
    """Scales (n,) of units whose largest magnitude is `peak`: a 127th, rounded to 10 significant bits."""
    peak = peak.astype(np.float32)
    bits = (peak * np.float32(1 / 127)).view(np.uint32)
    code = np.where(peak < np.float32(1e-30), 0, (bits.astype(np.uint64) + 0x2000) >> 14).astype(np.uint32)
    scale: Floats = (code << 14).view(np.float32)
    return scale


def round_squares(squares: Floats) -> Floats:
    """Sums of squares as they travel: rounded to 8 significant bits."""
    bits = squares.astype(np.float32).view(np.uint32).astype(np.uint64) + 0x8000
    rounded: Floats = ((bits >> 16) << 16).astype(np.uint32).view(np.float32)
    return rounded


def quarters(shares: Floats, q: Floats) -> Floats:
    """In which quarter of its step each element lies, 0 to 3: `shares` are steps, `q` the nearest whole ones."""
    found: Floats = np.rint((shares - q) * 3.99 + 1.5)
    return found


def rescaled(q: Floats, quarter: Floats, ratio: Floats) -> Floats:
    """Elements at another scale, `ratio` of theirs: from the middles of their quarters; as they are where it is 1."""
    middles = q + quarter * 0.25 - 0.375
    made: Floats = np.where(ratio == 1, q, np.rint(middles * ratio.astype(np.float64)))
    return made


@dataclass
class Travelling:
    """A vector between CTAs, (n,) elements in units of 8; `stage` tells of each element which stage wrote it."""

    size: int
    floats: Floats = field(init=False)
    """The elements, where they travel as floats."""
    q: NDArray[np.int8] = field(init=False)
    quarter: NDArray[np.int8] = field(init=False)
    """Of each element: see `quarters`. A reader asks where the other half of a set of 16 is another CTA's."""
    scale: Floats = field(init=False)
    """Of each unit, where elements travel as int8."""
    squares: Floats = field(init=False)
    """Of each unit: the sum of squares of the stream."""
    stage: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        units = -(-self.size // UNIT)
        self.floats, self.q = np.zeros(self.size, np.float32), np.zeros(self.size, np.int8)
        self.quarter = np.zeros(self.size, np.int8)
        self.scale, self.squares = np.zeros(units, np.float32), np.zeros(units, np.float32)
        self.stage = np.full(self.size, -1, np.int32)

    @classmethod
    def arrived(cls, size: int, data: NDArray[np.uint8], floats: bool) -> Self:
        """A vector as the packets of a kernel's workspace have it; `data` begins with its first."""
        made = cls(size)
        units, nbytes = len(made.scale), FLOAT_UNIT if floats else QUANTIZED_UNIT
        packets = data[: units * nbytes].reshape(units, -1, 16)
        if floats:
            words = np.ascontiguousarray(packets[:, :, :12]).view(np.float32).reshape(units, 9)
            made.floats, made.squares = words[:, :8].reshape(-1).copy(), words[:, 8].copy()
        else:
            made.q = np.ascontiguousarray(packets[:, 0, :8]).view(np.int8).reshape(-1).copy()
            code = np.ascontiguousarray(packets[:, 0, 8:12]).view(np.uint32).reshape(-1)
            made.scale = (code >> 15 << 14).view(np.float32)
            made.squares = ((code & 0x7FFF) << 16).view(np.float32)
            low, high = (np.unpackbits(packets[:, 0, at], bitorder="little").view(np.int8) for at in (14, 15))
            made.quarter = low + 2 * high
        return made

    def write(self, first: int, values: Floats, squares: Floats, floats: bool, stage: int) -> None:
        """What one CTA publishes: rows from `first`, their squares, quantized unless they travel as floats."""
        count = len(values)
        units = slice(first // UNIT, (first + count) // UNIT)
        self.stage[first : first + count] = stage
        sums = squares.reshape(-1, UNIT).sum(axis=1)
        if floats:
            self.floats[first : first + count], self.squares[units] = values, sums
            return
        # Units that share 16 elements and a CTA share a scale.
        peak = np.abs(values).reshape(-1, UNIT).max(axis=1)
        pair = (first // UNIT + np.arange(len(peak))) // 2
        peak = np.array([peak[pair == at].max() for at in pair], np.float32)
        scale = round_scale(peak)
        shares = np.divide(values, np.repeat(scale, UNIT), out=np.zeros(count), where=np.repeat(scale, UNIT) > 0)
        q = np.rint(shares)
        self.q[first : first + count], self.quarter[first : first + count] = q, quarters(shares, q)
        self.scale[units], self.squares[units] = scale, round_squares(sums)

    def staged(self, floats: bool) -> Floats:
        """The elements as a product reads them: sets of 16 with one scale, the larger of their units'."""
        if floats:
            return self.floats.astype(np.float64)
        scale = self.scale.reshape(-1, SET // UNIT).max(axis=1)
        both = np.repeat(scale, SET // UNIT)
        ratio = np.divide(self.scale, both, out=np.ones_like(both), where=both > 0)
        own, quarter = (each.reshape(-1, UNIT).astype(np.float32) for each in (self.q, self.quarter))
        q = rescaled(own, quarter, ratio[:, None])
        elements: Floats = q.astype(np.float64).reshape(-1) * np.repeat(both.astype(np.float64), UNIT)
        return elements


# --- what is computed with --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """A network's numbers in float32."""

    matrices: Mapping[str, Floats]
    vectors: Sequence[Mapping[str, Floats]]
    """Each layer's norms, and its scale, by the names of their specs."""
    output_norm: Floats
    biases: Sequence[Mapping[str, Floats]]
    """Each layer's, by `schedule.key_of` the operations that add them."""
    rope: Floats
    """Cosines and sines (tables, 2, positions, pairs)."""
    output_bias: Floats | None = None
    inputs: Floats | None = None
    """Layers' own inputs (layers, elements)."""


class Interpreter:
    """One sequence's steps. `keys` and `values` have (kv heads, rows, head dim) of each layer, as in the f16 cache.

    `split(cached, layer)` gives the positions [begin, end) of each split of a layer's attention; the first split has
    the token itself.
    """

    def __init__(
        self,
        program: Program,
        weights: Weights,
        positions: int,
        split: Callable[[int, int], Sequence[tuple[int, int]]],
    ) -> None:
        net = program.network
        self.program, self.weights, self.split = program, weights, split
        self.config, self.model = net.config, net.model
        sizes = [net.config.at(at) for at in range(len(net.layers))]
        shapes = [(own.kv_heads, layer.rows or positions, own.head_dim)
                  for own, layer in zip(sizes, net.layers, strict=True)]  # fmt: skip
        own_keys, own_values = ([np.zeros(shape, np.float16) for shape in shapes] for _ in range(2))
        self.keys, self.values = (
            [kept[net.model.kept_by(at)] for at in range(len(kept))] for kept in (own_keys, own_values)
        )
        mixers = net.model.mixers
        wide = [0 if isinstance(op, Attend) else net.config.convolved(op) for op in mixers]
        self.rings = [np.zeros((layer.ring, size), np.float32) for layer, size in zip(net.layers, wide, strict=True)]
        """What layers that convolve keep."""
        self.states = [
            np.zeros((2, op.heads, op.width, op.width) if isinstance(op, Delta) else 0, np.float32) for op in mixers
        ]
        """Of delta nets, before positions that are even and odd, by keys and values."""
        self.ups: dict[int, Floats] = {}
        """By CTA, what a product with up leaves for the one with gate."""
        self.logits = np.zeros(net.output.rows, np.float32)
        self.begin(0, 0)

    def begin(self, token: int, position: int) -> None:
        """Start a step: everything but the cache is forgotten."""
        net = self.program.network
        self.token, self.position, self.sampled = token, position, -1
        self.vectors = {vector: Travelling(size) for vector, size in net.sizes.items()}
        self.top: dict[int, tuple[float, int]] = {}
        self.squares: dict[int, tuple[int, float]] = {}
        """Of each CTA: the stage in which it set something apart, and the sum of that or of its squares."""
        self.stream, self.apart = (np.zeros(self.config.dim, np.float32) for _ in range(2))
        self._splits: dict[tuple[int, int], dict[int, tuple[Floats, Floats, Floats]]] = {}

    def run(self, order: Sequence[Instruction]) -> int:
        """Execute instructions; returns the sampled token."""
        for ins in order:
            self.execute(ins)
        return self.sampled

    def execute(self, ins: Instruction) -> None:
        """One instruction."""
        for wait in ins.waits:
            self._check(ins, wait)
        if ins.op is Op.NOTHING:
            return
        match does := self.program.stages[ins.stage].does:
            case None if ins.op is Op.EMBED:
                embedding = self.weights.matrices[self.program.network.embedding.name]
                row = embedding[self.token]
                row = row - row.mean() if self.model.by_mean else row
                self._hand_stream(ins, row[_rows(ins)] * np.float32(self.model.embed.scale), None)
            case Project():
                y = self._products(ins, Vector.X) * self._factor(does.norm)
                self._hand(ins, y + self._bias(ins))
            case Attend():
                self._attend(ins, does)
            case Convolve():
                self._convolve(ins, does)
            case Delta():
                self._delta(ins, does)
            case Gate():
                y = self._products(ins, Vector.X) * self._factor(does.norm)
                matrices = self.program.stages[ins.stage].matrices
                gate, *up = y.reshape(len(matrices), -1)
                if ins.output is None:
                    self.ups[ins.cta] = gate
                    return
                if len(matrices) < len(does.matrices):
                    up = [self.ups.pop(ins.cta)]
                made = ACTIVATIONS[does.activation](gate + self._bias(ins))
                self._hand(ins, made * up[0] if up else made)
            case InputGate():
                made = ACTIVATIONS[does.activation](self._products(ins, Vector.X))
                assert self.weights.inputs is not None
                self._hand(ins, made * self.weights.inputs[ins.layer][_rows(ins)])
            case Add() if ins.op is Op.ADD:
                y = self._products(ins, SOURCE[does.reads])
                self._hand_stream(ins, self.stream[_rows(ins)] + y, does)
            case Add() if ins.op is Op.APART:
                first, count = run_rows(ins)
                y = self._products(ins, SOURCE[does.reads]).astype(np.float32)
                if self.model.added_with(ins.layer, does)[0] is not does:
                    y = y + self.apart[first : first + count]
                self.apart[first : first + count] = y
                if ins.output is None:
                    return
                self.squares[ins.cta] = ins.stage, float((y.astype(np.float64) ** (1 + (does.norm is not None))).sum())
            case Add(norm=None):
                mean = sum(own for _, own in self.squares.values()) / self.stream.size
                y = self.apart[_rows(ins)] - mean + self._bias(ins)
                self._hand_stream(ins, self.stream[_rows(ins)] + y, does)
            case Add(norm=Norm() as norm):
                rows = _rows(ins)
                mean = sum(squares for _, squares in self.squares.values()) / self.stream.size
                post = self.weights.vectors[ins.layer][norm.spec.name][rows]
                y = self.apart[rows] * post / np.sqrt(mean + self.config.eps)
                scale = self.weights.vectors[ins.layer][does.scale.name] if does.scale else np.ones(1)
                self._hand_stream(ins, (self.stream[rows] + y) * scale, does)
            case Logits():
                y, first = self._products(ins, Vector.X) * self._factor(does.norm), run_rows(ins)[0]
                if self.weights.output_bias is not None:
                    y = y + self.weights.output_bias[first : first + len(y)]
                y = capped(y, does.cap)
                self.logits[first : first + len(y)] = y
                found = (float(y.max()), first + int(y.argmax()))
                self.top[ins.cta] = max(found, self.top.get(ins.cta, found), key=lambda entry: (entry[0], -entry[1]))
            case None:
                self.sampled = max(self.top.values(), key=lambda entry: (entry[0], -entry[1]))[1]

    def _check(self, ins: Instruction, wait: Wait) -> None:
        span = wait.span
        if span.vector is Vector.TOP:
            if len(self.top) < span.elements:
                raise ScheduleError(f"{ins} runs before what it waits for")
        elif span.vector is Vector.SQUARES:
            if [stage for stage, _ in self.squares.values()] != [wait.stage] * span.elements:
                raise ScheduleError(f"{ins} runs before what it waits for, or after it is gone")
        elif (self.vectors[span.vector].stage[span.first : span.end] != wait.stage).any():
            raise ScheduleError(f"{ins} runs before what it waits for, or after it is gone")

    def _products(self, ins: Instruction, source: Vector) -> Floats:
        """The rows of the instruction's runs times a vector."""
        results = []
        for run in ins.runs:
            matrix = run.matrix
            x = self.vectors[source].staged(matrix.kind in PLAIN)[: matrix.columns]
            first = run.first * stream_segment(matrix) // matrix.columns
            rows = run.segments * stream_segment(matrix) // matrix.columns
            results.append(self.weights.matrices[matrix.name][first : first + rows].astype(np.float64) @ x)
        return np.concatenate(results)

    def _bias(self, ins: Instruction) -> Floats | float:
        """What is added to the rows of an instruction."""
        does = self.program.stages[ins.stage].does
        assert does is not None
        found = self.weights.biases[ins.layer].get(key_of(does))
        return 0.0 if found is None else found[_rows(ins)]

    def _factor(self, norm: Norm | None) -> float:
        """What normalizes the stream."""
        if norm is None:
            return 1.0
        x = self.vectors[Vector.X]
        return float(1 / np.sqrt(x.squares.astype(np.float64).sum() / x.size + self.config.eps))

    def _hand_stream(self, ins: Instruction, x: Floats, op: Add | None) -> None:
        """Rows of the stream as an addition leaves them, or the embedding."""
        x = x.astype(np.float32)
        self.stream[_rows(ins)] = x
        self._hand(ins, x * self._next_norm(ins.layer, op)[_rows(ins)], x * x)

    def _next_norm(self, layer: int, op: Add | None) -> Floats:
        """The norm's weights of who reads the stream next; ones where it has none."""
        at, reader = self.model.reader(layer, op)
        if isinstance(reader, Logits):
            return self.weights.output_norm
        norm = reader.norm
        return np.ones_like(self.stream) if norm is None else self.weights.vectors[at][norm.spec.name]

    def _hand(self, ins: Instruction, values: Floats, squares: Floats | None = None) -> None:
        values, floats = values.astype(np.float32), self.program.stages[ins.stage].floats
        assert ins.output is not None
        squares = np.zeros_like(values) if squares is None else squares
        self.vectors[ins.output.vector].write(ins.output.first, values, squares, floats, ins.stage)

    # --- attention ----------------------------------------------------------------------------------------------------

    def _normed(self, layer: int, heads: Floats, norm: Spec | None, first: int, among: Floats) -> Floats:
        """Heads (n, head dim) from the `first` on, normalized: by themselves, or `among` all that share a norm."""
        if norm is None:
            return heads
        weights = self.weights.vectors[layer][norm.name].reshape(-1, self.config.at(layer).head_dim)
        if norm.shape == ("head",):
            return unit(heads, self.config.head_eps) * weights
        root = np.sqrt((among**2).mean() + self.config.head_eps)
        normed: Floats = heads / root * weights[first : first + len(heads)]
        return normed

    def _rotate(self, layer: int, op: Attend, heads: Floats) -> Floats:
        """Heads (n, head dim), turned to the token's position."""
        turn = self.program.network.layers[layer].turn
        tables = self.weights.rope[turn, :, self.position : self.position + 1, : op.rope.dim // 2].astype(np.float64)
        turned: Floats = ROTATIONS[op.rotation](heads[None, :, None], tables)
        return turned[0, :, 0]

    def _convolve(self, ins: Instruction, op: Convolve) -> None:
        y = self._products(ins, Vector.X) * self._factor(self.model.project(ins.layer).norm)
        first, second, third = y.reshape(3, -1)
        rows, ring = _rows(ins), self.rings[ins.layer]
        ring[self.position % len(ring), rows] = first * third
        columns = self.weights.vectors[ins.layer][op.kernel.name][rows].T
        total = np.zeros_like(first)
        for back in range(min(op.taps, self.position + 1)):
            total += ring[(self.position - back) % len(ring), rows] * columns[op.taps - 1 - back]
        self._hand(ins, second * total)

    def _delta(self, ins: Instruction, op: Delta) -> None:
        wide, ring = op.width, self.rings[ins.layer]
        vectors, states = self.weights.vectors[ins.layer], self.states[ins.layer]
        spans = [
            self.vectors[Vector.QKV].floats[wait.span.first : wait.span.end].astype(np.float64) for wait in ins.waits
        ]
        own, head, at = ins.head % op.key_heads, ins.head, self.position
        firsts = (own, op.key_heads + own, 2 * op.key_heads + head)
        convolved = []
        for first, fresh in zip(firsts, spans, strict=False):
            channels = slice(first * wide, (first + 1) * wide)
            ring[at % len(ring), channels] = fresh
            columns = vectors[op.kernel.name][channels].T
            total = sum(ring[(at - back) % len(ring), channels] * columns[op.taps - 1 - back]
                        for back in range(min(op.taps, at + 1)))  # fmt: skip
            convolved.append(ACTIVATIONS["silu"](np.asarray(total, np.float64)))
        query, key, value = convolved
        query, key = (x / np.sqrt((x * x).sum() + self.config.eps) for x in (query, key))
        ends = op.channels + op.heads * wide
        beta, decay = spans[4][(ends + head) % UNIT], spans[5][(ends + op.heads + head) % UNIT]
        decay = np.exp(vectors[op.decay.name][head] * softplus(decay + vectors[op.bias.name][head]))
        state = (states[at % 2, head].astype(np.float64) if at else np.zeros((wide, wide))) * decay
        state += np.outer(key, (value - key @ state) * sigmoid(beta))
        states[(at + 1) % 2, head] = state
        normed = unit(query @ state / np.sqrt(wide), self.config.eps) * vectors[op.norm.name]
        self._hand(ins, normed * ACTIVATIONS["silu"](spans[3]))

    def _floats(self, span: Span) -> Floats:
        floats: Floats = self.vectors[span.vector].floats[span.first : span.end].astype(np.float64)
        return floats

    def _attend(self, ins: Instruction, op: Attend) -> None:
        net, head_dim = self.program.network, self.config.at(ins.layer).head_dim
        layer, groups = net.layers[ins.layer], self.program.groups(ins.layer)
        kept = self.model.kept_by(ins.layer)
        keeper = self.model.mixers[kept]
        assert isinstance(keeper, Attend)
        rows, window = self.keys[ins.layer].shape[1], layer.window or self.position + 1
        cached = min(self.position, window - 1)
        ranges = self.split(cached, ins.layer)
        if ins.split >= len(ranges) or ins.output is None:
            return
        head = ins.head // groups
        query, key, value = (
            self._floats(span).reshape(-1, head_dim) for span in head_spans(net, ins.layer, ins.head, groups)
        )
        query, gates = (query[::2], query[1::2]) if op.gated else (query, None)
        all_queries, all_keys, _ = (self._floats(wait.span) for wait in ins.waits)
        first, rotate = ins.head * len(query), partial(self._rotate, ins.layer, op)
        queries = op.prepared(query, lambda x: self._normed(ins.layer, x, op.query_norm, first, all_queries), rotate)
        keys, values = self.keys[ins.layer][head], self.values[ins.layer][head]
        begin, end = (self.position - cached + at for at in ranges[ins.split])
        chosen = [at % rows for at in range(begin, end)]
        if ins.split == 0:
            own = self.position % rows
            prepared = op.prepared(key, lambda x: self._normed(kept, x, keeper.key_norm, head, all_keys), rotate)
            keys[own] = prepared[0]
            values[own] = unit(value, self.config.head_eps)[0] if keeper.unit_values else value[0]
            chosen.append(own)
        scale = op.scale if op.temperature is None else op.scale * op.temperature.factors(self.position, 1)[0]
        scores = capped(queries @ keys[chosen].astype(np.float64).T * scale, op.cap)
        top = scores.max(axis=1, keepdims=True)
        parts = np.exp(scores - top)
        met = self._splits.setdefault((ins.stage, ins.head), {})
        met[ins.split] = (parts @ values[chosen].astype(np.float64), parts.sum(axis=1, keepdims=True), top)
        if len(met) == len(ranges):
            best = np.max([part[2] for part in met.values()], axis=0)
            share = [np.exp(part[2] - best) for part in met.values()]
            mixed = np.sum([part[0] * by for part, by in zip(met.values(), share, strict=True)], axis=0)
            total = np.sum([part[1] * by for part, by in zip(met.values(), share, strict=True)], axis=0)
            made = mixed / total if gates is None else mixed / total * sigmoid(gates)
            self._hand(ins, made.reshape(-1))


def _rows(ins: Instruction) -> slice:
    """What an instruction writes of its vector."""
    assert ins.output is not None
    return slice(ins.output.first, ins.output.end)
