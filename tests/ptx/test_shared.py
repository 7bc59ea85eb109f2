"""What LLVM takes long over is compiled once for all kernels; what constants decide is decided when they are read."""

from tegrad import ptx
from tests.ptx.forms import HEADER


def kernel(body: str) -> ptx.module.LoadedKernel:
    """A kernel of these instructions, on %a and %b of each lane and %u of the warp."""
    text = f"""{HEADER}.visible .entry k(.param .u64 p, .param .u32 u) {{
      .reg .u64 %p; .reg .b32 %a, %b, %c, %d, %u; .reg .f32 %f; .reg .pred %q;
      mov.u32 %a, %tid.x; ld.param.u64 %p, [p]; ld.param.u32 %u, [u]; mad.wide.u32 %p, %a, 4, %p;
      ld.global.b32 %b, [%p]; {body} st.global.b32 [%p], %a; ret; }}"""
    return ptx.load(text, None).kernels["k"]


def test_long_instructions_are_functions_that_all_kernels_call() -> None:
    calls = {
        "dp4a.s32.s32 %a, %a, %b, %a;": "tgx_op_dp4a.s32.s32",
        "prmt.b32 %a, %a, %b, 0x5410;": "tgx_op_prmt.b32",
        "mov.b32 %f, %b; ex2.approx.ftz.f32 %f, %f; mov.b32 %a, %f;": "tgx_op_ex2.approx.ftz.f32",
        "mov.b32 %f, %b; cvt.rzi.s32.f32 %a, %f;": "tgx_op_cvt.rzi.s32.f32",
    }
    for body, name in calls.items():
        assert name in kernel(body)._imports
    many, one = (len(kernel(next(iter(calls)) * count)._text.splitlines()) for count in (21, 1))
    assert many - one == 20


def test_short_instructions_and_those_of_a_whole_warp_are_written_where_they_are() -> None:
    for body in ("add.u32 %a, %a, %b;", "dp4a.s32.s32 %c, %u, %u, %u; add.u32 %a, %a, %c;"):
        assert not any(name.startswith("tgx_op_") for name in kernel(body)._imports)


def test_a_shuffle_by_constants_in_registers_is_one_of_llvms() -> None:
    body = "mov.u32 %c, 1; mov.u32 %d, 31; shfl.sync.bfly.b32 %a|%q, %b, {}, %d, -1;"
    constant, known_later = (kernel(body.format(lanes))._text for lanes in ("%c", "%u"))
    assert "masked.gather" not in constant
    assert "masked.gather" in known_later
