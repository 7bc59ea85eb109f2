"""Sampling on the device: settings of each sequence, and the launches that end a step with a token.

Settings are values in memory, a record for each sequence, so that recorded launches serve any; `ending` says which
launches a step needs at all. The filters are those of `sampler.Settings`. The draw is decided by noise from
Philox-4x32-10 with the sequence's seed as key and (token / 4, position) as counter, so that equal seeds give equal
tokens, however the prompt was fed and whichever launches do it. kernels/sampling.cuh tells the rest.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from tegrad.llm.closing import Closing
from tegrad.llm.errors import ModelError
from tegrad.llm.programs import Programs
from tegrad.llm.sampler import BIASES, HISTORY, LIKELIEST, TOP, Logprobs, Settings
from tegrad.llm.state import RING_SPEC, States
from tegrad.llm.workspace import Workspace
from tegrad.nv import roles
from tegrad.nv.fence import full_barrier
from tegrad.nv.gpu import Gpu, words_of
from tegrad.nv.replay import Launch
from tegrad.nv.spec import MemorySpec

__all__ = ["HISTORY", "TOP", "Logprobs", "Sampling", "Settings"]

THREADS: Final = 256
CHUNK: Final = 1024
"""Logits of a CTA."""
CUTS: Final = 8
"""Blocks that look for the largest logit of a sequence together."""
BINS: Final = 2048
SELECT_BYTES: Final = 48
SETTINGS: Final = struct.Struct("<3fi3fi4i")
BIAS: Final = struct.Struct("<if")
RECORD: Final = struct.Struct(f"<Ifii{LIKELIEST * 'if'}")
RECORDS: Final = 4
"""Tokens of a sequence whose log-probabilities are kept for the host: more than there are steps in flight."""
MASK_HEAD: Final = 16
"""Bytes of a mask in front of its bits."""
MASK_WAIT_NS: Final = 2_000_000
"""Nanoseconds that a step waits for masks after its logits; a longer wait would hold up the other sequences."""
SPEC: Final = MemorySpec(cpu_access=True, nolru=True, role=roles.STATE)

Ending: TypeAlias = tuple[str | int, ...]
"""The launches that end a step, in order: kernels by name, passes of `sample_wide` by number."""


def ending(settings: Iterable[Settings], vocab: int) -> Ending:
    """What sequences with these settings need."""
    every = tuple(settings)
    passes = sorted({number for one in every for number in one.passes(vocab)})
    needs: dict[str | int, bool] = {
        "masks": any(one.masked for one in every),
        "greedy_rows": any(one.greedy for one in every),
        "sample": any(one.narrow and not one.greedy for one in every),
        **dict.fromkeys(passes, True),
        "logprobs": any(one.logprobs is not None for one in every),
    }
    return tuple(launch for launch, needed in needs.items() if needed)


class Sampling(Closing):
    """Settings, histories and work space of `slots` sequences, for the device of opened `states`.

    A token of `ends` stops its sequence after it was published. Close it when no step is in flight.
    """

    def __init__(self, device: Gpu, vocab: int, ends: Sequence[int] = (), slots: int = 1) -> None:
        self.vocab, self._slots = vocab, slots
        self._parts = -(-vocab // CHUNK)
        self._mask_bytes = MASK_HEAD + -(-vocab // 128) * 16
        self._workspace, self._programs = Workspace(device, SPEC), Programs(device)
        self._closed, take = False, self._workspace.take
        with self._closed_on_error():
            self._settings = take(slots * SETTINGS.size)
            self._histories = take(slots * HISTORY * 4)
            self._ends = take(4 + 4 * len(ends))
            self._biases = take(slots * BIASES * BIAS.size)
            self._given = take(slots * self._mask_bytes, RING_SPEC)
            self._masks = take(slots * self._mask_bytes)
            self._records = take(slots * RECORDS * RECORD.size, RING_SPEC)
            self._entries = take(slots * self._parts * TOP * 8)
            self._tops = take(slots * self._parts * 8)
            self._sums = take(slots * self._parts * 4)
            self._selects = take(slots * SELECT_BYTES)
            self._bins = take(slots * BINS * 12)
            self._counters = take(slots * 4)
        self._put(self._ends, 0, struct.pack(f"<{len(ends) + 1}i", len(ends), *ends))
        for buffer in (self._histories, self._bins, self._counters):
            self._put(buffer, 0, bytes(buffer.size))
        self._given_words = words_of(self._given, "I")
        for slot in range(slots):
            self.set(slot, Settings())

    def set(self, slot: int, settings: Settings) -> None:
        """How the next steps of a slot sample. Not while a step is in flight; recorded launches must suit it.

        Masks and log-probabilities of the sequence before are forgotten. ModelError as `Settings.check`.
        """
        settings.check(self.vocab)
        one, told = settings, -1 if settings.logprobs is None else settings.logprobs
        self._put(self._biases, slot * BIASES * BIAS.size, b"".join(BIAS.pack(*bias) for bias in one.biases))
        for masks in (self._given, self._masks):
            self._put(masks, slot * self._mask_bytes, bytes(4))
        self._put(self._records, slot * RECORDS * RECORD.size, bytes(RECORDS * RECORD.size))
        record = SETTINGS.pack(
            one.temperature, one.top_p, one.min_p, one.top_k, one.repeat, one.presence, one.frequency, one.last_n,
            len(one.biases), one.masked, told, 0,
        )  # fmt: skip
        self._put(self._settings, slot * SETTINGS.size, record)

    def remember(self, slot: int, tokens: Sequence[int], position: int) -> None:
        """Tokens that were fed from `position` on other than by steps that sample, for the penalties."""
        last = tokens[-HISTORY:]
        begin = (position + len(tokens) - len(last)) % HISTORY
        for at, part in ((begin, last[: HISTORY - begin]), (0, last[HISTORY - begin :])):
            self._put(self._histories, (slot * HISTORY + at) * 4, struct.pack(f"<{len(part)}i", *part))

    def mask(self, slot: int, number: int, allowed: bytes | memoryview | None) -> None:
        """What token `number` (from 1) of a masked slot may be: bit t % 32 of little-endian word t / 32 is token t's.

        None allows all. At any time after the token before it, and once. ModelError for another size.
        """
        at, size = slot * self._mask_bytes, -(-self.vocab // 32) * 4
        if allowed is not None:
            bits = memoryview(allowed).cast("B")
            if len(bits) != size:
                raise ModelError(f"a mask of {len(bits)} bytes was given: a vocabulary of {self.vocab} takes {size}")
            self._put(self._given, at + MASK_HEAD, bits)
        self._check_open()
        self._given_words[at // 4 + 1] = allowed is None
        full_barrier()  # the number says that the rest is there
        self._given_words[at // 4] = number

    def has_logprobs(self, slot: int, number: int) -> bool:
        """Whether those of a token are there: a step in flight tells the token before them."""
        there = self._record(slot, number)[:4] == struct.pack("<I", number)
        full_barrier()  # the number says that the rest is there
        return there

    def logprobs(self, slot: int, number: int) -> Logprobs:
        """Those of token `number` (from 1) of a slot whose settings ask for them, soon after it came."""
        found, taken, count, _, *likely = RECORD.unpack(self._record(slot, number))
        if found != number or math.isnan(taken):
            raise ModelError(f"no log-probabilities of token {number} are there: the last {RECORDS} are kept")
        return Logprobs(taken, tuple(zip(likely[: 2 * count : 2], likely[1 : 2 * count : 2], strict=True)))

    def _record(self, slot: int, number: int) -> bytes:
        at = (slot * RECORDS + (number - 1) % RECORDS) * RECORD.size
        return bytes(self._records.cpu_view()[at : at + RECORD.size])

    def launches(
        self,
        states: States,
        settings: Iterable[Settings],
        *,
        logits: Any,
        best: Any = None,
        best_row: Any = None,
        slots: int | None = None,
    ) -> tuple[Launch, ...]:
        """What ends a step of the first `slots`, or all, each of which is set to one of `settings` or needs less.

        logits float32 (slots, vocab); where all are greedy, the largest of every 32 and its token are enough: `best`
        float32 and `best_row` int32 (slots, vocab / 32 rounded up). Where one is not, no slot uses those.
        """
        steps, count = ending(settings, self.vocab), slots or self._slots
        if steps == ("greedy_rows",) and best is not None:
            buffers = (*self._ends_of(states), best, best_row)
            return (self._launch("greedy", buffers, (count, 1, 1), 1024),)
        return tuple(self._ending_launch(step, states, logits, count) for step in steps)

    @property
    def finish(self) -> tuple[Any, Any]:
        """The histories and the ends of text, for kernels that end a step themselves (`finish` in sampling.cuh)."""
        return self._histories, self._ends

    def close(self) -> None:
        """Give the buffers back. Closing twice is harmless."""
        self._closed = True
        self._workspace.close()

    def _ends_of(self, states: States) -> tuple[Any, ...]:
        """What every kernel takes that ends a step."""
        return states.states, states.rings, self._histories, self._ends

    def _ending_launch(self, step: str | int, states: States, logits: Any, slots: int) -> Launch:
        """One of `ending`'s."""
        parts, tops, counters = (self._parts, slots, 1), self._tops, self._counters
        drawn = (*self._ends_of(states), self._settings, self._biases, self._masks, logits)
        if isinstance(step, int):
            buffers = (*drawn, self._selects, tops, self._bins, counters)
            return self._launch("sample_wide", buffers, parts, THREADS, (step,))
        if step == "sample":
            return self._launch(step, (*drawn, self._entries, tops, counters), parts, THREADS)
        if step == "masks":
            buffers = (states.states, self._settings, self._given, self._masks)
            return self._launch(step, buffers, (slots, 1, 1), THREADS, WAIT_NS=MASK_WAIT_NS)
        if step == "logprobs":
            space = (self._entries, tops, self._sums, counters, self._records)
            buffers = (states.states, states.rings, self._settings, logits, *space)
            return self._launch(step, buffers, parts, THREADS, RECORDS=RECORDS)
        cuts = min(CUTS, self._parts)
        buffers = (*self._ends_of(states), self._settings, logits, tops, counters)
        return self._launch(step, buffers, (cuts, slots, 1), 512, CUTS=cuts)

    def _launch(
        self,
        name: str,
        buffers: tuple[Any, ...],
        grid: tuple[int, int, int],
        threads: int,
        values: tuple[int, ...] = (),
        **more: int,
    ) -> Launch:
        defines: dict[str, Any] = {"VOCAB": self.vocab, "HISTORY": HISTORY, "BIASES": BIASES, **more}
        program = self._programs(name, buffers=len(buffers), values=len(values), **defines)
        return Launch(program, buffers, grid, (threads, 1, 1), values)

    def _check_open(self) -> None:
        if self._closed:
            raise ModelError("this sampling was closed: make a new one")

    def _put(self, buffer: Any, at: int, data: bytes | memoryview) -> None:
        self._check_open()
        buffer.cpu_view()[at : at + len(data)] = data
