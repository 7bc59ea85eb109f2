"""Chip rows agree with the driver's numbers and with themselves."""

import json
from pathlib import Path

import pytest

from tegrad.hw.chips import CHIPS, Chip, by_sm_version
from tegrad.hw.classes import BY_CLASS
from tegrad.hw.qmd import LAYOUTS

DATA = Path(__file__).parents[1] / "data"
HW = json.loads((DATA / "ga10b-hw.json").read_text())
CLASSES = json.loads((DATA / "classes.json").read_text())
ORIN = [chip for chip in CHIPS.values() if chip.chip == "ga10b"]
ALL = pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)


@pytest.mark.parametrize("chip", ORIN, ids=lambda c: c.name)
def test_ga10b_numbers_are_the_drivers(chip: Chip) -> None:
    classes = {name: HW["classes"][name]["value"] for name in ("twod", "threed", "compute", "gpfifo", "dma_copy")}
    assert classes == {
        "twod": chip.twod_class,
        "threed": chip.threed_class,
        "compute": chip.compute_class,
        "gpfifo": chip.gpfifo_class,
        "dma_copy": chip.dma_class,
    }
    assert HW["classes"]["inline_to_memory"]["value"] == chip.i2m_class
    assert (HW["chip"]["arch"]["value"], HW["chip"]["impl"]["value"]) == (chip.gpu_arch, chip.gpu_impl)
    litter = HW["litter"]
    assert chip.tpc_per_gpc == litter["NUM_TPC_PER_GPC"]["value"]
    assert chip.sm_per_tpc == litter["NUM_SM_PER_TPC"]["value"]
    assert chip.num_gpc <= litter["NUM_GPCS"]["value"]
    assert chip.va_bits == HW["characteristics"]["fields"]["gpu_va_bit_count"]["value"]


def test_agx_orin_is_the_full_chip() -> None:
    assert CHIPS["agx-orin-64gb"].sm_count == HW["litter_derived"]["max_sms"]["value"] == 16


@ALL
def test_the_drivers_own_range_lies_below_the_va_limit(chip: Chip) -> None:
    kernel_range = HW["gmmu"]["default_kernel_va_size"]["value"]
    assert chip.va_end + kernel_range <= 1 << chip.va_bits
    alignment = 1 << HW["gmmu"]["alloc_as_alignment_bits"]["value"]
    assert chip.va_start % alignment == chip.va_end % alignment == 0
    assert chip.va_start > 0


@ALL
def test_windows_lie_inside_the_range_and_apart(chip: Chip) -> None:
    windows = sorted((chip.shared_window, chip.local_window))
    assert windows[1] - windows[0] >= chip.window_size
    assert all(chip.va_start <= w and w + chip.window_size <= chip.va_end for w in windows)


@ALL
def test_classes_and_qmd_are_known(chip: Chip) -> None:
    assert {chip.compute_class, chip.gpfifo_class, chip.dma_class} <= set(BY_CLASS)
    assert chip.qmd in LAYOUTS
    assert CLASSES[f"{chip.compute_class:04x}"]["class_id"] == chip.compute_class
    assert chip.sass_version == (chip.sm_version >> 8) << 4 | chip.sm_version & 0xF


@ALL
def test_sizes_make_sense(chip: Chip) -> None:
    assert chip.smem_per_cta + 1024 == chip.smem_per_sm  # 1 KiB per CTA is the system's own
    assert chip.regs_per_sm == 65536
    assert chip.arch == f"sm_{chip.sm_version >> 8}{chip.sm_version & 0xF}"


def test_by_sm_version_gives_the_first_row() -> None:
    assert by_sm_version(0x807).name == "agx-orin-64gb"
    assert by_sm_version(0x900).sm_count == 132
    with pytest.raises(KeyError, match="0x806"):
        by_sm_version(0x806)


def test_agx_orin_equals_the_readings_of_a_developer_kit() -> None:
    """GET_CHARACTERISTICS of an AGX Orin 64GB under r36.4, by field."""
    chip = CHIPS["agx-orin-64gb"]
    assert (chip.sm_version, chip.spa_version) == (0x807, 0x806)
    assert (chip.gpu_arch, chip.gpu_impl, chip.gpu_rev) == (0x170, 0xB, 161)
    assert (chip.l2_bytes, chip.max_freq_hz) == (4194304, 1300000000)


@pytest.mark.parametrize(
    ("name", "cores", "gib", "gb_per_s", "mhz"),
    [
        ("agx-orin-64gb", 2048, 64, 204.8, 1300),
        ("agx-orin-32gb", 1792, 32, 204.8, 930),
        ("orin-nx-16gb", 1024, 16, 102.4, 918),
        ("orin-nx-8gb", 1024, 8, 102.4, 765),
        ("orin-nano-8gb", 1024, 8, 102.4, 1020),
        ("orin-nano-4gb", 512, 4, 51.2, 1020),
    ],
)
def test_modules_equal_their_data_sheets(name: str, cores: int, gib: int, gb_per_s: float, mhz: int) -> None:
    chip = CHIPS[name]
    assert chip.sm_count * 128 == cores
    assert chip.mem_bytes == gib << 30
    assert (chip.mem_bandwidth, chip.max_freq_hz) == (gb_per_s * 1e9, mhz * 1e6)


@ALL
def test_the_masks_hold_the_sms(chip: Chip) -> None:
    assert len(chip.tpc_masks) == chip.num_gpc
    assert all(0 < mask < 1 << chip.tpc_per_gpc for mask in chip.tpc_masks)
    assert sum(mask.bit_count() for mask in chip.tpc_masks) * chip.sm_per_tpc == chip.sm_count


def test_an_h100_of_pcie_has_114_sms() -> None:
    assert (CHIPS["h100-pcie"].sm_count, CHIPS["h100-pcie"].arch) == (114, "sm_90")


def test_gh100_is_an_h200() -> None:
    """Data sheet and architecture paper of the H200 SXM."""
    chip = CHIPS["gh100"]
    assert (chip.sm_count, chip.l2_bytes, chip.mem_bytes) == (132, 50 << 20, 141 * 10**9)
    assert (chip.mem_bandwidth, chip.max_freq_hz) == (4.8e12, 1980e6)
    assert (chip.sm_version, chip.spa_version) == (0x900, 0x900)
    assert (chip.smem_per_sm, chip.smem_per_cta, chip.warps_per_sm) == (228 << 10, 227 << 10, 64)
    assert (chip.gpu_arch, chip.gpu_impl) == (0x180, 0)
    assert (chip.compute_class, chip.gpfifo_class, chip.dma_class, chip.usermode_class) == (
        0xCBC0,
        0xC86F,
        0xC8B5,
        0xC661,
    )
