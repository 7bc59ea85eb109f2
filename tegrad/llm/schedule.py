"""One decode step as data: what each CTA of the persistent kernel does, in order, and the proof that it may.

A step is a list of **stages** (embed; per layer: qkv, attend, out, gate and up, down; logits; sample). A layer that
convolves does so in the stage of its products, of which a CTA has the rows of all three vectors. Where what a block
adds is normed before, or those that read the stream subtract its mean, out and down set it apart and a stage after
each, or in a parallel block after both, joins it to the stream, which then has no mean. Each stage gives each CTA at
most one **instruction**: the rows of matrices that it multiplies, the vector that it reads, the rows of the vector that
it writes, and the writes of other CTAs that it waits for. Vectors travel in units of 8 elements, so that rows are dealt
out in eights. Keys and values that later layers attend to have a place of their own until the step ends. Weights are
streamed through a pipeline in the order of the instructions, tile by tile.

`build` makes a program, `validate` proves it: every instruction comes to run, every element that is read was written
before by somebody who was waited for, is written once a version, and is not overwritten while anybody may still read
it; every row of every matrix is computed once. `encode` is what the kernel reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from itertools import chain, groupby
from math import gcd
from struct import Struct
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tegrad.errors import TegradError
from tegrad.llm.config import Config
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import LANE_WEIGHTS, PLAIN, SEGMENT, BlockType
from tegrad.llm.macros import group_counts
from tegrad.llm.network import Add, Attend, Convolve, Delta, Gate, InputGate, Logits, Project, Spec
from tegrad.llm.network import Network as Operations
from tegrad.llm.network import Op as Operation

UNIT: Final = 8
"""Elements that travel together: one packet of 16 bytes quantized, three as floats."""

QUANTIZED_UNIT, FLOAT_UNIT = 16, 48
"""Bytes of a unit on its way: 8 int8, scale and sum of squares, epoch; 8 floats, sum of squares, three epochs."""

MOST_SUMS: Final = 4096
"""Row sums that an instruction leaves in shared memory at most: more logits than that take several stages."""

VECTORS: Final = 3
"""That a convolution takes of a token."""
RUNS: Final = 3
"""Runs of weights that an instruction may have: the rows of a CTA may lie in the ends of three matrices."""


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


# --- dealing rows out -------------------------------------------------------------------------------------------------


def stream_segment(matrix: Matrix) -> int:
    """Weights of a segment as it is streamed: those of a plain matrix end with their row."""
    return min(SEGMENT, matrix.columns) if matrix.kind in PLAIN else SEGMENT


def stream_bytes(matrix: Matrix) -> int:
    """Bytes of such a segment."""
    return stream_segment(matrix) * matrix.kind.segment_bytes // SEGMENT


def pieces_per_row(matrix: Matrix) -> int:
    """Sums that a row's product is made of: a segment's lanes are added in groups that never straddle rows."""
    return matrix.columns // gcd(matrix.columns, stream_segment(matrix))


def units_together(*columns: int) -> int:
    """Units that stay together, so that they are whole segments of packed rows of each of these numbers of columns."""
    return max(max(1, SEGMENT // gcd(SEGMENT, number) // UNIT) for number in columns)


def _together(*matrices: Matrix) -> int:
    return units_together(*(SEGMENT if matrix.kind in PLAIN else matrix.columns for matrix in matrices))


def check(matrix: Matrix, last: bool = False) -> None:
    """Refuse a matrix that the kernel cannot take, by name; the rows of the `last` one, the output, go nowhere."""
    if matrix.rows % (rows := UNIT * _together(matrix)) and not last:
        raise UnsupportedModelError(
            f"{matrix.name} has {matrix.rows} rows of {matrix.columns}: the persistent step takes multiples of {rows}"
        )
    if matrix.kind.booked:
        raise UnsupportedModelError(f"{matrix.name} is in {matrix.kind.name}: the persistent step takes no code books")
    if matrix.kind in PLAIN:
        if matrix.columns % min(SEGMENT, matrix.columns) or matrix.columns * matrix.kind.size % 512:
            raise UnsupportedModelError(
                f"{matrix.name} has rows of {matrix.columns} in {matrix.kind.name}: the persistent step takes "
                f"rows up to {SEGMENT} in steps of 512 bytes, or multiples of {SEGMENT}"
            )
    elif matrix.columns % LANE_WEIGHTS:
        raise UnsupportedModelError(
            f"{matrix.name} has rows of {matrix.columns} in {matrix.kind.name}: the persistent step takes multiples "
            f"of {LANE_WEIGHTS}"
        )


def deal(units: int, ctas: int, least: int = 1, busy: int = 0, spared: int = 0) -> list[tuple[int, int]]:
    """First unit and number of units of each CTA, as even as can be; in pairs where that costs nothing.

    A pair of units is 16 elements, which have one scale where one CTA has both. `least` units stay together, of which
    there are whole ones. The first `busy` CTAs get about `spared` units less than the others.
    """
    step = 2 if units % 2 == 0 and 2 * -(-units // (2 * ctas)) == -(-units // ctas) else 1
    step = max(step, least)
    spared = min(spared, units // ctas) // step if busy else 0
    whole, rest = divmod(units // step + busy * spared, ctas)
    counts = [step * (whole + (cta < rest) - spared * (cta < busy)) for cta in range(ctas)]
    firsts = np.cumsum([0, *counts[:-1]]).tolist()
    return list(zip(firsts, counts, strict=True))


def deal_kinds(matrices: Sequence[Matrix], ctas: int) -> list[tuple[int, int]]:
    """`deal` of the rows of matrices below one another. A CTA has rows of one kind, for which it stages its vector;
    neighbours of one kind get as many CTAs as even out what the busiest streams. All have as many columns."""
    kinds = [tuple(alike) for _, alike in groupby(matrices, key=lambda matrix: matrix.kind)]
    if len(kinds) > ctas:
        raise UnsupportedModelError(f"{len(kinds)} kinds of matrices need as many CTAs, there are {ctas}")
    leasts = [_together(*alike) for alike in kinds]
    units = [sum(matrix.rows for matrix in alike) // UNIT for alike in kinds]
    ways = [1] * len(kinds)

    def _busiest(at: int) -> int:
        return max(count for _, count in deal(units[at], ways[at], leasts[at])) * kinds[at][0].kind.segment_bytes

    for _ in range(ctas - len(kinds)):
        ways[max(range(len(kinds)), key=_busiest)] += 1
    tops = np.cumsum([0, *units[:-1]]).tolist()
    return [
        (top + first, count) for top, *how in zip(tops, units, ways, leasts, strict=True) for first, count in deal(*how)
    ]


def _runs(matrices: Sequence[tuple[int, Matrix]], first: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """The segments of rows [first, first + rows) of numbered matrices below one another: `Run`s, without the rest."""
    top = 0
    for at, matrix in matrices:
        low, high = max(first, top), min(first + rows, top + matrix.rows)
        if low < high:
            size = stream_segment(matrix)
            begin, end = (low - top) * matrix.columns, (high - top) * matrix.columns
            if begin % size or (end % size and high != top + matrix.rows):
                raise UnsupportedModelError(f"{matrix.name}: {UNIT} rows of {matrix.columns} are no whole segments")
            yield at, begin // size, -(-end // size) - begin // size
        top += matrix.rows


def imbalance(program: Program) -> float:
    """Bytes that the busiest CTA streams, stage by stage, over an even share: what uneven dealing costs."""
    most = even = 0.0
    for stage in program.stages:
        loads = [sum(run.nbytes for run in ins.runs) for ins in stage.instructions]
        most += max(loads)
        even += sum(loads) / program.ctas
    return most / even


# --- building ---------------------------------------------------------------------------------------------------------


Share: TypeAlias = tuple[tuple[tuple[int, int, int], ...], Span | None]
"""A CTA's share of a product: its runs, as which of the matrices, first segment and segments, and what it writes."""


class _Builder:
    def __init__(self, network: Network, ctas: int, splits: int, head_groups: tuple[int, int], spared: int) -> None:
        self.network, self.ctas, self.splits, self.head_groups = network, ctas, splits, head_groups
        self.spared = spared if network.model.parallel else 0
        self.stages: list[Stage] = []
        adds = (network.matrices_of(at, op) for at, op in network.model.operations() if isinstance(op, Add))
        self.stream = _together(*chain.from_iterable(adds))
        """Units of the residual stream that stay together."""
        self.layer = 0
        self.does: Operation | Logits | None = None
        """The operation that stages are made of now, and its layer."""
        self.latest: dict[Span, tuple[int, int]] = {}
        """By what a stage wrote: the latest such stage, and its writers."""
        self.shares: dict[Any, list[Share]] = {}
        """Of products, by their shapes."""

    def wait(self, span: Span) -> Wait:
        """Wait for the latest write of a span."""
        written = [at for wrote, at in self.latest.items() if wrote.holds(span)]
        return Wait(span, *max(written))

    def floats(self) -> bool:
        """Whether what an operation makes travels as floats: for those that multiply it."""
        assert not isinstance(self.does, Logits)
        readers = self.network.model.readers(self.layer, self.does)
        return _plain(*chain.from_iterable(self.network.matrices_of(at, reader) for at, reader in readers))

    def add(
        self, op: Op, rows: Sequence[Instruction], matrices: Sequence[Matrix] = (), *, floats: bool = False
    ) -> None:
        """Append a stage and remember what it writes."""
        self.stages.append(Stage(op, self.layer, tuple(rows), self.does, tuple(matrices), floats))
        spans = [ins.output for ins in rows if ins.output is not None]
        if spans:
            writers = len({span.first for span in spans})
            for vector in {span.vector for span in spans}:
                own = [span for span in spans if span.vector is vector]
                first, end = min(span.first for span in own), max(span.end for span in own)
                self.latest[Span(vector, first, end - first)] = (len(self.stages) - 1, writers)

    def product(
        self, op: Op, source: Vector, target: Vector, matrices: tuple[Matrix, ...], *,
        first: int = 0, floats: bool = False, part: int = 0, parts: int = 1, last: bool = True, least: int = 0,
    ) -> None:  # fmt: skip
        """Rows of matrices below one another, or of gate and up, or what is convolved, side by side, dealt out to all
        CTAs.

        Of logits, `part` of `parts` of the rows; only the `last` publishes, as of products that are added at once, or
        of up and gate in turn. Rows of the residual stream are always dealt alike: their CTA keeps them. So are rows of
        which `least` units stay together.
        """
        stage = len(self.stages)
        waits = (self.wait(Span(source, 0, matrices[0].columns)),)
        shape = tuple((matrix.kind, matrix.rows, matrix.columns) for matrix in matrices)
        key = op, target, shape, first, part, parts, last, least
        if key not in self.shares:
            self.shares[key] = self._shares(op, target, matrices, first, part, parts, last, least)
        row = []
        for cta, (own, output) in enumerate(self.shares[key]):
            runs = tuple([Run(matrices[at], begin, segments) for at, begin, segments in own])
            row.append(
                Instruction(op, stage, cta, self.layer, waits, runs, output)
                if runs
                else Instruction(Op.NOTHING, stage, cta, self.layer)
            )
        self.add(op, row, matrices, floats=floats)

    def _shares(
        self, op: Op, target: Vector, matrices: tuple[Matrix, ...], first: int, part: int, parts: int, last: bool,
        together: int,
    ) -> list[Share]:  # fmt: skip
        """Each CTA's share of a product: the same in all layers of one shape."""
        least = together or (self.stream if op in (Op.ADD, Op.APART) else _together(*matrices))
        numbered = list(enumerate(matrices))
        sides = [[one] for one in numbered] if op is Op.GATE else [numbered]
        rows = sum(matrix.rows for _, matrix in sides[0])
        tops = [0]
        if op is Op.CONVOLVE:
            rows //= VECTORS
            tops = [at * rows for at in range(VECTORS)]
        groups = -(-rows // (UNIT * least))
        begin, end = (groups * at // parts * least for at in (part, part + 1))
        shares: list[Share] = []
        busy, spared = 0, 0
        if op is Op.GATE and not together:
            busy = self.network.config.kv_heads * self.head_groups[0]
            spared = self.spared // sum(UNIT * one.columns * one.kind.segment_bytes // SEGMENT for one in matrices)
        dealt = (
            deal_kinds(matrices, self.ctas) if op is Op.PROJECT else deal(end - begin, self.ctas, least, busy, spared)
        )
        for cta, (at, units) in enumerate(dealt):
            unit = begin + at
            own = tuple(run for side in sides for top in tops for run in _runs(side, top + unit * UNIT, units * UNIT))
            output: Span | None = Span(target, first + unit * UNIT, units * UNIT)
            if op in (Op.LOGITS, Op.APART):
                output = Span(target, cta, 1)
            output = output if last else None
            shares.append((own, output))
        return shares

    def stream_rows(self, op: Op, waits: tuple[Wait, ...] = (), matrices: tuple[Matrix, ...] = ()) -> None:
        """Each CTA's rows of the residual stream, without a product."""
        row, stage = [], len(self.stages)
        for cta, (unit, units) in enumerate(deal(self.network.config.dim // UNIT, self.ctas, self.stream)):
            output = Span(Vector.X, unit * UNIT, units * UNIT)
            some = Instruction(op, stage, cta, self.layer, waits, output=output)
            row.append(some if units else Instruction(Op.NOTHING, stage, cta, self.layer))
        self.add(op, row, matrices, floats=self.floats())

    def operation(self, layer: int, op: Operation) -> None:
        """The stages of a layer's operation."""
        self.layer, self.does = layer, op
        matrices = self.network.matrices_of(layer, op)
        match op:
            case Project() if isinstance(self.network.model.mixers[layer], Convolve):
                pass  # in one stage with the convolution
            case Convolve():
                matrices = self.network.matrices_of(layer, self.network.model.project(layer))
                self.product(Op.CONVOLVE, Vector.X, Vector.MIXED, matrices, floats=self.floats())
            case Project():
                target = self.network.qkv_span(layer)
                self.product(Op.PROJECT, Vector.X, target.vector, matrices, first=target.first, floats=True)
            case Attend():
                self.attend()
            case Delta():
                self.delta(op)
            case Gate() | InputGate():
                self.gate(*matrices)
            case Add() if not self.network.model.sets_apart:
                self.product(Op.ADD, SOURCE[op.reads], Vector.X, matrices, floats=self.floats())
            case Add():
                last = op is self.network.model.added_with(layer, op)[-1]
                self.product(Op.APART, SOURCE[op.reads], Vector.SQUARES, matrices, last=last)
                if last:
                    self.stream_rows(Op.JOIN, (self.wait_all(Vector.SQUARES),), matrices)

    def gate(self, gate: Matrix, *ups: Matrix) -> None:
        """One stage, or two where up is in another format."""
        least = 0
        if any(up.kind is not gate.kind for up in ups):
            least = _together(gate, *ups)
            self.product(Op.GATE, Vector.X, Vector.HIDDEN, ups, last=False, least=least)
            ups = ()
        self.product(Op.GATE, Vector.X, Vector.HIDDEN, (gate, *ups), floats=self.floats(), least=least)

    def attend(self) -> None:
        net, layer, stage = self.network, self.layer, len(self.stages)
        config, groups = net.config.at(layer), self.head_groups[net.second_kind(layer)]
        row = [Instruction(Op.NOTHING, stage, cta, layer) for cta in range(self.ctas)]
        count = config.kv_heads * groups
        wide = config.heads // count * config.head_dim
        for head in range(count):
            waits = tuple(self.wait(span) for span in read_spans(net, layer, head, groups))
            output = Span(Vector.MIXED, head * wide, wide)
            for split in range(self.splits):
                cta = split * count + head
                row[cta] = Instruction(Op.ATTEND, stage, cta, layer, waits, (), output, head, split)
        self.add(Op.ATTEND, row, floats=self.floats())

    def delta(self, op: Delta) -> None:
        layer, stage = self.layer, len(self.stages)
        if op.heads > self.ctas:
            raise UnsupportedModelError(f"{op.heads} heads of a delta net need as many CTAs, there are {self.ctas}")
        row = [Instruction(Op.NOTHING, stage, cta, layer) for cta in range(self.ctas)]
        for head in range(op.heads):
            waits = tuple(self.wait(span) for span in delta_spans(op, head))
            output = Span(Vector.MIXED, head * op.width, op.width)
            row[head] = Instruction(Op.DELTA, stage, head, layer, waits, (), output, head)
        self.add(Op.DELTA, row, floats=self.floats())

    def wait_all(self, vector: Vector) -> Wait:
        """Wait for the latest unit of each CTA that writes one."""
        last = self.wait(Span(vector, 0, 1))
        return Wait(Span(vector, 0, last.writers), last.stage, last.writers)

    def sample(self) -> None:
        wait = self.wait_all(Vector.TOP)
        row = [Instruction(Op.NOTHING, wait.stage + 1, cta) for cta in range(self.ctas)]
        row[0] = Instruction(Op.SAMPLE, wait.stage + 1, 0, waits=(wait,))
        self.does = None
        self.add(Op.SAMPLE, row)


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


def _plain(*matrices: Matrix) -> bool:
    """Whether a product's input travels as floats; refuses matrices that would need both forms."""
    plain = {matrix.kind in PLAIN for matrix in matrices}
    if len(plain) > 1:
        names = ", ".join(f"{matrix.name} {matrix.kind.name}" for matrix in matrices)
        raise UnsupportedModelError(f"{names} multiply one vector, some in blocks and some not: quantize them alike")
    return plain.pop()


def _groups(heads: int, kind: Heads, ctas: int, most: int) -> int:
    """Shares of a KV head's query heads, of `heads` in all: as many as asked for, or the fewest that there can be."""
    fewest, *more = group_counts(heads // kind.with_keys, kind.elements)
    if ctas < kind.with_keys * fewest:
        raise UnsupportedModelError(f"{kind.with_keys * fewest} groups of heads need as many CTAs, there are {ctas}")
    return max((at for at in more if at <= most and kind.with_keys * at <= ctas), default=fewest)


def build(network: Network, ctas: int, splits: int | None = None, head_groups: int = 1, spared: int = 0) -> Program:
    """The program of a step for so many CTAs; UnsupportedModelError where the kernel cannot run the network.

    Attention is cut into `head_groups` of each KV head's query heads, or the fewest that can be (heads of a kind
    that attends within windows alone, beside another kind: the most that can be), and `splits` of the
    positions, at most; into as many as there are CTAs for unless given. CTAs that attend to a short context stream
    about `spared` bytes less of a parallel block's gate and up.
    """
    config = network.config
    for matrix in network.matrices():
        check(matrix, matrix is network.output)
    own = [config.at(layer) for layer in range(config.layers)]
    if any(size % 16 for each in own for size in (each.dim, each.ffn, each.head_dim)):
        raise UnsupportedModelError("the persistent step takes sizes that are multiples of 16")
    asked = [ctas if network.only_within_windows(kind) else head_groups for kind in network.heads]
    groups = [_groups(config.heads, kind, ctas, each) for kind, each in zip(network.heads, asked, strict=True)]
    room = min(ctas // (kind.with_keys * each) for kind, each in zip(network.heads, groups, strict=True))
    made = _Builder(network, ctas, min(splits or room, room), (groups[0], groups[-1]), spared)
    made.stream_rows(Op.EMBED)
    for at, op in network.model.operations():
        made.operation(at, op)
    made.layer, made.does = 0, network.model.logits
    whole = UNIT * _together(network.output)
    most = -(-network.output.rows // (whole * ctas)) * whole
    turns = -(-most * pieces_per_row(network.output) // MOST_SUMS)
    for part in range(turns):
        last = part == turns - 1
        made.product(Op.LOGITS, Vector.X, Vector.TOP, (network.output,), part=part, parts=turns, last=last)
    made.sample()
    return Program(network, ctas, made.splits, tuple(made.stages), *made.head_groups)


# --- validating -------------------------------------------------------------------------------------------------------

_OF_ALL: Final = {Op.SAMPLE: (Op.LOGITS, Vector.TOP), Op.JOIN: (Op.APART, Vector.SQUARES)}
"""What reads a unit of every CTA that the stage before made."""


def needs(program: Program, ins: Instruction) -> tuple[Span, ...]:
    """What an instruction reads, from what it does and not from what it waits for."""
    if ins.op in (Op.NOTHING, Op.EMBED):
        return ()
    if ins.op is Op.ATTEND:
        return read_spans(program.network, ins.layer, ins.head, program.groups(ins.layer))
    does = program.stages[ins.stage].does
    if isinstance(does, Delta):
        return delta_spans(does, ins.head)
    if ins.op in _OF_ALL:
        writer, vector = _OF_ALL[ins.op]
        writers = sum(other.op is writer for other in program.stages[ins.stage - 1].instructions)
        return (Span(vector, 0, writers),)
    source = SOURCE[does.reads] if isinstance(does, Add) else Vector.X
    return (Span(source, 0, ins.runs[0].matrix.columns),)


class _Proof:
    """Versions of every element in the order of the stages: who wrote what."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = {**program.network.sizes, Vector.TOP: program.ctas, Vector.SQUARES: program.ctas}
        self.version = {
            vector: np.full((len(program.stages) + 1, size), -1, np.int32) for vector, size in self.sizes.items()
        }
        """[stage, element]: the last stage before it that wrote the element, or -1."""
        self.outputs: list[dict[Span, list[int]]] = []
        """Of each stage: what is written, and by which CTAs; several share what attention's splits write."""
        self.written: dict[tuple[int, Vector], NDArray[np.int32]] = {}
        """By stage: how often each element is written."""
        self._sound: set[tuple[int, tuple[Wait, ...], tuple[Span, ...]]] = set()
        self._writers: dict[tuple[int, Span], list[int]] = {}
        for at, stage in enumerate(program.stages):
            self._read(at, stage)

    def _read(self, at: int, stage: Stage) -> None:
        outputs: dict[Span, list[int]] = {}
        for cta, ins in enumerate(stage.instructions):
            if ins.stage != at or ins.cta != cta:
                raise ScheduleError(f"{ins} stands in the place of stage {at} on CTA {cta}")
            if ins.output is not None:
                outputs.setdefault(ins.output, []).append(cta)
        self.outputs.append(outputs)
        for vector in self.sizes:
            self.version[vector][at + 1] = self.version[vector][at]
        for span, who in outputs.items():
            size = self.sizes[span.vector]
            if not 0 <= span.first < span.end <= size:
                raise ScheduleError(f"stage {at} on CTA {who[0]} writes {span}, which has {size} elements")
            count = self.written.setdefault((at, span.vector), np.zeros(size, np.int32))
            count[span.first : span.end] += 1 if stage.op is Op.ATTEND else len(who)
            self.version[span.vector][at + 1, span.first : span.end] = at
        for (_, vector), count in [entry for entry in self.written.items() if entry[0][0] == at]:
            if (count > 1).any():
                element = int(np.argmax(count > 1))
                twice = sorted(self.writers(at, Span(vector, element, 1)))
                raise ScheduleError(
                    f"{vector.name}[{element}] is written more than once in stage {at}, by CTAs {twice}"
                )
            if vector in (Vector.X, Vector.MIXED, Vector.HIDDEN):
                asked = count[: self.program.network.written(stage, vector)]
                if not asked.all():
                    raise ScheduleError(f"{vector.name}[{int(np.argmin(asked))}] is not written in stage {at}")

    def writers(self, stage: int, span: Span) -> list[int]:
        """The CTAs that write any of a span in a stage."""
        key = (stage, span)
        if key not in self._writers:
            self._writers[key] = [
                cta
                for out, who in self.outputs[stage].items()
                if out.vector is span.vector and out.first < span.end and span.first < out.end
                for cta in who
            ]
        return self._writers[key]

    def check_waits(self, ins: Instruction) -> None:
        """What an instruction waits for comes, and each element that it reads is of the version waited for."""
        key = (ins.stage, ins.waits, needs(self.program, ins))
        if key in self._sound:
            return
        waited = {vector: np.full(size, -1, np.int32) for vector, size in self.sizes.items()}
        for wait in ins.waits:
            span, written = wait.span, self.written.get((wait.stage, wait.span.vector))
            if written is None or not written[span.first : span.end].all():
                raise ScheduleError(f"{ins} waits for {span} of stage {wait.stage}, where it is not written: for ever")
            if (writers := len(self.outputs[wait.stage])) != wait.writers:
                raise ScheduleError(
                    f"{ins} waits for {wait.writers} writers of stage {wait.stage}, which has {writers}"
                )
            waited[span.vector][span.first : span.end] = wait.stage
        for span in needs(self.program, ins):
            wanted = self.version[span.vector][ins.stage, span.first : span.end]
            got = waited[span.vector][span.first : span.end]
            if (wanted < 0).any():
                raise ScheduleError(f"{ins} reads {span.vector.name}[{span.first + int(np.argmin(wanted))}], "
                                    "which nobody has written")  # fmt: skip
            if (wanted != got).any():
                wrong = int(np.argmax(wanted != got))
                how = "does not wait for it" if got[wrong] < 0 else f"waits for stage {got[wrong]}"
                raise ScheduleError(
                    f"{ins} reads {span.vector.name}[{span.first + wrong}] of stage {wanted[wrong]} but {how}"
                )
        self._sound.add(key)


def validate(program: Program) -> list[Instruction]:
    """Prove a program for attention in one split and in as many as it has; returns an order in which one processor
    could run it. Raises ScheduleError with the first thing that is wrong.

    Numbers between need no proof of their own: a split runs, waits and publishes alike however many there are. So what
    is wrong with some of them is wrong with all, or, for lack of who writes or waits, with one.
    """
    order: list[Instruction] = []
    for splits in sorted({1, program.splits}, reverse=True):
        order = order or _validate(program.with_splits(splits))
        if splits != program.splits:
            _validate(program.with_splits(splits))
    _check_matrices(program)
    return order


def _validate(program: Program) -> list[Instruction]:
    proof = _Proof(program)
    for stage in program.stages:
        for ins in stage.instructions:
            proof.check_waits(ins)
    order = _order(program, proof)
    _check_overwrites(program, proof, order)
    return order


def _order(program: Program, proof: _Proof) -> list[Instruction]:
    """An order in which every wait is over when its instruction's turn comes; ScheduleError if there is none.

    Each CTA takes its instructions in turn, and its ring its tiles in the same order, so that a tile that is waited for
    is at worst behind tiles of instructions that come before. Progress never takes back what another one waits for:
    if one order gets to the end, all do.
    """
    stages, done = len(program.stages), [0] * program.ctas
    over: set[Wait] = set()

    def _blocks(wait: Wait) -> bool:
        if wait in over:
            return False
        if any(done[who] <= wait.stage for who in proof.writers(wait.stage, wait.span)):
            return True
        over.add(wait)
        return False

    order: list[Instruction] = []
    moved = True
    while moved:
        moved = False
        for cta in range(program.ctas):
            while done[cta] < stages:
                ins = program.stages[done[cta]].instructions[cta]
                if any(_blocks(wait) for wait in ins.waits):
                    break
                order.append(ins)
                done[cta] += 1
                moved = True
    stuck = next((cta for cta in range(program.ctas) if done[cta] < stages), None)
    if stuck is not None:
        raise ScheduleError(f"deadlock: {program.stages[done[stuck]].instructions[stuck]} waits forever")
    return order


def _check_overwrites(program: Program, proof: _Proof, order: Sequence[Instruction]) -> None:
    """Nobody may still read a vector when an element of it is written again.

    `known[cta][other]` counts the instructions of `other` that are over as far as `cta` can tell: by its waits, by
    what those it waited for could tell, and by its own. `reads` holds, by vector, the latest reader on each CTA.
    """
    known = np.zeros((program.ctas, program.ctas), np.int32)
    sent: dict[tuple[int, int], NDArray[np.int32]] = {}
    after: dict[tuple[int, Span], NDArray[np.int32]] = {}
    reads = {vector: np.zeros((len(program.stages) + 1, program.ctas), np.int32) for vector in proof.version}
    for stage in program.stages:
        at = stage.instructions[0].stage
        for vector in reads:
            reads[vector][at + 1] = reads[vector][at]
        for ins in stage.instructions:
            for span in needs(program, ins):
                reads[span.vector][at + 1, ins.cta] = at + 1
    for ins in order:
        mine = known[ins.cta]
        for wait in ins.waits:
            key = (wait.stage, wait.span)
            if key not in after:
                after[key] = np.max([sent[wait.stage, who] for who in proof.writers(wait.stage, wait.span)], axis=0)
            np.maximum(mine, after[key], out=mine)
        if ins.output is not None:
            behind = mine < reads[ins.output.vector][ins.stage]
            behind[ins.cta] = False
            if behind.any():
                other = int(np.argmax(behind))
                late = int(reads[ins.output.vector][ins.stage, other]) - 1
                raise ScheduleError(
                    f"{ins} overwrites {ins.output} while {program.stages[late].instructions[other]} may still read it"
                )
        mine[ins.cta] = ins.stage + 1
        sent[ins.stage, ins.cta] = mine.copy()


def _check_matrices(program: Program) -> None:
    """Every segment of every matrix is streamed once, by a stage that has it, and rows go where they belong; each head
    has each split once."""
    count = {
        matrix.name: np.zeros(-(-matrix.rows * matrix.columns // stream_segment(matrix)), np.int32)
        for matrix in program.network.matrices()
    }
    for stage in program.stages:
        own, plain = {matrix.name for matrix in stage.matrices}, {matrix.kind in PLAIN for matrix in stage.matrices}
        for ins in stage.instructions:
            if ins.runs and plain != {program.stages[ins.waits[0].stage].floats}:
                raise ScheduleError(f"{ins} reads its vector in another form than stage {ins.waits[0].stage} writes")
            if len({run.matrix.kind.name for run in ins.runs}) > 1:
                raise ScheduleError(f"{ins} multiplies matrices of several kinds by a vector staged for one")
            _check_rows(program, ins)
            for run in ins.runs:
                if run.matrix.name not in own:
                    raise ScheduleError(f"{ins} multiplies {run.matrix.name}, which is no matrix of its stage")
                count[run.matrix.name][run.first : run.first + run.segments] += 1
    for stage in program.stages:
        parts = [(ins.head, ins.split) for ins in stage.instructions if ins.op is Op.ATTEND]
        heads = {head for head, _ in parts}
        if sorted(parts) != sorted((head, split) for head in heads for split in range(program.splits)):
            raise ScheduleError(f"stage {stage.instructions[0].stage} has not each split of its heads once")
    for name, times in count.items():
        if (times != 1).any():
            wrong = int(np.argmax(times != 1))
            raise ScheduleError(f"segment {wrong} of {name} is computed {times[wrong]} times")


def _check_rows(program: Program, ins: Instruction) -> None:
    """The runs of an instruction have as many rows as it writes; those of a JOIN are its CTA's of the stage before, and
    of what was left to that."""
    if ins.op is Op.APART:
        _check_left(program, ins)
    if ins.op is Op.GATE:
        _check_gate(program, ins)
    if ins.op is Op.CONVOLVE:
        _check_convolved(ins, program.network.config.dim)
    if ins.output is None or ins.op in (Op.EMBED, Op.ATTEND, Op.DELTA, Op.LOGITS, Op.APART):
        return
    of = program.stages[ins.stage - 1].instructions[ins.cta] if ins.op is Op.JOIN else ins
    if ins.op is Op.JOIN and (of.op is not Op.APART or run_rows(of) != (ins.output.first, ins.output.elements)):
        raise ScheduleError(f"{ins} joins {ins.output}, which {of} does not set apart")
    sides = {Op.GATE: len(program.stages[ins.stage].matrices), Op.CONVOLVE: VECTORS}.get(ins.op, 1)
    if ins.runs and (rows := run_rows(of)[1]) != ins.output.elements * sides:
        raise ScheduleError(f"{ins} computes {rows} rows and writes {ins.output}")
    if ins.op in (Op.PROJECT, Op.GATE, Op.ADD):
        _check_place(program, ins)


def _check_place(program: Program, ins: Instruction) -> None:
    """The first row that an instruction computes of a stage's product is the first that it writes: of queries, keys and
    values below one another, or of each side of a gate."""
    stage, net, top = program.stages[ins.stage], program.network, 0
    assert ins.output is not None
    first = ins.output.first - (net.qkv_span(ins.layer).first if ins.op is Op.PROJECT else 0)
    tops: dict[str, int] = {}
    for matrix in stage.matrices:
        tops[matrix.name] = top
        top += matrix.rows if ins.op is Op.PROJECT else 0
    sides = [run for run in (ins.runs if ins.op is Op.GATE else ins.runs[:1]) if run.matrix.name in tops]
    found = [tops[run.matrix.name] + run_rows(ins._replace(runs=(run,)))[0] for run in sides]
    if found != [first] * len(found):
        raise ScheduleError(f"{ins} computes rows from {found} on and writes {ins.output}")


def _check_convolved(ins: Instruction, rows: int) -> None:
    """What is convolved are the rows that an instruction writes, of each of three vectors below one another."""
    assert ins.output is not None
    found = [run_rows(ins._replace(runs=(run,))) for run in ins.runs]
    if found != [(top * rows + ins.output.first, ins.output.elements) for top in range(VECTORS)]:
        raise ScheduleError(f"{ins} convolves the rows {found} and writes {ins.output}")


def _check_gate(program: Program, ins: Instruction) -> None:
    """Rows of up that a GATE leaves are those that the CTA's next one has of gate, and each that has none of up follows
    such a one."""
    stage, net = program.stages[ins.stage], program.network
    does = stage.does
    assert isinstance(does, Gate | InputGate)
    gate = net.matrices_of(ins.layer, does)[0]
    if (ins.output is not None) != (gate in stage.matrices):
        raise ScheduleError(f"{ins} multiplies {ins.runs[0].matrix.name}, but publishes as if it were the other one")
    if ins.output is not None and not _multiplies_left(stage):
        return
    other = program.stages[ins.stage + (1 if ins.output is None else -1)].instructions[ins.cta]
    _check_pair(ins, other, "multiply by")


def _multiplies_left(stage: Stage) -> bool:
    """Whether a stage has gate's rows without those of up."""
    return isinstance(stage.does, Gate) and len(stage.matrices) < len(stage.does.matrices)


def _check_left(program: Program, ins: Instruction) -> None:
    """Rows that an APART leaves are those that the CTA's next one adds to its own, and of a parallel block each that
    publishes adds such rows."""
    if ins.output is not None and not program.network.model.parallel:
        return
    stages = program.stages[ins.stage + 1 :] if ins.output is None else reversed(program.stages[: ins.stage])
    own = (stage.instructions[ins.cta] for stage in stages)
    other = next((one for one in own if one.op in (Op.APART, Op.JOIN)), ins)
    _check_pair(ins, other, "add to its own")


def _check_pair(ins: Instruction, other: Instruction, what: str) -> None:
    """Of two instructions of a CTA and a kind one leaves its rows, and the other has the same rows and publishes."""
    pair = (ins, other) if ins.output is None else (other, ins)
    left = [one.output is None for one in pair]
    if other.op is not ins.op or run_rows(other) != run_rows(ins) or left != [True, False]:
        raise ScheduleError(f"{pair[0]} leaves rows that {pair[1]} does not {what}")


def run_rows(ins: Instruction) -> tuple[int, int]:
    """The first row of the matrix of an instruction's first run, and how many rows all runs have."""
    first, matrix = ins.runs[0], ins.runs[0].matrix
    rows = sum(run.segments * stream_segment(run.matrix) // run.matrix.columns for run in ins.runs)
    return first.first * stream_segment(matrix) // matrix.columns, rows


# --- what the kernel reads --------------------------------------------------------------------------------------------

RUN: Final = np.dtype([("address", "<u8"), ("segments", "<u4"), ("format", "<u4")])
WORDS: Final = np.dtype(
    [
        ("op", "<u4"), ("flags", "<u4"), ("stage", "<u4"), ("columns", "<u4"),
        ("source", "<u4"), ("wait", "<u4"), ("writers", "<u4"), ("target", "<u4"),
        ("first", "<u4"), ("rows", "<u4"), ("head", "<u4"), ("split", "<u4"),
        ("runs", RUN, (RUNS,)),
        ("norm", "<u8"), ("bias", "<u8"), ("extra", "<u8"), ("wait2", "<u4"), ("wait3", "<u4"),
    ]
)  # fmt: skip
"""An instruction as `struct Instruction` of kernels/persistent.cu has it: 128 bytes.

source, target: where the vectors begin in the workspace, in bytes, and of ATTEND its layer's first query; wait: the
stage waited for (of ATTEND's queries; wait2 and wait3 of its key and value, with the writers in the upper half);
writers: CTAs of it; first, rows: the output's elements, or the rows that logits or what is set apart have. ATTEND: runs
hold the addresses of keys, values and both scales (the last as `extra`), norm and bias the norms of query and key;
columns is which table of angles; segments and format of runs[0] the rows of the cache and how many positions of it a
token attends to at most, those of runs[1] where the first key and the first value begin in the workspace. EMBED:
runs[0] is the embedding. CONVOLVE: norm is the kernel, extra the ring. DELTA: runs hold the addresses of kernel, ring
and state, norm, bias and extra are its norm, its bias and its decay. norm: the norm that follows the written stream.
bias: of the rows; JOIN: the norm of what is added, or where that loses its mean, its bias, and as `extra` the scale of
the stream; a GATE with OF_LAYER_INPUT: the layer's own input.
"""

WORD: Final = Struct(f"<12I{'QII' * RUNS}3Q2I")
"""One of WORDS, packed by itself: numpy is slower at making them of tuples."""
NO_OPERANDS: Final = (0,) * (9 + 3 * RUNS + 5)
"""All that follows the stage."""

READS_FLOATS, WRITES_FLOATS, HANDS_ON, TIMES_LEFT, OF_LAYER_INPUT, OF_SECOND = 1, 2, 4, 8, 16, 32
"""Bits of `flags`. A stage of logits that does not publish leaves its largest to the next one, of APART and GATE its
rows; TIMES_LEFT: a GATE multiplies by those; OF_LAYER_INPUT: it reads the stream as it is, and multiplies by the
layer's own input; OF_SECOND: an ATTEND's heads are of the second kind."""


@dataclass(frozen=True, slots=True)
class WorkspaceLayout:
    """Where in one device buffer the kernel keeps what passes between CTAs, in bytes."""

    counters: int
    """A counter for each stage, COUNTER_BYTES apart; after them one for each head group of attention."""
    vectors: dict[Vector, int]
    joins: int
    """The attention splits' floats, with as much beside them for packets."""
    reports: int
    """REPORT_BYTES for each CTA: the wait that it gave up."""
    nbytes: int


ALL_POSITIONS: Final = 2**31 - 1
"""Cached positions that a token attends to at most where there is no window."""
HEADER_BYTES: Final = 256
"""Bytes before the counters: the number of the step, in the first word."""
COUNTER_BYTES: Final = 32
REPORT_BYTES: Final = 32
UNIT_OF_CTA: Final = 16
"""Bytes of a unit of TOP or SQUARES."""


def workspace_layout(program: Program) -> WorkspaceLayout:
    """The layout for a program; the buffer starts as zeros."""
    net = program.network
    kinds = zip(net.heads, (program.head_groups, program.second_groups), strict=False)
    shares = max(kind.with_keys * groups for kind, groups in kinds)
    at = HEADER_BYTES + COUNTER_BYTES * (len(program.stages) + shares)
    joins = at = -(-at // 256) * 256
    split = net.config.heads * (max(kind.elements for kind in net.heads) + 2) * 8
    at += -(-program.splits * split // 256) * 256
    vectors = {}
    for vector, size in net.sizes.items():
        vectors[vector] = at
        at += -(-size // UNIT * FLOAT_UNIT // 256) * 256
    for vector in (Vector.TOP, *((Vector.SQUARES,) if net.model.sets_apart else ())):
        vectors[vector] = at
        at += -(-program.ctas * UNIT_OF_CTA // 256) * 256
    return WorkspaceLayout(HEADER_BYTES, vectors, joins, at, -(-(at + REPORT_BYTES * program.ctas) // 256) * 256)


def encode(program: Program, formats: Sequence[BlockType]) -> NDArray[Any]:
    """The program as the kernel reads it: WORDS (stages, ctas). `formats` numbers the block types."""
    place = workspace_layout(program)
    numbers = {kind.name: at for at, kind in enumerate(formats)}
    packed = b"".join(chain.from_iterable(_encode(program.network, place, stage, numbers) for stage in program.stages))
    return np.frombuffer(bytearray(packed), WORDS).reshape(len(program.stages), program.ctas)


def _encode(net: Network, place: WorkspaceLayout, stage: Stage, numbers: dict[str, int]) -> Iterator[bytes]:
    """A stage's instructions as WORDS has them. There are thousands: what they share is found once."""
    layer, does = net.layers[stage.layer], stage.does
    reads = WRITES_FLOATS * stage.floats + READS_FLOATS * any(m.kind in PLAIN for m in stage.matrices)
    known = {id(m): (m.address, stream_bytes(m), numbers[m.kind.name]) for m in stage.matrices}
    times = _multiplies_left(stage) and any(ins.output is not None for ins in stage.instructions)
    reads += OF_LAYER_INPUT * isinstance(does, InputGate)
    no_runs, norm, bias, extra, query_at = [0, 0, 0] * RUNS, 0, 0, 0, 0
    if stage.op is Op.EMBED:
        no_runs[0], no_runs[2] = net.embedding.address, numbers[net.embedding.kind.name]
        norm = next_norm(net, stage)
    elif isinstance(does, InputGate):
        bias = layer.layer_input
    elif isinstance(does, Project):
        bias = layer.biases.get(key_of(does), 0)
        bias -= 4 * net.qkv_span(stage.layer).first if bias else 0  # it is read by the element that is written
    elif isinstance(does, Gate):
        bias = layer.biases.get(key_of(does), 0)
    elif isinstance(does, Logits):
        bias = net.output_bias
    elif isinstance(does, Convolve):
        extra, norm = layer.keys, layer.vector(does.kernel)
    elif isinstance(does, Delta):
        extra, norm, bias = (layer.vector(spec) for spec in (does.decay, does.norm, does.bias))
        no_runs = [layer.vector(does.kernel), 0, 0, layer.keys, 0, 0, layer.state, 0, 0]
    elif isinstance(does, Attend):
        seen = layer.window - 1 if layer.window else ALL_POSITIONS
        starts = (_start(place, span) for span in head_spans(net, stage.layer, 0, 1))
        query_at, key_at, value_at = starts
        source_layer = net.model.kept_by(stage.layer)
        made_by = net.model.mixers[source_layer]
        assert isinstance(made_by, Attend)
        reads += OF_SECOND * net.second_kind(stage.layer)
        no_runs = [layer.keys, layer.rows, seen if layer.rows else 0, layer.values, key_at, value_at, layer.key_scales,
                   0, 0]  # fmt: skip
        extra, norm = layer.value_scales, layer.vector(does.query_norm)
        bias = net.layers[source_layer].vector(made_by.key_norm)
    elif isinstance(does, Add) and stage.op is not Op.APART:
        norm, extra = next_norm(net, stage), layer.vector(does.scale)
        bias = layer.vector(does.norm.spec) if does.norm else layer.biases.get(key_of(does), 0)
    for ins in stage.instructions:
        op, number, _, _, waits, own, output, head, split = ins
        if op is Op.NOTHING:
            yield WORD.pack(op, 0, number, *NO_OPERANDS)
            continue
        source = wait = writers = target = first = count = columns = wait2 = wait3 = 0
        if waits:
            (vector, _, _), wait, writers = waits[0]
            source = query_at or place.vectors[vector]
        if output is not None:
            vector, first, count = output
            target = place.vectors[vector]
        runs = no_runs
        if own:
            columns = own[0].matrix.columns
            runs = no_runs.copy()
            for run, (matrix, begin, segments) in enumerate(own):
                address, size, kind = known[id(matrix)]
                runs[3 * run : 3 * run + 3] = address + begin * size, segments, kind
        elif op is Op.EMBED:
            columns = net.config.dim
        elif isinstance(does, Attend):
            columns = layer.turn
            if does.norms == "whole" and output is not None:  # its own heads' part of them
                norm = layer.vector(does.query_norm) + 4 * first
                key_head = first // (net.config.group * net.config.head_dim)
                bias = layer.vector(does.key_norm) + 4 * key_head * net.config.head_dim
            wait2, wait3 = (other.stage | other.writers << 16 for other in waits[1:])
        if op in (Op.LOGITS, Op.APART) or (op is Op.GATE and output is None):
            first, count = run_rows(ins)
            count = min(count, own[0].matrix.rows - first)
        flags = reads | HANDS_ON * (output is not None) | TIMES_LEFT * times
        yield WORD.pack(
            op, flags, number, columns, source, wait, writers, target, first, count, head, split,
            *runs, norm, bias, extra, wait2, wait3,
        )  # fmt: skip


def _start(place: WorkspaceLayout, span: Span) -> int:
    """Where the floats of a span begin in the workspace."""
    return place.vectors[span.vector] + span.first // UNIT * FLOAT_UNIT


def next_norm(net: Network, stage: Stage) -> int:
    """The address of the norm weights that follow what a stage writes of the residual stream."""
    at, reader = net.model.reader(stage.layer, stage.does if isinstance(stage.does, Add) else None)
    if isinstance(reader, Logits):
        return net.output_norm
    return net.ones if reader.norm is None else net.layers[at].vector(reader.norm.spec)
