"""The stages in the order of risk: each row says what it does, for how long at most, and what its failure means."""

from __future__ import annotations

from collections.abc import Sequence

from tegrad.diag.selftest.coherence import coherence
from tegrad.diag.selftest.ioctls import ioctls
from tegrad.diag.selftest.machine import ON_A_BOARD, machine
from tegrad.diag.selftest.stage import Stage

SEND = "send the report, with the last lines of `sudo dmesg`"

STAGES: Sequence[Stage] = (
    Stage(
        "machine",
        "Release, kernel, page size, Python, groups, nodes, power mode, clocks",
        machine,
        limit_s=30,
        means="this machine lacks something without which no GPU work can be tried",
        next_step=f"`tegrad doctor` says what to install; {ON_A_BOARD}",
    ),
    Stage(
        "ioctls",
        "Characteristics, buffers, mappings, address space, a channel set up and closed: no GPU work yet",
        ioctls,
        limit_s=60,
        means="the driver refuses or answers otherwise than L4T r36's; nothing was sent to the GPU",
        next_step=f"compare the release with README's table; {SEND}",
    ),
    Stage(
        "coherence",
        "The coherence matrix: which stores CPU and GPU see of each other, by flags of the mapping and by flush",
        coherence,
        limit_s=180,
        means="work of the GPU does not end, or CPU and GPU do not see the same memory: no result could be trusted",
        next_step=f"run nothing else on this GPU; {SEND}",
    ),
)


def chosen(names: Sequence[str]) -> Sequence[Stage]:
    """The stages of these names, in the order of the table; all where none is named."""
    return [stage for stage in STAGES if not names or stage.name in names]
