"""Per-layer inputs (`network.LayerInputs`): the launch that makes them of a product (`kernels/inputs.cu`)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tegrad.llm.macros import number
from tegrad.llm.packed import PackedModel
from tegrad.llm.programs import Programs
from tegrad.nv.gpu import Buffer
from tegrad.nv.replay import Launch

THREADS: Final = 128


def bytes_of(model: PackedModel, rows: int) -> int:
    """Bytes of float32s for all layers' inputs of so many tokens."""
    config = model.config
    return 4 * rows * config.layers * config.layer_input


def launch(
    model: PackedModel, programs: Programs, products: Buffer, made: Buffer, tokens: tuple[Buffer, ...], rows: int,
    *, most: int, overlap: int = 0,
) -> Launch:  # fmt: skip
    """Those of up to so many tokens; in `made` (layers, most, elements), of `products` (rows, all layers').

    `tokens` are sequences' states, or tokens and the chunk that says which.
    """
    op, table = model.config.network.embed.inputs, model.inputs
    assert op is not None
    assert table is not None
    scales = {"TABLE_SCALE": op.table_scale, "PRODUCT_SCALE": op.product_scale, "SCALE": op.scale}
    program = programs(
        "inputs", buffers=4 + len(tokens), SIZE=model.config.layer_input, LAYERS=model.config.layers, MOST=most,
        ROWS=table.rows, FORMAT=table.kind.name, EPS=number(model.config.eps), CHUNKED=len(tokens) - 1, THREADS=THREADS,
        OVERLAP=overlap, **{name: number(float(np.float32(scale))) for name, scale in scales.items()},
    )  # fmt: skip
    buffers = (made, products, model.vectors[op.norm.name], table.buffer, *tokens)
    return Launch(program, buffers, (model.config.layers, rows, 1), (THREADS, 1, 1))
