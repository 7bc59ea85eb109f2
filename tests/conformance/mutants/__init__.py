"""The mutants of every rule: rule id -> the mutants that each drop it, a module per module of rules."""

from __future__ import annotations

import importlib

from mutation import Mutant

from tegrad.conformance import MODULES


def all_mutants() -> dict[str, list[Mutant]]:
    """The mutants of every rule. ValueError for a rule whose mutants are in two places."""
    found: dict[str, list[Mutant]] = {}
    for name in MODULES:
        table = importlib.import_module(f"mutants.{name}").MUTANTS
        if twice := found.keys() & table.keys():
            raise ValueError(f"mutants of {sorted(twice)} stand in two modules")
        found |= {id: one if isinstance(one, list) else [one] for id, one in table.items()}
    return found
