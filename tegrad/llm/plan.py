"""The many-kernel plan of one decode step: five launches a layer, each of which quantizes what the next one reads.

Embedding; then per layer q, k and v; attention; output + residual; gate, up and activation; down + residual; then the
logits. The residual stream is float32. The input of a packed matrix is int8 with a scale per 16, written by whoever
computes it, with the norm's weight in it; the norm's factor comes from partial sums of squares. Matrices of floats read
float32 and norm it themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np

from tegrad.llm.attention import BUFFERS, Attention
from tegrad.llm.cache import KvCache
from tegrad.llm.chips import Role
from tegrad.llm.formats import PLAIN
from tegrad.llm.launch_config import launch_config
from tegrad.llm.matvec import BEST_ROWS, SET, Activation, LaunchConfig, Norm, Part, Product
from tegrad.llm.packed import PackedLayer, PackedMatrix, PackedModel
from tegrad.llm.programs import load_kernel
from tegrad.llm.state import LOGITS_SPEC, States
from tegrad.llm.workspace import ALIGN, Workspace
from tegrad.nv.gpu import Buffer
from tegrad.nv.replay import Launch

EMBED_THREADS: Final = 256


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


class DecodePlan:
    """One decode step of the sequence in slot 0 of `states`, as launches. Close it when no step is in flight.

    `launches` end with the logits: `logits` float32 (vocab), and of every 32 of them the largest, `best`, and its row,
    `best_row`. Sampling and publishing follow. With `overlap` a launch may begin before the one before it has ended,
    if the recording's dependency lets it (kernels/overlap.cuh); what follows begins after it. Everything given stays
    the caller's. UnsupportedModelError, MemoryError.
    """

    def __init__(self, model: PackedModel, states: States, cache: KvCache, *, overlap: bool = False) -> None:
        self.model, self.config, self.device = model, model.config, model.device
        self._overlap = int(overlap)
        self._states, self._cache = states, cache
        self._workspace = Workspace(self.device)
        self._programs: dict[tuple[Product, LaunchConfig], Any] = {}
        self.products: list[tuple[Role, Product]] = []
        """Each product's role, in the order of their launches."""
        self._ss_parts = 0
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each launch is."""
        layer = ("qkv", "attention", "output", "gate", "down")
        return ("embed", *layer * self.config.layers, "logits")

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
        self._mixed = vector_in(workspace, config.size("mixed"))
        self._hidden = vector_in(workspace, config.ffn)
        self._qkv = workspace.take(4 * config.size("query+key+value"))
        widths = (config.dim, config.ffn, config.vocab, config.head_dim, config.size("query+key+value"))
        self._zeros = workspace.put(np.zeros(max(widths), np.float32))
        self.logits = workspace.take(4 * config.vocab, LOGITS_SPEC)
        entries = -(-config.vocab // BEST_ROWS)
        self.best, self.best_row = workspace.take(4 * entries), workspace.take(4 * entries)
        self._attend = self._attention()
        launches = [self._embed()]
        for at in range(config.layers):
            launches += self._layer(at)
        launches.append(self._logits())
        self.launches: tuple[Launch, ...] = tuple(launches)

    # --- what is read by what ---------------------------------------------------------------------------------------

    def _reads_q(self, matrices: Sequence[PackedMatrix]) -> bool:
        return any(matrix.kind not in PLAIN for matrix in matrices)

    def _reads_x(self, matrices: Sequence[PackedMatrix]) -> bool:
        return any(matrix.kind in PLAIN for matrix in matrices)

    def _following(self, at: int) -> tuple[Sequence[PackedMatrix], Buffer]:
        """What reads the residual stream after layer `at`, and its norm's weight."""
        arch = self.config.arch
        if at + 1 == self.config.layers:
            return (self.model.output,), self.model.vectors[arch.output_norm.name]
        layer = self.model.layers[at + 1]
        return layer.qkv, layer.vectors[arch.attn_norm.name]

    # --- launches ---------------------------------------------------------------------------------------------------

    def _embed(self) -> Launch:
        model, config = self.model, self.config
        matrices, norm = self._following(-1)
        wants_q = self._reads_q(matrices)
        table, learned = model.embedding, model.positions
        defines: dict[str, Any] = {"K": config.dim, "ROWS": config.vocab, "FORMAT": table.kind.name, "OUT_Q": wants_q}
        defines["OVERLAP"] = self._overlap
        buffers = [self._states.states, table.buffer]
        if learned is not None:
            defines |= {"POSITIONS": learned.rows, "POSITIONS_FORMAT": learned.kind.name}
            buffers.append(learned.buffer)
        buffers.append(self._x.x)
        if wants_q:
            buffers += [norm, self._x.q, self._x.s, self._x.ss]
            # Sums of as many rows as the down products make, so that the same kernel reads them in every layer.
            down = self.model.layers[0].matrices[config.arch.down.name]
            rows = self._launch_config("down", self._residual(down, self._following(0)[0])).cta_rows
            defines["SUM"] = min(rows, BEST_ROWS)
            self._ss_parts = -(-config.dim // min(rows, BEST_ROWS))
        program = load_kernel(self.device, "embed", buffers=len(buffers), **defines)
        return Launch(program, tuple(buffers), (-(-config.dim // EMBED_THREADS), 1, 1), (EMBED_THREADS, 1, 1))

    def _layer(self, at: int) -> list[Launch]:
        arch, layer = self.config.arch, self.model.layers[at]
        output, up, down = (layer.matrices[spec.name] for spec in (arch.attn_output, arch.up, arch.down))
        inner = (up,) if arch.gate is None else (layer.matrices[arch.gate.name], up)
        activation = arch.activation
        return [
            self._product("qkv", layer.qkv, self._x, self._qkv, norm=self._norm(layer, arch.attn_norm.name)),
            self._attention_launch(at),
            self._add("output", output, self._mixed, inner, layer.vectors[arch.ffn_norm.name]),
            self._product("gate", inner, self._x, self._hidden, norm=self._norm(layer, arch.ffn_norm.name),
                          gated=arch.gate is not None, activation=activation, readers=(down,)),
            self._add("down", down, self._hidden, *self._following(at)),
        ]  # fmt: skip

    def _norm(self, vectors: PackedLayer | PackedModel, name: str) -> tuple[Buffer, Buffer]:
        """A norm's weight and bias; the weight stands in for a bias that is not there and not read."""
        found = vectors.vectors
        return found[name], found.get(f"{name}.bias", found[name])

    def _product(
        self,
        role: Role,
        matrices: Sequence[PackedMatrix],
        source: Vector,
        target: Vector | Buffer,
        *,
        norm: tuple[Buffer, Buffer],
        gated: bool = False,
        activation: Activation = "none",
        readers: Sequence[PackedMatrix] | None = None,
        best: bool = False,
    ) -> Launch:
        """A product of the normed residual stream; `readers` are the matrices that read what it writes."""
        kind: Norm = self.config.arch.norm
        product = Product(
            _parts(matrices), matrices[0].columns, kind, self.config.eps, self._ss_parts, gated, _biased(matrices),
            activation, out_x=readers is None or self._reads_x(readers), best=best,
            out_q=readers is not None and self._reads_q(readers),
        )  # fmt: skip
        given = {"norm": norm[0], "norm_bias": norm[1], "best": self.best, "best_row": self.best_row}
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
        product = replace(product, ss_parts=product.ss_parts if product.packed and product.norm != "none" else 0)
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

    def _logits(self) -> Launch:
        norm = self._norm(self.model, self.config.arch.output_norm.name)
        return self._product("logits", (self.model.output,), self._x, self.logits, norm=norm, best=True)

    # --- attention --------------------------------------------------------------------------------------------------

    def _attention(self) -> Attention:
        config, arch, device = self.config, self.config.arch, self.device
        outputs = [layer.matrices[arch.attn_output.name] for layer in self.model.layers]
        made = Attention(
            config.heads, config.kv_heads, config.head_dim, self._cache.positions, arch.rope,
            config.rope.dim // 2 if config.rope.dim else None, config.eps if arch.query_norm is not None else None,
            "q8_0" if self._cache.q8 else "f16", device.sm_count,
            floats=self._reads_x(outputs), quantized=self._reads_q(outputs), arch=device.arch,
            tuning={"OVERLAP": 1} if self._overlap else None,
        )  # fmt: skip
        self._partials = self._workspace.take(made.workspace_bytes)
        self._counters = self._workspace.put(np.zeros(made.counter_bytes, np.uint8))
        self._rope = self._zeros
        if config.rope.dim:
            self._rope = self._workspace.put(config.rope.tables(self._cache.positions, self.model.divisors))
        self._attention_program = made.load(device)
        return made

    def _attention_launch(self, at: int) -> Launch:
        arch, layer, kept = self.config.arch, self.model.layers[at], self._cache.layers[at]
        norms = [self._zeros if spec is None else layer.vectors[spec.name] for spec in (arch.query_norm, arch.key_norm)]
        mixed = self._mixed
        buffers = (self._states.states, self._qkv, *norms, self._rope, kept.keys, kept.values, kept.key_scales,
                   kept.value_scales, self._partials, self._counters, mixed.x, mixed.q, mixed.s)  # fmt: skip
        assert len(buffers) == len(BUFFERS)
        return Launch(self._attention_program, buffers, self._attend.grid, self._attend.block)


def _parts(matrices: Sequence[PackedMatrix]) -> tuple[Part, ...]:
    return tuple(Part(matrix.kind, matrix.rows) for matrix in matrices)


def _biased(matrices: Sequence[PackedMatrix]) -> bool:
    return any(matrix.bias is not None for matrix in matrices)
