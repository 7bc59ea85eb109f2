"""Mutants of section 0."""

from mutation import Mutant

MUTANTS: dict[str, Mutant | list[Mutant]] = {}
