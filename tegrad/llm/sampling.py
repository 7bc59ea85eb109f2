"""Sampling on the device: settings of each sequence, and the launches that end a step with a token.

The filters are those of `sampler.Settings`. The draw is decided by noise from Philox-4x32-10 with the
sequence's seed as key and (token / 4, position) as counter, so that equal seeds give equal tokens, however the prompt
was fed and whichever launches do it. kernels/sampling.cuh tells the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple
from typing import Any, Final, Self

from tegrad.llm.errors import ModelError
from tegrad.llm.programs import load_kernel
from tegrad.llm.sampler import HISTORY, TOP, Settings
from tegrad.llm.state import States
from tegrad.nv import roles
from tegrad.nv.gpu import Gpu
from tegrad.nv.replay import Launch
from tegrad.nv.spec import MemorySpec

__all__ = ["HISTORY", "TOP", "Sampling", "Settings"]

THREADS: Final = 256
CHUNK: Final = 1024
"""Logits of a CTA."""
CUTS: Final = 8
"""Blocks that look for the largest logit of a sequence together."""
BINS: Final = 2048
SELECT_BYTES: Final = 48
SETTINGS: Final = struct.Struct("<3fi3fi")
SPEC: Final = MemorySpec(cpu_access=True, nolru=True, role=roles.STATE)


class Sampling:
    """Settings, histories and work space of `slots` sequences, for the device of opened `states`.

    A token of `ends` stops its sequence after it was published. Close it when no step is in flight.
    """

    def __init__(self, device: Gpu, vocab: int, ends: Sequence[int] = (), slots: int = 1) -> None:
        self._device, self.vocab, self._slots = device, vocab, slots
        self._parts = -(-vocab // CHUNK)
        self._undo = ExitStack()
        self._closed = False
        self._programs: dict[str, Any] = {}
        try:
            self._settings = self._take(slots * SETTINGS.size)
            self._histories = self._take(slots * HISTORY * 4)
            self._ends = self._take(4 + 4 * len(ends))
            self._entries = self._take(slots * self._parts * TOP * 8)
            self._tops = self._take(slots * self._parts * 8)
            self._selects = self._take(slots * SELECT_BYTES)
            self._bins = self._take(slots * BINS * 12)
            self._counters = self._take(slots * 4)
        except BaseException:
            self.close()
            raise
        self._put(self._ends, 0, struct.pack(f"<{len(ends) + 1}i", len(ends), *ends))
        for buffer in (self._histories, self._bins, self._counters):
            self._put(buffer, 0, bytes(buffer.size))
        for slot in range(slots):
            self.set(slot, Settings())

    def set(self, slot: int, settings: Settings) -> None:
        """How the next steps of a slot sample. Not while a step is in flight; recorded launches must suit it."""
        self._put(self._settings, slot * SETTINGS.size, SETTINGS.pack(*astuple(settings)))

    def remember(self, slot: int, tokens: Sequence[int], position: int) -> None:
        """Tokens that were fed from `position` on other than by steps that sample, for the penalties."""
        last = tokens[-HISTORY:]
        begin = (position + len(tokens) - len(last)) % HISTORY
        for at, part in ((begin, last[: HISTORY - begin]), (0, last[HISTORY - begin :])):
            self._put(self._histories, (slot * HISTORY + at) * 4, struct.pack(f"<{len(part)}i", *part))

    def launches(
        self, states: States, settings: Sequence[Settings], *, logits: Any, best: Any = None, best_row: Any = None
    ) -> tuple[Launch, ...]:
        """What ends a step of all slots, each of which is set to one of `settings`, or to one that filters less.

        logits float32 (slots, vocab); where all are greedy, the largest of every 32 and its token are enough: `best`
        float32 and `best_row` int32 (slots, vocab / 32 rounded up). Where one is not, no slot uses those.
        """
        first = (states.states, states.rings, self._histories, self._ends)
        buffers: tuple[Any, ...]
        if all(one.greedy for one in settings):
            if best is not None:
                program = self._program("greedy", 6)
                return (Launch(program, (*first, best, best_row), (self._slots, 1, 1), (1024, 1, 1)),)
            cuts = min(CUTS, self._parts)
            program = self._program("greedy_rows", 7, CUTS=cuts)
            buffers = (*first, logits, self._tops, self._counters)
            return (Launch(program, buffers, (cuts, self._slots, 1), (512, 1, 1)),)
        grid, block = (self._parts, self._slots, 1), (THREADS, 1, 1)
        made: list[Launch] = []
        if any(one.narrow for one in settings):
            buffers = (*first, self._settings, logits, self._entries, self._tops, self._counters)
            made.append(Launch(self._program("sample", len(buffers)), buffers, grid, block))
        buffers = (*first, self._settings, logits, self._selects, self._tops, self._bins, self._counters)
        for number in sorted({number for one in settings for number in one.passes(self.vocab)}):
            made.append(Launch(self._program("sample_wide", len(buffers), 1), buffers, grid, block, (number,)))
        return tuple(made)

    @property
    def finish(self) -> tuple[Any, Any]:
        """The histories and the ends of text, for kernels that end a step themselves (`finish` in sampling.cuh)."""
        return self._histories, self._ends

    def close(self) -> None:
        """Give the buffers back. Closing twice is harmless."""
        self._closed = True
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _program(self, name: str, buffers: int, values: int = 0, **more: int) -> Any:
        if name not in self._programs:
            defines: dict[str, Any] = {"VOCAB": self.vocab, "HISTORY": HISTORY, **more}
            self._programs[name] = load_kernel(self._device, name, buffers=buffers, values=values, **defines)
        return self._programs[name]

    def _take(self, size: int) -> Any:
        buffer = self._device.allocate(size, SPEC)
        self._undo.callback(self._device.release, buffer, SPEC)
        return buffer

    def _put(self, buffer: Any, at: int, data: bytes) -> None:
        if self._closed:
            raise ModelError("this sampling was closed: make a new one")
        buffer.cpu_view()[at : at + len(data)] = data
