"""Every instruction form that tinygrad's two NV renderers emit compiles and executes."""

import json
from pathlib import Path

import numpy as np
import pytest

from tegrad import ptx
from tegrad.ptx.instructions import find
from tegrad.ptx.parser import split_op
from tegrad.ptx.rules import OpRule
from tegrad.ptx.syntax import Ins
from tests.ptx.forms import HEADER, kernel

DATA = json.loads((Path(__file__).parents[1] / "data" / "ptx-forms.json").read_text())
FORMS = sorted(set(DATA["PTXRenderer"]["instructions"]) | set(DATA["CUDARenderer_NVRTC"]["instructions"]))
MMA_REGS = {
    "m16n8k16.row.col.f16.f16.f16.f16": (2, 4, 2, 2), "m16n8k16.row.col.f32.f16.f16.f32": (4, 4, 2, 4),
    "m16n8k8.row.col.f32.tf32.tf32.f32": (4, 4, 2, 4), "m16n8k8.row.col.f16.f16.f16.f16": (2, 2, 1, 2),
    "m16n8k8.row.col.f32.f16.f16.f32": (4, 2, 1, 4), "m16n8k16.row.col.f32.bf16.bf16.f32": (4, 4, 2, 4),
}  # fmt: skip
REG_OF = {"8": "b16", "16": "b16", "32": "b32", "64": "b64"}


def memory_body(op: str) -> str:
    """A load or store of this form, on the space's own memory."""
    parts = op.split(".")
    kind, space, last = parts[0], parts[1], parts[-1]
    bits = last.lstrip("usbf")
    n = next((int(p[1]) for p in parts if p in ("v2", "v4")), 1)
    regs = ", ".join(f"%x{i}" for i in range(n))
    target = f"{{{regs}}}" if n > 1 else "%x0"
    declare = f".reg .{REG_OF[bits]} {regs};" + "".join(f" mov.{REG_OF[bits]} %x{i}, {i};" for i in range(n))
    if space == "param" and kind == "ld":
        where, before = "[p0]", ""
    elif space == "param":
        where, before = "[v+0]", f".param .b{bits} v;"
    elif space == "global":
        where, before = "[%a+64]", "ld.param.u64 %a, [p0];"
    else:
        where, before = "[%b+16]", f".{space} .align 16 .b8 v[256]; mov.u64 %b, v;"
    access = f"{op} {target}, {where};" if kind == "ld" else f"{op} {where}, {target};"
    return f".reg .u64 %b; {before} {declare} {access}"


def special_body(op: str) -> str | None:
    """PTX that uses a form which is not a plain operation on registers."""
    base, mods, types = split_op(op)
    if base in ("ld", "st"):
        return memory_body(op)
    if base == "mma":
        counts = MMA_REGS[op.removeprefix("mma.sync.aligned.")]
        names = [[f"%m{k}_{i}" for i in range(c)] for k, c in enumerate(counts)]
        declare = f".reg .b32 {', '.join(n for group in names for n in group)};"
        zero = "".join(f" mov.b32 {n}, 0;" for group in names[1:] for n in group)
        return f"{declare}{zero} {op} {', '.join('{' + ', '.join(g) + '}' for g in names)};"
    if base == "mov":
        r = "pred" if op == "mov.pred" else REG_OF[types[-1].name.lstrip("usbf")]
        start = "setp.eq.u32 %m1, 0, 0;" if r == "pred" else f"mov.{types[-1].name} %m1, 0;"
        return f".reg .{r} %m0, %m1; {start} {op} %m0, %m1;"
    if base in ("addc", "subc", "madc") or "cc" in mods:
        sources = "%x, %x, %x" if base.startswith("mad") else "%x, %x"
        return f".reg .u32 %x; mov.u32 %x, -1; add.cc.u32 %x, %x, %x; {op} %x, {sources};"
    return {
        "bra": "bra L; L:", "bra.uni": "bra.uni L; L:", "ret": "", "bar.sync": "bar.sync 0;",
        "call.uni": "{ .param .b32 r; call.uni (r), helper, (r); }",
        "cvta.to.global.u64": "ld.param.u64 %a, [p0]; cvta.to.global.u64 %a, %a;",
        "cvta.local.u64": ".local .b8 v[8]; mov.u64 %a, v; cvta.local.u64 %a, %a;",
        "cvta.to.local.u64": ".local .b8 v[8]; mov.u64 %a, v; cvta.local.u64 %a, %a; cvta.to.local.u64 %a, %a;",
    }.get(op)  # fmt: skip


def plain(op: str) -> str | None:
    """A kernel of arithmetic on registers, from the operand types of the form."""
    base, mods, types = split_op(op)
    ins = Ins(op, base, mods, types, (), None, 0)
    if base == "setp":
        return kernel("k", op, "pred", [types[-1].name] * 2)
    if base == "set":
        return kernel("k", op, types[0].name, [types[-1].name] * 2)
    rule = find(ins)
    if not isinstance(rule, OpRule):
        return None
    result, sources = rule.signature(ins)
    return kernel("k", op, result.name, [s.name for s in sources])


HELPER = (
    ".func (.param .b32 o) helper(.param .b32 x) { .reg .b32 %h; ld.param.b32 %h, [x]; st.param.b32 [o], %h; ret; }\n"
)


@pytest.mark.parametrize("op", FORMS)
def test_form_compiles_and_executes(op: str) -> None:
    body = special_body(op)
    text = plain(op) if body is None else f"{HELPER}.visible .entry k(.param .u64 p0)\n{{ .reg .u64 %a; {body} ret; }}"
    assert text is not None, f"no kernel for {op}"
    k = ptx.load(HEADER + text, None).kernels["k"]
    buffers = [np.zeros(4096, np.uint8) for _ in k.params]
    stats = k.launch((1, 1, 1), (32, 1, 1), buffers, threads=1)
    assert stats.instructions >= 32


@pytest.mark.parametrize(
    "name", sorted({s for r in ("PTXRenderer", "CUDARenderer_NVRTC") for s in DATA[r]["special_registers"]})
)
def test_special_register_is_known(name: str) -> None:
    text = f".visible .entry k(.param .u64 p0) {{ .reg .u32 %x; mov.u32 %x, {name}; ret; }}"
    assert ptx.load(HEADER + text, None).kernels["k"].launch((1, 1, 1), (32, 1, 1), [0]).instructions == 64
