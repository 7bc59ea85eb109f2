"""Adding to the record of a first boot what stages after the coherence matrix find."""

from __future__ import annotations

from tegrad.diag.selftest.stage import Notes
from tegrad.nv import memory_record
from tegrad.nv.memory_record import MemoryRecord


def amend(notes: Notes, **found: bool) -> MemoryRecord | None:
    """Add to this machine's record and say so; None, with a line that says why, where there is none to add to."""
    if not memory_record.chip(notes.board):
        notes.line("no record is kept: this machine is no Jetson")
        return None
    try:
        record = memory_record.amend(notes.board, **found)
    except OSError as error:
        notes.line(f"the record is left as it was: {error}")
        return None
    if record is None:
        notes.line("there is no record to add this to: `tegrad selftest --stage coherence` begins one")
    else:
        notes.fact("recorded", found)
        if notes.board:
            notes.line("the record is a board's, and decides for no device")
    return record
