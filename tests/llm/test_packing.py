"""The packed order: reversible, of the file's size, with every weight where the layout's description says."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tegrad.llm import formats, packing
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import BLOCK_TYPES, F16, IQ3_S, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, BlockType

KINDS = pytest.mark.parametrize("kind", list(BLOCK_TYPES.values()), ids=lambda kind: kind.name)
SHAPES = pytest.mark.parametrize(("rows", "columns"), [(3, 2048), (1, 256), (5, 768), (8, 256), (2, 8192), (7, 1280)])


def random_bytes(kind: BlockType, rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 256, (rows, kind.row_bytes(columns)), dtype=np.uint8)


@KINDS
@SHAPES
def test_unpacking_gives_the_files_bytes_back(kind: BlockType, rows: int, columns: int) -> None:
    raw = random_bytes(kind, rows, columns)
    packed = packing.pack(kind, raw, rows, columns)
    assert packed.shape == (packing.packed_bytes(kind, rows, columns),)
    assert packed.size % kind.segment_bytes == 0
    assert packed.size - raw.size < kind.segment_bytes
    np.testing.assert_array_equal(packing.unpack(kind, packed, rows, columns), raw)


@KINDS
@SHAPES
def test_packed_weights_mean_what_ggml_says(kind: BlockType, rows: int, columns: int) -> None:
    raw = random_bytes(kind, rows, columns)
    packed = packing.pack(kind, raw, rows, columns)
    with np.errstate(all="ignore"):
        theirs = dequantize(raw, GGMLQuantizationType[kind.name]).astype(np.float32)
        ours = packing.dequantize_packed(kind, packed, rows, columns)
    np.testing.assert_array_equal(ours, theirs)


@KINDS
def test_what_fills_up_the_last_segment_is_zero(kind: BlockType) -> None:
    packed = packing.pack(kind, random_bytes(kind, 1, 256), 1, 256)
    zeros = packing.pack(kind, np.zeros((1, kind.row_bytes(256)), np.uint8), 1, 256)
    assert not zeros.any()
    whole = packing.dequantize_packed(kind, packed, 1, formats.SEGMENT)
    assert not whole[:, 256:].any()


@KINDS
def test_a_segment_has_the_files_size_and_is_16_byte_aligned(kind: BlockType) -> None:
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind.number)]
    assert kind.segment_bytes == 2048 // elements * size
    assert kind.segment_bytes % 16 == 0


def one_weight(kind: BlockType, at: int, value: int) -> np.ndarray:
    """A packed segment in which the integer of weight `at` is `value` and all other bits are 0."""
    layout = kind.layout
    values = np.zeros((formats.SEGMENT // kind.elements, kind.elements), np.uint8)
    values.reshape(-1)[at] = value
    blocks = np.zeros((len(values), kind.size), np.uint8)
    own = [at + byte for at, size in zip(layout.at, layout.fields, strict=True) for byte in range(size)]
    blocks[:, np.delete(np.arange(kind.size), own)] = layout.join(values)
    return packing.pack(kind, blocks, 1, formats.SEGMENT)


@pytest.mark.parametrize("at", [0, 15, 16, 63, 64, 1000, 2047])
def test_each_integer_lies_where_the_layout_says(at: int) -> None:
    lane, rest = divmod(at, 64)
    group, i = divmod(rest, 16)
    place = 16 * lane + i

    q6 = {512 * group + place: 0b101101} if group < 3 else {place: 1 << 6, 512 + place: 3 << 6, 1024 + place: 2 << 6}
    nibble = 512 * (group // 2) + place
    high = 4 * (group % 2)
    code = 0b1101 << 4 * (i % 2)
    third, third_bit = 512 + 8 * lane + 4 * (i // 8) + i % 4, (0, 1, 4, 5)[group] + (0 if i // 4 % 2 else 2)
    fifth = 1024 + 8 * lane + 4 * (group // 2) + i % 4
    expected = {
        "SIX_BITS": (0b101101, q6),
        "NIBBLES": (0b1101, {nibble: 0b1101 << high}),
        "NIBBLES_AND_FIFTH": (0b11001, {nibble: 0b1001 << high, fifth: 1 << (high + i // 4)}),
        "TWO_BITS": (0b10, {place: 0b10 << 2 * group}),
        "TWO_BITS_AND_THIRD": (0b110, {place: 0b10 << 2 * group, third: 1 << third_bit}),
        "CODES": (0b1101, {512 * (group // 2) + 16 * lane + i // 4 * 4 + 2 * (group % 2) + i % 4 // 2: code}),
        "BYTES": (0xA7, {512 * group + place: 0xA7}),
    }
    for kind in formats.PACKED:
        if kind.booked:
            continue  # fields alone
        value, bytes_ = expected[kind.layout.integers]
        packed = one_weight(kind, at, value)
        assert {int(place): int(packed[place]) for place in np.flatnonzero(packed)} == bytes_, kind.name


def test_scales_lie_after_the_planes_in_the_order_of_the_weights() -> None:
    def places(kind: BlockType, block: int, byte: int) -> list[int]:
        raw = np.zeros((formats.SEGMENT // kind.elements, kind.size), np.uint8)
        raw[block, byte] = 1
        return list(np.flatnonzero(packing.pack(kind, raw, 1, formats.SEGMENT)))

    for block in (0, 3, 7):
        assert places(Q6_K, block, 192 + 5) == [1536 + 16 * block + 5]
        assert places(Q6_K, block, 209) == [1664 + 2 * block + 1]
        for byte in (0, 3, 15):
            assert places(Q4_K, block, byte) == [1024 + 16 * block + byte]
            assert places(Q5_K, block, byte) == [1280 + 16 * block + byte]
        for byte in (0, 31, 63):
            assert places(IQ3_S, block, 2 + byte) == [64 * block + byte]
        assert places(IQ3_S, block, 66 + 5) == [768 + 8 * block + 5]
        assert places(IQ3_S, block, 74 + 31) == [512 + 32 * block + 31]
        assert places(IQ3_S, block, 106 + 3) == [832 + 4 * block + 3]
        assert places(IQ3_S, block, 1) == [864 + 2 * block + 1]
    for block in (0, 40, 63):
        assert places(Q8_0, block, 1) == [2048 + 2 * block + 1]
        assert places(Q4_0, block, 1) == [1024 + 2 * block + 1]


def test_rows_that_a_lane_would_share_are_refused_by_name() -> None:
    for kind, columns in ((Q4_0, 96), (Q8_0, 32)):
        with pytest.raises(UnsupportedModelError, match=f"{columns} weights in {kind.name}"):
            packing.check(kind, columns)
    packing.check(Q8_0, 64)
    packing.check(Q6_K, 256)
    packing.check(F16, 8)
    with pytest.raises(UnsupportedModelError, match="16 bytes"):
        packing.check(F16, 4)
