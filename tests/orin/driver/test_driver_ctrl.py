"""The ctrl fd: topology, clocks and registers as this board has them, and what requests it knows."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import select
import time

import pytest
from driver_user import CTRL, User, refused

from tegrad.hw.chips import CHIPS
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

MIB = 1 << 20


def _characteristics(user: User, fd: int | None = None) -> s.GpuCharacteristics:
    found = s.GpuCharacteristics()
    arg = s.GpuGetCharacteristics(ctypes.sizeof(found), ctypes.addressof(found))
    assert user.kernel.ioctl(fd or user.ctrl, io.NVGPU_GPU_IOCTL_GET_CHARACTERISTICS, arg) == 0
    assert arg.gpu_characteristics_buf_size == 328
    return found


def test_characteristics_are_the_chips(user: User) -> None:
    found, chip = _characteristics(user), CHIPS["agx-orin-64gb"]
    assert bytes(found.chipname) == b"ga10b\0\0\0"
    assert (found.arch, found.impl, found.rev) == (0x170, 0xB, 0xA1)
    assert (found.compute_class, found.gpfifo_class, found.dma_copy_class) == (0xC7C0, 0xC76F, 0xC7B5)
    assert (found.num_gpc, found.num_tpc_per_gpc, found.gpc_mask) == (chip.num_gpc, 4, (1 << chip.num_gpc) - 1)
    assert (found.sm_arch_sm_version, found.sm_arch_warp_count) == (0x807, 48)
    assert (found.big_page_size, found.available_big_page_sizes, found.gpu_va_bit_count) == (0, 0, 40)
    assert found.flags == 0x01BF5FFF7F5D035D
    assert (found.gpu_ioctl_nr_last, found.tsg_ioctl_nr_last, found.ioctl_channel_nr_last) == (44, 21, 128)
    assert found.max_gpfifo_entries == 1 << 28


# ---- decoding ------------------------------------------------------------------------------------------------------


def test_a_number_nobody_has_is_enotty(user: User) -> None:
    row = io.NVGPU_GPU_IOCTL_GET_CHARACTERISTICS
    with refused(errno.ENOTTY):
        unknown = dataclasses.replace(row, request=row.request & ~0xFF | 13)
        user.kernel.ioctl(user.ctrl, unknown, s.GpuGetCharacteristics())


@pytest.mark.parametrize("row", [r for r in io.ROWS if r.fd_kind in ("tsg", "channel", "as")], ids=lambda r: r.name)
def test_no_other_drivers_request_is_taken(user: User, row: io.Ioctl) -> None:
    with refused(errno.EINVAL):
        user.kernel.ioctl(user.ctrl, row, None if row.struct is None else row.struct())


def test_an_ioctl_on_something_else_is_enotty(user: User) -> None:
    with open("/dev/null") as null, refused(errno.ENOTTY):
        user.kernel.ioctl(null.fileno(), io.NVGPU_GPU_IOCTL_NUM_VSMS, s.GpuNumVsms())
    with refused(errno.ENOTTY):
        user.kernel.ioctl(user.buffer().fd, io.NVGPU_GPU_IOCTL_NUM_VSMS, s.GpuNumVsms())
    with refused(errno.EBADF):
        user.kernel.ioctl(987654, io.NVGPU_GPU_IOCTL_NUM_VSMS, s.GpuNumVsms())


# ---- opening -------------------------------------------------------------------------------------------------------


def test_nodes(user: User) -> None:
    for path in ("/dev/nvhost-ctrl-gpu", "/dev/nvgpu/igpu0/channel", "/dev/nvgpu/igpu0/tsg", "/dev/host1x-fence"):
        assert user.kernel.exists(path)
        user.open(path)
    with refused(errno.ENOENT):
        user.open("/dev/nvidia0")
    with refused(errno.EINVAL):
        user.open("/dev/nvgpu/igpu0/as")
    assert not user.kernel.exists("/dev/nvidia0")


@pytest.mark.parametrize("runlist", [1, 7, -2])
def test_open_channel_refuses_a_runlist_that_is_not_there(user: User, runlist: int) -> None:
    with refused(errno.EINVAL):
        user.open_channel(runlist)
    user.open_channel(0)


def test_512_channels_and_no_more(user: User) -> None:
    for _ in range(512):
        user.open_channel()
    with refused(errno.ENOMEM):
        user.open_channel()
    user.close(user.fds[-1])
    user.open_channel()


# ---- queries -------------------------------------------------------------------------------------------------------


def test_tpc_masks_and_sm_count(user: User) -> None:
    chip = CHIPS["agx-orin-64gb"]
    masks = (ctypes.c_uint32 * 4)()
    arg = s.GpuGetTpcMasks(mask_buf_size=16, mask_buf_addr=ctypes.addressof(masks))
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_GET_TPC_MASKS, arg)
    assert list(masks) == [0xF] * chip.num_gpc + [0] * (4 - chip.num_gpc)
    count = s.GpuNumVsms()
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_NUM_VSMS, count)
    assert count.num_vsms == sum(m.bit_count() for m in masks) * 2 == chip.sm_count
    entries = (s.GpuVsmsMappingEntry * (count.num_vsms + 1))()
    where = s.GpuVsmsMapping(ctypes.addressof(entries))
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_VSMS_MAPPING, where)
    places = {(e.gpc_logical_index, e.tpc_local_logical_index, e.sm_local_id) for e in entries[: count.num_vsms]}
    assert len(places) == count.num_vsms
    assert bytes(entries[count.num_vsms]) == bytes(6)


def test_fbp_masks_and_gpc_maps(user: User) -> None:
    words = (ctypes.c_uint32 * 4)()
    arg = s.GpuGetFbpL2Masks(mask_buf_size=8, mask_buf_addr=ctypes.addressof(words))
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_GET_FBP_L2_MASKS, arg)
    assert list(words)[:2] == [1, 1]
    size = 4 * CHIPS["agx-orin-64gb"].num_gpc
    good = s.GpuGetGpcPhysicalMap(map_buf_size=size, physical_gpc_buf_addr=ctypes.addressof(words))
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_GET_GPC_LOCAL_TO_PHYSICAL_MAP, good)
    with refused(errno.EINVAL):
        bad = s.GpuGetGpcLogicalMap(map_buf_size=size + 4, logical_gpc_buf_addr=ctypes.addressof(words))
        user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_GET_GPC_LOCAL_TO_LOGICAL_MAP, bad)


def test_engine_info_copies_whole_items(user: User) -> None:
    items = (s.GpuGetEngineInfoItem * 4)()
    arg = s.GpuGetEngineInfo(engine_info_buf_size=40, engine_info_buf_addr=ctypes.addressof(items))
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_GET_ENGINE_INFO, arg)
    assert arg.engine_info_buf_size == 48
    assert [i.engine_id for i in items[:2]] == [k.NVGPU_GPU_ENGINE_ID_GR, k.NVGPU_GPU_ENGINE_ID_GR_COPY]
    assert bytes(items[2]) == bytes(16)


def test_gpu_time_runs(user: User) -> None:
    def now() -> int:
        arg = s.GpuGetGpuTime()
        user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_GET_GPU_TIME, arg)
        return int(arg.gpu_timestamp)

    outer, first, inner = time.monotonic_ns(), now(), time.monotonic_ns()
    time.sleep(0.002)
    slept, last = time.monotonic_ns() - inner, now()
    assert slept - 32 <= last - first <= time.monotonic_ns() - outer + 32  # in steps of 32 ns
    assert first % 32 == 0


def test_cpu_time_correlation_of_no_sample(user: User) -> None:
    arg = s.GpuGetCpuTimeCorrelationInfo(count=0, source_id=1)
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_GET_CPU_TIME_CORRELATION_INFO, arg)


# ---- clocks --------------------------------------------------------------------------------------------------------


def _clock(user: User) -> int:
    entry = s.GpuClkInfo(clk_domain=1)
    kind = k.NVGPU_GPU_CLK_TYPE_EFFECTIVE
    arg = s.GpuClkGetInfo(flags=0, clk_type=kind, num_entries=1, clk_info_entries=ctypes.addressof(entry))
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_CLK_GET_INFO, arg)
    return int(entry.freq_hz)


def test_clock_ranges_and_points(user: User) -> None:
    arg = s.GpuClkRange()
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_CLK_GET_RANGE, arg)
    assert arg.num_entries == 1
    entry = s.GpuClkRangeItem()
    arg = s.GpuClkRange(num_entries=1, clk_range_entries=ctypes.addressof(entry))
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_CLK_GET_RANGE, arg)
    assert (entry.clk_domain, entry.min_hz, entry.max_hz) == (1, 306_000_000, 1_300_000_000)
    points = s.GpuClkVfPoints(clk_domain=1)
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_CLK_GET_VF_POINTS, points)
    found = (s.GpuClkVfPoint * points.max_entries)()
    points = s.GpuClkVfPoints(clk_domain=1, max_entries=len(found), clk_vf_point_entries=ctypes.addressof(found))
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_CLK_GET_VF_POINTS, points)
    assert points.num_entries == len(found) == len({p.freq_hz for p in found})
    with refused(errno.EINVAL):
        points.max_entries -= 1
        user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_CLK_GET_VF_POINTS, points)


def test_a_clock_request_holds_while_its_completion_fd_is_open(user: User) -> None:
    most = _clock(user)
    wanted = s.GpuClkInfo(clk_domain=1, freq_hz=510_000_000)
    arg = s.GpuClkSetInfo(num_entries=1, clk_info_entries=ctypes.addressof(wanted))
    user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_CLK_SET_INFO, arg)
    fd = user.keep(arg.completion_fd)
    assert select.select([fd], [], [], 1)[0] == [fd]
    assert _clock(user) == 510_000_000
    user.close(fd)
    assert _clock(user) == most == 1_300_000_000


# ---- the usermode registers ----------------------------------------------------------------------------------------


def test_one_register_mapping_per_ctrl_fd(user: User) -> None:
    doorbell = user.kernel.doorbell(user.ctrl)
    with refused(errno.EBUSY):
        user.kernel.doorbell(user.ctrl)
    other = user.kernel.doorbell(user.open(CTRL))
    other.close()
    doorbell.close()
    doorbell.close()
    user.kernel.doorbell(user.ctrl).close()


def test_a_register_mapping_of_nothing_is_einval(user: User) -> None:
    with refused(errno.EINVAL):
        user.kernel.doorbell(user.ctrl, 0)


def test_only_a_ctrl_fd_has_registers(user: User) -> None:
    with refused(errno.EPERM):
        user.kernel.doorbell(user.nvmap)
    with refused(errno.ENODEV):
        user.kernel.doorbell(user.tsg())


def test_registers(user: User) -> None:
    doorbell = user.kernel.doorbell(user.ctrl)
    assert doorbell.load32(0) == 0xC461
    assert doorbell.load32(0x80) % 32 == 0
    assert doorbell.load32(0x1234) == 0
    doorbell.store32(0x90, 0xFFFFFFFF)
    doorbell.close()
    with pytest.raises(ValueError, match="closed"):
        doorbell.store32(0x90, 0)


@pytest.mark.parametrize(
    ("size", "flags", "number"),
    [
        (MIB, 0, errno.ENOMEM),
        (MIB, k.NVGPU_GPU_ALLOC_VIDMEM_FLAG_CONTIGUOUS, errno.ENOMEM),
        (MIB, k.NVGPU_GPU_ALLOC_VIDMEM_FLAG_CPU_CACHED, errno.EINVAL),
        (MIB, k.NVGPU_GPU_ALLOC_VIDMEM_FLAG_VPR, errno.EINVAL),
        (0, 0, errno.EINVAL),
        (100, 0, errno.EINVAL),
    ],
)
def test_video_memory_is_refused_for_what_is_wrong_first(user: User, size: int, flags: int, number: int) -> None:
    """nvgpu_gpu_alloc_vidmem checks flags and size before it asks an allocator that an integrated GPU lacks."""
    arg = s.GpuAllocVidmem()
    arg.in_.size, arg.in_.flags = size, flags
    with refused(number):
        user.kernel.ioctl(user.ctrl, io.NVGPU_GPU_IOCTL_ALLOC_VIDMEM, arg)
