"""The board answers what NVIDIA's own nvgpu code answered, and the answers notice mutants of the board."""

from __future__ import annotations

import pytest

from tests.orin.nvgpu_oracle.comparison import mismatches
from tests.orin.nvgpu_oracle.mutants import TARGETS, Mutant, cases_for, drawn, mutants, noticed
from tests.orin.nvgpu_oracle.record import Record

RECORD = Record.load()


def test_the_record_is_of_many_kinds_and_names_its_source() -> None:
    counts = {kind: len(cases) for kind, cases in RECORD.kinds.items()}
    assert len(counts) >= 8
    assert sum(counts.values()) >= 5000
    assert max(counts.values()) <= sum(counts.values()) / 4
    assert {"repository", "branch", "commit", "command", "seed"} <= RECORD.source.keys()


@pytest.mark.parametrize("kind", RECORD.kinds)
def test_the_board_answers_as_nvgpu_does(kind: str) -> None:
    assert mismatches(RECORD.kinds[kind]) == []


def test_every_kind_has_functions_to_mutate() -> None:
    assert TARGETS.keys() == RECORD.kinds.keys()


@pytest.mark.parametrize("mutant", [one for kind in TARGETS for one in drawn(kind)], ids=str)
def test_a_mutant_is_noticed(mutant: Mutant) -> None:
    kind = next(kind for kind, targets in TARGETS.items() if mutant.target in targets)
    assert noticed(mutant, cases_for(kind, RECORD))


@pytest.mark.long
@pytest.mark.parametrize("kind", TARGETS)
def test_every_mutant_is_noticed(kind: str) -> None:
    cases = cases_for(kind, RECORD)
    assert [str(mutant) for mutant in mutants(kind) if not noticed(mutant, cases)] == []
