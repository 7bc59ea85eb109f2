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
    assert chip.sm_version >> 8 == chip.sass_version >> 4


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
