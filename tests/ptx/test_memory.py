"""Loads and stores of every width, vector length, space and address pattern against numpy."""

import struct

import numpy as np
import pytest

from tegrad import ptx
from tests.ptx.forms import HEADER

RNG = np.random.default_rng(41)
REG = {8: "b16", 16: "b16", 32: "b32", 64: "b64"}
SIZE = 1 << 15
PATTERNS = {
    "consecutive": lambda n: np.arange(n),
    "reversed": lambda n: np.arange(n)[::-1],
    "shifted": lambda n: np.arange(n) + 3,
    "one": lambda n: np.full(n, 5),
    "strided": lambda n: 7 * np.arange(n),
    "random": lambda n: RNG.permutation(900)[:n],
    "pairs": lambda n: np.arange(n) // 2 * 9 + np.arange(n) % 2,
}
"""Element index of each thread, in units of the access."""
ACTIVE = {
    "all": lambda n: np.ones(n, bool), "odd": lambda n: np.arange(n) % 2 == 1, "tail": lambda n: np.arange(n) % 32 > 20,
    "some": lambda n: RNG.random(n) < 0.4,
}  # fmt: skip


def copy_kernel(space: str, bits: int, n: int) -> ptx.LoadedKernel:
    """out[thread] = data[offset[thread]] where the flag is set; data pass through shared or local memory."""
    step = bits // 8 * n
    regs = ", ".join(f"%x{i}" for i in range(n))
    group = f"{{{regs}}}" if n > 1 else "%x0"
    vector = f".v{n}" if n > 1 else ""
    fill = f"""mov.u32 %k, 0; L: mul.lo.u32 %o, %i, 256; mad.lo.u32 %o, %k, 4, %o; cvt.u64.u32 %w, %o; add.u64 %w,
      %data, %w;
      ld.global.b32 %v, [%w]; st.{space}.b32 [%o], %v; add.u32 %k, %k, 1; setp.lt.u32 %p, %k, 64; @%p bra L;
      bar.sync 0;"""
    declare = {
        "global": "", "generic": "", "shared": f".shared .align 16 .b8 buf[{SIZE}];",
        "local": ".local .align 16 .b8 buf[4096];",
    }[space]  # fmt: skip
    if space == "local":
        fill = """mov.u32 %k, 0; L: mul.lo.u32 %o, %k, 4; cvt.u64.u32 %w, %o; add.u64 %w, %data, %w;
          ld.global.b32 %v, [%w];
          cvt.u64.u32 %w, %o; st.local.b32 [%w], %v; add.u32 %k, %k, 1; setp.lt.u32 %p, %k, 1024; @%p bra L;"""
    base = {"global": "%data", "generic": "%data", "shared": "0", "local": "0"}[space]
    ld = f"ld{'' if space == 'generic' else '.' + space}"
    address = "%a" if space != "shared" else "%o"
    text = f"""{HEADER}.visible .entry k(.param .u64 po, .param .u64 pd, .param .u64 pi, .param .u64 pf) {{
      .reg .u64 %out, %data, %w, %a, %z; .reg .u32 %i, %k, %o, %v, %f; .reg .pred %p, %q; .reg .{REG[bits]} {regs};
      {declare}
      ld.param.u64 %out, [po]; ld.param.u64 %data, [pd]; mov.u32 %i, %tid.x;
      {fill if space in ("shared", "local") else ""}
      ld.param.u64 %w, [pi]; mad.wide.u32 %w, %i, 4, %w; ld.global.u32 %o, [%w];
      ld.param.u64 %w, [pf]; mad.wide.u32 %w, %i, 4, %w; ld.global.u32 %f, [%w]; setp.ne.u32 %q, %f, 0;
      mul.lo.u32 %o, %o, {step}; cvt.u64.u32 %a, %o; mov.u64 %z, {base}; add.u64 %a, %a, %z;
      {"".join(f"mov.{REG[bits]} %x{i}, 7;" for i in range(n))}
      @%q {ld}{vector}.b{bits} {group}, [{address}];
      mad.wide.u32 %w, %i, {step}, %out; st.global{vector}.b{bits} [%w], {group};
      ret; }}"""
    return ptx.load(text, None).kernels["k"]


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("space", ["global", "generic", "shared", "local"])
def test_loads_of_every_pattern(space: str, n: int, bits: int) -> None:
    threads, step = 128, bits // 8 * n
    if bits * n > 128:
        pytest.skip("an access has at most 16 bytes")
    k = copy_kernel(space, bits, n)
    data = RNG.integers(0, 256, SIZE).astype(np.uint8)
    room = (4096 if space == "local" else SIZE) // step
    for pattern, index in PATTERNS.items():
        for who, active in ACTIVE.items():
            at, on = (index(threads) % room).astype(np.uint32), active(threads)
            out = np.zeros(threads * step, np.uint8)
            k.launch((1, 1, 1), (threads, 1, 1), [out, data, at, on.astype(np.uint32)], threads=1)
            seven = np.frombuffer((7).to_bytes(bits // 8, "little") * n, np.uint8)
            for i in range(threads):
                want = data[at[i] * step : (at[i] + 1) * step] if on[i] else seven
                assert (out[i * step : (i + 1) * step] == want).all(), (pattern, who, i)


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("space", ["global", "generic"])
def test_stores_of_every_pattern(space: str, n: int, bits: int) -> None:
    threads, step = 128, bits // 8 * n
    if bits * n > 128:
        pytest.skip("an access has at most 16 bytes")
    regs = ", ".join(f"%x{i}" for i in range(n))
    group = f"{{{regs}}}" if n > 1 else "%x0"
    vector = f".v{n}" if n > 1 else ""
    st = "st" if space == "generic" else "st.global"
    text = f"""{HEADER}.visible .entry k(.param .u64 po, .param .u64 pd, .param .u64 pi, .param .u64 pf) {{
      .reg .u64 %out, %w; .reg .u32 %i, %o, %f; .reg .pred %q; .reg .{REG[bits]} {regs};
      ld.param.u64 %out, [po]; ld.param.u64 %w, [pd]; mov.u32 %i, %tid.x; mad.wide.u32 %w, %i, {step}, %w;
      ld.global{vector}.b{bits} {group}, [%w];
      ld.param.u64 %w, [pi]; mad.wide.u32 %w, %i, 4, %w; ld.global.u32 %o, [%w];
      ld.param.u64 %w, [pf]; mad.wide.u32 %w, %i, 4, %w; ld.global.u32 %f, [%w]; setp.ne.u32 %q, %f, 0;
      mad.wide.u32 %w, %o, {step}, %out; @%q {st}{vector}.b{bits} [%w], {group}; ret; }}"""
    k = ptx.load(text, None).kernels["k"]
    data = RNG.integers(0, 256, threads * step).astype(np.uint8)
    for pattern, index in PATTERNS.items():
        if pattern == "one":
            continue
        for who, active in ACTIVE.items():
            at, on = index(threads).astype(np.uint32), active(threads)
            out = np.full(1000 * step, 0xEE, np.uint8)
            want = out.copy()
            k.launch((1, 1, 1), (threads, 1, 1), [out, data, at, on.astype(np.uint32)], threads=1)
            for i in np.nonzero(on)[0]:
                want[at[i] * step : (at[i] + 1) * step] = data[i * step : (i + 1) * step]
            assert (out == want).all(), (pattern, who)


@pytest.mark.parametrize("t", ["u8", "s8", "u16", "s16", "u32", "s32"])
def test_narrow_loads_extend_to_the_register(t: str) -> None:
    values = np.array([0, 1, 127, 128, 255, 32767, 32768, 65535] * 4, np.uint64)
    dtype = {"u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32}[t]
    data, out = values.astype(dtype), np.zeros(32, np.int64)
    text = f"""{HEADER}.visible .entry k(.param .u64 po, .param .u64 pd) {{ .reg .u64 %a, %b, %x; .reg .u32 %i;
      mov.u32 %i, %tid.x; ld.param.u64 %a, [pd]; mad.wide.u32 %a, %i, {data.itemsize}, %a; ld.global.{t} %x, [%a];
      ld.param.u64 %b, [po]; mad.wide.u32 %b, %i, 8, %b; st.global.u64 [%b], %x; ret; }}"""
    ptx.load(text, None).launch((1, 1, 1), (32, 1, 1), [out, data])
    assert (out == data.astype(np.int64)).all()


def test_a_store_keeps_the_low_part_of_a_wide_register() -> None:
    out = np.zeros(32, np.uint8)
    text = f"""{HEADER}.visible .entry k(.param .u64 po) {{ .reg .u64 %a; .reg .u32 %i, %x;
      mov.u32 %i, %tid.x; ld.param.u64 %a, [po]; cvt.u64.u32 %a, %i; .reg .u64 %o; ld.param.u64 %o, [po]; add.u64 %a,
      %a, %o;
      add.u32 %x, %i, 0x1200; st.global.u8 [%a], %x; ret; }}"""
    ptx.load(text, None).launch((1, 1, 1), (32, 1, 1), [out])
    assert (out == np.arange(32)).all()


def test_parameters_of_every_type_and_alignment() -> None:
    text = f"""{HEADER}.visible .entry k(.param .u64 po, .param .u8 a, .param .u16 b, .param .f32 c,
      .param .align 8 .b8 d[12],
      .param .f64 e, .param .s8 f) {{
      .reg .u64 %o; .reg .b32 %r<8>; .reg .f32 %f; .reg .f64 %d; ld.param.u64 %o, [po];
      ld.param.u8 %r0, [a]; ld.param.u16 %r1, [b]; ld.param.f32 %f, [c]; ld.param.v2.u32 {{%r2, %r3}}, [d];
      ld.param.u32 %r4, [d+8];
      ld.param.f64 %d, [e]; ld.param.s8 %r5, [f];
      st.global.u32 [%o], %r0; st.global.u32 [%o+4], %r1; st.global.f32 [%o+8], %f; st.global.u32 [%o+12], %r2;
      st.global.u32 [%o+16], %r3; st.global.u32 [%o+20], %r4; st.global.f64 [%o+24], %d; st.global.u32 [%o+32], %r5;
      ret; }}"""
    k = ptx.load(text, None).kernels["k"]
    assert [(p.name, p.offset, p.size) for p in k.params] == [
        ("po", 0, 8), ("a", 8, 1), ("b", 10, 2), ("c", 12, 4), ("d", 16, 12), ("e", 32, 8), ("f", 40, 1),
    ]  # fmt: skip
    assert k.param_size == 41
    out = np.zeros(40, np.uint8)
    raw = struct.pack("<QBxHf3I4xdb", out.ctypes.data, 200, 60000, 1.5, 1, 2, 3, -2.25, -7)
    k.launch((1, 1, 1), (1, 1, 1), raw)
    assert struct.unpack("<IIfIIIdi", out[:36].tobytes()) == (200, 60000, 1.5, 1, 2, 3, -2.25, -7)


def test_arguments_are_checked() -> None:
    text = f"{HEADER}.visible .entry k(.param .u64 a, .param .f32 b) {{ ret; }}"
    k = ptx.load(text, None).kernels["k"]
    with pytest.raises(ptx.PtxError, match="2 arguments, got 1"):
        k.launch((1, 1, 1), (1, 1, 1), [0])
    with pytest.raises(ptx.PtxError, match="12 bytes of parameters, got 8"):
        k.launch((1, 1, 1), (1, 1, 1), bytes(8))


def test_uniform_addresses_in_a_loop() -> None:
    """All lanes read the same element in each trip: the scalar path, at page borders too."""
    text = f"""{HEADER}.visible .entry k(.param .u64 po, .param .u64 pd) {{ .reg .u64 %a, %o; .reg .u32 %i, %k;
      .reg .f32 %s, %x, %y;
      .reg .pred %p; ld.param.u64 %a, [pd]; mov.u32 %k, 0; mov.f32 %s, 0f00000000;
      L: ld.global.v2.f32 {{%x, %y}}, [%a]; add.f32 %s, %s, %x; sub.f32 %s, %s, %y; add.u64 %a, %a, 8; add.u32 %k, %k,
      1;
      setp.lt.u32 %p, %k, 1024; @%p bra L;
      mov.u32 %i, %tid.x; ld.param.u64 %o, [po]; mad.wide.u32 %o, %i, 4, %o; st.global.f32 [%o], %s; ret; }}"""
    memory, pages = np.zeros(1 << 16, np.uint8), np.zeros(16, np.uint8)
    pages[2:5] = 3
    data = memory[0x2000:0x4000].view(np.float32)
    data[:] = RNG.integers(-50, 50, 2048)
    k = ptx.load(text, None).kernels["k"]
    mem = ptx.Memory(memory.ctypes.data, pages.ctypes.data, 1 << 16)
    k.launch((1, 1, 1), (64, 1, 1), struct.pack("<QQ", 0x4000, 0x2000), memory=mem)
    assert (memory[0x4000:0x4100].view(np.float32) == data[::2].sum() - data[1::2].sum()).all()
    pages[3] = 0
    with pytest.raises(ptx.PtxFault) as e:
        k.launch((1, 1, 1), (64, 1, 1), struct.pack("<QQ", 0x4000, 0x2000), memory=mem)
    assert (e.value.kind, e.value.address, e.value.lane, e.value.size) == ("unmapped", 0x3000, 0, 8)
