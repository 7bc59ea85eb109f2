"""Freed buffers of a Jetson, given back in batches.

Every UNMAP_BUFFER has the driver write back and invalidate the GPU's whole L2, and its TLB, whatever else runs there.
MAP_BUFFER_BATCH does it once for all that it unmaps (L4T r36.4.3 nvgpu, common/mm/gmmu/page_table.c and
os/linux/ioctl_as.c). So a freed buffer waits here, still mapped, for others to go with it. Who frees has waited for
the GPU before, so that a batch never takes away what something in flight uses.
"""

import ctypes
from collections import deque
from contextlib import ExitStack, suppress

from tegrad.nv.memory import AddressSpace, Memory, Nvmap
from tegrad.uapi import ioctls
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import Kernel
from tegrad.uapi.structs import AsMapBufferBatch, AsUnmapBuffer

MOST_BYTES = 64 << 20
"""What may wait: half of what an allocation leaves to the system (memory.RESERVE_BYTES), so that none fails for it."""
MOST_BUFFERS = 64
"""How many may wait: a quarter of what MAP_BUFFER_BATCH takes, 1/64 of an L2 flush each."""


class PendingFrees:
    """The buffers that wait, oldest first. None of them has a user left, but for a fault's report."""

    def __init__(self, kernel: Kernel, nvmap: Nvmap) -> None:
        self._kernel, self._nvmap = kernel, nvmap
        self._waiting: deque[Memory] = deque()

    def add(self, memory: Memory, space: AddressSpace) -> None:
        """Let a buffer wait that the GPU has finished with; gives all back where too much waits."""
        self._waiting.append(memory)
        waiting = list(self._waiting)
        if len(waiting) > MOST_BUFFERS or sum(one.size for one in waiting) > MOST_BYTES:
            self.give_back(space)

    def take(self) -> list[Memory]:
        """Those that wait; from here on the caller's to free. Another thread, or a collection, may add meanwhile."""
        taken: list[Memory] = []
        with suppress(IndexError):
            while True:
                taken.append(self._waiting.popleft())
        return taken

    def give_back(self, space: AddressSpace) -> bool:
        """Unmap and free all that wait; whether there were any. DriverError when a step fails; the others are taken."""
        batch = self.take()
        with ExitStack() as steps:  # runs from the last to the first
            for memory in batch:
                steps.callback(self._nvmap.free, memory)
            mapped = [memory.va for memory in batch if memory.va]
            if len(mapped) == 1 or not self._unmapped_at_once(mapped, space):
                for va in mapped:
                    steps.callback(space.unmap, va)
        return bool(batch)

    def _unmapped_at_once(self, addresses: list[int], space: AddressSpace) -> bool:
        """Unmap all by one call; False where the driver refuses, which does not tell how far it came."""
        if not addresses:
            return True
        unmaps = (AsUnmapBuffer * len(addresses))(*[AsUnmapBuffer(offset=va) for va in addresses])
        arg = AsMapBufferBatch(unmaps=ctypes.addressof(unmaps), num_unmaps=len(addresses))
        try:
            self._kernel.ioctl(space.fd, ioctls.NVGPU_AS_IOCTL_MAP_BUFFER_BATCH, arg)
        except DriverError:
            return False  # to unmap one again that is unmapped already does nothing
        return True
