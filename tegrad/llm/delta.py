"""The launches of a gated delta net: one for a token of each sequence (`kernels/delta.cu`), three for a chunk
(`kernels/delta_rows.cu`)."""

from __future__ import annotations

from typing import Any

from tegrad.llm.cache import LayerCache
from tegrad.llm.config import Config
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.macros import number
from tegrad.llm.network import Delta, Mixer
from tegrad.llm.packed import PackedLayer
from tegrad.llm.programs import Programs
from tegrad.nv.gpu import Buffer
from tegrad.nv.replay import Launch

WIDTHS = (32, 64, 96, 128)
"""Elements of a head that the kernels take."""


def made_bytes(op: Mixer) -> int:
    """Bytes that a chunk's launches leave for each other, of a token: a multiple of 16."""
    return -(-4 * (op.channels + 2 * op.heads) // 16) * 16 if isinstance(op, Delta) else 0


def macros(config: Config, op: Delta, rows: int) -> dict[str, Any]:
    """Macros of delta.cuh, with a ring of so many rows; UnsupportedModelError for heads that it does not take."""
    if op.width not in WIDTHS:
        raise UnsupportedModelError(
            f"heads of {op.width} of a delta net are not run: {', '.join(map(str, WIDTHS))} are"
        )
    return {
        "DELTA_HEADS": op.heads, "DELTA_KEYS": op.key_heads, "DELTA_WIDTH": op.width, "DELTA_TAPS": op.taps,
        "DELTA_ROWS": rows, "DELTA_EPS": number((config.own or config).eps),
    }  # fmt: skip


def step(
    programs: Programs, config: Config, op: Delta, layer: PackedLayer, states: Buffer, products: Buffer,
    kept: LayerCache, out: tuple[Buffer, Buffer, Buffer], *, rows: int = 1, **form: int,
) -> Launch:  # fmt: skip
    """A layer's for a token of each of so many sequences, whose `states` say where they stand.

    `out` are buffers of floats or halves, of int8 and of their scales; `form` are OUTPUT_X, OUTPUT_H, OUTPUT_Q and
    OVERLAP. UnsupportedModelError.
    """
    assert kept.state is not None
    own = [layer.vectors[spec.name] for spec in op.specs]
    buffers = (states, products, *own, kept.keys, kept.state, *out)
    program = programs("delta", buffers=len(buffers), **macros(config, op, kept.rows), **form)
    return Launch(program, buffers, (op.heads, rows, 1), (4 * op.width, 1, 1))


def chunk(
    programs: Programs, config: Config, op: Delta, layer: PackedLayer, source: Buffer, products: Buffer,
    kept: LayerCache, made: Buffer, mixed: Buffer, *, tokens: int, overlap: int = 0,
) -> list[Launch]:  # fmt: skip
    """A layer's for up to so many tokens of a chunk, `source`; `mixed` are halves. UnsupportedModelError."""
    assert kept.state is not None
    own = [layer.vectors[spec.name] for spec in op.specs]
    buffers = (source, products, *own, kept.keys, kept.state, made, mixed)
    forms = (
        ((tokens, 2 * op.key_heads + op.heads, 1), op.width),
        ((op.heads, op.width // 32, 1), 128),
        ((tokens, op.heads, 1), op.width),
    )
    launches, sizes = list[Launch](), macros(config, op, kept.rows)
    for stage, (grid, threads) in enumerate(forms):
        program = programs("delta_rows", buffers=len(buffers), STAGE=stage, OUTPUT_H=1, OVERLAP=overlap, **sizes)
        launches.append(Launch(program, buffers, grid, (threads, 1, 1)))
    return launches
