"""The board against nvgpu's own code, over all recorded cases: `python -m tests.orin.nvgpu_oracle.comparison`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from tests.orin.nvgpu_oracle.board import replay
from tests.orin.nvgpu_oracle.record import ADDRESS, Case, Record


def expected(step: str, answer: str) -> str:
    """The oracle's answer in the board's terms: an emulated page has no physical address."""
    if step.startswith("pte ") and answer.startswith("0x"):
        return hex(int(answer, 16) & ~ADDRESS)
    return answer.strip()


def difference(case: Case) -> str:
    """The first step that the board answers otherwise, with both answers; "" where it answers all alike."""
    for i, (step, theirs, ours) in enumerate(zip(case.steps, case.answers, replay(case), strict=True)):
        if expected(step, theirs) != ours:
            return f"step {i}, {step}: nvgpu answers {expected(step, theirs)}, the board {ours}"
    return ""


def mismatches(cases: Iterable[Case]) -> list[str]:
    """What the board answers otherwise, one line for each case that differs."""
    return [found for case in cases if (found := difference(case))]


def main() -> int:
    """Compare everything; a line of JSON with the counts."""
    record = Record.load()
    wrong = {kind: found for kind, cases in record.kinds.items() if (found := mismatches(cases))}
    for kind, found in wrong.items():
        print(f"{kind}: {found[0]}", file=sys.stderr)
    cases = {kind: len(found) for kind, found in record.kinds.items()}
    print(json.dumps({"cases": sum(cases.values()), "mismatches": sum(map(len, wrong.values())), "kinds": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
