"""What a program that runs through the NV device spends its time on, written when it ends: `TEGRAD_PROFILE=FOLDER`.

tinygrad's own reporting (PROFILE) is turned on as our device is put in, and what it collects is kept: GPU timestamps
around every kernel and copy, the host's work. Recordings of ours report their launches among these (`stamps`), and
waits are told as well. With it nothing of a TinyJit is replayed, and launches run one at a time.

A process leaves `PID.json`: spans of [kind, track, name, begin, us, bytes or null], times in microseconds of the CPU's
clock; kinds are "kernel", "copy", "wait" and "host". `diag.profile` reads it.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, TypeAlias

from tinygrad.device import Compiled, Device, ProfileGraphEvent
from tinygrad.engine.realize import estimate_uop
from tinygrad.helpers import (
    PROFILE,
    ProfileEvent,
    ProfileRangeEvent,
    TracingKey,
    ansistrip,
    cpu_events,
    cpu_profile,
    perf_counter_us,
    to_tuple,
)
from tinygrad.uop.ops import Ops, UOp, sym_infer

from tegrad.errors import SettingError, TegradError
from tegrad.hw.chips import CHIPS
from tegrad.nv import compat, stamps
from tegrad.nv.device import NVDevice, _opened
from tegrad.nv.graph import open_graphs
from tegrad.nv.jit import kernels_of
from tegrad.nv.kernel import BOARD_VARIABLE, PROFILE_VARIABLE, board_counts
from tegrad.nv.queues import Fifo, NVSignal

TRACK_STATS: Final = "tinygrad.engine.realize.track_stats"
_track_stats: Any = compat.published(TRACK_STATS)
Told: TypeAlias = tuple[str, str, str, float, float, int | None]
"""Kind, track, name, begin and length in microseconds, bytes."""


class Profile:
    """One process's."""

    def __init__(self, folder: Path) -> None:
        """SettingError where `folder` is none."""
        if not folder.is_dir():
            raise SettingError(f"{PROFILE_VARIABLE}={folder} is no folder: make it, or unset the variable")
        self._file = folder / f"{os.getpid()}.json"
        self._process = os.getpid()
        self._spans: list[Told] = []
        self._devices: dict[str, dict[str, Any]] = {}
        self._sizes: dict[tuple[str, str], int] = {}
        """Bytes that a kernel of a device had to read and write last, by its name."""
        shared = os.environ.get(BOARD_VARIABLE, "").partition(":")[0] not in CHIPS
        self._before = (board_counts() if shared else None) or {}
        PROFILE.value = 1

    def closing(self, device: NVDevice) -> None:
        """Take everything that a device which is still open has to tell."""
        host = list(cpu_events)
        cpu_events.clear()
        with suppress(TegradError):
            for recording in stamps.open_recordings:
                if recording.device is device:
                    recording.collect()
            for graph in [graph for graph in open_graphs if device in graph.devices]:
                open_graphs.discard(graph)  # it runs no more, and has told of all runs then
                graph.collect()
            device.synchronize()
        ahead = 0.0
        with suppress(TegradError):
            ahead = stamps.clock_ahead(device)
        work = list(Compiled.profile_events)
        Compiled.profile_events.clear()
        cpu_events.clear()  # the waits of this function
        self._devices[device.device] = {"arch": device.arch, "sms": device.sm_count}
        self._spans += [span for event in work for span in _gpu_spans(event, ahead, self._sizes)]
        self._spans += [span for event in host for span in _host_spans(event)]

    def ran(self, context: Any, call: UOp, begun: Any, took: list[float | None]) -> None:
        """tinygrad's `track_stats`, which comes after each call; what the call has to read and write is kept."""
        _track_stats(context, call, begun, took)
        for each in kernels_of(call):
            size = int(sym_infer(estimate_uop(each).mem, context.var_vals))
            target = to_tuple(each.src[1].device)[0]
            if each.src[0].op is Ops.PROGRAM:
                self._sizes[target, each.src[0].arg.function_name] = size
            elif each.src[0].op is Ops.COPY and each is call and hasattr(Device[target].allocator, "_as_buffer"):
                source = to_tuple(each.src[2].device)[0]
                if compat.is_nv(target) and not compat.is_nv(source):  # as a view, of which nothing else tells
                    us = float(perf_counter_us() - begun)
                    self._spans.append(("copy", "copies", f"{source} -> {target}", float(begun), us, size))

    def finish(self) -> None:
        """Write the file, in the process that began it, if it has opened the device."""
        if os.getpid() != self._process:
            return
        for device in list(_opened.values()):
            self.closing(device)
        if not self._devices:
            return
        counts = None
        with suppress(TegradError, OSError):
            counts = board_counts()
        told = {
            "pid": self._process, "command": sys.argv, "devices": self._devices, "spans": self._spans,
            "board": os.environ.get(BOARD_VARIABLE, ""), "counts": counts and _since(self._before, counts),
        }  # fmt: skip
        try:
            self._file.write_text(json.dumps(told))
        except OSError as error:
            print(f"tegrad: the profile cannot be written: {error}", file=sys.stderr)


def begin(folder: str) -> None:
    """Profile this process from now on. SettingError."""
    profile = Profile(Path(folder))
    around: dict[tuple[type, str], Callable[[Any], Any]] = {(Fifo, "wait"): _told, (NVSignal, "wait"): _told}
    around |= {(NVDevice, name): partial(_closing, profile) for name in ("close", "finalize")}
    for (owner, name), wrapped in around.items():
        setattr(owner, name, wrapped(getattr(owner, name)))
    compat.replace(TRACK_STATS, profile.ran)
    atexit.register(profile.finish)


def _told(wait: Callable[..., None]) -> Callable[..., None]:
    @wraps(wait)
    def waited(*args: Any, **kwargs: Any) -> None:
        with cpu_profile("wait", "WAIT"):
            wait(*args, **kwargs)

    return waited


def _closing(profile: Profile, close: Callable[[NVDevice], None]) -> Callable[[NVDevice], None]:
    @wraps(close)
    def closed(device: NVDevice) -> None:
        if not device.closed and device.error_state is None:
            profile.closing(device)
        close(device)

    return closed


def _since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What a board has counted by kernel since then."""
    old = before.get("kernels", {})
    found = {
        name: {what: count - old.get(name, {}).get(what, 0) for what, count in counts.items()}
        for name, counts in now["kernels"].items()
    }
    return {name: counts for name, counts in found.items() if counts["launches"]}


def _named(name: str | TracingKey) -> tuple[str, int | None]:
    """A name in words, and the bytes of a copy's."""
    if not isinstance(name, TracingKey):
        return ansistrip(name), None
    return ansistrip(name.display_name), name.ret if isinstance(name.ret, int) else None


def _gpu_spans(event: ProfileEvent, ahead: float, sizes: dict[tuple[str, str], int]) -> Iterable[Told]:
    """Kernels and copies of an event in the GPU's time."""
    if isinstance(event, ProfileGraphEvent):
        parts = [(each.device, each.name, event.sigs[each.st_id], event.sigs[each.en_id]) for each in event.ents]
    elif isinstance(event, ProfileRangeEvent) and event.en is not None:
        parts = [(event.device, event.name, event.st, event.en)]
    else:
        return
    for device, key, begin, end in parts:
        name, copied = _named(key)
        is_copy = " -> " in name
        size = copied if is_copy else sizes.get((device, name))
        yield "copy" if is_copy else "kernel", device, name, float(begin) + ahead, float(end - begin), size


def _host_spans(event: ProfileEvent) -> Iterable[Told]:
    """Work, waits and copies of the CPU's."""
    if isinstance(event, ProfileRangeEvent) and event.en is not None:
        name, copied = _named(event.name)
        kind = "wait" if event.device == "WAIT" else "copy" if " -> " in name else "host"
        track = {"WAIT": "waits", "TINY": "tinygrad", "USER": "program"}.get(event.device, event.device)
        yield kind, track, name, float(event.st), float(event.en - event.st), copied if kind == "copy" else None
