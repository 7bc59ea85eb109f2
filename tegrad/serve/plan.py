"""How a model is loaded: which context, for how many sequences, and the memory that it takes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tegrad.llm import rows
from tegrad.llm.cache import BLOCK_POSITIONS
from tegrad.llm.errors import OutOfMemory
from tegrad.llm.footprint import Footprint
from tegrad.llm.gguf import Gguf

USUAL_CONTEXT: Final = 8192
"""Tokens of the context that a sequence has where there is memory and nobody says otherwise."""
LEAST_CONTEXT: Final = 2048
"""That it has at least, unless the model has less; sequences share what does not suffice for all of them."""
STEP: Final = 256
"""Tokens that a context which follows memory is a multiple of."""
SHARE: Final = 0.5
"""Of the memory that weights and work space leave, what keys and values may take where nobody says how much."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the configuration says of a model. None: what suits the memory."""

    context: int | None = None
    slots: int = 8
    queue: int = 64
    q8: bool = False
    """Keys and values in q8_0."""
    same: bool = False
    """An answer does not depend on what else runs."""
    deadline: float | None = None
    """Seconds after which an answer ends, wherever it is."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A model's place in memory."""

    context: int
    slots: int
    blocks: int
    queue: int
    q8: bool
    same: bool
    bytes: int
    deadline: float | None = None


def plan(said: Footprint, wanted: Wanted, room: int | None, *, embeds: bool = False) -> Plan:
    """The place of a model in so many bytes, None for memory that nobody knows. OutOfMemory, with what would help."""
    longest, slots = said.config.longest, 1 if embeds else wanted.slots
    least = min(longest, LEAST_CONTEXT)

    def made(context: int, blocks: int) -> Plan:
        size = said.at(context) if embeds else said.batch(context, slots, blocks)
        return Plan(context, slots, blocks, wanted.queue, wanted.q8, wanted.same, size, wanted.deadline)

    def full(context: int) -> Plan:
        return made(context, slots * -(-context // BLOCK_POSITIONS))

    if wanted.context is not None:
        best = full(min(wanted.context, longest))
    elif room is None:
        best = full(min(longest, USUAL_CONTEXT))
    else:
        within = made(least, 1).bytes + SHARE * max(0, room - made(least, 1).bytes)
        steps = range(least, min(longest, USUAL_CONTEXT), STEP)
        fits = bisect_right(steps, within, key=lambda context: full(context).bytes)
        best = full(min(longest, USUAL_CONTEXT)) if fits == len(steps) else full(steps[max(0, fits - 1)])
    if room is None or best.bytes <= room:
        return best
    # All sequences together have what there is room for, at least one whole context.
    one = -(-best.context // BLOCK_POSITIONS)
    counts = range(one, best.blocks + 1)
    fits = 0 if embeds else bisect_right(counts, room, key=lambda blocks: made(best.context, blocks).bytes)
    if not fits:
        need = made(best.context, one).bytes
        raise OutOfMemory(
            f"the model with a context of {best.context} tokens needs {need / 2**20:,.0f} MiB, "
            f"{room / 2**20:,.0f} may be used: ask for a shorter context, fewer slots or a smaller quantization"
        )
    return made(best.context, counts[fits - 1])


def planned(path: Path, wanted: Wanted, room: int | None, *, embeds: bool) -> Plan:
    """The place of a file's model, as `plan`. GgufError, UnsupportedModelError, OutOfMemory."""
    with Gguf.open(path) as file:
        if not embeds:  # which is done by tinygrad's operations where our kernels do not run
            rows.check(file)
        said = Footprint.of(file, q8=wanted.q8)
    return plan(said, wanted, room, embeds=embeds)
