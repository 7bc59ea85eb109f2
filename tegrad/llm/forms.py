"""How a chip's decode products are cut: the table of forms, and the rule that fits them to a model's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from tegrad.llm.gguf import BlockType
from tegrad.llm.matvec import BEST_ROWS, Form, Product, least_rows
from tegrad.llm.packing import PLAIN, SEGMENT

Role = Literal["qkv", "output", "gate", "down", "logits"]
"""A product's place in a decode step."""
ROLES: Final[tuple[Role, ...]] = ("qkv", "output", "gate", "down", "logits")

REGISTERS: Final = 65536
"""Of an SM: CUDA programming guide, compute capabilities 8.0 to 9.0."""
OWN_REGISTERS: Final = 64
"""What a thread needs besides the weights in flight: activations of a lane (24), addresses, sums."""
_WEIGHTS: Final = {"Q4_0": 9, "Q4_K": 12, "Q5_K": 14, "Q6_K": 14, "Q8_0": 17, "F16": 32, "BF16": 32, "F32": 64}
"""Registers of an item in flight."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What to aim at for a role: rows of a CTA, items of a warp, warps of a CTA at most, CTAs of an SM at least."""

    rows: int = 16
    items: int = 2
    warps: int = 16
    ctas: int = 1


_FIRST: Final[Mapping[Role, Tuning]] = {
    "qkv": Tuning(items=1),
    "output": Tuning(items=1),
    "gate": Tuning(items=2),
    "down": Tuning(items=4),
    "logits": Tuning(rows=32, items=2),
}

TUNINGS: Final[Mapping[str, Mapping[Role, Tuning]]] = {"sm_90": _FIRST, "sm_87": _FIRST}
"""By chip. One row in flight for the small products and two for the others were the best of an experiment on an H200
(docs/notebook.md); `tegrad bench kernels --sweep` tries the others."""


def form(product: Product, role: Role, arch: str) -> Form:
    """The form of a product on a chip such as sm_90: the table's, made to fit the product's shape."""
    return fit(product, TUNINGS.get(arch, _FIRST)[role])


def fit(product: Product, tuning: Tuning) -> Form:
    """A form near to a tuning that holds whole items, keeps columns with warps and spills no registers."""
    rows = _rows(product, tuning.rows)
    made = Form(rows, 1, 1, tuning.ctas)
    items = product.items(made)
    warps = max(min(tuning.warps, -(-items // tuning.items)), -(-rows // 32))
    per_row = product.columns // SEGMENT
    if product.columns % SEGMENT == 0 and per_row > 1 and warps >= per_row:
        warps -= warps % per_row  # a warp then meets the same columns in every item, and keeps its activations
    ahead = -(-items // warps)
    return replace(made, warps=warps, ahead=min(ahead, in_flight(product, warps, tuning.ctas)))


def in_flight(product: Product, warps: int, ctas: int) -> int:
    """Items that a warp's registers hold, where an SM is to hold so many CTAs of so many warps."""
    registers = min(255, REGISTERS // (32 * warps * ctas)) - OWN_REGISTERS
    return max(1, registers // max(_registers(part.kind) for part in product.parts))


def _registers(kind: BlockType) -> int:
    return _WEIGHTS[kind.name]


def _rows(product: Product, wanted: int) -> int:
    """The smallest rows of a CTA, `wanted` or more, that hold whole items and what shares a result."""
    packed = [part for part in product.parts if part.kind not in PLAIN]
    step = least_rows(product.columns) if packed else 16
    if product.best or (product.out_norm and max(step, wanted) > 16):
        step = max(step, BEST_ROWS)
    return -(-wanted // step) * step
