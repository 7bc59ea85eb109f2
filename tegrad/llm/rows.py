"""A model's layers for many tokens at once, but for what mixes tokens: what prompts and batches of sequences share.

A row is a token's activations. The residual stream `x`, `qkv` and all sums are float32; what the tensor cores read is
halves. How many rows there are lies on the device (`struct Chunk` of kernels/chunk.cuh); blocks beyond do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np

from tegrad.llm import inputs
from tegrad.llm.closing import Closing
from tegrad.llm.config import Config, tensor_name
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.flash import HEAD_PARTS_MULTIPLE, HELD_HEAD_DIM
from tegrad.llm.formats import F32, BlockType
from tegrad.llm.gemm import Gemm, Operands, TilePicker, pick_quickest, scratch_bound
from tegrad.llm.gguf import Gguf
from tegrad.llm.macros import ACTIVATIONS, NORMS, number
from tegrad.llm.network import (
    Add,
    Attend,
    Convolving,
    Delta,
    Gate,
    InputGate,
    Logits,
    Mixer,
    Network,
    NormKind,
    Project,
    Reader,
    Spec,
    present,
)
from tegrad.llm.packed import PackedMatrix, PackedModel
from tegrad.llm.programs import Programs
from tegrad.llm.turns import Turns
from tegrad.llm.workspace import Workspace
from tegrad.nv.gpu import Buffer, Gpu
from tegrad.nv.program import LaunchError
from tegrad.nv.replay import Launch

NORM_THREADS: Final = 256
TIMES_THREADS: Final = 256
"""Of kernels/times_rows.cu."""
INPUT_GATE_THREADS: Final = 128
"""Of kernels/input_gate_rows.cu."""
FLOATS_THREADS, FLOATS_EACH = 256, 8
"""Of kernels/floats_rows.cu; tokens, and rows, of a block."""
FEW_ROWS: Final = 256
"""Rows of a matrix of F32 that are multiplied as they are, at most: those that beta and decay of a delta net are of."""
COUNT_AT: Final = 4
"""Where `count` lies in a Chunk."""


class Rows(Closing):
    """Room for up to `most` tokens of a model and for `positions` of its rotary embedding, and launches on them.

    Launches of up to `overlap` tokens may begin before the ones before them have ended, if the recording's dependency
    lets them (kernels/overlap.cuh), but for what follows the logits. The model stays the caller's.

    UnsupportedModelError, MemoryError.
    """

    def __init__(
        self, model: PackedModel, most: int, positions: int, pick: TilePicker = pick_quickest, *, overlap: int = 0
    ) -> None:
        self.model, self.config, self.device, self.most = model, model.config, model.device, most
        self.network = self.config.network
        self.programs = Programs(model.device)
        self._pick, self._workspace, self._overlap = pick, Workspace(model.device), overlap
        config, take = self.config, self._workspace.take
        _check_heads(config)
        if model.large:
            raise UnsupportedModelError(
                "a matrix has weights of 255 or more, which products for prompts and batches do not hold: convert the "
                "model to F16"
            )
        with self._closed_on_error():
            self.x = take(4 * most * config.dim)
            self.normed = take(2 * most * config.dim)
            self.qkv = take(4 * most * config.projected)
            self.mixed = take(2 * most * config.mixed)
            self._hidden = take(2 * most * max(config.ffn, config.layer_input))
            self._up = take(4 * most * config.ffn) if any(map(self.gates_apart, range(config.layers))) else self._hidden
            if self.network.embed.inputs is not None:
                self._projected = take(inputs.bytes_of(model, most))
                self._layer_inputs = take(inputs.bytes_of(model, most))
                self._gated_input = take(4 * most * config.layer_input)
                self._ones = self._workspace.put(np.ones(config.dim, np.float32))
            # What is normalized before it is added to x.
            self._added = take(4 * most * config.dim) if self.network.last_add.norm is not None else self.x
            scratch, counters = scratch_bound(model.device)
            self._scratch, self._arrived = take(scratch), self._workspace.put(bytes(counters))
            self.turns = Turns(self._workspace, positions, model.divisors)
            self._zeros = self._workspace.put(np.zeros(config.dim, np.float32))

    def close(self) -> None:
        """Free the rows. Closing twice is harmless."""
        self._workspace.close()

    def overlaps(self, tokens: int) -> int:
        """Whether launches of up to so many tokens begin early, as a macro."""
        return int(tokens <= self._overlap)

    def inputs(self, tokens: int, chunk: Buffer, source: tuple[Buffer, ...]) -> list[Launch]:
        """Per-layer inputs of up to `tokens` rows of x; `source` are sequences' states, or a chunk's tokens and the
        chunk. Nothing in most models."""
        matrix = self.model.inputs_matrix
        if matrix is None:
            return []
        halves = self._normed(self._zeros, "none", tokens, chunk)
        product = self.product(matrix, self.normed, self._projected, tokens, chunk)
        made = inputs.launch(
            self.model, self.programs, self._projected, self._layer_inputs, source, tokens, most=self.most,
            overlap=self.overlaps(tokens),
        )  # fmt: skip
        return [halves, product, made]

    def layer(self, at: int, tokens: int, chunk: Buffer, mix: Callable[[int, Mixer], Sequence[Launch]]) -> list[Launch]:
        """A layer of up to `tokens` rows of x; `mix` takes the layer's `qkv` to `mixed`."""
        launches: list[Launch] = []
        for op in self.network.blocks[at]:
            match op:
                case Project():
                    launches += self._project(at, op, tokens, chunk)
                case Attend() | Convolving():
                    launches += mix(at, op)
                case Gate():
                    launches += self._gated(at, op, tokens, chunk)
                case InputGate():
                    launches += self._input_gated(at, op, tokens, chunk)
                case Add():
                    source = self.mixed if op.reads == "mixed" else self._hidden
                    (matrix,) = self.model.matrices_of(at, op)
                    apart = op.norm is not None
                    y = self._added if apart else self.x
                    launches.append(self.product(matrix, source, y, tokens, chunk, add=not apart))
        return launches

    def _project(self, at: int, op: Project, tokens: int, chunk: Buffer) -> list[Launch]:
        launches, first, matrices = self._norm_once(at, op, tokens, chunk), 0, self.model.matrices_of(at, op)
        stride = sum(matrix.rows for matrix in matrices)
        for matrix in matrices:
            y = self.qkv.offset(4 * first, self.qkv.size - 4 * first)
            few = matrix.kind is F32 and isinstance(self.network.mixers[at], Delta)
            product = self._floats if few else self.product
            launches.append(product(matrix, self.normed, y, tokens, chunk, stride=stride))
            first += matrix.rows
        return launches

    def _floats(
        self, matrix: PackedMatrix, x: Buffer, y: Buffer, tokens: int, chunk: Buffer, *, stride: int
    ) -> Launch:  # fmt: skip
        """y of x and a matrix of F32."""
        program = self.programs(
            "floats_rows", buffers=4, ROWS=matrix.rows, COLUMNS=matrix.columns, STRIDE=stride,
            OVERLAP=self.overlaps(tokens),
        )  # fmt: skip
        buffers = (y, x, matrix.buffer, chunk.offset(COUNT_AT, 4))
        grid = (-(-tokens // FLOATS_EACH), -(-matrix.rows // FLOATS_EACH), 1)
        return Launch(program, buffers, grid, (FLOATS_THREADS, 1, 1))

    def _gated(self, at: int, op: Gate, tokens: int, chunk: Buffer) -> list[Launch]:
        gate, *ups = self.model.matrices_of(at, op)
        launches, x, hidden = self._norm_once(at, op, tokens, chunk), self.normed, self._hidden
        form: dict[str, Any] = {"activation": op.activation, "half_out": True}
        if not self.gates_apart(at):
            second = ups[0] if ups else None
            return [*launches, self.product(gate, x, hidden, tokens, chunk, second=second, **form)]
        program = self.programs("times_rows", buffers=3, COLUMNS=gate.rows, OVERLAP=self.overlaps(tokens))
        grid, buffers = (tokens, -(-gate.rows // TIMES_THREADS), 1), (hidden, self._up, chunk.offset(COUNT_AT, 4))
        return [
            *launches,
            self.product(ups[0], x, self._up, tokens, chunk),
            self.product(gate, x, hidden, tokens, chunk, **form),
            Launch(program, buffers, grid, (TIMES_THREADS, 1, 1)),
        ]

    def _input_gated(self, at: int, op: InputGate, tokens: int, chunk: Buffer) -> list[Launch]:
        """Into `_hidden`. The product reads the stream divided by its root mean square, which halves hold; the kernel
        after it multiplies by that again."""
        config, (matrix,) = self.config, self.model.matrices_of(at, op)
        own = 4 * self.most * config.layer_input
        program = self.programs(
            "input_gate_rows", buffers=5, SIZE=config.layer_input, COLUMNS=config.dim, EPS=number(config.eps),
            ACTIVATION=ACTIVATIONS[op.activation], THREADS=INPUT_GATE_THREADS, OVERLAP=self.overlaps(tokens),
        )  # fmt: skip
        own_input = self._layer_inputs.offset(at * own, own)
        buffers = self._hidden, self._gated_input, own_input, self.x, chunk.offset(COUNT_AT, 4)
        return [
            self.norm(at, op, tokens, chunk),
            self.product(matrix, self.normed, self._gated_input, tokens, chunk),
            Launch(program, buffers, (tokens, 1, 1), (INPUT_GATE_THREADS, 1, 1)),
        ]

    def gates_apart(self, at: int) -> bool:
        """Whether a layer's gate and up are products of their own: in different formats, or with biases."""
        gate, *ups = matrices = self.model.matrices_of(at, self.network.gate)
        return any(up.kind is not gate.kind for up in ups) or (bool(ups) and any(one.bias for one in matrices))

    def _norm_once(self, at: int, op: Project | Gate, tokens: int, chunk: Buffer) -> list[Launch]:
        """`normed` of x for an operation of a layer, unless one before it has made that."""
        return [self.norm(at, op, tokens, chunk)] if op is self.network.alike(at, op)[0] else []

    def logits(self, y: Buffer, tokens: int, chunk: Buffer, *, last: Buffer | None = None) -> list[Launch]:
        """Logits of all rows; or of the last one alone, where `last` is a Chunk with a count of 1."""
        cap = self.network.logits.cap
        norm = self.norm(self.config.layers, self.network.logits, tokens, chunk, last=last is not None)
        form: dict[str, Any] = {} if cap is None else {"activation": "cap", "cap": cap}
        # Who samples does not wait by itself.
        product = self.product(
            self.model.output, self.normed, y, tokens, last or chunk, overlap=2 * self.overlaps(tokens), **form
        )
        return [norm, product]

    def norm(self, at: int, op: Reader, tokens: int, chunk: Buffer, *, last: bool = False) -> Launch:
        """`normed` of x for an operation of a layer, or its first row of the last row of x.

        Where the product before has a norm of its own, it is added to x now.
        """
        writer = self.network.writer(at, None if isinstance(op, Logits) else op)
        if isinstance(op, InputGate):
            return self._normed(self._ones, "rms", tokens, chunk, writer=writer)
        name, vectors = None if op.norm is None else op.norm.spec.name, self.model.vectors_of(at, op)
        weight, kind = self._zeros if name is None else vectors[name], op.norm.kind if op.norm else "none"
        bias = vectors.get(f"{name}.bias")
        return self._normed(weight, kind, tokens, chunk, bias=bias, writer=writer, last=last)

    def _normed(
        self, weight: Buffer, kind: NormKind | Literal["none"], tokens: int, chunk: Buffer, *,
        bias: Buffer | None = None, writer: tuple[int, Add] | None = None, last: bool = False,
    ) -> Launch:  # fmt: skip
        """`normed` of x after what was written to it last is added, if that has a norm."""
        config, buffers = self.config, [self.normed, self.x, weight, bias or self._zeros, chunk]
        defines: dict[str, Any] = {"COLUMNS": config.dim, "NORM": NORMS[kind], "EPS": number(config.eps)}
        if writer is not None and (own := writer[1].norm) is not None:
            if own.kind != "rms":
                raise UnsupportedModelError("a norm after a block is run with root mean squares alone")
            buffers += [self._added, self.model.layers[writer[0]].vectors[own.spec.name]]
            defines["JOIN"] = 1 if writer[1].scale is None else 2
        program = self.programs(
            "norm_rows", buffers=len(buffers), LAST=last, THREADS=NORM_THREADS, OVERLAP=self.overlaps(tokens), **defines
        )
        return Launch(program, tuple(buffers), (1 if last else tokens, 1, 1), (NORM_THREADS, 1, 1))

    def product(
        self,
        matrix: PackedMatrix,
        x: Buffer,
        y: Buffer,
        tokens: int,
        chunk: Buffer,
        *,
        second: PackedMatrix | None = None,
        overlap: int | None = None,
        **form: Any,
    ) -> Launch:
        """y of x and a matrix, or of gate and up; `form` are fields of a Gemm."""
        _check_kind(matrix.kind)
        bias = matrix.bias
        gemm = Gemm(matrix.kind, matrix.rows, matrix.columns, gated=second is not None, bias=bias is not None, **form)
        tile = self._pick(self.device, gemm, tokens)
        scratch, counters = tile.scratch_bytes(gemm, tokens), 4 * tile.counters(gemm, tokens)
        if scratch > self._scratch.size or counters > self._arrived.size:
            raise LaunchError(f"{tile} splits more blocks than partial sums are kept for: split fewer")
        operands = Operands(
            y, x, matrix.buffer, chunk.offset(COUNT_AT, 4), second.buffer if second else None, bias, self._scratch,
            self._arrived,
        )  # fmt: skip
        return tile.launch(self.programs, gemm, operands, tokens, self.overlaps(tokens) if overlap is None else overlap)


def check(file: Gguf) -> None:
    """UnsupportedModelError for a file whose prompts and batches are not run, as far as its header tells."""
    own = Config.read(file)
    config = own.filled()
    net = config.network
    looked_up = present(net.embed.table, net.embed.positions, net.embed.inputs.table if net.embed.inputs else None)
    _check_heads(config)
    for spec, layer in own.specs():
        if spec.multiplied and spec not in looked_up:
            there = spec if spec != own.arch.output or tensor_name(spec) in file.tensors else net.embed.table
            kind, (rows, columns) = own.check(file, there, layer).type, map(config.at(layer).size, spec.shape)
            if kind is F32 and rows <= FEW_ROWS and _by_delta(net, layer, spec):
                continue
            _check_kind(kind)
            Gemm(kind, rows, columns)  # which refuses others


def _by_delta(net: Network, layer: int | None, spec: Spec) -> bool:
    """Whether a delta net reads what a matrix makes."""
    return layer is not None and isinstance(net.mixers[layer], Delta) and spec in net.project(layer).matrices


def _check_heads(config: Config) -> None:
    if config.value_dim != config.head_dim:
        raise UnsupportedModelError("heads whose keys and values differ in width are not run: choose another model")
    if config.head_dim > HELD_HEAD_DIM and config.head_dim % HEAD_PARTS_MULTIPLE:
        raise UnsupportedModelError(
            f"prompts of heads of {config.head_dim} elements are not run: beyond {HELD_HEAD_DIM}, multiples of "
            f"{HEAD_PARTS_MULTIPLE} are"
        )


def _check_kind(kind: BlockType) -> None:
    if kind is F32:
        raise UnsupportedModelError(
            "prompts and batches of F32 matrices are not run, as products of halves are less exact: convert the "
            "model to F16"
        )


def floats(device: Gpu, buffer: Buffer, count: int) -> np.ndarray[Any, Any]:
    """The first float32 values of a buffer, once everything submitted is done."""
    device.synchronize()
    return np.frombuffer(device.download(buffer.offset(0, 4 * count), 4 * count), np.float32)
