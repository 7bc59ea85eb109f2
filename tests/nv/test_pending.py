"""Freed buffers go back in batches: how many calls that takes, how much waits at most, and what ends the wait."""

import errno
from typing import Any

import pytest
from boards import use_board
from fake import FakeKernel

from tegrad.nv import pending
from tegrad.orin.client import board_inject, board_status
from tegrad.orin.inject import Injection
from tegrad.uapi.errors import DriverError

MIB = 1 << 20
FLUSHING = ("AS_UNMAP_BUFFER", "AS_MAP_BUFFER_BATCH")
"""The calls for which the driver empties the GPU's L2."""


def flushes(kernel: FakeKernel) -> int:
    return sum(kernel.counts[name] for name in FLUSHING)


def test_hundreds_of_frees_empty_the_l2_a_few_times(fake_kernel: FakeKernel, fake_device: Any) -> None:
    before, mapped = flushes(fake_kernel), len(fake_kernel.gpu_maps)
    for _ in range(260):
        fake_device.iface.free(fake_device.iface.alloc(4096))
        assert len(fake_kernel.gpu_maps) - mapped <= pending.MOST_BUFFERS
    assert flushes(fake_kernel) - before == 260 // (pending.MOST_BUFFERS + 1)


def test_what_waits_is_bounded_in_bytes(fake_kernel: FakeKernel, fake_device: Any) -> None:
    def mapped() -> int:
        return sum(size for _, size in fake_kernel.gpu_maps.values())

    start = mapped()
    for size in (5, 30, 1, 20, 40, 64, 65, 8):
        fake_device.iface.free(fake_device.iface.alloc(size * MIB))
        assert mapped() - start <= pending.MOST_BYTES
    assert mapped() - start == 8 * MIB  # 65 MiB at once are too much to wait, and take along what was there


def test_a_buffer_that_waits_is_freed_once_and_told_as_freed(fake_kernel: FakeKernel, fake_device: Any) -> None:
    iface = fake_device.iface
    buffer, handles = iface.alloc(4096), len(fake_kernel.handles)
    iface.free(buffer)
    iface.free(buffer)
    for given in (True, False):
        assert iface.describe_address(buffer.va_addr).endswith("that was freed")
        assert iface.give_back() is given
    assert len(fake_kernel.handles) == handles - 1


def test_closing_gives_back_what_waits(fake_kernel: FakeKernel, fake_device: Any) -> None:
    for size in (4096, 8192):
        fake_device.iface.free(fake_device.iface.alloc(size))
    fake_device.close()
    assert set(fake_kernel.held().values()) == {0}


def test_a_cache_that_is_freed_is_given_back_at_once(fake_kernel: FakeKernel, fake_device: Any) -> None:
    buffers, before = [fake_device.allocator.alloc(4096) for _ in range(3)], len(fake_kernel.gpu_maps)
    for buffer in buffers:
        fake_device.allocator.free(buffer, 4096)
    assert len(fake_kernel.gpu_maps) == before
    fake_device.allocator.free_cache()
    assert len(fake_kernel.gpu_maps) == before - 3


def test_a_driver_without_batches_unmaps_one_by_one(fake_kernel: FakeKernel, fake_device: Any) -> None:
    fake_kernel.fail["AS_MAP_BUFFER_BATCH"] = errno.ENOTTY
    before, held = fake_kernel.counts["AS_UNMAP_BUFFER"], fake_kernel.held()
    for buffer in [fake_device.iface.alloc(4096) for _ in range(3)]:
        fake_device.iface.free(buffer)
    assert fake_device.iface.give_back()
    assert (fake_kernel.counts["AS_UNMAP_BUFFER"] - before, fake_kernel.held()) == (3, held)


def test_a_step_that_fails_is_told_and_the_others_are_taken(fake_kernel: FakeKernel, fake_device: Any) -> None:
    buffers = [fake_device.iface.alloc(4096) for _ in range(3)]
    for buffer in buffers:
        fake_device.iface.free(buffer)
    fake_kernel.fail["AS_MAP_BUFFER_BATCH"] = fake_kernel.fail["AS_UNMAP_BUFFER"] = errno.ENODEV
    handles = len(fake_kernel.handles)
    with pytest.raises(DriverError, match="AS_UNMAP_BUFFER"):
        fake_device.iface.give_back()
    assert len(fake_kernel.handles) == handles - 3
    assert fake_device.iface.pending.take() == []
    fake_kernel.fail.clear()
    for buffer in buffers:
        del fake_kernel.gpu_maps[buffer.va_addr]


@pytest.mark.board
def test_memory_comes_back_before_an_allocation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinygrad import Device

    with use_board("agx-orin-64gb:128MiB") as spec:
        iface = Device["NV"].iface
        start = board_status(spec)["counts"]
        for refused in ("", "AS_MAP_BUFFER_BATCH"):
            for _ in range(2):
                iface.free(iface.alloc(30 * MIB))  # 60 MiB wait
            if refused:
                board_inject(spec, [Injection(refused, errno=errno.ENOTTY, nth=1)])
            large = iface.alloc(80 * MIB)
            iface.free(large)
            assert board_status(spec)["counts"] == start
        iface.free(iface.alloc(60 * MIB))
        monkeypatch.setattr(iface, "give_back", lambda: False)
        with pytest.raises(MemoryError):
            iface.alloc(80 * MIB)
