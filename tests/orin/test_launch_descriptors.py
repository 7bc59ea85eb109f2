"""Launch descriptors without a GPU: what each field of a QMD says of a launch, and where the scheduler's limits lie."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tegrad.hw.chips import CHIPS, Chip
from tegrad.hw.faults import SkedBit
from tegrad.hw.qmd import LAYOUTS, Qmd
from tegrad.orin import launch, semaphore
from tegrad.orin.grid import Counters, GridRunner
from tegrad.orin.launch import (
    WINDOWS_APART,
    Dependent,
    LaunchShape,
    LaunchSpec,
    Release,
    decoder,
    local_memory_per_tpc,
    window_size,
    windows_overlap,
)
from tegrad.orin.memory import AddressSpace, HubClient
from tegrad.orin.program import Modules

ORIN, HOPPER = CHIPS["agx-orin-64gb"], CHIPS["gh100"]
GRID = {
    "V3": ("cta_raster_width", "cta_raster_height", "cta_raster_depth"),
    "V4": ("grid_width", "grid_height", "grid_depth"),
}
REGISTERS = {"V3": "register_count_v", "V4": "register_count"}
MINOR = {"V3": "qmd_version", "V4": "qmd_minor_version"}
RESERVED = 1024


@pytest.fixture(params=[ORIN, HOPPER], ids=lambda chip: chip.name)
def chip(request: pytest.FixtureRequest) -> Chip:
    """A chip of either version."""
    found: Chip = request.param
    return found


def decoded(
    chip: Chip,
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (1, 1, 1),
    registers: int = 32,
    shared: int = RESERVED,
    **fields: int,
) -> LaunchSpec:
    """A descriptor that the scheduler takes, with some fields changed."""
    layout = LAYOUTS[chip.qmd]
    memory = bytearray(layout.size)
    base = {"qmd_type": 2} if chip.qmd == "V4" else {}
    base |= dict(zip(GRID[chip.qmd], grid, strict=True))
    base |= {f"cta_thread_dimension{axis}": size for axis, size in enumerate(block)}
    base |= {REGISTERS[chip.qmd]: registers, "shared_memory_size": shared}
    Qmd(layout, memory).write(**(base | fields))
    return decoder(chip)(bytes(memory))


def refused(chip: Chip, **given: Any) -> set[SkedBit]:
    """Whose bits the scheduler would report."""
    shape = decoded(chip, **given).shape
    assert (shape.why == "") == (shape.refusals == 0)
    return {bit for bit in SkedBit if shape.refusals >> bit & 1}


# -- what a shape says -----------------------------------------------------------------------------------------------


def test_each_part_of_a_shape_is_read_from_its_own_field(chip: Chip) -> None:
    fields = {
        "qmd_major_version": 5,
        MINOR[chip.qmd]: 6,
        "program_address_upper": 0x12,
        "program_address_lower": 0x3400_0080,
        "barrier_count": 9,
        "constant_buffer_size_shifted4_0": 0x123,
        "shader_local_memory_low_size": 0x10,
        "shader_local_memory_high_size": 0x220,
    }
    shape = decoded(chip, grid=(7, 8, 9), block=(2, 3, 4), shared=0x800, **fields).shape
    assert shape == LaunchShape(
        version=(5, 6),
        grid=(7, 8, 9),
        block=(2, 3, 4),
        program=0x12_3400_0080,
        shared=0x800,
        barriers=9,
        bank_size=0x1230,
        bank_valid=False,
        invalidate_bank=False,
        invalidate_constants=False,
        invalidate_instructions=False,
        local_per_thread=0x230,
        membar=False,
        refusals=0,
        why="",
        empty=False,
    )


FLAGS = {
    "constant_buffer_valid_0": "bank_valid",
    "constant_buffer_invalidate_0": "invalidate_bank",
    "invalidate_shader_constant_cache": "invalidate_constants",
    "invalidate_instruction_cache": "invalidate_instructions",
    "cwd_membar_type": "membar",
}


@pytest.mark.parametrize("field", FLAGS)
def test_each_flag_of_a_shape_is_its_own(chip: Chip, field: str) -> None:
    shape = decoded(chip, **{field: 1}).shape
    assert {name: getattr(shape, name) for name in FLAGS.values()} == {
        name: name == FLAGS[field] for name in FLAGS.values()
    }


def test_what_a_launch_is_described_by_has_room_for_its_fields_and_no_more() -> None:
    """There is one for each launch, and a field with a wrong name is an error."""
    made = [one for _, one in inspect.getmembers(launch, is_dataclass) if one.__module__ == launch.__name__]
    assert {LaunchSpec, LaunchShape, Release, Dependent} < set(made)
    assert [one.__name__ for one in made if one.__dictoffset__] == []


def test_a_grid_has_the_systems_shared_memory_at_least() -> None:
    assert decoded(ORIN, shared=0).shape.shared == RESERVED
    assert decoded(ORIN, shared=RESERVED + 128).shape.shared == RESERVED + 128


@pytest.mark.parametrize(
    ("kind", "group", "empty", "why"),
    [
        (0, (0, 0, 0), False, "QMD type 0 is not emulated"),
        (1, (0, 0, 0), True, ""),
        (2, (0, 0, 0), False, ""),
        (2, (2, 2, 2), False, ""),  # a type without clusters does not look at their size
        (3, (0, 0, 0), False, ""),
        (3, (1, 1, 1), False, ""),
        (3, (2, 1, 1), False, "QMD type 3 is not emulated"),
        (3, (1, 2, 1), False, "QMD type 3 is not emulated"),
        (3, (1, 1, 2), False, "QMD type 3 is not emulated"),
        (4, (1, 1, 1), False, "QMD type 4 is not emulated"),
        (5, (1, 1, 1), False, "QMD type 5 is not emulated"),
    ],
)
def test_version_4_runs_plain_grids_null_grids_and_clusters_of_one(
    kind: int, group: tuple[int, int, int], empty: bool, why: str
) -> None:
    names = ("gpc_cga_width", "gpc_cga_height", "gpc_cga_depth")
    shape = decoded(HOPPER, qmd_type=kind, **dict(zip(names, group, strict=True))).shape
    assert (shape.empty, shape.why, shape.refusals) == (empty, why, (1 << SkedBit.QUEUE_SIZE) if why else 0)


def test_a_null_grid_is_not_looked_at() -> None:
    shape = decoded(HOPPER, qmd_type=1, grid=(0, 0, 0), block=(0, 0, 0), registers=256, shared=64).shape
    assert (shape.empty, shape.refusals, shape.why) == (True, 0, "")


def test_version_3_has_queues_which_are_not_emulated() -> None:
    shape = decoded(ORIN, is_queue=1).shape
    assert (shape.empty, shape.refusals) == (False, 1 << SkedBit.QUEUE_SIZE)
    assert shape.why == "queue QMDs are not emulated"


# -- the scheduler's limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", range(3))
def test_a_grid_or_block_of_nothing_is_refused_along_each_axis(chip: Chip, axis: int) -> None:
    none = (*[1] * axis, 0, *[1] * (2 - axis))
    assert refused(chip, grid=none) == refused(chip, block=none) == {SkedBit.ZERO_CTA_DIMENSION}


def test_a_block_has_1024_threads_at_most_over_all_axes(chip: Chip) -> None:
    for block in ((1024, 1, 1), (1, 1024, 1), (1, 1, 1024), (8, 16, 8)):
        assert refused(chip, block=block) == set()
    for block in ((1025, 1, 1), (1, 1025, 1), (1, 1, 1025), (8, 16, 9)):
        assert refused(chip, block=block) == {SkedBit.TOTAL_THREADS}


def test_a_thread_has_255_registers_at_most(chip: Chip) -> None:
    assert refused(chip, registers=255) == set()
    assert refused(chip, registers=256) == {SkedBit.REGISTER_COUNT}


@pytest.mark.parametrize(
    ("threads", "registers", "fits"),
    [
        (1024, 64, True),  # 32 warps of 2048: all 65536
        (1024, 65, False),
        (768, 80, True),  # 24 warps of 2560
        (768, 81, False),  # 2816 a warp: registers go out in 256s
        (769, 80, False),  # 28 warps: they go out in fours
        (896, 72, True),  # 28 warps of 2304
        (897, 72, False),
        (1, 0, True),
    ],
)
def test_the_register_file_holds_whole_warps_in_fours(chip: Chip, threads: int, registers: int, fits: bool) -> None:
    expected = set() if fits else {SkedBit.CTA_REGISTER_CONSUMPTION}
    assert refused(chip, block=(threads, 1, 1), registers=registers) == expected


def test_shared_memory_goes_from_the_versions_least_to_the_chips_most_in_steps_of_128(chip: Chip) -> None:
    least, most = {"V3": 0, "V4": RESERVED}[chip.qmd], chip.smem_per_cta + RESERVED
    for size in (least, RESERVED, RESERVED + 128, most):
        assert refused(chip, shared=size) == set()
    for size in (RESERVED + 64, RESERVED + 127, RESERVED + 1, most + 128):
        assert refused(chip, shared=size) == {SkedBit.SHARED_MEMORY_SIZE}
    if least:
        assert refused(chip, shared=least - 128) == {SkedBit.SHARED_MEMORY_SIZE}
    assert (
        decoded(chip, shared=RESERVED + 64).shape.why == f"shared size 0x440: {least:#x} to {most:#x} in steps of 128"
    )


def test_the_largest_l1_configuration_holds_the_shared_memory(chip: Chip) -> None:
    for shared, config in ((4096, 2), (4096 + 128, 3), (8192, 3), (8192, 0)):  # 0 says nothing
        assert refused(chip, shared=shared, max_sm_config_shared_mem_size=config) == set()
    for shared, config in ((4096 + 128, 2), (8192 + 128, 3), (RESERVED, 1)):
        assert refused(chip, shared=shared, max_sm_config_shared_mem_size=config) == {SkedBit.L1_CONFIG_TOO_SMALL}


@pytest.mark.parametrize("bank", range(8))
def test_each_valid_constant_buffer_has_64_kib_at_most(chip: Chip, bank: int) -> None:
    size, valid = f"constant_buffer_size_shifted4_{bank}", f"constant_buffer_valid_{bank}"
    assert refused(chip, **{size: 0x1000, valid: 1}) == set()
    assert refused(chip, **{size: 0x1001, valid: 0}) == set()
    assert refused(chip, **{size: 0x1001, valid: 1}) == {SkedBit.CONSTANT_BUFFER_SIZE}
    assert decoded(chip, **{size: 0x1001, valid: 1}).shape.why == f"65552 bytes of constant buffer {bank}, limit 65536"


def test_sizes_of_local_memory_are_multiples_of_16(chip: Chip) -> None:
    assert refused(chip, shader_local_memory_low_size=32, shader_local_memory_high_size=16) == set()
    assert refused(chip, shader_local_memory_low_size=24) == {SkedBit.LOCAL_MEMORY_LOW_SIZE}
    assert refused(chip, shader_local_memory_high_size=8) == {SkedBit.LOCAL_MEMORY_HIGH_SIZE}


def test_programs_are_aligned_to_128(chip: Chip) -> None:
    assert refused(chip, program_address_lower=0x80, program_address_upper=1) == set()
    assert refused(chip, program_address_lower=0x40) == {SkedBit.PROGRAM_OFFSET}
    assert refused(chip, program_address_lower=0x81) == {SkedBit.PROGRAM_OFFSET}


def test_all_that_is_wrong_is_told_at_once(chip: Chip) -> None:
    shape = decoded(chip, grid=(0, 1, 1), registers=256, program_address_lower=0x40).shape
    bits = (SkedBit.ZERO_CTA_DIMENSION, SkedBit.REGISTER_COUNT, SkedBit.PROGRAM_OFFSET)
    assert shape.refusals == sum(1 << bit for bit in bits)
    assert shape.why == (
        "grid [0, 1, 1], block [1, 1, 1]; 256 registers a thread, limit 255; "
        "program address 0x40 is not a multiple of 128"
    )


# -- what changes from launch to launch ------------------------------------------------------------------------------


def release_fields(chip: Chip, index: int, **given: int) -> dict[str, int]:
    """Fields of one release, by the names of version 3."""
    made = {}
    for name, value in ({"enable": 1} | given).items():
        if chip.qmd == "V3":
            made[f"release{index}_{name}"] = value
        elif name.startswith(("address", "payload_")):
            made[f"release_semaphore{index}_{name.replace('address', 'addr')}"] = value
        else:
            made[f"release_{name}_{index}"] = value
    return made


PLACE = {"address_upper": 0x12, "address_lower": 0x3456_7890, "payload_upper": 0x9A, "payload_lower": 0xBCDE_F012}
PLAIN = {"wide": False, "reduction": None, "signed": False, "trap": 0, "membar": False}


@pytest.mark.parametrize("index", range(3))
def test_each_release_is_read_from_its_own_fields(chip: Chip, index: int) -> None:
    def released(**given: int) -> tuple[Release, ...]:
        others = {}
        for other in {0, 1, 2} - {index}:  # filled in, but not enabled
            others |= release_fields(chip, other, enable=0, address_lower=1, payload_lower=2)
        return decoded(chip, **others, **release_fields(chip, index, **PLACE, **given)).releases

    plain: dict[str, Any] = {"va": 0x12_3456_7890, "payload": 0xBCDE_F012, "record": 16, **PLAIN}
    assert released() == (Release(**plain),)
    assert released(payload64b=1) == (Release(**plain | {"wide": True, "payload": 0x9A_BCDE_F012}),)
    assert released(membar_type=1) == (Release(**plain | {"membar": True}),)
    assert released(trap_type=2) == (Release(**plain | {"trap": 2}),)
    assert released(reduction_op=3) == (Release(**plain),)
    assert released(reduction_op=3, reduction_enable=1) == (Release(**plain | {"reduction": 3}),)
    assert released(reduction_op=0, reduction_enable=1) == (Release(**plain | {"reduction": 0}),)
    assert [released(reduction_format=form)[0].signed for form in range(4)] == [False, True, False, True]


def test_the_form_of_a_release_says_what_it_stores() -> None:
    def sizes(chip: Chip) -> dict[tuple[int, int], int]:
        forms = [(structure, wide) for structure in range(4) for wide in (0, 1)]
        made = {
            form: decoded(chip, **release_fields(chip, 0, structure_size=form[0], payload64b=form[1])) for form in forms
        }
        return {form: spec.releases[0].record for form, spec in made.items()}

    known = {(0, 0): 16, (0, 1): 16, (1, 0): 4, (2, 0): 8, (2, 1): 8}
    assert sizes(ORIN) == {**known, (1, 1): 4, (3, 0): 16, (3, 1): 16}
    assert sizes(HOPPER) == {**known, (1, 1): 0, (3, 0): 0, (3, 1): 0}


def test_releases_come_in_their_order(chip: Chip) -> None:
    fields: dict[str, int] = {}
    for index in range(3):
        fields |= release_fields(chip, index, address_lower=0x100 * index, payload_lower=index)
    assert [(release.va, release.payload) for release in decoded(chip, **fields).releases] == [
        (0, 0),
        (0x100, 1),
        (0x200, 2),
    ]


def test_version_3_has_one_dependent() -> None:
    fields = {"dependent_qmd0_pointer": 0x1234_5678, "dependent_qmd0_action": 4}
    assert decoded(ORIN, **fields).dependents == ()
    assert decoded(ORIN, **fields, dependent_qmd0_enable=1).dependents == (Dependent(0x12_3456_7800, 4),)


def test_version_4_has_two_dependents() -> None:
    fields = {
        "dependent_qmd0_pointer": 0x1234_5678,
        "dependent_qmd_action_0": 4,
        "dependent_qmd1_pointer": 0x9876_5432,
        "dependent_qmd_action_1": 1,
    }
    one, two = Dependent(0x12_3456_7800, 4), Dependent(0x98_7654_3200, 1)
    for first, second, expected in ((0, 0, ()), (1, 0, (one,)), (0, 1, (two,)), (1, 1, (one, two))):
        enabled = {"dependent_qmd_enable_0": first, "dependent_qmd_enable_1": second}
        assert decoded(HOPPER, **fields, **enabled).dependents == expected


def test_the_address_of_the_bank_is_the_versions() -> None:
    upper, lower = 0x12, 0x3456_7890
    fields = {"constant_buffer_addr_upper_0": upper, "constant_buffer_addr_lower_0": lower}
    assert decoded(ORIN, **fields).bank == upper << 32 | lower
    shifted = {"constant_buffer_addr_upper_shifted6_0": upper, "constant_buffer_addr_lower_shifted6_0": lower}
    assert decoded(HOPPER, **shifted).bank == (upper << 32 | lower) << 6


def test_launches_of_one_shape_are_decoded_once(chip: Chip) -> None:
    """Replays launch the same bytes over and over; what differs between them is no part of the shape."""
    upper = {"V3": "constant_buffer_addr_upper_0", "V4": "constant_buffer_addr_upper_shifted6_0"}[chip.qmd]
    first = decoded(chip, dependence_counter=1, **{upper: 1}, **release_fields(chip, 0, **PLACE))
    second = decoded(chip, dependence_counter=2, dependent_qmd0_pointer=3)
    assert first.shape is second.shape
    assert (first.dependence, second.dependence) == (1, 2)
    assert (first.bank != second.bank, len(first.releases), second.releases) == (True, 1, ())
    assert decoded(chip, grid=(2, 1, 1)).shape.grid == (2, 1, 1)


# -- windows and local memory ----------------------------------------------------------------------------------------


def test_windows_are_there_and_apart() -> None:
    at = 0xFE00_0000
    assert windows_overlap(at, 0)
    assert windows_overlap(0, at)
    for shared, local in ((at, at + WINDOWS_APART), (at + WINDOWS_APART, at)):
        assert not windows_overlap(shared, local)
    for shared, local in ((at, at), (at, at + WINDOWS_APART - 1), (at + WINDOWS_APART - 1, at)):
        assert windows_overlap(shared, local)


def test_a_window_ends_at_the_other_one_at_the_latest(chip: Chip) -> None:
    at, size = 1 << 40, chip.window_size
    for apart, expected in ((size - 1, size - 1), (size, size), (size + 1, size)):
        assert window_size(chip, at, at + apart) == window_size(chip, at + apart, at) == expected


@pytest.mark.parametrize(
    ("per_thread", "per_warp"), [(0, 0), (1, 0x200), (16, 0x200), (17, 0x400), (32, 0x400), (33, 0x600)]
)
def test_a_tpc_has_local_memory_for_all_its_warps_in_units_of_512(chip: Chip, per_thread: int, per_warp: int) -> None:
    assert local_memory_per_tpc(chip, per_thread) == per_warp * chip.warps_per_sm * chip.sm_per_tpc


@pytest.fixture
def page() -> Iterator[AddressSpace]:
    """A page at 0x10000."""
    space, fd = AddressSpace(1), os.memfd_create("page")
    os.ftruncate(fd, 1 << 16)
    space.map(1 << 16, 1 << 16, fd, 0, True)
    os.close(fd)
    yield space
    space.close()


class Beside(threading.Thread):
    """What another channel does while one is between its look and its store; it may have to wait until that is over."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work, self.came = work, list[object]()

    def run(self) -> None:
        self.came.append(self._work())

    def meet(self) -> None:
        self.start()
        self.join(0.2)


def test_reductions_of_two_channels_lose_nothing(page: AddressSpace) -> None:
    channel: Any = SimpleNamespace(vm=page, stored=lambda syncpt: None)

    def release(reduction: Any) -> None:
        semaphore.release(channel, 1 << 16, 1, HubClient.SKED, reduction=reduction)

    def slow(old: int, payload: int, width: int, signed: bool) -> int:
        other.meet()
        return old + payload

    other = Beside(lambda: release(semaphore.SHADER_REDUCTIONS[0]))
    release(slow)
    other.join(30)
    assert page.words[1 << 14] == 2


def test_a_dependent_of_two_channels_qmds_is_launched_once(page: AddressSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = GridRunner(CHIPS["agx-orin-64gb"], page, Modules(), Counters())
    other = Beside(lambda: runner.depend(1 << 16, -1))

    def read(va: int) -> Any:
        if not other.ident:
            other.meet()
        return SimpleNamespace(dependence=2)

    monkeypatch.setattr(runner, "read", read)
    found = runner.depend(1 << 16, -1)
    other.join(30)
    assert sorted([found, *other.came]) == [False, True]
