"""Sampling on the device: settings of each sequence, and the launches that end a step with a token.

The filters are those of llama.cpp in its order: penalties, top-k, top-p, min-p, temperature, draw (`sampler` is the
host's). Among equal logits the lower index comes first. The draw is decided by noise from Philox-4x32-10 with the
sequence's seed as key and (token / 4, position) as counter, so that equal seeds give equal tokens, however the prompt
was fed and whichever launches do it. kernels/sampling.cuh tells the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import Any, Final, Self

from tinygrad.device import BufferSpec

from tegrad.llm.errors import ModelError
from tegrad.llm.programs import load_kernel
from tegrad.llm.state import States
from tegrad.nv.replay import Launch

THREADS: Final = 256
CHUNK: Final = 1024
"""Logits of a CTA."""
TOP: Final = 128
"""The largest top-k that takes one launch."""
HISTORY: Final = 1024
"""Tokens of a sequence that penalties may look back on."""
COOLEST: Final = 1e-3
"""Temperatures between 0 and this are refused: the noise would drown in the rounding of logit / temperature."""
BINS: Final = 2048
SELECT_BYTES: Final = 48
SETTINGS: Final = struct.Struct("<3fi3fi")
SPEC: Final = BufferSpec(cpu_access=True, nolru=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a token is drawn; the defaults take the likeliest one. Fields in the order of `struct Settings`.

    temperature 0 takes the likeliest, after penalties. top_k 0, top_p 1 and min_p 0 keep all. `repeat` divides positive
    logits and multiplies the others, `presence` is subtracted once and `frequency` for each occurrence, of tokens among
    the last `last_n`, the prompt's included.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repeat: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    last_n: int = 64

    def __post_init__(self) -> None:
        allowed = {
            f"a temperature of 0 or from {COOLEST:g}": self.temperature == 0 or COOLEST <= self.temperature < 1e9,
            "a top-p above 0 and up to 1": 0 < self.top_p <= 1,
            "a min-p from 0 to 1": 0 <= self.min_p <= 1,
            "a top-k from 0": 0 <= self.top_k < 1 << 31,
            "a repetition penalty above 0": 0 < self.repeat < 1e9,
            "finite presence and frequency penalties": abs(self.presence) < 1e9 and abs(self.frequency) < 1e9,
            f"a window of 0 to {HISTORY} tokens": 0 <= self.last_n <= HISTORY,
        }
        if wrong := [rule for rule, holds in allowed.items() if not holds]:
            raise ModelError(f"cannot sample with {self}; give {' and '.join(wrong)}")

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens matter."""
        return self.last_n > 0 and (self.repeat, self.presence, self.frequency) != (1, 0, 0)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token of the unchanged logits is taken: what the logits kernel found is enough."""
        return self.temperature == 0 and not self.penalizes

    @property
    def narrow(self) -> bool:
        """Whether kernel `sample` does it in one launch."""
        return self.temperature == 0 or 0 < self.top_k <= TOP

    def passes(self, vocab: int) -> tuple[int, ...]:
        """The launches of kernel `sample_wide` that it takes; none where `sample` does it."""
        if self.narrow:
            return ()
        count = (1, 2, 3) if self.top_k < vocab and self.top_k else ()
        return (0, *count, *((4, 5, 6) if self.top_p < 1 else ()), 7)


class Sampling:
    """Settings, histories and work space of `slots` sequences, for the device of opened `states`.

    A token of `ends` stops its sequence after it was handed over. Close it when no step is in flight.
    """

    def __init__(self, device: Any, vocab: int, ends: Sequence[int] = (), slots: int = 1) -> None:
        self._device, self.vocab, self._slots = device, vocab, slots
        self._parts = -(-vocab // CHUNK)
        self._undo = ExitStack()
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
        if best is not None and all(one.greedy for one in settings):
            program = self._program("greedy", 6)
            return (Launch(program, (*first, best, best_row), (self._slots, 1, 1), (1024, 1, 1)),)
        grid, block = (self._parts, self._slots, 1), (THREADS, 1, 1)
        made: list[Launch] = []
        buffers: tuple[Any, ...]
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
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _program(self, name: str, buffers: int, values: int = 0) -> Any:
        if name not in self._programs:
            defines: dict[str, Any] = {"VOCAB": self.vocab, "HISTORY": HISTORY}
            self._programs[name] = load_kernel(self._device, name, buffers=buffers, values=values, **defines)
        return self._programs[name]

    def _take(self, size: int) -> Any:
        buffer = self._device.allocator.alloc(size, SPEC)
        free: Callable[..., None] = self._device.allocator.free
        self._undo.callback(free, buffer, buffer.size, SPEC)
        return buffer

    def _put(self, buffer: Any, at: int, data: bytes) -> None:
        buffer.cpu_view()[at : at + len(data)] = data
