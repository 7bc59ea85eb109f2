"""What a rule is: one row or sentence of the driver's facts, with the check that says whether a kernel keeps it.

A check takes a `Rig` and returns when the rule holds. It raises `Differs` when the kernel behaves otherwise,
`NotApplicable` when the machine lacks what the rule is about; anything else is an error of its set-up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tegrad.conformance.rig import Rig

Check = Callable[["Rig"], None]


class Differs(Exception):
    """The kernel does not do what the rule says."""

    def __init__(self, expected: object, seen: object) -> None:
        super().__init__(f"expected {expected}, seen {seen}")
        self.expected, self.seen = str(expected), str(seen)


class NotApplicable(Exception):
    """The rule says nothing about this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: `id` is its section and its name (`2.3/align-not-power-of-two`), `sentence` what must hold.

    `hazardous`: on a kernel that breaks the rule, or on a real one in any case, the check may leave the GPU hung, a
    process that cannot be killed or a driver that needs a reboot.
    """

    id: str
    section: str
    sentence: str
    check: Check = field(repr=False)
    hazardous: bool = False


FAULTS = "7."
"""The sections whose every rule makes the GPU fail, and is hazardous for that: a recovery that fails needs a reboot."""

_rules: dict[str, Rule] = {}


def rule(section: str, sentence: str, *, hazardous: bool = False, name: str = "") -> Callable[[Check], Check]:
    """Register a check as a rule of a section of the facts. The id comes from `name`, else from the function's.

    ValueError for an id that is taken: ids are what reports and mutants refer to.
    """

    def register(check: Check) -> Check:
        id = f"{section}/{name or check.__name__.replace('_', '-')}"
        made = Rule(id, section, sentence, check, hazardous or section.startswith(FAULTS))
        if made.id in _rules:
            raise ValueError(f"there is a rule {made.id} already")
        _rules[made.id] = made
        return check

    return register


def rules(
    section: str,
    sentence: str,
    columns: str,
    rows: Iterable[object],
    *,
    hazardous: bool = False,
    name: str = "{name}",
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a check as a rule for each row of a table. A row of one column need not be a tuple.

    Columns stand by name in `sentence` and `name`, as in `"{op:#x} is refused"`, and are given to the check where it
    has a parameter of that name after the rig.
    """

    def register(check: Callable[..., None]) -> Callable[..., None]:
        taken = inspect.signature(check).parameters
        for row in rows:
            values = dict(zip(columns.split(), row if isinstance(row, tuple) else (row,), strict=True))
            made = rule(section, sentence.format(**values), hazardous=hazardous, name=name.format(**values))
            made(partial(check, **{column: value for column, value in values.items() if column in taken}))
        return check

    return register


def section_order(section: str) -> tuple[int, ...]:
    """A key that sorts 2.10 after 2.9."""
    return tuple(int(part) for part in section.split("."))


def registered() -> list[Rule]:
    """Every rule of the modules imported so far, by section, in the order they were written."""
    return sorted(_rules.values(), key=lambda one: section_order(one.section))


def chosen(rules: Iterable[Rule], sections: Iterable[str] = (), ids: Iterable[str] = ()) -> list[Rule]:
    """The rules of these sections (`2` takes 2.1 to 2.9 along) and with these ids; all where neither is given."""
    sections, ids = list(sections), set(ids)
    if not sections and not ids:
        return list(rules)
    return [
        one
        for one in rules
        if one.id in ids or any(one.section == s or one.section.startswith(f"{s}.") for s in sections)
    ]
