"""NVKIface on Hopper: which classes it finds among those that the driver offers."""

from collections.abc import Iterable
from typing import Any

import pytest
from tinygrad.runtime import ops_nv

import tegrad.nv
from tegrad.nv.hopper import NVKIface

nv_gpu = ops_nv.nv_gpu
HOPPER = {0xC661, 0xC86F, 0xCBC0, 0xC8B5}
ADA = {
    nv_gpu.TURING_USERMODE_A,
    nv_gpu.AMPERE_CHANNEL_GPFIFO_A,
    nv_gpu.ADA_COMPUTE_A,
    nv_gpu.AMPERE_COMPUTE_B,
    nv_gpu.AMPERE_DMA_COPY_B,
}


def interface(classes: Iterable[int]) -> Any:
    """An interface whose driver offers these classes."""
    offered = sorted(classes)

    class Offering(NVKIface):
        fd_ctl = None

        def __init__(self) -> None:
            self.dev = type("Device", (), {"nvdevice": 1, "subdevice": 2})()
            self.made: list[int] = []

        def rm_control(self, obj: int, cmd: int, params: Any = None, **kwargs: Any) -> Any:
            import ctypes

            assert cmd == nv_gpu.NV0080_CTRL_CMD_GPU_GET_CLASSLIST
            if params.numClasses:
                array = (ctypes.c_uint32 * len(offered)).from_address(params.classList)
                array[:] = offered
            params.numClasses = len(offered)
            return params

        def rm_alloc(self, parent: int, clss: int, params: Any = None, root: Any = None) -> int:
            self.made.append(clss)
            return 7

        def _gpu_map_to_cpu(self, *args: Any, **kwargs: Any) -> int:
            import ctypes

            self.page = ctypes.create_string_buffer(0x10000)
            return ctypes.addressof(self.page)

    made = Offering()
    made.setup_usermode()
    return made


def test_hopper_gets_its_own_classes() -> None:
    made = interface(HOPPER | {0xCB97})
    assert (made.gpfifo_class, made.compute_class, made.dma_class) == (0xC86F, 0xCBC0, 0xC8B5)
    assert made.made == [0xC661]


def test_other_gpus_are_found_as_tinygrad_finds_them() -> None:
    made = interface(ADA)
    assert made.compute_class == nv_gpu.ADA_COMPUTE_A
    assert (made.gpfifo_class, made.dma_class) == (nv_gpu.AMPERE_CHANNEL_GPFIFO_A, nv_gpu.AMPERE_DMA_COPY_B)


def test_tinygrads_own_interface_fails_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the subclass is for."""
    monkeypatch.setattr(NVKIface, "nvclasses", None)
    with pytest.raises(StopIteration):
        interface(HOPPER)


def test_it_stands_in_tinygrads_list_under_its_name() -> None:
    tegrad.nv.install()
    names = [iface.__name__ for iface in ops_nv.NVDevice.ifaces]
    assert names == ["TegraIface", "NVKIface", "PCIIface", "MOCKIface"]
    assert ops_nv.NVDevice.ifaces[1] is NVKIface
