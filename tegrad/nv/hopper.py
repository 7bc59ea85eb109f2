"""tinygrad's interface to NVIDIA's kernel driver, extended to Hopper (H100, H200, GH200).

The resource manager offers Hopper's classes under numbers that tinygrad's lists lack, though the classes take the same
allocation parameters and methods as Ampere's. Other GPUs behind NVIDIA's driver work as with tinygrad alone.
"""

import functools
import os
from contextlib import ExitStack, suppress
from typing import Any, ClassVar

from tinygrad.runtime import ops_nv
from tinygrad.runtime.support.hcq import FileIOInterface

from tegrad.hw.chips import CHIPS
from tegrad.nv.debugger import NOTIFIER_BYTES, Debugger, ErrorNotifier
from tegrad.nv.desktop import DesktopMemory
from tegrad.nv.faults import SmError
from tegrad.nv.kernlog import FaultReport

_GH100 = CHIPS["gh100"]
_AS_AMPERE = {
    _GH100.gpfifo_class: ops_nv.nv_gpu.AMPERE_CHANNEL_GPFIFO_A,
    _GH100.compute_class: ops_nv.nv_gpu.AMPERE_COMPUTE_B,
    _GH100.dma_class: ops_nv.nv_gpu.AMPERE_DMA_COPY_B,
}

_Stock: Any = ops_nv.NVKIface
"""Where tinygrad keeps what all its devices share: the resource manager's client and the fds of nvidiactl and UVM."""


class NVKIface(DesktopMemory):
    """`DEV=NVK+NV`. Carries tinygrad's name, because it takes that interface's place in the list.

    tinygrad keeps everything until the process ends. Here the last device that closes gives it all back: CPU mappings,
    UVM's address space, the client with its channels and memory, the fds. Not before: devices use each other's signals.
    """

    _open: ClassVar[int] = 0
    """How many devices share the client."""
    driver_check_s = 0.1
    """How long a wait takes before it asks, where no notifier tells, and how often: a call takes RM's locks."""
    _notifiers: tuple[ErrorNotifier, ...] = ()
    _answers = True
    """Whether the resource manager's debugger answers."""

    def __init__(self, dev: Any, device_id: int) -> None:
        self._closed = False
        try:
            super().__init__(dev, device_id)
        except BaseException:
            if not NVKIface._open:
                _close_client()
            raise
        NVKIface._open += 1

    @property
    def nvclasses(self) -> set[int]:
        """Class numbers that the GPU offers, and for each of Hopper's the Ampere class that tinygrad looks for."""
        return self._classes | {ampere for hopper, ampere in _AS_AMPERE.items() if hopper in self._classes}

    @nvclasses.setter
    def nvclasses(self, offered: set[int]) -> None:
        self._classes = set(offered)

    def rm_alloc(self, parent: int, clss: int, params: Any = None, root: int | None = None) -> int:
        """tinygrad's, which finds a channel's error notifier."""
        handle: int = super().rm_alloc(parent, clss, params, root)
        if clss == getattr(self, "gpfifo_class", None) and params.hObjectError:
            # Without the notifier, faults are found by the debugger, or when a wait ends.
            with suppress(RuntimeError, OSError):
                notifier = ErrorNotifier(self._gpu_map_to_cpu(params.hObjectError, NOTIFIER_BYTES, system=True))
                if notifier.error() is None:
                    self._notifiers = (*self._notifiers, notifier)
        return handle

    # ---- health

    @functools.cached_property
    def _debugger(self) -> Debugger:
        return Debugger(self.dev)

    def channel_error(self) -> int | None:
        """RM's error code in the notifier of a channel that was recovered, or None. Reads memory only."""
        return next((code for notifier in self._notifiers if (code := notifier.error()) is not None), None)

    def timed_out(self) -> bool:
        """Whether the debugger knows of an exception that stopped a kernel: asked where no notifier tells.

        It tells no sooner than a notifier. Where RM refuses, it is not asked again.
        """
        try:
            return not self._notifiers and self._answers and self._debugger.stopped()
        except (RuntimeError, OSError):
            self._answers = False
            return False

    def failed_sms(self) -> list[SmError]:
        """The SMs that report an exception; empty where RM does not answer."""
        return self._debugger.failed_sms()

    def fault_report(self) -> FaultReport | None:
        """What RM keeps of an MMU fault of the compute channel."""
        return self._debugger.mmu_fault()

    # ---- the end

    def device_fini(self) -> None:
        """With the last device, give everything back. Once for each."""
        if self._closed:
            return
        self._closed, self._notifiers = True, ()
        NVKIface._open -= 1
        if NVKIface._open:
            return
        with ExitStack() as steps:  # runs from the last to the first
            steps.callback(_close_client)
            for file in (getattr(self, "fd_uvm_2", None), self.fd_dev):
                steps.callback(_close, file)
            while self._mapped:
                steps.callback(FileIOInterface.munmap, *self._mapped.popitem())

    def abandon(self) -> None:
        """In a forked child: let go of the parent's fds, so that a device that is opened here is the child's own."""
        self._closed, self._notifiers = True, ()
        NVKIface._open = 0
        NVKIface._mapped.clear()
        _Stock.root = None
        for file in (getattr(self, "fd_uvm_2", None), self.fd_dev, _Stock.fd_uvm, _Stock.fd_ctl):
            _close(file)

    def setup_usermode(self) -> tuple[int, Any]:
        """tinygrad's, and on Hopper its own classes in place of the Ampere ones that stood for them."""
        usermode: tuple[int, Any] = super().setup_usermode()
        if _GH100.compute_class in self._classes:
            self.gpfifo_class = _GH100.gpfifo_class
            self.compute_class = _GH100.compute_class
            self.dma_class = _GH100.dma_class
        return usermode


def _close_client() -> None:
    """Close UVM, which lets go of the channels, then free the client, whose children go with it, and its fd."""
    root, _Stock.root = _Stock.root, None
    with ExitStack() as steps:  # runs from the last to the first
        steps.callback(_close, getattr(_Stock, "fd_ctl", None))
        if root is not None:
            made = ops_nv.nv_gpu.NVOS00_PARAMETERS(hRoot=root, hObjectParent=0, hObjectOld=root)
            steps.callback(ops_nv.nv_iowr, _Stock.fd_ctl, ops_nv.nv_gpu.NV_ESC_RM_FREE, made)
        steps.callback(_close, getattr(_Stock, "fd_uvm", None))
    for allocator in (_Stock.low_uvm_vaddr_allocator, _Stock.uvm_vaddr_allocator):
        allocator.ptr = 0


def _close(file: Any) -> None:
    """Close a file of tinygrad's before it is forgotten. Closing twice is harmless."""
    if hasattr(file, "fd"):
        fd = file.fd
        del file.fd
        os.close(fd)
