"""Every rule can fail: for each there is a mutant of the board that drops it, and the rule notices."""

from __future__ import annotations

import pytest
from campaign import survives
from mutant_board import MutableBoard
from mutants import all_mutants
from mutation import Mutant

from tegrad.conformance import all_rules

RULES = {rule.id: rule for rule in all_rules()}
MUTANTS = [(id, mutant) for id, several in all_mutants().items() for mutant in several]
EACH = 3
"""Of so many mutants `make test` tries one, and `make test-long` all; that rules hold, `make test` asks of all."""


def test_every_rule_has_a_mutant() -> None:
    assert sorted(RULES.keys() - {id for id, _ in MUTANTS}) == []


def test_every_mutant_has_a_rule() -> None:
    assert sorted({id for id, _ in MUTANTS} - RULES.keys()) == []


@pytest.mark.parametrize(
    ("id", "mutant"),
    [
        pytest.param(id, mutant, id=id, marks=[pytest.mark.long] if at % EACH else [])
        for at, (id, mutant) in enumerate(MUTANTS)
    ],
)
def test_the_rule_notices(board: MutableBoard, id: str, mutant: Mutant) -> None:
    assert survives(board, RULES[id], mutant) == ""
