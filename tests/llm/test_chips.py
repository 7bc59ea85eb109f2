"""Everything that kernels do otherwise on a chip is in its row; a chip without one runs, and is told what it lacks."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

import tegrad
from tegrad.hw.chips import CHIPS, by_arch
from tegrad.llm import chips
from tegrad.llm.attention import Attention
from tegrad.llm.chips import TUNED, Role, capability, kernels_of, shared_bytes
from tegrad.llm.errors import UntunedChipError
from tegrad.llm.formats import Q6_K
from tegrad.llm.gemm import Gemm, SmallMTile, StreamTile, Tile, pick_quickest
from tegrad.llm.persistent import Persistent

ROOT = Path(tegrad.__file__).parent


def test_every_chip_that_we_know_has_a_tuning_for_every_role() -> None:
    assert {chip.arch for chip in CHIPS.values()} == TUNED.keys()
    for row in TUNED.values():
        assert row.products.keys() == set(get_args(Role))


@pytest.mark.parametrize(("arch", "number"), [("sm_87", 87), ("sm_90a", 90), ("sm_100", 100), ("sm_120f", 120)])
def test_a_capability_is_its_number(arch: str, number: int) -> None:
    assert capability(arch) == number


@pytest.mark.parametrize(("arch", "overlaps"), [("sm_80", False), ("sm_86", False), ("sm_89", False), ("sm_120", True)])
def test_a_chip_without_a_tuning_gets_what_is_right_on_all(arch: str, overlaps: bool) -> None:
    row = kernels_of(arch)
    assert (row.overlaps, row.wgmma, shared_bytes(arch)) == (overlaps, False, chips.LEAST_SHARED_BYTES)
    device: Any = SimpleNamespace(arch=arch, sm_count=84)
    for tokens in (1, 8, 32, 512):
        assert isinstance(pick_quickest(device, Gemm(Q6_K, 2048, 2048), tokens), (Tile, SmallMTile, StreamTile))
    assert Attention(32, 8, 64, 4096, arch=arch, sequences=4, sms=84).warps == 8


def test_a_step_in_one_launch_says_that_a_chip_has_no_tuning() -> None:
    kernel = Persistent.__new__(Persistent)
    object.__setattr__(kernel, "arch", "sm_86")
    with pytest.raises(UntunedChipError, match="no tuning for sm_86; tuned are sm_87, sm_90"):
        _ = kernel.chip
    assert by_arch("sm_86") is None


def test_no_other_module_asks_which_chip_it_is_on() -> None:
    asks = re.compile(r"arch\b[^\n]*[=!]= \"sm_|\"sm_\d+\" *:|(?:capability|HOPPER)[^\n]*>= *(?:90|HOPPER)")
    found = {
        str(path.relative_to(ROOT))
        for folder in ("llm", "bench", "cli", "diag")
        for path in (ROOT / folder).glob("**/*.py")
        if asks.search(path.read_text())
    }
    assert found == {"llm/chips.py"}
