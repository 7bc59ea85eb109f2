"""Attention and sampling against their references on a device of any kind: cases of test_h200."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
import sampling_reference as reference
from attention_rig import PUBLISHED, Bench
from operands import Operands
from sampling_rig import NARROW, VOCAB, WIDE, Rig, random_logits

from tegrad.llm.sampling import Settings


class Anywhere(Operands):
    """Operands in memory of any allocator: what lies beyond their pages may be mapped."""

    def _lonely(self, size: int, cpu_access: bool) -> Any:
        return self._alloc(size, cpu_access)


def attention(device: Any, name: str, repeats: int = 20) -> None:
    """A published model's attention at depths of one part and of all, many times: parts come in another order each."""
    at, operands = PUBLISHED[name], Anywhere(device)
    try:
        bench = Bench(at, at.load(device), operands)
        for position in (0, 1, 100, at.positions // 2, *[at.positions - 1] * repeats):
            bench.run([position])
        operands.check()
    finally:
        operands.free()


def sampling(device: Any, steps: int = 20) -> None:
    """All filters together, and the largest vocabulary with and without equal logits."""
    operands = Anywhere(device)
    settings = [*NARROW, *WIDE] * 2
    wide = [Settings(1.0, top_k=128), Settings(1.0, top_p=0.9), Settings(0.5)]
    try:
        for chosen, vocab, rounds in ((settings, VOCAB, False), (wide, 151_936, False), (wide, 151_936, True)):
            rig = Rig(operands, chosen, random_logits(len(chosen), vocab))
            try:
                for slot in range(len(chosen)):
                    rig.begin(slot, seed=slot)
                for step in range(steps):
                    logits = random_logits(len(chosen), vocab, step)
                    logits = logits.round() if rounds else logits
                    rig.step(logits)
                    expected = [reference.draw(logits[s], chosen[s], s, step) for s in range(len(chosen))]
                    assert rig.tokens() == expected, (vocab, rounds, step)
            finally:
                rig.close()
        operands.check()
    finally:
        operands.free()
