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
    values = HOST["formats"]["DMA"]["values"]
    assert {op.name: op.value for op in MethodOp} == {
        "SUBDEVICE": values["SEC_OP_GRP0_USE_TERT"],
        "INC": values["SEC_OP_INC_METHOD"],
        "NON_INC": values["SEC_OP_NON_INC_METHOD"],
        "IMMEDIATE": values["SEC_OP_IMMD_DATA_METHOD"],
        "ONE_INC": values["SEC_OP_ONE_INC"],
        "END_SEGMENT": values["SEC_OP_END_PB_SEGMENT"],
    }


def test_header_bits_equal_the_class_header() -> None:
    fields = HOST["formats"]["DMA"]["fields"]

    def bits(name: str) -> int:
        hi, lo = fields[name]
        return ((1 << (hi - lo + 1)) - 1) << lo

    assert gpfifo.method_header(7, 0, 0, 0) == bits("SEC_OP")
    assert gpfifo.method_header(0, 7, 0, 0) == bits("METHOD_SUBCHANNEL")
    assert gpfifo.method_header(0, 0, 0xFFF << 2, 0) == bits("METHOD_ADDRESS")
    assert gpfifo.method_header(0, 0, 0, 0x1FFF) == bits("METHOD_COUNT") == bits("IMMD_DATA")


def test_opcodes_equal_the_class_header() -> None:
    values = HOST["formats"]["GP_ENTRY1"]["values"]
    assert {f"OPCODE_{op.name}": op.value for op in gpfifo.GpOpcode} == {
        name: value for name, value in values.items() if name.startswith("OPCODE_")
    }


def test_usermode_registers_of_the_manual() -> None:
    """dev_usermode of open-gpu-doc: class id, both halves of the time, doorbell."""
    registers = (gpfifo.USERMODE_CLASS_ID, gpfifo.TIME_0, gpfifo.TIME_1, gpfifo.DOORBELL)
    assert registers == (0x00, 0x80, 0x84, 0x90)


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
