"""Atomic operations, fences and copies to shared memory."""

import numpy as np
import pytest

from tegrad import ptx
from tests.ptx.forms import HEADER, NUMPY

RNG = np.random.default_rng(5)


def run(
    body: str, memory: np.ndarray, old: np.ndarray, *more: np.ndarray, ctas: int = 1, threads: int = 64, t: str = "b32"
) -> None:
    """%m is the address of `memory`, %o the thread's element of `old`; %v receives what goes there."""
    size = old.dtype.itemsize
    params = ", ".join(f".param .u64 p{i}" for i in range(2 + len(more)))
    reg = f"b{8 * size}"
    loads = "".join(
        f"ld.param.u64 %a, [p{i + 2}]; mad.wide.u32 %a, %i, {x.dtype.itemsize}, %a; "
        f"ld.global.b{8 * x.dtype.itemsize} %x{i}, [%a];"
        for i, x in enumerate(more)
    )
    regs = "".join(f".reg .b{8 * x.dtype.itemsize} %x{i};" for i, x in enumerate(more))
    text = f"""{HEADER}.visible .entry k({params}) {{
      .reg .u64 %m, %o, %a; .reg .b32 %i, %c, %n, %t<8>; .reg .{reg} %v; .reg .pred %p, %q; {regs}
      ld.param.u64 %m, [p0]; ld.param.u64 %o, [p1]; mov.u32 %i, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %n, %ntid.x;
      mad.lo.u32 %i, %c, %n, %i; mad.wide.u32 %o, %i, {size}, %o; mov.{reg} %v, 0; {loads} {body}
      st.global.{reg} [%o], %v; ret; }}"""
    ptx.load(text, None).kernels["k"].launch((ctas, 1, 1), (threads, 1, 1), [memory, old, *more], threads=2)


INTEGER = [
    f"{op}.{t}"
    for op, types in (
        ("add", ("u32", "s32", "u64")), ("min", ("u32", "s32", "u64", "s64")), ("max", ("u32", "s32", "u64", "s64")),
        ("and", ("b32", "b64")), ("or", ("b32", "b64")), ("xor", ("b32", "b64")), ("inc", ("u32",)), ("dec", ("u32",)),
        ("exch", ("b32", "b64")),
    )
    for t in types
]  # fmt: skip


def combine(op: str, old: int, b: int) -> int:
    return {
        "add": lambda: old + b, "min": lambda: min(old, b), "max": lambda: max(old, b), "and": lambda: old & b,
        "or": lambda: old | b,
        "xor": lambda: old ^ b, "inc": lambda: 0 if old >= b else old + 1,
        "dec": lambda: b if old == 0 or old > b else old - 1,
        "exch": lambda: b,
    }[op]()  # fmt: skip


@pytest.mark.parametrize("op", INTEGER)
@pytest.mark.parametrize("space", ["global", "generic", "shared"])
def test_atom_of_lanes_in_order(op: str, space: str) -> None:
    """Lanes of one warp update one word one after the other; each gets the value before its own."""
    name, t = op.split(".")
    dtype = NUMPY[t]
    bits = dtype().itemsize * 8
    b = RNG.integers(0, 1 << 62, 32, dtype=np.uint64).astype(dtype)
    if name in ("inc", "dec"):
        b = (b % 9).astype(dtype)
    memory, old = np.array([12345], np.uint64).astype(dtype), np.zeros(32, dtype)
    if space == "shared":
        body = f""".shared .align 8 .b8 s[8]; setp.eq.u32 %p, %i, 0; .reg .b{bits} %w; @%p ld.global.b{bits} %w, [%m];
          @%p st.shared.b{bits} [s], %w; bar.sync 0; atom.shared.{op} %v, [s], %x0; bar.sync 0;
          @%p ld.shared.b{bits} %w, [s]; @%p st.global.b{bits} [%m], %w;"""
    else:
        body = f"atom.{'global.' if space == 'global' else ''}{op} %v, [%m], %x0;"
    run(body, memory, old, b, threads=32)
    value, want = int(np.array([12345], np.uint64).astype(dtype)[0]), []
    wrap = (lambda x: int(np.array([x & (1 << bits) - 1], np.uint64).astype(dtype)[0])) if True else None
    for x in b:
        want.append(value)
        value = wrap(combine(name, value, int(x)))
    assert old.tolist() == want
    assert memory.tolist() == [value]


@pytest.mark.parametrize("t", ["f32", "f64"])
def test_red_add_of_floats_is_exact_on_small_integers(t: str) -> None:
    x = RNG.integers(-100, 100, 512).astype(NUMPY[t])
    memory, old = np.zeros(1, NUMPY[t]), np.zeros(512, np.uint32)
    run(f"red.global.add.{t} [%m], %x0;", memory, old, x, ctas=8)
    assert memory[0] == x.sum()


def test_add_of_half_pairs() -> None:
    x = RNG.integers(-8, 8, (64, 2)).astype(np.float16)
    memory, old = np.zeros(2, np.float16), np.zeros(64, np.uint32)
    run("atom.global.add.noftz.f16x2 %v, [%m], %x0;", memory, old, x.view(np.uint32).ravel())
    assert (memory == x.astype(np.float32).sum(0)).all()


def test_counters_of_many_ctas_lose_nothing() -> None:
    memory, old = np.zeros(1, np.uint32), np.zeros(64 * 64, np.uint32)
    run("atom.global.add.u32 %v, [%m], 1;", memory, old, ctas=64)
    assert memory[0] == 4096
    assert (np.sort(old) == np.arange(4096)).all()


def test_compare_and_swap_lets_one_thread_win() -> None:
    memory, old = np.zeros(1, np.uint32), np.zeros(256, np.uint32)
    run("add.u32 %t0, %i, 1; atom.global.cas.b32 %v, [%m], 0, %t0;", memory, old, ctas=4)
    assert memory[0] > 0
    assert (old == 0).sum() == 1
    assert set(old[old != 0].tolist()) == {int(memory[0])}


def test_predicated_atomics_touch_nothing_else() -> None:
    memory, old = np.zeros(1, np.uint32), np.full(64, 7, np.uint32)
    run("mov.u32 %v, 5; setp.lt.u32 %p, %i, 3; @%p atom.global.add.u32 %v, [%m], 10;", memory, old)
    assert memory[0] == 30
    assert sorted(old[:3].tolist()) == [0, 10, 20]
    assert (old[3:] == 5).all()


def test_atomic_on_unmapped_memory_faults() -> None:
    pages, memory = np.zeros(256, np.uint8), np.zeros(1 << 20, np.uint8)
    pages[1] = 1
    text = f"""{HEADER}.visible .entry k(.param .u64 p) {{ .reg .u64 %a; .reg .u32 %v; ld.param.u64 %a, [p];
      atom.global.add.u32 %v, [%a], 1; ret; }}"""
    k = ptx.load(text, None).kernels["k"]
    mem = ptx.Memory(memory.ctypes.data, pages.ctypes.data, 1 << 20)
    for address, kind in ((0x1000, "read-only"), (0x2000, "unmapped"), (0x1002, "misaligned")):
        with pytest.raises(ptx.PtxFault) as e:
            k.launch((1, 1, 1), (32, 1, 1), address.to_bytes(8, "little"), memory=mem)
        assert (e.value.kind, e.value.access, e.value.address) == (kind, "atomic", address)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_copies_and_fills_with_zeros(size: int) -> None:
    source = RNG.integers(0, 256, 64 * 16, dtype=np.uint64).astype(np.uint8)
    out, old = np.zeros(64 * 16, np.uint8), np.zeros(64, np.uint32)
    body = f""".shared .align 16 .b8 s[1024]; .reg .u64 %g; mov.u32 %t0, s; mad.lo.u32 %t0, %i, 16, %t0;
      mad.wide.u32 %g, %i, 16, %m; setp.lt.u32 %p, %i, 32; selp.u32 %t1, {size}, 4, %p;
      cp.async.{"cg" if size == 16 else "ca"}.shared.global [%t0], [%g], {size}, %t1;
      cp.async.commit_group; cp.async.wait_group 0; bar.sync 0; .reg .b32 %w<4>;
      ld.shared.v4.b32 {{%w0, %w1, %w2, %w3}}, [%t0]; st.global.v4.b32 [%g], {{%w0, %w1, %w2, %w3}};"""
    out[:] = source
    run(body, out, old)
    got, want = out.reshape(64, 16), source.reshape(64, 16)
    assert (got[:32, :size] == want[:32, :size]).all()
    assert (got[32:, :4] == want[32:, :4]).all()
    assert (got[32:, 4:size] == 0).all()


def test_cp_async_lands_at_its_wait_and_with_seeds_at_once_too() -> None:
    text = f"""{HEADER}.visible .entry k(.param .u64 p) {{ .reg .u64 %a; .reg .u32 %i, %t, %v;
      .shared .align 16 .b8 s[512]; ld.param.u64 %a, [p]; mov.u32 %i, %tid.x; mad.wide.u32 %a, %i, 4, %a;
      mov.u32 %t, s; mad.lo.u32 %t, %i, 4, %t; st.shared.u32 [%t], 7;
      cp.async.ca.shared.global [%t], [%a], 4; cp.async.commit_group; ld.shared.u32 %v, [%t];
      cp.async.wait_group 0; ld.shared.u32 %t, [%t]; st.global.u32 [%a], %v; st.global.u32 [%a+512], %t; ret; }}"""
    k = ptx.load(text, None).kernels["k"]
    seen = set()
    for seed in range(12):
        memory = np.arange(256, dtype=np.uint32) + 100
        k.launch((1, 1, 1), (128, 1, 1), [memory], seed=seed)
        assert (memory[128:] == np.arange(128) + 100).all()
        early = memory[:128] != 7
        assert seed or not early.any()
        seen |= set(early.tolist())
    assert seen == {True, False}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_distributes_rows(count: int, trans: str) -> None:
    matrices = RNG.integers(0, 1 << 16, (4, 8, 8), dtype=np.uint64).astype(np.uint16)
    out, old = np.zeros((32, 4), np.uint32), np.zeros(32, np.uint32)
    regs = ", ".join(f"%w{i}" for i in range(count))
    body = f""".shared .align 16 .b8 s[512]; .reg .u64 %g; .reg .b32 %w<4>; mov.u32 %t0, s; mad.lo.u32 %t0, %i, 16, %t0;
      mad.wide.u32 %g, %i, 16, %m; ld.global.v4.b32 {{%w0, %w1, %w2, %w3}}, [%g]; st.shared.v4.b32 [%t0], {{%w0, %w1,
      %w2, %w3}};
      bar.sync 0; mov.b32 %w0, 0; mov.b32 %w1, 0; mov.b32 %w2, 0; mov.b32 %w3, 0;
      ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{regs}}}, [%t0];
      st.global.v4.b32 [%g], {{%w0, %w1, %w2, %w3}};"""
    out[:] = matrices.reshape(32, 8).view(np.uint32).reshape(32, 4)
    run(body, out, old, threads=32)
    for i in range(count):
        m = matrices[i].T if trans else matrices[i]
        for lane in range(32):
            pair = m[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
            assert out[lane, i] == int(pair[0]) | int(pair[1]) << 16


@pytest.mark.parametrize(("op", "space"), [("atom.global", "global"), ("atom", "global"), ("atom", "shared")])
def test_float_sums_lose_subnormal_numbers_in_global_memory_only(op: str, space: str) -> None:
    """Shared memory keeps them, reached through a generic address too (PTX ISA 9.7.13, atom)."""
    out, old = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    body = f""".shared .align 4 .b8 s[128]; .reg .b64 %g; mad.wide.u32 %g, %i, 4, %m;
      mov.u64 %a, s; cvta.shared.u64 %a, %a; mad.wide.u32 %a, %i, 4, %a;
      {"mov.b64 %a, %g;" if space == "global" else ""} st.b32 [%a], 0x00400000;
      {op}.add.f32 %v, [%a], 0f00200000; ld.b32 %v, [%a]; st.global.b32 [%g], %v;"""
    run(body, out, old, threads=32)
    assert (out == (0 if space == "global" else 0x00600000)).all()
