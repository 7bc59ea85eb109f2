"""What the driver makes of switches that do not happen, of awakened semaphores, and of events for poll()."""

from __future__ import annotations

import errno
import select
import threading
import time
from collections.abc import Callable

import pytest
from driver_fake_gpu import AWAKEN, NON_STALL, STUCK
from driver_user import SPEC, Channel, User, asleep, refused

from tegrad.hw.faults import NotifierCode, read_notifier
from tegrad.orin.client import BoardKernel, board_log
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s
from tegrad.uapi.errors import DriverError


def wait_for(what: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def stuck(user: User, channel: Channel, periods: int) -> None:
    """The channel's TSG blocks the engine for so many periods of 100 ms."""
    doorbell, before = user.kernel.doorbell(user.ctrl), len(_timeouts())
    for _ in range(periods):
        doorbell.store32(STUCK, channel.token)
    doorbell.close()
    wait_for(lambda: len(_timeouts()) == before + periods)


def _timeouts() -> list[str]:
    return [line for line in board_log(SPEC) if "Host pfifo ctxsw timeout error" in line]


def set_timeout(user: User, channel: Channel, ms: int, *, extended: bool = False) -> None:
    if extended:
        user.kernel.ioctl(channel.fd, io.NVGPU_IOCTL_CHANNEL_SET_TIMEOUT_EX, s.SetTimeoutEx(ms, 0))
    else:
        user.kernel.ioctl(channel.fd, io.NVGPU_IOCTL_CHANNEL_SET_TIMEOUT, s.SetTimeout(ms))


@pytest.mark.klog_errors("ctxsw timeout|error notifier set to 8")
def test_a_group_dies_after_three_seconds_with_notifier_8(user: User) -> None:
    channel, other = user.channel(), user.channel()
    memory = user.mapped(user.notifier(channel))
    stuck(user, channel, 30)
    assert not user.timed_out(channel)
    stuck(user, channel, 1)
    assert user.timed_out(channel)
    assert read_notifier(bytes(memory)[:16]).info32 == NotifierCode.FIFO_ERROR_IDLE_TIMEOUT
    assert not user.timed_out(other)
    lines = board_log(SPEC)[-4:]
    assert any("ctxsw timeout error: active engine id =0, tsg=0, info: awaiting ack ms=3100" in line for line in lines)
    assert any("error notifier set to 8 for ch" in line for line in lines)


@pytest.mark.klog_errors("ctxsw timeout|error notifier set to 8")
@pytest.mark.parametrize("extended", [False, True])
def test_set_timeout_gives_a_channel_less_or_more(user: User, extended: bool) -> None:
    channel = user.channel()
    set_timeout(user, channel, 250, extended=extended)
    stuck(user, channel, 2)
    assert not user.timed_out(channel)
    stuck(user, channel, 1)
    assert user.timed_out(channel)


@pytest.mark.klog_errors("ctxsw timeout|error notifier set to 8")
def test_times_add_up_over_stalls_and_one_channel_is_enough(user: User) -> None:
    vm, tsg = user.address_space(), user.tsg()
    patient, hasty = user.channel(vm=vm, tsg=tsg), user.channel(vm=vm, tsg=tsg)
    set_timeout(user, patient, 0xFFFFFFFF)
    set_timeout(user, hasty, 300)
    for _ in range(3):
        stuck(user, patient, 1)
    assert not user.timed_out(patient)
    stuck(user, patient, 1)
    assert user.timed_out(patient)
    assert user.timed_out(hasty)


# ---- events ----------------------------------------------------------------------------------------------------------


def event(user: User, tsg: int, number: int) -> int:
    arg = s.EventIdCtrl(cmd=k.NVGPU_IOCTL_CHANNEL_EVENT_ID_CMD_ENABLE, event_id=number)
    user.kernel.ioctl(tsg, io.NVGPU_IOCTL_TSG_EVENT_ID_CTRL, arg)
    return user.keep(arg.event_fd)


def ready(fd: int, timeout_ms: int = 0) -> bool:
    watch = select.poll()
    watch.register(fd, select.POLLIN)
    return bool(watch.poll(timeout_ms))


def ring(user: User, kind: int, channel: Channel) -> None:
    doorbell = user.kernel.doorbell(user.ctrl)
    doorbell.store32(kind, channel.token)
    doorbell.close()


def test_the_non_stall_interrupt_is_for_everybody_who_has_rings(user: User) -> None:
    raising, other, without = user.channel(), user.channel(), user.bound_channel()
    fds = [event(user, c.tsg, k.NVGPU_IOCTL_CHANNEL_EVENT_ID_BLOCKING_SYNC) for c in (raising, other, without)]
    awaken = event(user, raising.tsg, k.NVGPU_IOCTL_CHANNEL_EVENT_ID_GR_SEMAPHORE_WRITE_AWAKEN)
    ring(user, NON_STALL, raising)
    assert all(ready(fd, 10000) for fd in fds[:2])
    assert not ready(fds[2])
    assert not ready(awaken)


def test_an_awakened_semaphore_is_for_its_group(user: User) -> None:
    raising, other = user.channel(), user.channel()
    number = k.NVGPU_IOCTL_CHANNEL_EVENT_ID_GR_SEMAPHORE_WRITE_AWAKEN
    mine, theirs = event(user, raising.tsg, number), event(user, other.tsg, number)
    blocking = event(user, raising.tsg, k.NVGPU_IOCTL_CHANNEL_EVENT_ID_BLOCKING_SYNC)
    ring(user, AWAKEN, raising)
    assert ready(mine, 10000)
    assert not ready(theirs)
    assert not ready(blocking)


def test_event_fds_outlive_their_group_in_silence(user: User) -> None:
    tsg = user.tsg()
    fd = event(user, tsg, 2)
    user.close(tsg)
    ring(user, NON_STALL, user.channel())
    assert not ready(fd, 20)


# ---- waits -----------------------------------------------------------------------------------------------------------


def waiting(user: User, channel: Channel, arg: s.Wait) -> tuple[threading.Thread, list[int]]:
    """A thread in CHANNEL_WAIT, and what it gets: 0 or an errno."""
    seen: list[int] = []

    def sleep() -> None:
        try:
            seen.append(user.kernel.ioctl(channel.fd, io.NVGPU_IOCTL_CHANNEL_WAIT, arg))
        except DriverError as error:
            seen.append(error.errno or -1)

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    asleep(user, thread, channel)
    return thread, seen


def wait_arg(kind: int, fd: int, payload: int = 0, timeout: int = 0) -> s.Wait:
    arg = s.Wait(type=kind, timeout=timeout)
    arg.condition.semaphore.dmabuf_fd = fd
    arg.condition.semaphore.payload = payload
    return arg


def test_an_awakened_semaphore_wakes_its_own_channel_only(user: User) -> None:
    one, two, buffer = user.channel(), user.channel(), user.buffer()
    memory = user.mapped(buffer)
    first, got = waiting(user, one, wait_arg(k.NVGPU_WAIT_TYPE_SEMAPHORE, buffer.fd, 7))
    second, nothing = waiting(user, two, wait_arg(k.NVGPU_WAIT_TYPE_SEMAPHORE, buffer.fd, 7))
    memory[0] = 7
    ring(user, AWAKEN, one)
    first.join(10)
    assert (got, nothing) == ([0], [])
    ring(user, NON_STALL, one)  # which wakes everybody
    second.join(10)
    assert nothing == [0]


def test_a_notifier_that_is_not_over_when_its_channel_dies_is_etimedout(user: User) -> None:
    channel, buffer = user.channel(), user.buffer()
    memory = user.mapped(buffer)
    memory[14] = 1  # in progress
    thread, seen = waiting(user, channel, wait_arg(k.NVGPU_WAIT_TYPE_NOTIFIER, buffer.fd))
    ring(user, NON_STALL, channel)  # is not for notifiers
    time.sleep(0.02)
    assert seen == []
    user.kernel.ioctl(channel.fd, io.NVGPU_IOCTL_CHANNEL_FORCE_RESET)
    thread.join(10)
    assert seen == [errno.ETIMEDOUT]


def test_a_notifier_whose_time_is_up_is_eintr_and_not_waited_for_again(user: User) -> None:
    channel, buffer = user.channel(), user.buffer()
    user.mapped(buffer)[14] = 1  # in progress
    thread, seen = waiting(user, channel, wait_arg(k.NVGPU_WAIT_TYPE_NOTIFIER, buffer.fd, timeout=20))
    thread.join(10)
    assert seen == [errno.EINTR]


# ---- the rest --------------------------------------------------------------------------------------------------------


@pytest.mark.klog_errors("is not bound to tsg")
def test_force_reset_without_a_group_only_complains(user: User) -> None:
    user.kernel.ioctl(user.open_channel(), io.NVGPU_IOCTL_CHANNEL_FORCE_RESET)
    assert "is not bound to tsg" in board_log(SPEC)[-1]


def test_l2_calls_need_a_context(user: User) -> None:
    tsg = user.tsg()
    for row, arg in (
        (io.NVGPU_TSG_IOCTL_SET_L2_MAX_WAYS_EVICT_LAST, s.TsgL2MaxWaysEvictLast(4)),
        (io.NVGPU_TSG_IOCTL_GET_L2_MAX_WAYS_EVICT_LAST, s.TsgL2MaxWaysEvictLast()),
        (io.NVGPU_TSG_IOCTL_SET_L2_SECTOR_PROMOTION, s.TsgSetL2SectorPromotion(1)),
    ):
        with refused(errno.EINVAL):
            user.kernel.ioctl(tsg, row, arg)


def test_a_second_zcull_buffer_is_ignored(user: User) -> None:
    channel = user.bound_channel()
    user.object(channel)
    for va in (0x10000000, 0x20000000):
        user.kernel.ioctl(channel.fd, io.NVGPU_IOCTL_CHANNEL_ZCULL_BIND, s.ZcullBind(gpu_va=va, mode=2))


def test_share_tokens_and_event_fds_leave_nothing_behind(settled: None, kernel: BoardKernel) -> None:
    user = User(kernel)
    tsg, other = user.tsg(), user.open("/dev/nvgpu/igpu0/ctrl")
    event(user, tsg, 2)
    assert other
    user.close_all()
