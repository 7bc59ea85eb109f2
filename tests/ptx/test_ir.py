"""ir.py: constants."""

import pytest

from tegrad.ptx.ir import Fn, Module


def test_the_only_address_that_is_a_constant_is_null() -> None:
    f = Fn(Module(), "f", "void", "")
    assert f.const("ptr", 0).ref == "null"
    with pytest.raises(ValueError, match="no address but null is a constant: 1"):
        f.const("ptr", 1)
