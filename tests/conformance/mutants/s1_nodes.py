"""Mutants of section 1."""

from mutation import Mutant

MUTANTS: dict[str, Mutant | list[Mutant]] = {}
