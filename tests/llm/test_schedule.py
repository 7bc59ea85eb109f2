"""The schedule of the persistent step: its proof finds planted mistakes, and its interpreters make a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from interpreter import Interpreter, Travelling
from networks import Shape, make

from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import F16, Q4_K, Q6_K, Q8_0
from tegrad.llm.network import Attend, Spec
from tegrad.llm.schedule import (
    Instruction,
    Layer,
    Matrix,
    Network,
    Op,
    Program,
    ScheduleError,
    Span,
    Stage,
    Vector,
    Wait,
)
from tegrad.llm.schedule_build import build, deal, imbalance
from tegrad.llm.schedule_proof import validate
from tegrad.llm.schedule_words import NO_OPERANDS, WORD, WORDS, encode

LLAMA_1B = (2048, 8192, 32, 8, 64, 16, 128256)
LLAMA_3B = (3072, 8192, 24, 8, 128, 28, 128256)
LLAMA_8B = (4096, 14336, 32, 8, 128, 32, 128256)
QWEN3_06B = (1024, 3072, 16, 8, 128, 28, 151936)
QWEN3_17B = (2048, 6144, 16, 8, 128, 28, 151936)


def network(sizes: tuple[int, ...], kind: object = Q6_K, value_kind: object = None, layers: int = 0) -> Network:
    """A network of published sizes, without its bytes."""
    *widths, all_layers, vocab = sizes
    config = Shape(*widths, layers or all_layers, vocab).config

    def matrix(spec: Spec, at: int) -> Matrix:
        own = value_kind if spec.name == "attn_v" else None
        return Matrix(f"{spec.name}{at}", own or kind, *map(config.size, spec.shape))

    made = [
        Layer({op.role: tuple(matrix(spec, at) for spec in op.matrices) for op in block if not isinstance(op, Attend)},
              {norm.name: 0 for op in block for norm in op.specs})
        for at, block in enumerate(config.network.blocks)
    ]  # fmt: skip
    embedding = Matrix("embedding", kind, vocab, config.dim)
    return Network(config, embedding, tuple(made), embedding)


@pytest.fixture(scope="module")
def program() -> Program:
    return build(make(Shape(value_kind=Q4_K, joined=False, layers=3)).network, 6)


def find(program: Program, op: Op, at: int = 1) -> Instruction:
    """The instruction of CTA `at` in the second stage of that kind."""
    stages = [stage for stage in program.stages if stage.op is op]
    return stages[min(1, len(stages) - 1)].instructions[at]


def drop_wait(program: Program) -> Program:
    return program.replaced(find(program, Op.GATE)._replace(waits=()))


def wait_for_part(program: Program) -> Program:
    ins = find(program, Op.GATE)
    wait = ins.waits[0]._replace(span=Span(Vector.X, 0, ins.waits[0].span.elements - 8))
    return program.replaced(ins._replace(waits=(wait,)))


def wait_for_an_older_version(program: Program) -> Program:
    ins = find(program, Op.GATE)
    stage = max(at for at in range(ins.waits[0].stage) if program.stages[at].op is Op.ADD)
    return program.replaced(ins._replace(waits=(ins.waits[0]._replace(stage=stage),)))


def wait_for_nobody(program: Program) -> Program:
    ins = find(program, Op.ADD)
    return program.replaced(ins._replace(waits=(ins.waits[0]._replace(stage=ins.stage - 2),)))


def wait_for_oneself(program: Program) -> Program:
    ins = find(program, Op.ADD)
    own = Wait(ins.output, ins.stage, ins.waits[0].writers)
    return program.replaced(ins._replace(waits=(*ins.waits, own)))


def wrong_count(program: Program) -> Program:
    ins = find(program, Op.ADD)
    return program.replaced(ins._replace(waits=(ins.waits[0]._replace(writers=ins.waits[0].writers - 1),)))


def swap_stages(program: Program) -> Program:
    a, b = find(program, Op.GATE), find(program, Op.PROJECT)
    return program.replaced(a._replace(stage=b.stage), b._replace(stage=a.stage))


def swap_ctas(program: Program) -> Program:
    a, b = find(program, Op.GATE, 0), find(program, Op.GATE, 1)
    return program.replaced(a._replace(runs=b.runs), b._replace(runs=a.runs, output=a.output))


def write_twice(program: Program) -> Program:
    a, b = find(program, Op.GATE, 0), find(program, Op.GATE, 1)
    return program.replaced(a._replace(output=b.output))


def write_nothing(program: Program) -> Program:
    return program.replaced(find(program, Op.GATE)._replace(output=None))


def write_beyond(program: Program) -> Program:
    ins = find(program, Op.GATE, 5)
    return program.replaced(ins._replace(output=ins.output._replace(first=ins.output.first + 8)))


def leave_a_segment(program: Program) -> Program:
    ins = find(program, Op.LOGITS)
    return program.replaced(ins._replace(runs=(ins.runs[0]._replace(segments=ins.runs[0].segments - 1),)))


def wrong_matrix(program: Program) -> Program:
    ins, other = find(program, Op.GATE), program.network.layers[0]
    run = ins.runs[0]
    return program.replaced(ins._replace(runs=(run._replace(matrix=other.matrices["gate"][0]), ins.runs[1])))


def two_kinds(program: Program) -> Program:
    ins, value = find(program, Op.PROJECT, 0), find(program, Op.PROJECT, 5)
    return program.replaced(ins._replace(runs=(*ins.runs, *value.runs)))


def skip_a_reader(program: Program) -> Program:
    """Output is added before attention's result is there: nothing tells its writers that QKV was read."""
    stage = next(stage for stage in program.stages if stage.op is Op.ADD and stage.layer == 1)
    idle = [ins._replace(op=Op.NOTHING, waits=(), runs=()) for ins in stage.instructions]
    return program.replaced(*idle)


MUTANTS: dict[Callable[[Program], Program], str] = {
    drop_wait: "does not wait for it",
    wait_for_part: r"reads X\[248\] .* does not wait for it",
    wait_for_an_older_version: "but waits for stage",
    wait_for_nobody: "where it is not written: for ever",
    wait_for_oneself: "deadlock: .* waits forever",
    wrong_count: "waits for 5 writers of stage .*, which has 6",
    swap_stages: "stands in the place|is not written in stage",
    swap_ctas: "is written more than once|stands in the place|computes",
    write_twice: "is written more than once",
    write_nothing: "is not written in stage",
    write_beyond: "which has 512 elements",
    leave_a_segment: "segment .* of embedding is computed 0 times",
    wrong_matrix: "which is no matrix of its stage",
    two_kinds: "multiplies matrices of several kinds",
    skip_a_reader: "may still read it",
}


def test_programs_of_equal_networks_are_one_key_and_cannot_be_changed(program: Program) -> None:
    """And so is all that they are made of."""
    again = build(make(Shape(value_kind=Q4_K, joined=False, layers=3)).network, 6)
    assert again is not program
    assert {program: "kept"}[again] == "kept"
    instruction = find(program, Op.GATE)
    for part, field in ((program, "stages"), (instruction, "waits"), (instruction.waits[0], "stage")):
        with pytest.raises(AttributeError):
            setattr(part, field, getattr(part, field))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_proof_names_a_planted_mistake(program: Program, mutant: Callable[[Program], Program]) -> None:
    assert len(validate(program)) == len(program.stages) * program.ctas
    with pytest.raises(ScheduleError, match=MUTANTS[mutant]):
        validate(mutant(program))


def join_too_early(program: Program) -> Program:
    return program.replaced(find(program, Op.JOIN)._replace(waits=()))


def join_what_another_has(program: Program) -> Program:
    a, b = find(program, Op.JOIN, 0), find(program, Op.JOIN, 1)
    return program.replaced(a._replace(output=b.output), b._replace(output=a.output))


def test_ctas_that_attend_have_less_of_a_parallel_blocks_gate() -> None:
    made = make(Shape(ffn=1024, by_mean=True, parallel=True))
    even, spared = build(made.network, 6), build(made.network, 6, spared=10 * 8 * 2 * 256 * 840 // 1024)
    dealt = [
        [ins.output.elements for ins in stage.instructions]
        for program in (even, spared)
        for stage in program.stages
        if stage.op is Op.GATE and stage.layer == 0
    ]
    assert dealt == [[176, 176, 176, 176, 160, 160], [128, 128, 192, 192, 192, 192]]
    steps = []
    for program in (even, spared):
        interpreter = Interpreter(program, made.weights, 16, lambda position, _: [(0, position)])
        interpreter.begin(5, 0)
        interpreter.run(validate(program))
        steps.append(interpreter.logits)
    assert np.abs(steps[1] - steps[0]).max() < 0.02 * np.abs(steps[0]).max()
    plain = make(Shape(by_mean=True, gated=False)).network
    assert build(plain, 6, spared=1 << 20) == build(plain, 6)  # in a block in sequence nobody attends meanwhile


def leave_to_another(program: Program) -> Program:
    a, b = find(program, Op.APART, 0), find(program, Op.APART, 1)
    return program.replaced(a._replace(runs=b.runs), b._replace(runs=a.runs))


def leave_to_nobody(program: Program) -> Program:
    """Of the last layer's two products that are added at once the second is not there."""
    *_, last = (stage for stage in program.stages if stage.op is Op.APART)
    stages = list(program.stages)
    stages[last.instructions[0].stage] = replace(
        last, instructions=tuple(Instruction(Op.NOTHING, ins.stage, ins.cta, ins.layer) for ins in last.instructions)
    )
    return replace(program, stages=tuple(stages))


def publish_twice(program: Program) -> Program:
    """Both of a block's products."""
    row = next(stage.instructions for stage in program.stages if stage.op is Op.APART)
    return program.replaced(*(ins._replace(output=Span(Vector.SQUARES, ins.cta, 1)) for ins in row))


def read_another_form(program: Program) -> Program:
    stages = list(program.stages)
    at = find(program, Op.JOIN).stage
    stages[at] = replace(stages[at], floats=not stages[at].floats)
    return replace(program, stages=tuple(stages))


POST_NORMS, PARALLEL = Shape(post_norms=True), Shape(by_mean=True, parallel=True)
SET_APART: dict[Callable[[Program], Program], tuple[Shape, str]] = {
    join_too_early: (POST_NORMS, r"JOIN of layer 0\) on CTA 1 reads SQUARES\[0\] .* does not wait for it"),
    join_what_another_has: (
        POST_NORMS, r"joins X\[.*\], which stage .* \(APART of layer 0\) on CTA 0 does not set apart"
    ),
    publish_twice: (PARALLEL, r"on CTA 0 leaves rows that stage .* \(APART of layer 0\) on CTA 0 does not add"),
    read_another_form: (
        PARALLEL, r"LOGITS of layer 0\) on CTA 0 reads its vector in another form than stage \d+ writes"
    ),
    leave_to_another: (
        PARALLEL, r"APART of layer 0\) on CTA 0 leaves rows that .*APART of layer 0\) on CTA 0 does not add"
    ),
    leave_to_nobody: (
        PARALLEL, r"JOIN of layer 1\) on CTA 0 waits for SQUARES\[0:6\] of stage 11, where it is not written"
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", SET_APART, ids=lambda mutant: mutant.__name__)
def test_the_proof_names_a_mistake_where_products_are_set_apart(mutant: Callable[[Program], Program]) -> None:
    shape, said = SET_APART[mutant]
    program = build(make(shape).network, 6)
    assert len(validate(program)) == len(program.stages) * program.ctas
    with pytest.raises(ScheduleError, match=said):
        validate(mutant(program))


GEMMA4 = Shape(512, 512, 4, 1, 256, 6, kind=Q8_0, qk_norm=True, post_norms=True, window=50, local=(128, 1), shared=2,
               layer_input=128, scaled=True)  # fmt: skip


def find_stage(program: Program, op: Op, layer: int = 0) -> Stage:
    """The first of a kind that a layer has."""
    return next(stage for stage in program.stages if stage.op is op and stage.layer == layer)


def first_attend(program: Program, layer: int) -> Instruction:
    return next(ins for ins in find_stage(program, Op.ATTEND, layer).instructions if ins.op is Op.ATTEND)


def wait_for_the_previous_layers_keys(program: Program) -> Program:
    ins = first_attend(program, 4)
    own = first_attend(program, 3)
    return program.replaced(ins._replace(waits=(ins.waits[0], *own.waits[1:])))


def wait_for_no_shared_keys(program: Program) -> Program:
    ins = first_attend(program, 5)
    return program.replaced(ins._replace(waits=ins.waits[:1]))


def write_over_shared_keys(program: Program) -> Program:
    """A layer whose own keys are shared writes a part of another's, which a later one has still to read."""
    shared = program.network.shared_at
    moved = find_stage(program, Op.PROJECT, 3).instructions[0]
    assert moved.output is not None
    return program.replaced(moved._replace(output=moved.output._replace(first=shared[2])))


def read_the_stream_before_the_feed_forward_is_added(program: Program) -> Program:
    """A layer's own input is multiplied before the feed-forward is added."""
    stages = [stage for stage in program.stages if stage.op is Op.GATE and stage.layer == 1]
    before = next(ins for ins in stages[0].instructions if ins.waits)
    ins = next(ins for ins in stages[1].instructions if ins.waits)
    return program.replaced(ins._replace(waits=(ins.waits[0]._replace(stage=before.waits[0].stage),)))


SIZED = {
    wait_for_the_previous_layers_keys: r"reads SHARED_QKV\[512\] of stage 21 but does not wait for it",
    wait_for_no_shared_keys: "does not wait for it",
    write_over_shared_keys: "waits for SHARED_QKV.* where it is not written",
    read_the_stream_before_the_feed_forward_is_added: r"reads X\[0\] of stage 17 but waits for stage 14",
}


@pytest.mark.parametrize("mutant", SIZED, ids=lambda mutant: mutant.__name__)
def test_the_proof_names_a_mistake_where_layers_differ_or_share_keys(mutant: Callable[[Program], Program]) -> None:
    program = build(make(GEMMA4).network, 6)
    assert len(validate(program)) == len(program.stages) * program.ctas
    assert program.network.shared_at == {2: 0, 3: 4 * 128 + 2 * 128}
    assert program.network.sizes[Vector.SHARED_QKV] == 4 * 128 + 2 * 128 + 4 * 256 + 2 * 256
    with pytest.raises(ScheduleError, match=SIZED[mutant]):
        validate(mutant(program))


def swap(program: Program, op: Op, layer: int = 0) -> Program:
    """Two CTAs write each other's rows."""
    a, b = find_stage(program, op, layer).instructions[:2]
    return program.replaced(a._replace(output=b.output), b._replace(output=a.output))


@pytest.mark.parametrize("op", [Op.PROJECT, Op.GATE, Op.ADD])
def test_the_proof_notices_rows_in_each_others_places(op: Op) -> None:
    program = build(make(Shape(dim=512, ffn=1024)).network, 6)
    with pytest.raises(ScheduleError, match=r"computes rows from .* on and writes"):
        validate(swap(program, op))


def test_the_proof_notices_rows_of_kept_products_in_another_place() -> None:
    program = build(make(GEMMA4).network, 6)
    with pytest.raises(ScheduleError, match=r"computes rows from .* on and writes SHARED_QKV"):
        validate(swap(program, Op.PROJECT, 3))


def test_the_proof_notices_a_split_that_is_done_twice() -> None:
    program = build(make(Shape()).network, 8)
    ins = next(ins for ins in find_stage(program, Op.ATTEND).instructions if ins.split == 1)
    with pytest.raises(ScheduleError, match="has not each split of its heads once"):
        validate(program.replaced(ins._replace(split=2)))


def convolve_in_another_order(program: Program) -> Program:
    ins = find(program, Op.CONVOLVE)
    return program.replaced(ins._replace(runs=(ins.runs[1], ins.runs[0], ins.runs[2])))


def convolve_a_vector_of_another(program: Program) -> Program:
    a, b = find(program, Op.CONVOLVE, 0), find(program, Op.CONVOLVE, 1)
    return program.replaced(a._replace(runs=(*a.runs[:2], b.runs[2])), b._replace(runs=(*b.runs[:2], a.runs[2])))


def convolve_too_early(program: Program) -> Program:
    return program.replaced(find(program, Op.CONVOLVE)._replace(waits=()))


def add_what_was_attended(program: Program) -> Program:
    """A layer that convolves adds what attention of the one before it made."""
    stages = [stage for stage in program.stages if stage.op is Op.ADD and stage.layer == 2]
    attended = next(stage.instructions[0].stage for stage in program.stages if stage.op is Op.ATTEND)
    ins = stages[0].instructions[1]
    return program.replaced(ins._replace(waits=(ins.waits[0]._replace(stage=attended),)))


CONVOLVED: dict[Callable[[Program], Program], str] = {
    convolve_in_another_order: r"CONVOLVE of layer 2\) on CTA 1 convolves the rows \[\(304, 48\), \(48, 48\)",
    convolve_a_vector_of_another: r"CONVOLVE of layer 2\) on CTA 0 convolves the rows",
    convolve_too_early: r"CONVOLVE of layer 2\) on CTA 1 reads X\[0\] .* does not wait for it",
    add_what_was_attended: r"ADD of layer 2\) on CTA 1 waits for .* writers of stage|reads MIXED",
}


@pytest.mark.parametrize("mutant", CONVOLVED, ids=lambda mutant: mutant.__name__)
def test_the_proof_names_a_mistake_where_layers_convolve(mutant: Callable[[Program], Program]) -> None:
    program = build(make(Shape(layers=3, taps=3)).network, 6)
    assert len(validate(program)) == len(program.stages) * program.ctas
    assert len(program.stages) == 3 + 4 + 5 + 4  # attention has a stage of its own
    with pytest.raises(ScheduleError, match=CONVOLVED[mutant]):
        validate(mutant(program))


def gates_of(program: Program, publishing: bool) -> list[Instruction]:
    """Those of the first layer that leave up's rows, or those that multiply by them."""
    stages = [stage for stage in program.stages if stage.op is Op.GATE and stage.layer == 0]
    return list(stages[publishing].instructions)


def leave_to_another(program: Program) -> Program:
    a, b, *_ = gates_of(program, publishing=False)
    return program.replaced(a._replace(runs=b.runs), b._replace(runs=a.runs))


def leave_nothing(program: Program) -> Program:
    stage = program.stages[gates_of(program, publishing=False)[0].stage]
    return program.replaced(*(ins._replace(op=Op.NOTHING, waits=(), runs=()) for ins in stage.instructions))


def publish_what_is_left(program: Program) -> Program:
    left, made = gates_of(program, publishing=False), gates_of(program, publishing=True)
    return program.replaced(*(a._replace(output=b.output) for a, b in zip(left, made, strict=True)))


def leave_gate_instead(program: Program) -> Program:
    """And multiply it by up's activation."""
    a, b = (gates_of(program, publishing=what)[0].stage for what in (False, True))
    stages = list(program.stages)
    for one, other in ((a, b), (b, a)):
        row = tuple(
            ins._replace(runs=theirs.runs)
            for ins, theirs in zip(program.stages[one].instructions, program.stages[other].instructions, strict=True)
        )
        stages[one] = replace(stages[one], instructions=row, matrices=program.stages[other].matrices)
    return replace(program, stages=tuple(stages))


LEFT: dict[Callable[[Program], Program], str] = {
    leave_gate_instead: "publishes as if it were the other one",
    leave_to_another: "leaves rows that .* does not multiply by",
    leave_nothing: "leaves rows that .* does not multiply by",
    publish_what_is_left: "publishes as if it were the other one",
}


@pytest.mark.parametrize("mutant", LEFT, ids=lambda mutant: mutant.__name__)
def test_the_proof_names_a_mistake_where_up_is_in_another_format_than_gate(
    mutant: Callable[[Program], Program],
) -> None:
    program = build(make(Shape(layers=3, up_kind=Q4_K, others_in=(0, 2))).network, 6)
    assert len(validate(program)) == len(program.stages) * program.ctas
    assert [sum(stage.op is Op.GATE and stage.layer == at for stage in program.stages) for at in range(3)] == [2, 1, 2]
    with pytest.raises(ScheduleError, match=LEFT[mutant]):
        validate(mutant(program))


def test_a_proof_for_one_split_of_attention_and_for_the_most_is_one_for_every_number() -> None:
    program = build(make(Shape(layers=1)).network, 14)
    assert program.splits == 7
    validate(program)
    for splits in range(2, 7):
        validate(program.with_splits(splits))
    attends = [ins for stage in program.stages for ins in stage.instructions if ins.op is Op.ATTEND]
    for ins in attends:  # a mistake in any split is found
        with pytest.raises(ScheduleError, match="does not wait for it"):
            validate(program.replaced(ins._replace(waits=())))


def orders(program: Program, count: int) -> Iterator[list[Instruction]]:
    """Random orders that the waits allow."""
    for seed in range(count):
        rng = random.Random(seed)
        done = [0] * program.ctas
        order: list[Instruction] = []
        while any(at < len(program.stages) for at in done):
            able = []
            for cta in range(program.ctas):
                if done[cta] == len(program.stages):
                    continue
                ins = program.stages[done[cta]].instructions[cta]
                writers = [
                    who
                    for wait in ins.waits
                    for who, other in enumerate(program.stages[wait.stage].instructions)
                    if other.output is not None and done[who] <= wait.stage
                ]
                if not writers:
                    able.append(ins)
            # One CTA as far ahead of the others as it gets, so that what may be overwritten too early is.
            ins = rng.choice(able) if rng.random() < 0.3 else max(able, key=lambda ins: (ins.stage, ins.cta))
            order.append(ins)
            done[ins.cta] += 1
        yield order


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(kind=F16),
        Shape(post_norms=True, window=2),
        Shape(by_mean=True, gated=False),
        Shape(by_mean=True, parallel=True),
        Shape(layers=3, taps=3, ring=64),
        Shape(layers=3, up_kind=Q4_K, others_in=(0, 2)),
    ],
    ids=["quantized", "floats", "norms after blocks", "layer norms", "parallel", "convolutions", "up by itself"],
)
def test_every_order_that_the_waits_allow_makes_the_same_step(shape: Shape) -> None:
    made = make(shape)
    program = build(made.network, 6)
    validate(program)
    steps = []
    for order in (validate(program), *orders(program, 3)):
        interpreter = Interpreter(program, made.weights, 16, lambda position, _: [(0, position)])
        tokens = []
        for position in range(3):
            interpreter.begin(tokens[-1] if tokens else 5, position)
            tokens.append(interpreter.run(order))
        steps.append((tokens, interpreter.logits))
    for tokens, logits in steps[1:]:
        assert tokens == steps[0][0]
        np.testing.assert_array_equal(logits, steps[0][1])


def float_step(made: object, token: int) -> np.ndarray:
    """The logits of a first token, without any quantization."""
    w, net, shape = made.weights, made.network, made.shape

    def normed(x: np.ndarray, norm: np.ndarray) -> np.ndarray:
        x = x - x.mean() if shape.by_mean else x
        return x / np.sqrt((x * x).mean() + shape.eps) * norm

    def after(at: int, name: str, x: np.ndarray) -> np.ndarray:
        return normed(x, w.vectors[at][name]) if shape.post_norms else x

    x = w.matrices["embedding"][token]
    for at, layer in enumerate(net.layers):
        roles = ("qkv", "output", "gate", "down")
        qkv, (output,), sides, (down,) = (
            [w.matrices[matrix.name] for matrix in layer.matrices[role]] for role in roles
        )
        biases = [w.biases[at].get(role, 0.0) for role in roles]
        y = normed(x, w.vectors[at]["attn_norm"])
        value = (np.concatenate([matrix @ y for matrix in qkv]) + biases[0])[-shape.kv_heads * shape.head_dim :]
        mixed = np.repeat(value.reshape(shape.kv_heads, -1), shape.heads // shape.kv_heads, axis=0).reshape(-1)
        x = x + after(at, "post_attention_norm", output @ mixed + biases[1])
        y = y if shape.parallel else normed(x, w.vectors[at]["ffn_norm"])
        gate, *up = (matrix @ y for matrix in sides)
        gate = gate + biases[2]
        hidden = gate / (1 + np.exp(-gate)) * (up[0] if up else 1)
        x = x + after(at, "post_ffw_norm", down @ hidden + biases[3])
    return w.matrices["embedding"] @ normed(x, w.output_norm) + (0 if w.output_bias is None else w.output_bias)


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        (Shape(kind=Q8_0), 2e-2),
        (Shape(kind=F16), 2e-3),
        (Shape(kind=F16, post_norms=True), 2e-3),
        (Shape(kind=F16, by_mean=True, gated=False), 2e-3),
        (Shape(kind=F16, gated=False), 2e-3),
        (Shape(kind=F16, by_mean=True, parallel=True), 2e-3),
        (Shape(kind=F16, by_mean=True, parallel=True, gated=False), 2e-3),
    ],
    ids=["quantized", "floats", "norms after blocks", "layer norms", "no gate", "parallel", "parallel, no gate"],
)
def test_the_interpreter_of_a_step_computes_the_network(shape: Shape, error: float) -> None:
    made = make(shape)
    program = build(made.network, 6)
    interpreter = Interpreter(program, made.weights, 16, lambda position, _: [(0, position)])
    interpreter.begin(11, 0)
    interpreter.run(validate(program))
    wanted = float_step(made, 11)
    assert np.abs(interpreter.logits - wanted).max() < error * np.abs(wanted).max()


def test_layers_of_a_published_mixture_take_other_formats_by_turns() -> None:
    shape = Shape(kind=Q4_K, value_kind=Q6_K, down_kind=Q6_K, others_in=(0, 2), layers=4)
    made = make(shape)
    program = build(made.network, 6)
    interpreter = Interpreter(program, made.weights, 16, lambda position, _: [(0, position)])
    interpreter.begin(11, 0)
    interpreter.run(validate(program))
    wanted = float_step(made, 11)
    assert np.abs(interpreter.logits - wanted).max() < 3e-2 * np.abs(wanted).max()


def test_values_of_another_kind_are_multiplied_in_the_stage_of_queries_and_keys() -> None:
    """By CTAs of their own, as many as even out what is streamed."""
    mixed, alike = (build(network(LLAMA_1B, Q4_K, kind, layers=1), 132) for kind in (Q6_K, Q4_K))
    validate(mixed)
    assert len(mixed.stages) == len(alike.stages)
    (stage,) = (stage for stage in mixed.stages if stage.op is Op.PROJECT)
    kinds = [run.matrix.kind for ins in stage.instructions for run in ins.runs]
    assert {*kinds} == {Q4_K, Q6_K}
    values = [ins for ins in stage.instructions if any(run.matrix.kind is Q6_K for run in ins.runs)]
    assert len(values) == 32
    assert {ins.output.elements for ins in values if ins.output} == {16}


def test_more_kinds_than_ctas_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="2 kinds of matrices need as many CTAs, there are 1"):
        build(network((512, 1024, 8, 1, 64, 1, 1024), Q4_K, Q6_K), 1)


@pytest.mark.parametrize(
    ("sizes", "kind", "ctas", "most"),
    [
        (LLAMA_1B, Q6_K, 132, 1.03),
        (LLAMA_1B, Q6_K, 16, 1.001),
        (LLAMA_3B, Q6_K, 132, 1.03),
        (LLAMA_8B, Q4_K, 132, 1.03),
        (QWEN3_06B, Q8_0, 132, 1.03),
        (QWEN3_17B, Q4_K, 132, 1.03),
        (QWEN3_17B, Q4_K, 16, 1.001),
        (LLAMA_3B, Q6_K, 16, 1.01),
    ],
)
def test_published_sizes_are_dealt_out_evenly(sizes: tuple[int, ...], kind: object, ctas: int, most: float) -> None:
    program = build(network(sizes, kind, Q6_K, layers=1), ctas)
    validate(program)
    assert imbalance(program) < most + 0.03  # of one layer, the logits are a larger part


@pytest.mark.parametrize("sms", [8, 14, 16, 114, 132])
def test_any_number_of_sms_has_a_schedule_of_a_cta_each(sms: int) -> None:
    for sizes in (LLAMA_1B, QWEN3_06B):
        program = build(network(sizes, layers=1), sms)
        validate(program)
        assert program.ctas == sms
        assert max(len(stage.instructions) for stage in program.stages) <= sms
        assert imbalance(program) < 1.06


def test_fewer_sms_than_kv_heads_take_the_plan_of_many_launches() -> None:
    with pytest.raises(UnsupportedModelError, match="8 groups of heads need as many CTAs, there are 4"):
        build(network(LLAMA_1B, layers=1), 4)
    validate(build(network((512, 1024, 8, 4, 64, 1, 1024)), 4))


def test_a_word_that_is_packed_by_itself_has_every_field_in_its_place() -> None:
    numbers = list(range(1, 4 + len(NO_OPERANDS)))
    (word,) = np.frombuffer(WORD.pack(*numbers), WORDS)
    fields = [word[name].tolist() for name in WORDS.names or ()]
    flat = chain.from_iterable(chain.from_iterable(field) if isinstance(field, list) else (field,) for field in fields)
    assert list(flat) == numbers


def test_a_whole_model_is_proved_and_its_encoding_is_what_was_built() -> None:
    program = build(network(LLAMA_1B), 132)
    validate(program)
    words = encode(program, [Q6_K])
    assert WORDS.itemsize == 128
    assert words.shape == (83, 132)
    gates = words[words["op"] == Op.GATE]
    assert len(gates) == 16 * 132
    assert sorted(gates["rows"].tolist()) == 16 * 16 * [48] + 16 * 116 * [64]
    assert (gates["runs"]["segments"] == gates["rows"][:, None] * [1, 1, 0]).all()
    assert (gates["runs"]["address"][:, 0] == gates["first"].astype(np.uint64) * 1680).all()
    nothing = np.zeros((), WORDS["runs"].base)
    assert (gates["runs"][:, 2] == nothing).all()
    assert (words[words["op"] == Op.SAMPLE]["runs"] == nothing).all()
    assert (words[words["op"] == Op.EMBED]["runs"][:, 1:] == nothing).all()


def test_logits_that_do_not_fit_shared_memory_take_several_stages() -> None:
    program = build(network(LLAMA_3B, layers=1), 16)
    validate(program)
    logits = [stage for stage in program.stages if stage.op is Op.LOGITS]
    assert len(logits) == 6  # 8016 rows of three sums each
    assert [{ins.output is None for ins in stage.instructions} for stage in logits] == 5 * [{True}] + [{False}]


def test_what_travels_is_as_near_as_an_exact_scale_for_16_elements_brings_it() -> None:
    """Within 0.2%: a scale whose rounding kept the largest element from being 127 times it would cost 4%."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((1024, 16)) * np.exp(rng.standard_normal((1024, 1)))
    values = values.astype(np.float32)
    vector = Travelling(values.size)
    vector.write(0, values.reshape(-1), (values**2).reshape(-1), False, 0)
    scales = np.abs(values).max(axis=1, keepdims=True) / 127
    made = vector.staged(False).reshape(values.shape)
    ours, exact = (np.sqrt((((q - values) / scales) ** 2).mean()) for q in (made, np.rint(values / scales) * scales))
    assert ours < 1.002 * exact
    assert abs(vector.squares.sum(dtype=np.float64) / (values.astype(np.float64) ** 2).sum() - 1) < 1e-3


def test_halves_of_two_ctas_are_nearly_as_near_as_a_set_of_one() -> None:
    """Within 2%: without the quarters, the smaller half's second rounding would cost 11%."""
    values = np.random.default_rng(0).standard_normal((4096, 2, 8)).astype(np.float32)
    one, two = Travelling(values.size), Travelling(values.size)
    one.write(0, values.reshape(-1), values.reshape(-1), False, 0)
    for unit, own in enumerate(values.reshape(-1, 8)):
        two.write(8 * unit, own, own, False, 0)
    errors = [np.sqrt(((vector.staged(False) - values.reshape(-1)) ** 2).mean()) for vector in (one, two)]
    assert errors[1] < 1.02 * errors[0]
    two.quarter[:] = 2  # where an element lay is not known
    assert np.sqrt(((two.staged(False) - values.reshape(-1)) ** 2).mean()) > 1.1 * errors[0]


def test_rows_are_dealt_in_pairs_of_units_where_that_costs_nothing() -> None:
    assert {count for _, count in deal(256, 132)} == {0, 2}
    assert {count for _, count in deal(384, 132)} == {2, 3}
    assert [first for first, _ in deal(7, 3)] == [0, 3, 5]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dim": 288}, "288"),
        ({"ffn": 264}, "down0 has rows of 264"),
        ({"kind": F16, "value_kind": Q8_0, "joined": False}, "some in blocks and some not"),
    ],
)
def test_what_the_kernel_lacks_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        build(make(replace(Shape(), **change)).network, 6)
    with pytest.raises(UnsupportedModelError, match="2 groups of heads need as many CTAs, there are 1"):
        build(make(Shape()).network, 1)
