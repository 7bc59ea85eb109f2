"""What a fault leaves behind: notifiers, dead channels, the kernel log, and a GPU that is reset."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import select
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from driver_fake_gpu import DIE, FAULT, SM_ERROR, SYNCPT
from driver_user import FENCE, NVMAP, SPEC, Channel, User, asleep, refused

from tegrad.hw.faults import NotifierCode, read_notifier
from tegrad.orin.client import BoardKernel, board_log, board_status
from tegrad.orin.tsg import Tsg
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s
from tegrad.uapi.errors import DriverError

FAULTS = r"(?i)mmu fault|page fault|sm |GR exception|error notifier|GPU reset|quiesce|ctxsw timeout"
pytestmark = pytest.mark.klog_errors(FAULTS)


def wait_for(what: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def raise_fault(user: User, channel: Channel, kind: int = FAULT) -> None:
    doorbell = user.kernel.doorbell(user.ctrl)
    doorbell.store32(kind, channel.token)
    wait_for(lambda: user.timed_out(channel))
    doorbell.close()


def test_every_channel_of_the_group_that_registered_one_gets_the_notifier(user: User) -> None:
    vm, tsg = user.address_space(), user.tsg()
    first, second, third = (user.channel(vm=vm, tsg=tsg) for _ in range(3))
    other = user.channel(vm=vm)
    memory = {c.token: user.mapped(user.notifier(c)) for c in (first, third, other)}
    before = time.time_ns()
    raise_fault(user, first)
    for channel in (first, third):
        record = read_notifier(bytes(memory[channel.token])[:16])
        assert (record.info32, record.status) == (NotifierCode.FIFO_ERROR_MMU_ERR_FLT, 0xFFFF)
        assert before <= record.time_ns <= time.time_ns()
    assert all(user.timed_out(c) for c in (first, second, third))
    assert not user.timed_out(other)
    assert bytes(memory[other.token][:16]) == bytes(16)


def test_an_mmu_fault_in_the_log(user: User) -> None:
    channel = user.channel()
    user.notifier(channel)
    seen = len(board_log(SPEC))
    raise_fault(user, channel)
    lines = board_log(SPEC)[seen:]
    assert "nvgpu: 17000000.gpu" in lines[0]
    assert f"[ERR]  [MMU FAULT] mmu engine id:  0, ch id:  {channel.token}, fault addr: 0x123000" in lines[0]
    assert "fault type: invalid pte, access type: virt write" in lines[0]
    assert "client type: gpc, client id:  t1_3, gpc id if client type is gpc: 1" in lines[1]
    assert any(f"error notifier set to 31 for ch {channel.token} owned by" in line for line in lines)


def test_an_sm_exception_is_logged_and_can_be_read(user: User) -> None:
    channel = user.channel()
    user.object(channel)
    seen = len(board_log(SPEC))
    raise_fault(user, channel, SM_ERROR)
    text = "\n".join(board_log(SPEC)[seen:])
    assert "sm machine check err. gpc_id(0), tpc_id(1)" in text
    assert "sm hww global 0x4 warp 0x10010" in text
    record = s.TsgSmErrorStateRecord()
    arg = s.TsgReadSingleSmErrorState(sm_id=2, record_mem=ctypes.addressof(record), record_size=24)
    user.kernel.ioctl(channel.tsg, io.NVGPU_TSG_IOCTL_READ_SINGLE_SM_ERROR_STATE, arg)
    assert (record.global_esr, record.warp_esr, record.warp_esr_pc) == (4, 0x10010, 0x2000)


def test_a_lost_gpu_process_is_a_reset(user: User) -> None:
    channel = user.channel()
    memory = user.mapped(user.notifier(channel))
    va = user.map(channel.vm, user.buffer().fd)
    before = board_status(SPEC)
    doorbell = user.kernel.doorbell(user.ctrl)
    doorbell.store32(DIE, 0)
    wait_for(lambda: user.timed_out(channel))
    after = board_status(SPEC)
    assert after["pids"]["gpu"] != before["pids"]["gpu"]
    assert after["pids"]["driver"] == before["pids"]["driver"]
    assert after["gpu"]["mapped"] == before["gpu"]["mapped"]
    assert read_notifier(bytes(memory)[:16]).info32 == NotifierCode.FIFO_ERROR_IDLE_TIMEOUT
    user.unmap(channel.vm, va)
    # The same doorbell page reaches the new GPU.
    fresh = user.channel(vm=channel.vm, tsg=user.tsg())
    doorbell.store32(0x90, fresh.token)
    wait_for(lambda: fresh.token in board_status(SPEC)["gpu"]["rung"])
    doorbell.close()


def test_a_gpu_killed_from_outside_is_noticed_by_the_next_call(user: User) -> None:
    import os
    import signal

    os.kill(board_status(SPEC)["pids"]["gpu"], signal.SIGKILL)
    assert not user.timed_out(user.channel())


def test_a_gpu_that_does_not_come_up_is_enodev_and_says_why() -> None:
    spec = "agx-orin-64gb:7GiB"
    user = User(BoardKernel(spec, linger=0.2, gpu="driver_fake_gpu:BrokenGpu"))
    with refused(errno.ENODEV):
        user.address_space()  # also if it is the first to notice
    assert any("SW quiesce" in line for line in board_log(spec))
    assert any("no silicon today" in line for line in board_log(spec))
    assert user.buffer().fd
    with refused(errno.ENODEV):
        user.tsg()
    with refused(errno.EINVAL):  # the one query that tells no reason
        user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_GET_CHARACTERISTICS, s.GpuGetCharacteristics(0, 0))
    assert board_status(spec)["counts"]["address_spaces"] == 0
    user.close_all()


def test_files_opened_after_the_gpu_is_gone_are_served() -> None:
    """One of them takes the number that the line to the GPU had."""
    import threading

    spec = "agx-orin-64gb:6GiB"
    user = User(BoardKernel(spec, linger=0.2, gpu="driver_fake_gpu:BrokenGpu"))
    wait_for(lambda: any("SW quiesce" in line for line in board_log(spec)))
    served: list[int] = []

    def use() -> None:
        for _ in range(8):
            nvmap = user.open(NVMAP)
            user.kernel.ioctl(nvmap, io.NVMAP_IOC_CREATE, s.CreateHandle(size=4096))
            served.append(nvmap)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(20)
    assert len(served) == 8
    user.close_all()


# ---- syncpoints and fences ------------------------------------------------------------------------------------------


@pytest.fixture
def syncpoint(user: User) -> tuple[Channel, s.GetUserSyncpoint]:
    channel = user.channel()
    arg = s.GetUserSyncpoint()
    user.kernel.ioctl(channel.fd, io.NVGPU_IOCTL_CHANNEL_GET_USER_SYNCPOINT, arg)
    return channel, arg


def _readable(fd: int, seconds: float = 0.0) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])


def _fence(user: User, number: int, threshold: int) -> int:
    arg = s.Host1xCreateFence(id=number, threshold=threshold)
    user.kernel.ioctl(user.open(FENCE), io.HOST1X_IOCTL_CREATE_FENCE, arg)
    return user.keep(arg.fence_fd)


def test_a_fence_is_readable_when_the_syncpoint_gets_there(
    user: User, syncpoint: tuple[Channel, s.GetUserSyncpoint]
) -> None:
    number, start = syncpoint[1].syncpoint_id, syncpoint[1].syncpoint_max
    fence, reached = _fence(user, number, start + 2), _fence(user, number, start)
    assert _readable(reached)
    doorbell = user.kernel.doorbell(user.ctrl)
    doorbell.store32(SYNCPT, number)
    assert not _readable(fence, 0.05)
    doorbell.store32(SYNCPT, number)
    assert _readable(fence, 5)
    doorbell.close()


def test_a_fence_needs_a_syncpoint_that_exists(user: User) -> None:
    with refused(errno.EINVAL):
        _fence(user, 1024, 0)


def test_notifiers_are_written_before_another_group_may_have_the_engine() -> None:
    """L4T r36.4.3 nvgpu, common/rc/rc.c, nvgpu_rc_ctxsw_timeout: the notifier, then recovery."""
    done: list[str] = []
    channel = SimpleNamespace(fault=lambda code: done.append(f"notifier {int(code)}"))
    driver = SimpleNamespace(tell_gpu=lambda method, tsg: done.append(f"{method} {tsg}"))
    group: Any = SimpleNamespace(id=3, channels=[channel], driver=driver)
    Tsg.recover(group, NotifierCode.FIFO_ERROR_IDLE_TIMEOUT)
    assert done == ["notifier 8", "tsg_abort 3"]


def test_a_reset_tells_all_groups_though_one_goes_with_its_last_wait(user: User) -> None:
    """Its fds are closed already, so that the wait, which a reset ends, holds it alone."""
    leaving, buffer = user.channel(), user.buffer()
    staying = user.channel()
    wait = s.Wait(type=k.NVGPU_WAIT_TYPE_SEMAPHORE, timeout=0)
    wait.condition.semaphore.dmabuf_fd, wait.condition.semaphore.payload = buffer.fd, 1

    def sleep() -> None:
        with contextlib.suppress(DriverError):
            user.kernel.ioctl(leaving.fd, io.NVGPU_IOCTL_CHANNEL_WAIT, wait)

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    asleep(user, thread, leaving)
    user.close(leaving.fd)
    user.close(leaving.tsg)
    doorbell = user.kernel.doorbell(user.ctrl)
    doorbell.store32(DIE, 0)
    wait_for(lambda: user.timed_out(staying))
    thread.join(60)
    assert not thread.is_alive()
    doorbell.close()


def test_what_is_reported_of_a_channel_that_goes_is_not_the_next_ones() -> None:
    """Which has the numbers of its channel and of its group."""
    spec = "agx-orin-64gb:26GiB"
    kernel = BoardKernel(spec, linger=0.2, gpu="driver_fake_gpu:LastWords")
    first, second = User(kernel), User(kernel)
    gone = first.channel()
    first.close_all()
    channel = second.channel()
    wait_for(lambda: any("MMU FAULT" in line for line in board_log(spec)))
    assert channel.token == gone.token
    assert not second.timed_out(channel)
    second.close_all()
