"""What is done about the GPU's L2 before the CPU touches memory that is mapped cached.

Two things go wrong there, and both must be ended before the CPU's access, not after it. What the GPU has stored may be
in L2 alone: the CPU reads what was there before, and a dirty line that leaves L2 later overwrites what the CPU writes
now. What the GPU has read stays in L2: it does not see what the CPU writes now. So:

1. wait until the GPU is idle;
2. FLUSH_L2: write back, invalidate, and flush the way to memory;
3. the CPU reads or writes.

Nothing of the memory is in L2 then, nor comes there until the next launch, so nothing needs doing afterwards. One flush
is for the whole of L2, and serves every buffer up to the next submission. A fresh mapping has no lines: nothing that
was submitted before it was made knows its address, and an unmapping empties L2 (nvgpu, common/mm/gmmu/page_table.c).
What is filled once and then only used by the GPU, as code and weights are, thus costs no flush at all.

Volatile memory needs none of this. A cached buffer has no CPU view (`HCQBuffer.view`) that could be used past this.
"""

from collections.abc import Callable, Iterable

from tegrad.nv.memory import Memory


class Coherence:
    """Knows which memory the GPU may have touched since L2 was last emptied. One of a device, under its lock."""

    def __init__(self, submissions: Callable[[], int], idle: Callable[[], object], flush: Callable[[], object]) -> None:
        """`submissions` counts what went to the GPU, `idle` waits for all of it, `flush` empties L2."""
        self._submissions, self._idle, self._flush = submissions, idle, flush
        self._emptied = 0

    def mapped(self, memory: Memory) -> None:
        """Note that memory is fresh."""
        memory.mapped_after = self._submissions()

    def before_cpu(self, memories: Iterable[Memory]) -> None:
        """Let the CPU touch memory until the next submission that uses it. DeviceFault, WaitTimeout, DriverError."""
        if not any(map(self._kept, memories)):
            return
        submitted = self._submissions()  # what comes meanwhile from other threads counts as later
        self._idle()
        self._flush()
        self._emptied = submitted

    def _kept(self, memory: Memory) -> bool:
        """Whether L2 may have lines of it."""
        return memory.cached and self._submissions() > max(self._emptied, memory.mapped_after)
