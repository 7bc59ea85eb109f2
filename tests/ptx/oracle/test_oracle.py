"""The table of forms, the record of what a GPU made of them, and the engine."""

from pathlib import Path

import numpy as np
import pytest

from tests.ptx.oracle.form import Form, expand
from tests.ptx.oracle.inputs import arrays, float_bits
from tests.ptx.oracle.kernels import batches, digest
from tests.ptx.oracle.record import Record
from tests.ptx.oracle.table import FAMILIES, FORMS


def test_every_form_has_a_hundred_cases_and_all_together_fifty_thousand() -> None:
    assert all(f.cases >= 100 for f in FORMS.values())
    assert sum(f.cases for f in FORMS.values()) >= 50_000


def test_braces_expand_to_every_combination() -> None:
    assert list(expand("a{,.x}.{p,q}")) == ["a.p", "a.q", "a.x.p", "a.x.q"]


def test_inputs_depend_on_nothing_but_the_form() -> None:
    form = FORMS["fma.rn.f32"]
    first, again = arrays(form), arrays(form)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert digest(form) == digest(form) != digest(FORMS["fma.rz.f32"])


def test_floating_point_inputs_hold_the_special_values() -> None:
    bits = np.concatenate([a.view(np.uint32) for n in ("add.rn.f32", "sub.rn.f32") for a in arrays(FORMS[n])])
    values = bits.view(np.float32)
    size = bits & np.uint32(0x7FFFFFFF)
    quiet_and_signalling = set((bits[np.isnan(values)] >> 22 & 1).tolist())
    assert quiet_and_signalling == {0, 1}
    assert {0, 0x80000000, 0x7F800000, 0xFF800000} <= set(bits.tolist())
    assert ((size > 0) & (size < 0x00800000)).any(), "no subnormal number"


def test_narrowing_of_constants() -> None:
    assert float_bits(1.0, 5, 10) == 0x3C00
    assert float_bits(-(2.0**-24), 5, 10) == 0x8001
    assert float_bits(65536.0, 5, 10) == 0x7C00


def test_record_is_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "r.xz"
    made = Record({"date": "x"}, {"a": "1", "b": "2", "c": "3"}, {"a": b"xyz", "c": b"\0" * 9}, {"b": "no such thing"})
    made.dump(path)
    assert Record.load(path) == made


@pytest.mark.board
@pytest.mark.parametrize("sm", [87, 90])
@pytest.mark.parametrize("family", FAMILIES)
def test_nvidias_assembler_takes_every_form(family: str, sm: int) -> None:
    from tegrad.nv.toolchain import nvjitlink

    forms: list[Form] = [f for f in FAMILIES[family] if f.arch <= sm]
    for batch in batches(forms):
        assert nvjitlink().compile(batch.text(sm), f"sm_{sm}")
