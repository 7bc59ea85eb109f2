"""The argument structs of the nvgpu, nvmap and host1x-fence ioctls, as ctypes classes with natural alignment.

Names are the headers' without the `nvgpu_`/`nvmap_` prefix and the `_args` suffix, in camel case; fields are named as
in the header (`in` is `in_`, a Python keyword). A struct that an ioctl points to, rather than takes, stands before it.
Source: L4T r36.4.3 uapi headers (nvgpu.h, nvgpu-as.h, nvgpu-ctrl.h, nvmap.h, host1x-fence.h); the sizes and offsets
of every field are tested against tests/data/uapi.json.
"""

import re
from ctypes import Structure, Union, c_int16, c_int32, c_uint8, c_uint16, c_uint32, c_uint64
from typing import Any

Member = tuple[str, type[Any]] | tuple[str, type[Any], int]

_SCALARS: dict[str, type[Any]] = {
    "s16": c_int16,
    "s32": c_int32,
    "u8": c_uint8,
    "u16": c_uint16,
    "u32": c_uint32,
    "u64": c_uint64,
}
_MEMBER = re.compile(r"(\w+)(?:\[(\d+)\]|:(\d+))?")


def members(text: str, *structs: type[Structure] | type[Union]) -> list[Member]:
    """`_fields_` of members that are declared as in C: `u32 id, value; u8 reserved[16]; u8 flush:1; Fence fence`.

    `structs` are those that it names. KeyError for a type that is not known, ValueError for what declares nothing.
    """
    types = _SCALARS | {struct.__name__: struct for struct in structs}
    made: list[Member] = []
    for declaration in text.strip().removesuffix(";").split(";"):
        kind, names = declaration.split(maxsplit=1)
        for name in names.split(","):
            found = _MEMBER.fullmatch(name.strip())
            if found is None:
                raise ValueError(f"{name.strip()!r} is no member")
            member, count, bits = found.groups()
            of_type = types[kind] * int(count) if count else types[kind]
            made.append((member, of_type, int(bits)) if bits else (member, of_type))
    return made


# ---- ctrl fd (magic G) ---------------------------------------------------------------------------------------------


class GpuZcullGetCtxSize(Structure):
    """struct nvgpu_gpu_zcull_get_ctx_size_args (nvgpu-ctrl.h), 4 bytes."""

    _fields_ = members("u32 size")


class GpuZcullGetInfo(Structure):
    """struct nvgpu_gpu_zcull_get_info_args (nvgpu-ctrl.h), 40 bytes."""

    _fields_ = members("""
        u32 width_align_pixels, height_align_pixels, pixel_squares_by_aliquots, aliquot_total, region_byte_multiplier,
            region_header_size, subregion_header_size, subregion_width_align_pixels, subregion_height_align_pixels,
            subregion_count;
    """)


class GpuZbcSetTable(Structure):
    """struct nvgpu_gpu_zbc_set_table_args (nvgpu-ctrl.h), 48 bytes."""

    _fields_ = members("u32 color_ds[4], color_l2[4], depth, stencil, format, type")


class GpuZbcQueryTable(Structure):
    """struct nvgpu_gpu_zbc_query_table_args (nvgpu-ctrl.h), 56 bytes."""

    _fields_ = members("u32 color_ds[4], color_l2[4], depth, stencil, ref_cnt, format, type, index_size")


class GpuCharacteristics(Structure):
    """struct nvgpu_gpu_characteristics (nvgpu-ctrl.h), 328 bytes."""

    _fields_ = members("""
        u32 arch, impl, rev, num_gpc;
        s32 numa_domain_id;
        u64 L2_cache_size, on_board_video_memory_size;
        u32 num_tpc_per_gpc, bus_type, big_page_size, compression_page_size, pde_coverage_bit_count,
            available_big_page_sizes;
        u64 flags;
        u32 twod_class, threed_class, compute_class, gpfifo_class, inline_to_memory_class, dma_copy_class, gpc_mask,
            sm_arch_sm_version, sm_arch_spa_version, sm_arch_warp_count;
        s16 gpu_ioctl_nr_last, tsg_ioctl_nr_last, dbg_gpu_ioctl_nr_last, ioctl_channel_nr_last, as_ioctl_nr_last;
        u8 gpu_va_bit_count, reserved;
        u32 max_fbps_count, fbp_en_mask, emc_en_mask, max_ltc_per_fbp, max_lts_per_ltc, max_tex_per_tpc,
            max_gpc_count, rop_l2_en_mask_DEPRECATED[2];
        u8 chipname[8];
        u64 gr_compbit_store_base_hw;
        u32 gr_gobs_per_comptagline_per_slice, num_ltc, lts_per_ltc, cbc_cache_line_size, cbc_comptags_per_line,
            map_buffer_batch_limit;
        u64 max_freq;
        u32 graphics_preemption_mode_flags, compute_preemption_mode_flags, default_graphics_preempt_mode,
            default_compute_preempt_mode;
        u64 local_video_memory_size;
        u16 pci_vendor_id, pci_device_id, pci_subsystem_vendor_id, pci_subsystem_device_id, pci_class;
        u8 pci_revision, vbios_oem_version;
        u32 vbios_version, reg_ops_limit, reserved1;
        s16 event_ioctl_nr_last;
        u16 pad;
        u32 max_css_buffer_size;
        s16 ctxsw_ioctl_nr_last, prof_ioctl_nr_last, nvs_ioctl_nr_last;
        u8 reserved2[2];
        u32 max_ctxsw_ring_buffer_size, reserved3;
        u64 per_device_identifier;
        u32 num_ppc_per_gpc, max_veid_count_per_tsg, num_sub_partition_per_fbpa, gpu_instance_id, gr_instance_id,
            max_gpfifo_entries, max_dbg_tsg_timeslice, reserved5;
        u64 device_instance_id;
    """)


class GpuGetCharacteristics(Structure):
    """struct nvgpu_gpu_get_characteristics (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u64 gpu_characteristics_buf_size, gpu_characteristics_buf_addr")


class GpuPrepareCompressibleRead(Structure):
    """struct nvgpu_gpu_prepare_compressible_read_args (nvgpu-ctrl.h), 80 bytes."""

    class _Compbits(Union):
        _fields_ = members("u32 request_compbits, valid_compbits")

    class Fence(Structure):
        class _IdOrFd(Union):
            _fields_ = members("u32 syncpt_id; s32 fd")

        _anonymous_ = ("_id_or_fd",)
        _fields_ = members("_IdOrFd _id_or_fd; u32 syncpt_value", _IdOrFd)

    _anonymous_ = ("_compbits",)
    _fields_ = members(
        "u32 handle; _Compbits _compbits; u64 offset, compbits_hoffset, compbits_voffset; "
        "u32 width, height, block_height_log2, submit_flags; Fence fence; u32 zbc_color, reserved; "
        "u64 scatterbuffer_offset; u32 reserved2[2]",
        _Compbits,
        Fence,
    )


class GpuMarkCompressibleWrite(Structure):
    """struct nvgpu_gpu_mark_compressible_write_args (nvgpu-ctrl.h), 32 bytes."""

    _fields_ = members("u32 handle, valid_compbits; u64 offset; u32 zbc_color, reserved[3]")


class AllocAs(Structure):
    """struct nvgpu_alloc_as_args (nvgpu-ctrl.h), 64 bytes."""

    _fields_ = members("""
        u32 big_page_size;
        s32 as_fd;
        u32 flags, reserved;
        u64 va_range_start, va_range_end, va_range_split;
        u32 padding[6];
    """)


class GpuOpenTsg(Structure):
    """struct nvgpu_gpu_open_tsg_args (nvgpu-ctrl.h), 24 bytes."""

    _fields_ = members("u32 tsg_fd, flags; u64 source_device_instance_id, share_token")


class GpuGetTpcMasks(Structure):
    """struct nvgpu_gpu_get_tpc_masks_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 mask_buf_size, reserved; u64 mask_buf_addr")


class GpuOpenChannel(Union):
    """struct nvgpu_gpu_open_channel_args (nvgpu-ctrl.h), 4 bytes."""

    class In(Structure):
        _fields_ = members("s32 runlist_id")

    class Out(Structure):
        _fields_ = members("s32 channel_fd")

    _fields_ = members("s32 channel_fd; In in_; Out out", In, Out)


class GpuL2Fb(Structure):
    """struct nvgpu_gpu_l2_fb_args (nvgpu-ctrl.h), 5 bytes: packed, three bits in the first byte."""

    _pack_ = 1
    _layout_ = "ms"  # what packing has always meant to ctypes; Python 3.14 wants it said
    _fields_ = members("u8 l2_flush:1, l2_invalidate:1, fb_flush:1; u32 reserved")


class GpuMmuDebugMode(Structure):
    """struct nvgpu_gpu_mmu_debug_mode_args (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = members("u32 state, reserved")


class GpuSmDebugMode(Structure):
    """struct nvgpu_gpu_sm_debug_mode_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("s32 channel_fd; u32 enable; u64 sms")


class GpuWaitPause(Structure):
    """struct nvgpu_gpu_wait_pause_args (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = members("u64 pwarpstate")


class GpuTpcExceptionEnStatus(Structure):
    """struct nvgpu_gpu_tpc_exception_en_status_args (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = members("u64 tpc_exception_en_sm_mask")


class GpuNumVsms(Structure):
    """struct nvgpu_gpu_num_vsms (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = members("u32 num_vsms, reserved")


class GpuVsmsMappingEntry(Structure):
    """struct nvgpu_gpu_vsms_mapping_entry (nvgpu-ctrl.h), 6 bytes."""

    _fields_ = members("""
        u8 gpc_logical_index, gpc_virtual_index, tpc_local_logical_index, tpc_global_logical_index, sm_local_id,
            tpc_migratable_index;
    """)


class GpuVsmsMapping(Structure):
    """struct nvgpu_gpu_vsms_mapping (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = members("u64 vsms_map_buf_addr")


class GpuGetCpuTimeCorrelationSample(Structure):
    """struct nvgpu_gpu_get_cpu_time_correlation_sample (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u64 cpu_timestamp, gpu_timestamp")


class GpuGetCpuTimeCorrelationInfo(Structure):
    """struct nvgpu_gpu_get_cpu_time_correlation_info_args (nvgpu-ctrl.h), 264 bytes."""

    _fields_ = members(
        """
            GpuGetCpuTimeCorrelationSample samples[16];
            u32 count, source_id;
        """,
        GpuGetCpuTimeCorrelationSample,
    )


class GpuGetGpuTime(Structure):
    """struct nvgpu_gpu_get_gpu_time_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u64 gpu_timestamp, reserved")


class GpuGetEngineInfoItem(Structure):
    """struct nvgpu_gpu_get_engine_info_item (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 engine_id, engine_instance; s32 runlist_id; u32 reserved")


class GpuGetEngineInfo(Structure):
    """struct nvgpu_gpu_get_engine_info_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 engine_info_buf_size, reserved; u64 engine_info_buf_addr")


class GpuAllocVidmem(Union):
    """struct nvgpu_gpu_alloc_vidmem_args (nvgpu-ctrl.h), 32 bytes."""

    class In(Structure):
        _fields_ = members("u64 size; u32 flags; u16 memtag, reserved0; u32 alignment, reserved1[3]")

    class Out(Structure):
        _fields_ = members("s32 dmabuf_fd")

    _fields_ = members("In in_; Out out", In, Out)


class GpuClkRangeItem(Structure):
    """struct nvgpu_gpu_clk_range (nvgpu-ctrl.h), 24 bytes."""

    _fields_ = members("u32 flags, clk_domain; u64 min_hz, max_hz")


class GpuClkRange(Structure):
    """struct nvgpu_gpu_clk_range_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 flags; u16 pad0, num_entries; u64 clk_range_entries")


class GpuClkVfPoint(Structure):
    """struct nvgpu_gpu_clk_vf_point (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = members("u64 freq_hz")


class GpuClkVfPoints(Structure):
    """struct nvgpu_gpu_clk_vf_points_args (nvgpu-ctrl.h), 24 bytes."""

    _fields_ = members("u32 flags, clk_domain; u16 max_entries, num_entries; u32 reserved; u64 clk_vf_point_entries")


class GpuClkInfo(Structure):
    """struct nvgpu_gpu_clk_info (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u16 flags, clk_type; u32 clk_domain; u64 freq_hz")


class GpuClkGetInfo(Structure):
    """struct nvgpu_gpu_clk_get_info_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 flags; u16 clk_type, num_entries; u64 clk_info_entries")


class GpuClkSetInfo(Structure):
    """struct nvgpu_gpu_clk_set_info_args (nvgpu-ctrl.h), 24 bytes."""

    _fields_ = members("u32 flags; u16 pad0, num_entries; u64 clk_info_entries; s32 completion_fd")


class GpuGetEventFd(Structure):
    """struct nvgpu_gpu_get_event_fd_args (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = members("u32 flags; s32 event_fd")


class GpuGetMemoryState(Structure):
    """struct nvgpu_gpu_get_memory_state_args (nvgpu-ctrl.h), 40 bytes."""

    _fields_ = members("u64 total_free_bytes, reserved[4]")


class GpuGetVoltage(Structure):
    """struct nvgpu_gpu_get_voltage_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u64 reserved; u32 which, voltage")


class GpuGetCurrent(Structure):
    """struct nvgpu_gpu_get_current_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 reserved[3], currnt")


class GpuGetPower(Structure):
    """struct nvgpu_gpu_get_power_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 reserved[3], power")


class GpuGetTemperature(Structure):
    """struct nvgpu_gpu_get_temperature_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 reserved[3]; s32 temp_f24_8")


class GpuGetFbpL2Masks(Structure):
    """struct nvgpu_gpu_get_fbp_l2_masks_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 mask_buf_size, reserved; u64 mask_buf_addr")


class GpuSetThermAlertLimit(Structure):
    """struct nvgpu_gpu_set_therm_alert_limit_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 reserved[3]; s32 temp_f24_8")


class GpuSetDeterministicOpts(Structure):
    """struct nvgpu_gpu_set_deterministic_opts_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 num_channels, flags; u64 channels")


class GpuRegisterBuffer(Structure):
    """struct nvgpu_gpu_register_buffer_args (nvgpu-ctrl.h), 24 bytes."""

    _fields_ = members("""
        s32 dmabuf_fd;
        u8 comptags_alloc_control, reserved0;
        u16 reserved1;
        u64 metadata_addr;
        u32 metadata_size, flags;
    """)


class GpuGetBufferInfo(Union):
    """struct nvgpu_gpu_get_buffer_info_args (nvgpu-ctrl.h), 24 bytes."""

    class In(Structure):
        _fields_ = members("s32 dmabuf_fd; u32 metadata_size; u64 metadata_addr")

    class Out(Structure):
        _fields_ = members("u64 flags; u32 metadata_size, reserved; u64 size")

    _fields_ = members("In in_; Out out", In, Out)


class GpuGetGpcPhysicalMap(Structure):
    """struct nvgpu_gpu_get_gpc_physical_map_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 map_buf_size, reserved; u64 physical_gpc_buf_addr")


class GpuGetGpcLogicalMap(Structure):
    """struct nvgpu_gpu_get_gpc_logical_map_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = members("u32 map_buf_size, reserved; u64 logical_gpc_buf_addr")


# ---- address-space fd (magic A) ------------------------------------------------------------------------------------


class AsBindChannel(Structure):
    """struct nvgpu_as_bind_channel_args (nvgpu-as.h), 4 bytes."""

    _fields_ = members("u32 channel_fd")


class Nvgpu32AsAllocSpace(Structure):
    """struct nvgpu32_as_alloc_space_args (nvgpu-as.h), 24 bytes."""

    class OA(Union):
        _fields_ = members("u64 offset, align")

    _fields_ = members("u32 pages, page_size, flags; OA o_a", OA)


class AsFreeSpace(Structure):
    """struct nvgpu_as_free_space_args (nvgpu-as.h), 32 bytes."""

    _fields_ = members("u64 offset, pages; u32 page_size, padding[3]")


class AsUnmapBuffer(Structure):
    """struct nvgpu_as_unmap_buffer_args (nvgpu-as.h), 8 bytes."""

    _fields_ = members("u64 offset")


class AsAllocSpace(Structure):
    """struct nvgpu_as_alloc_space_args (nvgpu-as.h), 32 bytes."""

    class OA(Union):
        _fields_ = members("u64 offset, align")

    _fields_ = members("u64 pages; u32 page_size, flags; OA o_a; u32 padding[2]", OA)


class AsMapBufferEx(Structure):
    """struct nvgpu_as_map_buffer_ex_args (nvgpu-as.h), 40 bytes."""

    _fields_ = members("""
        u32 flags;
        s16 compr_kind, incompr_kind;
        u32 dmabuf_fd, page_size;
        u64 buffer_offset, mapping_size, offset;
    """)


class AsVaRegion(Structure):
    """struct nvgpu_as_va_region (nvgpu-as.h), 24 bytes."""

    _fields_ = members("u64 offset; u32 page_size, reserved; u64 pages")


class AsGetVaRegions(Structure):
    """struct nvgpu_as_get_va_regions_args (nvgpu-as.h), 16 bytes."""

    _fields_ = members("u64 buf_addr; u32 buf_size, reserved")


class AsGetBufferCompbitsInfo(Structure):
    """struct nvgpu_as_get_buffer_compbits_info_args (nvgpu-as.h), 32 bytes."""

    _fields_ = members("""
        u64 mapping_gva, compbits_win_size;
        u32 compbits_win_ctagline, mapping_ctagline, flags, reserved1;
    """)


class AsMapBufferCompbits(Structure):
    """struct nvgpu_as_map_buffer_compbits_args (nvgpu-as.h), 40 bytes."""

    class _Union(Union):
        _fields_ = members("u64 mapping_iova, mapping_iova_buf_addr")

    _anonymous_ = ("_u",)
    _fields_ = members(
        """
            u64 mapping_gva, compbits_win_gva;
            _Union _u;
            u64 mapping_iova_buf_size;
            u32 flags, reserved1;
        """,
        _Union,
    )


class AsMapBufferBatch(Structure):
    """struct nvgpu_as_map_buffer_batch_args (nvgpu-as.h), 32 bytes."""

    _fields_ = members("u64 unmaps, maps; u32 num_unmaps, num_maps; u64 reserved")


class AsGetSyncRoMap(Structure):
    """struct nvgpu_as_get_sync_ro_map_args (nvgpu-as.h), 16 bytes."""

    _fields_ = members("u64 base_gpuva; u32 sync_size, num_syncpoints")


class AsMappingModify(Structure):
    """struct nvgpu_as_mapping_modify_args (nvgpu-as.h), 32 bytes."""

    _fields_ = members("s16 compr_kind, incompr_kind; u64 buffer_offset, buffer_size, map_address")


class AsRemapOp(Structure):
    """struct nvgpu_as_remap_op (nvgpu-as.h), 40 bytes."""

    _fields_ = members("""
        u32 flags;
        s16 compr_kind, incompr_kind;
        u32 mem_handle;
        s32 reserved;
        u64 mem_offset_in_pages, virt_offset_in_pages, num_pages;
    """)


class AsRemap(Structure):
    """struct nvgpu_as_remap_args (nvgpu-as.h), 16 bytes."""

    _fields_ = members("u64 ops; u32 num_ops")


# ---- TSG fd (magic T) ----------------------------------------------------------------------------------------------


class EventIdCtrl(Structure):
    """struct nvgpu_event_id_ctrl_args (nvgpu.h), 16 bytes."""

    _fields_ = members("u32 cmd, event_id; s32 event_fd; u32 padding")


class RunlistInterleave(Structure):
    """struct nvgpu_runlist_interleave_args (nvgpu.h), 8 bytes."""

    _fields_ = members("u32 level, reserved")


class Timeslice(Structure):
    """struct nvgpu_timeslice_args (nvgpu.h), 8 bytes."""

    _fields_ = members("u32 timeslice_us, reserved")


class TsgBindChannelEx(Structure):
    """struct nvgpu_tsg_bind_channel_ex_args (nvgpu.h), 24 bytes."""

    _fields_ = members("s32 channel_fd; u32 subcontext_id; u8 reserved[16]")


class TsgSmErrorStateRecord(Structure):
    """struct nvgpu_tsg_sm_error_state_record (nvgpu.h), 24 bytes."""

    _fields_ = members("u32 global_esr, warp_esr; u64 warp_esr_pc; u32 global_esr_report_mask, warp_esr_report_mask")


class TsgReadSingleSmErrorState(Structure):
    """struct nvgpu_tsg_read_single_sm_error_state_args (nvgpu.h), 24 bytes."""

    _fields_ = members("u32 sm_id, reserved; u64 record_mem, record_size")


class TsgL2MaxWaysEvictLast(Structure):
    """struct nvgpu_tsg_l2_max_ways_evict_last_args (nvgpu.h), 8 bytes."""

    _fields_ = members("u32 max_ways, reserved")


class TsgSetL2SectorPromotion(Structure):
    """struct nvgpu_tsg_set_l2_sector_promotion_args (nvgpu.h), 8 bytes."""

    _fields_ = members("u32 promotion_flag, reserved")


class TsgBindSchedulingDomain(Structure):
    """struct nvgpu_tsg_bind_scheduling_domain_args (nvgpu.h), 32 bytes."""

    _fields_ = members("s32 domain_fd, reserved0; u64 reserved[3]")


class TsgReadAllSmErrorState(Structure):
    """struct nvgpu_tsg_read_all_sm_error_state_args (nvgpu.h), 24 bytes."""

    _fields_ = members("u32 num_sm, reserved; u64 buffer_mem, buffer_size")


class TsgCreateSubcontext(Structure):
    """struct nvgpu_tsg_create_subcontext_args (nvgpu.h), 16 bytes."""

    _fields_ = members("u32 type; s32 as_fd; u32 veid, reserved")


class TsgDeleteSubcontext(Structure):
    """struct nvgpu_tsg_delete_subcontext_args (nvgpu.h), 8 bytes."""

    _fields_ = members("u32 veid, reserved")


class TsgGetShareToken(Structure):
    """struct nvgpu_tsg_get_share_token_args (nvgpu.h), 24 bytes."""

    _fields_ = members("u64 source_device_instance_id, target_device_instance_id, share_token")


class TsgRevokeShareToken(Structure):
    """struct nvgpu_tsg_revoke_share_token_args (nvgpu.h), 24 bytes."""

    _fields_ = members("u64 source_device_instance_id, target_device_instance_id, share_token")


# ---- channel fd (magic H) ------------------------------------------------------------------------------------------


class SetNvmapFd(Structure):
    """struct nvgpu_set_nvmap_fd_args (nvgpu.h), 4 bytes."""

    _fields_ = members("u32 fd")


class SetTimeout(Structure):
    """struct nvgpu_set_timeout_args (nvgpu.h), 4 bytes."""

    _fields_ = members("u32 timeout")


class GetParam(Structure):
    """struct nvgpu_get_param_args (nvgpu.h), 4 bytes."""

    _fields_ = members("u32 value")


class SetTimeoutEx(Structure):
    """struct nvgpu_set_timeout_ex_args (nvgpu.h), 8 bytes."""

    _fields_ = members("u32 timeout, flags")


class Wait(Structure):
    """struct nvgpu_wait_args (nvgpu.h), 24 bytes."""

    class Condition(Union):
        class Notifier(Structure):
            _fields_ = members("u32 dmabuf_fd, offset, padding1, padding2")

        class Semaphore(Structure):
            _fields_ = members("u32 dmabuf_fd, offset, payload, padding")

        _fields_ = members("Notifier notifier; Semaphore semaphore", Notifier, Semaphore)

    _fields_ = members("u32 type, timeout; Condition condition", Condition)


class Fence(Structure):
    """struct nvgpu_fence (nvgpu.h), 8 bytes."""

    _fields_ = members("u32 id, value")


class SubmitGpfifo(Structure):
    """struct nvgpu_submit_gpfifo_args (nvgpu.h), 24 bytes."""

    _fields_ = members("u64 gpfifo; u32 num_entries, flags; Fence fence", Fence)


class AllocObjCtx(Structure):
    """struct nvgpu_alloc_obj_ctx_args (nvgpu.h), 16 bytes."""

    _fields_ = members("u32 class_num, flags; u64 obj_id")


class ZcullBind(Structure):
    """struct nvgpu_zcull_bind_args (nvgpu.h), 16 bytes."""

    _fields_ = members("u64 gpu_va; u32 mode, padding")


class Notification(Structure):
    """struct nvgpu_notification (nvgpu.h), 16 bytes."""

    class TimeStamp(Structure):
        _fields_ = members("u32 nanoseconds[2]")

    _fields_ = members("TimeStamp time_stamp; u32 info32; u16 info16, status", TimeStamp)


class SetErrorNotifier(Structure):
    """struct nvgpu_set_error_notifier (nvgpu.h), 24 bytes."""

    _fields_ = members("u64 offset, size; u32 mem, padding")


class ChannelOpen(Union):
    """struct nvgpu_channel_open_args (nvgpu.h), 4 bytes."""

    class In(Structure):
        _fields_ = members("s32 runlist_id")

    class Out(Structure):
        _fields_ = members("s32 channel_fd")

    _fields_ = members("s32 channel_fd; In in_; Out out", In, Out)


class ChannelWdt(Structure):
    """struct nvgpu_channel_wdt_args (nvgpu.h), 8 bytes."""

    _fields_ = members("u32 wdt_status, timeout_ms")


class PreemptionMode(Structure):
    """struct nvgpu_preemption_mode_args (nvgpu.h), 8 bytes."""

    _fields_ = members("u32 graphics_preempt_mode, compute_preempt_mode")


class AllocGpfifoEx(Structure):
    """struct nvgpu_alloc_gpfifo_ex_args (nvgpu.h), 32 bytes."""

    _fields_ = members("u32 num_entries, num_inflight_jobs, flags, reserved[5]")


class BoostedCtx(Structure):
    """struct nvgpu_boosted_ctx_args (nvgpu.h), 8 bytes."""

    _fields_ = members("u32 boost, padding")


class GetUserSyncpoint(Structure):
    """struct nvgpu_get_user_syncpoint_args (nvgpu.h), 16 bytes."""

    _fields_ = members("u64 gpu_va; u32 syncpoint_id, syncpoint_max")


class RescheduleRunlist(Structure):
    """struct nvgpu_reschedule_runlist_args (nvgpu.h), 4 bytes."""

    _fields_ = members("u32 flags")


class ChannelSetupBind(Structure):
    """struct nvgpu_channel_setup_bind_args (nvgpu.h), 104 bytes."""

    _fields_ = members("""
        u32 num_gpfifo_entries, num_inflight_jobs, flags;
        s32 userd_dmabuf_fd, gpfifo_dmabuf_fd;
        u32 work_submit_token;
        u64 userd_dmabuf_offset, gpfifo_dmabuf_offset, gpfifo_gpu_va, userd_gpu_va, usermode_mmio_gpu_va;
        u32 reserved[9];
    """)


# ---- /dev/nvmap (magic N) ------------------------------------------------------------------------------------------


class _SizeOrFd(Union):
    _fields_ = members("u32 size; s32 fd")


class _WithHandle(Structure):
    _anonymous_ = ("_size_or_fd",)
    _fields_ = members("_SizeOrFd _size_or_fd; u32 handle", _SizeOrFd)


class CreateHandle(Union):
    """struct nvmap_create_handle (nvmap.h), 8 bytes: which members are input and output depends on the ioctl.

    CREATE: size -> handle. CREATE_64: size64 -> handle64. GET_FD: handle -> fd. FROM_FD: fd -> handle.
    """

    _anonymous_ = ("_with_handle",)
    _fields_ = members("_WithHandle _with_handle; u64 ivm_id; u32 ivm_handle; u64 size64; u32 handle64", _WithHandle)


class AllocHandle(Structure):
    """struct nvmap_alloc_handle (nvmap.h), 20 bytes."""

    _fields_ = members("u32 handle, heap_mask, flags, align; s32 numa_nid")


class RwHandle(Structure):
    """struct nvmap_rw_handle (nvmap.h), 56 bytes."""

    _fields_ = members("u64 addr; u32 handle; u64 offset, elem_size, hmem_stride, user_stride, count")


class HandleParam(Structure):
    """struct nvmap_handle_param (nvmap.h), 16 bytes."""

    _fields_ = members("u32 handle, param; u64 result")


class CacheOp(Structure):
    """struct nvmap_cache_op (nvmap.h), 24 bytes."""

    _fields_ = members("u64 addr; u32 handle, len; s32 op")


class CacheOp64(Structure):
    """struct nvmap_cache_op_64 (nvmap.h), 32 bytes."""

    _fields_ = members("u64 addr; u32 handle; u64 len; s32 op")


class CacheOpList(Structure):
    """struct nvmap_cache_op_list (nvmap.h), 32 bytes."""

    _fields_ = members("u64 handles, offsets, sizes; u32 nr; s32 op")


class CreateHandleFromVa(Structure):
    """struct nvmap_create_handle_from_va (nvmap.h), 24 bytes."""

    class _Union(Union):
        _fields_ = members("u32 handle; u64 size64")

    _anonymous_ = ("_u",)
    _fields_ = members("u64 va; u32 size, flags; _Union _u", _Union)


class GupTest(Structure):
    """struct nvmap_gup_test (nvmap.h), 16 bytes."""

    _fields_ = members("u64 va; u32 handle, result")


class SetTagLabel(Structure):
    """struct nvmap_set_tag_label (nvmap.h), 16 bytes."""

    _fields_ = members("u32 tag, len; u64 addr")


class AvailableHeaps(Structure):
    """struct nvmap_available_heaps (nvmap.h), 8 bytes."""

    _fields_ = members("u64 heaps")


class HeapSize(Structure):
    """struct nvmap_heap_size (nvmap.h), 16 bytes."""

    _fields_ = members("u32 heap; u64 size")


class HandleParameters(Structure):
    """struct nvmap_handle_parameters (nvmap.h), 72 bytes."""

    _fields_ = members("""
        u8 contig;
        u32 import_id, handle, heap_number, access_flags;
        u64 heap, align, coherency, size, offset, serial_id;
    """)


class AllocIvmHandle(Structure):
    """struct nvmap_alloc_ivm_handle (nvmap.h), 20 bytes."""

    _fields_ = members("u32 handle, heap_mask, flags, align, peer")


class SciipcMap(Structure):
    """struct nvmap_sciipc_map (nvmap.h), 32 bytes."""

    _fields_ = members("u64 auth_token; u32 flags; u64 sci_ipc_id; u32 handle")


class QueryHeapParams(Structure):
    """struct nvmap_query_heap_params (nvmap.h), 48 bytes."""

    _fields_ = members("u32 heap_mask, flags; u8 contig; u64 total, free, largest_free_block; u32 granule_size")


class DuplicateHandle(Structure):
    """struct nvmap_duplicate_handle (nvmap.h), 12 bytes."""

    _fields_ = members("u32 handle, access_flags, dup_handle")


class FdForRangeFromList(Structure):
    """struct nvmap_fd_for_range_from_list (nvmap.h), 40 bytes."""

    _fields_ = members("u64 handles; u32 num_handles; u64 offset, size; s32 fd")


# ---- /dev/host1x-fence (magic X) -----------------------------------------------------------------------------------


class Host1xCreateFence(Structure):
    """struct host1x_create_fence (host1x-fence.h), 16 bytes."""

    _fields_ = members("u32 id, threshold; s32 fence_fd; u32 reserved[1]")


class Host1xFenceExtractFence(Structure):
    """struct host1x_fence_extract_fence (host1x-fence.h), 8 bytes."""

    _fields_ = members("u32 id, threshold")


class Host1xFenceExtract(Structure):
    """struct host1x_fence_extract (host1x-fence.h), 24 bytes."""

    _fields_ = members("s32 fence_fd; u32 num_fences; u64 fences_ptr; u32 reserved[2]")


class Host1xCreatePollfd(Structure):
    """struct host1x_create_pollfd (host1x-fence.h), 8 bytes."""

    _fields_ = members("s32 fd; u32 reserved")


class Host1xTriggerPollfd(Structure):
    """struct host1x_trigger_pollfd (host1x-fence.h), 16 bytes."""

    _fields_ = members("s32 fd; u32 id, threshold, reserved")
