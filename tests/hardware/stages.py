"""What crosses between the stages of a decode step on a device, and what each stage should have made of what it read.

A step is run stage by stage, and every vector that is published is read back. On the host each stage is done again in
float64 from the device's own vectors (`follow`), so that nothing adds up: what is published has to be what the stage
makes, rounded to int8 where it is. `Off.beyond` is what half a step of that rounding does not explain.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from exact import Asked, Cached, Floats, Kept, Parts, Read, Way, by_sets
from interpreter import Travelling

from tegrad.llm.formats import PLAIN, SET
from tegrad.llm.network import Add, Attend, Convolve, Delta, Gate, InputGate, Logits, Project, Reader
from tegrad.llm.numerics import capped
from tegrad.llm.schedule import FLOAT_UNIT, QUANTIZED_UNIT, UNIT, Network, Op, Span, Stage, Vector


@dataclass(frozen=True)
class Handed:
    """A vector as it is read: its elements, by how much rounding may have moved each, and what its products are
    multiplied by, the factor of a norm."""

    read: Floats
    allowed: Floats | float = 0.0
    factor: float = 1.0


@dataclass
class Step:
    """The vectors of a step, each layer's: what the products of queries, keys and values read and made, what attention
    made, what gate and up read, what down reads; where layers have inputs of their own, what the gate of these reads
    and makes; then what the logits' product reads, and the logits."""

    qkv: list[Handed] = field(default_factory=list)
    products: list[Handed | None] = field(default_factory=list)
    """None of a layer that convolves in one launch, whose products stay with their CTA."""
    output: list[Handed] = field(default_factory=list)
    gate: list[Handed] = field(default_factory=list)
    down: list[Handed] = field(default_factory=list)
    input_gate: list[Handed] = field(default_factory=list)
    gated: list[Handed] = field(default_factory=list)
    logits: list[Handed] = field(default_factory=list)
    scores: list[Handed] = field(default_factory=list)

    def stream(self, handed: Handed, readers: Sequence[Reader]) -> None:
        """A vector of the residual stream, of which parallel blocks have two readers."""
        read = {Project: self.qkv, Gate: self.gate, InputGate: self.input_gate, Logits: self.logits}
        for reader in readers:
            read[type(reader)].append(handed)


@dataclass(frozen=True)
class Off:
    """How far a vector is from what its stage should have made, over its root mean square."""

    rounded: float
    """Root mean square."""
    beyond: float
    """The largest difference beyond half a step of int8."""

    @classmethod
    def of(cls, handed: Handed, exact: Floats) -> Off:
        """A vector against the exact one."""
        difference, size = np.abs(handed.read - exact), np.sqrt((exact**2).mean())
        over = np.maximum(difference - handed.allowed, 0).max()
        return cls(float(np.sqrt((difference**2).mean()) / size), float(over / size))


def get(device: Any, buffer: Any, size: int, kind: Any) -> NDArray[Any]:
    """The first `size` bytes of a buffer."""
    out = bytearray(size)
    device.allocator._copyout(memoryview(out), buffer.offset(0, size))
    return np.frombuffer(out, kind)


# --- on the device ----------------------------------------------------------------------------------------------------


def run(launch: Any, values: tuple[int, ...]) -> None:
    """Run one launch alone and wait for it."""
    launch.program(*launch.buffers, global_size=launch.grid, local_size=launch.block, vals=values, wait=True)


def many(steps: Any, plan: Any, place: Any) -> Step:
    """The step of the first token in many launches, one after the other."""
    device, model, config = steps.device, steps.model, steps.config
    arch, layers, step = config.arch, config.layers, Step()

    def vector(buffers: Any, kind: Any, factor: float = 1.0, norm: Floats | float = 1.0) -> Handed:
        size = buffers.size
        if kind in PLAIN:
            return Handed(get(device, buffers.x, 4 * size, np.float32).astype(np.float64) * norm, 0.0, factor)
        scale = np.repeat(get(device, buffers.s, 4 * -(-size // SET), np.float32).astype(np.float64), SET)[:size]
        return Handed(get(device, buffers.q, size, np.int8) * scale, scale / 2, factor)

    def stream(at: int) -> Handed:
        """What reads the stream as the launches after layer `at` / 2 do."""
        if at == 2 * layers:
            reader, weight = model.output, model.vectors[arch.output_norm.name]
        else:
            layer = model.layers[at // 2]
            reader = layer.matrices[arch.up.name] if at % 2 else layer.qkv[0]
            weight = layer.vectors[(arch.ffn_norm if at % 2 else arch.attn_norm).name]
        x = get(device, plan._x.x, 4 * config.dim, np.float32).astype(np.float64)
        norm = get(device, weight, 4 * config.dim, np.float32).astype(np.float64)
        return vector(plan._x, reader.kind, float(1 / np.sqrt((x * x).mean() + config.eps)), norm)

    steps.begin(place)
    handed = 0
    for at, (kind, layer, launch) in enumerate(plan.named, 1):
        run(launch, launch.values)
        matrices = model.layers[layer or 0].matrices
        if kind in ("embed", "output", "down"):
            net, block = config.network, config.network.blocks[layer or 0]
            after = next((op for op in block if isinstance(op, Add) and op.role == kind), None)
            step.stream(stream(handed), net.beside(*net.reader(layer or 0, after)))
            handed += 1
        elif kind == "qkv":
            size = 4 * sum(matrix.rows for matrix in model.layers[layer].qkv)
            step.products.append(Handed(get(device, plan._qkv, size, np.float32).astype(np.float64)))
        elif kind in ("attention", "convolution", "delta"):
            mixed = next(op for op in config.network.blocks[layer] if isinstance(op, Add) and op.reads == "mixed")
            step.output.append(vector(plan._mixed, matrices[mixed.matrix.name].kind))
        elif kind == "gate" and plan.named[at].kind != kind:  # of two, the last
            step.down.append(vector(plan._hidden, matrices[arch.down.name].kind))
    step.scores.append(Handed(get(device, plan.logits, 4 * config.vocab, np.float32).astype(np.float64)))
    return step


def one(steps: Any, plan: Any, place: Any) -> Step:
    """The step of the first token in one launch, once for each of its stages: up to there, in a workspace as new."""
    device, config, step = steps.device, steps.config, Step()
    program, layout = plan.kernel.program, plan.kernel.layout
    nothing, (*before, launch) = bytes(plan.kernel.space_bytes), plan.launches
    kinds = [(stage.op, stage.layer) for stage in program.stages]
    for count, stage in enumerate(program.stages, 1):
        if stage.op in (Op.SAMPLE, Op.APART) or kinds[count : count + 1] == [(stage.op, stage.layer)]:
            continue  # the vector is not whole yet
        steps.begin(place)
        device.allocator._copyin(plan._space, memoryview(bytearray(nothing)))
        for other in before:
            run(other, other.values)
        run(launch, (count, *launch.values[1:]))
        if stage.op is Op.LOGITS:
            step.scores.append(Handed(get(device, plan.logits, 4 * config.vocab, np.float32).astype(np.float64)))
            continue
        if stage.op is Op.CONVOLVE:
            step.products.append(None)
        vector, first, size = _written(program.network, stage)
        unit = FLOAT_UNIT if stage.floats else QUANTIZED_UNIT
        where = layout.vectors[vector] + first // UNIT * unit
        data = get(device, plan._space.offset(where), -(-size // UNIT) * unit, np.uint8)
        arrived = Travelling.arrived(size, data, stage.floats)
        if vector is Vector.X:
            squares, does = float(arrived.squares.astype(np.float64).sum()), stage.does
            handed = _handed(arrived, stage.floats, 1 / np.sqrt(squares / size + config.eps))
            reader = config.network.reader(stage.layer, does if isinstance(does, Add) else None)
            step.stream(handed, config.network.beside(*reader))
        else:
            hidden = step.gated if isinstance(stage.does, InputGate) else step.down
            made = {Vector.MIXED: step.output, Vector.HIDDEN: hidden}.get(vector, step.products)
            made.append(_handed(arrived, stage.floats))
    return step


def _written(network: Network, stage: Stage) -> Span:
    """What all CTAs write of a vector in a stage."""
    vector = next(ins.output.vector for ins in stage.instructions if ins.output is not None)
    if vector in (Vector.QKV, Vector.SHARED_QKV):
        return network.qkv_span(stage.layer)
    return Span(vector, 0, network.written(stage, vector))


def _handed(arrived: Travelling, floats: bool, factor: float = 1.0) -> Handed:
    """A vector that travelled between CTAs. Where halves of a set have scales of their own, the smaller half is known
    to a quarter of its step, and rounded once more, to the larger scale, by whoever reads it."""
    if floats:
        return Handed(arrived.staged(True), 0.0, factor)
    own = arrived.scale.astype(np.float64).reshape(-1, SET // UNIT)
    larger = own.max(axis=1, keepdims=True)
    allowed = np.where(own == larger, own / 2, own / 8 + larger / 2)
    return Handed(arrived.staged(False), np.repeat(allowed.reshape(-1), UNIT), factor)


# --- on the host ------------------------------------------------------------------------------------------------------


def follow(parts: Parts, step: Step, token: int, cached: Cached, place: Any) -> Way[dict[str, Sequence[Off]]]:
    """How far each vector of a step is from what its stage makes of what the device had before it. Layers' own inputs
    are not read back: they count as what they should be."""
    found: dict[str, list[Off]] = {name: [] for name in Step.__dataclass_fields__}

    def held(name: str, at: int, exact: Floats) -> Handed:
        handed: Handed = getattr(step, name)[at]
        found[name].append(Off.of(handed, exact))
        return handed

    def rounded(role: Read, name: str, x: Floats) -> Floats:
        return by_sets(role, x) if parts.weights.packed(name) else x

    stream = parts.embedding([token])[0]
    inputs = yield from parts.inputs([token], stream[None], rounded)
    read: dict[str, Floats] = {}  # what `Attend` and `Add` read, as the device had it
    new: dict[int, Kept] = {}
    for at, op, part in parts.operations():
        match op:
            case Project():
                x = held("qkv", at, parts.centered(stream) * part.norm)
                products = (yield Asked(part.names, x.read)) * x.factor + part.bias
                read["qkv"] = products if step.products[at] is None else held("products", at, products).read
            case Attend():
                qkv, kept = read["qkv"][None], parts.network.kept_by(at)
                if kept == at:
                    new[at] = parts.kept(op, at, part, qkv, place.stored, place.depth)
                mixed = parts.attention(op, at, part, qkv, new[kept], *cached(kept), place.depth)[0]
                read["mixed"] = held("output", at, mixed).read
            case Convolve():
                made = parts.convolution(op, part, read["qkv"][None], cached(at)[0])[0]
                read["mixed"] = held("output", at, made).read
            case Delta():
                made = parts.delta(op, part, read["qkv"][None], *cached(at))[0]
                read["mixed"] = held("output", at, made).read
            case Gate():
                x = held("gate", at, parts.centered(stream) * part.norm)
                read["hidden"] = held("down", at, parts.gated(op, (yield Asked(part.names, x.read)) * x.factor)).read
            case InputGate():
                x = held("input_gate", at, stream)
                made = parts.input_gated(op, (yield Asked(part.names, x.read)), inputs[at][0])
                read["gated"] = held("gated", at, made).read
            case Add():
                stream = (stream + parts.added(part, (yield Asked(part.names, read[op.reads])))) * part.scale
    x = held("logits", 0, parts.centered(stream) * parts.output_norm)
    held("scores", 0, capped((yield Asked((parts.logits,), x.read)) * x.factor, parts.network.logits.cap))
    return {name: layers for name, layers in found.items() if layers}
