"""The device's repacking equals the numpy twin byte for byte, and touches nothing outside of its segments."""

from typing import Any

import numpy as np
import pytest

from tegrad.llm import packing
from tegrad.llm.gguf import BlockType
from tegrad.llm.packed import Repacker

pytestmark = pytest.mark.board

GUARD = 64


@pytest.fixture(scope="module")
def opened(device: str) -> Any:
    from tinygrad import Device

    return Device[device]


@pytest.mark.parametrize("kind", packing.LAYOUTS, ids=lambda kind: kind.name)
def test_segments_are_repacked_in_place_as_the_twin_does(opened: Any, kind: BlockType) -> None:
    from tinygrad.device import BufferSpec

    rng = np.random.default_rng(kind.size)
    for count in (1, 7, 8, 19):
        size = count * packing.segment_bytes(kind)
        before = rng.integers(0, 256, size + 2 * GUARD, dtype=np.uint8)
        buffer = opened.allocator.alloc(len(before), BufferSpec(nolru=True))
        try:
            opened.allocator._copyin(buffer, memoryview(before.tobytes()))
            Repacker(opened)(kind, buffer.offset(GUARD, size), count)
            opened.synchronize()
            after = bytearray(len(before))
            opened.allocator._copyout(memoryview(after), buffer)
        finally:
            opened.allocator.free(buffer, len(before), BufferSpec(nolru=True))
        expected = packing.pack(kind, before[GUARD:-GUARD], count, packing.SEGMENT)
        assert after[GUARD:-GUARD] == expected.tobytes(), count
        assert after[:GUARD] + after[-GUARD:] == before[:GUARD].tobytes() + before[-GUARD:].tobytes()
