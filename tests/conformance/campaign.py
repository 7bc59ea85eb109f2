"""All rules and all mutants: `python tests/conformance/campaign.py` prints how many there are and how many are killed.

The figures conformance-rules and conformance-mutants-killed are measured with it.
"""

from __future__ import annotations

import json
import sys

from mutant_board import MutableBoard
from mutants import all_mutants
from mutation import Mutant

from tegrad.conformance import all_rules
from tegrad.conformance.rule import Rule
from tegrad.conformance.run import PATIENCE_S

MUTANT_PATIENCE_S = 0.5
"""How long a rule waits on a mutated board, where it is expected to wait for nothing."""


def survives(board: MutableBoard, rule: Rule, mutant: Mutant, patience: float = MUTANT_PATIENCE_S) -> str:
    """Why a mutant is not killed; "" when its rule differs on the mutated board and holds on the one as it was.

    Both with the same patience, so that a machine that is too slow for it kills no mutant: there it is longer.
    """
    board.mutate(mutant)
    try:
        mutated = board.judge(rule, patience=patience)
    finally:
        board.mutate()
    board.ready()
    restored = board.judge(rule, patience=patience)
    if restored.state != "holds" or not board.sound():
        board.restart()  # what the mutant did to its state is not the next one's
    if restored.state != "holds" and patience < PATIENCE_S:
        return survives(board, rule, mutant, PATIENCE_S)
    if mutated.state != "differs":
        return f"on the mutated board: {mutated.state} {mutated.detail}"
    if restored.state != "holds":
        return f"after the mutant: {restored.state} {restored.detail or restored.seen}"
    return ""


def holds(board: MutableBoard, rule: Rule) -> bool:
    """Whether the board keeps a rule."""
    board.ready()
    return board.judge(rule).state == "holds"


def main() -> int:
    """Run everything; the exit code says whether all rules hold and all mutants are killed."""
    rules = {rule.id: rule for rule in all_rules()}
    mutants = all_mutants()
    board = MutableBoard()
    try:
        broken = [id for id, rule in rules.items() if not holds(board, rule)]
        alive = sorted(rules.keys() - mutants.keys())
        tried = len(alive)
        for id, several in mutants.items():
            for mutant in several:
                tried += 1
                if why := survives(board, rules[id], mutant):
                    alive.append(id)
                    print(f"{id}: {why}", file=sys.stderr)
    finally:
        board.stop()
    found = {"rules": len(rules), "broken": broken, "mutants": tried, "killed": tried - len(alive), "alive": alive}
    print(json.dumps(found))
    return 1 if broken or alive else 0


if __name__ == "__main__":
    sys.exit(main())
