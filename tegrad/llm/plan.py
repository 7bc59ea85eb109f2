"""The many-kernel plan of one decode step: five launches a layer, each of which quantizes what the next one reads, one
more where gate and up differ in format, and two more where layers have inputs of their own.

Embedding; then per layer q, k and v; attention, or what stands in its place; output + residual; gate, up and
activation; down + residual; then the logits. The residual stream is float32. The input of a packed matrix is int8 with
a scale per 16, written by whoever computes it, with the norm's weight in it; the norm's factor comes from partial sums
of squares. Matrices of floats read float32 and norm it themselves.

A layer norm before packed matrices is a launch of its own (kernels/layer_norm.cu), since it needs the mean first.

Where a norm stands after a product, before it is added to the stream, whoever reads the stream next adds it: each CTA
for itself (`Product.joins`), but before the logits, whose CTAs are many, and before gate and up in two formats, by a
launch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from tegrad.llm import convolution, embedding, inputs
from tegrad.llm.attention import Attention
from tegrad.llm.cache import KvCache
from tegrad.llm.chips import Role
from tegrad.llm.closing import Closing
from tegrad.llm.formats import PLAIN, SET
from tegrad.llm.launch_config import launch_config
from tegrad.llm.macros import Activation, Norm
from tegrad.llm.matvec import BEST_ROWS, LaunchConfig, Product
from tegrad.llm.network import Add, Attend, Convolve, Delta, Gate, InputGate, Op, Project, Reader
from tegrad.llm.packed import PackedMatrix, PackedModel, parts
from tegrad.llm.programs import Programs
from tegrad.llm.state import LOGITS_SPEC, States
from tegrad.llm.turns import Turns
from tegrad.llm.workspace import ALIGN, Workspace
from tegrad.nv.gpu import Buffer
from tegrad.nv.replay import Launch

JOIN_THREADS: Final = 512
LAYER_NORM_THREADS: Final = 512


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector that crosses a kernel boundary: in float32, and as int8 with scales and perhaps sums of squares."""

    size: int
    x: Buffer
    q: Buffer
    s: Buffer
    ss: Buffer


def vector_in(workspace: Workspace, size: int) -> Vector:
    """A vector in all its forms, in a buffer of its own."""
    sizes = [-(-bytes_ // ALIGN) * ALIGN for bytes_ in (4 * size, size, 4 * -(-size // SET), 4 * -(-size // SET))]
    whole = workspace.take(sum(sizes))
    starts = np.cumsum([0, *sizes]).tolist()
    x, q, s, ss = (whole.offset(start, size) for start, size in zip(starts, sizes, strict=False))
    return Vector(size, x, q, s, ss)


class _GivenNorm(NamedTuple):
    kind: Norm
    weight: Buffer
    bias: Buffer


class _Waiting(NamedTuple):
    """A product that is still to be added to the stream: the weight of its norm, how many sums of squares it has, and
    whether behind the weight stands what the stream is then multiplied by."""

    norm: Buffer
    ss_parts: int
    scaled: bool


class Named(NamedTuple):
    """A launch, what it is, and of which layer."""

    kind: str
    layer: int | None
    launch: Launch


class DecodePlan(Closing):
    """One decode step of the sequence in slot 0 of `states`, as launches. Close it when no step is in flight.

    `launches` end with the logits: `logits` float32 (vocab), and of every 32 of them the largest, `best`, and its row,
    `best_row`. Sampling and publishing follow. With `overlap` a launch may begin before the one before it has ended,
    if the recording's dependency lets it (kernels/overlap.cuh); what follows begins after it. Everything given stays
    the caller's; room for logits and the angles of positions are the plan's own unless given. UnsupportedModelError,
    MemoryError.
    """

    def __init__(
        self, model: PackedModel, states: States, cache: KvCache, *, overlap: bool = False,
        logits: Buffer | None = None, turns: Turns | None = None,
    ) -> None:  # fmt: skip
        self.model, self.config, self.device = model, model.config, model.device
        self._network = self.config.network
        self._overlap = int(overlap)
        self._states, self._cache = states, cache
        self._workspace = Workspace(self.device)
        self._programs = Programs(self.device)
        self._made: dict[tuple[Product, LaunchConfig], Any] = {}
        self.products: list[tuple[Role, Product]] = []
        """Each product's role, in the order of their launches."""
        self._ss_parts = 0
        with self._closed_on_error():
            self.logits = logits or self._workspace.take(4 * self.config.vocab, LOGITS_SPEC)
            self._turns = turns or Turns(self._workspace, cache.positions, model.divisors)
            self._make()

    def close(self) -> None:
        """Free the plan's buffers. Closing twice is harmless."""
        self._workspace.close()

    def _make(self) -> None:
        config, workspace = self.config, self._workspace
        self._x = vector_in(workspace, config.dim)
        self._waiting: _Waiting | None = None
        if any(isinstance(op, Add) and op.norm is not None for op in self._network.blocks[0]):
            self._y = vector_in(workspace, config.dim)
            self._joined = vector_in(workspace, config.dim)  # in turns with x
        if self._network.by_mean:
            self._normed = vector_in(workspace, config.dim)
        self._mixed = vector_in(workspace, config.mixed)
        self._hidden = vector_in(workspace, config.ffn)
        self._qkv = workspace.take(4 * config.projected)
        inputs_there = self._network.embed.inputs is not None
        if inputs_there:
            self._layer_inputs = workspace.take(inputs.bytes_of(self.model, 1))
            self._gated_input = vector_in(workspace, config.layer_input)
        widths = (config.dim, config.ffn, config.vocab, config.head_dim, config.projected)
        self._zeros = workspace.put(np.zeros(max(widths), np.float32))
        self._ones = self._zeros
        if self._network.project(0).norm is None or self._network.gate.norm is None or inputs_there:
            self._ones = workspace.put(np.ones(config.dim, np.float32))
        entries = -(-config.vocab // BEST_ROWS)
        self.best, self.best_row = workspace.take(4 * entries), workspace.take(4 * entries)
        self._make_attention()
        self.named = self._begin()
        """The launches with their names."""
        for at, op in self._network.operations():
            self.named += self._operation(at, op)
        self.named += self._logits()
        self.launches: tuple[Launch, ...] = tuple(named.launch for named in self.named)

    # --- what is read by what ---------------------------------------------------------------------------------------

    def _reads_q(self, matrices: Sequence[PackedMatrix]) -> bool:
        return any(matrix.kind not in PLAIN for matrix in matrices)

    def _stream_q(self, readers: Sequence[PackedMatrix]) -> bool:
        """Whether who writes the stream also quantizes it for those that read it."""
        return self._reads_q(readers) and not self._network.by_mean

    def _reads_x(self, matrices: Sequence[PackedMatrix]) -> bool:
        return any(matrix.kind in PLAIN for matrix in matrices)

    def _readers(self, at: int, op: Op) -> list[PackedMatrix]:
        """What multiplies what an operation of a layer makes."""
        readers = self._network.readers(at, op)
        return [matrix for layer, reader in readers for matrix in self.model.matrices_of(layer, reader)]

    def _read_by(self, at: int, op: Op | None) -> tuple[Sequence[PackedMatrix], Buffer]:
        """What reads the residual stream after an operation of layer `at`, or after the embedding (0, None); and the
        weight of its norm."""
        at, reader = self._network.reader(at, op)
        return self.model.matrices_of(at, reader), self._norm(at, reader).weight

    # --- launches ---------------------------------------------------------------------------------------------------

    def _embed(self) -> Launch:
        matrices, norm = self._read_by(0, None)
        wants_q, x = self._stream_q(matrices), self._x
        more, defines = [norm, x.q, x.s, x.ss] if wants_q else [], dict[str, int]()
        if wants_q:
            # Sums of as many rows as the down products make, so that the same kernel reads them in every layer.
            last = self._network.last_add
            (down,) = self.model.matrices_of(0, last)
            added = self._residual(down, self._readers(0, last)) if last.norm is None else self._apart(down)
            rows = self._launch_config(last.role, added).cta_rows
            defines["SUM"] = min(rows, BEST_ROWS)
            self._ss_parts = -(-self.config.dim // min(rows, BEST_ROWS))
        return embedding.launch(
            self.model, self._programs, self._states.states, x.x, more=more, OUT_Q=wants_q, OVERLAP=self._overlap,
            **defines,
        )  # fmt: skip

    def _begin(self) -> list[Named]:
        """The embedding, then the per-layer inputs. Where their matrix is packed, the token is embedded twice:
        quantized without a norm for them, then with the first norm's weight for layer 0."""
        embed, matrix, x = Named("embed", None, self._embed()), self.model.inputs_matrix, self._x
        if matrix is None:
            return [embed]
        product = Product(parts((matrix,)), matrix.columns, out_x=True)
        projected = self._workspace.take(inputs.bytes_of(self.model, 1))
        made = inputs.launch(
            self.model, self._programs, projected, self._layer_inputs, (self._states.states,), 1, most=1,
            overlap=self._overlap,
        )  # fmt: skip
        launches = [self._launch("down", product, (matrix,), x, {"out": projected}), made]
        named = [Named("inputs", None, launch) for launch in launches]
        if not self._reads_q((matrix,)):
            return [embed, *named]
        more = (self._ones, x.q, x.s, x.ss)
        plain = embedding.launch(
            self.model, self._programs, self._states.states, x.x, more=more, OUT_Q=True, OVERLAP=self._overlap
        )
        return [Named("embed", None, plain), *named, embed]

    def _operation(self, at: int, op: Op) -> list[Named]:
        match op:
            case Project():
                return self._product(at, op, self._qkv)
            case Attend():
                return [Named(op.role, at, self._attention_launch(at, op))]
            case Convolve() | Delta():
                return [Named(op.role, at, self._instead(at, op))]
            case Gate():
                return self._gated(at, op)
            case InputGate():
                gated, readers = self._layer_input(at), self._readers(at, op)
                return self._product(at, op, gated, times=True, activation=op.activation, readers=readers)
            case Add():
                (matrix,), source = self.model.matrices_of(at, op), self._read(at, op)
                if op.norm is not None:
                    norm, scaled = self.model.layers[at].vectors[op.norm.spec.name], op.scale is not None
                    return [Named(op.role, at, self._set_apart(op.role, matrix, source, norm, scaled=scaled))]
                return [Named(op.role, at, self._add(op.role, matrix, source, *self._read_by(at, op)))]

    def _read(self, at: int, op: Add) -> Vector:
        """What is multiplied before it is added."""
        if op.reads == "gated":
            return self._layer_input(at)
        return self._mixed if op.reads == "mixed" else self._hidden

    def _layer_input(self, at: int) -> Vector:
        """A layer's own input, which its gate's product overwrites."""
        size = 4 * self.config.layer_input
        return replace(self._gated_input, x=self._layer_inputs.offset(size * at, size))

    def _gated(self, at: int, op: Gate) -> list[Named]:
        """One launch; or two for gate and up in different formats, the second of which multiplies by what the first
        left."""
        gate, *ups = matrices = self.model.matrices_of(at, op)
        readers = self._readers(at, op)
        if all(up.kind is gate.kind for up in ups):
            gated = op.gate is not None
            return self._product(at, op, self._hidden, gated=gated, activation=op.activation, readers=readers)
        before = list[Named]()
        if self._waiting is not None:
            before.append(Named("join", at, self._join(self._waiting, matrices, self._norm(at, op).weight)))
        up = self._product(at, op, self._hidden, matrices=ups)
        made = self._product(
            at, op, self._hidden, matrices=(gate,), times=True, activation=op.activation, readers=readers
        )
        return [*before, *up, *made]

    def _norm(self, at: int, reader: Reader) -> _GivenNorm:
        """A reader's norm with its vectors: ones where there is no norm, zeros where it has no bias."""
        if reader.norm is None:
            return _GivenNorm("none", self._ones, self._ones)
        found, name = self.model.vectors_of(at, reader), reader.norm.spec.name
        return _GivenNorm(reader.norm.kind, found[name], found.get(f"{name}.bias", self._zeros))

    def _product(
        self,
        at: int,
        reader: Reader,
        target: Vector | Buffer,
        *,
        matrices: Sequence[PackedMatrix] = (),
        gated: bool = False,
        times: bool = False,
        activation: Activation = "none",
        readers: Sequence[PackedMatrix] | None = None,
        best: bool = False,
        cap: float | None = None,
    ) -> list[Named]:
        """A product of the normed residual stream with some of the reader's matrices, all unless given; `readers` are
        those that read what it writes."""
        norm, source = self._norm(at, reader), self._x
        matrices = matrices or self.model.matrices_of(at, reader)
        layer, before = at if at < self.config.layers else None, list[Named]()
        alike = self._network.alike(at, reader)
        readers_of_norm = [matrix for one in alike for matrix in self.model.matrices_of(at, one)]
        if norm.kind == "layer" and self._reads_q(readers_of_norm):
            if reader is alike[0] and not times:
                before.append(Named("norm", layer, self._layer_norm(readers_of_norm, norm)))
            source, norm = self._normed, norm._replace(kind="none")
        waiting, self._waiting = self._waiting, None
        product = Product(
            parts(matrices), matrices[0].columns, norm.kind, self.config.eps,
            self._ss_parts if waiting is None else waiting.ss_parts, gated, _biased(matrices),
            activation if cap is None else "cap", times=times, out_x=readers is None or self._reads_x(readers),
            best=best, out_q=readers is not None and self._reads_q(readers), joins=waiting is not None, cap=cap or 0.0,
            scaled=waiting is not None and waiting.scaled,
        )  # fmt: skip
        given = {"norm": norm.weight, "norm_bias": norm.bias, "best": self.best, "best_row": self.best_row}
        if waiting is not None:
            given |= {"y": self._y.x, "ss": self._y.ss, "post": waiting.norm, "joined": self._joined.x}
            self._x, self._joined = self._joined, self._x
        if isinstance(target, Vector):
            given |= {"out": target.x, "out_q": target.q, "out_s": target.s}
        else:
            given["out"] = target
        return [*before, Named(reader.role, layer, self._launch(reader.role, product, matrices, source, given))]

    def _layer_norm(self, readers: Sequence[PackedMatrix], norm: _GivenNorm) -> Launch:
        """The residual stream as `readers` multiply it after this norm."""
        normed, wants_x = self._normed, self._reads_x(readers)
        buffers = (self._x.x, norm.weight, norm.bias, normed.q, normed.s, *((normed.x,) if wants_x else ()))
        program = self._programs(
            "layer_norm", buffers=len(buffers), K=self.config.dim, EPS=f"{self.config.eps!r}f",
            THREADS=LAYER_NORM_THREADS, OUT_X=wants_x, OVERLAP=self._overlap,
        )  # fmt: skip
        return Launch(program, buffers, (1, 1, 1), (LAYER_NORM_THREADS, 1, 1))

    def _add(
        self, role: Role, matrix: PackedMatrix, source: Vector, readers: Sequence[PackedMatrix], norm: Buffer
    ) -> Launch:
        """A product that is added to the residual stream, which `readers` read next, after a norm with this weight."""
        product, x = self._residual(matrix, readers), self._x
        given = {"out": x.x, "next_norm": norm, "out_q": x.q, "out_s": x.s, "out_ss": x.ss}
        launch = self._launch(role, product, (matrix,), source, given)
        self._ss_parts = product.out_ss_parts(self._launch_config(role, product))
        return launch

    def _set_apart(self, role: Role, matrix: PackedMatrix, source: Vector, norm: Buffer, *, scaled: bool) -> Launch:
        """A product that its reader adds to the residual stream, after a norm with this weight."""
        product = self._apart(matrix)
        launch = self._launch(role, product, (matrix,), source, {"out": self._y.x, "out_ss": self._y.ss})
        self._waiting = _Waiting(norm, product.out_ss_parts(self._launch_config(role, product)), scaled)
        return launch

    def _apart(self, matrix: PackedMatrix) -> Product:
        return Product(parts((matrix,)), matrix.columns, bias=_biased((matrix,)), out_x=True, out_ss=True)

    def _join(self, waiting: _Waiting, readers: Sequence[PackedMatrix], norm: Buffer) -> Launch:
        """The residual stream with what waits to be added, for `readers` after a norm with this weight."""
        size, wants_q, x, joined = self.config.dim, self._reads_q(readers), self._x, self._joined
        buffers = [x.x, self._y.x, self._y.ss, waiting.norm, joined.x]
        buffers += [norm, joined.q, joined.s, joined.ss] if wants_q else []
        program = self._programs(
            "join", buffers=len(buffers), K=size, SS_PARTS=waiting.ss_parts, EPS=f"{self.config.eps!r}f",
            THREADS=JOIN_THREADS, OUT_Q=wants_q, OVERLAP=self._overlap, **({"SCALED": 1} if waiting.scaled else {}),
        )  # fmt: skip
        self._x, self._joined, self._waiting = joined, x, None
        self._ss_parts = -(-size // 32)
        return Launch(program, tuple(buffers), (1, 1, 1), (JOIN_THREADS, 1, 1))

    def _residual(self, matrix: PackedMatrix, readers: Sequence[PackedMatrix]) -> Product:
        wants_q = self._stream_q(readers)
        return Product(
            parts((matrix,)), matrix.columns, bias=_biased((matrix,)), residual=True, out_q=wants_q, out_norm=wants_q
        )

    def _launch_config(self, role: Role, product: Product) -> LaunchConfig:
        return launch_config(product, role, self.device.arch)

    def _launch(
        self,
        role: Role,
        product: Product,
        matrices: Sequence[PackedMatrix],
        source: Vector,
        given: Mapping[str, Buffer],
    ) -> Launch:
        chosen = self._launch_config(role, product)
        needed = product.joins or (product.packed and product.norm != "none")
        product = replace(product, ss_parts=product.ss_parts if needed else 0)
        self.products.append((role, product))
        if (product, chosen) not in self._made:
            overlap = 2 * self._overlap if role == "logits" else self._overlap  # what samples does not wait by itself
            self._made[product, chosen] = product.load(self.device, chosen, overlap)
        buffers = {"q": source.q, "s": source.s, "ss": source.ss, "x": source.x, **given}
        for index, matrix in enumerate(matrices):
            buffers |= {f"w{index}": matrix.buffer, f"b{index}": matrix.bias or self._zeros}
        chosen_buffers = tuple(buffers[name] for name in product.arguments)
        program = self._made[product, chosen]
        return Launch(program, chosen_buffers, (product.grid(chosen), 1, 1), (32 * chosen.warps, 1, 1))

    def _logits(self) -> list[Named]:
        op, norm, before = self._network.logits, self._norm(self.config.layers, self._network.logits), list[Named]()
        if self._waiting is not None:
            before.append(Named("join", None, self._join(self._waiting, (self.model.output,), norm.weight)))
        return [*before, *self._product(self.config.layers, op, self.logits, best=True, cap=op.cap)]

    # --- attention --------------------------------------------------------------------------------------------------

    def _make_attention(self) -> None:
        """The kernels of attention, by layer."""
        mixers = [(at, op) for at, op in enumerate(self._network.mixers) if isinstance(op, Attend)]
        outputs = [matrix for at, op in mixers for matrix in self._readers(at, op)]
        self._attend = {
            at: Attention.of(
                self.config.at(at), op, self._cache.positions, "q8_0" if self._cache.q8 else "f16", self.device,
                rows=self._cache.layers[at].rows, floats=self._reads_x(outputs), quantized=self._reads_q(outputs),
                tuning={"OVERLAP": 1} if self._overlap else None, blocks=self._cache.layers[at].table_blocks,
            )
            for at, op in mixers
        }  # fmt: skip
        self._space = (
            self._workspace.take(max(each.workspace_bytes for each in self._attend.values())),
            self._workspace.put(bytes(max(each.counter_bytes for each in self._attend.values()))),
        )

    def _attention_launch(self, at: int, op: Attend) -> Launch:
        mixed, norms = self._mixed, self.model.layers[at].head_norms(op, self._zeros)
        return self._attend[at].launch(
            self._programs, self._states.states, self._qkv, norms, self._turns(op.rope), self._cache.layers[at],
            self._space, (mixed.x, mixed.q, mixed.s),
        )  # fmt: skip

    def _instead(self, at: int, op: Convolve | Delta) -> Launch:
        mixed, readers = self._mixed, self._readers(at, op)
        return convolution.step(
            self._programs, self.config, op, self.model.layers[at], self._states.states, self._qkv,
            self._cache.layers[at], (mixed.x, mixed.q, mixed.s), OUTPUT_X=int(self._reads_x(readers)),
            OUTPUT_Q=int(self._reads_q(readers)), OVERLAP=self._overlap,
        )  # fmt: skip


def _biased(matrices: Sequence[PackedMatrix]) -> bool:
    return any(matrix.bias is not None for matrix in matrices)
