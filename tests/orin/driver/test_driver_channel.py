"""TSGs and channels: the order that works, and every refusal with its errno."""

from __future__ import annotations

import ctypes
import errno
import threading
import time

import pytest
from driver_fake_gpu import NON_STALL
from driver_user import SETUP_FLAGS, SPEC, User, refused

from tegrad.hw.chips import CHIPS
from tegrad.orin.client import board_log, board_status
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

DETERMINISTIC = k.NVGPU_CHANNEL_SETUP_BIND_FLAGS_DETERMINISTIC
USERMODE = k.NVGPU_CHANNEL_SETUP_BIND_FLAGS_USERMODE_SUPPORT


# ---- TSG ------------------------------------------------------------------------------------------------------------


def test_subcontexts(user: User) -> None:
    tsg, vm = user.tsg(), user.address_space()

    def create(kind: int) -> int:
        arg = s.TsgCreateSubcontext(type=kind, as_fd=vm)
        user.kernel.ioctl(tsg, io.NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT, arg)
        return int(arg.veid)

    assert create(k.NVGPU_TSG_SUBCONTEXT_TYPE_ASYNC) == 1
    assert create(k.NVGPU_TSG_SUBCONTEXT_TYPE_SYNC) == 0
    with refused(errno.ENOSPC):
        create(k.NVGPU_TSG_SUBCONTEXT_TYPE_SYNC)
    with refused(errno.EINVAL):
        create(2)
    for veid in range(2, 64):
        assert create(k.NVGPU_TSG_SUBCONTEXT_TYPE_ASYNC) == veid
    with refused(errno.ENOSPC):
        create(k.NVGPU_TSG_SUBCONTEXT_TYPE_ASYNC)
    for _ in range(2):  # one that does not exist is fine
        user.kernel.ioctl(tsg, io.NVGPU_TSG_IOCTL_DELETE_SUBCONTEXT, s.TsgDeleteSubcontext(veid=7))
    with refused(errno.EINVAL):
        user.kernel.ioctl(tsg, io.NVGPU_TSG_IOCTL_DELETE_SUBCONTEXT, s.TsgDeleteSubcontext(veid=64))
    assert create(k.NVGPU_TSG_SUBCONTEXT_TYPE_ASYNC) == 7


def test_a_subcontext_needs_an_address_space(user: User) -> None:
    for fd in (user.ctrl, 987654, user.buffer().fd):
        with refused(errno.EINVAL):
            arg = s.TsgCreateSubcontext(type=1, as_fd=fd)
            user.kernel.ioctl(user.tsg(), io.NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT, arg)


def _bind(user: User, tsg: int, channel: int, veid: int = 0) -> None:
    user.kernel.ioctl(tsg, io.NVGPU_TSG_IOCTL_BIND_CHANNEL_EX, s.TsgBindChannelEx(channel, veid))


def _bind_vm(user: User, vm: int, channel: int) -> None:
    user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_BIND_CHANNEL, s.AsBindChannel(channel))


def test_bind_channel_refuses(user: User) -> None:
    tsg, vm, other = user.tsg(), user.address_space(), user.address_space()
    channel = user.open_channel()
    _bind_vm(user, vm, channel)
    for number, what in (
        (errno.EINVAL, lambda: _bind_vm(user, other, channel)),  # has an address space
        (errno.EINVAL, lambda: _bind_vm(user, other, user.ctrl)),  # not a channel
        (errno.EINVAL, lambda: _bind(user, tsg, vm)),  # not a channel
        (errno.EINVAL, lambda: _bind(user, tsg, channel, 64)),  # no such veid
        (errno.EINVAL, lambda: _bind(user, tsg, channel, 3)),  # never created
    ):
        with refused(number):
            what()
    _bind(user, tsg, channel)
    with refused(errno.EINVAL):
        _bind(user, tsg, channel)
    second = user.open_channel()
    _bind_vm(user, other, second)
    with refused(errno.EINVAL):
        _bind(user, tsg, second)  # veid 0 has another address space
    _bind(user, user.tsg(), second)


def test_a_channel_without_address_space_binds_and_is_useless(user: User) -> None:
    tsg, vm, channel = user.tsg(), user.address_space(), user.open_channel()
    _bind(user, tsg, channel)
    _bind_vm(user, vm, channel)
    late = user.open_channel()
    _bind_vm(user, vm, late)
    with refused(errno.ENOSPC):  # veid 0 is taken, by none
        _bind(user, tsg, late)


def test_a_tsg_takes_128_channels(user: User) -> None:
    tsg, vm = user.tsg(), user.address_space()
    for _ in range(128):
        channel = user.open_channel()
        _bind_vm(user, vm, channel)
        _bind(user, tsg, channel)
    channel = user.open_channel()
    _bind_vm(user, vm, channel)
    with refused(errno.EINVAL):
        _bind(user, tsg, channel)


def test_an_unbound_channel_is_unserviceable_until_it_is_bound_again(user: User) -> None:
    made = user.bound_channel()
    assert not user.timed_out(made)
    with refused(errno.EINVAL):
        user.kernel.ioctl(user.tsg(), io.NVGPU_TSG_IOCTL_UNBIND_CHANNEL, ctypes.c_int32(made.fd))
    user.kernel.ioctl(made.tsg, io.NVGPU_TSG_IOCTL_UNBIND_CHANNEL, ctypes.c_int32(made.fd))
    assert user.timed_out(made)
    _bind(user, made.tsg, made.fd)
    assert not user.timed_out(made)


def test_timeslice_and_interleave(user: User) -> None:
    tsg = user.tsg()
    now = s.Timeslice()
    user.kernel.ioctl(tsg, io.NVGPU_IOCTL_TSG_GET_TIMESLICE, now)
    assert now.timeslice_us == 1024
    user.kernel.ioctl(tsg, io.NVGPU_IOCTL_TSG_SET_TIMESLICE, s.Timeslice(50000))
    user.kernel.ioctl(tsg, io.NVGPU_IOCTL_TSG_GET_TIMESLICE, now)
    assert now.timeslice_us == 50000
    for bad in (0, 999, 50001):
        with refused(errno.EINVAL):
            user.kernel.ioctl(tsg, io.NVGPU_IOCTL_TSG_SET_TIMESLICE, s.Timeslice(bad))
    user.kernel.ioctl(tsg, io.NVGPU_IOCTL_TSG_SET_RUNLIST_INTERLEAVE, s.RunlistInterleave(2))
    with refused(errno.EINVAL):
        user.kernel.ioctl(tsg, io.NVGPU_IOCTL_TSG_SET_RUNLIST_INTERLEAVE, s.RunlistInterleave(3))


def test_enable_disable_preempt(user: User) -> None:
    made = user.channel()
    for row in (io.NVGPU_IOCTL_TSG_DISABLE, io.NVGPU_IOCTL_TSG_PREEMPT, io.NVGPU_IOCTL_TSG_ENABLE):
        assert user.kernel.ioctl(made.tsg, row) == 0
        assert user.kernel.ioctl(user.tsg(), row) == 0
    for row in (io.NVGPU_IOCTL_CHANNEL_DISABLE, io.NVGPU_IOCTL_CHANNEL_PREEMPT, io.NVGPU_IOCTL_CHANNEL_ENABLE):
        assert user.kernel.ioctl(made.fd, row) == 0


def test_an_unknown_tsg_command_is_enotty_and_logged(user: User) -> None:
    before = len([line for line in board_log(SPEC) if "unrecognized tsg" in line])
    with refused(errno.ENOTTY):
        user.kernel.ioctl(user.tsg(), io.NVGPU_TSG_IOCTL_READ_ALL_SM_ERROR_STATES, s.TsgReadAllSmErrorState())
    assert len([line for line in board_log(SPEC) if "unrecognized tsg" in line]) == before + 1


# ---- SETUP_BIND -----------------------------------------------------------------------------------------------------


def test_channel_ids_come_from_the_top_and_a_freed_one_is_next(fresh: User) -> None:
    vm, tsg = fresh.address_space(), fresh.tsg()
    first, second = fresh.channel(vm=vm, tsg=tsg), fresh.channel(vm=vm, tsg=tsg)
    assert (first.token, second.token) == (511, 510)
    fresh.close(first.fd)
    assert fresh.channel(vm=vm, tsg=tsg).token == 511
    fresh.close(second.fd)


def test_setup_bind_fills_the_token_only(fresh: User) -> None:
    made = fresh.bound_channel()
    arg = fresh.setup_args(gpfifo_gpu_va=1, userd_gpu_va=2, usermode_mmio_gpu_va=3)
    fresh.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_SETUP_BIND, arg)
    assert arg.work_submit_token == 511
    assert (arg.gpfifo_gpu_va, arg.userd_gpu_va, arg.usermode_mmio_gpu_va) == (0, 0, 0)


SETUP_REFUSED = [
    ("one entry", {"num_gpfifo_entries": 1}, errno.EINVAL),
    ("no entries", {"num_gpfifo_entries": 0}, errno.EINVAL),
    ("entries not a power of two", {"num_gpfifo_entries": 384}, errno.EINVAL),
    ("too many entries", {"num_gpfifo_entries": 1 << 29}, errno.EINVAL),
    ("usermode without deterministic", {"flags": USERMODE}, errno.EINVAL),
    ("gpfifo fd 0", {"gpfifo_dmabuf_fd": 0}, errno.EINVAL),
    ("userd fd 0", {"userd_dmabuf_fd": 0}, errno.EINVAL),
    ("gpfifo at an offset", {"gpfifo_dmabuf_offset": 4096}, errno.EINVAL),
    ("userd at an offset", {"userd_dmabuf_offset": 4096}, errno.EINVAL),
    ("gpfifo fd not open", {"gpfifo_dmabuf_fd": 987654}, errno.EBADF),
    ("userd fd not open", {"userd_dmabuf_fd": 987654}, errno.EBADF),
    ("ring larger than its buffer", {"num_gpfifo_entries": 1024}, errno.EINVAL),
    ("offsets before fds", {"gpfifo_dmabuf_offset": 4096, "gpfifo_dmabuf_fd": 987654}, errno.EINVAL),
    ("gpfifo before userd", {"gpfifo_dmabuf_fd": 987654, "userd_dmabuf_fd": -1}, errno.EBADF),
]


@pytest.mark.parametrize(("fields", "number"), [r[1:] for r in SETUP_REFUSED], ids=[r[0] for r in SETUP_REFUSED])
def test_setup_bind_refuses_and_leaves_the_channel_usable(user: User, fields: dict[str, int], number: int) -> None:
    made = user.bound_channel()
    before = board_status(SPEC)["counts"]["kernel_mappings"]
    with refused(number):
        user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_SETUP_BIND, user.setup_args(**fields))
    assert board_status(SPEC)["counts"]["kernel_mappings"] == before
    user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_SETUP_BIND, user.setup_args())


def test_setup_bind_refuses_fds_that_are_no_usable_buffers(user: User) -> None:
    made = user.bound_channel()
    fresh = user.buffer(allocate=False).fd
    for field in ("gpfifo_dmabuf_fd", "userd_dmabuf_fd"):
        for fd, number in ((user.ctrl, errno.EINVAL), (fresh, errno.ENOMEM)):
            with refused(number):
                user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_SETUP_BIND, user.setup_args(**{field: fd}))


def test_setup_bind_needs_what_comes_before_it(user: User) -> None:
    vm, tsg, fd = user.address_space(), user.tsg(), user.open_channel()

    def setup() -> None:
        user.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_SETUP_BIND, user.setup_args())

    with refused(errno.EINVAL):
        setup()  # no address space
    _bind_vm(user, vm, fd)
    with refused(errno.EINVAL):
        setup()  # no TSG
    _bind(user, tsg, fd)
    fails = len([line for line in board_log(SPEC) if line.endswith("fail")])
    with refused(errno.EINVAL):
        setup()  # watchdog on
    assert len([line for line in board_log(SPEC) if line.endswith("fail")]) == fails + 1
    user.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_WDT, s.ChannelWdt(k.NVGPU_IOCTL_CHANNEL_DISABLE_WDT, 0))
    setup()
    with refused(errno.EEXIST):
        setup()


def test_one_buffer_may_serve_two_channels_only_at_offset_zero(user: User) -> None:
    """One GPFIFO area shared at an offset is refused."""
    made = user.bound_channel()
    shared = user.buffer(16384).fd
    with refused(errno.EINVAL):
        arg = user.setup_args(gpfifo_dmabuf_fd=shared, gpfifo_dmabuf_offset=8192)
        user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_SETUP_BIND, arg)


@pytest.mark.parametrize(
    ("status", "good"), [(1, True), (2, True), (1 | 8, True), (1 | 4, True), (0, False), (3, False)]
)
def test_wdt_takes_exactly_one_of_enable_and_disable(user: User, status: int, good: bool) -> None:
    arg = s.ChannelWdt(status, 1000)
    if good:
        user.kernel.ioctl(user.open_channel(), io.NVGPU_IOCTL_CHANNEL_WDT, arg)
    else:
        with refused(errno.EINVAL):
            user.kernel.ioctl(user.open_channel(), io.NVGPU_IOCTL_CHANNEL_WDT, arg)


def test_the_watchdog_stays_off_on_a_deterministic_channel(user: User) -> None:
    made = user.channel()
    with refused(errno.EINVAL):
        user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_WDT, s.ChannelWdt(k.NVGPU_IOCTL_CHANNEL_ENABLE_WDT, 0))


# ---- objects and preemption -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_id", [0xC7C0, 0xC7B5, 0xC76F, 0xC797, 0xC637, 0xC5C0, 0xA140, 0x902D])
def test_alloc_obj_ctx_takes_a_class_the_driver_knows(user: User, class_id: int) -> None:
    arg = s.AllocObjCtx(class_id, 0, 77)
    user.kernel.ioctl(user.bound_channel().fd, io.NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX, arg)
    assert arg.obj_id == 77


@pytest.mark.parametrize("class_id", [0, 0xC6C0, 0xC56F, 0xCBC0, 0x10000 | 0xC7C0])
def test_alloc_obj_ctx_refuses_other_classes(user: User, class_id: int) -> None:
    with refused(errno.EINVAL):
        user.object(user.bound_channel(), class_id)


def test_alloc_obj_ctx_needs_address_space_and_tsg(user: User) -> None:
    fd, arg = user.open_channel(), s.AllocObjCtx(0xC7C0)
    with refused(errno.EINVAL):
        user.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX, arg)
    _bind_vm(user, user.address_space(), fd)
    with refused(errno.EINVAL):
        user.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX, arg)
    _bind(user, user.tsg(), fd)
    with refused(errno.EINVAL):
        both = s.AllocObjCtx(0xC7C0, k.NVGPU_ALLOC_OBJ_FLAGS_GFXP | k.NVGPU_ALLOC_OBJ_FLAGS_CILP)
        user.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX, both)
    user.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX, arg)


def test_graphics_is_refused_off_subcontext_zero(user: User) -> None:
    tsg, vm, fd = user.tsg(), user.address_space(), user.open_channel()
    arg = s.TsgCreateSubcontext(type=1, as_fd=vm)
    user.kernel.ioctl(tsg, io.NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT, arg)
    _bind_vm(user, vm, fd)
    _bind(user, tsg, fd, arg.veid)
    with refused(errno.EINVAL):
        user.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX, s.AllocObjCtx(0xC797))
    user.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX, s.AllocObjCtx(0xC7C0))


def test_preemption_modes_only_rise(user: User) -> None:
    made = user.bound_channel()

    def set_mode(graphics: int, compute: int) -> None:
        arg = s.PreemptionMode(graphics, compute)
        user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE, arg)

    with refused(errno.EINVAL):
        set_mode(0, 2)  # no object yet
    user.object(made)
    set_mode(0, 0)
    set_mode(1, 1)
    set_mode(0, 2)
    set_mode(0, 4)
    set_mode(0, 4)
    for graphics, compute in ((0, 2), (0, 1), (4, 0), (0, 8)):
        with refused(errno.EINVAL):
            set_mode(graphics, compute)
    set_mode(2, 0)  # and with that the driver has forgotten the compute mode
    set_mode(0, 2)


def test_graphics_and_compute_in_the_middle_of_everything_do_not_go_together(user: User) -> None:
    made = user.bound_channel()
    user.object(made)
    with refused(errno.EINVAL):
        user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE, s.PreemptionMode(2, 4))


def test_a_copy_object_has_no_preemption_mode(user: User) -> None:
    made = user.bound_channel()
    user.object(made, 0xC7B5)
    with refused(errno.EINVAL):
        user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE, s.PreemptionMode(0, 4))


# ---- the rest -------------------------------------------------------------------------------------------------------


def test_submit_gpfifo_is_refused(user: User) -> None:
    with refused(errno.ETIMEDOUT):
        user.kernel.ioctl(user.open_channel(), io.NVGPU_IOCTL_CHANNEL_SUBMIT_GPFIFO, s.SubmitGpfifo())
    with refused(errno.ENOMEM):
        user.kernel.ioctl(user.bound_channel().fd, io.NVGPU_IOCTL_CHANNEL_SUBMIT_GPFIFO, s.SubmitGpfifo())
    with refused(errno.EINVAL):
        user.kernel.ioctl(user.channel().fd, io.NVGPU_IOCTL_CHANNEL_SUBMIT_GPFIFO, s.SubmitGpfifo())


NOTIFIER_REFUSED = [
    ("mem 0", {"mem": 0}, errno.EINVAL),
    ("fd not open", {"mem": 987654}, errno.EINVAL),
    ("past the buffer", {"offset": 4096 - 15}, errno.EINVAL),
]


@pytest.mark.parametrize(("fields", "number"), [r[1:] for r in NOTIFIER_REFUSED], ids=[r[0] for r in NOTIFIER_REFUSED])
def test_set_error_notifier_refuses(user: User, fields: dict[str, int], number: int) -> None:
    arg = s.SetErrorNotifier(offset=0, size=16, mem=user.buffer().fd)
    for name, value in fields.items():
        setattr(arg, name, value)
    with refused(number):
        user.kernel.ioctl(user.open_channel(), io.NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER, arg)


def test_set_error_notifier_zeroes_its_record_only(user: User) -> None:
    buffer = user.buffer()
    memory = user.mapped(buffer)
    ctypes.memset(memory, 0xFF, 4096)
    arg = s.SetErrorNotifier(offset=32, size=0, mem=buffer.fd)
    user.kernel.ioctl(user.open_channel(), io.NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER, arg)
    assert bytes(memory[16:64]) == b"\xff" * 16 + bytes(16) + b"\xff" * 16


def test_user_syncpoint_is_made_once_in_the_drivers_range(user: User) -> None:
    made = user.channel()

    def get() -> tuple[int, int, int]:
        arg = s.GetUserSyncpoint()
        user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_GET_USER_SYNCPOINT, arg)
        return arg.gpu_va, arg.syncpoint_id, arg.syncpoint_max

    first = get()
    assert get() == first
    assert first[0] == 0xFF00010000  # after the GPFIFO, on a multiple of its size
    with refused(errno.EINVAL):
        user.kernel.ioctl(user.open_channel(), io.NVGPU_IOCTL_CHANNEL_GET_USER_SYNCPOINT, s.GetUserSyncpoint())


def _wait(kind: int, fd: int, *, offset: int = 0, payload: int = 0, timeout: int = 0) -> s.Wait:
    arg = s.Wait(type=kind, timeout=timeout)
    arg.condition.semaphore.dmabuf_fd = fd
    arg.condition.semaphore.offset = offset
    arg.condition.semaphore.payload = payload
    return arg


WAIT_REFUSED = [
    ("bad type", {"kind": 2}, errno.EINVAL),
    ("bad fd", {"fd": 987654}, errno.EINVAL),
    ("odd offset", {"offset": 2}, errno.EINVAL),
    ("offset outside", {"offset": 4096}, errno.EINVAL),
    ("time is up", {"payload": 1, "timeout": 30}, errno.ETIMEDOUT),
]


@pytest.mark.parametrize(("fields", "number"), [r[1:] for r in WAIT_REFUSED], ids=[r[0] for r in WAIT_REFUSED])
def test_wait_refuses(user: User, fields: dict[str, int], number: int) -> None:
    made = user.channel()
    arg = _wait(**{"kind": k.NVGPU_WAIT_TYPE_SEMAPHORE, "fd": user.buffer().fd} | fields)
    with refused(number):
        user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_WAIT, arg)


def test_wait_on_a_dead_channel_is_etimedout(user: User) -> None:
    with refused(errno.ETIMEDOUT):
        arg = _wait(k.NVGPU_WAIT_TYPE_SEMAPHORE, user.buffer().fd)
        user.kernel.ioctl(user.open_channel(), io.NVGPU_IOCTL_CHANNEL_WAIT, arg)


def test_wait_sleeps_until_the_semaphore_and_an_interrupt_while_others_are_served(user: User) -> None:
    made, buffer = user.channel(), user.buffer()
    memory = user.mapped(buffer)
    doorbell = user.kernel.doorbell(user.ctrl)
    over = threading.Event()

    def sleep() -> None:
        arg = _wait(k.NVGPU_WAIT_TYPE_SEMAPHORE, buffer.fd, offset=8, payload=7)
        user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_WAIT, arg)
        over.set()

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    time.sleep(0.05)
    assert not user.timed_out(made)  # another call on the same fd meanwhile
    memory[8] = 7
    assert not over.wait(0.05)  # only an interrupt makes the driver look again
    doorbell.store32(NON_STALL, made.token)
    assert over.wait(5)
    thread.join()
    doorbell.close()


def test_set_nvmap_fd_and_timeouts_are_accepted(user: User) -> None:
    fd = user.open_channel()
    user.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_SET_NVMAP_FD, s.SetNvmapFd(12345))
    user.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_SET_TIMEOUT, s.SetTimeout(1000))
    user.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_SET_TIMEOUT_EX, s.SetTimeoutEx(1000, 0))


def test_reschedule_runlist_needs_a_capability(user: User) -> None:
    with refused(errno.EPERM):
        user.kernel.ioctl(user.open_channel(), io.NVGPU_IOCTL_CHANNEL_RESCHEDULE_RUNLIST, s.RescheduleRunlist(1))


def test_a_channel_opens_another(user: User) -> None:
    arg = s.ChannelOpen()
    user.kernel.ioctl(user.open_channel(), io.NVGPU_IOCTL_CHANNEL_OPEN, arg)
    made = user.keep(arg.channel_fd)
    user.kernel.ioctl(made, io.NVGPU_IOCTL_CHANNEL_SET_TIMEOUT, s.SetTimeout(1))


def test_sm_error_state_before_any_error(user: User) -> None:
    made = user.bound_channel()
    record = s.TsgSmErrorStateRecord(1, 2, 3, 4, 5)

    def read(sm: int, size: int = 24, address: int | None = None) -> tuple[int, int]:
        where = ctypes.addressof(record) if address is None else address
        arg = s.TsgReadSingleSmErrorState(sm_id=sm, record_mem=where, record_size=size)
        return user.kernel.ioctl(made.tsg, io.NVGPU_TSG_IOCTL_READ_SINGLE_SM_ERROR_STATE, arg), arg.record_size

    with refused(errno.EINVAL):
        read(CHIPS["agx-orin-64gb"].sm_count)
    assert read(0, address=8) == (24, 24)  # the count of bytes that could not be stored
    assert read(0, size=0, address=8) == (0, 0)
    assert read(0, size=100) == (0, 24)
    assert bytes(record) == bytes(24)


def test_the_drivers_range_below_2_40_holds_ring_syncpoint_and_context(user: User) -> None:
    before = len(_warnings())
    user.object(user.channel())
    assert len(_warnings()) == before


def test_a_drivers_range_above_2_40_draws_the_harmless_warning(user: User) -> None:
    before = len(_warnings())
    user.object(user.channel(vm=user.address_space(0x200000, 0xFFFFE00000)))
    assert len(_warnings()) == before + 1


def _warnings() -> list[str]:
    return [line for line in board_log(SPEC) if "rtv_cb" in line]


def test_a_3_mib_gpfifo_is_accepted_and_its_context_is_not_valid(user: User) -> None:
    """The driver takes it; with the user range up to 0xFFFFE00000 it pushes the context image past 2^40."""
    made = user.bound_channel(vm=user.address_space(0x200000, 0xFFFFE00000))
    arg = user.setup_args(gpfifo_dmabuf_fd=user.buffer(3 << 20).fd)
    user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_SETUP_BIND, arg)
    told = board_status(SPEC)["gpu"]["objects"]
    user.object(made)
    assert board_status(SPEC)["gpu"]["objects"] == told
    user.object(user.channel())
    assert board_status(SPEC)["gpu"]["objects"] == told + 1


def test_setup_flags_ignore_unknown_bits(user: User) -> None:
    made = user.bound_channel()
    user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_SETUP_BIND, user.setup_args(flags=SETUP_FLAGS | 0x100))
