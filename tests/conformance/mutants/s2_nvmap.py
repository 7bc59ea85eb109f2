"""Mutants of section 2."""

from mutation import Edit, Mutant

NVMAP = "tegrad.orin.nvmap."

MUTANTS: dict[str, Mutant | list[Mutant]] = {
    "2.3/align-not-power-of-two": Edit(NVMAP + "alloc", "require(arg.align & (arg.align - 1) == 0)", "pass"),
}
