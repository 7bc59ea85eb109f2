"""Memory that the GPU's L2 keeps: what the CPU reads and writes there is right, by flushes where they are needed alone.

The fake driver has no L2. Here a few bytes stand for one: what the GPU stored stays there, and a flush writes it back.
"""

import ctypes
import errno
from typing import Any

import pytest
from fake import FakeKernel
from kernels import program
from tinygrad import Device

from tegrad.nv import iface, roles
from tegrad.nv.coherence import Coherence
from tegrad.nv.faults import DeviceClosed, UnsupportedBuffer
from tegrad.nv.queues import NVComputeQueue
from tegrad.nv.roles import ROLES, Role
from tegrad.nv.spec import MemorySpec
from tegrad.uapi.errors import DriverError

KEPT = [role for role in ROLES if role.cached]


class L2:
    """Dirty bytes of the GPU's by address. A flush asserts that the GPU is idle."""

    def __init__(self, kernel: FakeKernel, device: Any) -> None:
        self.kernel, self.device = kernel, device
        self.dirty: dict[int, bytes] = {}
        self.flushes: list[tuple[int, int, int]] = []
        kernel.gpu_flush_l2 = self.flush  # type: ignore[attr-defined]

    def store(self, buffer: Any, data: bytes) -> None:
        """As a launch would: the bytes are in L2, and only there."""
        self.dirty[buffer.va_addr] = data
        submit(self.device)

    def flush(self, _: Any, arg: Any) -> None:
        assert self.device.compute_gpfifo.done == self.device.compute_gpfifo.submissions
        self.flushes.append((arg.l2_flush, arg.l2_invalidate, arg.fb_flush))
        for va, data in self.dirty.items():
            memory = next(m for m in self.device.iface.memory.values() if m.va <= va < m.va + m.size)
            whole = (ctypes.c_char * len(data)).from_address(memory.address + va - memory.va)
            whole.raw = data
        self.dirty.clear()


def submit(device: Any) -> None:
    """Work on the compute channel."""
    queue = NVComputeQueue().wait(device.timeline_signal, device.timeline_value - 1)
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)


@pytest.fixture
def device(fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """NVDevice under the second policy."""
    monkeypatch.setenv("TEGRAD_MEMORY", "cached")
    return Device["NV"]


@pytest.fixture
def l2(fake_kernel: FakeKernel, device: Any) -> L2:
    return L2(fake_kernel, device)


def take(device: Any, role: Role = roles.WORKSPACE, size: int = 4096) -> Any:
    return device.allocator.alloc(size, MemorySpec(nolru=True, role=role))


def read(device: Any, buffer: Any, size: int = 4) -> bytes:
    out = bytearray(size)
    device.allocator._copyout(memoryview(out), buffer)
    return bytes(out)


@pytest.mark.parametrize("role", KEPT, ids=lambda role: role.name)
def test_the_cpu_reads_what_the_gpu_stored(device: Any, l2: L2, role: Role) -> None:
    buffer = take(device, role)
    l2.store(buffer, b"abcd")
    assert read(device, buffer) == b"abcd"
    assert l2.flushes == [(1, 1, 1)]


def test_what_the_cpu_writes_is_not_overwritten_by_an_older_store_of_the_gpu(device: Any, l2: L2) -> None:
    buffer = take(device)
    l2.store(buffer, b"abcdefgh")
    device.allocator._copyin(buffer, memoryview(b"wxyz"))
    assert l2.flushes == [(1, 1, 1)]
    device.iface.flush_l2()  # as an eviction does
    assert read(device, buffer, 8) == b"wxyzefgh"


def test_without_the_flush_both_go_wrong(device: Any, l2: L2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coherence, "before_cpu", lambda self, memories: None)
    buffer = take(device)
    l2.store(buffer, b"abcd")
    assert read(device, buffer) == bytes(4)
    device.allocator._copyin(buffer, memoryview(b"wxyz"))
    device.iface.flush_l2()
    assert read(device, buffer) == b"abcd"


def test_fresh_memory_needs_no_flush_whatever_ran_before_and_runs_now(
    fake_kernel: FakeKernel, device: Any, l2: L2
) -> None:
    submit(device)
    buffers = [take(device, role) for role in KEPT]
    for buffer in buffers:
        device.allocator._copyin(buffer, memoryview(b"abcd"))
    fake_kernel.paused = True
    submit(device)
    fresh = take(device)
    assert device.allocator.lend([fresh])[0][:4] == bytes(4)  # without waiting
    fake_kernel.paused = False
    assert l2.flushes == []


def test_loading_a_program_flushes_nothing(device: Any, l2: L2) -> None:
    first = program(device, "store")  # grows local memory, by a submission between its code's mapping and the copy
    l2.flushes.clear()
    second = program(device, "add")
    assert [loaded.lib_gpu.meta.cached for loaded in (first, second)] == [True, True]
    assert l2.flushes == []


def test_one_flush_serves_all_buffers_until_the_next_submission(device: Any, l2: L2) -> None:
    buffers = [take(device, role) for role in KEPT]
    for _ in range(2):
        submit(device)
        l2.flushes.clear()
        for buffer in buffers:
            read(device, buffer)
            device.allocator._copyin(buffer, memoryview(b"abcd"))
        device.allocator.lend(buffers)
        assert len(l2.flushes) == 1


def test_a_lent_buffer_is_written_in_place_after_a_flush(device: Any, l2: L2) -> None:
    buffer, other = take(device), take(device)
    l2.store(buffer, b"abcd")
    l2.store(other, b"efgh")
    first, second = device.allocator.lend([buffer.offset(2, 2), other])
    assert (bytes(first), bytes(second[:4]), len(l2.flushes)) == (b"cd", b"efgh", 1)
    first[:] = b"xy"
    device.iface.flush_l2()
    assert read(device, buffer) == b"abxy"


def test_volatile_memory_is_never_flushed_for(device: Any, l2: L2) -> None:
    for role in ROLES:
        if role.cached or role.within:
            continue
        buffer = take(device, role)
        submit(device)
        device.allocator._copyin(buffer, memoryview(b"abcd"))
        assert (read(device, buffer), bytes(device.allocator._as_buffer(buffer)[:4])) == (b"abcd", b"abcd")
    assert l2.flushes == []


@pytest.fixture
def first_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_MEMORY", "volatile")


def test_under_the_first_policy_nothing_is_ever_flushed(
    first_policy: None, fake_kernel: FakeKernel, fake_device: Any
) -> None:
    l2 = L2(fake_kernel, fake_device)
    for role in ROLES:
        buffer = take(fake_device, role)
        submit(fake_device)
        fake_device.allocator._copyin(buffer, memoryview(b"abcd"))
        assert read(fake_device, buffer) == b"abcd"
        assert bytes(buffer.cpu_view()[0:4]) == bytes(fake_device.allocator._as_buffer(buffer)[:4]) == b"abcd"
    assert l2.flushes == []


def test_no_view_of_cached_memory_is_given(device: Any) -> None:
    buffer = take(device, roles.WEIGHTS)
    for part in (buffer, buffer.offset(16, 16)):
        with pytest.raises(UnsupportedBuffer, match=r"weights lies in the GPU's L2 .* copy it out"):
            device.allocator._as_buffer(part)
        assert part.view is None


@pytest.mark.parametrize("busy", [errno.EBUSY, errno.ETIMEDOUT])
def test_a_flush_that_did_not_get_through_is_made_again(
    fake_kernel: FakeKernel, device: Any, l2: L2, monkeypatch: pytest.MonkeyPatch, busy: int
) -> None:
    """nvgpu polls it for half a millisecond, which other processes' kernels may outlast."""
    answers, flush = [busy, busy], l2.flush

    def late(fd: int, arg: Any) -> None:
        if answers:
            raise DriverError("GPU_FLUSH_L2", answers.pop())
        flush(fd, arg)

    monkeypatch.setattr(fake_kernel, "gpu_flush_l2", late)
    device.iface.flush_l2()
    assert (answers, l2.flushes) == ([], [(1, 1, 1)])


def test_a_flush_that_never_gets_through_is_said(
    fake_kernel: FakeKernel, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iface, "FLUSH_LIMIT_S", 0.01)
    fake_kernel.fail["GPU_FLUSH_L2"] = errno.EBUSY
    with pytest.raises(DriverError, match="busy"):
        device.iface.flush_l2()


def test_a_flush_that_the_driver_refuses_is_said(fake_kernel: FakeKernel, device: Any) -> None:
    buffer = take(device)
    submit(device)
    fake_kernel.fail["GPU_FLUSH_L2"] = errno.EINVAL
    with pytest.raises(DriverError, match="FLUSH_L2"):
        read(device, buffer)
    with pytest.raises(DriverError, match="FLUSH_L2"):  # it is still to be done
        device.allocator._copyin(buffer, memoryview(b"abcd"))
    fake_kernel.fail.clear()
    assert read(device, buffer) == bytes(4)


def test_nothing_of_a_closed_device_is_lent(device: Any) -> None:
    buffer = take(device)
    device.close()
    with pytest.raises(DeviceClosed):
        device.allocator.lend([buffer])
