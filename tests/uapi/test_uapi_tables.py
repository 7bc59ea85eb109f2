"""Every ioctl number, struct size and field offset equals the kernel headers'."""

import ctypes
import json
import re
from pathlib import Path

import pytest

from tegrad.uapi import constants, ioctls, structs
from tegrad.uapi.fields import leaf_fields
from tegrad.uapi.ioctls import BY_NAME, BY_REQUEST, LAST_NR, MAGIC, MAX_ARG_SIZE, ROWS, Ioctl

DATA = json.loads((Path(__file__).parents[1] / "data" / "uapi.json").read_text())
KIND = {magic: kind for kind, magic in MAGIC.items()}
SCALARS = {"int": ctypes.c_int32, "unsigned int": ctypes.c_uint32, "__u32": ctypes.c_uint32}
SOURCE = {
    name: row
    for name, row in DATA["ioctls"].items()
    if row["type"] in KIND and not row["src"].endswith("nvgpu-nvs.h")  # the scheduler's node shares nvmap's letter
}
# Structs whose plain name another class took.
ITEMS = {"nvgpu_gpu_clk_range": "GpuClkRangeItem"}

CType = type[ctypes.Structure] | type[ctypes.Union]


def class_name(struct: str) -> str:
    short = re.sub(r"^(nvgpu|nvmap)_|_args$", "", struct)
    return ITEMS.get(struct) or "".join(word[0].upper() + word[1:] for word in short.split("_"))


STRUCTS = {name: getattr(structs, class_name(name)) for name in DATA["structs"] if hasattr(structs, class_name(name))}


def member(cls: CType, name: str) -> tuple[object, int, int, int]:
    """(type, offset, size, bit position or -1) of a member, looking through anonymous unions."""
    for field, kind, *_ in cls._fields_:
        if field == name:
            at = getattr(cls, field)
            bits = at.size >> 16
            return kind, at.offset, at.size, (at.size & 0xFFFF) if bits else -1
    for anonymous in getattr(cls, "_anonymous_", ()):
        kind = {f[0]: f[1] for f in cls._fields_}[anonymous]
        try:
            inner, offset, size, bit = member(kind, name)
        except KeyError:
            continue
        return inner, getattr(cls, anonymous).offset + offset, size, bit
    raise KeyError(name)


def test_every_ioctl_of_these_drivers_has_a_row() -> None:
    assert {row.header for row in ROWS} == set(SOURCE)
    assert len(BY_REQUEST) == len(BY_NAME) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_row_equals_the_header(row: Ioctl) -> None:
    source = SOURCE[row.header]
    assert row.request == source["request"]
    assert (row.nr, row.direction, row.size) == (source["nr"], source["dir"], source["size"])
    assert row.fd_kind == KIND[source["type"]]
    expected = source["struct"]
    assert row.struct is (None if expected is None else SCALARS.get(expected) or STRUCTS[expected])
    assert getattr(ioctls, row.header) is row
    assert BY_REQUEST[row.fd_kind, row.request] is row


@pytest.mark.parametrize("row", [r for r in ROWS if r.fds_in or r.fds_out or r.pointers], ids=lambda r: r.name)
def test_fds_and_pointers_name_fields_that_exist(row: Ioctl) -> None:
    assert row.struct is not None
    arg = row.struct()
    names = {name for name, _ in leaf_fields(arg)}
    for path in (*row.fds_in, *row.fds_out):
        assert path in names
        ioctls.set_field(arg, path, 5)
        assert ioctls.get_field(arg, path) == 5
    for path in row.pointers:
        _, _, size, _ = member_at(row.struct, path)
        assert size == 8, "a user pointer is 64 bits wide"


def member_at(cls: CType, path: str) -> tuple[object, int, int, int]:
    *outer, last = path.split(".")
    base = 0
    for part in outer:
        kind, offset, _, _ = member(cls, part)
        assert isinstance(kind, type)
        cls, base = kind, base + offset
    kind, offset, size, bit = member(cls, last)
    return kind, base + offset, size, bit


@pytest.mark.parametrize("name", STRUCTS)
def test_struct_is_laid_out_like_the_header(name: str) -> None:
    source, cls = DATA["structs"][name], STRUCTS[name]
    assert ctypes.sizeof(cls) == source["size"]
    for path, field in source["fields"].items():
        ours = ".".join("in_" if part == "in" else part for part in path.split("."))
        kind, offset, size, bit = member_at(cls, ours)
        if "bits" in field:
            hi, lo = field["bits"]
            assert (offset * 8 + bit, hi - lo + 1) == (field["offset"] * 8 + lo, 1), path
            continue
        assert (offset, size, bit) == (field["offset"], field["size"], -1), path
        if not field.get("kind"):
            element = getattr(kind, "_type_", kind) if field["count"] > 1 or field.get("array") else kind
            assert isinstance(element, type)
            assert (element(-1).value < 0) == field["signed"], path


@pytest.mark.parametrize(("text", "error"), [("u24 id", KeyError), ("u32 id[", ValueError), ("u32", ValueError)])
def test_what_declares_no_member_is_refused(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        structs.members(text)


def test_every_argument_struct_is_checked() -> None:
    ours = {
        cls
        for cls in vars(structs).values()
        if isinstance(cls, type)
        and issubclass(cls, (ctypes.Structure, ctypes.Union))
        and cls.__module__ == structs.__name__
    }
    helpers = {cls for cls in ours if cls.__name__.startswith("_")}
    assert ours - helpers - set(STRUCTS.values()) == set()


def test_constants_equal_the_headers() -> None:
    known = DATA["constants"] | {k: v["value"] for k, v in DATA["related_constants"].items()}
    ours = {k: v for k, v in vars(constants).items() if k.isupper()}
    assert len(ours) > 100
    assert ours == {k: known[k] for k in ours}


def test_limits_equal_the_headers() -> None:
    c = DATA["constants"]
    assert dict(LAST_NR) == {
        "ctrl": c["NVGPU_GPU_IOCTL_LAST"],
        "as": c["NVGPU_AS_IOCTL_LAST"],
        "tsg": c["NVGPU_TSG_IOCTL_LAST"],
        "channel": c["NVGPU_IOCTL_CHANNEL_LAST"],
        "nvmap": c["NVMAP_IOC_MAXNR"],
    }
    assert dict(MAX_ARG_SIZE) == {
        "ctrl": c["NVGPU_GPU_IOCTL_MAX_ARG_SIZE"],
        "as": c["NVGPU_AS_IOCTL_MAX_ARG_SIZE"],
        "tsg": c["NVGPU_TSG_IOCTL_MAX_ARG_SIZE"],
        "channel": c["NVGPU_IOCTL_CHANNEL_MAX_ARG_SIZE"],
    }
    assert all(row.nr <= LAST_NR[row.fd_kind] for row in ROWS if row.fd_kind in LAST_NR)
    assert all(row.size <= MAX_ARG_SIZE[row.fd_kind] for row in ROWS if row.fd_kind in MAX_ARG_SIZE)


def test_nvmap_handles_keep_their_unsigned_value() -> None:
    """Handles start at 2^31 - 1: as signed numbers they would be negative."""
    arg = structs.CreateHandle(handle=0x80000015)
    assert arg.handle == 0x80000015
    assert bytes(arg) == b"\0\0\0\0\x15\0\0\x80"
