"""What the kernel reads of a step's program: its instructions as words, and where its vectors lie in the workspace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.formats import PLAIN, BlockType
from tegrad.llm.network import Add, Attend, Convolve, Delta, Gate, InputGate, Logits, Project
from tegrad.llm.schedule import (
    FLOAT_UNIT,
    UNIT,
    Network,
    Op,
    Program,
    Span,
    Stage,
    Vector,
    head_spans,
    key_of,
    multiplies_left,
    run_rows,
    stream_bytes,
)

RUNS: Final = 3
"""Runs of weights that an instruction may have: the rows of a CTA may lie in the ends of three matrices."""

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
"""An instruction as `enum Field` of kernels/persistent.cu reads it: 128 bytes.

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
    times = multiplies_left(stage) and any(ins.output is not None for ins in stage.instructions)
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
