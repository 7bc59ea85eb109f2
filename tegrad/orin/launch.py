"""Launch descriptors: what a QMD of either version asks for, and what the scheduler (SKED) refuses.

A QMD is decoded once per content: replays launch the same bytes over and over.
Sources: NVIDIA open-gpu-doc clc7c0qmd.h and clcbc0qmd.h; SKED bits from the GA100 manual; limits from the chip's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from tegrad.hw.chips import Chip
from tegrad.hw.faults import SkedBit
from tegrad.hw.qmd import LAYOUTS, QmdLayout

MAX_THREADS = 1024
MAX_REGISTERS = 255
REGISTER_UNIT = 256
"""Registers are allocated to warps in this many, and warps in fours."""

RESERVED_SHARED = 1024
"""Bytes of shared memory per CTA that belong to the system: part of the QMD's size, not of the program's limit."""

SHARED_UNIT = 128
WINDOWS_APART = 1 << 24
"""Bytes between the windows for shared and local memory below which they overlap. Mesa's NVK sets 0xFE000000 and
0xFF000000, and launches with these ran on an Orin Nano (docs/board.md); how long a window is nobody has published."""
MAX_CONSTANT_BUFFER = 65536
LOCAL_UNIT = 16
LOCAL_WARP_UNIT = 0x200
PROGRAM_ALIGN = 128

_RECORDS_V3 = {(structure, wide): size for structure, size in enumerate((16, 4, 8, 16)) for wide in (False, True)}
_RECORDS_V4 = {form: size for form, size in _RECORDS_V3.items() if form[0] < 3 and form != (1, True)}
"""Bytes of a release by (structure size, 64-bit payload). Structures are four words, one, two. On an H200 a version 4
release of one word with a 64-bit payload stored nothing and its launch never ended."""

GRID_NULL, GRID_CTA, GRID_GPC_CGA = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Release:
    """A semaphore release at the end of a grid; `reduction` None for a plain store.

    `record` is its size in bytes, 0 for a form that stores nothing.
    """

    va: int
    payload: int
    record: int
    wide: bool
    reduction: int | None
    signed: bool
    trap: int
    membar: bool


@dataclass(frozen=True, slots=True)
class Dependent:
    """What to do to another QMD at the end of a grid."""

    va: int
    action: int


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """What a QMD says about its grid, short of what changes from launch to launch.

    `membar` orders the grid's stores before its releases; without it a release may have its own (`Release.membar`).
    `refusals` is the SKED exception register for what is wrong whatever the channel's state, `why` the same in words.
    `empty` is a QMD without a grid.
    """

    version: tuple[int, int]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    program: int
    shared: int
    barriers: int
    bank_size: int
    bank_valid: bool
    invalidate_bank: bool
    invalidate_constants: bool
    invalidate_instructions: bool
    local_per_thread: int
    membar: bool
    refusals: int
    why: str
    empty: bool


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A decoded QMD: its shape, the address of constant bank 0, and what happens at its end."""

    shape: LaunchShape
    bank: int
    dependence: int
    releases: tuple[Release, ...]
    dependents: tuple[Dependent, ...]


class _Fields:
    """The fields of one QMD, by name."""

    __slots__ = ("_bits", "_value")

    def __init__(self, layout: QmdLayout, value: int) -> None:
        self._bits = layout.bits
        self._value = value

    def __call__(self, name: str) -> int:
        hi, lo = self._bits[name]
        return self._value >> lo & ((1 << (hi - lo + 1)) - 1)

    def pair(self, upper: str, lower: str) -> int:
        return self(upper) << 32 | self(lower)


def _release(
    get: _Fields,
    enable: str,
    upper: str,
    lower: str,
    payload: tuple[str, str],
    prefix: str,
    suffix: str,
    records: Mapping[tuple[int, bool], int],
) -> Release | None:
    if not get(enable):
        return None
    wide = bool(get(f"{prefix}payload64b{suffix}"))
    value = get.pair(*payload)
    return Release(
        va=get.pair(upper, lower),
        payload=value if wide else value & 0xFFFFFFFF,
        record=records.get((get(f"{prefix}structure_size{suffix}"), wide), 0),
        wide=wide,
        reduction=get(f"{prefix}reduction_op{suffix}") if get(f"{prefix}reduction_enable{suffix}") else None,
        signed=bool(get(f"{prefix}reduction_format{suffix}") & 1),
        trap=get(f"{prefix}trap_type{suffix}"),
        membar=bool(get(f"{prefix}membar_type{suffix}")),
    )


def _releases_v3(get: _Fields) -> Iterator[Release | None]:
    for i in range(3):
        p = f"release{i}_"
        upper, lower, payload = p + "address_upper", p + "address_lower", (p + "payload_upper", p + "payload_lower")
        yield _release(get, p + "enable", upper, lower, payload, p, "", _RECORDS_V3)


def _releases_v4(get: _Fields) -> Iterator[Release | None]:
    for i in range(3):
        p = f"release_semaphore{i}_"
        upper, lower, payload = p + "addr_upper", p + "addr_lower", (p + "payload_upper", p + "payload_lower")
        yield _release(get, f"release_enable_{i}", upper, lower, payload, "release_", f"_{i}", _RECORDS_V4)


def _dependents_v3(get: _Fields) -> Iterator[Dependent]:
    if get("dependent_qmd0_enable"):
        yield Dependent(get("dependent_qmd0_pointer") << 8, get("dependent_qmd0_action"))


def _dependents_v4(get: _Fields) -> Iterator[Dependent]:
    for i in range(2):
        if get(f"dependent_qmd_enable_{i}"):
            yield Dependent(get(f"dependent_qmd{i}_pointer") << 8, get(f"dependent_qmd_action_{i}"))


@dataclass(frozen=True, slots=True)
class _Version:
    """Where the versions differ in the names of fields, or in what they can say."""

    grid: tuple[str, str, str]
    registers: str
    bank: Callable[[_Fields], int]
    releases: Callable[[_Fields], Iterator[Release | None]]
    dependents: Callable[[_Fields], Iterator[Dependent]]
    shape: Callable[[_Fields], tuple[bool, str]]
    """Whether there is no grid at all, and what is not emulated of it, or nothing."""
    least_shared: int
    """The least shared memory size. Launches with 0 ran on an Orin Nano (docs/board.md); version 4 was not tried."""


def _shape_v3(get: _Fields) -> tuple[bool, str]:
    if get("is_queue"):
        return False, "queue QMDs are not emulated"
    return False, ""


def _shape_v4(get: _Fields) -> tuple[bool, str]:
    kind = get("qmd_type")
    if kind == GRID_GPC_CGA and max(get(f"gpc_cga_{axis}") for axis in ("width", "height", "depth")) <= 1:
        return False, ""
    if kind not in (GRID_NULL, GRID_CTA):
        return False, f"QMD type {kind} is not emulated"
    return kind == GRID_NULL, ""


_VERSIONS: Mapping[str, _Version] = {
    "V3": _Version(
        ("cta_raster_width", "cta_raster_height", "cta_raster_depth"),
        "register_count_v",
        lambda get: get.pair("constant_buffer_addr_upper_0", "constant_buffer_addr_lower_0"),
        _releases_v3,
        _dependents_v3,
        _shape_v3,
        0,
    ),
    "V4": _Version(
        ("grid_width", "grid_height", "grid_depth"),
        "register_count",
        lambda get: get.pair("constant_buffer_addr_upper_shifted6_0", "constant_buffer_addr_lower_shifted6_0") << 6,
        _releases_v4,
        _dependents_v4,
        _shape_v4,
        RESERVED_SHARED,
    ),
}


def _round_up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit


def _register_file(threads: int, registers: int) -> int:
    warps = _round_up((threads + 31) // 32, 4)
    return warps * _round_up(registers * 32, REGISTER_UNIT)


def _refusals(chip: Chip, get: _Fields, names: _Version) -> Iterator[tuple[SkedBit, str]]:
    block = [get(f"cta_thread_dimension{i}") for i in range(3)]
    grid = [get(name) for name in names.grid]
    threads = block[0] * block[1] * block[2]
    if 0 in grid or 0 in block:
        yield SkedBit.ZERO_CTA_DIMENSION, f"grid {grid}, block {block}"
    if threads > MAX_THREADS:
        yield SkedBit.TOTAL_THREADS, f"{threads} threads in a CTA, limit {MAX_THREADS}"
    registers = get(names.registers)
    if registers > MAX_REGISTERS:
        yield SkedBit.REGISTER_COUNT, f"{registers} registers a thread, limit {MAX_REGISTERS}"
    elif _register_file(threads, registers) > chip.regs_per_sm:
        yield SkedBit.CTA_REGISTER_CONSUMPTION, f"{registers} registers for {threads} threads exceed {chip.regs_per_sm}"
    shared, limit = get("shared_memory_size"), chip.smem_per_cta + RESERVED_SHARED
    if not names.least_shared <= shared <= limit or shared % SHARED_UNIT:
        least = names.least_shared
        yield SkedBit.SHARED_MEMORY_SIZE, f"shared size {shared:#x}: {least:#x} to {limit:#x} in steps of 128"
    elif (config := get("max_sm_config_shared_mem_size")) and (config - 1) * 4096 < shared:
        yield SkedBit.L1_CONFIG_TOO_SMALL, f"shared size {shared:#x} but the largest configuration is {config:#x}"
    for i in range(8):
        size = get(f"constant_buffer_size_shifted4_{i}") << 4
        if get(f"constant_buffer_valid_{i}") and size > MAX_CONSTANT_BUFFER:
            yield SkedBit.CONSTANT_BUFFER_SIZE, f"{size} bytes of constant buffer {i}, limit {MAX_CONSTANT_BUFFER}"
    if get("shader_local_memory_low_size") % LOCAL_UNIT:
        yield SkedBit.LOCAL_MEMORY_LOW_SIZE, "local memory size (low) is not a multiple of 16"
    if get("shader_local_memory_high_size") % LOCAL_UNIT:
        yield SkedBit.LOCAL_MEMORY_HIGH_SIZE, "local memory size (high) is not a multiple of 16"
    program = get.pair("program_address_upper", "program_address_lower")
    if program % PROGRAM_ALIGN:
        yield SkedBit.PROGRAM_OFFSET, f"program address {program:#x} is not a multiple of {PROGRAM_ALIGN}"


_CHANGING = ("release", "dependent_qmd", "dependence_counter", "constant_buffer_addr")
"""Prefixes of the fields that are not part of a shape."""


def _shape_mask(layout: QmdLayout) -> int:
    mask = 0
    for name, (hi, lo) in layout.bits.items():
        if not name.startswith(_CHANGING):
            mask |= ((1 << (hi - lo + 1)) - 1) << lo
    return mask


def _shape(chip: Chip, layout: QmdLayout, names: _Version, get: _Fields) -> LaunchShape:
    empty, unknown = names.shape(get)
    refused = [] if empty else list(_refusals(chip, get, names))
    if unknown:
        refused.append((SkedBit.QUEUE_SIZE, unknown))
    esr = 0
    for bit, _ in refused:
        esr |= 1 << bit
    return LaunchShape(
        version=(get("qmd_major_version"), get(layout.minor_field)),
        grid=(get(names.grid[0]), get(names.grid[1]), get(names.grid[2])),
        block=(get("cta_thread_dimension0"), get("cta_thread_dimension1"), get("cta_thread_dimension2")),
        program=get.pair("program_address_upper", "program_address_lower"),
        shared=max(RESERVED_SHARED, get("shared_memory_size")),
        barriers=get("barrier_count"),
        bank_size=get("constant_buffer_size_shifted4_0") << 4,
        bank_valid=bool(get("constant_buffer_valid_0")),
        invalidate_bank=bool(get("constant_buffer_invalidate_0")),
        invalidate_constants=bool(get("invalidate_shader_constant_cache")),
        invalidate_instructions=bool(get("invalidate_instruction_cache")),
        local_per_thread=get("shader_local_memory_low_size") + get("shader_local_memory_high_size"),
        membar=bool(get("cwd_membar_type")),
        refusals=esr,
        why="; ".join(text for _, text in refused),
        empty=empty,
    )


@cache
def decoder(chip: Chip) -> Callable[[bytes], LaunchSpec]:
    """The function that decodes a QMD of this chip's version; shapes are decoded once."""
    layout, names = LAYOUTS[chip.qmd], _VERSIONS[chip.qmd]
    mask = _shape_mask(layout)

    @lru_cache(maxsize=4096)
    def shape(masked: int) -> LaunchShape:
        return _shape(chip, layout, names, _Fields(layout, masked))

    def decode(raw: bytes) -> LaunchSpec:
        value = int.from_bytes(raw, "little")
        get = _Fields(layout, value)
        return LaunchSpec(
            shape=shape(value & mask),
            bank=names.bank(get),
            dependence=get("dependence_counter"),
            releases=tuple(r for r in names.releases(get) if r is not None),
            dependents=tuple(names.dependents(get)),
        )

    return decode


def windows_overlap(shared: int, local: int) -> bool:
    """Whether the shader windows at these addresses are missing or collide."""
    return not shared or not local or abs(shared - local) < WINDOWS_APART


def window_size(chip: Chip, shared: int, local: int) -> int:
    """Bytes after the start of each window that kernels see no global memory in: at most up to the other window."""
    return min(chip.window_size, abs(shared - local))


def local_memory_per_tpc(chip: Chip, per_thread: int) -> int:
    """Bytes of local memory that one TPC needs for its full set of warps."""
    return _round_up(per_thread * 32, LOCAL_WARP_UNIT) * chip.warps_per_sm * chip.sm_per_tpc
