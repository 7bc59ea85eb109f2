"""What the GPU is made of, as the ctrl fd's queries tell it: characteristics, masks, maps, SMs, engines.

Source: L4T r36.4.3 nvgpu, os/linux/ioctl_ctrl.c; values that only a board tells are an AGX Orin 64GB's.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Generator
from typing import Any

from tegrad.hw.chips import Chip
from tegrad.orin.ctrl import CtrlFile
from tegrad.orin.files import Call, Table
from tegrad.orin.steps import Request, Steps, copy_out, require
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

# Set on an Orin for a caller without CAP_SYS_NICE (read on an AGX Orin 64GB); with it bit 21 is set too.
FLAGS = 0x01BF5FFF7F5D035D
# Engines that the running board lists: graphics and its two copy engines, all on runlist 0.
ENGINES = (
    (k.NVGPU_GPU_ENGINE_ID_GR, 0, 0),
    (k.NVGPU_GPU_ENGINE_ID_GR_COPY, 0, 0),
    (k.NVGPU_GPU_ENGINE_ID_GR_COPY, 1, 0),
)
NUM_FBPS, LTC_PER_FBP, LTS_PER_LTC = 2, 1, 4
LITTER_GPCS = 2  # GPCs of a whole ga10b; a board may have fewer enabled
BATCH_LIMIT = 256


def max_gpc_count(chip: Chip) -> int:
    """GPCs of the whole chip, enabled or not."""
    return max(LITTER_GPCS, chip.num_gpc)


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
        max_gpc_count=max_gpc_count(chip),
        chipname=(ctypes.c_uint8 * 8)(*chip.chip.encode().ljust(8, b"\0")),
        num_ltc=NUM_FBPS * LTC_PER_FBP,
        lts_per_ltc=LTS_PER_LTC,
        map_buffer_batch_limit=BATCH_LIMIT,
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
    data = bytes(characteristics(file.driver.chip, file.instance.id))
    if arg.gpu_characteristics_buf_size:
        left = yield from copy_out(arg.gpu_characteristics_buf_addr, data[: arg.gpu_characteristics_buf_size])
        if left:
            return left
    arg.gpu_characteristics_buf_size = len(data)
    return None


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
    absent = [0] * (max_gpc_count(chip) - chip.num_gpc)
    return _masks(call, chip.tpc_masks + absent)


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
    """One word per enabled GPC; there is no size query: anything but the right size is EINVAL."""
    count = file.driver.chip.num_gpc
    require(call.arg.map_buf_size == 4 * count)
    left = yield from _words(address, 4 * count, list(range(count)))
    require(left == 0, errno.EFAULT)
    return None


def num_vsms(file: CtrlFile, call: Call) -> None:
    """NUM_VSMS."""
    call.arg.num_vsms = file.driver.chip.sm_count


def vsms_mapping(file: CtrlFile, call: Call) -> Steps:
    """VSMS_MAPPING: 6 bytes per SM, without a word about the caller's room."""
    chip = file.driver.chip
    entries = [
        s.GpuVsmsMappingEntry(gpc, gpc, tpc, gpc * chip.tpc_per_gpc + tpc, sm, tpc)
        for gpc, tpcs in enumerate(chip.tpc_masks)
        for tpc in range(tpcs.bit_count())
        for sm in range(chip.sm_per_tpc)
    ]
    left = yield from copy_out(call.arg.vsms_map_buf_addr, b"".join(bytes(e) for e in entries))
    return left or None


def get_engine_info(file: CtrlFile, call: Call) -> Steps:
    """GET_ENGINE_INFO: as many whole items as fit. A bad address returns what is left of one item."""
    arg = call.arg
    size = ctypes.sizeof(s.GpuGetEngineInfoItem)
    for i, engine in enumerate(ENGINES[: arg.engine_info_buf_size // size]):
        left = yield from copy_out(arg.engine_info_buf_addr + i * size, bytes(s.GpuGetEngineInfoItem(*engine)))
        if left:
            return left
    arg.engine_info_buf_size = size * len(ENGINES)
    return None


HANDLERS: Table = {
    io.NVGPU_GPU_IOCTL_GET_CHARACTERISTICS.request: get_characteristics,
    io.NVGPU_GPU_IOCTL_GET_TPC_MASKS.request: get_tpc_masks,
    io.NVGPU_GPU_IOCTL_NUM_VSMS.request: num_vsms,
    io.NVGPU_GPU_IOCTL_VSMS_MAPPING.request: vsms_mapping,
    io.NVGPU_GPU_IOCTL_GET_ENGINE_INFO.request: get_engine_info,
    io.NVGPU_GPU_IOCTL_GET_FBP_L2_MASKS.request: get_fbp_l2_masks,
    io.NVGPU_GPU_IOCTL_GET_GPC_LOCAL_TO_PHYSICAL_MAP.request: get_gpc_physical_map,
    io.NVGPU_GPU_IOCTL_GET_GPC_LOCAL_TO_LOGICAL_MAP.request: get_gpc_logical_map,
}
