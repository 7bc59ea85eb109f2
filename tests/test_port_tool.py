"""What a port to another tinygrad needs is found by names, and by their sources."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import port


def test_names_of_modules_and_of_what_they_have_are_found() -> None:
    source = (
        "from tinygrad.runtime import ops_nv\nfrom tinygrad import Tensor\nimport os\nclass A(ops_nv.NVDevice): ...\n"
    )
    assert set(port.names(source)) == {
        ("tinygrad.runtime", "ops_nv"), ("tinygrad", "Tensor"), ("tinygrad.runtime.ops_nv", "NVDevice"),
    }  # fmt: skip


def test_all_that_tegrad_takes_is_in_the_tinygrad_that_it_is_made_for() -> None:
    taken = port.used()
    assert ("tinygrad.runtime.ops_nv", "NVDevice") in taken
    assert len(taken) > 100


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        ({"a": ["has", "1"]}, {"lacking": [], "otherwise": []}),
        ({"a": ["has", "2"]}, {"lacking": [], "otherwise": ["a"]}),
        ({"a": ["lacks", "ImportError"]}, {"lacking": ["a"], "otherwise": []}),
    ],
)
def test_what_is_gone_and_what_has_changed_are_told_apart(
    theirs: dict[str, list[str]], found: dict[str, list[str]]
) -> None:
    assert port.compared({"a": ["has", "1"], "b": ["lacks", "it is optional"]}, {**theirs, "b": ["lacks", ""]}) == found
