"""Many prompts to one model at once: sequences of a batch, each read as if it had the model to itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from tegrad.llm.batch import Batch, Member
from tegrad.llm.errors import NoRoom, OutOfMemory
from tegrad.llm.packed import PackedModel
from tegrad.llm.sampler import Logprobs, Mask, Sampler

MOST_TOGETHER: Final = 32
"""Sequences that decode together; the others wait for their room."""


@dataclass(eq=False)
class Part:
    """One sequence. A `generate.Speaker` of its own prompt."""

    prompt: Sequence[int]
    sampler: Sampler
    seed: int
    limit: int | None
    """Tokens of its answer at most."""
    mask: Mask | None
    go_on: Callable[[], None] = lambda: None
    leave: Callable[[Part], None] = lambda _: None
    member: Member | None = None
    tokens: list[int] = field(default_factory=list)
    """None: nothing was said before."""

    @property
    def logprobs(self) -> list[Logprobs]:
        """Of each token, where the settings ask for them."""
        return [] if self.member is None else self.member.logprobs

    def reset(self, keep: int = 0) -> None:
        """Nothing."""

    def warm(self) -> None:
        """Nothing: a batch records its steps when they are needed."""

    def generate(self, *_: object, mask: Mask | None = None) -> Iterator[int]:
        """Its tokens, for each of which all sequences go on."""
        at = 0
        try:
            while self.member is None or not self.member.finished or at < len(self.member.tokens):
                if self.member is not None and at < len(self.member.tokens):
                    at += 1
                    yield self.member.tokens[at - 1]
                else:
                    self.go_on()
            if self.member.error is not None:
                raise self.member.error
        finally:
            self.leave(self)


@contextmanager
def together(
    model: PackedModel, parts: Sequence[Part], context: int, *, q8: bool, ends: Sequence[int], check: Callable[[], None]
) -> Iterator[None]:
    """Let sequences decode together while their tokens are read; `check` may raise between two steps.

    As many as there is memory for. OutOfMemory, UnsupportedModelError, ContextError.
    """
    if not parts:
        yield
        return
    wanted = (len(each.prompt) + (context if each.limit is None else each.limit) for each in parts)
    positions = min(context, max(wanted))
    with _batch(model, min(len(parts), MOST_TOGETHER), positions, q8=q8, ends=ends) as batch:
        waiting = deque(parts)

        def give_mask(part: Part) -> None:
            if part.mask is not None and part.member is not None and not part.member.finished:
                batch.mask(part.member, part.mask(part.member.tokens))

        def go_on() -> None:
            check()
            while waiting:
                one = waiting[0]
                end = None if one.limit is None else len(one.prompt) + one.limit - 1
                settings = replace(one.sampler.settings, masked=one.mask is not None)
                try:
                    one.member = batch.join(one.prompt, end, settings, one.seed)
                except NoRoom:
                    break
                waiting.popleft()
                give_mask(one)
            came = {member for member, _ in batch.step()}
            for one in parts:
                if one.member in came:
                    give_mask(one)

        def leave(part: Part) -> None:
            if part.member is not None:
                batch.leave(part.member)

        for one in parts:
            one.go_on, one.leave = go_on, leave
        yield


def _batch(model: PackedModel, slots: int, positions: int, *, q8: bool, ends: Sequence[int]) -> Batch:
    """A batch of as many slots as there is memory for."""
    while True:
        try:
            return Batch(model, slots=slots, positions=positions, q8=q8, ends=ends)
        except (OutOfMemory, MemoryError):
            if slots == 1:
                raise
            slots //= 2
