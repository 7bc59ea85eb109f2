"""A GPU in this process does the three things that everything rests on: semaphores, copies, launches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_rig import STORE, Rig


@pytest.fixture(params=["agx-orin-64gb", "gh100"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Rig(request.param) as rig:
        yield rig


def test_a_semaphore_release_stores_payload_and_time(rig: Rig) -> None:
    channel, where = rig.channel(), rig.buffer()
    assert channel.release(where.va + 16, 0x123456789ABC).run()
    assert where.u64(16) == 0x123456789ABC
    assert where.u64(24) > 0
    assert not rig.events


def test_a_copy_moves_bytes(rig: Rig) -> None:
    channel, src, dst = rig.channel().setup(), rig.buffer(1 << 20), rig.buffer(1 << 20)
    src.put(bytes(range(256)) * 4000)
    assert channel.copy(src.va + 3, dst.va + 5, 999_000).run()
    assert dst.mem[5:999_005] == src.mem[3:999_003]
    assert dst.mem[:5] == bytes(5)
    assert dst.u32(999_005) == 0


def test_a_launch_runs_the_kernel_on_its_arguments(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    bank = rig.arguments(out.va + 64, 1234)
    assert channel.launch(rig.qmd(rig.program(STORE, "store"), bank)).run()
    assert out.u32(64) == 1234
    assert not rig.events
    stats = rig.gpu.stats()
    assert stats["launches"] == 1
    assert stats["bytes_written"] == 4
