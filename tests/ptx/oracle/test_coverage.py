"""Every instruction form that kernels use has a row in the oracle's table."""

from tests.ptx.oracle.coverage import EXCLUDED, opcodes, unrecorded, used, without_a_row

PTX = """
.visible .entry k(.param .u64 p) {  // add.f32 in a comment
.reg .pred %p<2>;
@!%p1 bra $L_1;
$L_1: mul.f32 %f1, %f2, %f3; { ld.global.nc.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1]; }
ret;
}
"""


def test_opcodes_are_taken_with_all_modifiers() -> None:
    assert opcodes(PTX) == {"bra", "mul.f32", "ld.global.nc.L1::no_allocate.v4.u32", "ret"}


def test_every_form_that_kernels_use_has_a_row() -> None:
    assert without_a_row(used()) == []
    assert set(EXCLUDED) <= used(), "an exclusion that nothing uses"


def test_a_form_without_a_row_is_named() -> None:
    assert without_a_row([*used(), "ld.global.v8.f32"]) == ["ld.global.v8.f32"]
    assert "ld.global.v8.f32" in unrecorded([*used(), "ld.global.v8.f32"])
