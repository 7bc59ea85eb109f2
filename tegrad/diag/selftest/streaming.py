"""Stage 10: what kernels read, write and copy a second in volatile and in cached memory, and which policy is faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields

from tegrad.diag.selftest.record import amend
from tegrad.diag.selftest.stage import Notes
from tegrad.nv import probes
from tegrad.nv.probes import CACHED, REREAD_BYTES, VOLATILE, Rates

LEAST_GAIN = 1.05
"""Of rates, what cached memory has to reach somewhere: below that a flush in the wrong place takes it back."""
LEAST_RATIO = 0.98
"""What it has to reach everywhere: medians of a device at one clock differ by less."""
BOARD_REREADS = 4
"""Times that a board reads REREAD_BYTES."""


def streaming(notes: Notes) -> None:
    """`amount` MiB once, and as much again as passes over 2 MiB, in each kind of memory."""
    with notes.step("open"):
        device = probes.device()
    size = notes.amount << 20
    times = BOARD_REREADS if notes.board else max(1, size // REREAD_BYTES)
    notes.fact("MiB once", notes.amount)
    notes.fact(f"times {REREAD_BYTES >> 20} MiB again", times)
    found: dict[str, Rates] = {}
    for kind, role in probes.kinds(device).items():
        with notes.step(f"{kind} memory"):
            found[kind] = probes.stream(device, role, size, times)
        notes.fact(f"{kind}: GB/s", {name: round(rate, 2) for name, rate in asdict(found[kind]).items()})
    if not {VOLATILE, CACHED} <= found.keys():
        notes.line("this GPU has memory of its own, and no policy to choose")
        return
    won = faster(found[VOLATILE], found[CACHED])
    notes.line(_told(found, won))
    with notes.step("the record"):
        record = amend(notes, faster=won)
    if record is not None:
        notes.line(FOLLOWS[record.right, won])


def faster(volatile: Rates, cached: Rates) -> bool:
    """Whether cached memory is faster: LEAST_GAIN times as fast in something, and at least LEAST_RATIO times in all."""
    gains = _gains(volatile, cached).values()
    return max(gains) >= LEAST_GAIN and min(gains) >= LEAST_RATIO


FOLLOWS: Mapping[tuple[bool, bool], str] = {
    (
        True,
        True,
    ): "cached memory is right and faster: from the next stage on the policy is `cached`, unless TEGRAD_MEMORY "
    "says otherwise",
    (True, False): "cached memory is right but not faster: the policy stays `volatile`",
    (False, True): "cached memory is faster but not right: the policy stays `volatile`",
    (False, False): "cached memory is neither right nor faster: the policy stays `volatile`",
}
"""By whether cached memory is right, as the coherence stage found, and faster: which policy follows on a device."""


def _gains(volatile: Rates, cached: Rates) -> Mapping[str, float]:
    return {one.name: getattr(cached, one.name) / getattr(volatile, one.name) for one in fields(Rates)}


def _told(found: Mapping[str, Rates], won: bool) -> str:
    gains = ", ".join(f"{name} {gain:.2f}" for name, gain in _gains(found[VOLATILE], found[CACHED]).items())
    return f"cached memory is {'faster' if won else 'not faster'}; times as fast as volatile: {gains}"
