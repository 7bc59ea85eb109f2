"""Makes a step's program: deals rows of matrices out to CTAs, as even as can be, and gives each its instructions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from math import gcd
from typing import Any, Final, TypeAlias

import numpy as np

from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import LANE_WEIGHTS, PLAIN, SEGMENT
from tegrad.llm.macros import group_counts
from tegrad.llm.network import Add, Attend, Convolve, Delta, Gate, InputGate, Logits, Project
from tegrad.llm.network import Op as Operation
from tegrad.llm.schedule import (
    SOURCE,
    UNIT,
    VECTORS,
    Heads,
    Instruction,
    Matrix,
    Network,
    Op,
    Program,
    Run,
    Span,
    Stage,
    Vector,
    Wait,
    delta_spans,
    read_spans,
    stream_segment,
)

MOST_SUMS: Final = 4096
"""Row sums that an instruction leaves in shared memory at most: more logits than that take several stages."""


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
