"""Small pieces of work for a device: one launch, one submission without any, and a GPU that is held back meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tegrad.nv.queues import NVComputeQueue

GATE_S = 0.3
"""How long a gate holds the GPU back while the CPU runs ahead."""


@contextmanager
def held_back(device: Any, seconds: float = GATE_S) -> Iterator[None]:
    """Let the GPU wait after everything submitted so far, until `seconds` after the block begins."""
    gate = device.new_signal(value=0)
    queue = NVComputeQueue().wait(device.timeline_signal, device.timeline_value - 1).wait(gate, 1)
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
    opener = threading.Timer(seconds, lambda: setattr(gate, "value", 1))
    opener.start()
    try:
        yield
    finally:
        opener.join()
        device.synchronize()


def launch(prg: Any, buffer: Any, value: int) -> None:
    """One thread of a kernel of `kernels`."""
    prg(buffer, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(value,))


def empty_submission(device: Any, kind: Any = NVComputeQueue) -> None:
    """Move the timeline on by one, on the compute channel or, with NVCopyQueue, on the copy engine's."""
    queue = kind().wait(device.timeline_signal, device.timeline_value - 1)
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
