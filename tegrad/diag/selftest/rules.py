"""Stage 5: the driver's facts as rules, but for those that can hang the GPU or wedge its driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from tegrad.conformance import all_rules
from tegrad.conformance.rig import Rig
from tegrad.conformance.rule import Rule
from tegrad.conformance.run import judge
from tegrad.diag.selftest.stage import Notes
from tegrad.hw.chips import CHIPS
from tegrad.nv.kernel import pick_kernel

ORIN = CHIPS["agx-orin-64gb"]
SHOWN_DIFFERENCES = 5
"""Differences that the page names; the report has all."""


def rules(notes: Notes) -> None:
    """Judge the rules in order; at most `amount` of each section."""
    every = all_rules()
    hazardous = [rule.id for rule in every if rule.hazardous]
    notes.fact("hazardous, not run", hazardous)
    notes.line(f"{len(hazardous)} hazardous rules were not run: `tegrad conformance --hazardous`, with your work saved")
    kernel = pick_kernel()
    with Rig(kernel) as rig:
        rig.need(rig.characteristics().arch == ORIN.gpu_arch, "the rules are those of an Orin's driver")
    counts: Counter[str] = Counter()
    bad: list[dict[str, str]] = []
    for rule in first(notes.amount, (rule for rule in every if not rule.hazardous)):
        with notes.step(rule.id):
            found = judge(rule, kernel)
        counts[found.state] += 1
        if found.state in ("differs", "error"):
            what = {"rule": rule.id, "sentence": rule.sentence, "state": found.state, "expected": found.expected}
            bad.append(what | {"seen": found.seen or found.detail})
    notes.fact("counts", dict(counts))
    notes.fact("differences", bad)
    for one in bad[:SHOWN_DIFFERENCES]:
        expected = f"expected {one['expected']}, " if one["expected"] else ""
        notes.line(f"{one['rule']}: {one['sentence']}: {expected}seen: {one['seen']}")
    notes.expect(
        not bad,
        "every rule to hold",
        f"{len(bad)} that do not: {', '.join(one['rule'] for one in bad[:SHOWN_DIFFERENCES])}",
    )


def first(amount: int, rules: Iterable[Rule]) -> Iterator[Rule]:
    """The first `amount` rules of each section."""
    taken: Counter[str] = Counter()
    for rule in rules:
        if taken[rule.section] < amount:
            taken[rule.section] += 1
            yield rule
