"""The proof that a step's program is sound.

Every instruction comes to run, every element that is read was written before by somebody who was waited for, is written
once a version, and is not overwritten while anybody may still read it; every row of every matrix is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.formats import PLAIN
from tegrad.llm.network import Add, Delta, Gate, InputGate
from tegrad.llm.schedule import (
    SOURCE,
    VECTORS,
    Instruction,
    Op,
    Program,
    ScheduleError,
    Span,
    Stage,
    Vector,
    Wait,
    delta_spans,
    multiplies_left,
    read_spans,
    run_rows,
    stream_segment,
)

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

    Other numbers of splits need no proof: every split runs, waits and publishes alike, so that a mistake shows with the
    most splits or with one.
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

    Each CTA takes its instructions in turn, and its pipeline their tiles in the same order, so that a tile that is
    waited for is at worst behind tiles of instructions that come before. Progress never takes back what another one
    waits for: if one order gets to the end, all do.
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
    if ins.output is not None and not multiplies_left(stage):
        return
    other = program.stages[ins.stage + (1 if ins.output is None else -1)].instructions[ins.cta]
    _check_pair(ins, other, "multiply by")


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
