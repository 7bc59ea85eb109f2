"""The figures of decoding and prompts: which model, how deep, and what each is to reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

TOK_S: Final = "tok/s"
SAMPLE_TOKENS: Final = 128
"""Tokens that are decoded for one sample."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is to reach: the easiest of so many times the peer, such a share of the limit, and a value.

    None takes no part.
    """

    times: float | None = None
    share: float | None = None
    value: float | None = None

    def level(self, peer: float | None = None, limit: float | None = None, *, larger: bool = True) -> float | None:
        """The goal as a number in the figure's unit; None where what it is measured by is missing."""
        scaled = ((self.times, peer), (self.share, limit))
        found = [base * factor if larger else base / factor for factor, base in scaled if factor and base]
        if len(found) < sum(factor is not None for factor, _ in scaled):
            return None
        found += [] if self.value is None else [self.value]
        if not found:
            return None
        return min(found) if larger else max(found)


@dataclass(frozen=True, slots=True)
class Target:
    """A figure: its id, the function of `tegrad.bench.decode` that takes it, its model, and what it is to reach.

    `amount` is the depth of a decode, the tokens of a prompt, or the sequences of a batch.
    """

    id: str
    kind: str
    model: str
    goal: Goal
    amount: int = 0
    unit: str = TOK_S
    larger: bool = True

    @property
    def what(self) -> str:
        """The figure in words."""
        return _WORDS[self.kind].format(model=self.model, amount=self.amount, span=SAMPLE_TOKENS)


_WORDS: Final[Mapping[str, str]] = {
    "decode": "decode of {model}, {span} tokens greedily at depth {amount}",
    "prompt": "a prompt of {amount} tokens of {model}, to the last one's logits",
    "batch": "{amount} sequences of {model} decoding together, tokens of all",
    "first": "from the start of a process to its end after the first token of {model}, caches warm",
    "host": "CPU time of the process for a token of {model}, waits included, depth 0",
    "gap": "the GPU's time between the end of a step and the begin of the next, {model}, depth 0",
    "matvec": "decode of {model} by tinygrad's operations, with its matrix-vector products repaired",
}

_THREE, _TWO_AND_A_HALF, _PAST = Goal(times=3, share=0.65), Goal(times=2.5, share=0.65), Goal(times=1)

TARGETS: Final[Mapping[str, Target]] = {
    target.id: target
    for target in (
        Target("decode-1b-q6k-d0", "decode", "1b-q6k", Goal(value=2800)),
        Target("decode-1b-q6k-d4096", "decode", "1b-q6k", Goal(times=2.5), 4096),
        Target("decode-1b-q6k-d16384", "decode", "1b-q6k", Goal(times=2.5), 16384),
        Target("decode-1b-q4k-d0", "decode", "1b-q4k", _THREE),
        Target("decode-1b-q8_0-d0", "decode", "1b-q8_0", _THREE),
        Target("decode-1b-f16-d0", "decode", "1b-f16", _THREE),
        Target("decode-qwen3-0.6b-q8_0", "decode", "qwen3-0.6b-q8_0", _TWO_AND_A_HALF),
        Target("decode-qwen3-1.7b-q4k", "decode", "qwen3-1.7b-q4k", _TWO_AND_A_HALF),
        Target("decode-3b-q6k", "decode", "3b-q6k", _TWO_AND_A_HALF),
        Target("decode-8b-q4k-d0", "decode", "8b-q4k", _TWO_AND_A_HALF),
        Target("decode-8b-q6k-d0", "decode", "8b-q6k", _TWO_AND_A_HALF),
        Target("prefill-1b-q6k-512", "prompt", "1b-q6k", Goal(times=2), 512),
        Target("batch8-1b-q6k", "batch", "1b-q6k", Goal(times=1.5), 8),
        Target("batch32-1b-q6k", "batch", "1b-q6k", Goal(times=1.5), 32),
        Target("load-to-first-token", "first", "1b-q6k", _PAST, unit="s", larger=False),
        Target("host-us-per-token", "host", "1b-q6k", Goal(value=15), unit="us", larger=False),
        Target("token-gap-us", "gap", "1b-q6k", Goal(value=3), unit="us", larger=False),
        Target("matvec-fix-1b-q6k", "matvec", "1b-q6k", _PAST),
    )
}
"""In the order of their importance."""


def published(figures: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The models whose speed rows of results/figures.json tell, in the order of TARGETS.

    LookupError for a decode's row that TARGETS does not know: nobody could say of which model it is.
    """
    ids = {row["id"] for row in figures}
    if unknown := sorted(id for id in ids - TARGETS.keys() if id.startswith("decode-")):
        raise LookupError(f"of which model is {', '.join(unknown)}? tegrad/bench/targets.py does not know")
    return tuple(dict.fromkeys(target.model for id, target in TARGETS.items() if id in ids))


SIDE_BY_SIDE: Final = tuple(id for id, target in TARGETS.items() if target.kind in ("decode", "prompt", "batch"))
"""What `tegrad bench decode` takes unless told otherwise."""
