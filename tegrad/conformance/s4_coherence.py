"""The GPU's L2 and the CPU: what must hold whatever the L2 keeps. docs/coherence.md has what an H200's keeps.

The GPU reads by host semaphores alone: an acquire looks at memory as every other access does.
"""

from __future__ import annotations

from collections.abc import Callable

from tegrad.conformance.engine import Block, Gpu, Queue
from tegrad.conformance.rig import Rig
from tegrad.conformance.rule import rule
from tegrad.conformance.s4_memory import reads
from tegrad.hw.classes import HostMethod, MemOp


def _read_once(rig: Rig, *, cached: bool) -> tuple[Queue, Block]:
    """Memory of which the GPU has read a 1, into which the CPU has stored a 2 since."""
    gpu = Gpu(rig)
    queue, block = gpu.queue(contexts=()), gpu.memory(cached=cached)
    block.put32(1)
    reads(queue, block.va, 1, "the first value")
    block.put32(2)
    return queue, block


@rule("4.3", "MAP_BUFFER_EX without CACHEABLE: the GPU reads what the CPU has stored since it read last")
def volatile_is_read_anew(rig: Rig) -> None:
    queue, block = _read_once(rig, cached=False)
    reads(queue, block.va, 2, "the second value")


def _flush(rig: Rig, queue: Queue) -> None:
    rig.call(rig.ctrl, "GPU_FLUSH_L2", l2_flush=1, l2_invalidate=1)


def _unmap(rig: Rig, queue: Queue) -> None:
    rig.unmap(queue.gpu.vm, queue.gpu.memory().va)


def _invalidate(rig: Rig, queue: Queue) -> None:
    queue.host(HostMethod.MEM_OP_A, 0, 0, 0, MemOp.L2_SYSMEM_INVALIDATE << 27).fenced()
    rig.wait(lambda: queue.over or queue.dead)


ENDS = [
    ("3.5", "flush-invalidates", "FLUSH_L2 with invalidation", _flush),
    ("4.5", "unmap-empties-l2", "UNMAP_BUFFER of another buffer", _unmap),
    ("6.2", "sysmem-invalidate", "MEM_OP_D with operation 0xE (seen on an H200, inferred for ga10b)", _invalidate),
]
"""What makes the GPU read cached memory anew."""

for _section, _name, _sentence, _ends in ENDS:

    @rule(_section, f"{_sentence}: the GPU reads what the CPU has stored in cached memory", name=_name)
    def read_anew(rig: Rig, ends: Callable[[Rig, Queue], object] = _ends) -> None:
        queue, block = _read_once(rig, cached=True)
        ends(rig, queue)
        reads(queue, block.va, 2, "the second value")
