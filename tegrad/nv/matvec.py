"""How products of a matrix and one vector are cut into threads: a warp to a row, lanes beside one another in memory.

tinygrad 0.14 knows such a product only as `vector * matrix`, both loaded as they are. After a cast, a norm, or the
unpacking of quantized weights it falls back to a thread per row, whose loads are a row apart from lane to lane. Here a
kernel counts as a product when it sums, and loads something that no two outputs share: that is its matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, prod
from typing import Any, Final

from tinygrad.codegen.opt import KernelOptError, Opt, OptOps
from tinygrad.uop.ops import AxisType, Ops, UOp

THREADS: Final = 32
"""Threads of a row: a warp, so that its lanes read one piece of the row together."""
VECTOR: Final = 4
"""Neighbouring elements of a lane where the row has enough of them: one vector load."""
SHORTEST_ROW: Final = 64
"""Elements of a row below which a thread to a row is as good."""
ROWS: Final = (4, 2)
"""Rows of a warp, which share the vector's loads; the first that divides the rows and leaves enough warps."""
NO_STRIDE: Final = 1 << 62
LANE_AXES: Final = 2
"""Axes that a row's threads are made of: with more, tinygrad no longer numbers the first of them fastest."""
MOST_UNROLL: Final = 16
"""Elements that a lane handles at once."""
LEAST_WARPS: Final = 512
"""Warps that a kernel should keep when its rows are joined."""


def optimize(k: Any) -> Any | None:
    """A Scheduler (tinygrad.codegen.opt.postrange) cut into THREADS threads a row; None for what is no product."""
    rows = [r for r in k.ranges_of(AxisType.GLOBAL) if r.vmax > 0]
    sums = k.reduceops
    if not rows or not sums or k.dont_use_locals or not (k.ren.has_local and k.ren.has_shared):
        return None
    if any(r.arg[0] is not Ops.ADD or any(r.src[0].op is not Ops.CONST for r in axes(r)) for r in sums):
        return None
    matrices = {r: [load for load in loads(r) if all(row in load.ranges for row in rows)] for r in sums}
    ordered = sorted(sums, key=lambda r: not matrices[r])
    if length(ordered[0]) < SHORTEST_ROW or not any(_along(load, ordered[0], rows) for load in matrices[ordered[0]]):
        return None
    made, lanes = k.copy(), list[UOp]()
    try:
        for reduce in ordered:
            _cut(made, _by_stride(reduce, matrices[reduce] or loads(reduce)), lanes)
        _join_rows(made, length_of=rows)
    except KernelOptError:
        return None
    return made


def _by_stride(reduce: UOp, among: list[UOp]) -> list[tuple[UOp, bool]]:
    """A sum's axes, the one whose neighbours lie closest first; whether those are loaded as one vector."""
    finest = max(among, key=lambda load: prod(int(a.vmax) + 1 for a in axes(reduce) if stride(load, a)))
    order = sorted(axes(reduce), key=lambda axis: (closest(finest, [axis]), axis.arg))
    wide = finest.dtype.itemsize > 1
    return [(axis, wide and at == 0 and stride(finest, axis) == 1) for at, axis in enumerate(order)]


def _along(load: UOp, reduce: UOp, rows: list[UOp]) -> bool:
    """Whether what is summed lies closer together than the rows do."""
    return closest(load, axes(reduce)) < closest(load, rows)


def _cut(k: Any, order: list[tuple[UOp, bool]], lanes: list[UOp]) -> None:
    """Give a sum's axes to a row's threads and unroll what is short. Further sums use the lanes of the first."""
    first, left, unrolled = not lanes, THREADS, 1
    shared = [] if first else list(lanes)
    for axis, vector in order:
        size = int(axis.vmax) + 1
        if vector and size % (VECTOR * THREADS) == 0:
            axis = _apply(k, OptOps.UNROLL, axis, VECTOR)
            size //= VECTOR
            unrolled *= VECTOR
        if first:
            amount = gcd(size, left)
            if amount > 1:
                before = set(k.ranges_of(AxisType.GROUP_REDUCE))
                axis = _apply(k, OptOps.GROUP, axis, amount)
                lanes += [r for r in k.ranges_of(AxisType.GROUP_REDUCE) if r not in before]
                left //= amount
                size //= amount
        else:
            while shared and size % (int(shared[0].vmax) + 1) == 0:
                lane = shared.pop(0)
                axis = k.shift_to(axis, int(lane.vmax) + 1, AxisType.GROUP_REDUCE, input_new_rng=lane)[0]
                size //= int(lane.vmax) + 1
        if 1 < size <= MOST_UNROLL // unrolled and axis in k.rngs:
            _apply(k, OptOps.UNROLL, axis, size)
            unrolled *= size
    if shared or (first and (left > 1 or len(lanes) > LANE_AXES)):
        raise KernelOptError("the row does not divide into so many threads")


def _apply(k: Any, op: OptOps, axis: UOp, amount: int) -> UOp:
    """Apply an optimization to an axis; what is left of the axis."""
    at = k.rngs.index(axis)
    if op is OptOps.UNROLL:
        at = k.unrollable_dims.index(at)
    elif op is OptOps.GROUP:
        at = k.axes_of(AxisType.REDUCE).index(at)
    left: UOp = k.apply_opt(Opt(op, at, amount))[0]
    return left


def _join_rows(k: Any, length_of: list[UOp]) -> None:
    """Give a thread several rows, so that they share what is loaded of the vector."""
    row = max(length_of, key=lambda r: int(r.vmax))
    size = int(row.vmax) + 1
    for joined in ROWS:
        if size % joined == 0 and size // joined >= LEAST_WARPS:
            _apply(k, OptOps.UPCAST, row, joined)
            return


def axes(reduce: UOp) -> list[UOp]:
    """The ranges that a sum runs over."""
    return [r for r in reduce.src[1:] if r.op is Ops.RANGE]


def loads(reduce: UOp) -> list[UOp]:
    """What a sum loads inside of itself, not within another sum."""
    return [u for u in reduce.src[0].toposort(gate=lambda u: u.op is not Ops.REDUCE) if u.op is Ops.INDEX]


def length(reduce: UOp) -> int:
    """Elements of a sum."""
    return prod(int(r.vmax) + 1 for r in axes(reduce))


def stride(load: UOp, axis: UOp) -> int:
    """Elements between neighbours along an axis of a load; 0 where the load does not depend on it that plainly."""
    for term in load.src[1].get_idx().split_uop(Ops.ADD):
        if term is axis:
            return 1
        if term.op is Ops.MUL and term.src[0] is axis and term.src[1].op is Ops.CONST:
            return int(term.src[1].arg)
    return 0


def closest(load: UOp, along: list[UOp]) -> int:
    """The smallest stride of a load along some axes."""
    return min((stride(load, axis) or NO_STRIDE for axis in along), default=NO_STRIDE)


def choose(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """tinygrad's hand-coded optimizations with ours in front, for kernels of our renderers."""

    def hand_coded_optimizations(k: Any) -> Any:
        ours = type(k.ren).__module__.startswith("tegrad.")
        return (ours and optimize(k)) or original(k)

    hand_coded_optimizations.__wrapped__ = original  # type: ignore[attr-defined]
    return hand_coded_optimizations
