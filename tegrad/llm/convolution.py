"""The launch of a short convolution: `kernels/convolve.cu`, for a token of each sequence or for a chunk of a prompt."""

from __future__ import annotations

from typing import Final

from tegrad.llm import delta
from tegrad.llm.cache import LayerCache
from tegrad.llm.config import Config
from tegrad.llm.network import Convolve, Delta
from tegrad.llm.packed import PackedLayer
from tegrad.llm.programs import Programs
from tegrad.nv.gpu import Buffer
from tegrad.nv.replay import Launch

THREADS: Final = 256


def launch(
    programs: Programs, config: Config, op: Convolve, layer: PackedLayer, source: Buffer, products: Buffer,
    kept: LayerCache, out: tuple[Buffer, Buffer, Buffer], *, rows: int = 1, **form: int,
) -> Launch:  # fmt: skip
    """A layer's for up to `rows` tokens: those of a chunk, or one of each sequence; `source` is the chunk, or their
    states.

    `out` are buffers of floats or halves, of int8 and of their scales; `form` are CHUNK, OUTPUT_X, OUTPUT_H, OUTPUT_Q
    and OVERLAP.
    """
    buffers = (source, products, layer.vectors[op.kernel.name], kept.keys, *out)
    program = programs("convolve", buffers=len(buffers), DIM=config.dim, TAPS=op.taps, ROWS=kept.rows, **form)
    return Launch(program, buffers, (-(-config.dim // THREADS), rows, 1), (THREADS, 1, 1))


def step(
    programs: Programs, config: Config, op: Convolve | Delta, layer: PackedLayer, states: Buffer, products: Buffer,
    kept: LayerCache, out: tuple[Buffer, Buffer, Buffer], *, rows: int = 1, **form: int,
) -> Launch:  # fmt: skip
    """A layer's for a token of each of so many sequences: of a convolution, or of a delta net, which convolves too."""
    if isinstance(op, Delta):
        return delta.step(programs, config, op, layer, states, products, kept, out, rows=rows, **form)
    return launch(programs, config, op, layer, states, products, kept, out, rows=rows, **form)
