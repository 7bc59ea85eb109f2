"""Gather and scatter: memory access of many lanes, masked vectors, loops over lanes."""

from collections.abc import Iterator
from contextlib import contextmanager

from tegrad.ptx.helpers import family
from tegrad.ptx.ir import Fn, Module, V, vec
from tegrad.ptx.layout import LANES
from tegrad.ptx.types import EL_BITS

KEEP = "tgx_keep_b"


def keep(f: Fn, v: V, at: V, offset: int, mask: V) -> None:
    """Store a value in a vector in memory for the lanes of an i32 mask: by a function, which LLVM compiles once."""
    v = f.splat(f.bits(v, f"i{EL_BITS[v.el]}"), LANES)
    f.call_void(f"{KEEP}{EL_BITS[v.el]}", f.gep(at, offset), mask, v)


@family(KEEP)
def emit_keep(module: Module, name: str) -> None:
    """tgx_keep_b*(at, mask, values): see `keep`."""
    el = f"i{name.removeprefix(KEEP)}"
    f = Fn(module, name, "void", f"ptr at, i32 mask, {vec(el, LANES)} values", "nounwind")
    at, mask, values = f.args
    align = min(64, EL_BITS[el] // 8 * LANES)
    f.store(f.select(f.mask_vec(mask), values, f.load(el, at, 0, LANES, align)), at, 0, align)
    f.ret()
    f.finish()


def gather(f: Fn, base: V | None, offsets: V, active: V, el: str) -> V:
    """Load one element per active lane at base + offset (or at absolute i64 addresses)."""
    n = offsets.n
    ptrs = f.pointer(offsets) if base is None else f.op("ptr", n, f"getelementptr i8, {base}, {offsets}")
    size = int(el[1:]) // 8
    zero = f.const(el, 0, n)
    name = f"llvm.masked.gather.v{n}{el}.v{n}p0"
    f.module.decls[name] = f"declare <{n} x {el}> @{name}(<{n} x ptr>, i32 immarg, <{n} x i1>, <{n} x {el}>)"
    return f.op(el, n, f"call <{n} x {el}> @{name}({ptrs}, i32 {size}, {active}, {zero})", pure=False)


def gather_any(f: Fn, host: V, active: V, el: str) -> V:
    """Gather of any width: narrow elements are cut out of aligned words, which x86 can gather."""
    if el in ("i32", "i64"):
        return gather(f, None, host, active, el)
    words = gather(f, None, f.and_(host, -4), active, "i32")
    shift = f.cast("trunc", f.bin("shl", f.and_(host, 3), 3), "i32")
    return f.cast("trunc", f.bin("lshr", words, shift), el)


def scatter_any(f: Fn, host: V, active: V, value: V) -> None:
    """Store one element per active lane; narrow ones lane by lane."""
    n = LANES
    if value.el in ("i32", "i64"):
        ptrs = f.pointer(host)
        name = f"llvm.masked.scatter.v{n}{value.el}.v{n}p0"
        f.module.decls[name] = f"declare void @{name}(<{n} x {value.el}>, <{n} x ptr>, i32 immarg, <{n} x i1>)"
        f.do(f"call void @{name}({value}, {ptrs}, i32 {int(value.el[1:]) // 8}, {active})")
        return
    with each_lane(f, f.mask_bits(active)) as lane:
        p = f.pointer(f.extract(host, lane))
        f.store(f.extract(value, lane), p)


@contextmanager
def each_lane(f: Fn, mask: V) -> Iterator[V]:
    """A loop over the set bits of an i32 mask; the body runs with the lane's index."""
    slot = f.variable(mask)
    with f.loop() as (_, end):
        m = f.load("i32", slot)
        f.leave(f.is_zero(m), end)
        f.store(f.and_(m, f.sub(m, 1)), slot)
        yield f.intr_flag("cttz", m, False)


def masked_load(f: Fn, el: str, n: int, p: V, active: V, align: int) -> V:
    name = f"llvm.masked.load.v{n}{el}.p0"
    f.module.decls[name] = f"declare <{n} x {el}> @{name}(ptr, i32 immarg, <{n} x i1>, <{n} x {el}>)"
    return f.op(el, n, f"call <{n} x {el}> @{name}({p}, i32 {align}, {active}, {f.const(el, 0, n)})", pure=False)


def masked_store(f: Fn, value: V, p: V, active: V, align: int) -> None:
    n, el = value.n, value.el
    name = f"llvm.masked.store.v{n}{el}.p0"
    f.module.decls[name] = f"declare void @{name}(<{n} x {el}>, ptr, i32 immarg, <{n} x i1>)"
    f.do(f"call void @{name}({value}, {p}, i32 {align}, {active})")


def replicate(f: Fn, v: V, n: int) -> V:
    """Each element n times in a row."""
    return v if n == 1 else f.shuffle(v, None, [i // n for i in range(v.n * n)])


def interleave(f: Fn, vs: list[V]) -> V:
    """Lane-major order of n vectors: v0[0], v1[0], ..., v0[1], ..."""
    if len(vs) == 1:
        return vs[0]
    if len(vs) == 2:
        return f.shuffle(vs[0], vs[1], [i // 2 + (i % 2) * LANES for i in range(2 * LANES)])
    a = f.shuffle(vs[0], vs[1], list(range(2 * LANES)))
    b = f.shuffle(vs[2], vs[3], list(range(2 * LANES)))
    return f.shuffle(a, b, [i // 4 + (i % 4) * LANES for i in range(4 * LANES)])
