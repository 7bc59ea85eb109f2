"""Special registers: where each one's value comes from."""

import time
from collections.abc import Callable

from tegrad.ptx.helpers import helper
from tegrad.ptx.ir import Fn, V
from tegrad.ptx.layout import LANES, Frame, Launch
from tegrad.ptx.lowering import Lowering

Source = Callable[[Lowering], V]


def _tid(axis: int) -> Source:
    return lambda e: e.f.load("i32", e.frame, Frame.TID + 128 * axis, LANES, 64)


def _frame(offset: int) -> Source:
    return lambda e: e.f.load("i32", e.frame, offset)


def _launch(offset: int) -> Source:
    return lambda e: e.f.load("i32", e.launch, offset)


def _constant(value: int) -> Source:
    return lambda e: e.f.const("i32", value)


def _lane_mask(of: Callable[[int], int]) -> Source:
    return lambda e: e.f.elements("i32", [of(i) for i in range(LANES)])


def _clock64(e: Lowering) -> V:
    return e.f.call("llvm.readcyclecounter", "i64", 1)


def _clock(e: Lowering) -> V:
    return e.f.resize(_clock64(e), "i32", False)


def _clock_hi(e: Lowering) -> V:
    return e.f.resize(e.f.bin("lshr", _clock64(e), 32), "i32", False)


@helper("i64", "")
def tgx_nanoseconds(f: Fn) -> V:
    """The host's monotonic clock."""
    at = f.alloca("[2 x i64]", 8)
    f.call("clock_gettime", "i32", 1, f.const("i32", time.CLOCK_MONOTONIC), at)
    return f.add(f.mul(f.load("i64", at), 1_000_000_000), f.load("i64", at, 8))


def _nanoseconds(e: Lowering) -> V:
    return e.f.call("tgx_nanoseconds", "i64", 1)


TABLE: dict[str, Source] = {
    **{f"%tid.{a}": _tid(i) for i, a in enumerate("xyz")},
    **{f"%ctaid.{a}": _frame(Frame.CTAID + 4 * i) for i, a in enumerate("xyz")},
    **{f"%ntid.{a}": _launch(Launch.NTID + 4 * i) for i, a in enumerate("xyz")},
    **{f"%nctaid.{a}": _launch(Launch.NCTAID + 4 * i) for i, a in enumerate("xyz")},
    "%laneid": lambda e: e.f.iota("i32", LANES),
    "%warpid": _frame(Frame.WARP),
    "%nwarpid": _constant(64),
    "%smid": lambda e: e.f.resize(e.f.load("i64", e.frame, Frame.CTA), "i32", False),
    "%nsmid": _constant(1),
    "%gridid": _constant(0),
    "%lanemask_eq": _lane_mask(lambda i: 1 << i),
    "%lanemask_lt": _lane_mask(lambda i: (1 << i) - 1),
    "%lanemask_le": _lane_mask(lambda i: (2 << i) - 1),
    "%lanemask_gt": _lane_mask(lambda i: 0xFFFFFFFF & ~((2 << i) - 1)),
    "%lanemask_ge": _lane_mask(lambda i: 0xFFFFFFFF & ~((1 << i) - 1)),
    "%clock": _clock,
    "%clock_hi": _clock_hi,
    "%clock64": _clock64,
    "%globaltimer": _nanoseconds,
    "%globaltimer_lo": lambda e: e.f.resize(_nanoseconds(e), "i32", False),
    "%globaltimer_hi": lambda e: e.f.resize(e.f.bin("lshr", _nanoseconds(e), 32), "i32", False),
    "%dynamic_smem_size": _launch(Launch.DYNAMIC_SHARED),
    "%total_smem_size": _launch(Launch.SHARED_SIZE),
    "WARP_SZ": _constant(LANES),
}
