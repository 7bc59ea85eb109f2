"""The device's repacking equals numpy's byte for byte, and touches nothing outside of its segments."""

from typing import Any

import numpy as np
import pytest
from operands import Operands

from tegrad.llm import formats, packing
from tegrad.llm.formats import BlockType
from tegrad.llm.packed import arranging
from tegrad.llm.programs import Programs

pytestmark = pytest.mark.board


@pytest.fixture(scope="module")
def opened(device: str) -> Any:
    from tinygrad import Device

    return Device[device]


@pytest.mark.parametrize("kind", formats.PACKED, ids=lambda kind: kind.name)
def test_segments_are_repacked_in_place_as_the_twin_does(opened: Any, kind: BlockType) -> None:
    rng, programs = np.random.default_rng(kind.size), Programs(opened)
    for count, flush in ((1, "end"), (1, "start"), (7, "end"), (8, "start"), (19, "end")):
        native = rng.integers(0, 256, count * kind.segment_bytes, dtype=np.uint8)
        operands = Operands(opened, flush)
        try:
            buffer = operands.put(native)
            repack, *_ = arranging(programs, kind, buffer, count, operands.zeros(1, np.int32))
            repack.program(buffer, global_size=repack.grid, local_size=repack.block, vals=repack.values)
            packed = operands.get(buffer, native.shape, np.uint8)
            operands.check()
        finally:
            operands.free()
        np.testing.assert_array_equal(packed, packing.pack(kind, native, count, formats.SEGMENT), f"{count} {flush}")
