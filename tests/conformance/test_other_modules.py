"""Rules on a module whose chip has parts switched off: what was read on a whole chip is not held against it."""

from __future__ import annotations

import pytest

from tegrad.conformance import all_rules
from tegrad.conformance.run import judge
from tegrad.conformance.s3_ctrl import OF_THE_WHOLE_CHIP
from tegrad.orin.client import BoardKernel

RULES = {rule.id: rule for rule in all_rules()}
OF_A_MODULE = [f"3.1/{name}" for name in OF_THE_WHOLE_CHIP] + ["3.5/zcull-size"]


@pytest.mark.board
@pytest.mark.parametrize("id", OF_A_MODULE)
def test_a_reading_of_the_whole_chip_is_no_rule_of_a_smaller_module(id: str) -> None:
    assert judge(RULES[id], BoardKernel("agx-orin-64gb")).state == "holds"
    done = judge(RULES[id], BoardKernel("orin-nano-8gb"))
    assert (done.state, "this one has 8" in done.detail) == ("not applicable", True), done
