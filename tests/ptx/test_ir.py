"""ir.py: constants and parameters; helpers.py: who writes a function."""

import pytest

from tegrad.ptx.helpers import function, writer
from tegrad.ptx.ir import Fn, Module, V


def test_the_only_address_that_is_a_constant_is_null() -> None:
    f = Fn(Module(), "f", "void", "")
    assert f.const("ptr", 0).ref == "null"
    with pytest.raises(ValueError, match="no address but null is a constant: 1"):
        f.const("ptr", 1)


def test_a_number_is_a_constant_of_the_first_operands_type() -> None:
    f = Fn(Module(), "f", "void", "i32 x, <32 x i64> y, float z")
    x, y, z = f.args
    for number, constant in ((f.and_(x, -1), f.and_(x, f.like(x, -1))), (f.add(y, 7), f.add(y, f.like(y, 7)))):
        assert number == constant
    assert f.fcmp("olt", z, 0.5) == f.fcmp("olt", z, f.like(z, 0.5))
    assert f.intr("umin", y, 255) == f.intr("umin", y, f.like(y, 255))
    assert f.not_zero(y) == f.icmp("ne", y, f.const("i64", 0, 32))
    assert len(f.lines) == 5


def test_parameters_are_read_as_llvm_writes_them() -> None:
    f = Fn(Module(), "f", "void", "ptr frame, <32 x i64> addr, i1 good")
    assert f.args == [V("ptr", 1, "%frame"), V("i64", 32, "%addr"), V("i1", 1, "%good")]
    assert Fn(Module(), "g", "void", "").args == []


def test_a_function_has_its_bodys_name_and_what_the_body_gives() -> None:
    @function("i32", "i32 x", "alwaysinline")
    def tgx_twice(f: Fn, x: V) -> V:
        return f.add(x, x)

    module = Module()
    tgx_twice(module)
    assert module.functions == [
        "define i32 @tgx_twice(i32 %x) alwaysinline {\nentry:\n  %v1 = add i32 %x, %x\n  ret i32 %v1\n}"
    ]


def test_a_function_that_nobody_writes_is_an_error() -> None:
    with pytest.raises(KeyError, match="tgx_unheard_of"):
        writer("tgx_unheard_of")
