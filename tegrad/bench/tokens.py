"""The tokens that a timed decode has to draw: those of the same step, fed one at a time.

In a timed decode the step chooses its tokens itself, steps run ahead of the host, and tokens come through a ring. Here
the host waits for each step, reads its logits and feeds back the likeliest token. Whether the step computes what it
should is another matter: after each of these tokens a step of many launches, with the dependency that recordings have
by default, has to find the next one about as likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tegrad.bench.record import RecordError
from tegrad.llm.engine import Engine
from tegrad.llm.plan import DecodePlan
from tegrad.llm.state import State
from tegrad.nv.replay import Recording

FIRST_TOKEN: Final = 1
"""The token that a decode begins with."""
LOGIT_MARGIN: Final = 1.0
"""Standard deviations of the logits by which a token may lie below the likeliest of a step that rounds otherwise: two
steps' logits differ by less than 0.1 (root mean square), and the largest of 100,000 lies 4 above the mean."""


def expected(engine: Engine, depth: int, count: int) -> list[int]:
    """The tokens that the engine has to draw greedily after `depth` positions and FIRST_TOKEN.

    RecordError where many launches disagree.
    """
    engine.reset(depth)
    found, token = [], FIRST_TOKEN
    for _ in range(count):
        token = int(engine.feed([token]).argmax())
        found.append(token)
    _hold_against_launches(engine, depth, found)
    engine.reset(depth)
    return found


def check(came: Sequence[int], wanted: Sequence[int]) -> None:
    """RecordError where a timed decode drew other tokens than it had to, or another number of them."""
    if len(came) != len(wanted):
        raise RecordError(f"{len(came)} tokens came where {len(wanted)} were asked for")
    for at, (own, right) in enumerate(zip(came, wanted, strict=True)):
        if own != right:
            raise RecordError(
                f"the timed decode drew {own} as token {at + 1}, where the same step gave {right} when the host waited "
                "for each: what is timed here is wrong, its speed is no figure"
            )


def _hold_against_launches(engine: Engine, depth: int, tokens: Sequence[int]) -> None:
    """RecordError for a token that is not about the likeliest of a step of many launches after the same ones."""
    device = engine.device
    for loop in engine._loops.values():
        loop.settle()
    with (
        DecodePlan(engine.model, engine._states, engine._cache) as plan,
        Recording(device, plan.launches) as step,
    ):
        for at, (token, drawn) in enumerate(zip([FIRST_TOKEN, *tokens[:-1]], tokens, strict=True)):
            engine._states.write(0, State(position=depth + at, token=token, limit=engine.context, active=1))
            step.wait(step.run())
            logits = np.frombuffer(device.download(plan.logits, 4 * engine.config.vocab), np.float32)
            below = float((logits.max() - logits[drawn]) / logits.std())
            if not below <= LOGIT_MARGIN:  # nor where they are no numbers
                raise RecordError(
                    f"the step draws {drawn} as token {at + 1}, which lies {below:.2f} standard deviations below what "
                    f"many launches find the likeliest, {int(logits.argmax())}: it computes something else"
                )
