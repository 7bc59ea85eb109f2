"""NVKIface on Hopper: which classes it finds among those that the driver offers."""

import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tinygrad.runtime import ops_nv

import tegrad.nv
from tegrad.nv.device import NVDevice
from tegrad.nv.faults import NoDevice
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
        _mapped: ClassVar[dict[int, int]] = {}

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


def test_a_channels_error_memory_is_no_larger_than_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    def alloc(self: Any, size: int, host: bool, uncached: bool, **how: Any) -> Any:
        asked.append((size, uncached))
        return SimpleNamespace(va_addr=len(asked), size=size)

    monkeypatch.setattr(ops_nv.NVKIface, "alloc", alloc)
    made = interface(HOPPER)
    made.alloc(48 << 20, uncached=True)
    made.alloc(48 << 20, contiguous=True)
    made.alloc(48 << 20, uncached=True, cpu_access=True)  # as tinygrad's performance counters do
    assert asked == [(4096, True), (48 << 20, False), (48 << 20, True)]


# ---- the end


class Driver:
    """What an interface asks of NVIDIA's driver to close, and the files that stand for its nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tinygrad.runtime.support.hcq import FileIOInterface

        self.asked: list[str] = []
        self.files = {name: FileIOInterface("/dev/null") for name in ("fd_ctl", "fd_uvm")}
        monkeypatch.setattr(ops_nv.NVKIface, "root", 0xC1D00001)
        monkeypatch.setattr(NVKIface, "_open", 0)
        monkeypatch.setattr(NVKIface, "_mapped", {})
        for name, file in self.files.items():
            monkeypatch.setattr(ops_nv.NVKIface, name, file, raising=False)
        monkeypatch.setattr(ops_nv, "nv_iowr", self._iowr)

    def _iowr(self, fd: Any, number: int, args: Any, cmd: Any = None) -> None:
        assert number == nv_gpu.NV_ESC_RM_FREE
        assert fd is self.files["fd_ctl"]
        assert fd.fd >= 0
        assert not hasattr(self.files["fd_uvm"], "fd"), "UVM still holds the channels"
        self.asked.append(f"free {args.hObjectOld:#x}")

    def opened(self) -> Any:
        """An open interface with one mapping."""
        from tinygrad.runtime.support.hcq import FileIOInterface

        made = NVKIface.__new__(NVKIface)
        made._closed, made.dev = False, object()
        made.fd_dev, made.fd_uvm_2 = FileIOInterface("/dev/null"), FileIOInterface("/dev/null")
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        made._mapped[FileIOInterface.anon_mmap(0, 4096, mmap.PROT_READ, flags, 0)] = 4096
        NVKIface._open += 1
        return made


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/dev/zero")


def test_the_last_device_that_closes_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = held()
    driver = Driver(monkeypatch)
    first, second = driver.opened(), driver.opened()
    open_now = held()
    first.device_fini()
    first.device_fini()
    assert (driver.asked, held()) == ([], open_now)
    assert ops_nv.NVKIface.root is not None
    second.device_fini()
    assert driver.asked == ["free 0xc1d00001"]
    assert ops_nv.NVKIface.root is None
    del first
    assert held() == before


def test_an_opening_that_fails_gives_the_client_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = held()
    driver = Driver(monkeypatch)
    monkeypatch.setattr(ops_nv.NVKIface, "__init__", lambda self, dev, number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        NVKIface(None, 0)
    assert driver.asked == ["free 0xc1d00001"]
    assert held() == before


def test_a_forked_child_lets_go_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    made = driver.opened()
    made.abandon()
    assert driver.asked == []
    assert ops_nv.NVKIface.root is None
    assert not any(hasattr(file, "fd") for file in (*driver.files.values(), made.fd_dev, made.fd_uvm_2))


class SmDriver:
    """An interface that answers for the SMs that work, or for each GPC's TPCs, or refuses to."""

    def __init__(self, count: int | None, masks: Sequence[int] = ()) -> None:
        self.count, self.masks = count, masks

    def rm_control(self, subdevice: int, command: int, asked: Any) -> Any:
        assert subdevice == 7
        if command == ops_nv.nv_gpu.NV2080_CTRL_CMD_GR_GET_GLOBAL_SM_ORDER and self.count is not None:
            asked.numSm = self.count
        elif command == ops_nv.nv_gpu.NV2080_CTRL_CMD_GR_GET_TPC_MASK and asked.gpcId < len(self.masks):
            asked.tpcMask = self.masks[asked.gpcId]
        else:
            raise RuntimeError("rm_control returned NV_ERR_NOT_SUPPORTED")
        return asked


@pytest.mark.parametrize(
    ("iface", "count"),
    [
        (SmDriver(114), 114),
        (SmDriver(None, (0x1FF, 0x1FE, 0x1FF, 0xFF, 0x1FF, 0x7F, 0x3F)), 2 * (9 + 8 + 9 + 8 + 9 + 7 + 6)),
        (SimpleNamespace(sm_count=16), 16),
    ],
    ids=["desktop", "refused", "jetson"],
)
def test_the_sms_are_those_that_work(iface: Any, count: int) -> None:
    """Blocks that wait for each other must all be resident; the family's largest chip would have 144."""
    assert bare_device(iface).sm_count == count


def test_a_driver_that_tells_of_no_sms_is_not_guessed_at() -> None:
    with pytest.raises(NoDevice, match="how many SMs"):
        _ = bare_device(SmDriver(None)).sm_count
    with pytest.raises(NoDevice, match="how many SMs"):
        _ = bare_device(SmDriver(0)).sm_count


def bare_device(iface: Any) -> NVDevice:
    """As much of a device as counts its SMs."""
    made = NVDevice.__new__(NVDevice)
    made.iface, made.subdevice = iface, 7
    made.num_gpcs, made.num_tpc_per_gpc, made.num_sm_per_tpc = 8, 9, 2
    return made
