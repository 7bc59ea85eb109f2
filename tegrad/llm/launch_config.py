"""How a chip's decode products are launched: the table of configurations, and the rule that fits them to shapes."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Final

from tegrad.hw.chips import by_arch
from tegrad.llm.chips import Role, Tuning, kernels_of
from tegrad.llm.formats import PLAIN, SEGMENT
from tegrad.llm.matvec import BEST_ROWS, LaunchConfig, Product, least_rows

MOST_WARPS: Final = 16
SM_REGISTERS: Final = 65536
"""Of an SM: CUDA programming guide, compute capabilities 8.0 to 9.0."""
OWN_REGISTERS: Final = 42
"""What a thread needs besides the weights in flight and the sums, activations that it keeps included."""
ACTIVATION_REGISTERS: Final = 12
"""Fewer where it does not keep them: 24 hold them, some of which it needs all the same."""


LONG: Final = 4
"""Rounds of a CTA's warps from which on two CTAs share an SM rather than that some SMs take two and others one."""
SHARED_WARPS: Final = 12
"""Of each of them, at most."""


def launch_config(product: Product, role: Role, arch: str) -> LaunchConfig:
    """The launch configuration of a product on a chip such as sm_90: the table's, made to fit the product's shape.

    Where CTAs are more than the SMs, up to twice as many, and have LONG rounds, two share an SM if registers allow it.
    """
    tuning, chip = kernels_of(arch).products[role], by_arch(arch)
    made = fit(product, tuning)
    rounds, sms = product.items(made) / made.warps, chip.sm_count if chip is not None else 0
    if tuning.ctas == 1 and rounds >= LONG and sms < product.grid(made) <= 2 * sms:
        shared = fit(product, replace(tuning, warps=SHARED_WARPS, ctas=2))
        return shared if shared.ctas == 2 else made
    return made


def fit(product: Product, tuning: Tuning) -> LaunchConfig:
    """A configuration near to a tuning that holds whole items, keeps columns with warps and spills no registers."""
    rows = _rows(product, tuning.rows)
    made = LaunchConfig(rows, 1, 1, tuning.ctas)
    items = product.items(made)
    warps = max(min(tuning.warps, -(-items // tuning.items)), -(-rows // 32))
    per_row = product.columns // SEGMENT
    if product.columns % SEGMENT == 0 and per_row > 1 and warps >= per_row:
        warps -= warps % per_row  # a warp then meets the same columns in every item, and keeps its activations
    elif tuning.even and product.packed and product.columns % SEGMENT:
        warps = _even(items, warps, product.columns // gcd(product.columns, SEGMENT))
    # Fewer warps than a CTA may have keep as much in flight.
    ahead, ctas = min(-(-items // warps), tuning.ahead * tuning.warps // warps), tuning.ctas
    cut = replace(made, warps=warps, ahead=ahead, ctas=ctas, keep=tuning.keep)
    while cut.ctas > 1 and in_flight(product, cut) < min(ahead, 2):
        cut = replace(cut, ctas=cut.ctas - 1)
    return replace(cut, ahead=max(1, min(ahead, in_flight(product, cut))))


def _even(items: int, warps: int, period: int) -> int:
    """As many warps as divide the items: up to a quarter more, in multiples of `period`, so that a warp meets the same
    columns in every item; else fewer that need no more rounds; else `warps`."""
    more = range(-(-warps // period) * period, min(MOST_WARPS, warps + warps // 4) + 1, period)
    fewer = range(warps, -(-items // -(-items // warps)) - 1, -1)
    return next((at for at in (*more, *fewer) if items % at == 0), warps)


def in_flight(product: Product, cut: LaunchConfig) -> int:
    """Items that a warp's registers hold, where an SM is to hold as many CTAs as it says."""
    limit = min(255, SM_REGISTERS // (32 * cut.warps * cut.ctas) // 8 * 8)
    steps = min(-(-product.items(cut) // cut.warps), max(cut.ahead, 4))  # of a round
    touched = 1 if product.columns % SEGMENT == 0 else -(-SEGMENT // product.columns) + 1
    sums = steps * (touched if product.packed else 1)
    own = OWN_REGISTERS - (0 if cut.keep else ACTIVATION_REGISTERS)
    return max(0, limit - own - sums) // max(part.kind.registers for part in product.parts)


def _rows(product: Product, wanted: int) -> int:
    """The smallest rows of a CTA, `wanted` or more, that hold whole items and what shares a result."""
    packed = [part for part in product.parts if part.kind not in PLAIN]
    step = least_rows(product.columns) if packed else 16
    if product.best or ((product.out_norm or product.out_ss) and max(step, wanted) > 16):
        step = max(step, BEST_ROWS)
    wanted = wanted if packed else min(wanted, BEST_ROWS)  # a row of floats is twice as many items
    return -(-wanted // step) * step
