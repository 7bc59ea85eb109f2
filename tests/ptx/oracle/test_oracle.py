"""The table of forms, the record of what a GPU made of them, and the engine."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.ptx.oracle import approximations, judge, models, products
from tests.ptx.oracle.engine import run
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


@cache
def engine(family: str) -> dict[str, bytes]:
    """The engine's results of a family; it must refuse nothing."""
    results, refused = run(FAMILIES[family])
    assert not refused
    return results


def against_model(form: Form, data: bytes) -> int:
    """How many lanes differ from the model, where there is one for the lane."""
    columns = models.expected(form)
    wrong = np.zeros(form.threads, bool)
    for got, want, t in zip(judge.results(form, data), columns or [], form.results, strict=False):
        known = np.array([w is not None for w in want])
        values = np.array([w or 0 for w in want], np.uint64).astype(got.dtype)
        wrong |= known & ~judge.same(got, values, t, form.rule)
    return int(wrong.sum())


@pytest.mark.parametrize("family", ["integer", "float", "convert", "compare"])
def test_engine_gives_what_exact_arithmetic_gives(family: str) -> None:
    results = engine(family)
    wrong = {f.name: n for f in FAMILIES[family] if (n := against_model(f, results[f.name]))}
    assert not wrong


def test_a_wrong_result_is_seen_by_the_model() -> None:
    form = FORMS["add.rz.f64"]
    data = np.frombuffer(run([form])[0][form.name], np.uint64)
    finite = ~np.isnan(data.view(np.float64))
    assert against_model(form, (data ^ np.uint64(1)).tobytes()) == finite.sum()


def approximate() -> list[Form]:
    return [f for f in FORMS.values() if f.rule.startswith("approx")]


def test_engine_stays_within_the_documented_errors() -> None:
    results = engine("float")
    for form in approximate():
        got = judge.number(judge.results(form, results[form.name])[0], form.results[0])
        assert not approximations.outside(form, got).any(), form.name


def test_bounds_of_approximations_are_sharp_enough_to_fail() -> None:
    form = FORMS["rcp.approx.f32"]
    got = judge.number(judge.results(form, engine("float")[form.name])[0], "f32")
    assert approximations.outside(form, got * (1 + 2.0**-20))[np.isfinite(got) & (got != 0)].mean() > 0.9


@pytest.mark.parametrize("form", [f for f in FAMILIES["matrix"] if "special" not in f.name], ids=lambda f: f.name)
def test_engine_multiplies_matrices(form: Form) -> None:
    """Whole numbers exactly, real ones within the rounding of a sum in any order."""
    a, b, c = products.matrices(form)
    t, data = products.types(form)[0], engine("matrix")[form.name]
    got, want = products.accumulators(judge.results(form, data), t, a.shape[1]), a @ b + c
    if "satfinite" in form.name:
        want = np.clip(want, -(2**31), 2**31 - 1)
    elif t == "s32":
        want = (want + 2**31) % 2**32 - 2**31
    if not form.rule.startswith("sum"):
        assert (got == want).all()
    else:
        slack = 2.0**-10 if t == "f16" else 17 * 2.0**-23
        assert (np.abs(got - want) <= slack * (np.abs(a) @ np.abs(b) + np.abs(c))).all()
