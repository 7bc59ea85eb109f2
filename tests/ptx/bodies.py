"""Kernels around a body of instructions, with registers and the thread's index to start with."""

from tegrad import ptx
from tests.ptx.forms import HEADER

START = ".reg .u64 %a, %b, %w<4>; .reg .b32 %i, %c, %n, %t<12>; .reg .f32 %f<4>; .reg .pred %p, %q; mov.u32 %i, %tid.x;"
"""Registers, and the thread's index in its CTA in %i."""

OUT = """ld.param.u64 %a, [p0]; mov.u32 %c, %ctaid.x; mov.u32 %n, %ntid.x; mad.lo.u32 %c, %c, %n, %i;
  mad.wide.u32 %a, %c, 4, %a;"""
"""The address of the thread's own word of those at p0, in %a."""


def module(body: str, params: int = 1, head: str = "") -> ptx.Module:
    """A kernel `k` of a body, with parameters p0, p1, ... of 64 bits."""
    names = ", ".join(f".param .u64 p{i}" for i in range(params))
    return ptx.load(f"{HEADER}{head}.visible .entry k({names}) {{ {START} {body} ret; }}", None)
