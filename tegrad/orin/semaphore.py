"""Semaphore records in GPU memory: what releases store, what acquires test, what reductions compute.

Host, copy engine, compute methods and QMDs all release semaphores; they differ in how they say it, not in what happens.
A store to a syncpoint's shim page does not reach memory: it increments the syncpoint.
"""

from __future__ import annotations

import operator
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from tegrad.orin.memory import PAGE_SHIFT

if TYPE_CHECKING:
    from tegrad.orin.host import HostChannel

Reduction = Callable[[int, int, int, bool], int]
"""(value in memory, payload, width in bits, signed) -> new value, still to be cut to the width."""
_REDUCING: Final = threading.Lock()
"""Held from a reduction's look at memory to its store: engines have threads of their own."""


def gpu_time() -> int:
    """The GPU's clock: nanoseconds, of which the hardware leaves the low five bits zero."""
    return time.monotonic_ns() & ~31


def _as_signed(value: int, width: int, signed: bool) -> int:
    return value - (1 << width) if signed and value >> (width - 1) else value


def _pick(choose: Callable[[int, int], int]) -> Reduction:
    def reduce(old: int, payload: int, width: int, signed: bool) -> int:
        return choose(_as_signed(old, width, signed), _as_signed(payload, width, signed))

    return reduce


def _plain(combine: Callable[[int, int], int]) -> Reduction:
    return lambda old, payload, width, signed: combine(old, payload)


def _inc(old: int, payload: int, width: int, signed: bool) -> int:
    return 0 if old >= payload else old + 1


def _dec(old: int, payload: int, width: int, signed: bool) -> int:
    return payload if old == 0 or old > payload else old - 1


def _float(combine: Callable[[float, float], float]) -> Reduction:
    def reduce(old: int, payload: int, width: int, signed: bool) -> int:
        a, b = struct.unpack("<2f", struct.pack("<2I", old & 0xFFFFFFFF, payload & 0xFFFFFFFF))
        return int.from_bytes(struct.pack("<f", combine(a, b)), "little")

    return reduce


_MIN, _MAX = _pick(min), _pick(max)
_XOR, _AND, _OR, _ADD = _plain(operator.xor), _plain(operator.and_), _plain(operator.or_), _plain(operator.add)

INC, DEC = _inc, _dec

HOST_REDUCTIONS: Mapping[int, Reduction] = MappingProxyType(
    dict(enumerate((_MIN, _MAX, _XOR, _AND, _OR, _ADD, INC, DEC)))
)
"""By the number that SEM_EXECUTE and SEMAPHORED use."""

COPY_REDUCTIONS: Mapping[int, Reduction] = MappingProxyType(
    {**HOST_REDUCTIONS, 10: _float(operator.add), 11: _float(min), 12: _float(max)}
)
"""By the number that the copy engine's LAUNCH_DMA uses."""

SHADER_REDUCTIONS: Mapping[int, Reduction] = MappingProxyType(
    dict(enumerate((_ADD, _MIN, _MAX, INC, DEC, _AND, _OR, _XOR)))
)
"""By the number that compute methods and QMD releases use."""


def release(
    channel: HostChannel,
    va: int,
    payload: int,
    client: int,
    *,
    wide: bool = False,
    stamped: bool = False,
    reduction: Reduction | None = None,
    signed: bool = False,
    what: str = "semaphore release",
) -> None:
    """Store a payload of 32 bits, or 64 with `wide`; `stamped` is a record of 16 bytes with the time, which goes first.

    In such a record the upper half of a 32-bit payload is stored as zero. The caller has checked the alignment.
    A store to a syncpoint increments that instead. MMU fault of `client` for a bad address.
    """
    vm = channel.vm
    if vm.syncpoints and (syncpt := vm.syncpoints.get(va >> PAGE_SHIFT)) is not None:
        channel.stored(syncpt)
        return
    size = 16 if stamped else 8 if wide else 4
    vm.require(va, size, client, write=True, what=what)
    with nullcontext() if reduction is None else _REDUCING, vm.storing(va, size):
        if stamped:
            vm.quads[va + 8 >> 3] = gpu_time()
        width = 64 if wide else 32
        if reduction is not None:
            old = vm.quads[va >> 3] if wide else vm.words[va >> 2]
            payload = reduction(old, payload & ((1 << width) - 1), width, signed)
        payload &= (1 << width) - 1
        if wide or stamped:
            vm.quads[va >> 3] = payload
        else:
            vm.words[va >> 2] = payload
    channel.stored(None)


def _circular(value: int, payload: int, width: int) -> bool:
    return not (value - payload) >> (width - 1) & 1


ACQUIRE_TESTS: Mapping[int, Callable[[int, int, int], bool]] = MappingProxyType(
    {
        0: lambda value, payload, width: value == payload,
        2: lambda value, payload, width: value >= payload,
        3: _circular,
        4: lambda value, payload, width: bool(value & payload),
        5: lambda value, payload, width: bool(~(value | payload) & ((1 << width) - 1)),
    }
)
"""By the operation of SEM_EXECUTE: ==, >= unsigned, >= circular, AND, NOR."""
