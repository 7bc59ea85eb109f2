"""The table of forms, the record of what a GPU made of them, and the engine."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.ptx.oracle import (
    approximations,
    judge,
    models,
    products,
    table_async,
    table_meeting,
    table_warpgroup,
    warpgroups,
)  # fmt: skip
from tests.ptx.oracle.comparison import UNRECORDED, compare, stale
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
@pytest.mark.parametrize("sm", [pytest.param(87, marks=pytest.mark.long), 90])
@pytest.mark.parametrize("family", FAMILIES)
def test_nvidias_assembler_takes_every_form(family: str, sm: int) -> None:
    from tegrad.nv.toolchain import nvjitlink

    forms: list[Form] = [f for f in FAMILIES[family] if f.arch <= sm]
    for batch in batches(forms):
        assert nvjitlink().compile(batch.text(sm), f"sm_{sm}{batch.features}")


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


@pytest.mark.parametrize("form", FAMILIES["meeting"], ids=lambda f: f.name)
def test_engine_lets_lanes_meet_as_the_document_says(form: Form) -> None:
    got = judge.results(form, engine("meeting")[form.name])
    for ours, want in zip(got, table_meeting.expected(form), strict=True):
        assert (ours == want.ravel()).all()


def differ_from_the_model(form: Form, data: bytes) -> int:
    """How many cases of a form of mbarriers and copies are not as the model beside it says."""
    wrong = np.zeros(form.threads, bool)
    for ours, want, t in zip(judge.results(form, data), table_async.expected(form), form.results, strict=True):
        wrong |= ~judge.same(ours, want.reshape(ours.shape), t, form.rule)
    return int(wrong.reshape(form.cases, -1).any(1).sum())


def test_engine_counts_arrivals_and_bytes_and_copies_them() -> None:
    results = engine("async")
    assert {f.name: n for f in FAMILIES["async"] if (n := differ_from_the_model(f, results[f.name]))} == {}


@pytest.mark.parametrize(
    "name",
    ["mbarrier.pending_count.b64", "mbarrier.try_wait.shared.b64 of a block", f"{table_async.STORE} wait_group.read 0"],
)
def test_a_wrong_count_or_byte_is_seen_by_its_model(name: str) -> None:
    data = bytearray(engine("async")[name])
    data[0] ^= 1
    data[-1] ^= 0x80
    assert differ_from_the_model(FORMS[name], bytes(data)) == 2


@pytest.mark.parametrize("form", [f for f in FAMILIES["warpgroup"] if "special" not in f.name], ids=lambda f: f.name)
def test_engine_multiplies_matrices_of_warpgroups(form: Form) -> None:
    """Whole numbers exactly, real ones within the rounding of a sum in any order."""
    assert warpgroups.wrong(form, engine("warpgroup")[form.name]) == 0


def test_warpgroups_layouts_are_all_different() -> None:
    """The model would see one that is taken for another: other elements are multiplied."""
    sides = [(n, side) for n, side, _ in table_warpgroup.LAYOUTS.values()]
    seen = [tuple(warpgroups.units(s, n, s.columns[-1]).ravel()) for n, s in sides]
    assert len(set(seen)) == len(seen)
    assert all(len(set(places)) == len(places) for places in seen), "two elements in one place"


@pytest.mark.parametrize(
    "name",
    [
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 registers exact",
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 registers",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 registers real",
    ],
)
def test_a_wrong_sum_of_a_warpgroup_is_seen(name: str) -> None:
    form, data = FORMS[name], bytearray(run([FORMS[name]])[0][name])
    data[-1] ^= 0x40
    assert warpgroups.wrong(form, bytes(data)) == 1
    assert judge.differing(form, bytes(data), run([form])[0][name]).sum() == 1


RECORD = Record.load()


def test_the_record_is_of_this_table() -> None:
    """Changed forms or inputs need a new run of tests/hardware/ptx_oracle.py."""
    assert stale(RECORD) == []
    assert set(RECORD.refused) == set(UNRECORDED)
    assert sum(FORMS[n].cases for n in RECORD.results) >= 50_000


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_gives_what_silicon_gave(family: str) -> None:
    results = engine(family)
    done = compare(RECORD, results)
    assert done.mismatches == {}
    unrecorded = UNRECORDED.keys()
    assert done.cases == sum(f.cases for f in FAMILIES[family] if f.name not in unrecorded)


@pytest.mark.parametrize(
    "name",
    [
        "add.rn.f32", "lop3.b32 [0x96]", "cvt.rna.tf32.f32", "setp.lt.f32", "shfl.sync.idx.b32", "st.global.u8",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 exact", "fma.rn.bf16x2", "bar.red.popc.u32",
    ],
)  # fmt: skip
def test_one_changed_bit_is_a_mismatch(name: str) -> None:
    form, theirs = FORMS[name], RECORD.results[name]
    at = next(i for i, byte in enumerate(theirs) if byte not in (0x7F, 0xFF)) | 1
    ours = bytearray(theirs)
    ours[at] ^= 0x80 if form.rule == "tf32" else 1
    assert judge.differing(form, bytes(ours), theirs).sum() == 1


def test_a_sum_may_differ_by_rounding_and_no_more() -> None:
    form = FORMS["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 real"]
    theirs = np.frombuffer(RECORD.results[form.name], np.float32)
    for factor, wrong in ((1 + 2.0**-23, 0), (1 + 2.0**-14, form.cases)):
        ours = (theirs * np.float32(factor)).tobytes()
        assert judge.differing(form, ours, theirs.tobytes()).sum() == wrong


@pytest.mark.parametrize("name", sorted(UNRECORDED))
def test_forms_that_silicon_could_not_run_are_judged_by_what_they_mean(name: str) -> None:
    """Lanes read what the lane across the barrier wrote; a constant is read through its generic address."""
    form = FORMS[name]
    [got] = judge.results(form, run([form])[0][name])
    [given] = models.sources(form)
    if name == "cvta.const.u64":
        table = np.array([(i * 37 + 11) & 255 for i in range(256)], np.uint8).view(np.uint32)
        assert (got == table[(given & 252) // 4]).all()
        return
    lane = np.arange(128)
    partner = {"barrier.sync.aligned": lane ^ 127, "bar.arrive": lane % 64}.get(name, lane ^ 32)
    assert (got.reshape(-1, 128) == given.reshape(-1, 128)[:, partner]).all()


def test_the_document_counts_as_the_table_does() -> None:
    text = (Path(__file__).parents[3] / "docs" / "ptx.md").read_text()
    for family, forms in FAMILIES.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {family} |"))
        assert f"| {len(forms)} | {sum(f.cases for f in forms)} |" in row
