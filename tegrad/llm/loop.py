"""The decode loop: steps run ahead of the host, and tokens come through a ring.

Position, token and the random seed live on the device (`state`), and a recorded step advances them, so that all steps
are the same commands. The host keeps some of them in flight, submitted by one doorbell when it wakes; it reads tokens
from the ring as they come, and stops: nothing of the GPU's waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from math import ceil
from typing import Final

from tegrad.llm.errors import ContextError, ModelError
from tegrad.llm.state import RING, States
from tegrad.nv.gpu import Gpu
from tegrad.nv.replay import DEFAULT, Dependency, Launch, repeated

TOKEN_DELAY_S: Final = 4.5e-3
"""Seconds that a token may wait for the ones after it, so that the host wakes once for all of them."""
TOKENS_TOGETHER: Final = 16
"""Tokens for which it wakes once, at most."""
LATE_WAKE_S: Final = 1e-3
"""Seconds that it may wake late: so much work is in flight after the token for which it wakes."""
DRIVER_WAIT_AFTER_S: Final = 20e-3
"""Seconds after which a wait for a token becomes one for its step, which sleeps in the driver and notices faults."""
POLL_LIMIT_S: Final = 200e-6
"""Seconds up to which a wait of unknown length polls: a sleep would take too long."""
SHORTEST_NAP_S: Final = 50e-6
"""The shortest nap worth taking."""
LONGEST_NAP_S: Final = 1e-3
"""The longest nap where a token is overdue."""
OVERDUE_SHARE: Final = 1 / 8
"""Such a nap is this share of what it is overdue, so that it is seen at most that much late."""
EARLIER_SHARE: Final = 1 / 100
"""Share of a step by which a token is expected earlier each time that it was there when the host woke."""
UNSURE_BELOW_TOKENS: Final = 8
"""Tokens whose average may be far off."""
ONE_TOKEN_DOUBT: Final = 1 / 16
"""The same for what is the average of one token; of more it is less."""
STARVED_FACTOR: Final = 0.75
"""What a step is taken for, of what was thought, where the GPU had nothing to do while the host slept."""
AVERAGED_TOKENS: Final = 64
"""Tokens over which what a step takes is averaged, or up to twice as many."""


class LoopError(ModelError):
    """A stream of tokens cannot go on."""

    exit_code = 1


class Pace:
    """When tokens come: what a step takes, and when the last token came, as far as a host sees that wakes now and then.

    Times are the clock's, `step` is in seconds and 0 while nobody knows.
    """

    def __init__(self) -> None:
        self.knows(0.0, 0)
        self._last = 0, 0.0
        """The last token that came, counted from 1, and about when."""
        self._since: list[tuple[int, float]] = []
        """The same of the token from which the average counts, and of the one that follows it after AVERAGED_TOKENS."""

    def knows(self, step: float, tokens: int) -> None:
        """A step takes so long, which is the average of so many tokens."""
        self.step, self._tokens = step, tokens if step else 0
        self.together = max(1, min(TOKENS_TOGETHER, int(TOKEN_DELAY_S / step))) if step else 1
        """Tokens to sleep for at once."""
        self.after = min(TOKENS_TOGETHER, ceil(LATE_WAKE_S / step) + (tokens < UNSURE_BELOW_TOKENS)) if step else 2
        """Steps that have to be in flight after them: more while a step is not known well."""

    def begin(self, now: float) -> None:
        """The first step of a stream goes out."""
        self._last = 0, now
        self._since.clear()

    def nap(self, count: int, now: float, begun: float) -> float:
        """Seconds to sleep until token `count`, for which the host waits since `begun`; 0 where polling is better."""
        if not self.step:
            return min(LONGEST_NAP_S, OVERDUE_SHARE * (now - begun)) if now - begun > POLL_LIMIT_S else 0.0
        early = self._expected(count) - now
        if early > 0:
            return early if early >= SHORTEST_NAP_S else 0.0
        return min(LONGEST_NAP_S, max(2 * SHORTEST_NAP_S, 4 * EARLIER_SHARE * self.step, OVERDUE_SHARE * -early))

    def saw(self, count: int, now: float, absent: tuple[int, float], *, woken: bool, starved: bool) -> None:
        """Of a stream's tokens, `count` were there `now` and the next was not; `absent` is one that was not at a time.

        `woken` if the host found the last one when it woke, perhaps long after it came, and did not wait for it then;
        `starved` if it slept too long and the GPU had nothing left to do.
        """
        number, before = absent
        earliest = max(now - self.step, before + (count - number) * self.step)
        came = min(now, max(earliest, self._expected(count))) if woken else now
        self._learn(count, came, starved)
        if woken:
            came -= self.step * (EARLIER_SHARE + ONE_TOKEN_DOUBT / max(1, self._tokens))
        self._last = count, came

    def _expected(self, count: int) -> float:
        last, came = self._last
        return came + (count - last) * self.step

    def _learn(self, count: int, came: float, starved: bool) -> None:
        if self._since:
            begin, at = self._since[0]
            took = (came - at) / (count - begin)
            if starved:
                self.knows(min(self.step or took, took) * STARVED_FACTOR, 0)
                self._since.clear()
            elif count - begin >= self._tokens:
                self.knows(took, min(count - begin, AVERAGED_TOKENS // 2))
        self._since.append((count, came))
        if len(self._since) > 2:
            del self._since[0 if self._since[1][0] - self._since[0][0] >= AVERAGED_TOKENS else 2]

    def passed(self, count: int, now: float) -> None:
        """So many tokens were there before the host looked: when they came tells nothing of a step."""
        self._last = count, now
        self._since.clear()


class Loop:
    """A step, recorded, and the loop over it for one sequence.

    The launches of `step` run in order; the last of them publishes a token (`publish_token` in kernels/state.cuh) for
    the state in slot 0 of `states`. A run is `steps_per_submission` steps one after the other. Close it before the
    states.
    """

    def __init__(
        self,
        device: Gpu,
        step: Sequence[Launch],
        states: States,
        *,
        dependency: Dependency = DEFAULT,
        steps_per_submission: int = 1,
    ) -> None:
        self.states, self.step = states, tuple(step)
        form = dependency if steps_per_submission == 1 else repeated(dependency, len(step))
        self.recording = device.record(
            self.step * steps_per_submission, form, depth=-(-2 * TOKENS_TOGETHER // steps_per_submission) + 2
        )
        self._steps_per_submission = steps_per_submission
        self._streams = 0
        self._pace = Pace()
        self._rest()

    def _rest(self) -> None:
        """What a stream knows in front of its first step; what a step takes stays known."""
        self._submitted = 0
        self._runs: deque[int] = deque()
        self._oldest = 0

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
        """Wait for the end of the last step, which comes after its token. DeviceFault, DeviceClosed."""
        self.recording.wait()

    def close(self) -> None:
        """Wait for what runs and give the recording back."""
        self.recording.close()

    def _steps(self, tokens: Sequence[int], position: int, limit: int, total: int, seed: int) -> Iterator[int]:
        """What each of `total` steps publishes, with the next ones submitted before it is yielded."""
        self.settle()
        self.states.begin(0, tokens, position, limit, seed)
        self._rest()
        self._streams += 1
        stream, number, first = self._streams, 0, len(tokens)
        self._pace.begin(time.perf_counter())
        while number < total:
            for token in self._come(number + 1, total, first):
                number += 1
                yield token
                if stream != self._streams:
                    raise LoopError("another stream of this sequence has begun: this one is over")

    def _come(self, number: int, total: int, first: int) -> list[int]:
        """Tokens from `number` on, one at least: all that have come when the host wakes.

        The host does not sleep beyond token `first`, the first that is new.
        """
        pace, states, clock = self._pace, self.states, time.perf_counter
        goal = min(total, number - 1 + pace.together)
        self._submit(min(total, goal + max(pace.after, self._steps_per_submission)))  # at least a run follows
        if number <= first:
            goal = min(goal, first)
        now = begun = clock()
        looks = 0
        while not (tokens := states.tokens(0, number, total)):
            looks += 1
            now = clock()
            if now - begun > DRIVER_WAIT_AFTER_S:
                self._finish(number)
            elif (nap := pace.nap(goal, now, begun)) > 0:
                time.sleep(min(nap, DRIVER_WAIT_AFTER_S))
        absent, now, count = (number, now if looks else 0.0), clock(), number - 1 + len(tokens)
        starved = self._submitted < total and count >= self._submitted
        if starved and not looks:
            pace.passed(count, now)
        else:
            pace.saw(count, now, absent, woken=looks < 2, starved=starved)
        self._submit(min(total, count + pace.together + max(pace.after, self._steps_per_submission)))
        return tokens

    def _submit(self, number: int) -> None:
        """See to it that the step of token `number` is on its way."""
        if (missing := number - self._submitted) > 0:
            runs = -(-missing // self._steps_per_submission)
            last = self.recording.run(runs)
            self._runs.extend(range(last - runs + 1, last + 1))
            self._submitted += runs * self._steps_per_submission

    def _finish(self, number: int) -> None:
        """Wait for the step of token `number`, which sleeps in the driver and notices faults."""
        run = (number - 1) // self._steps_per_submission
        while self._oldest < run:
            self._runs.popleft()
            self._oldest += 1
        self.recording.wait(self._runs[0])
        if not self.states.tokens(0, number, number):
            raise LoopError("a step ended without publishing a token: its last launch must do that")
