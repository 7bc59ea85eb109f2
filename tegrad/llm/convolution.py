"""The launch of a short convolution: `kernels/convolve.cu`, for a token of each sequence or for a chunk of a prompt."""

from __future__ import annotations

from typing import Final

from tegrad.llm.arch import Config
from tegrad.llm.cache import LayerCache
from tegrad.llm.network import Convolve
from tegrad.llm.programs import Programs
from tegrad.nv.gpu import Buffer
from tegrad.nv.replay import Launch

THREADS: Final = 256


def launch(
    programs: Programs, config: Config, op: Convolve, source: Buffer, products: Buffer, kernel: Buffer,
    kept: LayerCache, out: tuple[Buffer, Buffer, Buffer], *, rows: int = 1, chunk: bool = False, floats: bool = False,
    halves: bool = False, quantized: bool = False, overlap: int = 0,
) -> Launch:  # fmt: skip
    """A layer's for up to `rows` tokens: those of a `chunk`, or one of each sequence; `source` is the chunk, or their
    states. `out` are buffers of floats or halves, of int8 and of their scales, of which those that are wanted are
    written."""
    buffers = (source, products, kernel, kept.keys, *out)
    program = programs(
        "convolve", buffers=len(buffers), DIM=config.dim, TAPS=op.taps, ROWS=kept.rows, CHUNK=chunk, OUTPUT_X=floats,
        OUTPUT_H=halves, OUTPUT_Q=quantized, OVERLAP=overlap,
    )  # fmt: skip
    return Launch(program, buffers, (-(-config.dim // THREADS), rows, 1), (THREADS, 1, 1))
