"""Stage 6: how the CPU learns that work is done: the syncpoint, fences on it, and a wait without host1x-fence."""

from __future__ import annotations

import statistics
import time
from typing import Any

from tegrad.conformance.engine import PLAIN_RELEASE, Gpu, Queue
from tegrad.conformance.rig import FENCE, Rig
from tegrad.conformance.s5_channels import semaphore
from tegrad.conformance.s8_fences import fence, readable
from tegrad.conformance.waiter import Waiter
from tegrad.diag.selftest.stage import Notes, Surprise
from tegrad.hw.classes import HostMethod
from tegrad.nv.kernel import pick_kernel

TIMEOUT_S = 5.0
EARLY_WATCH_S = 0.02
"""How long a fence is watched that must not be readable yet."""


def fences(notes: Notes) -> None:
    """One increment by the GPU, the fence on it, `amount` more with their latency, then CHANNEL_WAIT."""
    with Rig(pick_kernel(), patience=TIMEOUT_S, hazardous=False) as rig:
        gpu = Gpu(rig)
        queue = gpu.queue(contexts=())
        with notes.step("the syncpoint"):
            found = rig.call(queue.channel.fd, "CHANNEL_GET_USER_SYNCPOINT")
            notes.fact("syncpoint", int(found.syncpoint_id))
            notes.expect(found.gpu_va, "an address at which the GPU increments it", "0: waits will use CHANNEL_WAIT")
        if rig.kernel.exists(FENCE):
            _fences(notes, rig, queue, found)
        else:
            notes.line(f"no {FENCE}: no fence was tried, and tegrad's waits use CHANNEL_WAIT")
        with notes.step("CHANNEL_WAIT, which needs no host1x-fence"):
            _wait(notes, rig, queue)


def _fences(notes: Notes, rig: Rig, queue: Queue, point: Any) -> None:
    va, number, value = int(point.gpu_va), int(point.syncpoint_id), int(point.syncpoint_max)
    node = rig.open(FENCE)
    seconds = []
    for turn in range(1 + notes.amount):
        with notes.step("a fence before its increment"):
            made = fence(rig, node, number, value + turn + 1)
            if turn == 0:
                notes.expect(not readable(made, EARLY_WATCH_S), "a fence that waits", "POLLIN before the increment")
        with notes.step("a fence after the GPU's increment"):
            queue.release(va, 0, PLAIN_RELEASE)
            start = time.perf_counter()
            queue.fenced()
            woken = readable(made, TIMEOUT_S)
            seconds.append(time.perf_counter() - start)
            notes.expect(woken, "POLLIN when the GPU has incremented the syncpoint", f"nothing in {TIMEOUT_S:g} s")
            notes.expect(rig.wait(lambda: queue.over), "the end of the submission", "it did not come")
        rig.close(made)
    notes.fact("fence latency us, the first", round(seconds[0] * 1e6))
    if seconds[1:]:
        notes.fact("fence latency us, median", round(statistics.median(seconds[1:]) * 1e6))
        notes.fact("fence latency us, longest", round(max(seconds[1:]) * 1e6))


def _wait(notes: Notes, rig: Rig, queue: Queue) -> None:
    word = queue.gpu.memory()
    waiter = Waiter(rig, queue.channel.fd, semaphore(word.buffer.fd, payload=1), times=2)
    if not waiter.asleep:
        raise Surprise("CHANNEL_WAIT to sleep", f"it ended at once: {waiter.result()}")
    start = time.perf_counter()
    queue.release(word.va, 1, PLAIN_RELEASE).host(HostMethod.NON_STALL_INTERRUPT, 0).fenced()
    result = waiter.result()
    seconds = time.perf_counter() - start
    notes.expect(result == "success", "CHANNEL_WAIT to wake after the GPU's interrupt", result)
    notes.fact("CHANNEL_WAIT latency us", round(seconds * 1e6))
