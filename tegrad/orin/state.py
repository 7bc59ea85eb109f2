"""What one board's nvgpu, nvmap and host1x-fence drivers keep, and the line to the GPU below them.

Open files and the handlers of their calls get this and nothing above it: which handler a call goes to, and what becomes
of a GPU that is lost or reports a fault, is the matter of `driver`.
"""

from __future__ import annotations

import errno
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tegrad.hw.chips import Chip
from tegrad.orin.address_space import AddressSpace
from tegrad.orin.arbiter import Arbiter
from tegrad.orin.buffers import Memory, NvmapState
from tegrad.orin.channel import MAX_CHANNELS, DriverChannel
from tegrad.orin.klog import KernelLog
from tegrad.orin.link import ENDING, GpuLost, Link
from tegrad.orin.registry import Registry
from tegrad.orin.sharing import Instance
from tegrad.orin.steps import require
from tegrad.orin.syncpoint import Syncpoints
from tegrad.orin.tsg import Tsg

LETTING_GO = frozenset(
    {"vm_destroy", "unmap", "syncpoint_free", "tsg_destroy", "channel_destroy", "tsg_abort", "stats"}
)
"""Calls of the GPU that succeed without one: whatever they are about is gone already."""


@dataclass(eq=False)
class DriverState:
    """The objects of a board's drivers by number, and what all of them share."""

    chip: Chip
    memory: Memory
    gpu: Link
    on_lost: Callable[[GpuLost], None]
    """What to do when the GPU's process dies or hangs in a call: find another, or set `quiesced`."""
    clock: Arbiter
    on_ending: Callable[[], object] = lambda: None
    """Acts on what the GPU has reported: called before a number that it knows may be somebody else's."""
    quiesced: bool = False
    """Whether the driver gave up on the GPU: every call that needs it is ENODEV."""
    log: KernelLog = field(default_factory=KernelLog)
    nvmap: NvmapState = field(default_factory=NvmapState)
    syncpoints: Syncpoints = field(default_factory=Syncpoints)
    metadata: Registry = field(default_factory=Registry)
    vms: dict[int, AddressSpace] = field(default_factory=dict)
    tsgs: dict[int, Tsg] = field(default_factory=dict)
    channels: dict[int, DriverChannel] = field(default_factory=dict)
    free_chids: list[int] = field(default_factory=lambda: list(range(MAX_CHANNELS)))
    instances: dict[int, Instance] = field(default_factory=dict)
    sched_open: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    """How many calls of each type came in, refused ones too: ioctls by name, open, mmap."""
    _vm_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _instance_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new_vm_id(self) -> int:
        """A number for a new address space."""
        return next(self._vm_ids)

    def new_instance_id(self) -> int:
        """A number for a new ctrl fd."""
        return next(self._instance_ids)

    def tell_gpu(self, method: str, *args: object, fd: int | None = None) -> Any:
        """Call the GPU. Record first, then tell: when the GPU is lost on the way, the replay tells the new one.

        Raises GpuError when the GPU has no room for what is asked, Errno(ENODEV) when there is no GPU any more.
        """
        try:
            if not self.quiesced:
                answer = self.gpu.call(method, *args, fd=fd)
                if method in ENDING:
                    self.on_ending()
                return answer
        except GpuLost as lost:
            self.on_lost(lost)
        require(not self.quiesced or method in LETTING_GO, errno.ENODEV)
        return None

    def counts(self) -> dict[str, int]:
        """How many of each object the drivers hold."""
        clients = self.nvmap.clients.values()
        return {
            "nvmap_handles": sum(len(c.handles) for c in clients),
            "dmabufs": len(self.memory.buffers),
            "memory_bytes": self.memory.taken,
            "address_spaces": len(self.vms),
            "gpu_mappings": sum(len(vm.mappings) for vm in self.vms.values()),
            "kernel_mappings": sum(len(vm.kernel_mappings) + len(vm.syncpoints) for vm in self.vms.values()),
            "areas": sum(len(vm.areas) for vm in self.vms.values()),
            "instances": len(self.instances),
            "share_tokens": sum(len(i.tokens) for i in self.instances.values()),
            "event_files": sum(len(g.event_files) for g in self.tsgs.values()),
            "tsgs": len(self.tsgs),
            "channels": len(self.channels),
            "syncpoints": len(self.syncpoints.used),
            "fences": len(self.syncpoints.fences),
        }
