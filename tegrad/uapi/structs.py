"""The argument structs of the nvgpu, nvmap and host1x-fence ioctls, as ctypes classes with natural alignment.

Names are the headers' without the `nvgpu_`/`nvmap_` prefix and the `_args` suffix, in camel case; fields are named as
in the header (`in` is `in_`, a Python keyword). A struct that an ioctl points to, rather than takes, stands before it.
Source: L4T r36.4.3 uapi headers (nvgpu.h, nvgpu-as.h, nvgpu-ctrl.h, nvmap.h, host1x-fence.h); the sizes and offsets
of every field are tested against tests/data/uapi.json.
"""

from ctypes import Structure, Union
from ctypes import c_int16 as s16
from ctypes import c_int32 as s32
from ctypes import c_uint8 as u8
from ctypes import c_uint16 as u16
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64

# ---- ctrl fd (magic G) ---------------------------------------------------------------------------------------------


class GpuZcullGetCtxSize(Structure):
    """struct nvgpu_gpu_zcull_get_ctx_size_args (nvgpu-ctrl.h), 4 bytes."""

    _fields_ = [
        ("size", u32),
    ]


class GpuZcullGetInfo(Structure):
    """struct nvgpu_gpu_zcull_get_info_args (nvgpu-ctrl.h), 40 bytes."""

    _fields_ = [
        ("width_align_pixels", u32),
        ("height_align_pixels", u32),
        ("pixel_squares_by_aliquots", u32),
        ("aliquot_total", u32),
        ("region_byte_multiplier", u32),
        ("region_header_size", u32),
        ("subregion_header_size", u32),
        ("subregion_width_align_pixels", u32),
        ("subregion_height_align_pixels", u32),
        ("subregion_count", u32),
    ]


class GpuZbcSetTable(Structure):
    """struct nvgpu_gpu_zbc_set_table_args (nvgpu-ctrl.h), 48 bytes."""

    _fields_ = [
        ("color_ds", u32 * 4),
        ("color_l2", u32 * 4),
        ("depth", u32),
        ("stencil", u32),
        ("format", u32),
        ("type", u32),
    ]


class GpuZbcQueryTable(Structure):
    """struct nvgpu_gpu_zbc_query_table_args (nvgpu-ctrl.h), 56 bytes."""

    _fields_ = [
        ("color_ds", u32 * 4),
        ("color_l2", u32 * 4),
        ("depth", u32),
        ("stencil", u32),
        ("ref_cnt", u32),
        ("format", u32),
        ("type", u32),
        ("index_size", u32),
    ]


class GpuCharacteristics(Structure):
    """struct nvgpu_gpu_characteristics (nvgpu-ctrl.h), 328 bytes."""

    _fields_ = [
        ("arch", u32),
        ("impl", u32),
        ("rev", u32),
        ("num_gpc", u32),
        ("numa_domain_id", s32),
        ("L2_cache_size", u64),
        ("on_board_video_memory_size", u64),
        ("num_tpc_per_gpc", u32),
        ("bus_type", u32),
        ("big_page_size", u32),
        ("compression_page_size", u32),
        ("pde_coverage_bit_count", u32),
        ("available_big_page_sizes", u32),
        ("flags", u64),
        ("twod_class", u32),
        ("threed_class", u32),
        ("compute_class", u32),
        ("gpfifo_class", u32),
        ("inline_to_memory_class", u32),
        ("dma_copy_class", u32),
        ("gpc_mask", u32),
        ("sm_arch_sm_version", u32),
        ("sm_arch_spa_version", u32),
        ("sm_arch_warp_count", u32),
        ("gpu_ioctl_nr_last", s16),
        ("tsg_ioctl_nr_last", s16),
        ("dbg_gpu_ioctl_nr_last", s16),
        ("ioctl_channel_nr_last", s16),
        ("as_ioctl_nr_last", s16),
        ("gpu_va_bit_count", u8),
        ("reserved", u8),
        ("max_fbps_count", u32),
        ("fbp_en_mask", u32),
        ("emc_en_mask", u32),
        ("max_ltc_per_fbp", u32),
        ("max_lts_per_ltc", u32),
        ("max_tex_per_tpc", u32),
        ("max_gpc_count", u32),
        ("rop_l2_en_mask_DEPRECATED", u32 * 2),
        ("chipname", u8 * 8),
        ("gr_compbit_store_base_hw", u64),
        ("gr_gobs_per_comptagline_per_slice", u32),
        ("num_ltc", u32),
        ("lts_per_ltc", u32),
        ("cbc_cache_line_size", u32),
        ("cbc_comptags_per_line", u32),
        ("map_buffer_batch_limit", u32),
        ("max_freq", u64),
        ("graphics_preemption_mode_flags", u32),
        ("compute_preemption_mode_flags", u32),
        ("default_graphics_preempt_mode", u32),
        ("default_compute_preempt_mode", u32),
        ("local_video_memory_size", u64),
        ("pci_vendor_id", u16),
        ("pci_device_id", u16),
        ("pci_subsystem_vendor_id", u16),
        ("pci_subsystem_device_id", u16),
        ("pci_class", u16),
        ("pci_revision", u8),
        ("vbios_oem_version", u8),
        ("vbios_version", u32),
        ("reg_ops_limit", u32),
        ("reserved1", u32),
        ("event_ioctl_nr_last", s16),
        ("pad", u16),
        ("max_css_buffer_size", u32),
        ("ctxsw_ioctl_nr_last", s16),
        ("prof_ioctl_nr_last", s16),
        ("nvs_ioctl_nr_last", s16),
        ("reserved2", u8 * 2),
        ("max_ctxsw_ring_buffer_size", u32),
        ("reserved3", u32),
        ("per_device_identifier", u64),
        ("num_ppc_per_gpc", u32),
        ("max_veid_count_per_tsg", u32),
        ("num_sub_partition_per_fbpa", u32),
        ("gpu_instance_id", u32),
        ("gr_instance_id", u32),
        ("max_gpfifo_entries", u32),
        ("max_dbg_tsg_timeslice", u32),
        ("reserved5", u32),
        ("device_instance_id", u64),
    ]


class GpuGetCharacteristics(Structure):
    """struct nvgpu_gpu_get_characteristics (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("gpu_characteristics_buf_size", u64),
        ("gpu_characteristics_buf_addr", u64),
    ]


class GpuPrepareCompressibleRead(Structure):
    """struct nvgpu_gpu_prepare_compressible_read_args (nvgpu-ctrl.h), 80 bytes."""

    class _Compbits(Union):
        _fields_ = [
            ("request_compbits", u32),
            ("valid_compbits", u32),
        ]

    class Fence(Structure):
        class _IdOrFd(Union):
            _fields_ = [
                ("syncpt_id", u32),
                ("fd", s32),
            ]

        _anonymous_ = ("_id_or_fd",)
        _fields_ = [
            ("_id_or_fd", _IdOrFd),
            ("syncpt_value", u32),
        ]

    _anonymous_ = ("_compbits",)
    _fields_ = [
        ("handle", u32),
        ("_compbits", _Compbits),
        ("offset", u64),
        ("compbits_hoffset", u64),
        ("compbits_voffset", u64),
        ("width", u32),
        ("height", u32),
        ("block_height_log2", u32),
        ("submit_flags", u32),
        ("fence", Fence),
        ("zbc_color", u32),
        ("reserved", u32),
        ("scatterbuffer_offset", u64),
        ("reserved2", u32 * 2),
    ]


class GpuMarkCompressibleWrite(Structure):
    """struct nvgpu_gpu_mark_compressible_write_args (nvgpu-ctrl.h), 32 bytes."""

    _fields_ = [
        ("handle", u32),
        ("valid_compbits", u32),
        ("offset", u64),
        ("zbc_color", u32),
        ("reserved", u32 * 3),
    ]


class AllocAs(Structure):
    """struct nvgpu_alloc_as_args (nvgpu-ctrl.h), 64 bytes."""

    _fields_ = [
        ("big_page_size", u32),
        ("as_fd", s32),
        ("flags", u32),
        ("reserved", u32),
        ("va_range_start", u64),
        ("va_range_end", u64),
        ("va_range_split", u64),
        ("padding", u32 * 6),
    ]


class GpuOpenTsg(Structure):
    """struct nvgpu_gpu_open_tsg_args (nvgpu-ctrl.h), 24 bytes."""

    _fields_ = [
        ("tsg_fd", u32),
        ("flags", u32),
        ("source_device_instance_id", u64),
        ("share_token", u64),
    ]


class GpuGetTpcMasks(Structure):
    """struct nvgpu_gpu_get_tpc_masks_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("mask_buf_size", u32),
        ("reserved", u32),
        ("mask_buf_addr", u64),
    ]


class GpuOpenChannel(Union):
    """struct nvgpu_gpu_open_channel_args (nvgpu-ctrl.h), 4 bytes."""

    class In(Structure):
        _fields_ = [
            ("runlist_id", s32),
        ]

    class Out(Structure):
        _fields_ = [
            ("channel_fd", s32),
        ]

    _fields_ = [
        ("channel_fd", s32),
        ("in_", In),
        ("out", Out),
    ]


class GpuL2Fb(Structure):
    """struct nvgpu_gpu_l2_fb_args (nvgpu-ctrl.h), 5 bytes: packed, three bits in the first byte."""

    _pack_ = 1
    _layout_ = "ms"  # what packing has always meant to ctypes; Python 3.14 wants it said
    _fields_ = [
        ("l2_flush", u8, 1),
        ("l2_invalidate", u8, 1),
        ("fb_flush", u8, 1),
        ("reserved", u32),
    ]


class GpuMmuDebugMode(Structure):
    """struct nvgpu_gpu_mmu_debug_mode_args (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = [
        ("state", u32),
        ("reserved", u32),
    ]


class GpuSmDebugMode(Structure):
    """struct nvgpu_gpu_sm_debug_mode_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("channel_fd", s32),
        ("enable", u32),
        ("sms", u64),
    ]


class Warpstate(Structure):
    """struct warpstate (nvgpu-ctrl.h), 48 bytes."""

    _fields_ = [
        ("valid_warps", u64 * 2),
        ("trapped_warps", u64 * 2),
        ("paused_warps", u64 * 2),
    ]


class GpuWaitPause(Structure):
    """struct nvgpu_gpu_wait_pause_args (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = [
        ("pwarpstate", u64),
    ]


class GpuTpcExceptionEnStatus(Structure):
    """struct nvgpu_gpu_tpc_exception_en_status_args (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = [
        ("tpc_exception_en_sm_mask", u64),
    ]


class GpuNumVsms(Structure):
    """struct nvgpu_gpu_num_vsms (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = [
        ("num_vsms", u32),
        ("reserved", u32),
    ]


class GpuVsmsMappingEntry(Structure):
    """struct nvgpu_gpu_vsms_mapping_entry (nvgpu-ctrl.h), 6 bytes."""

    _fields_ = [
        ("gpc_logical_index", u8),
        ("gpc_virtual_index", u8),
        ("tpc_local_logical_index", u8),
        ("tpc_global_logical_index", u8),
        ("sm_local_id", u8),
        ("tpc_migratable_index", u8),
    ]


class GpuVsmsMapping(Structure):
    """struct nvgpu_gpu_vsms_mapping (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = [
        ("vsms_map_buf_addr", u64),
    ]


class GpuGetCpuTimeCorrelationSample(Structure):
    """struct nvgpu_gpu_get_cpu_time_correlation_sample (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("cpu_timestamp", u64),
        ("gpu_timestamp", u64),
    ]


class GpuGetCpuTimeCorrelationInfo(Structure):
    """struct nvgpu_gpu_get_cpu_time_correlation_info_args (nvgpu-ctrl.h), 264 bytes."""

    _fields_ = [
        ("samples", GpuGetCpuTimeCorrelationSample * 16),
        ("count", u32),
        ("source_id", u32),
    ]


class GpuGetGpuTime(Structure):
    """struct nvgpu_gpu_get_gpu_time_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("gpu_timestamp", u64),
        ("reserved", u64),
    ]


class GpuGetEngineInfoItem(Structure):
    """struct nvgpu_gpu_get_engine_info_item (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("engine_id", u32),
        ("engine_instance", u32),
        ("runlist_id", s32),
        ("reserved", u32),
    ]


class GpuGetEngineInfo(Structure):
    """struct nvgpu_gpu_get_engine_info_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("engine_info_buf_size", u32),
        ("reserved", u32),
        ("engine_info_buf_addr", u64),
    ]


class GpuAllocVidmem(Union):
    """struct nvgpu_gpu_alloc_vidmem_args (nvgpu-ctrl.h), 32 bytes."""

    class In(Structure):
        _fields_ = [
            ("size", u64),
            ("flags", u32),
            ("memtag", u16),
            ("reserved0", u16),
            ("alignment", u32),
            ("reserved1", u32 * 3),
        ]

    class Out(Structure):
        _fields_ = [
            ("dmabuf_fd", s32),
        ]

    _fields_ = [
        ("in_", In),
        ("out", Out),
    ]


class GpuClkRangeItem(Structure):
    """struct nvgpu_gpu_clk_range (nvgpu-ctrl.h), 24 bytes."""

    _fields_ = [
        ("flags", u32),
        ("clk_domain", u32),
        ("min_hz", u64),
        ("max_hz", u64),
    ]


class GpuClkRange(Structure):
    """struct nvgpu_gpu_clk_range_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("flags", u32),
        ("pad0", u16),
        ("num_entries", u16),
        ("clk_range_entries", u64),
    ]


class GpuClkVfPoint(Structure):
    """struct nvgpu_gpu_clk_vf_point (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = [
        ("freq_hz", u64),
    ]


class GpuClkVfPoints(Structure):
    """struct nvgpu_gpu_clk_vf_points_args (nvgpu-ctrl.h), 24 bytes."""

    _fields_ = [
        ("flags", u32),
        ("clk_domain", u32),
        ("max_entries", u16),
        ("num_entries", u16),
        ("reserved", u32),
        ("clk_vf_point_entries", u64),
    ]


class GpuClkInfo(Structure):
    """struct nvgpu_gpu_clk_info (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("flags", u16),
        ("clk_type", u16),
        ("clk_domain", u32),
        ("freq_hz", u64),
    ]


class GpuClkGetInfo(Structure):
    """struct nvgpu_gpu_clk_get_info_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("flags", u32),
        ("clk_type", u16),
        ("num_entries", u16),
        ("clk_info_entries", u64),
    ]


class GpuClkSetInfo(Structure):
    """struct nvgpu_gpu_clk_set_info_args (nvgpu-ctrl.h), 24 bytes."""

    _fields_ = [
        ("flags", u32),
        ("pad0", u16),
        ("num_entries", u16),
        ("clk_info_entries", u64),
        ("completion_fd", s32),
    ]


class GpuGetEventFd(Structure):
    """struct nvgpu_gpu_get_event_fd_args (nvgpu-ctrl.h), 8 bytes."""

    _fields_ = [
        ("flags", u32),
        ("event_fd", s32),
    ]


class GpuGetMemoryState(Structure):
    """struct nvgpu_gpu_get_memory_state_args (nvgpu-ctrl.h), 40 bytes."""

    _fields_ = [
        ("total_free_bytes", u64),
        ("reserved", u64 * 4),
    ]


class GpuGetVoltage(Structure):
    """struct nvgpu_gpu_get_voltage_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("reserved", u64),
        ("which", u32),
        ("voltage", u32),
    ]


class GpuGetCurrent(Structure):
    """struct nvgpu_gpu_get_current_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("reserved", u32 * 3),
        ("currnt", u32),
    ]


class GpuGetPower(Structure):
    """struct nvgpu_gpu_get_power_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("reserved", u32 * 3),
        ("power", u32),
    ]


class GpuGetTemperature(Structure):
    """struct nvgpu_gpu_get_temperature_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("reserved", u32 * 3),
        ("temp_f24_8", s32),
    ]


class GpuGetFbpL2Masks(Structure):
    """struct nvgpu_gpu_get_fbp_l2_masks_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("mask_buf_size", u32),
        ("reserved", u32),
        ("mask_buf_addr", u64),
    ]


class GpuSetThermAlertLimit(Structure):
    """struct nvgpu_gpu_set_therm_alert_limit_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("reserved", u32 * 3),
        ("temp_f24_8", s32),
    ]


class GpuSetDeterministicOpts(Structure):
    """struct nvgpu_gpu_set_deterministic_opts_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("num_channels", u32),
        ("flags", u32),
        ("channels", u64),
    ]


class GpuRegisterBuffer(Structure):
    """struct nvgpu_gpu_register_buffer_args (nvgpu-ctrl.h), 24 bytes."""

    _fields_ = [
        ("dmabuf_fd", s32),
        ("comptags_alloc_control", u8),
        ("reserved0", u8),
        ("reserved1", u16),
        ("metadata_addr", u64),
        ("metadata_size", u32),
        ("flags", u32),
    ]


class GpuGetBufferInfo(Union):
    """struct nvgpu_gpu_get_buffer_info_args (nvgpu-ctrl.h), 24 bytes."""

    class In(Structure):
        _fields_ = [
            ("dmabuf_fd", s32),
            ("metadata_size", u32),
            ("metadata_addr", u64),
        ]

    class Out(Structure):
        _fields_ = [
            ("flags", u64),
            ("metadata_size", u32),
            ("reserved", u32),
            ("size", u64),
        ]

    _fields_ = [
        ("in_", In),
        ("out", Out),
    ]


class GpuGetGpcPhysicalMap(Structure):
    """struct nvgpu_gpu_get_gpc_physical_map_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("map_buf_size", u32),
        ("reserved", u32),
        ("physical_gpc_buf_addr", u64),
    ]


class GpuGetGpcLogicalMap(Structure):
    """struct nvgpu_gpu_get_gpc_logical_map_args (nvgpu-ctrl.h), 16 bytes."""

    _fields_ = [
        ("map_buf_size", u32),
        ("reserved", u32),
        ("logical_gpc_buf_addr", u64),
    ]


# ---- address-space fd (magic A) ------------------------------------------------------------------------------------


class AsBindChannel(Structure):
    """struct nvgpu_as_bind_channel_args (nvgpu-as.h), 4 bytes."""

    _fields_ = [
        ("channel_fd", u32),
    ]


class Nvgpu32AsAllocSpace(Structure):
    """struct nvgpu32_as_alloc_space_args (nvgpu-as.h), 24 bytes."""

    class OA(Union):
        _fields_ = [
            ("offset", u64),
            ("align", u64),
        ]

    _fields_ = [
        ("pages", u32),
        ("page_size", u32),
        ("flags", u32),
        ("o_a", OA),
    ]


class AsFreeSpace(Structure):
    """struct nvgpu_as_free_space_args (nvgpu-as.h), 32 bytes."""

    _fields_ = [
        ("offset", u64),
        ("pages", u64),
        ("page_size", u32),
        ("padding", u32 * 3),
    ]


class AsUnmapBuffer(Structure):
    """struct nvgpu_as_unmap_buffer_args (nvgpu-as.h), 8 bytes."""

    _fields_ = [
        ("offset", u64),
    ]


class AsAllocSpace(Structure):
    """struct nvgpu_as_alloc_space_args (nvgpu-as.h), 32 bytes."""

    class OA(Union):
        _fields_ = [
            ("offset", u64),
            ("align", u64),
        ]

    _fields_ = [
        ("pages", u64),
        ("page_size", u32),
        ("flags", u32),
        ("o_a", OA),
        ("padding", u32 * 2),
    ]


class AsMapBufferEx(Structure):
    """struct nvgpu_as_map_buffer_ex_args (nvgpu-as.h), 40 bytes."""

    _fields_ = [
        ("flags", u32),
        ("compr_kind", s16),
        ("incompr_kind", s16),
        ("dmabuf_fd", u32),
        ("page_size", u32),
        ("buffer_offset", u64),
        ("mapping_size", u64),
        ("offset", u64),
    ]


class AsVaRegion(Structure):
    """struct nvgpu_as_va_region (nvgpu-as.h), 24 bytes."""

    _fields_ = [
        ("offset", u64),
        ("page_size", u32),
        ("reserved", u32),
        ("pages", u64),
    ]


class AsGetVaRegions(Structure):
    """struct nvgpu_as_get_va_regions_args (nvgpu-as.h), 16 bytes."""

    _fields_ = [
        ("buf_addr", u64),
        ("buf_size", u32),
        ("reserved", u32),
    ]


class AsGetBufferCompbitsInfo(Structure):
    """struct nvgpu_as_get_buffer_compbits_info_args (nvgpu-as.h), 32 bytes."""

    _fields_ = [
        ("mapping_gva", u64),
        ("compbits_win_size", u64),
        ("compbits_win_ctagline", u32),
        ("mapping_ctagline", u32),
        ("flags", u32),
        ("reserved1", u32),
    ]


class AsMapBufferCompbits(Structure):
    """struct nvgpu_as_map_buffer_compbits_args (nvgpu-as.h), 40 bytes."""

    class _Union(Union):
        _fields_ = [
            ("mapping_iova", u64),
            ("mapping_iova_buf_addr", u64),
        ]

    _anonymous_ = ("_u",)
    _fields_ = [
        ("mapping_gva", u64),
        ("compbits_win_gva", u64),
        ("_u", _Union),
        ("mapping_iova_buf_size", u64),
        ("flags", u32),
        ("reserved1", u32),
    ]


class AsMapBufferBatch(Structure):
    """struct nvgpu_as_map_buffer_batch_args (nvgpu-as.h), 32 bytes."""

    _fields_ = [
        ("unmaps", u64),
        ("maps", u64),
        ("num_unmaps", u32),
        ("num_maps", u32),
        ("reserved", u64),
    ]


class AsGetSyncRoMap(Structure):
    """struct nvgpu_as_get_sync_ro_map_args (nvgpu-as.h), 16 bytes."""

    _fields_ = [
        ("base_gpuva", u64),
        ("sync_size", u32),
        ("num_syncpoints", u32),
    ]


class AsMappingModify(Structure):
    """struct nvgpu_as_mapping_modify_args (nvgpu-as.h), 32 bytes."""

    _fields_ = [
        ("compr_kind", s16),
        ("incompr_kind", s16),
        ("buffer_offset", u64),
        ("buffer_size", u64),
        ("map_address", u64),
    ]


class AsRemapOp(Structure):
    """struct nvgpu_as_remap_op (nvgpu-as.h), 40 bytes."""

    _fields_ = [
        ("flags", u32),
        ("compr_kind", s16),
        ("incompr_kind", s16),
        ("mem_handle", u32),
        ("reserved", s32),
        ("mem_offset_in_pages", u64),
        ("virt_offset_in_pages", u64),
        ("num_pages", u64),
    ]


class AsRemap(Structure):
    """struct nvgpu_as_remap_args (nvgpu-as.h), 16 bytes."""

    _fields_ = [
        ("ops", u64),
        ("num_ops", u32),
    ]


# ---- TSG fd (magic T) ----------------------------------------------------------------------------------------------


class EventIdCtrl(Structure):
    """struct nvgpu_event_id_ctrl_args (nvgpu.h), 16 bytes."""

    _fields_ = [
        ("cmd", u32),
        ("event_id", u32),
        ("event_fd", s32),
        ("padding", u32),
    ]


class RunlistInterleave(Structure):
    """struct nvgpu_runlist_interleave_args (nvgpu.h), 8 bytes."""

    _fields_ = [
        ("level", u32),
        ("reserved", u32),
    ]


class Timeslice(Structure):
    """struct nvgpu_timeslice_args (nvgpu.h), 8 bytes."""

    _fields_ = [
        ("timeslice_us", u32),
        ("reserved", u32),
    ]


class TsgBindChannelEx(Structure):
    """struct nvgpu_tsg_bind_channel_ex_args (nvgpu.h), 24 bytes."""

    _fields_ = [
        ("channel_fd", s32),
        ("subcontext_id", u32),
        ("reserved", u8 * 16),
    ]


class TsgSmErrorStateRecord(Structure):
    """struct nvgpu_tsg_sm_error_state_record (nvgpu.h), 24 bytes."""

    _fields_ = [
        ("global_esr", u32),
        ("warp_esr", u32),
        ("warp_esr_pc", u64),
        ("global_esr_report_mask", u32),
        ("warp_esr_report_mask", u32),
    ]


class TsgReadSingleSmErrorState(Structure):
    """struct nvgpu_tsg_read_single_sm_error_state_args (nvgpu.h), 24 bytes."""

    _fields_ = [
        ("sm_id", u32),
        ("reserved", u32),
        ("record_mem", u64),
        ("record_size", u64),
    ]


class TsgL2MaxWaysEvictLast(Structure):
    """struct nvgpu_tsg_l2_max_ways_evict_last_args (nvgpu.h), 8 bytes."""

    _fields_ = [
        ("max_ways", u32),
        ("reserved", u32),
    ]


class TsgSetL2SectorPromotion(Structure):
    """struct nvgpu_tsg_set_l2_sector_promotion_args (nvgpu.h), 8 bytes."""

    _fields_ = [
        ("promotion_flag", u32),
        ("reserved", u32),
    ]


class TsgBindSchedulingDomain(Structure):
    """struct nvgpu_tsg_bind_scheduling_domain_args (nvgpu.h), 32 bytes."""

    _fields_ = [
        ("domain_fd", s32),
        ("reserved0", s32),
        ("reserved", u64 * 3),
    ]


class TsgReadAllSmErrorState(Structure):
    """struct nvgpu_tsg_read_all_sm_error_state_args (nvgpu.h), 24 bytes."""

    _fields_ = [
        ("num_sm", u32),
        ("reserved", u32),
        ("buffer_mem", u64),
        ("buffer_size", u64),
    ]


class TsgCreateSubcontext(Structure):
    """struct nvgpu_tsg_create_subcontext_args (nvgpu.h), 16 bytes."""

    _fields_ = [
        ("type", u32),
        ("as_fd", s32),
        ("veid", u32),
        ("reserved", u32),
    ]


class TsgDeleteSubcontext(Structure):
    """struct nvgpu_tsg_delete_subcontext_args (nvgpu.h), 8 bytes."""

    _fields_ = [
        ("veid", u32),
        ("reserved", u32),
    ]


class TsgGetShareToken(Structure):
    """struct nvgpu_tsg_get_share_token_args (nvgpu.h), 24 bytes."""

    _fields_ = [
        ("source_device_instance_id", u64),
        ("target_device_instance_id", u64),
        ("share_token", u64),
    ]


class TsgRevokeShareToken(Structure):
    """struct nvgpu_tsg_revoke_share_token_args (nvgpu.h), 24 bytes."""

    _fields_ = [
        ("source_device_instance_id", u64),
        ("target_device_instance_id", u64),
        ("share_token", u64),
    ]


# ---- channel fd (magic H) ------------------------------------------------------------------------------------------


class SetNvmapFd(Structure):
    """struct nvgpu_set_nvmap_fd_args (nvgpu.h), 4 bytes."""

    _fields_ = [
        ("fd", u32),
    ]


class SetTimeout(Structure):
    """struct nvgpu_set_timeout_args (nvgpu.h), 4 bytes."""

    _fields_ = [
        ("timeout", u32),
    ]


class GetParam(Structure):
    """struct nvgpu_get_param_args (nvgpu.h), 4 bytes."""

    _fields_ = [
        ("value", u32),
    ]


class SetTimeoutEx(Structure):
    """struct nvgpu_set_timeout_ex_args (nvgpu.h), 8 bytes."""

    _fields_ = [
        ("timeout", u32),
        ("flags", u32),
    ]


class Wait(Structure):
    """struct nvgpu_wait_args (nvgpu.h), 24 bytes."""

    class Condition(Union):
        class Notifier(Structure):
            _fields_ = [
                ("dmabuf_fd", u32),
                ("offset", u32),
                ("padding1", u32),
                ("padding2", u32),
            ]

        class Semaphore(Structure):
            _fields_ = [
                ("dmabuf_fd", u32),
                ("offset", u32),
                ("payload", u32),
                ("padding", u32),
            ]

        _fields_ = [
            ("notifier", Notifier),
            ("semaphore", Semaphore),
        ]

    _fields_ = [
        ("type", u32),
        ("timeout", u32),
        ("condition", Condition),
    ]


class Gpfifo(Structure):
    """struct nvgpu_gpfifo (nvgpu.h), 8 bytes."""

    _fields_ = [
        ("entry0", u32),
        ("entry1", u32),
    ]


class Fence(Structure):
    """struct nvgpu_fence (nvgpu.h), 8 bytes."""

    _fields_ = [
        ("id", u32),
        ("value", u32),
    ]


class SubmitGpfifo(Structure):
    """struct nvgpu_submit_gpfifo_args (nvgpu.h), 24 bytes."""

    _fields_ = [
        ("gpfifo", u64),
        ("num_entries", u32),
        ("flags", u32),
        ("fence", Fence),
    ]


class AllocObjCtx(Structure):
    """struct nvgpu_alloc_obj_ctx_args (nvgpu.h), 16 bytes."""

    _fields_ = [
        ("class_num", u32),
        ("flags", u32),
        ("obj_id", u64),
    ]


class ZcullBind(Structure):
    """struct nvgpu_zcull_bind_args (nvgpu.h), 16 bytes."""

    _fields_ = [
        ("gpu_va", u64),
        ("mode", u32),
        ("padding", u32),
    ]


class Notification(Structure):
    """struct nvgpu_notification (nvgpu.h), 16 bytes."""

    class TimeStamp(Structure):
        _fields_ = [
            ("nanoseconds", u32 * 2),
        ]

    _fields_ = [
        ("time_stamp", TimeStamp),
        ("info32", u32),
        ("info16", u16),
        ("status", u16),
    ]


class SetErrorNotifier(Structure):
    """struct nvgpu_set_error_notifier (nvgpu.h), 24 bytes."""

    _fields_ = [
        ("offset", u64),
        ("size", u64),
        ("mem", u32),
        ("padding", u32),
    ]


class ChannelOpen(Union):
    """struct nvgpu_channel_open_args (nvgpu.h), 4 bytes."""

    class In(Structure):
        _fields_ = [
            ("runlist_id", s32),
        ]

    class Out(Structure):
        _fields_ = [
            ("channel_fd", s32),
        ]

    _fields_ = [
        ("channel_fd", s32),
        ("in_", In),
        ("out", Out),
    ]


class ChannelWdt(Structure):
    """struct nvgpu_channel_wdt_args (nvgpu.h), 8 bytes."""

    _fields_ = [
        ("wdt_status", u32),
        ("timeout_ms", u32),
    ]


class PreemptionMode(Structure):
    """struct nvgpu_preemption_mode_args (nvgpu.h), 8 bytes."""

    _fields_ = [
        ("graphics_preempt_mode", u32),
        ("compute_preempt_mode", u32),
    ]


class AllocGpfifoEx(Structure):
    """struct nvgpu_alloc_gpfifo_ex_args (nvgpu.h), 32 bytes."""

    _fields_ = [
        ("num_entries", u32),
        ("num_inflight_jobs", u32),
        ("flags", u32),
        ("reserved", u32 * 5),
    ]


class BoostedCtx(Structure):
    """struct nvgpu_boosted_ctx_args (nvgpu.h), 8 bytes."""

    _fields_ = [
        ("boost", u32),
        ("padding", u32),
    ]


class GetUserSyncpoint(Structure):
    """struct nvgpu_get_user_syncpoint_args (nvgpu.h), 16 bytes."""

    _fields_ = [
        ("gpu_va", u64),
        ("syncpoint_id", u32),
        ("syncpoint_max", u32),
    ]


class RescheduleRunlist(Structure):
    """struct nvgpu_reschedule_runlist_args (nvgpu.h), 4 bytes."""

    _fields_ = [
        ("flags", u32),
    ]


class ChannelSetupBind(Structure):
    """struct nvgpu_channel_setup_bind_args (nvgpu.h), 104 bytes."""

    _fields_ = [
        ("num_gpfifo_entries", u32),
        ("num_inflight_jobs", u32),
        ("flags", u32),
        ("userd_dmabuf_fd", s32),
        ("gpfifo_dmabuf_fd", s32),
        ("work_submit_token", u32),
        ("userd_dmabuf_offset", u64),
        ("gpfifo_dmabuf_offset", u64),
        ("gpfifo_gpu_va", u64),
        ("userd_gpu_va", u64),
        ("usermode_mmio_gpu_va", u64),
        ("reserved", u32 * 9),
    ]


# ---- /dev/nvmap (magic N) ------------------------------------------------------------------------------------------


class _SizeOrFd(Union):
    _fields_ = [
        ("size", u32),
        ("fd", s32),
    ]


class _WithHandle(Structure):
    _anonymous_ = ("_size_or_fd",)
    _fields_ = [
        ("_size_or_fd", _SizeOrFd),
        ("handle", u32),
    ]


class CreateHandle(Union):
    """struct nvmap_create_handle (nvmap.h), 8 bytes: which members are input and output depends on the ioctl.

    CREATE: size -> handle. CREATE_64: size64 -> handle64. GET_FD: handle -> fd. FROM_FD: fd -> handle.
    """

    _anonymous_ = ("_with_handle",)
    _fields_ = [
        ("_with_handle", _WithHandle),
        ("ivm_id", u64),
        ("ivm_handle", u32),
        ("size64", u64),
        ("handle64", u32),
    ]


class AllocHandle(Structure):
    """struct nvmap_alloc_handle (nvmap.h), 20 bytes."""

    _fields_ = [
        ("handle", u32),
        ("heap_mask", u32),
        ("flags", u32),
        ("align", u32),
        ("numa_nid", s32),
    ]


class RwHandle(Structure):
    """struct nvmap_rw_handle (nvmap.h), 56 bytes."""

    _fields_ = [
        ("addr", u64),
        ("handle", u32),
        ("offset", u64),
        ("elem_size", u64),
        ("hmem_stride", u64),
        ("user_stride", u64),
        ("count", u64),
    ]


class HandleParam(Structure):
    """struct nvmap_handle_param (nvmap.h), 16 bytes."""

    _fields_ = [
        ("handle", u32),
        ("param", u32),
        ("result", u64),
    ]


class CacheOp(Structure):
    """struct nvmap_cache_op (nvmap.h), 24 bytes."""

    _fields_ = [
        ("addr", u64),
        ("handle", u32),
        ("len", u32),
        ("op", s32),
    ]


class CacheOp64(Structure):
    """struct nvmap_cache_op_64 (nvmap.h), 32 bytes."""

    _fields_ = [
        ("addr", u64),
        ("handle", u32),
        ("len", u64),
        ("op", s32),
    ]


class CacheOpList(Structure):
    """struct nvmap_cache_op_list (nvmap.h), 32 bytes."""

    _fields_ = [
        ("handles", u64),
        ("offsets", u64),
        ("sizes", u64),
        ("nr", u32),
        ("op", s32),
    ]


class CreateHandleFromVa(Structure):
    """struct nvmap_create_handle_from_va (nvmap.h), 24 bytes."""

    class _Union(Union):
        _fields_ = [
            ("handle", u32),
            ("size64", u64),
        ]

    _anonymous_ = ("_u",)
    _fields_ = [
        ("va", u64),
        ("size", u32),
        ("flags", u32),
        ("_u", _Union),
    ]


class GupTest(Structure):
    """struct nvmap_gup_test (nvmap.h), 16 bytes."""

    _fields_ = [
        ("va", u64),
        ("handle", u32),
        ("result", u32),
    ]


class SetTagLabel(Structure):
    """struct nvmap_set_tag_label (nvmap.h), 16 bytes."""

    _fields_ = [
        ("tag", u32),
        ("len", u32),
        ("addr", u64),
    ]


class AvailableHeaps(Structure):
    """struct nvmap_available_heaps (nvmap.h), 8 bytes."""

    _fields_ = [
        ("heaps", u64),
    ]


class HeapSize(Structure):
    """struct nvmap_heap_size (nvmap.h), 16 bytes."""

    _fields_ = [
        ("heap", u32),
        ("size", u64),
    ]


class HandleParameters(Structure):
    """struct nvmap_handle_parameters (nvmap.h), 72 bytes."""

    _fields_ = [
        ("contig", u8),
        ("import_id", u32),
        ("handle", u32),
        ("heap_number", u32),
        ("access_flags", u32),
        ("heap", u64),
        ("align", u64),
        ("coherency", u64),
        ("size", u64),
        ("offset", u64),
        ("serial_id", u64),
    ]


class AllocIvmHandle(Structure):
    """struct nvmap_alloc_ivm_handle (nvmap.h), 20 bytes."""

    _fields_ = [
        ("handle", u32),
        ("heap_mask", u32),
        ("flags", u32),
        ("align", u32),
        ("peer", u32),
    ]


class SciipcMap(Structure):
    """struct nvmap_sciipc_map (nvmap.h), 32 bytes."""

    _fields_ = [
        ("auth_token", u64),
        ("flags", u32),
        ("sci_ipc_id", u64),
        ("handle", u32),
    ]


class QueryHeapParams(Structure):
    """struct nvmap_query_heap_params (nvmap.h), 48 bytes."""

    _fields_ = [
        ("heap_mask", u32),
        ("flags", u32),
        ("contig", u8),
        ("total", u64),
        ("free", u64),
        ("largest_free_block", u64),
        ("granule_size", u32),
    ]


class DuplicateHandle(Structure):
    """struct nvmap_duplicate_handle (nvmap.h), 12 bytes."""

    _fields_ = [
        ("handle", u32),
        ("access_flags", u32),
        ("dup_handle", u32),
    ]


class FdForRangeFromList(Structure):
    """struct nvmap_fd_for_range_from_list (nvmap.h), 40 bytes."""

    _fields_ = [
        ("handles", u64),
        ("num_handles", u32),
        ("offset", u64),
        ("size", u64),
        ("fd", s32),
    ]


# ---- /dev/host1x-fence (magic X) -----------------------------------------------------------------------------------


class Host1xCreateFence(Structure):
    """struct host1x_create_fence (host1x-fence.h), 16 bytes."""

    _fields_ = [
        ("id", u32),
        ("threshold", u32),
        ("fence_fd", s32),
        ("reserved", u32 * 1),
    ]


class Host1xFenceExtractFence(Structure):
    """struct host1x_fence_extract_fence (host1x-fence.h), 8 bytes."""

    _fields_ = [
        ("id", u32),
        ("threshold", u32),
    ]


class Host1xFenceExtract(Structure):
    """struct host1x_fence_extract (host1x-fence.h), 24 bytes."""

    _fields_ = [
        ("fence_fd", s32),
        ("num_fences", u32),
        ("fences_ptr", u64),
        ("reserved", u32 * 2),
    ]


class Host1xCreatePollfd(Structure):
    """struct host1x_create_pollfd (host1x-fence.h), 8 bytes."""

    _fields_ = [
        ("fd", s32),
        ("reserved", u32),
    ]


class Host1xTriggerPollfd(Structure):
    """struct host1x_trigger_pollfd (host1x-fence.h), 16 bytes."""

    _fields_ = [
        ("fd", s32),
        ("id", u32),
        ("threshold", u32),
        ("reserved", u32),
    ]
