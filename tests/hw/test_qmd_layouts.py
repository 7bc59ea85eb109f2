"""The QMD tables equal NVIDIA's headers, and Qmd writes exactly the bits they name."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tegrad.hw.qmd import LAYOUTS, V3, V4, Qmd, QmdLayout

DATA = json.loads((Path(__file__).parents[1] / "data" / "qmd.json").read_text())
SOURCES = [(V3, DATA["c7c0"]["V03_00"]), (V4, DATA["cbc0"]["V04_00"])]
BOOLEAN = {"TRUE", "FALSE"}


def by_length(names: list[str], value: str) -> str:
    return max((n for n in names if value.startswith(n + "_")), key=len)


@pytest.mark.parametrize(("layout", "source"), SOURCES, ids=["V3", "V4"])
def test_every_field_lies_where_the_header_says(layout: QmdLayout, source: dict) -> None:
    scalars = {k.lower(): tuple(v) for k, v in source["fields"].items() if isinstance(v, list)}
    arrays = {
        k.lower(): (*v["base"], v["stride"], v["max_count"]) for k, v in source["fields"].items() if isinstance(v, dict)
    }
    assert dict(layout.fields) == scalars
    assert {k: (a.hi, a.lo, a.stride, a.count) for k, a in layout.arrays.items()} == arrays
    assert layout.size * 8 == source["size_bits"]
    assert len(layout.fields) + len(layout.arrays) == len(source["fields"])


@pytest.mark.parametrize(("layout", "source"), SOURCES, ids=["V3", "V4"])
def test_every_named_value_equals_the_header(layout: QmdLayout, source: dict) -> None:
    names = list(source["fields"])
    expected: dict[str, dict[str, int]] = {}
    for key, value in source["values"].items():
        field = by_length(names, key)
        expected.setdefault(field.lower(), {})[key[len(field) + 1 :]] = value
    expected = {field: named for field, named in expected.items() if not set(named) <= BOOLEAN}
    assert {field: dict(named) for field, named in layout.enums.items()} == expected


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_fields_do_not_overlap_and_fit(layout: QmdLayout) -> None:
    taken: set[int] = set()
    for name, (hi, lo) in layout.bits.items():
        bits = set(range(lo, hi + 1))
        assert hi >= lo
        assert not bits & taken, name
        taken |= bits
    assert max(taken) < layout.size * 8


def test_versions_write_themselves() -> None:
    for layout in LAYOUTS.values():
        mem = bytearray(layout.size)
        Qmd(layout, mem).write(qmd_major_version=layout.major, **{layout.minor_field: layout.minor})
        assert mem[72] == layout.major << 4 | layout.minor


def test_a_field_that_crosses_bytes_lands_bit_by_bit() -> None:
    mem = bytearray(b"\xff" * V3.size)
    Qmd(V3, mem).write(shared_memory_size=0)  # bits 561:544
    assert int.from_bytes(mem, "little") == (1 << 2048) - 1 - (((1 << 18) - 1) << 544)


def test_array_elements_are_addressed_by_index() -> None:
    mem = bytearray(V3.size)
    Qmd(V3, mem).write(constant_buffer_addr_lower_7=0xFFFFFFFF, constant_buffer_valid_7=1)
    assert int.from_bytes(mem, "little") == 0xFFFFFFFF << (1024 + 7 * 64) | 1 << 647


@pytest.mark.parametrize("value", [1 << 18, -1])
def test_a_value_that_does_not_fit_is_refused_and_nothing_changes(value: int) -> None:
    mem = bytearray(V3.size)
    with pytest.raises(OverflowError, match="shared_memory_size holds 18 bits"):
        Qmd(V3, mem).write(shared_memory_size=value)
    assert not any(mem)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="QMD V3 has no field grid_width"):
        Qmd(V3, bytearray(256)).write(grid_width=1)
    with pytest.raises(KeyError, match="constant_buffer_valid_8"):
        Qmd(V3, bytearray(256)).read("constant_buffer_valid_8")


def test_short_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 384 bytes"):
        Qmd(V4, bytearray(256))


def test_items_shows_what_is_set() -> None:
    qmd = Qmd(V4, bytearray(384))
    qmd.write(grid_width=7, qmd_type=2)
    assert dict(qmd.items()) == {"grid_width": 7, "qmd_type": 2}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_fields_written_are_read_back_and_leave_the_rest(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from([V3, V4]))
    names = data.draw(st.lists(st.sampled_from(list(layout.bits)), unique=True, max_size=12))
    before = data.draw(st.binary(min_size=layout.size, max_size=layout.size))
    mem = bytearray(before)
    qmd = Qmd(layout, mem)
    written = {n: data.draw(st.integers(0, (1 << (layout.bits[n][0] - layout.bits[n][1] + 1)) - 1)) for n in names}
    qmd.write(**written)
    assert {n: qmd.read(n) for n in names} == written
    mask = sum(((1 << (hi - lo + 1)) - 1) << lo for hi, lo in (layout.bits[n] for n in names))
    assert (int.from_bytes(mem, "little") ^ int.from_bytes(before, "little")) & ~mask == 0
