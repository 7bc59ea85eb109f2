"""One decode step as data: what each CTA of the persistent kernel does, in order.

A step is a list of **stages** (embed; per layer: qkv, attend, out, gate and up, down; logits; sample). A layer that
convolves does so in the stage of its products, of which a CTA has the rows of all three vectors. Where what a block
adds is normed before, or those that read the stream subtract its mean, out and down set it apart and a stage after
each, or in a parallel block after both, joins it to the stream, which after layer norms has no mean. Each stage gives
each CTA at most one **instruction**: the rows of matrices that it multiplies, the vector that it reads, the rows of the
vector that it writes, and the writes of other CTAs that it waits for. Vectors travel in units of 8 elements, so that
rows are dealt out in eights. Keys and values that later layers attend to have a place of their own until the step ends.
Weights are streamed through a pipeline in the order of the instructions, tile by tile.

`schedule_build` makes a program, `schedule_proof` proves it, and `schedule_words` is what the kernel reads of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from tegrad.errors import TegradError
from tegrad.llm.config import Config
from tegrad.llm.formats import PLAIN, SEGMENT, BlockType
from tegrad.llm.network import Add, Attend, Convolve, Delta, Gate, InputGate, Logits, Spec
from tegrad.llm.network import Network as Operations
from tegrad.llm.network import Op as Operation

UNIT: Final = 8
"""Elements that travel together: one packet of 16 bytes quantized, three as floats."""

QUANTIZED_UNIT, FLOAT_UNIT = 16, 48
"""Bytes of a unit on its way: 8 int8, scale and sum of squares, epoch; 8 floats, sum of squares, three epochs."""

VECTORS: Final = 3
"""That a convolution takes of a token."""


class ScheduleError(TegradError):
    """A program that could wait forever, read what is not there, or compute something twice or never."""


class Op(IntEnum):
    """What an instruction does. The numbers are the kernel's."""

    NOTHING = 0
    EMBED = 1
    """Rows of the residual stream from the token's embedding."""
    PROJECT = 2
    """Products with the normalized stream, as floats: queries, keys, values."""
    ATTEND = 3
    """A split of the positions of one KV head; the last-arriving CTA joins the splits and writes."""
    ADD = 4
    """Products added to the residual stream: attention output, down."""
    GATE = 5
    """activation(gate rows) * up rows, or activation(up rows). Of two formats, one that does not publish leaves up rows
    to the next, which multiplies by them. Or activation(gate rows) of the stream as it is, times the layer's own
    input."""
    LOGITS = 6
    """Rows of the output matrix; the largest of the CTA's is published by the last such stage."""
    SAMPLE = 7
    """The step's token from the CTAs' largest logits; the state moves on."""
    APART = 8
    """Products that their CTA keeps, as ADD's; it publishes the sum of their squares, or the sum of them. One that does
    not publish leaves them to the next, which adds its own."""
    JOIN = 9
    """What the CTA set apart, normed by all CTAs' sums of squares or without its mean, added to the residual stream;
    which is then multiplied by the layer's scale, where there is one."""
    CONVOLVE = 10
    """Products of three vectors' rows, convolved with those of earlier tokens; the ring has this token's then."""
    DELTA = 11
    """A head of a gated delta net, from its products to what comes of it; its state and the ring go on."""


class Vector(IntEnum):
    """What travels between CTAs."""

    X = 0
    """The residual stream times the next norm's weights, with sums of squares of the stream itself."""
    QKV = 1
    MIXED = 2
    """What attention makes, or a convolution."""
    HIDDEN = 3
    TOP = 4
    """The largest logit of each CTA and its row; one unit each."""
    SQUARES = 5
    """The sum of squares of what each CTA set apart, or the sum of it; one unit each."""
    SHARED_QKV = 6
    """Queries, keys and values of the layers whose keys and values later ones attend to, one layer after another.
    Nobody overwrites them within a step."""

    __hash__ = int.__hash__  # an enum's own hashes its name: thousands of times a schedule


SOURCE: Final[Mapping[str, Vector]] = {"mixed": Vector.MIXED, "hidden": Vector.HIDDEN, "gated": Vector.HIDDEN}
"""What an `Add` multiplies."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed matrix and where it lies in device memory."""

    name: str
    kind: BlockType
    rows: int
    columns: int
    address: int = 0


def key_of(op: Operation | Logits) -> str:
    """The key of an operation's matrices and biases in a `Layer`: its role, or "input gate" and "input down" for the
    two that work on the layer's own input."""
    beside = isinstance(op, InputGate) or (isinstance(op, Add) and op.reads == "gated")
    return f"input {op.role}" if beside else op.role


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's matrices, and addresses of its vectors and its part of the cache."""

    matrices: Mapping[str, tuple[Matrix, ...]] = field(hash=False)
    """By `key_of` their operations. Those of "qkv" are below one another all queries, keys and values."""
    vectors: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Norms' weights, and the scale, by the names of their specs."""
    biases: Mapping[str, int] = field(default_factory=dict, hash=False)
    """By `key_of`: float32 of all rows of their matrices; 0, or no entry, for none."""
    keys: int = 0
    values: int = 0
    key_scales: int = 0
    value_scales: int = 0
    turn: int = 0
    """Which of the step's tables of angles rotates its heads."""
    rows: int = 0
    """Of the cache of a KV head, a ring: position p lies in row p % rows. 0: it has all positions, as all layers'."""
    window: int = 0
    """Positions that are attended to, the token's own included; 0: all of them."""
    ring: int = 0
    """Rows of what a layer that convolves keeps, which then lies at `keys`."""
    state: int = 0
    """A delta net's."""
    layer_input: int = 0
    """Float32 of the layer's own input, where it has one."""

    def vector(self, spec: Spec | None) -> int:
        """The address of a norm's weights, 0 where there is none."""
        return 0 if spec is None else self.vectors[spec.name]


class Heads(NamedTuple):
    """A kind of heads: elements of one, and how many have keys."""

    elements: int
    with_keys: int


@dataclass(frozen=True)
class Network:
    """What the step computes, by a model's sizes, and where its tensors lie."""

    config: Config
    embedding: Matrix
    layers: tuple[Layer, ...]
    output: Matrix
    output_norm: int = 0
    ones: int = 0
    """Weights of a norm that layers do not have."""
    output_bias: int = 0

    @property
    def model(self) -> Operations:
        """Its operations."""
        return self.config.network

    def matrices(self) -> Iterable[Matrix]:
        """Every matrix that a step multiplies by."""
        for layer in self.layers:
            yield from chain.from_iterable(layer.matrices.values())
        yield self.output

    def matrices_of(self, layer: int, op: Operation | Logits) -> tuple[Matrix, ...]:
        """Those of an operation of a layer."""
        return (self.output,) if isinstance(op, Logits) else self.layers[layer].matrices.get(key_of(op), ())

    @cached_property
    def heads(self) -> tuple[Heads, ...]:
        """The kinds of heads that attend, one or two."""
        return tuple(sorted({self.heads_of(at) for at, op in enumerate(self.model.mixers) if isinstance(op, Attend)}))

    def only_within_windows(self, kind: Heads) -> bool:
        """Whether heads of a kind attend within windows alone, beside another kind that does not."""
        attends = (at for at, op in enumerate(self.model.mixers) if isinstance(op, Attend))
        return len(self.heads) > 1 and all(self.layers[at].window for at in attends if self.heads_of(at) == kind)

    def heads_of(self, layer: int) -> Heads:
        """A layer's kind of heads."""
        own = self.config.at(layer)
        return Heads(own.head_dim, own.kv_heads)

    def second_kind(self, layer: int) -> bool:
        """Whether its heads are of the second kind."""
        return len(self.heads) > 1 and self.heads_of(layer) == self.heads[-1]

    def qkv_rows(self, layer: int) -> int:
        """Rows of a layer's queries, keys and values."""
        return sum(matrix.rows for matrix in self.layers[layer].matrices["qkv"])

    @cached_property
    def shared_at(self) -> dict[int, int]:
        """Of each layer whose keys and values later ones attend to, where its products begin in SHARED_QKV."""
        sources = sorted({op.source for op in self.model.attends if op.source is not None})
        firsts = np.cumsum([0, *map(self.qkv_rows, sources)]).tolist()
        return dict(zip(sources, firsts, strict=False))

    def values_are_keys(self, layer: int) -> bool:
        """Whether what is attended to in a layer has its keys' products as values, too."""
        op = self.model.mixers[self.model.kept_by(layer)]
        return isinstance(op, Attend) and op.values_are_keys

    def qkv_span(self, layer: int) -> Span:
        """Where a layer's queries, keys and values are."""
        first = self.shared_at.get(layer)
        return Span(Vector.QKV if first is None else Vector.SHARED_QKV, first or 0, self.qkv_rows(layer))

    @cached_property
    def sizes(self) -> dict[Vector, int]:
        """Elements of each vector but TOP and SQUARES, which have a unit for each CTA."""
        config, mixers = self.config, self.model.mixers
        # Who convolves hands no products over.
        others = [at for at, op in enumerate(mixers) if not isinstance(op, Convolve) and at not in self.shared_at]
        sizes = {
            Vector.X: config.dim,
            Vector.QKV: max(map(self.qkv_rows, others), default=0),
            Vector.MIXED: config.mixed,
            Vector.HIDDEN: max(config.ffn, config.layer_input),
        }
        return {**sizes, Vector.SHARED_QKV: sum(map(self.qkv_rows, self.shared_at))} if self.shared_at else sizes

    def written(self, stage: Stage, vector: Vector) -> int:
        """Elements of X, MIXED or HIDDEN that a stage makes: those that are multiplied next."""
        if vector is not Vector.X and isinstance(stage.does, Attend | Convolve | Delta | Gate | InputGate):
            ((layer, add),) = self.model.readers(stage.layer, stage.does)
            return self.matrices_of(layer, add)[0].columns
        return self.sizes[vector]


class Span(NamedTuple):
    """Elements [first, first + elements) of a vector."""

    vector: Vector
    first: int
    elements: int

    @property
    def end(self) -> int:
        """The element after the last."""
        return self.first + self.elements

    def holds(self, other: Span) -> bool:
        """Whether all of another lies in it."""
        return self.vector is other.vector and self.first <= other.first and other.end <= self.end

    def __str__(self) -> str:
        return f"{self.vector.name}[{self.first}:{self.end}]"


class Wait(NamedTuple):
    """Wait until the span holds what stage `stage` writes there; `writers` is how many CTAs do."""

    span: Span
    stage: int
    writers: int


class Run(NamedTuple):
    """Consecutive segments of a matrix."""

    matrix: Matrix
    first: int
    segments: int

    @property
    def address(self) -> int:
        """Where its first byte lies."""
        return self.matrix.address + self.first * stream_bytes(self.matrix)

    @property
    def nbytes(self) -> int:
        """Bytes to stream."""
        return self.segments * stream_bytes(self.matrix)


class Instruction(NamedTuple):
    """What one CTA does in one stage."""

    op: Op
    stage: int
    cta: int
    layer: int = 0
    waits: tuple[Wait, ...] = ()
    runs: tuple[Run, ...] = ()
    output: Span | None = None
    head: int = 0
    """The share of query heads of ATTEND, counted over all KV heads; `split` of `splits` of its positions."""
    split: int = 0

    def __str__(self) -> str:
        return f"stage {self.stage} ({self.op.name} of layer {self.layer}) on CTA {self.cta}"


@dataclass(frozen=True, slots=True)
class Stage:
    """A step's stage: what it is, and what it reads and writes."""

    op: Op
    layer: int
    instructions: tuple[Instruction, ...]
    """One for each CTA."""
    does: Operation | Logits | None = None
    """The operation that it is, or a part of; None: the step's beginning and end."""
    matrices: tuple[Matrix, ...] = ()
    floats: bool = False
    """Whether its output travels as floats: its reader's matrices are not in blocks."""


@dataclass(frozen=True, slots=True)
class Program:
    """A step."""

    network: Network
    ctas: int
    splits: int
    """ATTEND instructions of each share of a KV head's query heads, of which a position uses the first few."""
    stages: tuple[Stage, ...]
    head_groups: int = 1
    """Shares that the query heads of each KV head are cut into, a CTA for each,"""
    second_groups: int = 1
    """and those of the second kind of heads (`Network.heads`), where there are two."""

    def groups(self, layer: int) -> int:
        """Shares of a KV head's query heads in a layer."""
        return self.second_groups if self.network.second_kind(layer) else self.head_groups

    def replaced(self, *changed: Instruction) -> Program:
        """The program with these instructions in their places."""
        stages = list(self.stages)
        for ins in changed:
            row = list(stages[ins.stage].instructions)
            row[ins.cta] = ins
            stages[ins.stage] = replace(stages[ins.stage], instructions=tuple(row))
        return replace(self, stages=tuple(stages))

    def with_splits(self, splits: int) -> Program:
        """The program as it runs where attention uses that many splits."""
        idle = [
            Instruction(Op.NOTHING, ins.stage, ins.cta, ins.layer)
            for stage in self.stages
            for ins in stage.instructions
            if ins.op is Op.ATTEND and ins.split >= splits
        ]
        return replace(self.replaced(*idle), splits=splits)


def stream_segment(matrix: Matrix) -> int:
    """Weights of a segment as it is streamed: those of a plain matrix end with their row."""
    return min(SEGMENT, matrix.columns) if matrix.kind in PLAIN else SEGMENT


def stream_bytes(matrix: Matrix) -> int:
    """Bytes of such a segment."""
    return stream_segment(matrix) * matrix.kind.segment_bytes // SEGMENT


def run_rows(ins: Instruction) -> tuple[int, int]:
    """The first row of the matrix of an instruction's first run, and how many rows all runs have."""
    first, matrix = ins.runs[0], ins.runs[0].matrix
    rows = sum(run.segments * stream_segment(run.matrix) // run.matrix.columns for run in ins.runs)
    return first.first * stream_segment(matrix) // matrix.columns, rows


def multiplies_left(stage: Stage) -> bool:
    """Whether a stage has gate's rows without those of up."""
    return isinstance(stage.does, Gate) and len(stage.matrices) < len(stage.does.matrices)


def head_spans(net: Network, layer: int, head: int, head_groups: int) -> tuple[Span, Span, Span]:
    """The queries of a share of a KV head's query heads, with their gates if they have any, the key and the value: of
    the layer, or of that whose keys and values it attends to."""
    config, own, kept = net.config.at(layer), net.qkv_span(layer), net.qkv_span(net.model.kept_by(layer))
    pitch = config.head_dim * (1 + net.model.attends[0].gated)
    wide = config.group // head_groups * pitch
    key = kept.first + config.heads * pitch + head // head_groups * config.head_dim
    value = key if net.values_are_keys(layer) else key + config.kv_heads * config.head_dim
    return (
        Span(own.vector, own.first + head * wide, wide),
        Span(kept.vector, key, config.head_dim),
        Span(kept.vector, value, config.head_dim),
    )


def delta_spans(op: Delta, head: int) -> tuple[Span, ...]:
    """What a head of a delta net reads of its products: query, key, value and gates, and the units that have what its
    beta and its decay are made of."""
    own, wide, ends = head % op.key_heads, op.width, op.channels + op.heads * op.width
    firsts = (own * wide, (op.key_heads + own) * wide, (2 * op.key_heads + head) * wide, op.channels + head * wide)
    units = (at // UNIT * UNIT for at in (ends + head, ends + op.heads + head))
    return (
        *(Span(Vector.QKV, first, wide) for first in firsts), *(Span(Vector.QKV, first, UNIT) for first in units)
    )  # fmt: skip


def read_spans(net: Network, layer: int, head: int, head_groups: int) -> tuple[Span, Span, Span]:
    """What an ATTEND reads: where all queries are normed together, and all keys, all of these."""
    queries, keys, values = head_spans(net, layer, head, head_groups)
    if net.model.attends[0].norms == "whole":
        queries = Span(Vector.QKV, 0, net.config.heads * net.config.head_dim)
        keys = Span(Vector.QKV, queries.end, net.config.kv_heads * net.config.head_dim)
    return queries, keys, values
