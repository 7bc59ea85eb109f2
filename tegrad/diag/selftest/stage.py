"""What a stage of the self-test is, and what it tells while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tegrad.diag.selftest.place import Place
from tegrad.nv.kernel import emulated

Value = str | int | float | bool | None | Sequence["Value"] | Mapping[str, "Value"]
"""What a fact may be: anything that JSON holds."""

Emit = Callable[[Mapping[str, Value]], object]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user gave beside the names of stages: a model's file, and where llama-bench is ("": on the PATH)."""

    model: str = ""
    llama_bench: str = ""


class Surprise(Exception):
    """The machine does not do what a stage expects. `next_step` where it is another one than the stage's own."""

    def __init__(self, expected: str, seen: str, next_step: str = "") -> None:
        super().__init__(f"expected {expected}, seen {seen}")
        self.expected, self.seen, self.next_step = expected, seen, next_step


class Notes:
    """What a stage tells: facts, lines for the page, and the step it is at. All of it survives a hang or a crash."""

    def __init__(self, emit: Emit, amount: int = 0, asked: Asked | None = None) -> None:
        """`emit` takes each piece as it comes; `amount` says how much of its work the stage is to do."""
        self._emit, self.amount, self.asked = emit, amount, asked or Asked()
        self.board = emulated()

    def fact(self, name: str, value: Value) -> None:
        """Something that was measured or read."""
        self._emit({"fact": name, "value": value})

    def line(self, text: str) -> None:
        """A sentence for the page."""
        self._emit({"line": text})

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """What goes on now; the one that fails, hangs or crashes is named."""
        self._emit({"step": name})
        yield
        self._emit({"step": ""})

    def expect(self, condition: object, expected: str, seen: object, next_step: str = "") -> None:
        """Surprise unless a condition holds."""
        if not condition:
            raise Surprise(expected, str(seen), next_step)


@dataclass(frozen=True, slots=True)
class Stage:
    """A row: a stage of the self-test, in the order of risk.

    `needs` names what it cannot do without (see `child.NEEDS`); `limit_s` ends it. `amount` and `board_amount` say how
    much it does on a device and on a board, of what `unit` names. `means` and `next_step` are told when it fails.
    `places` are the drivers on which it has meaning; `asks` names what of `Asked` the user must have given.
    """

    name: str
    sentence: str
    run: Callable[[Notes], None] = field(repr=False)
    limit_s: float
    means: str
    next_step: str
    needs: tuple[str, ...] = ()
    amount: int = 0
    board_amount: int = 0
    unit: str = ""
    places: tuple[Place, ...] = (Place.ORIN,)
    asks: str = ""

    def share(self, board: bool) -> int:
        """How much of its work the stage does here."""
        return self.board_amount if board else self.amount
