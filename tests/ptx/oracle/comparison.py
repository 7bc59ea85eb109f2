"""The engine against the record of silicon, over all recorded forms: `python -m tests.ptx.oracle.comparison`."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.ptx.oracle import judge
from tests.ptx.oracle.engine import run
from tests.ptx.oracle.record import PATH, Record, digests
from tests.ptx.oracle.table import FORMS

UNRECORDED = {
    "cvta.const.u64": "MMU fault at 0: the generic address of constants is a word that only CUDA's driver sets",
}
"""Forms that the recorded run could not execute, and why; they are no cases."""


@dataclass(frozen=True)
class Outcome:
    """How many cases were compared, and how many differ, by form."""

    cases: int
    mismatches: dict[str, int]


def stale(record: Record) -> list[str]:
    """Forms whose text or inputs are not those of the record, or that are in one only."""
    now = digests(FORMS.values())
    return sorted(n for n in {*now, *record.digests} if now.get(n) != record.digests.get(n))


def compare(record: Record, ours: dict[str, bytes]) -> Outcome:
    """The cases of the forms in `ours` that are recorded; a form that the engine refuses differs in all."""
    cases, wrong = 0, {}
    for name, theirs in record.results.items():
        if name not in ours:
            continue
        form = FORMS[name]
        cases += form.cases
        if count := int(judge.differing(form, ours[name], theirs).sum()):
            wrong[name] = count
    return Outcome(cases, wrong)


def main(path: Path = PATH) -> int:
    """Compare everything; a line of JSON with the counts."""
    record = Record.load(path)
    if old := stale(record):
        print(f"the record is not of this table: {', '.join(old[:5])}", file=sys.stderr)
        return 1
    ours, refused = run([FORMS[n] for n in record.results])
    done = compare(record, ours)
    missing = {n: FORMS[n].cases for n in refused}
    mismatches = {**done.mismatches, **missing}
    cases = done.cases + sum(missing.values())
    print(json.dumps({"cases": cases, "mismatches": sum(mismatches.values()), "forms": mismatches}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
