"""Section 3: the ctrl fd."""

from __future__ import annotations

import ctypes
import errno
import select
from contextlib import suppress
from pathlib import Path

from tegrad.conformance.calls import NO_FD, Calls, bound, ctrl, ready
from tegrad.conformance.rig import PAGE, VA_END, VA_START, Rig, RigChannel
from tegrad.conformance.rule import rule, rules
from tegrad.hw.gpfifo import USERMODE_SIZE
from tegrad.uapi import constants as k
from tegrad.uapi import structs as s
from tegrad.uapi.kernel import Doorbell

MIB, GIB = 1 << 20, 1 << 30
PDE = 2 * MIB
DEVFREQ = Path("/sys/class/devfreq")
"""Where Linux says within which limits devices' clocks may be."""


# ---- 3.1 characteristics --------------------------------------------------------------------------------------------

Values = dict[str, int | tuple[int, ...]]
ROWS: list[tuple[str, str, Values]] = [
    ("architecture", "arch 0x170, impl 0xb", {"arch": 0x170, "impl": 0xB}),
    ("numa", "numa_domain_id is -1", {"numa_domain_id": -1}),
    ("l2-size", "the L2 cache has 4 MiB", {"L2_cache_size": 4 * MIB}),
    ("no-video-memory", "on_board_video_memory_size is 0", {"on_board_video_memory_size": 0}),
    ("tpc-per-gpc", "num_tpc_per_gpc is the chip's maximum, 4", {"num_tpc_per_gpc": 4}),
    ("bus-type", "bus_type is AXI", {"bus_type": k.NVGPU_GPU_BUS_TYPE_AXI}),
    ("big-page-size", "big_page_size is 0: big pages are disabled", {"big_page_size": 0}),
    ("compression-page-size", "compression_page_size is 64 KiB", {"compression_page_size": 65536}),
    ("pde-coverage", "pde_coverage_bit_count is 47", {"pde_coverage_bit_count": 47}),
    ("big-pages", "available_big_page_sizes is 0", {"available_big_page_sizes": 0}),
    ("compute-class", "compute_class is 0xc7c0", {"compute_class": 0xC7C0}),
    ("gpfifo-class", "gpfifo_class is 0xc76f", {"gpfifo_class": 0xC76F}),
    ("copy-class", "dma_copy_class is 0xc7b5", {"dma_copy_class": 0xC7B5}),
    (
        "graphics-classes",
        "twod_class 0x902d, threed_class 0xc797, inline_to_memory_class 0xa140",
        {"twod_class": 0x902D, "threed_class": 0xC797, "inline_to_memory_class": 0xA140},
    ),
    ("sm-version", "sm_arch_sm_version is 0x807", {"sm_arch_sm_version": 0x807}),
    ("spa-version", "sm_arch_spa_version is 0x806", {"sm_arch_spa_version": 0x806}),
    ("warp-count", "sm_arch_warp_count is 48 or 96", {"sm_arch_warp_count": (48, 96)}),
    (
        "last-numbers",
        "the last ioctl numbers: gpu 44, tsg 21, dbg 33, channel 128, as 14",
        {
            "gpu_ioctl_nr_last": 44,
            "tsg_ioctl_nr_last": 21,
            "dbg_gpu_ioctl_nr_last": 33,
            "ioctl_channel_nr_last": 128,
            "as_ioctl_nr_last": 14,
        },
    ),
    ("va-bits", "gpu_va_bit_count is 40, whatever the page tables hold", {"gpu_va_bit_count": 40}),
    ("fbps", "max_fbps_count 2, fbp_en_mask 3", {"max_fbps_count": 2, "fbp_en_mask": 3}),
    ("ltc-per-fbp", "max_ltc_per_fbp 1, max_lts_per_ltc 4", {"max_ltc_per_fbp": 1, "max_lts_per_ltc": 4}),
    ("tex-per-tpc", "max_tex_per_tpc is never written", {"max_tex_per_tpc": 0}),
    ("gpc-maximum", "max_gpc_count is 2", {"max_gpc_count": 2}),
    (
        "raw-cbc",
        "the compression bit store's fields are 0 in raw mode",
        {"gr_compbit_store_base_hw": 0, "gr_gobs_per_comptagline_per_slice": 0},
    ),
    ("ltcs", "num_ltc 2, lts_per_ltc 4", {"num_ltc": 2, "lts_per_ltc": 4}),
    ("batch-limit", "map_buffer_batch_limit is 256", {"map_buffer_batch_limit": 256}),
    (
        "preemption-modes",
        "preemption modes: graphics WFI and GFXP, compute WFI, CTA and CILP",
        {"graphics_preemption_mode_flags": 3, "compute_preemption_mode_flags": 7},
    ),
    (
        "default-preemption",
        "both default preemption modes are WFI",
        {"default_graphics_preempt_mode": 1, "default_compute_preempt_mode": 1},
    ),
    ("local-video-memory", "local_video_memory_size is 0", {"local_video_memory_size": 0}),
    (
        "no-pci",
        "PCI ids and video BIOS versions are 0",
        {"pci_vendor_id": 0, "pci_device_id": 0, "pci_class": 0, "vbios_version": 0, "vbios_oem_version": 0},
    ),
    ("reg-ops", "reg_ops_limit is 1024", {"reg_ops_limit": 1024}),
    ("ppc-per-gpc", "num_ppc_per_gpc is 2", {"num_ppc_per_gpc": 2}),
    ("veids", "max_veid_count_per_tsg is 64", {"max_veid_count_per_tsg": 64}),
    ("sub-partitions", "num_sub_partition_per_fbpa is 0", {"num_sub_partition_per_fbpa": 0}),
    ("instances", "gpu_instance_id and gr_instance_id are 0", {"gpu_instance_id": 0, "gr_instance_id": 0}),
    ("gpfifo-entries", "max_gpfifo_entries is 0x10000000", {"max_gpfifo_entries": 1 << 28}),
    ("debug-timeslice", "max_dbg_tsg_timeslice is 4 s", {"max_dbg_tsg_timeslice": 4_000_000}),
]


WHOLE_SMS = 16
OF_THE_WHOLE_CHIP = ("l2-size", "fbps", "ltcs")
"""Rows, read on an AGX Orin 64GB, that a module with parts switched off may not have."""


def need_whole_chip(rig: Rig) -> None:
    """A value that was read where no part of the GPU is switched off is held against such a GPU only."""
    count = int(rig.call(rig.ctrl, "GPU_NUM_VSMS").num_vsms)
    rig.need(count == WHOLE_SMS, f"the value was read on a module with all {WHOLE_SMS} SMs; this one has {count}")


@rules("3.1", "GET_CHARACTERISTICS: {sentence}", "name sentence values", ROWS)
def characteristic(rig: Rig, name: str, values: Values) -> None:
    if name in OF_THE_WHOLE_CHIP:
        need_whole_chip(rig)
    found = rig.characteristics()
    for field, wanted in values.items():
        seen = getattr(found, field)
        if isinstance(wanted, tuple):
            rig.check(seen in wanted, f"{field} one of {wanted}", seen)
        else:
            rig.equal(field, wanted, seen)


@rule("3.1", "GET_CHARACTERISTICS: chipname is ga10b, padded with zeros")
def chipname(rig: Rig) -> None:
    rig.equal("chipname", b"ga10b\0\0\0", bytes(rig.characteristics().chipname))


@rule("3.1", "GET_CHARACTERISTICS: gpc_mask has a bit for each of the num_gpc enabled GPCs")
def gpc_mask(rig: Rig) -> None:
    found = rig.characteristics()
    rig.equal("bits of gpc_mask", found.num_gpc, found.gpc_mask.bit_count())
    rig.check(1 <= found.num_gpc <= found.max_gpc_count, "1 to max_gpc_count GPCs", found.num_gpc)


BITS_SET = (
    *(0, 2, 3, 4, 6, 8, 9, 16, 18, 19, 20, 22, 24, 25, 26, 27, 28, 29, 30, *range(32, 45), 46, *range(48, 54)),
    *(55, 56),
)
BITS_CLEAR = (1, 5, 7, *range(10, 16), 17, 23, 31, 45, 47, 54, *range(57, 64))


@rule("3.1", "GET_CHARACTERISTICS: the flags that are set (among them syncpoints, TSGs, usermode submit, IO coherence)")
def flags_set(rig: Rig) -> None:
    flags = rig.characteristics().flags
    rig.equal("flags missing", [], [bit for bit in BITS_SET if not flags >> bit & 1])


@rule("3.1", "GET_CHARACTERISTICS: the flags that are clear (sensors, events, comptag mapping, GPU MMIO and others)")
def flags_clear(rig: Rig) -> None:
    flags = rig.characteristics().flags
    rig.equal("flags too many", [], [bit for bit in BITS_CLEAR if flags >> bit & 1])


@rule("3.1", "GET_CHARACTERISTICS: device_instance_id is another for each open of the ctrl node")
def instance_ids(rig: Rig) -> None:
    rig.check(rig.instance_id() != rig.instance_id(rig.open_ctrl()), "two ids", "the same id twice")


@rule("3.1", "GET_CHARACTERISTICS: device_instance_id stays while the fd is open")
def instance_stays(rig: Rig) -> None:
    rig.equal("the id asked for again", rig.instance_id(), rig.instance_id())


def _characteristics(rig: Rig, size: int, address: int) -> tuple[int, int]:
    arg = s.GpuGetCharacteristics(size, address)
    return rig.returns(rig.ctrl, "GPU_GET_CHARACTERISTICS", arg), arg.gpu_characteristics_buf_size


@rule("3.1", "GET_CHARACTERISTICS: buf_size 0 copies nothing and tells the size, 328")
def characteristics_size(rig: Rig) -> None:
    rig.equal("return value and buf_size", (0, 328), _characteristics(rig, 0, rig.bad_address()))


@rule("3.1", "GET_CHARACTERISTICS: a buffer that is too small gets what fits, and buf_size is 328")
def characteristics_part(rig: Rig) -> None:
    room = rig.memory(PAGE)
    rig.equal("return value and buf_size", (0, 328), _characteristics(rig, 6, room.address))
    rig.equal("what was stored", b"\x70\1\0\0", room.read(0, 4))
    rig.equal("what follows", bytes(10), room.read(6, 10))


@rule("3.1", "GET_CHARACTERISTICS: a buffer that is larger than the struct gets 328 bytes")
def characteristics_more(rig: Rig) -> None:
    room = rig.memory(PAGE)
    room.write(b"\xee" * PAGE)
    rig.equal("return value and buf_size", (0, 328), _characteristics(rig, PAGE, room.address))
    rig.equal("what follows", b"\xee" * 8, room.read(328, 8))


@rule("3.1", "GET_CHARACTERISTICS: a bad buffer is a positive return value, and buf_size is untouched")
def characteristics_bad_buffer(rig: Rig) -> None:
    value, size = _characteristics(rig, 100, rig.bad_address())
    rig.equal("return value and buf_size", (100, 100), (value, size))


# ---- 3.2 ALLOC_AS ---------------------------------------------------------------------------------------------------


def as_fields(**fields: int) -> dict[str, int]:
    """The fields of an ALLOC_AS that works; `fields` change them."""
    return {"va_range_start": VA_START, "va_range_end": VA_END} | fields


LARGEST = (1 << 49) - 4 * GIB
ALLOC_AS = Calls("3.2", "GPU_ALLOC_AS", ctrl, lambda rig: as_fields())
ALLOC_AS.refuses("big-page-64k", "a big_page_size of 64 KiB is", errno.EINVAL, big_page_size=65536)
ALLOC_AS.refuses("big-page-odd", "a big_page_size that is not a power of two is", errno.EINVAL, big_page_size=3)
ALLOC_AS.refuses("start-zero", "va_range_start 0 is", errno.EINVAL, va_range_start=0)
ALLOC_AS.refuses(
    "start-unaligned", "a va_range_start that is no multiple of 2 MiB is", errno.EINVAL, va_range_start=PDE + MIB
)
ALLOC_AS.refuses("end-zero", "va_range_end 0 is", errno.EINVAL, va_range_end=0)
ALLOC_AS.refuses(
    "end-unaligned", "a va_range_end that is no multiple of 2 MiB is", errno.EINVAL, va_range_end=VA_END - MIB
)
ALLOC_AS.refuses("empty-range", "a range without room is", errno.EINVAL, va_range_end=VA_START)
ALLOC_AS.refuses(
    "backward-range", "a range that ends before it starts is", errno.EINVAL, va_range_start=4 * PDE, va_range_end=PDE
)
ALLOC_AS.refuses("all-zero", "the legacy range of zeros is", errno.EINVAL, va_range_start=0, va_range_end=0)
ALLOC_AS.refuses("split", "a va_range_split is", errno.EINVAL, va_range_split=GIB)
# What is too large alone is noticed last, and warns in the kernel log, with a stack trace: harmless.
ALLOC_AS.refuses("past-49-bits", "an end with less than 4 GiB below 2^49 is", errno.ENOMEM, va_range_end=LARGEST + PDE)
ALLOC_AS.refuses(
    "split-before-size", "a split with a range too large is", errno.EINVAL, va_range_split=PDE, va_range_end=1 << 50
)
ALLOC_AS.refuses(
    "align-before-size", "an unaligned end that is too large is", errno.EINVAL, va_range_end=(1 << 50) + MIB
)
ALLOC_AS.accepts("largest-range", "a range may end 4 GiB below 2^49", va_range_end=LARGEST)
ALLOC_AS.accepts("as-flags-ignored", "flag bits other than UNIFIED_VA are ignored", flags=0xFFFFFFFD)


@rule("3.2", "ALLOC_AS: with UNIFIED_VA a split is refused all the same")
def unified_split(rig: Rig) -> None:
    flags = k.NVGPU_GPU_IOCTL_ALLOC_AS_FLAGS_UNIFIED_VA
    rig.accepts(rig.ctrl, "GPU_ALLOC_AS", as_fields(flags=flags))
    rig.refuses(errno.EINVAL, rig.ctrl, "GPU_ALLOC_AS", as_fields(flags=flags, va_range_split=GIB))


@rule("3.2", "ALLOC_AS: the driver's own buffers lie in the 4 GiB after the user range")
def kernel_range(rig: Rig) -> None:
    vm = rig.address_space()
    channel = rig.bound_channel(vm=vm)
    found = rig.call(channel.fd, "CHANNEL_GET_USER_SYNCPOINT")
    expected = f"a syncpoint in [{VA_END:#x}, {VA_END + 4 * GIB:#x})"
    rig.check(VA_END <= found.gpu_va < VA_END + 4 * GIB, expected, found.gpu_va)


# ---- 3.3 and 3.4 OPEN_TSG, OPEN_CHANNEL -----------------------------------------------------------------------------

SHARE = k.NVGPU_GPU_IOCTL_OPEN_TSG_FLAGS_SHARE
OPEN_TSG = Calls("3.3", "GPU_OPEN_TSG", ctrl)
OPEN_TSG.refuses(
    "source-without-share", "a source instance without SHARE is", errno.EINVAL, source_device_instance_id=1
)
OPEN_TSG.refuses("token-without-share", "a token without SHARE is", errno.EINVAL, share_token=1)
OPEN_TSG.refuses("share-of-nothing", "SHARE without source and token is", errno.EINVAL, flags=SHARE)
OPEN_TSG.refuses(
    "unknown-token",
    "a token that nobody gave is",
    errno.EINVAL,
    flags=SHARE,
    source_device_instance_id=1,
    share_token=77,
)


@rule("3.3", "OPEN_TSG: with SHARE and the token of another instance it is that TSG; a token serves once")
def share(rig: Rig) -> None:
    other = rig.open_ctrl()
    source, target, tsg = rig.instance_id(), rig.instance_id(other), rig.tsg()
    rig.call(tsg, "TSG_SET_TIMESLICE", timeslice_us=2345)
    fields = {"source_device_instance_id": source, "target_device_instance_id": target}
    token = rig.call(tsg, "TSG_GET_SHARE_TOKEN", fields).share_token
    shared = {"flags": SHARE, "source_device_instance_id": source, "share_token": token}
    rig.refuses(errno.EINVAL, rig.ctrl, "GPU_OPEN_TSG", shared)
    same = int(rig.accepts(other, "GPU_OPEN_TSG", shared).tsg_fd)
    rig.equal("time slice", 2345, rig.call(same, "TSG_GET_TIMESLICE").timeslice_us)
    rig.refuses(errno.EINVAL, other, "GPU_OPEN_TSG", shared)


RUNLIST = "in_.runlist_id"
OPEN_CHANNEL = Calls("3.4", "GPU_OPEN_CHANNEL", ctrl)
OPEN_CHANNEL.accepts("graphics-runlist", "runlist -1 is the GR runlist, and so is 0", **{RUNLIST: (-1, 0)})
OPEN_CHANNEL.refuses("unknown-runlist", "a runlist that does not exist is", errno.EINVAL, **{RUNLIST: 1000})
OPEN_CHANNEL.refuses("runlist-below", "a runlist below -1 is", errno.EINVAL, **{RUNLIST: (-2, -1000)})


@rule("3.4", "OPEN_CHANNEL: a freed channel id is used next")
def channel_ids_are_a_stack(rig: Rig) -> None:
    first, second = rig.channel_ready(), rig.channel_ready()
    rig.close(second.fd)
    again = rig.channel_ready()
    rig.equal("token after a channel was closed", second.token, again.token)
    rig.check(first.token != again.token, "another token", again.token)


@rule("3.4", "OPEN_CHANNEL: ids come from a list of 512 that starts with the highest: a few channels have the top ids")
def channel_ids_descend(rig: Rig) -> None:
    ids = [rig.channel_ready().token & 0xFFF for _ in range(4)]
    rig.check(min(ids) >= 448 and max(ids) < 512, "ids from 511 downwards", ids)


# ---- 3.5 topology and other queries ---------------------------------------------------------------------------------

MASKS = {"GPU_GET_TPC_MASKS": "max_gpc_count", "GPU_GET_FBP_L2_MASKS": "max_fbps_count"}


def _masks(rig: Rig, name: str, size: int, address: int) -> int:
    return int(rig.accepts(rig.ctrl, name, mask_buf_size=size, mask_buf_addr=address).mask_buf_size)


def _mask(ioctl: str, count: str) -> None:
    """The rules of one of MASKS."""
    short = ioctl.removeprefix("GPU_")

    @rule("3.5", f"{short}: a size of 0 tells the size", name=f"{short.lower()}-size")
    def size(rig: Rig) -> None:
        wanted = 4 * getattr(rig.characteristics(), count)
        rig.equal("size for a size of 0", wanted, _masks(rig, ioctl, 0, rig.bad_address()))

    @rule("3.5", f"{short}: copies as many bytes as fit", name=f"{short.lower()}-copy")
    def copy(rig: Rig) -> None:
        full = 4 * getattr(rig.characteristics(), count)
        room = rig.memory(PAGE)
        room.write(b"\xee" * PAGE)
        rig.equal("size for a larger buffer", full, _masks(rig, ioctl, full + 64, room.address))
        rig.equal("what follows", b"\xee" * 8, room.read(full, 8))
        room.write(b"\xee" * PAGE)
        rig.equal("size for a smaller buffer", full, _masks(rig, ioctl, full - 2, room.address))
        rig.equal("what follows", b"\xee" * 8, room.read(full - 2, 8))
        rig.check(room.u32(), "a mask", room.u32())


for _ioctl, _count in MASKS.items():
    _mask(_ioctl, _count)


def tpc_masks(rig: Rig) -> list[int]:
    """The TPC mask of each GPC there can be."""
    found = rig.characteristics()
    room = rig.memory(PAGE)
    _masks(rig, "GPU_GET_TPC_MASKS", 4 * found.max_gpc_count, room.address)
    return [room.u32(4 * i) for i in range(found.max_gpc_count)]


@rule("3.5", "GET_TPC_MASKS: no more TPCs than a GPC can have, and some in every enabled GPC")
def tpc_mask_bits(rig: Rig) -> None:
    found, masks = rig.characteristics(), tpc_masks(rig)
    rig.check(all(mask < 1 << found.num_tpc_per_gpc for mask in masks), "masks of num_tpc_per_gpc bits", masks)
    rig.equal("GPCs with TPCs", found.num_gpc, sum(1 for mask in masks if mask))


@rule("3.5", "NUM_VSMS: two SMs for each TPC that is present")
def num_vsms(rig: Rig) -> None:
    tpcs = sum(mask.bit_count() for mask in tpc_masks(rig))
    rig.equal("SMs", 2 * tpcs, rig.accepts(rig.ctrl, "GPU_NUM_VSMS").num_vsms)


def vsms(rig: Rig) -> list[bytes]:
    """The entries of VSMS_MAPPING, and one entry of untouched memory after them."""
    count = rig.call(rig.ctrl, "GPU_NUM_VSMS").num_vsms
    room = rig.memory(PAGE)
    room.write(b"\xee" * PAGE)
    rig.accepts(rig.ctrl, "GPU_VSMS_MAPPING", vsms_map_buf_addr=room.address)
    return [room.read(6 * i, 6) for i in range(count + 1)]


@rule("3.5", "VSMS_MAPPING: writes six bytes per SM")
def vsms_mapping_size(rig: Rig) -> None:
    *entries, after = vsms(rig)
    rig.check(all(entry != b"\xee" * 6 for entry in entries), "an entry for each SM", entries)
    rig.equal("what follows", b"\xee" * 6, after)


@rule("3.5", "VSMS_MAPPING: each SM has its own GPC, TPC and place in it; global TPC indexes count over the GPU")
def vsms_mapping_places(rig: Rig) -> None:
    entries = vsms(rig)[:-1]
    places = {(gpc, tpc, sm) for gpc, _, tpc, _, sm, _ in entries}
    rig.equal("different places", len(entries), len(places))
    rig.equal("global TPC indexes", set(range(len(entries) // 2)), {entry[3] for entry in entries})


@rule("3.5", "VSMS_MAPPING: the migratable index of a TPC is its local one")
def vsms_migratable(rig: Rig) -> None:
    entries = vsms(rig)[:-1]
    rig.equal("migratable indexes", [entry[2] for entry in entries], [entry[5] for entry in entries])


MAPS = {
    "physical": ("GPU_GET_GPC_LOCAL_TO_PHYSICAL_MAP", "physical_gpc_buf_addr"),
    "logical": ("GPU_GET_GPC_LOCAL_TO_LOGICAL_MAP", "logical_gpc_buf_addr"),
}


def _gpc_map(short: str) -> None:
    """The rules of one of MAPS."""
    sentence, (name, field) = f"GET_GPC_LOCAL_TO_{short.upper()}_MAP", MAPS[short]

    @rule("3.5", f"{sentence}: a word per enabled GPC", name=f"{short}-map")
    def words(rig: Rig) -> None:
        found, room = rig.characteristics(), rig.memory(PAGE)
        rig.accepts(rig.ctrl, name, {"map_buf_size": 4 * found.num_gpc, field: room.address})
        seen = [room.u32(4 * i) for i in range(found.num_gpc)]
        rig.equal("different GPCs", found.num_gpc, len(set(seen)))
        rig.check(max(seen) < found.max_gpc_count, "numbers of GPCs there can be", seen)
        rig.equal("what follows", 0, room.u32(4 * found.num_gpc))

    @rule("3.5", f"{sentence}: any size but a word per enabled GPC is EINVAL", name=f"{short}-map-size")
    def size(rig: Rig) -> None:
        found, room = rig.characteristics(), rig.memory(PAGE)
        for size in (4 * found.num_gpc + 4, 4 * found.num_gpc - 1):
            rig.refuses(errno.EINVAL, rig.ctrl, name, {"map_buf_size": size, field: room.address})


for _short in MAPS:
    _gpc_map(_short)


def engines(rig: Rig, size: int = PAGE) -> tuple[int, bytes]:
    """The size that GET_ENGINE_INFO tells, and the memory after it (0xee where nothing was stored)."""
    room = rig.memory(PAGE)
    room.write(b"\xee" * PAGE)
    done = rig.accepts(rig.ctrl, "GPU_GET_ENGINE_INFO", engine_info_buf_size=size, engine_info_buf_addr=room.address)
    return int(done.engine_info_buf_size), room.read(0, PAGE)


@rule("3.5", "GET_ENGINE_INFO: copies as many whole items of 16 bytes as fit and tells the full size")
def engine_items(rig: Rig) -> None:
    full, _ = engines(rig)
    rig.check(full >= 32 and full % 16 == 0, "items of 16 bytes, two at least", full)
    told, data = engines(rig, 31)
    rig.equal("size told for room of 31 bytes", full, told)
    rig.equal("second item", b"\xee" * 16, data[16:32])
    rig.check(data[:16] != b"\xee" * 16, "a first item", data[:16].hex())


@rule("3.5", "GET_ENGINE_INFO: a size of 0 copies nothing")
def engine_size(rig: Rig) -> None:
    rig.check(engines(rig, 0)[1] == b"\xee" * PAGE, "nothing stored", "something")


@rule("3.5", "GET_ENGINE_INFO: GR is on runlist 0; GR_COPY engines share it, ASYNC_COPY engines have another")
def engine_runlists(rig: Rig) -> None:
    full, data = engines(rig)
    items = [s.GpuGetEngineInfoItem.from_buffer_copy(data, i) for i in range(0, full, 16)]
    runlists = {kind: {i.runlist_id for i in items if i.engine_id == kind} for kind in (0, 1, 2)}
    rig.equal("runlists of GR", {0}, runlists[k.NVGPU_GPU_ENGINE_ID_GR])
    rig.equal("runlists of GR_COPY", {0}, runlists[k.NVGPU_GPU_ENGINE_ID_GR_COPY])
    rig.check(0 not in runlists[k.NVGPU_GPU_ENGINE_ID_ASYNC_COPY], "ASYNC_COPY elsewhere", runlists)


def gpu_time(rig: Rig) -> int:
    """GET_GPU_TIME, in ns."""
    return int(rig.accepts(rig.ctrl, "GPU_GET_GPU_TIME").gpu_timestamp)


@rule("3.5", "GET_GPU_TIME: nanoseconds in steps of 32, which rise")
def gpu_time_steps(rig: Rig) -> None:
    before = gpu_time(rig)
    rig.equal("low bits", 0, before & 31)
    rig.eventually(lambda: gpu_time(rig) > before, "a later time")


CORRELATION = "GPU_GET_CPU_TIME_CORRELATION_INFO"


@rule("3.5", "GET_CPU_TIME_CORRELATION_INFO: 17 samples are EINVAL, 16 are not")
def correlation_count(rig: Rig) -> None:
    rig.refuses(errno.EINVAL, rig.ctrl, CORRELATION, count=17, source_id=1)
    rig.accepts(rig.ctrl, CORRELATION, count=16, source_id=1)


Calls("3.5", CORRELATION, ctrl).refuses(
    "correlation-source", "a source other than 1 and 2 is", errno.EINVAL, count=1, source_id=(0, 3)
)


@rule("3.5", "GET_CPU_TIME_CORRELATION_INFO: fills as many samples as asked for, of rising times")
def correlation_samples(rig: Rig) -> None:
    for source in (1, 2):
        found = rig.accepts(rig.ctrl, CORRELATION, count=3, source_id=source).samples
        rig.check(0 < found[0].gpu_timestamp <= found[2].gpu_timestamp, "rising GPU times", found[2].gpu_timestamp)
        rig.check(0 < found[0].cpu_timestamp <= found[2].cpu_timestamp, "rising CPU times", found[2].cpu_timestamp)
        rig.equal("fourth sample", 0, found[3].gpu_timestamp)


FLUSH = Calls("3.5", "GPU_FLUSH_L2", ctrl)
FLUSH.refuses("flush-nothing", "neither L2 nor FB flush is", errno.EINVAL, l2_invalidate=0)
FLUSH.refuses("invalidate-alone", "an invalidation without L2 flush is", errno.EINVAL, l2_invalidate=1, fb_flush=1)
FLUSH.accepts("flush-l2", "an L2 flush, with or without invalidation is accepted", l2_flush=1, l2_invalidate=(0, 1))
FLUSH.accepts("flush-fb", "an FB flush is accepted", fb_flush=1)


@rule("3.5", "ZCULL_GET_CTX_SIZE: 164352 bytes")
def zcull_size(rig: Rig) -> None:
    need_whole_chip(rig)
    rig.equal("size", 164352, rig.accepts(rig.ctrl, "GPU_ZCULL_GET_CTX_SIZE").size)


NO_SENSOR = ("GET_VOLTAGE", "GET_CURRENT", "GET_POWER", "GET_TEMPERATURE", "GET_EVENT_FD", "SET_THERM_ALERT_LIMIT")


@rules("3.5", "{ioctl} is EINVAL on Orin", "ioctl name", [(one, one.lower().replace("_", "-")) for one in NO_SENSOR])
def no_sensor(rig: Rig, ioctl: str) -> None:
    rig.refuses(errno.EINVAL, rig.ctrl, f"GPU_{ioctl}")


ANY = (errno.EINVAL, errno.ENOSYS, errno.ENOMEM, errno.ENODEV, errno.ENOTTY)


@rule("3.5", "ALLOC_VIDMEM fails: there is no video memory")
def no_vidmem(rig: Rig) -> None:
    rig.refuses(ANY, rig.ctrl, "GPU_ALLOC_VIDMEM", {"in_.size": PAGE})


@rule("3.5", "GET_MEMORY_STATE fails: there is no video memory")
def no_memory_state(rig: Rig) -> None:
    rig.refuses(ANY, rig.ctrl, "GPU_GET_MEMORY_STATE")


# ---- 3.6 clocks -----------------------------------------------------------------------------------------------------

GPC = k.NVGPU_GPU_CLK_DOMAIN_GPCCLK
TARGET, ACTUAL, EFFECTIVE = (
    k.NVGPU_GPU_CLK_TYPE_TARGET,
    k.NVGPU_GPU_CLK_TYPE_ACTUAL,
    k.NVGPU_GPU_CLK_TYPE_EFFECTIVE,
)
BY_DOMAIN = k.NVGPU_GPU_CLK_FLAG_SPECIFIC_DOMAINS


def clock_range(rig: Rig) -> s.GpuClkRangeItem:
    """The range of the GPC clock."""
    item = s.GpuClkRangeItem()
    rig.accepts(rig.ctrl, "GPU_CLK_GET_RANGE", num_entries=1, clk_range_entries=ctypes.addressof(item))
    return item


def clock(rig: Rig, kind: int, *, ctrl: int | None = None) -> int:
    """The GPC clock's target, what was set, or what it is; in Hz."""
    item = s.GpuClkInfo()
    fields = {"clk_type": kind, "num_entries": 1, "clk_info_entries": ctypes.addressof(item)}
    rig.accepts(rig.ctrl if ctrl is None else ctrl, "GPU_CLK_GET_INFO", fields)
    return int(item.freq_hz)


def ask_for(rig: Rig, hz: int, *, ctrl: int | None = None) -> int:
    """A completion fd of CLK_SET_INFO."""
    item = s.GpuClkInfo(clk_domain=GPC, freq_hz=hz)
    fields = {"num_entries": 1, "clk_info_entries": ctypes.addressof(item)}
    return int(rig.accepts(rig.ctrl if ctrl is None else ctrl, "GPU_CLK_SET_INFO", fields).completion_fd)


def vf_points(rig: Rig) -> list[int]:
    """The clock's frequencies, in Hz."""
    count = rig.accepts(rig.ctrl, "GPU_CLK_GET_VF_POINTS", clk_domain=GPC).max_entries
    room = rig.memory(PAGE)
    fields = {"clk_domain": GPC, "max_entries": count, "clk_vf_point_entries": room.address}
    done = rig.accepts(rig.ctrl, "GPU_CLK_GET_VF_POINTS", fields)
    return [room.u64(8 * i) for i in range(done.num_entries)]


def clock_limits(rig: Rig) -> tuple[int, int]:
    """What the arbiter keeps every request within, in Hz: the range, cut to Linux's limits (nvpmodel, jetson_clocks).

    Where they leave one rate, nothing can be asked for: not applicable. (nvgpu, os/linux/scale.c:
    gk20a_scale_clamp_clk_target)
    """
    found = clock_range(rig)
    low, high = int(found.min_hz), int(found.max_hz)
    for device in DEVFREQ.glob("*gpu*"):
        with suppress(OSError, ValueError):
            least, most = (int((device / name).read_text()) // 10**6 * 10**6 for name in ("min_freq", "max_freq"))
            low, high = max(low, least), min(high, most)
    rig.need(low < high, f"the clock is held at {high} Hz (jetson_clocks, or the power mode)")
    return low, high


COUNTED = {"GPU_CLK_GET_RANGE": "range", "GPU_CLK_GET_INFO": "info"}
for _ioctl, _short in COUNTED.items():

    def _count_query(rig: Rig, name: str = _ioctl) -> None:
        rig.equal("domains", 1, rig.accepts(rig.ctrl, name).num_entries)

    _sentence = _ioctl.removeprefix("GPU_")
    rule("3.6", f"{_sentence}: 0 entries tell the number of domains, 1", name=f"{_short}-count")(_count_query)
    Calls("3.6", _ioctl, ctrl).refuses(f"{_short}-flags", "flags other than 0 and 1 are", errno.EINVAL, flags=(2, 3))


@rule("3.6", "CLK_GET_RANGE: the GPC clock is domain 1, with a minimum below its maximum")
def gpc_domain(rig: Rig) -> None:
    item = clock_range(rig)
    rig.equal("domain", GPC, item.clk_domain)
    rig.check(0 < item.min_hz < item.max_hz, "a range", f"{item.min_hz} to {item.max_hz}")


@rule("3.6", "CLK_GET_RANGE: the maximum is max_freq of the characteristics")
def range_and_characteristics(rig: Rig) -> None:
    rig.equal("MHz", rig.characteristics().max_freq // 10**6, clock_range(rig).max_hz // 10**6)


@rule("3.6", "CLK_GET_RANGE: with flag 1 the domain is read from the entry, and only 1 exists")
def range_by_domain(rig: Rig) -> None:
    for domain, number in ((GPC, 0), (k.NVGPU_GPU_CLK_DOMAIN_MCLK, errno.EINVAL), (5, errno.EINVAL)):
        item = s.GpuClkRangeItem(clk_domain=domain)
        fields = {"flags": BY_DOMAIN, "num_entries": 1, "clk_range_entries": ctypes.addressof(item)}
        if number:
            rig.refuses(number, rig.ctrl, "GPU_CLK_GET_RANGE", fields)
        else:
            rig.accepts(rig.ctrl, "GPU_CLK_GET_RANGE", fields)
            rig.equal("maximum", clock_range(rig).max_hz, item.max_hz)


@rule("3.6", "CLK_GET_RANGE: with flag 1, more entries than domains are EINVAL")
def range_entries(rig: Rig) -> None:
    items = (s.GpuClkRangeItem * 2)(s.GpuClkRangeItem(clk_domain=GPC), s.GpuClkRangeItem(clk_domain=GPC))
    fields = {"flags": BY_DOMAIN, "num_entries": 2, "clk_range_entries": ctypes.addressof(items)}
    rig.refuses(errno.EINVAL, rig.ctrl, "GPU_CLK_GET_RANGE", fields)


@rule("3.6", "CLK_GET_INFO: with flag 1 each entry names its type")
def info_by_entry(rig: Rig) -> None:
    kinds = (ACTUAL, EFFECTIVE)
    items = (s.GpuClkInfo * 2)(*(s.GpuClkInfo(clk_domain=GPC, clk_type=kind) for kind in kinds))
    fields = {"flags": BY_DOMAIN, "num_entries": 2, "clk_type": 77, "clk_info_entries": ctypes.addressof(items)}
    rig.accepts(rig.ctrl, "GPU_CLK_GET_INFO", fields)
    rig.check(all(item.freq_hz for item in items), "two clocks", [item.freq_hz for item in items])


@rule("3.6", "CLK_GET_INFO: types other than target, actual and effective are EINVAL")
def info_types(rig: Rig) -> None:
    for kind in (TARGET, ACTUAL, EFFECTIVE):
        clock(rig, kind)
    item = s.GpuClkInfo()
    for kind in (0, 4):
        fields = {"clk_type": kind, "num_entries": 1, "clk_info_entries": ctypes.addressof(item)}
        rig.refuses(errno.EINVAL, rig.ctrl, "GPU_CLK_GET_INFO", fields)


POINTS = Calls("3.6", "GPU_CLK_GET_VF_POINTS", ctrl)
POINTS.refuses("vf-flags", "flags are", errno.EINVAL, flags=1, clk_domain=GPC)
POINTS.refuses("vf-domain", "another domain is", errno.EINVAL, clk_domain=k.NVGPU_GPU_CLK_DOMAIN_MCLK)


@rule("3.6", "CLK_GET_VF_POINTS: room for less than all is EINVAL")
def vf_room(rig: Rig) -> None:
    count = rig.call(rig.ctrl, "GPU_CLK_GET_VF_POINTS", clk_domain=GPC).max_entries
    rig.check(count > 1, "some points", count)
    fields = {"clk_domain": GPC, "max_entries": count - 1, "clk_vf_point_entries": rig.memory(PAGE).address}
    rig.refuses(errno.EINVAL, rig.ctrl, "GPU_CLK_GET_VF_POINTS", fields)


@rule("3.6", "CLK_GET_VF_POINTS: different frequencies within the range")
def vf_values(rig: Rig) -> None:
    points, limits = vf_points(rig), clock_range(rig)
    rig.equal("different ones", len(points), len(set(points)))
    within = [limits.min_hz <= point <= limits.max_hz for point in points]
    rig.check(points and all(within), "points in the range", points)


def requests(rig: Rig, domain: int = GPC) -> int:
    """The address of two entries of CLK_SET_INFO that ask for the GPC clock's highest rate."""
    room, one = rig.memory(PAGE), s.GpuClkInfo(clk_domain=domain, freq_hz=clock_range(rig).max_hz)
    room.write(bytes(one) * 2)
    return room.address


SET_INFO = Calls("3.6", "GPU_CLK_SET_INFO", ctrl, lambda rig: {"num_entries": 1, "clk_info_entries": requests(rig)})
SET_INFO.refuses("set-flags", "flags is", errno.EINVAL, flags=1)
SET_INFO.refuses("set-no-entry", "no entry is", errno.EINVAL, num_entries=0)
SET_INFO.refuses("set-entries", "more entries than domains is", errno.EINVAL, num_entries=2)
SET_INFO.refuses(
    "set-domain",
    "another domain is",
    errno.EINVAL,
    clk_info_entries=lambda rig: requests(rig, k.NVGPU_GPU_CLK_DOMAIN_MCLK),
)
SET_INFO.refuses("set-bad-address", "entries that cannot be read are", errno.EFAULT, clk_info_entries=Rig.bad_address)


@rule("3.6", "CLK_SET_INFO: the completion fd becomes readable")
def completion(rig: Rig) -> None:
    fd = ask_for(rig, clock_range(rig).max_hz)
    rig.check(select.select([fd], [], [], rig.patience)[0], "POLLIN", "nothing in time")


@rule("3.6", "CLK_SET_INFO: the requested rate is set while the completion fd is open")
def clock_held(rig: Rig) -> None:
    low, high = clock_limits(rig)
    points = sorted(point for point in vf_points(rig) if low <= point <= high)
    rig.need(points, "no rate of the clock's lies within Linux's limits")
    wanted = points[len(points) // 2]
    ask_for(rig, wanted)
    rig.eventually(lambda: clock(rig, ACTUAL) == wanted, f"{wanted} Hz", lambda: clock(rig, ACTUAL))


@rule("3.6", "CLK_SET_INFO: a rate above the maximum is cut to it")
def clock_clamped(rig: Rig) -> None:
    _, high = clock_limits(rig)
    ask_for(rig, clock_range(rig).max_hz + 10**9)
    rig.eventually(lambda: clock(rig, ACTUAL) == high, f"{high} Hz", lambda: clock(rig, ACTUAL))


@rule("3.6", "CLK_GET_INFO: the target is what this ctrl fd asked for")
def own_target(rig: Rig) -> None:
    wanted = clock_range(rig).min_hz
    ask_for(rig, wanted)
    rig.eventually(lambda: clock(rig, TARGET) == wanted, f"{wanted} Hz", lambda: clock(rig, TARGET))
    rig.equal("target of another ctrl fd", 0, clock(rig, TARGET, ctrl=rig.open_ctrl()))


@rule("3.6", "CLK_SET_INFO: of several ctrl fds the highest request counts")
def highest_target(rig: Rig) -> None:
    low, high = clock_limits(rig)
    ask_for(rig, high)
    ask_for(rig, low, ctrl=rig.open_ctrl())
    rig.eventually(lambda: clock(rig, ACTUAL) == high, f"{high} Hz", lambda: clock(rig, ACTUAL))


# ---- 3.7 registered buffers -----------------------------------------------------------------------------------------

MUTABLE, MODIFY = k.NVGPU_GPU_REGISTER_BUFFER_FLAGS_MUTABLE, k.NVGPU_GPU_REGISTER_BUFFER_FLAGS_MODIFY
NOTES = b"what a client says of its buffer"


def registration(rig: Rig, fd: int, data: bytes = NOTES, *, flags: int = 0, **fields: int) -> dict[str, int]:
    """The fields of a REGISTER_BUFFER."""
    room = rig.memory(len(data) + 1)
    room.write(data)
    return {"dmabuf_fd": fd, "metadata_addr": room.address, "metadata_size": len(data), "flags": flags} | fields


def info(rig: Rig, fd: int, room: int = 256) -> tuple[s.GpuGetBufferInfo, bytes]:
    """GET_BUFFER_INFO with room for so many bytes of metadata, and what came there."""
    memory = rig.memory(PAGE)
    fields = {"in_.dmabuf_fd": fd, "in_.metadata_addr": memory.address, "in_.metadata_size": room}
    found = rig.accepts(rig.ctrl, "GPU_GET_BUFFER_INFO", fields)
    return found, memory.read(0, 256).rstrip(b"\0")


@rule("3.7", "REGISTER_BUFFER: metadata of 257 bytes is EINVAL, of 256 not")
def metadata_size(rig: Rig) -> None:
    buffer = rig.buffer()
    rig.refuses(errno.EINVAL, rig.ctrl, "GPU_REGISTER_BUFFER", registration(rig, buffer.fd, bytes(257)))
    rig.accepts(rig.ctrl, "GPU_REGISTER_BUFFER", registration(rig, buffer.fd, bytes(256)))


@rule("3.7", "REGISTER_BUFFER: a second time without MODIFY is EINVAL")
def registered_twice(rig: Rig) -> None:
    buffer = rig.buffer()
    rig.call(rig.ctrl, "GPU_REGISTER_BUFFER", registration(rig, buffer.fd, flags=MUTABLE))
    rig.refuses(errno.EINVAL, rig.ctrl, "GPU_REGISTER_BUFFER", registration(rig, buffer.fd, flags=MUTABLE))


@rule("3.7", "REGISTER_BUFFER: what was not registered as MUTABLE cannot be modified")
def immutable(rig: Rig) -> None:
    buffer = rig.buffer()
    rig.call(rig.ctrl, "GPU_REGISTER_BUFFER", registration(rig, buffer.fd))
    rig.refuses(errno.EINVAL, rig.ctrl, "GPU_REGISTER_BUFFER", registration(rig, buffer.fd, flags=MODIFY))


@rule("3.7", "REGISTER_BUFFER: MUTABLE metadata can be replaced with MODIFY")
def modified(rig: Rig) -> None:
    buffer = rig.buffer()
    rig.call(rig.ctrl, "GPU_REGISTER_BUFFER", registration(rig, buffer.fd, flags=MUTABLE))
    rig.accepts(rig.ctrl, "GPU_REGISTER_BUFFER", registration(rig, buffer.fd, b"new", flags=MODIFY))
    rig.equal("metadata", b"new", info(rig, buffer.fd, 3)[1])


REGISTER = Calls("3.7", "GPU_REGISTER_BUFFER", ctrl, lambda rig: registration(rig, rig.buffer().fd))
REGISTER.refuses("register-bad-fd", "an fd that is not open is", errno.EBADF, dmabuf_fd=NO_FD)
REGISTER.refuses("register-no-dmabuf", "an fd that is no dmabuf is", errno.EINVAL, dmabuf_fd=ctrl)
REGISTER.refuses("comptag-control", "an unknown compression tag control is", errno.EINVAL, comptags_alloc_control=3)


@rule("3.7", "REGISTER_BUFFER: metadata that cannot be read is EFAULT, and nothing is registered")
def register_bad_address(rig: Rig) -> None:
    buffer = rig.buffer()
    fields = registration(rig, buffer.fd, metadata_addr=rig.bad_address())
    rig.refuses(errno.EFAULT, rig.ctrl, "GPU_REGISTER_BUFFER", fields)
    rig.equal("flags", 0, info(rig, buffer.fd)[0].out.flags)


@rule("3.7", "GET_BUFFER_INFO: works on a buffer that is not registered and says so, with its size")
def unregistered(rig: Rig) -> None:
    found, _ = info(rig, rig.buffer(3 * PAGE - 1).fd)
    seen = (found.out.flags, found.out.metadata_size, found.out.size)
    rig.equal("flags, metadata size, size", (0, 0, 3 * PAGE), seen)


@rule("3.7", "GET_BUFFER_INFO: tells the metadata that fits, its whole size and the flags")
def registered_info(rig: Rig) -> None:
    buffer = rig.buffer()
    rig.call(rig.ctrl, "GPU_REGISTER_BUFFER", registration(rig, buffer.fd, flags=MUTABLE))
    found, data = info(rig, buffer.fd, 8)
    wanted = k.NVGPU_GPU_BUFFER_INFO_FLAGS_METADATA_REGISTERED | k.NVGPU_GPU_BUFFER_INFO_FLAGS_MUTABLE_METADATA
    rig.equal("flags and size", (wanted, len(NOTES)), (found.out.flags, found.out.metadata_size))
    rig.equal("metadata", NOTES[:8], data)


@rule("3.7", "GET_BUFFER_INFO: metadata belongs to the buffer, not to the fd that registered it")
def metadata_of_the_buffer(rig: Rig) -> None:
    buffer = rig.buffer()
    rig.call(rig.ctrl, "GPU_REGISTER_BUFFER", registration(rig, buffer.fd))
    again = rig.get_fd(buffer.handle)
    rig.close(buffer.fd)
    rig.equal("metadata", NOTES, info(rig, again, len(NOTES))[1])


@rule("3.7", "GET_BUFFER_INFO: an fd that is not open is EBADF, one that is no dmabuf EINVAL")
def info_refused(rig: Rig) -> None:
    rig.refuses(errno.EBADF, rig.ctrl, "GPU_GET_BUFFER_INFO", {"in_.dmabuf_fd": NO_FD})
    rig.refuses(errno.EINVAL, rig.ctrl, "GPU_GET_BUFFER_INFO", {"in_.dmabuf_fd": rig.ctrl})


# ---- 3.8 SET_DETERMINISTIC_OPTS -------------------------------------------------------------------------------------

ALLOW = k.NVGPU_GPU_SET_DETERMINISTIC_OPTS_FLAGS_ALLOW_RAILGATING
DISALLOW = k.NVGPU_GPU_SET_DETERMINISTIC_OPTS_FLAGS_DISALLOW_RAILGATING
OPTS = "GPU_SET_DETERMINISTIC_OPTS"


def listed(rig: Rig, *fds: int) -> int:
    """The address of an array of channel fds."""
    room = rig.memory(PAGE)
    for i, fd in enumerate(fds):
        room.put32(fd, 4 * i)
    return room.address


def opts(rig: Rig, fds: list[int], flags: int) -> dict[str, int]:
    """The fields of a SET_DETERMINISTIC_OPTS for these channels."""
    return {"num_channels": len(fds), "flags": flags, "channels": listed(rig, *fds)}


OF_ONE = Calls("3.8", OPTS, ctrl, lambda rig: {"num_channels": 1, "flags": 0})
OF_ONE.refuses("opts-count", "more than 512 channels are", errno.EINVAL, num_channels=513, channels=Rig.bad_address)
OF_ONE.refuses("opts-bad-address", "an array that cannot be read is", errno.EFAULT, channels=Rig.bad_address)
OF_ONE.refuses(
    "opts-no-channel", "an fd that is no channel is", errno.EINVAL, channels=lambda rig: listed(rig, rig.tsg())
)
OF_ONE.refuses(
    "opts-not-deterministic",
    "a channel that is not deterministic is",
    errno.EINVAL,
    flags=ALLOW,
    channels=lambda rig: listed(rig, bound(rig)),
)
OF_ONE.refuses(
    "opts-both", "both flags are", errno.EINVAL, flags=ALLOW | DISALLOW, channels=lambda rig: listed(rig, ready(rig))
)


@rule("3.8", "SET_DETERMINISTIC_OPTS: both flags without a channel are not looked at")
def opts_both_for_nobody(rig: Rig) -> None:
    rig.equal("channels done", 0, rig.accepts(rig.ctrl, OPTS, opts(rig, [], ALLOW | DISALLOW)).num_channels)


@rule("3.8", "SET_DETERMINISTIC_OPTS: neither flag does nothing, unknown flags are ignored")
def opts_neither(rig: Rig) -> None:
    channel = rig.channel_ready().fd
    for flags in (0, 4, 0xFFFFFFFC):
        rig.accepts(rig.ctrl, OPTS, opts(rig, [channel], flags))


@rule(
    "3.8", "SET_DETERMINISTIC_OPTS: railgating is allowed and disallowed again; num_channels tells how many were done"
)
def opts_done(rig: Rig) -> None:
    channels = [rig.channel_ready().fd for _ in range(2)]
    for flags in (ALLOW, DISALLOW, DISALLOW):
        rig.equal("channels done", 2, rig.accepts(rig.ctrl, OPTS, opts(rig, channels, flags)).num_channels)


@rule("3.8", "SET_DETERMINISTIC_OPTS: stops at the first channel that fails")
def opts_first_failure(rig: Rig) -> None:
    """The second fd of the array cannot be read, and is not."""
    first = rig.tsg().to_bytes(4, "little")
    rig.refuses(errno.EINVAL, rig.ctrl, OPTS, num_channels=2, flags=0, channels=rig.edge(first))


# ---- 3.9 the usermode registers -------------------------------------------------------------------------------------


def maps(rig: Rig, fd: int, size: int = USERMODE_SIZE) -> Doorbell:
    """The rule: the registers can be mapped."""
    return rig.succeeds(f"a mapping of {size:#x} bytes", lambda: rig.doorbell(fd, size))


@rule("3.9", "mmap of the ctrl fd: a second mapping of the same fd is EBUSY, until the first is unmapped")
def one_mapping(rig: Rig) -> None:
    first = rig.doorbell()
    rig.fails(errno.EBUSY, "a second mapping", rig.doorbell)
    first.close()
    maps(rig, rig.ctrl)


@rule("3.9", "mmap of the ctrl fd: each ctrl fd may have a mapping")
def mapping_per_fd(rig: Rig) -> None:
    rig.doorbell()
    maps(rig, rig.open_ctrl())


@rule("3.9", "mmap of the ctrl fd: more than 64 KiB is EINVAL")
def mapping_too_long(rig: Rig) -> None:
    rig.fails(errno.EINVAL, "a mapping of 128 KiB", lambda: rig.doorbell(size=2 * USERMODE_SIZE))


@rule("3.9", "mmap of the ctrl fd: any smaller number of pages works")
def mapping_smaller(rig: Rig) -> None:
    for size in (PAGE, 4 * PAGE, USERMODE_SIZE):
        maps(rig, rig.ctrl, size).close()


@rule("3.9", "mmap of the ctrl fd: an offset is EINVAL")
def mapping_offset(rig: Rig) -> None:
    rig.refuses_mmap(errno.EINVAL, rig.ctrl, PAGE, offset=PAGE)


@rule("3.9", "mmap of the ctrl fd: EBUSY is checked before length and offset")
def busy_first(rig: Rig) -> None:
    rig.doorbell()
    rig.fails(errno.EBUSY, "a second mapping of 128 KiB", lambda: rig.doorbell(size=2 * USERMODE_SIZE))


@rule("3.9", "register 0 holds the usermode class id in its low 16 bits")
def class_register(rig: Rig) -> None:
    seen = rig.doorbell().load32(0)
    rig.check(seen & 0xFFFF and seen & 0xFF in (0x61, 0x60), "a class id of the usermode family", seen)


@rule("3.9", "TIME_0 has its low five bits zero")
def time_register(rig: Rig) -> None:
    registers = rig.doorbell()
    rig.equal("low bits", 0, registers.load32(0x80) & 31)


@rule("3.9", "TIME_0 and TIME_1 are the GPU's clock")
def time_registers(rig: Rig) -> None:
    registers = rig.doorbell()
    before = gpu_time(rig)
    high, low = registers.load32(0x84), registers.load32(0x80)
    if registers.load32(0x84) != high:
        high, low = registers.load32(0x84), registers.load32(0x80)
    after = gpu_time(rig)
    rig.check(before <= (high << 32 | low) <= after, f"a time from {before} to {after}", high << 32 | low)


@rule("3.9", "unknown registers read 0 and take writes without an effect", hazardous=True)
def unknown_registers(rig: Rig) -> None:
    registers = rig.doorbell()
    for offset in (0x1000, 0x1230):
        registers.store32(offset, 0xFFFFFFFF)
        rig.equal(f"register {offset:#x}", 0, registers.load32(offset))


def stays_alive(rig: Rig, channel: RigChannel) -> None:
    """The rule: the channel does not die within the time that a fault takes to be handled."""
    died = rig.wait(lambda: rig.timed_out(channel.fd), seconds=0.3)
    rig.check(not died, "a channel that lives", "GET_TIMEDOUT 1")


@rule("3.9", "a doorbell with a token that is no channel's is ignored")
def bad_token(rig: Rig) -> None:
    channel, registers = rig.channel_ready(), rig.doorbell()
    for token in (0xFFFFFFFF, 0x7F0000 | channel.token, 0xFFF):
        registers.store32(0x90, token)
    stays_alive(rig, channel)


@rule("3.9", "a doorbell with GP_PUT equal to GP_GET is harmless")
def idle_doorbell(rig: Rig) -> None:
    channel, registers = rig.channel_ready(), rig.doorbell()
    for _ in range(10):
        registers.store32(0x90, channel.token)
    stays_alive(rig, channel)
