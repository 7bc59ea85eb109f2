"""A kernel of one warp or more whose lanes each have their own values."""

import numpy as np

from tegrad import ptx
from tests.ptx.forms import HEADER


def run(body: str, *arrays: np.ndarray, out: type = np.uint32, threads: int = 32, regs: str = "") -> np.ndarray:
    """Thread i gets element i of each array in %x0, %x1, ...; what it leaves in %d is returned."""
    loads = "".join(
        f"ld.param.u64 %a, [p{i + 1}]; mad.wide.u32 %a, %i, 4, %a; ld.global.b32 %x{i}, [%a];"
        for i in range(len(arrays))
    )
    params = ", ".join(f".param .u64 p{i}" for i in range(len(arrays) + 1))
    text = f"""{HEADER}.visible .entry k({params}) {{
      .reg .u64 %a; .reg .b32 %i, %d, %x<8>, %t<8>; .reg .pred %p, %q; {regs}
      mov.u32 %i, %tid.x; mov.u32 %d, 0; {loads} {body}
      ld.param.u64 %a, [p0]; mad.wide.u32 %a, %i, 4, %a; st.global.b32 [%a], %d; ret; }}"""
    result = np.zeros(threads, out)
    ptx.load(text, None).kernels["k"].launch((1, 1, 1), (threads, 1, 1), [result, *arrays], threads=1)
    return result
