"""The method tables equal NVIDIA's class headers, class by class."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tegrad.hw.classes import (
    BY_CLASS,
    COMPUTE,
    COPY,
    HOST,
    ComputeMethod,
    CopyMethod,
    HostMethod,
    Method,
    find_method,
)

DATA = json.loads((Path(__file__).parents[1] / "data" / "classes.json").read_text())
CLASSES = {0xC76F: "c76f", 0xC7C0: "c7c0", 0xCBC0: "cbc0", 0xC7B5: "c7b5", 0xC8B5: "c8b5"}


def named_values(method: dict) -> dict[str, dict[str, int]]:
    """Values by field, without those of TRUE/FALSE fields and the one macro that has no field."""
    found: dict[str, dict[str, int]] = {}
    for key, value in method.get("values", {}).items():
        owners = [f for f in method["fields"] if key.startswith(f + "_")]
        if owners:
            owner = max(owners, key=len)
            found.setdefault(owner, {})[key[len(owner) + 1 :]] = value
    return {f: named for f, named in found.items() if not set(named) <= {"TRUE", "FALSE"}}


@pytest.mark.parametrize("number", CLASSES, ids=CLASSES.values())
def test_class_equals_its_header(number: int) -> None:
    source, methods = DATA[CLASSES[number]], BY_CLASS[number]
    assert source["class_id"] == number
    assert {n: m.offset for n, m in methods.items()} == {n: m["offset"] for n, m in source["methods"].items()}
    for name, expected in source["methods"].items():
        method = methods[name]
        assert dict(method.fields) == {f: tuple(bits) for f, bits in expected["fields"].items()}, name
        assert method.stride == expected.get("stride"), name


@pytest.mark.parametrize(("methods", "source"), [(HOST, "c76f"), (COMPUTE, "cbc0"), (COPY, "c8b5")])
def test_named_values_equal_the_header(methods: dict[str, Method], source: str) -> None:
    for name, expected in DATA[source]["methods"].items():
        assert {f: dict(named) for f, named in methods[name].values.items()} == named_values(expected), name


@pytest.mark.parametrize("number", [0xC7C0, 0xC7B5])
def test_ampere_values_equal_the_header_where_they_are_given(number: int) -> None:
    for name, expected in DATA[CLASSES[number]]["methods"].items():
        ours = BY_CLASS[number][name].values
        for field, named in named_values(expected).items():
            assert named.items() <= dict(ours[field]).items(), (name, field)


def test_the_union_contains_both_generations() -> None:
    for union, numbers in ((COMPUTE, (0xC7C0, 0xCBC0)), (COPY, (0xC7B5, 0xC8B5))):
        assert set(union) == {name for number in numbers for name in BY_CLASS[number]}
        for number in numbers:
            for name, method in BY_CLASS[number].items():
                for field, (hi, lo) in method.fields.items():
                    wide = union[name].fields[field]
                    assert wide[1] == lo, (name, field)
                    assert (
                        wide[0] >= hi
                        or (name, field) == ("SET_INLINE_QMD_ADDRESS_A", "QMD_ADDRESS_SHIFTED8_UPPER")
                        or (name, field) == ("LAUNCH_DMA", "VPRMODE")
                    ), (name, field)


@pytest.mark.parametrize(
    ("constant", "offset"),
    [
        (HostMethod.SEM_ADDR_LO, 0x5C),
        (HostMethod.SEM_EXECUTE, 0x6C),
        (HostMethod.SET_OBJECT, 0),
        (ComputeMethod.SEND_PCAS_A, 0x2B4),
        (ComputeMethod.SEND_SIGNALING_PCAS2_B, 0x2C0),
        (ComputeMethod.INVALIDATE_SHADER_CACHES, 0x21C),
        (ComputeMethod.SET_SHADER_LOCAL_MEMORY_WINDOW_A, 0x7B0),
        (CopyMethod.LAUNCH_DMA, 0x300),
        (CopyMethod.LINE_LENGTH_IN, 0x418),
    ],
)
def test_offsets_the_driver_facts_name(constant: int, offset: int) -> None:
    assert constant == offset


def test_field_proven_words() -> None:
    """Words that ran on an AGX Orin: release with WFI, 64 bits and timestamp; launch; cache invalidation; copy."""
    release = HOST["SEM_EXECUTE"].pack(
        operation="RELEASE", release_wfi="EN", payload_size="64BIT", release_timestamp="EN"
    )
    assert release == 0x03100001
    assert COMPUTE["SEND_SIGNALING_PCAS2_B"].pack(pcas_action="PREFETCH_SCHEDULE") == 9
    assert COMPUTE["INVALIDATE_SHADER_CACHES"].pack(instruction=1, data=1, constant=1) == 0x1011
    copy = COPY["LAUNCH_DMA"].pack(
        data_transfer_type="NON_PIPELINED", src_memory_layout="PITCH", dst_memory_layout="PITCH"
    )
    assert copy == 0x182


def test_describe_names_what_a_word_does() -> None:
    text = HOST["SEM_EXECUTE"].describe(0x03100001)
    assert text.startswith("SEM_EXECUTE(OPERATION=RELEASE")
    assert "RELEASE_WFI=EN" in text


def test_pack_refuses_what_does_not_fit_or_is_unknown() -> None:
    with pytest.raises(OverflowError, match="pcas_action holds 4 bits"):
        COMPUTE["SEND_SIGNALING_PCAS2_B"].pack(pcas_action=16)
    with pytest.raises(KeyError):
        COMPUTE["SEND_SIGNALING_PCAS2_B"].pack(nothing=1)
    with pytest.raises(KeyError):
        COMPUTE["SEND_SIGNALING_PCAS2_B"].pack(pcas_action="FLY")


def test_find_method_resolves_indexed_methods() -> None:
    assert find_method(COMPUTE, 0x320 + 4 * 63) == (COMPUTE["LOAD_INLINE_QMD_DATA"], 63)
    assert find_method(COMPUTE, 0x3804 + 8 * 2) == (COMPUTE["CALL_MME_DATA"], 2)
    assert find_method(COMPUTE, 0x2B4) == (COMPUTE["SEND_PCAS_A"], 0)
    assert find_method(COMPUTE, 0x2C4) is None
    assert find_method(COPY, 0x20) is None


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pack_and_decode_round_trip(data: st.DataObject) -> None:
    methods = data.draw(st.sampled_from(list(BY_CLASS.values())))
    method = methods[data.draw(st.sampled_from([n for n, m in methods.items() if not n.startswith("MEM_OP")]))]
    values = {f: data.draw(st.integers(0, (1 << (hi - lo + 1)) - 1)) for f, (hi, lo) in method.fields.items()}
    assert method.decode(method.pack(**{f.lower(): v for f, v in values.items()})) == values
