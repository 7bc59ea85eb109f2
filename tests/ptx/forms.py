"""Kernels of one instruction: thread i applies it to element i of each source array."""

from collections.abc import Sequence

import numpy as np

from tegrad import ptx
from tegrad.ptx.types import TYPES, Ty

HEADER = ".version 8.5\n.target sm_87\n.address_size 64\n"
NUMPY = {
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8, "u16": np.uint16, "s16": np.int16, "b16": np.uint16,
    "u32": np.uint32,
    "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64, "bf16": np.uint16, "tf32": np.uint32, "f16x2": np.uint32, "e4m3x2": np.uint16,
    "e5m2x2": np.uint16, "bf16x2": np.uint32, "pred": np.uint32,
}  # fmt: skip
WIDTH = {8: "b16", 16: "b16", 32: "b32", 64: "b64", 1: "pred"}
BITS = {np.float16: np.uint16, np.float32: np.uint32, np.float64: np.uint64}


def register(t: Ty) -> str:
    """The register type that holds a PTX type."""
    return WIDTH[t.bits]


def kernel(
    name: str, op: str, result: str, sources: Sequence[str], extra: str = "", before: str = "", pair: bool = False
) -> str:
    """A kernel that applies `op d, a, b, ...extra` to arrays; predicates travel as 0 or 1 in 32 bits."""
    params = ", ".join(f".param .u64 p{i}" for i in range(len(sources) + 1))
    regs, body = [], []
    for i, s in enumerate(sources):
        t = TYPES[s]
        size = 4 if s == "pred" else t.size
        regs.append(f".reg .{register(t)} %s{i};")
        body.append(f"ld.param.u64 %a, [p{i + 1}]; mad.wide.u32 %a, %i, {size}, %a;")
        if s == "pred":
            body.append(f"ld.global.u32 %t, [%a]; setp.ne.u32 %s{i}, %t, 0;")
        else:
            body.append(f"ld.global.{'s8' if s == 's8' else 'u8' if t.bits == 8 else f'b{t.bits}'} %s{i}, [%a];")
    r = TYPES[result]
    regs.append(f".reg .{register(r)} %d;")
    operands = ", ".join(f"%s{i}" for i in range(len(sources)))
    body.append(f"{before} {op} %d, {operands}{extra};")
    body.append(f"ld.param.u64 %a, [p0]; mad.wide.u32 %a, %i, {4 if result == 'pred' else r.size}, %a;")
    if result == "pred":
        body.append("selp.u32 %t, 1, 0, %d; st.global.u32 [%a], %t;")
    else:
        body.append(f"st.global.b{r.bits} [%a], %d;")
    return f"""
.visible .entry {name}({params})
{{
  .reg .u64 %a; .reg .u32 %i, %t, %c, %n; {" ".join(regs)}
  mov.u32 %i, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %n, %ntid.x; mad.lo.u32 %i, %c, %n, %i;
  {" ".join(body)}
  ret;
}}
"""


def launch(k: ptx.LoadedKernel, result: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Run a kernel of one instruction over equally long arrays (a multiple of 32)."""
    n = len(arrays[0])
    assert n % 32 == 0
    out = np.zeros(n, NUMPY[result])
    k.launch((n // 32, 1, 1), (32, 1, 1), [out, *arrays], threads=1)
    return out


def apply(op: str, result: str, sources: Sequence[str], arrays: Sequence[np.ndarray], extra: str = "") -> np.ndarray:
    """Load and run one instruction."""
    module = ptx.load(HEADER + kernel("k", op, result, sources, extra), None)
    return launch(module.kernels["k"], result, arrays)
