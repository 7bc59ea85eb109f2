"""Mutants of section 3."""

from mutation import Edit, Mutant, Value

ARBITER = "tegrad.orin.arbiter."
AS_FILE = "tegrad.orin.as_file."
CTRL, TOPOLOGY, CLOCKS = "tegrad.orin.ctrl.", "tegrad.orin.topology.", "tegrad.orin.clocks."
METADATA, SPACE, CLIENT = "tegrad.orin.metadata.", "tegrad.orin.address_space.", "tegrad.orin.client."
CHARACTERISTICS = TOPOLOGY + "characteristics"
ADD = "device_instance_id=instance,"


def row(old: str, new: str) -> Mutant:
    """Another value in the characteristics."""
    return Edit(CHARACTERISTICS, old, new)


def field(text: str) -> Mutant:
    """A field that is left at zero gets a value."""
    return Edit(CHARACTERISTICS, ADD, f"{ADD} {text},")


def pass_over(target: str, check: str) -> Mutant:
    """One check less."""
    return Edit(target, f"require({check})", "pass")


OPEN_AS, DETERMINISTIC = AS_FILE + "alloc_as", CTRL + "set_deterministic_opts"
RANGE, INFO, SET, POINTS = (
    CLOCKS + name for name in ("clk_get_range", "clk_get_info", "clk_set_info", "clk_get_vf_points")
)
REGISTER, LOOK = METADATA + "register_buffer", METADATA + "get_buffer_info"
SHARED = "tegrad.orin.sharing.shared_tsg"
MMAP, LOAD = CTRL + "mmap_registers_check", CLIENT + "BoardDoorbell.load32"
RANGE_CHECK = "require(start and start % PDE_ALIGN == 0 and end and end % PDE_ALIGN == 0 and start < end)"


def as_range(new: str) -> Mutant:
    """The range of ALLOC_AS checked otherwise."""
    return Edit(OPEN_AS, RANGE_CHECK, f"require({new})")


MUTANTS: dict[str, Mutant | list[Mutant]] = {
    # 3.1
    "3.1/architecture": row("arch=chip.gpu_arch", "arch=0x140"),
    "3.1/numa": row("k.NVGPU_GPU_CHARACTERISTICS_NO_NUMA_INFO", "0"),
    "3.1/l2-size": row("chip.l2_bytes", "chip.l2_bytes // 2"),
    "3.1/no-video-memory": field("on_board_video_memory_size=1 << 30"),
    "3.1/tpc-per-gpc": row("num_tpc_per_gpc=chip.tpc_per_gpc", "num_tpc_per_gpc=8"),
    "3.1/bus-type": row("bus_type=k.NVGPU_GPU_BUS_TYPE_AXI", "bus_type=0"),
    "3.1/big-page-size": field("big_page_size=65536"),
    "3.1/compression-page-size": row("65536", "4096"),
    "3.1/pde-coverage": row("47", "21"),
    "3.1/big-pages": field("available_big_page_sizes=65536"),
    "3.1/compute-class": row("chip.compute_class", "0xC6C0"),
    "3.1/gpfifo-class": row("chip.gpfifo_class", "0xC56F"),
    "3.1/copy-class": row("chip.dma_class", "0xC6B5"),
    "3.1/graphics-classes": [row("chip.twod_class", "0"), row("chip.threed_class", "0"), row("chip.i2m_class", "0")],
    "3.1/sm-version": row("chip.sm_version", "0x806"),
    "3.1/spa-version": row("chip.spa_version", "0x807"),
    "3.1/warp-count": row("chip.warps_per_sm", "64"),
    "3.1/last-numbers": [
        row('io.LAST_NR["ctrl"]', "43"),
        row('io.LAST_NR["tsg"]', "20"),
        row('io.LAST_NR["as"]', "13"),
        row("dbg_gpu_ioctl_nr_last=33", "dbg_gpu_ioctl_nr_last=32"),
        row('io.LAST_NR["channel"]', "127"),
    ],
    "3.1/va-bits": row("gpu_va_bit_count=40", "gpu_va_bit_count=49"),
    "3.1/fbps": row("fbp_en_mask=(1 << NUM_FBPS) - 1", "fbp_en_mask=1"),
    "3.1/ltc-per-fbp": row("max_lts_per_ltc=LTS_PER_LTC", "max_lts_per_ltc=2"),
    "3.1/tex-per-tpc": field("max_tex_per_tpc=2"),
    "3.1/gpc-maximum": row("max_gpc_count(chip)", "7"),
    "3.1/raw-cbc": field("gr_compbit_store_base_hw=4096"),
    "3.1/ltcs": row("num_ltc=NUM_FBPS * LTC_PER_FBP", "num_ltc=1"),
    "3.1/batch-limit": row("BATCH_LIMIT", "0"),
    "3.1/preemption-modes": [
        row("compute_preemption_mode_flags=7", "compute_preemption_mode_flags=3"),
        row("graphics_preemption_mode_flags=3", "graphics_preemption_mode_flags=1"),
    ],
    "3.1/default-preemption": row("default_compute_preempt_mode=1", "default_compute_preempt_mode=2"),
    "3.1/local-video-memory": field("local_video_memory_size=1 << 30"),
    "3.1/no-pci": [field("pci_vendor_id=0x10DE"), field("vbios_version=1")],
    "3.1/reg-ops": row("1024", "128"),
    "3.1/ppc-per-gpc": row("num_ppc_per_gpc=2", "num_ppc_per_gpc=1"),
    "3.1/veids": row("max_veid_count_per_tsg=64", "max_veid_count_per_tsg=63"),
    "3.1/sub-partitions": field("num_sub_partition_per_fbpa=2"),
    "3.1/instances": [field("gpu_instance_id=1"), field("gr_instance_id=1")],
    "3.1/gpfifo-entries": row("1 << 28", "1 << 20"),
    "3.1/debug-timeslice": row("4_000_000", "50_000"),
    "3.1/chipname": row("chip.chip.encode()", "chip.name[:7].encode()"),
    "3.1/gpc-mask": row("gpc_mask=(1 << chip.num_gpc) - 1", "gpc_mask=1"),
    "3.1/flags-set": Value(TOPOLOGY + "FLAGS", "FLAGS & ~(1 << 30)"),
    "3.1/flags-clear": Value(TOPOLOGY + "FLAGS", "FLAGS | 1 << 57"),
    "3.1/instance-ids": row("device_instance_id=instance", "device_instance_id=1"),
    "3.1/instance-stays": Edit(TOPOLOGY + "get_characteristics", "file.instance.id", "file.driver.new_instance_id()"),
    "3.1/characteristics-size": Edit(
        TOPOLOGY + "get_characteristics",
        "_buf_size = len(data)",
        "_buf_size = arg.gpu_characteristics_buf_size and len(data)",
    ),
    "3.1/characteristics-part": Edit(
        TOPOLOGY + "get_characteristics", "data[: arg.gpu_characteristics_buf_size]", "data"
    ),
    "3.1/characteristics-more": Edit(
        TOPOLOGY + "get_characteristics",
        "data[: arg.gpu_characteristics_buf_size]",
        "data.ljust(arg.gpu_characteristics_buf_size)",
    ),
    "3.1/characteristics-bad-buffer": Edit(TOPOLOGY + "get_characteristics", "return left", "pass"),
    # 3.2
    "3.2/big-page-64k": pass_over(OPEN_AS, "big_page_size == 0"),
    "3.2/big-page-odd": Edit(OPEN_AS, "big_page_size == 0", "big_page_size & (big_page_size - 1) == 0 or True"),
    "3.2/start-zero": as_range("start % PDE_ALIGN == 0 and end and end % PDE_ALIGN == 0 and start < end"),
    "3.2/start-unaligned": as_range("start and end and end % PDE_ALIGN == 0 and start < end"),
    "3.2/end-zero": as_range(
        "start and start % PDE_ALIGN == 0 and (not end or (end % PDE_ALIGN == 0 and start < end))"
    ),
    "3.2/end-unaligned": as_range("start and start % PDE_ALIGN == 0 and end and start < end"),
    "3.2/empty-range": as_range("start and start % PDE_ALIGN == 0 and end and end % PDE_ALIGN == 0 and start <= end"),
    "3.2/backward-range": as_range("start and start % PDE_ALIGN == 0 and end and end % PDE_ALIGN == 0"),
    "3.2/all-zero": Edit(OPEN_AS, RANGE_CHECK, "start, end = start or PDE_ALIGN, end or 1 << 37"),
    "3.2/split": pass_over(OPEN_AS, "split == 0"),
    "3.2/past-49-bits": Edit(OPEN_AS, "1 << PAGE_TABLE_BITS", "1 << 52"),
    "3.2/split-before-size": Edit(OPEN_AS, "require(split == 0)", "require(split == 0 or end > 1 << 49)"),
    "3.2/align-before-size": as_range(
        "start and start % PDE_ALIGN == 0 and end and (end > 1 << 49 or end % PDE_ALIGN == 0) and start < end"
    ),
    "3.2/largest-range": Edit(OPEN_AS, "1 << PAGE_TABLE_BITS", "1 << 46"),
    "3.2/unified-split": pass_over(OPEN_AS, "split == 0"),
    "3.2/as-flags-ignored": Edit(
        CTRL + "alloc_address_space", "arg = call.arg", "arg = call.arg; require(arg.flags < 4)"
    ),
    "3.2/kernel-range": Edit(SPACE + "AddressSpace.map_syncpoint", "self.take_kernel(", "self.user.allocate("),
    # 3.3, 3.4
    "3.3/source-without-share": Edit(SHARED, "source == 0 and number == 0", "number == 0"),
    "3.3/token-without-share": Edit(SHARED, "source == 0 and number == 0", "source == 0"),
    "3.3/share-of-nothing": Edit(SHARED, "require(source and number)", "if not source: return None"),
    "3.3/unknown-token": Edit(
        SHARED, "return needed(driver.instances.get(source)).take(number, target).hold()", "return None"
    ),
    "3.3/share": [
        Edit("tegrad.orin.sharing.Instance.take", "self.tokens.remove(token)", "pass"),
        Edit(
            SHARED,
            "return needed(driver.instances.get(source)).take(number, target).hold()",
            "needed(driver.instances.get(source)).take(number, target)",
        ),
    ],
    "3.4/graphics-runlist": Edit("tegrad.orin.channel_calls.ChannelFile.__init__", "(-1, GR_RUNLIST)", "(GR_RUNLIST,)"),
    "3.4/unknown-runlist": Edit(
        "tegrad.orin.channel_calls.ChannelFile.__init__", "(-1, GR_RUNLIST)", "range(-1, 2000)"
    ),
    "3.4/runlist-below": Edit("tegrad.orin.channel_calls.ChannelFile.__init__", "(-1, GR_RUNLIST)", "range(-2000, 1)"),
    "3.4/channel-ids-are-a-stack": Edit(
        "tegrad.orin.channel.DriverChannel.release",
        "self.driver.free_chids.append(self.chid)",
        "self.driver.free_chids.insert(0, self.chid)",
    ),
    "3.4/channel-ids-descend": (
        Edit(
            "tegrad.orin.channel.DriverChannel.__init__",
            "driver.free_chids.pop()",
            "min(driver.free_chids); driver.free_chids.remove(self.chid)",
        ),
        Edit(
            "tegrad.orin.channel.DriverChannel.release",
            "self.driver.free_chids.append(self.chid)",
            "self.driver.free_chids.append(self.chid); self.driver.free_chids.sort()",
        ),
    ),
    # 3.5
    "3.5/get_tpc_masks-size": Edit(
        TOPOLOGY + "_masks", "arg.mask_buf_size = 4 *", "arg.mask_buf_size = arg.mask_buf_size and 4 *"
    ),
    "3.5/get_fbp_l2_masks-size": Edit(TOPOLOGY + "get_fbp_l2_masks", "* NUM_FBPS", "* 1"),
    "3.5/get_tpc_masks-copy": Edit(TOPOLOGY + "_words", "data[:size]", "data"),
    "3.5/get_fbp_l2_masks-copy": Edit(TOPOLOGY + "_words", "data[:size]", "data"),
    "3.5/tpc-mask-bits": Edit(TOPOLOGY + "get_tpc_masks", "chip.tpc_masks", "[0xFF] * chip.num_gpc"),
    "3.5/num-vsms": Edit(TOPOLOGY + "num_vsms", "file.driver.chip.sm_count", "8"),
    "3.5/vsms-mapping-size": Edit(TOPOLOGY + "vsms_mapping", "for e in entries", "for e in entries + entries[:1]"),
    "3.5/vsms-mapping-places": Edit(TOPOLOGY + "vsms_mapping", "gpc * chip.tpc_per_gpc + tpc", "tpc"),
    "3.5/vsms-migratable": Edit(TOPOLOGY + "vsms_mapping", "sm, tpc)", "sm, tpc + 1)"),
    "3.5/physical-map": Edit(TOPOLOGY + "_gpc_map", "list(range(count))", "[0] * count"),
    "3.5/logical-map": Edit(TOPOLOGY + "_gpc_map", "list(range(count))", "[0] * count"),
    "3.5/physical-map-size": pass_over(TOPOLOGY + "_gpc_map", "call.arg.map_buf_size == 4 * count"),
    "3.5/logical-map-size": pass_over(TOPOLOGY + "_gpc_map", "call.arg.map_buf_size == 4 * count"),
    "3.5/engine-items": Edit(
        TOPOLOGY + "get_engine_info", "arg.engine_info_buf_size // size]", "-(-arg.engine_info_buf_size // size)]"
    ),
    "3.5/engine-size": Edit(TOPOLOGY + "get_engine_info", "arg.engine_info_buf_size // size]", "]"),
    "3.5/engine-runlists": Value(TOPOLOGY + "ENGINES", "((0, 0, 0), (1, 0, 1))"),
    "3.5/gpu-time-steps": Edit(CTRL + "gpu_time", "// PTIMER_STEP * PTIMER_STEP", "| 1"),
    "3.5/correlation-count": pass_over(
        CTRL + "get_cpu_time_correlation_info", "arg.count <= k.NVGPU_GPU_GET_CPU_TIME_CORRELATION_INFO_MAX_COUNT"
    ),
    "3.5/correlation-source": pass_over(
        CTRL + "get_cpu_time_correlation_info",
        "arg.source_id in (tsc, k.NVGPU_GPU_GET_CPU_TIME_CORRELATION_INFO_SRC_ID_OSTIME)",
    ),
    "3.5/correlation-samples": Edit(CTRL + "get_cpu_time_correlation_info", "range(arg.count)", "range(16)"),
    "3.5/flush-nothing": pass_over(CTRL + "flush_l2", "arg.l2_flush or arg.fb_flush"),
    "3.5/invalidate-alone": pass_over(CTRL + "flush_l2", "not arg.l2_invalidate or arg.l2_flush"),
    "3.5/flush-l2": Edit(CTRL + "flush_l2", "arg.l2_flush or arg.fb_flush", "arg.fb_flush"),
    "3.5/flush-fb": Edit(CTRL + "flush_l2", "arg.l2_flush or arg.fb_flush", "arg.l2_flush"),
    "3.5/zcull-size": Edit(CTRL + "zcull_get_ctx_size", "ZCULL_CONTEXT_BYTES", "0"),
    **{
        f"3.5/{name}": Edit(CTRL + "refuse", "require(False)", "pass")
        for name in (
            "get-voltage",
            "get-current",
            "get-power",
            "get-temperature",
            "get-event-fd",
            "set-therm-alert-limit",
        )
    },
    "3.5/no-vidmem": Edit(CTRL + "alloc_vidmem", "raise Errno(errno.ENOMEM)", "pass"),
    "3.5/no-memory-state": Edit(CTRL + "get_memory_state", "raise Errno(errno.ENOSYS)", "pass"),
    # 3.6
    "3.6/range-count": Edit(
        RANGE,
        "if not arg.flags and not arg.num_entries:\n        arg.num_entries = len(DOMAINS)",
        "if not arg.flags and not arg.num_entries:\n        arg.num_entries = 2",
    ),
    "3.6/info-count": Edit(
        INFO,
        "if not arg.flags and not arg.num_entries:\n        arg.num_entries = len(DOMAINS)",
        "if not arg.flags and not arg.num_entries:\n        arg.num_entries = 2",
    ),
    "3.6/range-flags": (pass_over(CLOCKS + "_entry_count", "arg.flags == k.NVGPU_GPU_CLK_FLAG_SPECIFIC_DOMAINS")),
    "3.6/info-flags": pass_over(CLOCKS + "_entry_count", "arg.flags == k.NVGPU_GPU_CLK_FLAG_SPECIFIC_DOMAINS"),
    "3.6/gpc-domain": Edit(RANGE, "s.GpuClkRangeItem(0, domain,", "s.GpuClkRangeItem(0, 0,"),
    "3.6/range-and-characteristics": Edit(RANGE, "clock.most", "clock.most - 100_000_000"),
    "3.6/range-by-domain": pass_over(RANGE, "domain in DOMAINS"),
    "3.6/range-entries": pass_over(CLOCKS + "_entry_count", "arg.num_entries <= most"),
    "3.6/info-by-entry": Edit(
        INFO, "require(entry.clk_type in rates)", "entry.clk_type = arg.clk_type; require(entry.clk_type in rates)"
    ),
    "3.6/info-types": Edit(
        INFO, "require(entry.clk_type in rates)", "entry.clk_type = entry.clk_type if entry.clk_type in rates else 1"
    ),
    "3.6/vf-flags": pass_over(POINTS, "arg.flags == 0"),
    "3.6/vf-domain": pass_over(POINTS, "arg.clk_domain in DOMAINS"),
    "3.6/vf-room": pass_over(POINTS, "arg.max_entries >= len(points)"),
    "3.6/vf-values": Edit(ARBITER + "clock_points", "[-MAX_FREQ_POINTS:]", "[-MAX_FREQ_POINTS:] + [most]"),
    "3.6/set-flags": pass_over(SET, "arg.flags == 0"),
    "3.6/set-no-entry": Edit(SET, "0 < arg.num_entries <= len(DOMAINS)", "arg.num_entries <= len(DOMAINS)"),
    "3.6/set-entries": Edit(SET, "0 < arg.num_entries <= len(DOMAINS)", "0 < arg.num_entries"),
    "3.6/set-domain": pass_over(SET, "entry.clk_domain in DOMAINS"),
    "3.6/set-bad-address": Edit(
        SET,
        "raw = yield from copy_in(arg.clk_info_entries, ctypes.sizeof(s.GpuClkInfo))",
        "raw = bytes(s.GpuClkInfo(clk_domain=1)); yield from ()",
    ),
    "3.6/completion": Edit(CLOCKS + "ClockFile.__init__", "self.make_readable()", "pass"),
    "3.6/clock-held": Edit(SET, "clock.run()", "pass"),
    "3.6/clock-clamped": Edit(
        ARBITER + "Arbiter.run", "min(max(wanted or self.most, self.least), self.most)", "wanted or self.most"
    ),
    "3.6/own-target": Edit(INFO, "file.target_mhz * MHZ", "clock.actual"),
    "3.6/highest-target": Edit(ARBITER + "Arbiter.run", "max((session", "min((session"),
    # 3.7
    "3.7/metadata-size": pass_over(REGISTER, "arg.metadata_size <= k.NVGPU_GPU_REGISTER_BUFFER_METADATA_MAX_SIZE"),
    "3.7/registered-twice": pass_over(REGISTER, "arg.flags & k.NVGPU_GPU_REGISTER_BUFFER_FLAGS_MODIFY"),
    "3.7/immutable": pass_over(REGISTER, "known.flags & MUTABLE"),
    "3.7/modified": Edit(
        REGISTER,
        "registry.put(buffer.key, Metadata(blob, flags))",
        "known or registry.put(buffer.key, Metadata(blob, flags))",
    ),
    "3.7/register-bad-fd": Edit("tegrad.orin.nvmap.dmabuf", "require(found is not None, errno.EBADF)", "pass"),
    "3.7/register-no-dmabuf": Edit("tegrad.orin.nvmap.dmabuf", "raise Errno(errno.EINVAL)", "raise Errno(errno.EBADF)"),
    "3.7/register-bad-address": Edit(
        REGISTER, "blob = yield from copy_in(arg.metadata_addr, arg.metadata_size)", "blob = b''; yield from ()"
    ),
    "3.7/comptag-control": pass_over(REGISTER, "arg.comptags_alloc_control <= k.NVGPU_GPU_COMPTAGS_ALLOC_REQUIRED"),
    "3.7/unregistered": Edit(LOOK, "buffer.length", "buffer.length - 1"),
    "3.7/registered-info": [
        Edit(LOOK, "known.blob[:room]", "known.blob"),
        Edit(LOOK, "known.flags if known", "1 if known"),
    ],
    "3.7/metadata-of-the-buffer": Edit(REGISTER, "registry.put(buffer.key,", "registry.put((0, arg.dmabuf_fd),"),
    "3.7/info-refused": Edit("tegrad.orin.nvmap.dmabuf", "require(found is not None, errno.EBADF)", "pass"),
    # 3.8
    "3.8/opts-count": pass_over(DETERMINISTIC, "arg.num_channels <= MAX_CHANNELS"),
    "3.8/opts-bad-address": Edit(
        DETERMINISTIC, "(yield from copy_in(arg.channels + 4 * i, 4))", "b'\\xff\\xff\\xff\\xff'"
    ),
    "3.8/opts-no-channel": Edit(
        DETERMINISTIC, "require(isinstance(found, ChannelFile))", "if not isinstance(found, ChannelFile): continue"
    ),
    "3.8/opts-not-deterministic": pass_over(DETERMINISTIC, "found.channel.set_up"),
    "3.8/opts-both": pass_over(DETERMINISTIC, "not (allow and disallow)"),
    "3.8/opts-both-for-nobody": Edit(
        DETERMINISTIC, "require(arg.num_channels <= MAX_CHANNELS)", "require(not (allow and disallow))"
    ),
    "3.8/opts-neither": Edit(DETERMINISTIC, "require(not (allow and disallow))", "require(allow != disallow)"),
    "3.8/opts-done": Edit(DETERMINISTIC, "found.channel.railgate_allowed = allow", "arg.num_channels = i"),
    "3.8/opts-first-failure": Edit(
        DETERMINISTIC,
        "for i in range(arg.num_channels):",
        "yield from copy_in(arg.channels, 4 * arg.num_channels)\n    for i in range(arg.num_channels):",
    ),
    # 3.9
    "3.9/one-mapping": Edit(MMAP, "require(not file.registers_mapped, errno.EBUSY)", "pass"),
    "3.9/mapping-per-fd": Edit(
        MMAP, "file.registers_mapped", "any(c.registers_mapped for c in file.driver.clock.sessions)"
    ),
    "3.9/mapping-too-long": pass_over(MMAP, "length <= USERMODE_SIZE"),
    "3.9/mapping-smaller": Edit(MMAP, "length <= USERMODE_SIZE", "length == USERMODE_SIZE"),
    "3.9/mapping-offset": (pass_over(MMAP, "offset == 0")),
    "3.9/busy-first": Edit(
        MMAP,
        "require(not file.registers_mapped, errno.EBUSY)",
        "require(length <= USERMODE_SIZE); require(not file.registers_mapped, errno.EBUSY)",
    ),
    "3.9/class-register": Edit(LOAD, "{0x00: self._class,", "{0x00: 0xC76F,"),
    "3.9/time-register": Edit(LOAD, "& ~31", "| 1"),
    "3.9/time-registers": Edit(LOAD, "time.monotonic_ns()", "time.time_ns()"),
    "3.9/unknown-registers": Edit(LOAD, ".get(offset, 0)", ".get(offset, 1)"),
    "3.9/bad-token": Edit(
        "tegrad.orin.scheduler.Scheduler._ring",
        "self.doorbells += 1",
        "value & 0xFFF in self._channels or [self._stop(c, RuntimeError()) for c in list(self._channels.values())]",
    ),
    "3.9/idle-doorbell": Edit(
        "tegrad.orin.host.HostChannel._put",
        "put >= self._entries:\n        raise self._pbdma(PbdmaIntr0.GPPTR",
        "put == self._get:\n        raise self._pbdma(PbdmaIntr0.METHOD",
    ),
}
