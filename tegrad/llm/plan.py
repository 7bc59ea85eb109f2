"""The many-kernel plan of one decode step: five launches a layer, each of which quantizes what the next one reads.

Embedding; then per layer q, k and v; attention; output + residual; gate, up and activation; down + residual; then the
logits. The residual stream is float32. The input of a packed matrix is int8 with a scale per 16, written by whoever
computes it, with the norm's weight in it; the norm's factor comes from partial sums of squares. Matrices of floats read
float32 and norm it themselves.

Where a norm stands after a product, before it is added to the stream, whoever reads the stream next adds it: each CTA
for itself (`Product.joins`), but before the logits, whose CTAs are many, by a launch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np

from tegrad.llm import network
from tegrad.llm.attention import BUFFERS, Attention
from tegrad.llm.cache import KvCache
from tegrad.llm.chips import Role
from tegrad.llm.embedding import scaled
from tegrad.llm.formats import PLAIN
from tegrad.llm.launch_config import launch_config
from tegrad.llm.matvec import BEST_ROWS, SET, Activation, LaunchConfig, Part, Product
from tegrad.llm.network import Add, Attend, Gate, Logits, Op, Project
from tegrad.llm.packed import PackedLayer, PackedMatrix, PackedModel
from tegrad.llm.programs import Programs, load_kernel
from tegrad.llm.state import LOGITS_SPEC, States
from tegrad.llm.turns import Turns
from tegrad.llm.workspace import ALIGN, Workspace
from tegrad.nv.gpu import Buffer
from tegrad.nv.replay import Launch

EMBED_THREADS: Final = 256
JOIN_THREADS: Final = 512


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
    kind: network.NormKind | Literal["none"]
    weight: Buffer
    bias: Buffer


class _Waiting(NamedTuple):
    """A product that is still to be added to the stream: the weight of its norm, and how many sums of squares it
    has."""

    norm: Buffer
    ss_parts: int


class DecodePlan:
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
        self._programs: dict[tuple[Product, LaunchConfig], Any] = {}
        self.products: list[tuple[Role, Product]] = []
        """Each product's role, in the order of their launches."""
        self._ss_parts = 0
        try:
            self.logits = logits or self._workspace.take(4 * self.config.vocab, LOGITS_SPEC)
            self._turns = turns or Turns(self._workspace, cache.positions, model.divisors)
            self._make()
        except BaseException:
            self.close()
            raise

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each launch is."""
        join = ("join",) if self._network.last_add.norm is not None else ()
        return ("embed", *(op.role for _, op in self._network.operations()), *join, "logits")

    def close(self) -> None:
        """Free the plan's buffers. Closing twice is harmless."""
        self._workspace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        config, workspace = self.config, self._workspace
        self._x = vector_in(workspace, config.dim)
        self._waiting: _Waiting | None = None
        if any(isinstance(op, Add) and op.norm is not None for op in self._network.blocks[0]):
            self._y = vector_in(workspace, config.dim)
            self._joined = vector_in(workspace, config.dim)  # in turns with x
        self._mixed = vector_in(workspace, config.size("mixed"))
        self._hidden = vector_in(workspace, config.ffn)
        self._qkv = workspace.take(4 * config.size("query+key+value"))
        widths = (config.dim, config.ffn, config.vocab, config.head_dim, config.size("query+key+value"))
        self._zeros = workspace.put(np.zeros(max(widths), np.float32))
        self._ones = self._zeros
        if self._network.project.norm is None or self._network.gate.norm is None:
            self._ones = workspace.put(np.ones(config.dim, np.float32))
        entries = -(-config.vocab // BEST_ROWS)
        self.best, self.best_row = workspace.take(4 * entries), workspace.take(4 * entries)
        self._make_attention()
        launches = [self._embed()]
        for at in range(config.layers):
            launches += self._layer(at)
        launches += self._logits()
        self.launches: tuple[Launch, ...] = tuple(launches)

    # --- what is read by what ---------------------------------------------------------------------------------------

    def _reads_q(self, matrices: Sequence[PackedMatrix]) -> bool:
        return any(matrix.kind not in PLAIN for matrix in matrices)

    def _reads_x(self, matrices: Sequence[PackedMatrix]) -> bool:
        return any(matrix.kind in PLAIN for matrix in matrices)

    def _read_by(self, at: int, op: Op | None) -> tuple[Sequence[PackedMatrix], Buffer]:
        """What reads the residual stream after an operation of layer `at`, or after the embedding (0, None); and the
        weight of its norm."""
        at, reader = self._network.reader(at, op)
        if isinstance(reader, Logits):
            return (self.model.output,), self.model.vectors[reader.norm.spec.name]
        layer = self.model.layers[at]
        return self._matrices(layer, reader), self._norm(layer, reader.norm).weight

    def _matrices(self, layer: PackedLayer, op: Project | Gate) -> Sequence[PackedMatrix]:
        return layer.qkv if isinstance(op, Project) else [layer.matrices[spec.name] for spec in op.matrices]

    # --- launches ---------------------------------------------------------------------------------------------------

    def _embed(self) -> Launch:
        model, config = self.model, self.config
        matrices, norm = self._read_by(0, None)
        wants_q = self._reads_q(matrices)
        table, learned = model.embedding, model.positions
        defines: dict[str, Any] = {"K": config.dim, "ROWS": config.vocab, "FORMAT": table.kind.name, "OUT_Q": wants_q}
        defines["OVERLAP"] = self._overlap
        defines |= scaled(self._network.embed)
        buffers = [self._states.states, table.buffer]
        if learned is not None:
            defines |= {"POSITIONS": learned.rows, "POSITIONS_FORMAT": learned.kind.name}
            buffers.append(learned.buffer)
        buffers.append(self._x.x)
        if wants_q:
            buffers += [norm, self._x.q, self._x.s, self._x.ss]
            # Sums of as many rows as the down products make, so that the same kernel reads them in every layer.
            last = self._network.last_add
            down = self.model.layers[0].matrices[last.matrix.name]
            added = self._residual(down, self._read_by(0, last)[0]) if last.norm is None else self._apart(down)
            rows = self._launch_config(last.role, added).cta_rows
            defines["SUM"] = min(rows, BEST_ROWS)
            self._ss_parts = -(-config.dim // min(rows, BEST_ROWS))
        program = load_kernel(self.device, "embed", buffers=len(buffers), **defines)
        return Launch(program, tuple(buffers), (-(-config.dim // EMBED_THREADS), 1, 1), (EMBED_THREADS, 1, 1))

    def _layer(self, at: int) -> list[Launch]:
        return [self._operation(at, op) for op in self._network.blocks[at]]

    def _operation(self, at: int, op: Op) -> Launch:
        layer = self.model.layers[at]
        match op:
            case Project():
                return self._product(op.role, layer.qkv, self._x, self._qkv, norm=self._norm(layer, op.norm))
            case Attend():
                return self._attention_launch(at, op)
            case Gate():
                readers = [layer.matrices[reader.matrix.name] for reader in self._network.reads("hidden")]
                return self._product(
                    op.role, self._matrices(layer, op), self._x, self._hidden, norm=self._norm(layer, op.norm),
                    gated=op.gate is not None, activation=op.activation, readers=readers,
                )  # fmt: skip
            case Add():
                source = self._mixed if op.reads == "mixed" else self._hidden
                if op.norm is not None:
                    norm = layer.vectors[op.norm.spec.name]
                    return self._set_apart(op.role, layer.matrices[op.matrix.name], source, norm)
                return self._add(op.role, layer.matrices[op.matrix.name], source, *self._read_by(at, op))

    def _norm(self, vectors: PackedLayer | PackedModel, norm: network.Norm | None) -> _GivenNorm:
        """A norm with its vectors, ones where there is no norm; the weight stands in for a bias that is not there and
        not read."""
        if norm is None:
            return _GivenNorm("none", self._ones, self._ones)
        found, name = vectors.vectors, norm.spec.name
        return _GivenNorm(norm.kind, found[name], found.get(f"{name}.bias", found[name]))

    def _product(
        self,
        role: Role,
        matrices: Sequence[PackedMatrix],
        source: Vector,
        target: Vector | Buffer,
        *,
        norm: _GivenNorm,
        gated: bool = False,
        activation: Activation = "none",
        readers: Sequence[PackedMatrix] | None = None,
        best: bool = False,
        cap: float | None = None,
    ) -> Launch:
        """A product of the normed residual stream; `readers` are the matrices that read what it writes."""
        waiting, self._waiting = self._waiting, None
        product = Product(
            _parts(matrices), matrices[0].columns, norm.kind, self.config.eps,
            self._ss_parts if waiting is None else waiting.ss_parts, gated, _biased(matrices),
            activation if cap is None else "cap", out_x=readers is None or self._reads_x(readers), best=best,
            out_q=readers is not None and self._reads_q(readers), joins=waiting is not None, cap=cap or 0.0,
        )  # fmt: skip
        given = {"norm": norm.weight, "norm_bias": norm.bias, "best": self.best, "best_row": self.best_row}
        if waiting is not None:
            given |= {"y": self._y.x, "ss": self._y.ss, "post": waiting.norm, "joined": self._joined.x}
            self._x, self._joined = self._joined, self._x
        if isinstance(target, Vector):
            given |= {"out": target.x, "out_q": target.q, "out_s": target.s}
        else:
            given["out"] = target
        return self._launch(role, product, matrices, source, given)

    def _add(
        self, role: Role, matrix: PackedMatrix, source: Vector, readers: Sequence[PackedMatrix], norm: Buffer
    ) -> Launch:
        """A product that is added to the residual stream, which `readers` read next, after a norm with this weight."""
        product, x = self._residual(matrix, readers), self._x
        given = {"out": x.x, "next_norm": norm, "out_q": x.q, "out_s": x.s, "out_ss": x.ss}
        launch = self._launch(role, product, (matrix,), source, given)
        self._ss_parts = product.out_ss_parts(self._launch_config(role, product))
        return launch

    def _set_apart(self, role: Role, matrix: PackedMatrix, source: Vector, norm: Buffer) -> Launch:
        """A product that its reader adds to the residual stream, after a norm with this weight."""
        product = self._apart(matrix)
        launch = self._launch(role, product, (matrix,), source, {"out": self._y.x, "out_ss": self._y.ss})
        self._waiting = _Waiting(norm, product.out_ss_parts(self._launch_config(role, product)))
        return launch

    def _apart(self, matrix: PackedMatrix) -> Product:
        return Product(_parts((matrix,)), matrix.columns, bias=_biased((matrix,)), out_x=True, out_ss=True)

    def _join(self, waiting: _Waiting, readers: Sequence[PackedMatrix], norm: Buffer) -> Launch:
        """The residual stream with what waits to be added, for `readers` after a norm with this weight."""
        size, wants_q, x, joined = self.config.dim, self._reads_q(readers), self._x, self._joined
        buffers = [x.x, self._y.x, self._y.ss, waiting.norm, joined.x]
        buffers += [norm, joined.q, joined.s, joined.ss] if wants_q else []
        program = load_kernel(
            self.device, "join", buffers=len(buffers), K=size, SS_PARTS=waiting.ss_parts, EPS=f"{self.config.eps!r}f",
            THREADS=JOIN_THREADS, OUT_Q=wants_q, OVERLAP=self._overlap,
        )  # fmt: skip
        self._x, self._joined, self._waiting = joined, x, None
        self._ss_parts = -(-size // 32)
        return Launch(program, tuple(buffers), (1, 1, 1), (JOIN_THREADS, 1, 1))

    def _residual(self, matrix: PackedMatrix, readers: Sequence[PackedMatrix]) -> Product:
        wants_q = self._reads_q(readers)
        return Product(
            _parts((matrix,)), matrix.columns, bias=_biased((matrix,)), residual=True, out_q=wants_q, out_norm=wants_q
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
        if (product, chosen) not in self._programs:
            overlap = 2 * self._overlap if role == "logits" else self._overlap  # what samples does not wait by itself
            self._programs[product, chosen] = product.load(self.device, chosen, overlap)
        buffers = {"q": source.q, "s": source.s, "ss": source.ss, "x": source.x, **given}
        for index, matrix in enumerate(matrices):
            buffers |= {f"w{index}": matrix.buffer, f"b{index}": matrix.bias or self._zeros}
        chosen_buffers = tuple(buffers[name] for name in product.arguments)
        program = self._programs[product, chosen]
        return Launch(program, chosen_buffers, (product.grid(chosen), 1, 1), (32 * chosen.warps, 1, 1))

    def _logits(self) -> list[Launch]:
        op = self._network.logits
        norm, output = self._norm(self.model, op.norm), (self.model.output,)
        before = [] if self._waiting is None else [self._join(self._waiting, output, norm.weight)]
        return [*before, self._product("logits", output, self._x, self.logits, norm=norm, best=True, cap=op.cap)]

    # --- attention --------------------------------------------------------------------------------------------------

    def _make_attention(self) -> None:
        """The kernels of attention: one for all layers that attend alike."""
        adds = self._network.reads("mixed")
        outputs = [layer.matrices[add.matrix.name] for layer in self.model.layers for add in adds]
        made = {
            op: Attention.of(
                self.config, op, self._cache.positions, "q8_0" if self._cache.q8 else "f16", self.device,
                rows=kept.rows, floats=self._reads_x(outputs), quantized=self._reads_q(outputs),
                tuning={"OVERLAP": 1} if self._overlap else None, blocks=kept.table_blocks,
            )
            for op, kept in zip(self._network.attends, self._cache.layers, strict=True)
        }  # fmt: skip
        self._partials = self._workspace.take(max(each.workspace_bytes for each in made.values()))
        self._counters = self._workspace.put(bytes(max(each.counter_bytes for each in made.values())))
        programs = Programs(self.device)
        self._attend = {
            op: (each, programs("attention", buffers=len(BUFFERS) + (each.blocks is not None), **each.defines))
            for op, each in made.items()
        }

    def _attention_launch(self, at: int, op: Attend) -> Launch:
        layer, kept = self.model.layers[at], self._cache.layers[at]
        norms = [self._zeros if spec is None else layer.vectors[spec.name] for spec in (op.query_norm, op.key_norm)]
        mixed = self._mixed
        buffers = (self._states.states, self._qkv, *norms, self._turns(op.rope), kept.keys, kept.values,
                   kept.key_scales, kept.value_scales, self._partials, self._counters, mixed.x, mixed.q,
                   mixed.s, *kept.tables)  # fmt: skip
        attention, program = self._attend[op]
        return Launch(program, buffers, attention.grid, attention.block)


def _parts(matrices: Sequence[PackedMatrix]) -> tuple[Part, ...]:
    return tuple(Part(matrix.kind, matrix.rows) for matrix in matrices)


def _biased(matrices: Sequence[PackedMatrix]) -> bool:
    return any(matrix.bias is not None for matrix in matrices)
