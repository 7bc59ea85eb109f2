"""The host's side of `kernels/state.cuh`: a sequence's state on the device, and the ring of its tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

from tegrad.llm.closing import Closing
from tegrad.llm.errors import ModelError
from tegrad.llm.workspace import Workspace
from tegrad.nv import roles
from tegrad.nv.gpu import Gpu, words_of
from tegrad.nv.spec import MemorySpec

RING: Final = 256
"""Tokens that the ring holds; the kernels' RING."""
ENTRY_BYTES: Final = 8
_MASK: Final = 0xFFFFFFFF
STATE_SPEC: Final = MemorySpec(cpu_access=True, nolru=True, role=roles.STATE)
RING_SPEC: Final = MemorySpec(host=True, cpu_access=True, nolru=True, role=roles.STATE)
"""The ring lies in the host's memory, where reading it is cheap."""
LOGITS_SPEC: Final = MemorySpec(nolru=True, role=roles.LOGITS)


class State(ctypes.Structure):
    """`struct State`: fields as there."""

    _fields_ = (
        ("position", ctypes.c_int32),
        ("token", ctypes.c_int32),
        ("stop", ctypes.c_int32),
        ("written", ctypes.c_uint32),
        ("seed_lo", ctypes.c_uint32),
        ("seed_hi", ctypes.c_uint32),
        ("limit", ctypes.c_int32),
        ("active", ctypes.c_int32),
        ("forced", ctypes.c_int32),
        ("reserved", ctypes.c_int32 * 7),
    )


class States(Closing):
    """States and rings of `slots` sequences, in buffers of the device. Close it when no step is in flight.

    `states` and `rings` are what kernels take; slot s has ring entries [s * RING, (s + 1) * RING). What is `staged` is
    for kernels/admit.cu, which puts it in force between two steps.
    """

    def __init__(self, device: Gpu, slots: int = 1) -> None:
        self._device = device
        self._closed = False
        self._workspace = Workspace(device, STATE_SPEC)
        with self._closed_on_error():
            self.states, self.staged = (self._workspace.take(slots * ctypes.sizeof(State)) for _ in range(2))
            self.rings = self._workspace.take(slots * RING * ENTRY_BYTES, RING_SPEC)
        self._entries = words_of(self.rings, "Q")
        for slot in range(slots):
            self.write(slot, State(stop=1))
            self._entries[slot * RING : (slot + 1) * RING] = memoryview(bytes(RING * ENTRY_BYTES)).cast("Q")

    def begin(
        self, slot: int, tokens: Sequence[int], position: int, limit: int, seed: int = 0, *, staged: bool = False
    ) -> None:
        """Make the next step of a slot embed tokens[0] at `position`, and those after it the rest, before it samples.

        The steps for `tokens` publish the tokens after the first, and then the first sampled one, counted from 1;
        the slot stops before it would stand at `limit`. Not while a step is in flight, unless it is staged for a slot
        that none of them samples for. ModelError for more tokens than the ring holds, or for none.
        """
        if not 0 < len(tokens) <= RING:
            raise ModelError(f"{len(tokens)} tokens cannot be fed at once: give 1 to {RING}")
        self._check_open()
        at = slot * RING
        # What an earlier sequence left must not look like a token of this one.
        self._entries[at : at + RING] = memoryview(bytes(RING * ENTRY_BYTES)).cast("Q")
        for index, token in enumerate(tokens[1:]):
            self._entries[at + index] = token
        state = State(
            position=position,
            token=tokens[0],
            seed_lo=seed & _MASK,
            seed_hi=seed >> 32 & _MASK,
            limit=limit,
            active=1,
            forced=len(tokens) - 1,
        )
        self.write(slot, state, staged=staged)

    def token(self, slot: int, count: int) -> int | None:
        """The token number `count` (from 1) of a slot, or None if it has not come. DeviceClosed."""
        return next(iter(self.tokens(slot, count, count)), None)

    def tokens(self, slot: int, first: int, last: int) -> list[int]:
        """Of a slot's tokens number `first` to `last`, at most as many as the ring holds, those that have come."""
        self._check_open()
        entries, at, found = self._entries, slot * RING, []
        for count in range(first, min(last, first + RING - 1) + 1):
            entry = entries[at + (count - 1) % RING]
            if entry >> 32 != count & _MASK:
                break
            found.append(entry & _MASK)
        return found

    def read(self, slot: int) -> State:
        """A slot's state as it is in memory now."""
        self._check_open()
        size = ctypes.sizeof(State)
        return State.from_buffer_copy(bytes(self.states.cpu_view()[slot * size : (slot + 1) * size]))

    def write(self, slot: int, state: State, *, staged: bool = False) -> None:
        """Set a slot's state. Not while a step is in flight, unless it is staged."""
        self._check_open()
        size = ctypes.sizeof(State)
        (self.staged if staged else self.states).cpu_view()[slot * size : (slot + 1) * size] = bytes(state)

    def close(self) -> None:
        """Give the buffers back, once the GPU is done with them. Closing twice is harmless."""
        self._closed = True
        self._entries = memoryview(b"").cast("Q")
        self._workspace.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ModelError("these states were closed: make new ones")
        if self._device.closed:
            raise self._device.gone("the sequence's memory was released when its device was closed; begin a new one")
