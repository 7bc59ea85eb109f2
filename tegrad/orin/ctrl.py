"""The ctrl fd: what the GPU is, its clocks, and how to get an address space, TSG or channel.

Source: L4T r36.4.3 nvgpu, os/linux/ioctl_ctrl.c and ioctl_clk_arb.c;
values that only a board tells are an AGX Orin 64GB's.
"""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Generator
from typing import Any

from tegrad.hw.chips import Chip
from tegrad.hw.gpfifo import USERMODE_SIZE
from tegrad.orin.address_space import AsFile, alloc_as
from tegrad.orin.channel import ChannelFile
from tegrad.orin.files import Call, Errno, File, Request, Steps, Table, copy_in, copy_out, require
from tegrad.orin.nvmap import PAGE
from tegrad.orin.tsg import Tsg, TsgFile
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

PTIMER_STEP = 32  # ns
MAX_FREQ_POINTS = 15
IDLE_HZ, STEP_HZ = 306_000_000, 102_000_000
# Set on an Orin for a caller without CAP_SYS_NICE (read on an AGX Orin 64GB); with it bit 21 is set too.
FLAGS = 0x01BF5FFF7F5D035D
# Engines that the running board lists: graphics and its two copy engines, all on runlist 0.
ENGINES = (
    (k.NVGPU_GPU_ENGINE_ID_GR, 0, 0),
    (k.NVGPU_GPU_ENGINE_ID_GR_COPY, 0, 0),
    (k.NVGPU_GPU_ENGINE_ID_GR_COPY, 1, 0),
)
NUM_FBPS, LTC_PER_FBP, LTS_PER_LTC = 2, 1, 4


def gpu_time() -> int:
    """The GPU's clock in ns, in steps of its timer."""
    return time.monotonic_ns() // PTIMER_STEP * PTIMER_STEP


class CtrlFile(File):
    """A ctrl fd: one doorbell mapping at a time, a device instance number, and the clock it asked for."""

    kind = "ctrl"

    def __init__(self, driver: Any, process: Any) -> None:
        super().__init__(driver, process)
        self.instance = driver.new_instance_id()
        self.registers_mapped = False


class ClockFile(File):
    """A completion fd of CLK_SET_INFO: readable at once; while it is open the clock stays."""

    kind = "clk"

    def __init__(self, driver: Any, process: Any, hz: int) -> None:
        super().__init__(driver, process)
        driver.clock_requests.append(self)
        self.hz = hz
        self.make_readable()

    def release(self) -> None:
        """Give the clock back to the governor."""
        self.driver.clock_requests.remove(self)


def characteristics(chip: Chip, instance: int) -> s.GpuCharacteristics:
    """nvgpu_gpu_characteristics of a board: its chip's row, and what is the same on every Orin."""
    return s.GpuCharacteristics(
        arch=chip.gpu_arch,
        impl=chip.gpu_impl,
        rev=chip.gpu_rev,
        num_gpc=chip.num_gpc,
        numa_domain_id=k.NVGPU_GPU_CHARACTERISTICS_NO_NUMA_INFO,
        L2_cache_size=chip.l2_bytes,
        num_tpc_per_gpc=chip.tpc_per_gpc,
        bus_type=k.NVGPU_GPU_BUS_TYPE_AXI,
        compression_page_size=65536,
        pde_coverage_bit_count=47,
        flags=FLAGS,
        twod_class=chip.twod_class,
        threed_class=chip.threed_class,
        compute_class=chip.compute_class,
        gpfifo_class=chip.gpfifo_class,
        inline_to_memory_class=chip.i2m_class,
        dma_copy_class=chip.dma_class,
        gpc_mask=(1 << chip.num_gpc) - 1,
        sm_arch_sm_version=chip.sm_version,
        sm_arch_spa_version=chip.spa_version,
        sm_arch_warp_count=chip.warps_per_sm,
        gpu_ioctl_nr_last=io.LAST_NR["ctrl"],
        tsg_ioctl_nr_last=io.LAST_NR["tsg"],
        dbg_gpu_ioctl_nr_last=33,
        ioctl_channel_nr_last=io.LAST_NR["channel"],
        as_ioctl_nr_last=io.LAST_NR["as"],
        gpu_va_bit_count=40,
        max_fbps_count=NUM_FBPS,
        fbp_en_mask=(1 << NUM_FBPS) - 1,
        max_ltc_per_fbp=LTC_PER_FBP,
        max_lts_per_ltc=LTS_PER_LTC,
        max_gpc_count=chip.num_gpc,
        chipname=(ctypes.c_uint8 * 8)(*chip.chip.encode().ljust(8, b"\0")),
        num_ltc=NUM_FBPS * LTC_PER_FBP,
        lts_per_ltc=LTS_PER_LTC,
        map_buffer_batch_limit=256,
        max_freq=chip.max_freq_hz,
        graphics_preemption_mode_flags=3,
        compute_preemption_mode_flags=7,
        default_graphics_preempt_mode=1,
        default_compute_preempt_mode=1,
        reg_ops_limit=1024,
        event_ioctl_nr_last=1,
        max_css_buffer_size=0xFFFFFFFF,
        ctxsw_ioctl_nr_last=6,
        prof_ioctl_nr_last=13,
        nvs_ioctl_nr_last=3,
        max_ctxsw_ring_buffer_size=524288,
        num_ppc_per_gpc=2,
        max_veid_count_per_tsg=64,
        max_gpfifo_entries=1 << 28,
        max_dbg_tsg_timeslice=4_000_000,
        device_instance_id=instance,
    )


def get_characteristics(file: CtrlFile, call: Call) -> Steps:
    """GET_CHARACTERISTICS: as much as the caller has room for; the full size comes back."""
    arg = call.arg
    data = bytes(characteristics(file.driver.chip, file.instance))
    if arg.gpu_characteristics_buf_size:
        left = yield from copy_out(arg.gpu_characteristics_buf_addr, data[: arg.gpu_characteristics_buf_size])
        if left:
            return left
    arg.gpu_characteristics_buf_size = len(data)
    return None


def alloc_address_space(file: CtrlFile, call: Call) -> None:
    """ALLOC_AS."""
    arg = call.arg
    vm = alloc_as(file.driver, arg.big_page_size, arg.va_range_start, arg.va_range_end, arg.va_range_split)
    call.install("as_fd", AsFile(file.driver, file.process, vm))


def open_tsg(file: CtrlFile, call: Call) -> None:
    """OPEN_TSG. Sharing needs a live token of another instance, and nobody can have one on this board."""
    arg = call.arg
    require(not arg.flags & k.NVGPU_GPU_IOCTL_OPEN_TSG_FLAGS_SHARE)
    require(arg.source_device_instance_id == 0 and arg.share_token == 0)
    call.install("tsg_fd", TsgFile(file.driver, file.process, Tsg(file.driver)))


def open_channel(file: CtrlFile, call: Call) -> None:
    """OPEN_CHANNEL on the GR runlist (-1 or its id)."""
    call.install("channel_fd", ChannelFile(file.driver, file.process, call.arg.in_.runlist_id))


def _words(address: int, size: int, words: list[int]) -> Generator[Request, Any, int]:
    data = b"".join(word.to_bytes(4, "little") for word in words)
    return (yield from copy_out(address, data[:size]))


def _masks(call: Call, masks: list[int]) -> Steps:
    """As many masks as the caller has room for, and the size of all."""
    arg = call.arg
    if arg.mask_buf_size:
        left = yield from _words(arg.mask_buf_addr, arg.mask_buf_size, masks)
        if left:
            return left
    arg.mask_buf_size = 4 * len(masks)
    return None


def get_tpc_masks(file: CtrlFile, call: Call) -> Steps:
    """GET_TPC_MASKS: one word per possible GPC."""
    chip = file.driver.chip
    return _masks(call, [(1 << chip.tpc_per_gpc) - 1] * chip.num_gpc)


def get_fbp_l2_masks(file: CtrlFile, call: Call) -> Steps:
    """GET_FBP_L2_MASKS: one word per FBP."""
    return _masks(call, [(1 << LTC_PER_FBP) - 1] * NUM_FBPS)


def get_gpc_physical_map(file: CtrlFile, call: Call) -> Steps:
    """GET_GPC_LOCAL_TO_PHYSICAL_MAP: no GPC is floorswept, so local is physical."""
    return _gpc_map(file, call, call.arg.physical_gpc_buf_addr)


def get_gpc_logical_map(file: CtrlFile, call: Call) -> Steps:
    """GET_GPC_LOCAL_TO_LOGICAL_MAP."""
    return _gpc_map(file, call, call.arg.logical_gpc_buf_addr)


def _gpc_map(file: CtrlFile, call: Call, address: int) -> Steps:
    size = 4 * file.driver.chip.num_gpc
    if call.arg.map_buf_size:
        require(call.arg.map_buf_size == size)
        left = yield from _words(address, size, list(range(file.driver.chip.num_gpc)))
        if left:
            return left
    call.arg.map_buf_size = size
    return None


def num_vsms(file: CtrlFile, call: Call) -> None:
    """NUM_VSMS."""
    call.arg.num_vsms = file.driver.chip.sm_count


def vsms_mapping(file: CtrlFile, call: Call) -> Steps:
    """VSMS_MAPPING: 6 bytes per SM, without a word about the caller's room."""
    chip = file.driver.chip
    entries = [
        s.GpuVsmsMappingEntry(gpc, gpc, tpc, gpc * chip.tpc_per_gpc + tpc, sm, gpc * chip.tpc_per_gpc + tpc)
        for gpc in range(chip.num_gpc)
        for tpc in range(chip.tpc_per_gpc)
        for sm in range(chip.sm_per_tpc)
    ]
    left = yield from copy_out(call.arg.vsms_map_buf_addr, b"".join(bytes(e) for e in entries))
    return left or None


def get_engine_info(file: CtrlFile, call: Call) -> Steps:
    """GET_ENGINE_INFO: as many whole items as fit."""
    arg = call.arg
    size = ctypes.sizeof(s.GpuGetEngineInfoItem)
    items = [bytes(s.GpuGetEngineInfoItem(*engine)) for engine in ENGINES]
    fits = min(arg.engine_info_buf_size // size, len(items))
    left = yield from copy_out(arg.engine_info_buf_addr, b"".join(items[:fits]))
    if left:
        return left
    arg.engine_info_buf_size = size * len(items)
    return None


def get_gpu_time(file: CtrlFile, call: Call) -> None:
    """GET_GPU_TIME."""
    call.arg.gpu_timestamp = gpu_time()


def get_cpu_time_correlation_info(file: CtrlFile, call: Call) -> None:
    """GET_CPU_TIME_CORRELATION_INFO: pairs of CPU and GPU time."""
    arg = call.arg
    require(1 <= arg.count <= k.NVGPU_GPU_GET_CPU_TIME_CORRELATION_INFO_MAX_COUNT)
    require(arg.source_id in (1, 2))
    for i in range(arg.count):
        arg.samples[i].cpu_timestamp = time.monotonic_ns()
        arg.samples[i].gpu_timestamp = gpu_time()


def flush_l2(file: CtrlFile, call: Call) -> None:
    """FLUSH_L2: nothing to do on a coherent board, once the combination makes sense."""
    arg = call.arg
    require(arg.l2_flush or arg.fb_flush)
    require(not arg.l2_invalidate or arg.l2_flush)


def clock_points(chip: Chip) -> list[int]:
    """The frequencies of the GPC clock, in Hz: steps of 102 MHz and the maximum."""
    return [*range(IDLE_HZ, chip.max_freq_hz, STEP_HZ), chip.max_freq_hz][-MAX_FREQ_POINTS:]


def clk_get_range(file: CtrlFile, call: Call) -> Steps:
    """CLK_GET_RANGE: one domain, the GPC clock."""
    arg, points = call.arg, clock_points(file.driver.chip)
    entry = s.GpuClkRangeItem(0, k.NVGPU_GPU_CLK_DOMAIN_GPCCLK, points[0], points[-1])
    return _clock_entries(arg, arg.clk_range_entries, entry, None)


def clk_get_info(file: CtrlFile, call: Call) -> Steps:
    """CLK_GET_INFO: target, actual and effective clock are one."""
    arg = call.arg
    types = (k.NVGPU_GPU_CLK_TYPE_TARGET, k.NVGPU_GPU_CLK_TYPE_ACTUAL, k.NVGPU_GPU_CLK_TYPE_EFFECTIVE)
    entry = s.GpuClkInfo(0, arg.clk_type, k.NVGPU_GPU_CLK_DOMAIN_GPCCLK, file.driver.clock_hz)
    return _clock_entries(arg, arg.clk_info_entries, entry, types)


def _clock_entries(arg: Any, address: int, entry: ctypes.Structure, types: tuple[int, ...] | None) -> Steps:
    """One entry per domain (there is one), or with flag 1 one per domain that the caller names."""
    require(arg.flags in (0, k.NVGPU_GPU_CLK_FLAG_SPECIFIC_DOMAINS))
    size = ctypes.sizeof(entry)
    if not arg.flags:
        if arg.num_entries == 0:
            arg.num_entries = 1
            return None
        arg.num_entries = 1
    for i in range(arg.num_entries):
        if arg.flags:
            asked = type(entry).from_buffer_copy((yield from copy_in(address + i * size, size)))
            require(asked.clk_domain == k.NVGPU_GPU_CLK_DOMAIN_GPCCLK)
            if types is not None and not arg.clk_type:
                entry.clk_type = asked.clk_type
        require(types is None or entry.clk_type in types)
        left = yield from copy_out(address + i * size, bytes(entry))
        if left:
            return left
    return None


def clk_get_vf_points(file: CtrlFile, call: Call) -> Steps:
    """CLK_GET_VF_POINTS: the frequencies the clock can take."""
    arg, points = call.arg, clock_points(file.driver.chip)
    require(arg.flags == 0)
    require(arg.clk_domain == k.NVGPU_GPU_CLK_DOMAIN_GPCCLK)
    if arg.max_entries:
        require(arg.max_entries >= len(points))
        left = yield from copy_out(arg.clk_vf_point_entries, b"".join(p.to_bytes(8, "little") for p in points))
        if left:
            return left
    else:
        arg.max_entries = len(points)
    arg.num_entries = len(points)
    return None


def clk_set_info(file: CtrlFile, call: Call) -> Steps:
    """CLK_SET_INFO: ask for a clock; it holds while the completion fd is open."""
    arg = call.arg
    require(arg.flags == 0 and arg.num_entries == 1)
    raw = yield from copy_in(arg.clk_info_entries, ctypes.sizeof(s.GpuClkInfo))
    entry = s.GpuClkInfo.from_buffer_copy(raw)
    require(entry.clk_domain == k.NVGPU_GPU_CLK_DOMAIN_GPCCLK)
    call.install("completion_fd", ClockFile(file.driver, file.process, entry.freq_hz))
    return None


def refuse(file: CtrlFile, call: Call) -> None:
    """What Orin has no sensor or memory for."""
    require(False)


HANDLERS: Table = {
    io.NVGPU_GPU_IOCTL_GET_CHARACTERISTICS.request: get_characteristics,
    io.NVGPU_GPU_IOCTL_ALLOC_AS.request: alloc_address_space,
    io.NVGPU_GPU_IOCTL_OPEN_TSG.request: open_tsg,
    io.NVGPU_GPU_IOCTL_GET_TPC_MASKS.request: get_tpc_masks,
    io.NVGPU_GPU_IOCTL_OPEN_CHANNEL.request: open_channel,
    io.NVGPU_GPU_IOCTL_FLUSH_L2.request: flush_l2,
    io.NVGPU_GPU_IOCTL_NUM_VSMS.request: num_vsms,
    io.NVGPU_GPU_IOCTL_VSMS_MAPPING.request: vsms_mapping,
    io.NVGPU_GPU_IOCTL_GET_CPU_TIME_CORRELATION_INFO.request: get_cpu_time_correlation_info,
    io.NVGPU_GPU_IOCTL_GET_GPU_TIME.request: get_gpu_time,
    io.NVGPU_GPU_IOCTL_GET_ENGINE_INFO.request: get_engine_info,
    io.NVGPU_GPU_IOCTL_ALLOC_VIDMEM.request: refuse,
    io.NVGPU_GPU_IOCTL_CLK_GET_RANGE.request: clk_get_range,
    io.NVGPU_GPU_IOCTL_CLK_GET_VF_POINTS.request: clk_get_vf_points,
    io.NVGPU_GPU_IOCTL_CLK_GET_INFO.request: clk_get_info,
    io.NVGPU_GPU_IOCTL_CLK_SET_INFO.request: clk_set_info,
    io.NVGPU_GPU_IOCTL_GET_EVENT_FD.request: refuse,
    io.NVGPU_GPU_IOCTL_GET_MEMORY_STATE.request: refuse,
    io.NVGPU_GPU_IOCTL_GET_VOLTAGE.request: refuse,
    io.NVGPU_GPU_IOCTL_GET_CURRENT.request: refuse,
    io.NVGPU_GPU_IOCTL_GET_POWER.request: refuse,
    io.NVGPU_GPU_IOCTL_GET_TEMPERATURE.request: refuse,
    io.NVGPU_GPU_IOCTL_GET_FBP_L2_MASKS.request: get_fbp_l2_masks,
    io.NVGPU_GPU_IOCTL_SET_THERM_ALERT_LIMIT.request: refuse,
    io.NVGPU_GPU_IOCTL_GET_GPC_LOCAL_TO_PHYSICAL_MAP.request: get_gpc_physical_map,
    io.NVGPU_GPU_IOCTL_GET_GPC_LOCAL_TO_LOGICAL_MAP.request: get_gpc_logical_map,
}


def mmap_registers_check(file: CtrlFile, length: int, offset: int) -> None:
    """The checks of mmap on the ctrl fd, in order (3.9)."""
    if file.registers_mapped:
        raise Errno(errno.EBUSY)
    require(0 < length <= USERMODE_SIZE)
    require(offset == 0 and length % PAGE == 0)
