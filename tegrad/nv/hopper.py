"""tinygrad's interface to NVIDIA's kernel driver, extended to Hopper (H100, H200, GH200).

The resource manager offers Hopper's classes under numbers that tinygrad's lists lack, though the classes take the same
allocation parameters and methods as Ampere's. Other GPUs behind NVIDIA's driver work as with tinygrad alone.
"""

from typing import Any

from tinygrad.runtime import ops_nv

from tegrad.hw.chips import CHIPS

_GH100 = CHIPS["gh100"]
_AS_AMPERE = {
    _GH100.gpfifo_class: ops_nv.nv_gpu.AMPERE_CHANNEL_GPFIFO_A,
    _GH100.compute_class: ops_nv.nv_gpu.AMPERE_COMPUTE_B,
    _GH100.dma_class: ops_nv.nv_gpu.AMPERE_DMA_COPY_B,
}


class NVKIface(ops_nv.NVKIface):  # type: ignore[misc]
    """`DEV=NVK+NV`. Carries tinygrad's name, because it takes that interface's place in the list."""

    @property
    def nvclasses(self) -> set[int]:
        """Class numbers that the GPU offers, and for each of Hopper's the Ampere class that tinygrad looks for."""
        return self._classes | {ampere for hopper, ampere in _AS_AMPERE.items() if hopper in self._classes}

    @nvclasses.setter
    def nvclasses(self, offered: set[int]) -> None:
        self._classes = set(offered)

    def setup_usermode(self) -> tuple[int, Any]:
        """tinygrad's, and on Hopper its own classes in place of the Ampere ones that stood for them."""
        usermode: tuple[int, Any] = super().setup_usermode()
        if _GH100.compute_class in self._classes:
            self.gpfifo_class = _GH100.gpfifo_class
            self.compute_class = _GH100.compute_class
            self.dma_class = _GH100.dma_class
        return usermode
