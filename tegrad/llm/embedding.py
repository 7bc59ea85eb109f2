"""The embedding of tokens: macros of the kernels that do it, and the launch with which a decode step begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tegrad.llm.macros import number
from tegrad.llm.packed import PackedModel
from tegrad.llm.programs import Programs
from tegrad.nv.gpu import Buffer
from tegrad.nv.replay import Launch

THREADS: Final = 256


def macros(model: PackedModel) -> dict[str, Any]:
    """Rows and formats of a model's tables, and by what rows are multiplied, a float32, if by anything."""
    table, learned, scale = model.embedding, model.positions, model.config.network.embed.scale
    made: dict[str, Any] = {"ROWS": table.rows, "FORMAT": table.kind.name}
    if learned is not None:
        made |= {"POSITIONS": learned.rows, "POSITIONS_FORMAT": learned.kind.name}
    return made if scale == 1 else made | {"SCALE": number(float(np.float32(scale)))}


def launch(
    model: PackedModel, programs: Programs, states: Buffer, x: Buffer, slots: int = 1, more: Sequence[Buffer] = (),
    **defines: Any,
) -> Launch:  # fmt: skip
    """Each slot's token into x, and into `more` what of it the next product reads."""
    size, learned = model.embedding.columns, model.positions
    buffers = (states, model.embedding.buffer, *([] if learned is None else [learned.buffer]), x, *more)
    program = programs("embed", buffers=len(buffers), K=size, **macros(model), **defines)
    return Launch(program, buffers, (-(-size // THREADS), slots, 1), (THREADS, 1, 1))
