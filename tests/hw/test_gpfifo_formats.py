"""GPFIFO entries, USERD, method headers and tokens: against the references, and both ways."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tegrad.hw import gpfifo
from tegrad.hw.gpfifo import MethodOp, Subchannel, Userd

DATA = Path(__file__).parents[1] / "data"
HW = json.loads((DATA / "ga10b-hw.json").read_text())
HOST = json.loads((DATA / "classes.json").read_text())["c76f"]


def test_userd_offsets() -> None:
    expected = {name.upper(): field["offset"] for name, field in HW["userd"]["fields"].items()}
    assert {u.name: u.value for u in Userd} == expected
    assert HW["userd"]["size"]["value"] == gpfifo.USERD_SIZE


def test_usermode_numbers() -> None:
    usermode = HW["usermode"]
    assert usermode["doorbell_offset_in_region"]["value"] == gpfifo.DOORBELL
    assert usermode["mmap_max_size"]["value"] == gpfifo.USERMODE_SIZE
    hi, lo = usermode["token_runlist_bits"]["value"]
    assert gpfifo.token(0, 0x7F) == ((1 << (hi - lo + 1)) - 1) << lo
    hi, lo = usermode["token_channel_bits"]["value"]
    assert gpfifo.token(0xFFF, 0) == ((1 << (hi - lo + 1)) - 1) << lo
    assert gpfifo.token(511, 0) == 511
    assert HW["gpfifo"]["entry_size"]["value"] == gpfifo.GP_ENTRY_SIZE


def test_entry_bits_equal_the_header() -> None:
    entry0, entry1 = HW["gpfifo"]["entry"]["entry0"], HW["gpfifo"]["entry"]["entry1"]

    def bits(word: int, pair: list[int]) -> int:
        return ((1 << (pair[0] - pair[1] + 1)) - 1) << pair[1] << 32 * word

    everything = gpfifo.gp_entry(gpfifo.VA_LIMIT - 4, 1, sync=True, level=1, fetch=1)
    length = bits(1, entry1["LENGTH"])
    rest = bits(0, entry0["GET"]) | bits(0, entry0["FETCH"]) | bits(1, entry1["GET_HI"])
    rest |= bits(1, entry1["LEVEL"]) | bits(1, entry1["SYNC"])
    assert everything & ~length == rest
    assert gpfifo.gp_entry(0, gpfifo.MAX_SEGMENT_DWORDS) == length


def test_a_zero_length_entry_is_an_opcode() -> None:
    assert gpfifo.decode_gp_entry(2 << 32) == gpfifo.GpEntry(va=0, dwords=0, opcode=2)
    assert gpfifo.decode_gp_entry(0).opcode == gpfifo.GpOpcode.NOP


@pytest.mark.parametrize(
    ("va", "dwords"), [(2, 1), (0, 0), (0, 1 << 21), (gpfifo.VA_LIMIT, 1), (gpfifo.VA_LIMIT - 4, 2), (-4, 1)]
)
def test_an_entry_the_hardware_would_refuse_is_refused(va: int, dwords: int) -> None:
    with pytest.raises(ValueError, match="no GPFIFO entry"):
        gpfifo.gp_entry(va, dwords)


def test_the_header_that_ran_on_hardware() -> None:
    """INC, 5 words, host method 0x5C, subchannel 0: the semaphore release of the field notes."""
    assert gpfifo.method_header(MethodOp.INC, 0, 0x5C, 5) == 0x20050017
    assert gpfifo.decode_header(0x20050017) == gpfifo.Header(op=1, subch=0, method=0x5C, count=5)


def test_method_ops_equal_the_class_header() -> None:
    text = json.dumps(HOST["formats"])
    for op, name in (
        (MethodOp.INC, "INC_METHOD"),
        (MethodOp.NON_INC, "NON_INC_METHOD"),
        (MethodOp.IMMEDIATE, "IMMD_DATA_METHOD"),
        (MethodOp.ONE_INC, "ONE_INC"),
        (MethodOp.END_SEGMENT, "END_PB_SEGMENT"),
    ):
        assert any(value == op for key, value in named(HOST["formats"]) if key.endswith(name)), (name, text)


def named(tree: object) -> list[tuple[str, object]]:
    """Every (key, value) leaf of a JSON tree."""
    if not isinstance(tree, dict):
        return []
    return [(k, v) for k, v in tree.items()] + [leaf for v in tree.values() for leaf in named(v)]


@pytest.mark.parametrize(
    ("subch", "method", "count"), [(8, 0, 0), (0, 2, 0), (0, 0x4000, 0), (0, 0, 0x2000), (0, 0, -1)]
)
def test_a_header_that_cannot_hold_it_is_refused(subch: int, method: int, count: int) -> None:
    with pytest.raises(ValueError, match="no header"):
        gpfifo.method_header(MethodOp.INC, subch, method, count)


def test_subchannels() -> None:
    assert (Subchannel.COMPUTE, Subchannel.COPY) == (1, 4)
    assert not set(Subchannel) & set(HW["channels"]["sw_method_subchannels"]["value"])


@settings(max_examples=200, deadline=None)
@given(
    dwords=st.integers(1, gpfifo.MAX_SEGMENT_DWORDS),
    place=st.floats(0, 1),
    sync=st.booleans(),
    level=st.integers(0, 1),
    fetch=st.integers(0, 1),
)
def test_entries_round_trip(dwords: int, place: float, sync: bool, level: int, fetch: int) -> None:
    va = int(place * (gpfifo.VA_LIMIT // 4 - dwords)) * 4
    entry = gpfifo.gp_entry(va, dwords, sync=sync, level=level, fetch=fetch)
    assert entry < 1 << 64
    assert gpfifo.decode_gp_entry(entry) == gpfifo.GpEntry(va, dwords, level, sync, 0, fetch)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 7), st.integers(0, 7), st.integers(0, 0xFFF), st.integers(0, 0x1FFF))
def test_headers_round_trip(op: int, subch: int, word: int, count: int) -> None:
    header = gpfifo.method_header(op, subch, word * 4, count)
    assert gpfifo.decode_header(header) == gpfifo.Header(op, subch, word * 4, count)


@given(st.integers(0, 0xFFF), st.integers(0, 0x7F))
def test_tokens_round_trip(chid: int, runlist: int) -> None:
    assert gpfifo.decode_token(gpfifo.token(chid, runlist)) == (chid, runlist)
