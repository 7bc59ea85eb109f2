"""The board keeps every rule, and a rule leaves nothing behind."""

from __future__ import annotations

import pytest
from mutant_board import MutableBoard

from tegrad.conformance import all_rules
from tegrad.conformance.rule import Rule

RULES = all_rules()


@pytest.mark.parametrize("rule", RULES, ids=[rule.id for rule in RULES])
def test_the_board_keeps_the_rule(board: MutableBoard, rule: Rule) -> None:
    done = board.judge(rule)
    told = done.detail or f"expected {done.expected}, seen {done.seen}"
    assert done.state == "holds", f"{rule.sentence}: {done.state}: {told}"
    if not board.sound():
        board.restart()
        pytest.fail("the rule left something behind")
