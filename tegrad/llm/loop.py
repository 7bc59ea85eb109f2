"""The decode loop: steps run ahead of the host, and tokens come through a ring.

Position, token and the random seed live on the device (`state`), and a recorded step advances them, so that all steps
are the same commands. The host keeps two of them in flight, one doorbell each, or a few more where they are short; it
reads tokens from the ring as they come, and stops: nothing of the GPU's waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tegrad.llm.errors import ContextError, ModelError
from tegrad.llm.state import RING, States
from tegrad.nv.replay import DEFAULT, Boundary, Launch, Recording, repeated

MOMENT: Final = 1e-3
"""Seconds that a token may wait for the ones behind it, so that the host wakes once for all of them."""
TOGETHER: Final = 3
"""Tokens for which it wakes once, at most; a step more is in flight, so that the GPU has work meanwhile."""
PATIENCE: Final = 20e-3
"""Seconds after which a wait for a token becomes one for its step, which sleeps in the driver and notices faults."""
POLLED: Final = 200e-6
"""Seconds up to which a wait for a token polls: a sleep would take too long."""
SHORTEST: Final = 50e-6
"""The shortest nap worth taking."""
EARLIER: Final = 0.98
LATER: Final = 1.1
"""How a nap changes from token to token."""


class LoopError(ModelError):
    """A stream of tokens cannot go on."""

    exit_code = 1


class Loop:
    """A step, recorded, and the loop over it for one sequence.

    The launches of `step` run in order; the last of them hands over a token (`hand_over` in kernels/state.cuh) for the
    state in slot 0 of `states`. A run is `joined` steps one behind the other. Close it before the states.
    """

    def __init__(
        self, device: Any, step: Sequence[Launch], states: States, *, boundary: Boundary = DEFAULT, joined: int = 1
    ) -> None:
        self.states, self.step = states, tuple(step)
        form = boundary if joined == 1 else repeated(boundary, len(step))
        self.recording = Recording(device, self.step * joined, form, depth=-(-TOGETHER // joined) + 2)
        self._joined = joined
        self._in_flight: deque[int] = deque()
        self._streams = 0
        self._rest()

    def _rest(self) -> None:
        """What a stream knows in front of its first step."""
        self._nap, self._together = 0.0, 1
        self._awaited, self._came = 0, 0.0
        self._submitted = 0

    def stream(
        self, tokens: Sequence[int], position: int, limit: int, count: int | None = None, seed: int = 0
    ) -> Iterator[int]:
        """Feed tokens, the first of them at `position`, and yield up to `count` sampled ones as they come.

        It ends when the positions below `limit` are used; ContextError if they do not hold the tokens. Steps that are
        in flight when the caller stops reading run to their end; what they did is overwritten by the next stream.
        With the next stream this one is over: LoopError where it is read on.
        """
        if not tokens or position + len(tokens) > limit:
            raise ContextError(f"{len(tokens)} tokens at position {position} do not fit a context of {limit}")
        *parts, rest = [tokens[at : at + RING] for at in range(0, len(tokens), RING)]
        for part in parts:
            for _ in self._steps(part, position, limit, len(part), seed):
                pass
            position += len(part)
        total = limit - position if count is None else min(limit - position, len(rest) - 1 + count)
        for number, token in enumerate(self._steps(rest, position, limit, total, seed), 1):
            if number >= len(rest):
                yield token

    def settle(self) -> None:
        """Wait for the end of the last step, which comes behind its token. DeviceFault, DeviceClosed."""
        self.recording.wait()
        self._in_flight.clear()

    def close(self) -> None:
        """Wait for what runs and give the recording back."""
        self.recording.close()

    def _steps(self, tokens: Sequence[int], position: int, limit: int, total: int, seed: int) -> Iterator[int]:
        """What each of `total` steps hands over, with the next ones submitted before it is yielded."""
        self.settle()
        self.states.begin(0, tokens, position, limit, seed)
        self._rest()
        self._streams += 1
        stream = self._streams
        for number in range(1, total + 1):
            self._submit(min(total, number + self._ahead))
            token = self.states.token(0, number)
            if token is None:
                token = self._await(number, min(total, number - 1 + self._together))
            elif number > self._awaited:
                self._nap *= EARLIER**8  # it came behind what the last nap was for, so that was too long
            if number % self._joined == 0:
                self._in_flight.popleft()
            self._submit(min(total, number + self._ahead + 1))
            yield token
            if stream != self._streams:
                raise LoopError("another stream of this sequence has begun: this one is over")

    @property
    def _ahead(self) -> int:
        """Steps behind the one whose token is awaited, so that at least one run is behind its run."""
        return self._together + self._joined - 1

    def _submit(self, number: int) -> None:
        """See to it that the step of token `number` is on its way."""
        while self._submitted < number:
            self._in_flight.append(self.recording.run())
            self._submitted += self._joined

    def _await(self, number: int, goal: int) -> int:
        """Token `number` of slot 0, once token `goal` has come.

        The host naps for about as long as that takes, a little less where it came while the host slept, a little
        more where the host woke first, so that being late never makes it later.
        """
        states, clock = self.states, time.perf_counter
        begun, naps = clock(), 0
        while states.token(0, goal) is None:
            if clock() - begun > PATIENCE:
                self.recording.wait(self._in_flight[(goal - 1) // self._joined - (number - 1) // self._joined])
                if states.token(0, goal) is None:
                    raise LoopError("a step ended without handing over a token: its last launch must do that")
            elif self._nap >= SHORTEST:
                time.sleep(self._nap / 16 if naps else self._nap)
                naps += 1
        now = clock()
        if naps:
            starved = states.token(0, self._submitted) is not None
            self._nap *= LATER if naps > 1 else 0.5 if starved else EARLIER
        else:
            polled = now - begun
            self._nap = polled / 2 if polled > POLLED else self._nap * EARLIER**8
        self._pace(goal, now)
        token = states.token(0, number)
        assert token is not None
        return token

    def _pace(self, goal: int, now: float) -> None:
        """Decide for how many tokens the next nap is, by what one of those since the last took."""
        before = self._together
        if self._awaited:
            self._together = max(1, min(TOGETHER, int(MOMENT * (goal - self._awaited) / (now - self._came))))
        self._nap *= self._together / before
        self._awaited, self._came = goal, now
