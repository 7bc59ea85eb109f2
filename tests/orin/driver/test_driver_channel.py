"""TSGs and channels: what lies beyond the rules (tegrad/conformance/s5_channels.py), and what the board counts."""

from __future__ import annotations

import ctypes
import errno
import threading

import pytest
from driver_fake_gpu import NON_STALL
from driver_user import SPEC, User, asleep, refused

from tegrad.hw.chips import CHIPS
from tegrad.orin.client import board_log, board_status
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

USERMODE = k.NVGPU_CHANNEL_SETUP_BIND_FLAGS_USERMODE_SUPPORT


# ---- TSG ------------------------------------------------------------------------------------------------------------


def test_a_subcontext_that_does_not_exist_can_be_deleted(user: User) -> None:
    tsg, arg = user.tsg(), s.TsgCreateSubcontext(type=k.NVGPU_TSG_SUBCONTEXT_TYPE_ASYNC, as_fd=user.address_space())
    user.kernel.ioctl(tsg, io.NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT, arg)
    for _ in range(2):
        user.kernel.ioctl(tsg, io.NVGPU_TSG_IOCTL_DELETE_SUBCONTEXT, s.TsgDeleteSubcontext(veid=arg.veid))


def _bind(user: User, tsg: int, channel: int, veid: int = 0) -> None:
    user.kernel.ioctl(tsg, io.NVGPU_TSG_IOCTL_BIND_CHANNEL_EX, s.TsgBindChannelEx(channel, veid))


def _bind_vm(user: User, vm: int, channel: int) -> None:
    user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_BIND_CHANNEL, s.AsBindChannel(channel))


def test_a_channel_without_address_space_binds_and_is_useless(user: User) -> None:
    tsg, vm, channel = user.tsg(), user.address_space(), user.open_channel()
    _bind(user, tsg, channel)
    _bind_vm(user, vm, channel)
    late = user.open_channel()
    _bind_vm(user, vm, late)
    with refused(errno.ENOSPC):  # veid 0 is taken, by none
        _bind(user, tsg, late)


def test_an_unbound_channel_is_unserviceable_until_it_is_bound_again(user: User) -> None:
    made = user.bound_channel()
    assert not user.timed_out(made)
    with refused(errno.EINVAL):
        user.kernel.ioctl(user.tsg(), io.NVGPU_TSG_IOCTL_UNBIND_CHANNEL, ctypes.c_int32(made.fd))
    user.kernel.ioctl(made.tsg, io.NVGPU_TSG_IOCTL_UNBIND_CHANNEL, ctypes.c_int32(made.fd))
    assert user.timed_out(made)
    _bind(user, made.tsg, made.fd)
    assert not user.timed_out(made)


# ---- SETUP_BIND -----------------------------------------------------------------------------------------------------


def test_channel_ids_come_from_the_top_and_a_freed_one_is_next(fresh: User) -> None:
    vm, tsg = fresh.address_space(), fresh.tsg()
    first, second = fresh.channel(vm=vm, tsg=tsg), fresh.channel(vm=vm, tsg=tsg)
    assert (first.token, second.token) == (511, 510)
    fresh.close(first.fd)
    assert fresh.channel(vm=vm, tsg=tsg).token == 511
    fresh.close(second.fd)


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


# ---- objects and preemption -----------------------------------------------------------------------------------------


def test_alloc_obj_ctx_looks_at_all_bits_of_a_class(user: User) -> None:
    with refused(errno.EINVAL):
        user.object(user.bound_channel(), 0x10000 | 0xC7C0)


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


def test_a_copy_object_has_no_preemption_mode(user: User) -> None:
    made = user.bound_channel()
    user.object(made, 0xC7B5)
    with refused(errno.EINVAL):
        user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE, s.PreemptionMode(0, 4))


# ---- the rest -------------------------------------------------------------------------------------------------------


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
    asleep(user, thread, made)
    assert not user.timed_out(made)  # another call on the same fd meanwhile
    memory[8] = 7
    assert not over.wait(0.05)  # only an interrupt makes the driver look again
    doorbell.store32(NON_STALL, made.token)
    assert over.wait(60)
    thread.join()
    doorbell.close()


def test_reschedule_runlist_needs_a_capability(user: User) -> None:
    with refused(errno.EPERM):
        user.kernel.ioctl(user.open_channel(), io.NVGPU_IOCTL_CHANNEL_RESCHEDULE_RUNLIST, s.RescheduleRunlist(1))


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
