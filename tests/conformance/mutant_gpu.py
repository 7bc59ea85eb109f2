"""The board's GPU with one more call: apply mutants in its process."""

from __future__ import annotations

from mutation import Applied

from tegrad.orin.gpu import Gpu

_applied = Applied()


class MutantGpu(Gpu):
    """The GPU; `mutate` changes its code."""

    def mutate(self, packed: str) -> int:
        """Apply packed mutations in place of those applied before; how many could be applied here."""
        return _applied.change(packed)
