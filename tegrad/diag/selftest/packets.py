"""Stage 11: packets between CTAs in volatile and in cached memory: whole, in order, and quicker than launches?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from tegrad.diag.selftest.record import amend
from tegrad.diag.selftest.stage import Notes
from tegrad.nv import probes
from tegrad.nv.probes import CACHED, VOLATILE, Handover

BOARD_LAUNCHES = (10, 40)
TWO_CTAS = 2
LAYERS = 16
HANDOVERS, LAUNCHES = 5 * LAYERS + 1, 5 * LAYERS + 3
"""Of a token of Llama 3.2 1B, by the plan of one launch and by that of many (docs/llm.md)."""


def packets(notes: Notes) -> None:
    """Rounds of packets between two CTAs and between all SMs, `amount` of them, and what a round by launches costs."""
    with notes.step("open"):
        device = probes.device()
    suits: dict[str, bool] = {}
    came: dict[str, list[Handover]] = {}
    wrong: list[str] = []
    for kind, role in probes.kinds(device).items():
        with notes.step(f"launches in {kind} memory"):
            launch = probes.exchange_us(device, role, *([BOARD_LAUNCHES] if notes.board else []))
        notes.fact(f"{kind}: us of a round as a recorded launch", round(launch, 3))
        for ctas in (TWO_CTAS, device.sm_count):
            with notes.step(f"{ctas} CTAs in {kind} memory"):
                found = probes.handover(device, role, ctas, notes.amount)
            came.setdefault(kind, []).append(found)
            notes.fact(f"{kind}, {ctas} CTAs", {**asdict(found), "us": round(found.us, 3)})
            if not found.right:
                wrong.append(f"{kind} memory, {ctas} CTAs: {found.torn} torn, {found.late} late, {found.lost} lost")
        suits[kind] = suitable(came[kind], launch)
        notes.line(_told(kind, came[kind], launch, suits[kind]))
    if {VOLATILE, CACHED} <= suits.keys():
        with notes.step("the record"):
            amend(notes, volatile_packets=suits[VOLATILE], cached_packets=suits[CACHED])
    with notes.step("whether packets are right"):
        notes.expect(not wrong, "packets between CTAs that are whole and in order", "; ".join(wrong))


def suitable(found: Sequence[Handover], launch_us: float) -> bool:
    """Whether a step may be one launch: packets are right and whole, and a round of them takes less than by a launch.

    Of the last, which is among all SMs, as in a step. The two plans have as many of the one as of the other in a token
    (HANDOVERS, LAUNCHES), so the dearer one decides. Weights, which stream on through a hand-over and stop at a launch,
    are not in it.
    """
    return all(one.right and not one.parts for one in found) and found[-1].us < launch_us


def _told(kind: str, found: Sequence[Handover], launch: float, suits: bool) -> str:
    if not all(one.right for one in found):
        return f"{kind} memory: packets are wrong, so a step is many launches"
    end = "a step of one launch suits" if suits else "a step is many launches"
    seen = "; packets were seen in parts, data before epoch" if any(one.parts for one in found) else ""
    us = found[-1].us
    return (
        f"{kind} memory: {HANDOVERS} hand-overs of {us:.2f} us a token ({HANDOVERS * us:.0f} us) beside "
        f"{LAUNCHES} launches of {launch:.2f} us ({LAUNCHES * launch:.0f} us){seen}: {end}"
    )
