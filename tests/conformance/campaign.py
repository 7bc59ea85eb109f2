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

MUTANT_PATIENCE_S = 1.0
"""How long a rule waits on a mutated board, where it is expected to wait for nothing."""


def survives(board: MutableBoard, rule: Rule, mutant: Mutant) -> str:
    """Why a mutant is not killed; "" when its rule differs on the mutated board and holds on the one as it was."""
    board.mutate(mutant)
    try:
        mutated = board.judge(rule, patience=MUTANT_PATIENCE_S)
    finally:
        board.mutate()
    if not board.sound():
        board.restart()
    restored = board.judge(rule)
    if restored.state != "holds" or not board.sound():
        board.restart()  # what the mutant did to its state is not the next one's
    if mutated.state != "differs":
        return f"on the mutated board: {mutated.state} {mutated.detail}"
    if restored.state != "holds":
        return f"after the mutant: {restored.state} {restored.detail or restored.seen}"
    return ""


def main() -> int:
    """Run everything; the exit code says whether all rules hold and all mutants are killed."""
    rules = {rule.id: rule for rule in all_rules()}
    mutants = all_mutants()
    board = MutableBoard()
    try:
        broken = [id for id, rule in rules.items() if board.judge(rule).state != "holds"]
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
