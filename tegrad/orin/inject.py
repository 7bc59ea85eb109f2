"""Making the board's drivers fail, stall or answer otherwise: the nth call of an ioctl, or any by a seeded chance."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, slots=True)
class Injection:
    """One injection. It applies to calls whose short name (`NVMAP_ALLOC`) matches `ioctl`, a shell pattern.

    It strikes on the `nth` such call (from 1) after it was armed, or on each with `probability`, drawn from `seed`;
    once `times` strikes are used up it is spent (0: never). A strike waits `stall` seconds and then fails with
    `errno`, or runs the ioctl if `errno` is 0 and puts the values of `answer` into the fields of what it returns.
    """

    ioctl: str
    errno: int = 0
    stall: float = 0.0
    nth: int = 0
    probability: float = 0.0
    seed: int = 0
    times: int = 1
    answer: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.nth) == bool(self.probability):
            raise ValueError("an injection rule takes nth or probability, one of them")
        if not self.errno and not self.stall and not self.answer:
            raise ValueError("an injection rule takes errno, stall or answer, or several of them")

    def to_json(self) -> dict[str, Any]:
        """The rule as plain data."""
        return asdict(self)


class Injector:
    """The armed rules and how often each has been asked."""

    def __init__(self) -> None:
        self._armed: list[_Armed] = []

    def arm(self, rules: Iterable[Injection]) -> int:
        """Replace the rules; how many are armed now."""
        self._armed = [_Armed(rule) for rule in rules]
        return len(self._armed)

    def strike(self, ioctl: str) -> Injection | None:
        """The first rule that strikes this call; every rule counts it."""
        struck = [armed.rule for armed in self._armed if armed.asks(ioctl)]
        return struck[0] if struck else None


class _Armed:
    def __init__(self, rule: Injection) -> None:
        self.rule, self._calls, self._strikes, self._random = rule, 0, 0, random.Random(rule.seed)

    def asks(self, ioctl: str) -> bool:
        """Count a call; whether the rule strikes it."""
        rule = self.rule
        if not fnmatchcase(ioctl, rule.ioctl):
            return False
        self._calls += 1
        if rule.times and self._strikes >= rule.times:
            return False
        hit = self._calls == rule.nth if rule.nth else self._random.random() < rule.probability
        self._strikes += hit
        return hit
