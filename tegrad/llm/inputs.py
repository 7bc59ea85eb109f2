"""Per-layer inputs (`network.LayerInputs`): the launch that makes them of a product (`kernels/inputs.cu`), and all that
make them for a step in one launch."""

from __future__ import annotations

from typing import Final

import numpy as np

from tegrad.llm import embedding
from tegrad.llm.formats import PLAIN, SET
from tegrad.llm.launch_config import launch_config
from tegrad.llm.macros import number
from tegrad.llm.matvec import Product
from tegrad.llm.packed import PackedModel, parts
from tegrad.llm.programs import Programs
from tegrad.llm.workspace import Workspace
from tegrad.nv.gpu import Buffer
from tegrad.nv.replay import Launch

THREADS: Final = 128


def bytes_of(model: PackedModel, rows: int) -> int:
    """Bytes of float32s for all layers' inputs of so many tokens."""
    config = model.config
    return 4 * rows * config.layers * config.layer_input


def launches(model: PackedModel, states: Buffer, workspace: Workspace, made: Buffer) -> tuple[Launch, ...]:
    """The three launches that write those of slot 0's token to `made`, float32 (layers, elements): the token's
    embedding, its product, and what is made of that. The workspace is for what lies between."""
    matrix, dim, programs = model.inputs_matrix, model.config.dim, Programs(model.device)
    assert matrix is not None
    product = Product(parts((matrix,)), dim, out_x=True)
    config, packed = launch_config(product, "down", model.device.arch), matrix.kind not in PLAIN
    sizes = {"x": 4 * dim, "q": dim, "s": 4 * dim // SET, "ss": 4 * -(-dim // SET), "out": bytes_of(model, 1)}
    given = {name: workspace.take(size) for name, size in sizes.items()} | {"w0": matrix.buffer}
    ones = workspace.put(np.ones(dim, np.float32))
    more = (ones, given["q"], given["s"], given["ss"]) if packed else ()
    program, buffers = product.load(model.device, config), tuple(given[name] for name in product.arguments)
    return (
        embedding.launch(model, programs, states, given["x"], more=more, OUT_Q=packed),
        Launch(program, buffers, (product.grid(config), 1, 1), (32 * config.warps, 1, 1)),
        launch(model, programs, given["out"], made, (states,), 1, most=1),
    )


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
