"""The `.tegrad.ptx` section: what is packed is found again in a loaded image, and damage is seen."""

import struct

import pytest

from tegrad.hw import ptxsection
from tegrad.hw.ptxsection import ALIGN, ENTRY_SLOT, code_digest, find, pack, symbol_slot, unpack

TEXT = bytes(range(256)) * 2
PTX = '.version 8.5\n.visible .entry k() { ret; } // µ "quoted"\n'


def section(**over: object) -> bytes:
    kwargs: dict[str, object] = {
        "masked": (4, 36),
        "symbols": ("table", "scale"),
        "param_base": 0x160,
        "static_shared": 96,
        "dynamic_shared": 1 << 17,
    }
    return pack("k", TEXT, PTX, **(kwargs | over))  # type: ignore[arg-type]


def relocated(blob: bytes, entry: int, *symbols: int) -> bytes:
    out = bytearray(blob)
    struct.pack_into("<Q", out, ENTRY_SLOT, entry)
    for i, value in enumerate(symbols):
        struct.pack_into("<Q", out, symbol_slot(i), value)
    return bytes(out)


def test_everything_packed_is_read_back() -> None:
    got = unpack(relocated(section(), 0x12_3456_7800, 0xFF_0000_1000, 8))
    assert (got.name, got.ptx, got.text_size, got.masked) == ("k", PTX, len(TEXT), (4, 36))
    assert got.symbols == {"table": 0xFF_0000_1000, "scale": 8}
    assert (got.param_base, got.static_shared, got.entry) == (0x160, 96, 0x12_3456_7800)
    assert got.dynamic_shared == 1 << 17
    assert got.digest == code_digest(TEXT, (4, 36))


def test_a_section_without_symbols_masks_or_source() -> None:
    got = unpack(pack("empty", b"", ""))
    assert (got.symbols, got.masked, got.ptx, got.text_size) == ({}, (), "", 0)
    assert got.size == len(pack("empty", b"", ""))
    assert got.size % 8 == 0


def test_the_digest_ignores_masked_words_and_nothing_else() -> None:
    moved = bytearray(TEXT)
    moved[4:8] = b"\xaa\xbb\xcc\xdd"
    assert code_digest(moved, (4, 36)) == code_digest(TEXT, (4, 36))
    moved[8] ^= 1
    assert code_digest(moved, (4, 36)) != code_digest(TEXT, (4, 36))


@pytest.mark.parametrize("offset", [2, 510, 512, -4])
def test_a_mask_outside_the_code_is_refused(offset: int) -> None:
    with pytest.raises(ValueError, match="masked word"):
        code_digest(TEXT, (offset,))


def test_sections_are_found_by_the_address_of_their_code() -> None:
    first, second = relocated(section(), 0x1000), relocated(pack("other", TEXT[:16], PTX), 0x2000)
    at_second = 4096 + (len(first) + ALIGN - 1) // ALIGN * ALIGN
    image = bytearray(at_second + len(second) + 100)
    image[4096 : 4096 + len(first)] = first
    image[at_second : at_second + len(second)] = second
    assert [(offset, s.name) for offset, s in find(memoryview(image))] == [(4096, "k"), (at_second, "other")]
    assert [s.name for _, s in find(image, entry=0x2000)] == ["other"]
    assert list(find(image, entry=0x3000)) == []


@pytest.mark.parametrize("cut", [1, 8, 200])
def test_a_section_cut_short_is_neither_read_nor_found(cut: int) -> None:
    blob = section()[:-cut]
    with pytest.raises(ValueError, match=ptxsection.NAME):
        unpack(blob)
    assert list(find(blob)) == []


def test_a_damaged_symbol_count_is_refused() -> None:
    blob = bytearray(section())
    struct.pack_into("<I", blob, 20, 1)
    with pytest.raises(ValueError, match="symbols"):
        unpack(blob)


def test_bytes_without_the_magic_are_refused() -> None:
    with pytest.raises(ValueError, match="magic"):
        unpack(bytes(512))
