"""Memory behind NVIDIA's resource manager: which calls an allocation takes, and what is left when one fails."""

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tinygrad.device import BufferSpec
from tinygrad.runtime import ops_nv
from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.nv.desktop import LARGE_FROM, LARGE_PAGE, SMALL_PAGE, PlainMemory
from tegrad.nv.device import DesktopAllocator, make_allocator
from tegrad.nv.hopper import NVKIface
from tegrad.nv.slabs import PART_BYTES, SLAB_BYTES, Part

nv = ops_nv.nv_gpu
NO_MEMORY = nv.NV_ERR_NO_MEMORY
ESCAPES = {
    nv.NV_ESC_RM_ALLOC: "RM_ALLOC",
    nv.NV_ESC_RM_ALLOC_MEMORY: "RM_ALLOC_MEMORY",
    nv.NV_ESC_RM_FREE: "RM_FREE",
    nv.NV_ESC_RM_MAP_MEMORY_DMA: "RM_MAP_MEMORY_DMA",
}
UVM = {
    number: name
    for name in ("UVM_CREATE_EXTERNAL_RANGE", "UVM_MAP_EXTERNAL_ALLOCATION", "UVM_FREE")
    if (number := getattr(nv, name))
}
MAKE = ["RM_ALLOC", "UVM_CREATE_EXTERNAL_RANGE", "UVM_MAP_EXTERNAL_ALLOCATION"]
STOCK = [*MAKE[:2], "RM_MAP_MEMORY_DMA", MAKE[2]]
BACK = ["RM_FREE", "UVM_FREE"]


class Driver:
    """RM and UVM: the calls, and what they hold."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: list[Any] = []
        self.refuses: dict[str, int] = {}
        """Call -> status."""
        self.limit = 1 << 40
        self.objects: dict[int, int] = {}
        self.ranges: dict[int, int] = {}
        self.maps: set[tuple[int, int]] = set()
        self._next = 0xCAF00000

    def iowr(self, fd: Any, number: int | None, asked: Any, cmd: int | None = None) -> None:
        name = ESCAPES[number] if number is not None else UVM[cmd or 0]
        self.calls.append(name)
        self.asked.append(asked)
        status = self.refuses.get(name, 0) or getattr(self, name.lower())(asked) or 0
        where = asked.params if hasattr(asked, "params") else asked
        setattr(where, "rmStatus" if name.startswith("UVM") else "status", status)

    def rm_alloc(self, asked: Any) -> int:
        memory = nv.NV_MEMORY_ALLOCATION_PARAMS.from_address(asked.pAllocParms)
        self.asked[-1] = nv.NV_MEMORY_ALLOCATION_PARAMS.from_buffer_copy(memory)
        if sum(self.objects.values()) + memory.size > self.limit:
            return int(NO_MEMORY)
        self._next += 1
        asked.hObjectNew, self.objects[self._next] = self._next, memory.size
        return 0

    def rm_alloc_memory(self, asked: Any) -> None:
        self.objects[asked.params.hObjectNew] = asked.params.limit + 1

    def rm_free(self, asked: Any) -> None:
        del self.objects[asked.hObjectOld]

    def rm_map_memory_dma(self, asked: Any) -> None:
        assert asked.hMemory in self.objects
        assert self.ranges[asked.dmaOffset] == asked.length

    def uvm_create_external_range(self, asked: Any) -> None:
        assert asked.base not in self.ranges
        self.ranges[asked.base] = asked.length

    def uvm_map_external_allocation(self, asked: Any) -> None:
        assert self.ranges[asked.base] == asked.length
        assert asked.hMemory in self.objects
        assert asked.gpuAttributesCount == 1
        gpu = bytes(asked.perGpuAttributes[0].gpuUuid.uuid)[0]
        assert (asked.base, gpu) not in self.maps
        self.maps.add((asked.base, gpu))

    def uvm_free(self, asked: Any) -> None:
        assert self.ranges.pop(asked.base) == asked.length
        self.maps = {known for known in self.maps if known[0] != asked.base}

    def said(self) -> list[str]:
        """The calls since the last time."""
        calls, self.calls, self.asked = self.calls, [], []
        return calls


class Fd:
    fd = 5


class Device:
    """As much of a device as its allocator and its interface ask."""

    nvdevice, virtmem, closed = 2, 3, False

    def __init__(self, number: int) -> None:
        self.device = f"NV:{number}" if number else "NV"
        self.lock, self.ready, self.waits = threading.RLock(), True, 0
        self.iface = NVKIface.__new__(NVKIface)
        self.iface.dev, self.iface.root = self, 1
        self.iface.fd_ctl = self.iface.fd_uvm = self.iface.fd_dev = Fd()
        self.iface.gpu_uuid = nv.struct_nv_uuid(uuid=(ctypes.c_ubyte * 16)(number))
        self.allocator = DesktopAllocator(self, batch_cnt=0)

    def check_usable(self) -> None:
        pass

    def settled(self) -> bool:
        self.waits += 1
        return self.ready

    def synchronize(self) -> None:
        self.waits += 1

    def _is_cpu(self) -> bool:
        return False


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(ops_nv, "nv_iowr", made.iowr)
    monkeypatch.setattr(NVKIface, "_mapped", {})
    return made


@pytest.fixture
def device(driver: Driver) -> Iterator[Device]:
    made = Device(0)
    yield made
    made.allocator.free_cache()


FRESH = BufferSpec(nolru=True)


# ---- the interface


def test_plain_memory_is_not_mapped_by_rm(driver: Driver, device: Device) -> None:
    buffer = device.iface.alloc(64 << 20)
    assert driver.said() == MAKE
    assert (buffer.size, buffer.owner, buffer.view) == (64 << 20, device, None)
    assert driver.objects == {buffer.meta.hMemory: 64 << 20}
    assert driver.ranges == {buffer.va_addr: 64 << 20}
    device.iface.free(buffer)
    assert driver.said() == BACK
    assert (driver.objects, driver.ranges) == ({}, {})


@pytest.mark.parametrize("size", [PART_BYTES + 1, (8 << 20) - 1, 8 << 20, (64 << 20) + 1])
def test_rm_is_asked_for_what_tinygrad_asks_it_for(driver: Driver, device: Device, size: int) -> None:
    buffer = device.iface.alloc(size)
    ours = driver.asked[0]
    driver.said()
    stock = ops_nv.NVKIface.alloc(device.iface, size)
    assert driver.calls == STOCK
    assert bytes(ours) == bytes(driver.asked[0])
    assert buffer.size == stock.size
    page = LARGE_PAGE if size >= 8 << 20 else SMALL_PAGE
    assert buffer.va_addr % page == 0


@pytest.mark.parametrize(
    "how",
    [{"uncached": True}, {"contiguous": True}, {"zero": True}, {"read_only": True}],
    ids=lambda how: next(iter(how)),
)
def test_other_memory_is_tinygrads(driver: Driver, device: Device, how: dict[str, bool]) -> None:
    buffer = device.iface.alloc(4096, **how)
    assert driver.said() == STOCK
    assert not isinstance(buffer, Part)
    device.iface.free(buffer)
    assert driver.said() == BACK


def test_memory_of_the_hosts_is_tinygrads(driver: Driver, device: Device) -> None:
    memory = ctypes.create_string_buffer(8192)
    address = ctypes.addressof(memory)
    buffer = device.iface.alloc(4096, host=True, cpu_addr=address)
    assert driver.said() == ["RM_ALLOC_MEMORY", *STOCK[1:]]
    assert buffer.cpu_view().addr == address


def test_memory_that_the_cpu_reaches_is_tinygrads(
    driver: Driver, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NVKIface, "_gpu_map_to_cpu", lambda self, handle, size, target, **how: target)
    device.iface.alloc(4096, cpu_access=True)
    assert driver.said() == STOCK


@pytest.mark.parametrize(("call", "undone"), [(MAKE[0], []), (MAKE[1], BACK[:1]), (MAKE[2], BACK)])
@pytest.mark.parametrize(("status", "error"), [(NO_MEMORY, MemoryError), (nv.NV_ERR_INVALID_ARGUMENT, RuntimeError)])
def test_what_was_made_before_a_call_that_fails_is_given_back(
    driver: Driver, device: Device, call: str, undone: list[str], status: int, error: type[Exception]
) -> None:
    driver.refuses[call] = status
    with pytest.raises(error, match=f"{call} for {2 << 20} bytes returned {status}: NV_ERR") as caught:
        device.iface.alloc(2 << 20)
    assert type(caught.value) is error
    assert driver.said() == MAKE[: MAKE.index(call) + 1] + undone
    assert (driver.objects, driver.ranges) == ({}, {})


def test_the_first_error_is_the_one_that_is_told(driver: Driver, device: Device) -> None:
    driver.refuses.update({MAKE[2]: NO_MEMORY, "RM_FREE": 1, "UVM_FREE": 1})
    with pytest.raises(MemoryError, match=MAKE[2]):
        device.iface.alloc(2 << 20)
    assert driver.said() == MAKE + BACK


def test_memory_that_rm_does_not_take_back_leaves_no_range(driver: Driver, device: Device) -> None:
    buffer = device.iface.alloc(2 << 20)
    driver.refuses["RM_FREE"] = 1
    with pytest.raises(RuntimeError, match="RM_FREE"):
        device.iface.free(buffer)
    assert driver.ranges == {}
    assert "that was freed" in (device.iface.describe_address(buffer.va_addr) or "")


def test_small_buffers_share_a_slab(driver: Driver, device: Device) -> None:
    first, second = device.iface.alloc(PART_BYTES), device.iface.alloc(1)
    assert driver.said() == MAKE
    assert list(driver.objects.values()) == [SLAB_BYTES[0]]
    assert (first.meta, second.size) == (second.meta, 4096)
    assert isinstance(first.meta, PlainMemory)
    told = device.iface.describe_address(second.va_addr + 8)
    assert told == f"byte 0x8, in the buffer of 4096 bytes at {second.va_addr:#x}"
    device.iface.free(second)
    assert "that was freed" in (device.iface.describe_address(second.va_addr + 8) or "")
    device.iface.free(first)
    assert driver.said() == []
    device.iface.trim()
    assert driver.said() == BACK


def test_the_decoder_gets_rms_mapping_once(driver: Driver, device: Device) -> None:
    """Its channel uses the address space where RM maps."""
    part, large = device.iface.alloc(4096), device.iface.alloc(2 << 20)
    driver.said()
    for buffer in (part, part.offset(64), large, large.offset(4096)):
        device.iface.map_with_rm(buffer)
    device.iface.map_with_rm(HCQBuffer(1 << 30, 4096, owner=device))
    assert driver.said() == ["RM_MAP_MEMORY_DMA"] * 2
    driver.refuses["RM_MAP_MEMORY_DMA"] = NO_MEMORY
    with pytest.raises(MemoryError, match="RM_MAP_MEMORY_DMA"):
        device.iface.map_with_rm(device.iface.alloc(2 << 20))


# ---- the allocator


def test_the_interface_has_the_allocator_with_slabs(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DesktopAllocator, "__init__", lambda self, dev: None)
    assert type(make_allocator(device)) is DesktopAllocator  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [None, FRESH], ids=["cached", "fresh"])
def test_a_small_buffer_takes_no_call_from_the_second_on(
    driver: Driver, device: Device, spec: BufferSpec | None
) -> None:
    first = device.allocator.alloc(PART_BYTES, spec)
    driver.said()
    device.allocator.free(first, PART_BYTES, spec)
    second = device.allocator.alloc(PART_BYTES, spec)
    assert second.va_addr == first.va_addr
    device.allocator.free(second, PART_BYTES, spec)
    assert driver.said() == []
    device.allocator.free_cache()
    assert driver.said() == BACK


@pytest.mark.parametrize("how", ["host", "cpu_access", "zero"])
def test_what_is_not_plain_is_no_spare(device: Device, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    part = device.allocator.alloc(4096, FRESH)
    device.allocator.free(part, 4096, FRESH)
    other = HCQBuffer(1 << 30, 4096)
    monkeypatch.setattr(NVKIface, "alloc", lambda *args, **kwargs: other)
    assert device.allocator.alloc(4096, BufferSpec(nolru=True, **{how: True})) is other


def test_memory_is_given_back_when_the_gpu_is_done_and_kept_by_one_that_failed(driver: Driver, device: Device) -> None:
    buffer = device.allocator.alloc(4096, FRESH)
    waits, device.ready = device.waits, False
    device.allocator.free(buffer, 4096, FRESH)
    assert device.waits == waits + 1
    assert device.iface.take_spare(4096) is None
    device.ready = True
    device.allocator.free(buffer, 4096, FRESH)
    assert device.iface.take_spare(4096) is buffer
    device.iface.free(buffer)


def test_memory_runs_out_after_all_of_it_was_used(driver: Driver, device: Device) -> None:
    """Buffers that are kept for reuse, and the slabs that this empties, make room for any other."""
    driver.limit = 100 << 20
    kept = [device.allocator.alloc(PART_BYTES) for _ in range(96)]
    for buffer in kept:
        device.allocator.free(buffer, PART_BYTES)
    assert list(driver.objects.values()) == [32 << 20] * 3
    large = device.allocator.alloc(98 << 20, FRESH)
    assert driver.objects == {large.meta.hMemory: 98 << 20}
    small = [device.allocator.alloc(PART_BYTES, FRESH) for _ in range(2)]
    with pytest.raises(MemoryError, match="failed on NV"):
        device.allocator.alloc(4096, FRESH)
    device.allocator.free(small[0], PART_BYTES, FRESH)
    small[0] = device.allocator.alloc(4096, FRESH)
    for buffer in (large, *small):
        device.allocator.free(buffer, buffer.size, FRESH)
    device.allocator.free_cache()
    assert (driver.objects, driver.ranges) == ({}, {})


def test_another_device_maps_a_slab_once(driver: Driver, device: Device) -> None:
    other = Device(1)
    parts = [device.allocator.alloc(4096, FRESH) for _ in range(2)]
    driver.said()
    for part in (parts[0], parts[1].offset(64), parts[1]):
        assert other.allocator._map(part) is part
    assert driver.said() == ["UVM_MAP_EXTERNAL_ALLOCATION"]
    assert {gpu for _, gpu in driver.maps} == {0, 1}
    for part in parts:
        before = other.waits
        device.allocator.free(part, 4096, FRESH)
        assert other.waits == before + 1, "the other device may still use it"
    other.closed, before = True, other.waits
    part = device.allocator.alloc(4096, FRESH)
    device.allocator.free(part, 4096, FRESH)
    assert other.waits == before
    device.allocator.free_cache()
    assert driver.said() == BACK
    assert driver.maps == set()


def test_the_decoders_buffers_are_mapped_by_rm(driver: Driver, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []
    stock = DesktopAllocator.__mro__[2]
    monkeypatch.setattr(stock, "_encode_decode", lambda self, *args: decoded.append(args))
    buffers = [device.allocator.alloc(2 << 20, FRESH) for _ in range(4)]
    driver.said()
    device.allocator._encode_decode(*buffers[:3], buffers[3:], (3, 4), 5)
    assert driver.said() == ["RM_MAP_MEMORY_DMA"] * 4
    assert decoded == [(*buffers[:3], buffers[3:], (3, 4), 5)]


def test_caches_are_emptied_under_the_devices_lock(
    driver: Driver, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a thread that allocated, the tables of free ranges came apart: KeyError, popitem of an empty dict."""
    owned: list[bool] = []

    def trim() -> None:  # another thread cannot have the lock now
        thread = threading.Thread(target=lambda: owned.append(not device.lock.acquire(blocking=False)))
        thread.start()
        thread.join()

    monkeypatch.setattr(device.iface, "trim", trim)
    device.allocator.free_cache()
    assert owned == [True]


# ---- addresses


def test_memory_that_comes_and_goes_lies_where_it_lay_before(device: Device, driver: Driver) -> None:
    """Beside memory that stays UVM keeps the page tables then."""
    first, second = device.iface.alloc(64 << 20), device.iface.alloc(64 << 20)
    device.iface.free(first)
    again = device.iface.alloc(64 << 20)
    assert again.va_addr == first.va_addr
    other = device.iface.alloc(32 << 20)
    device.iface.free(second)
    device.iface.free(again)
    device.iface.free(other)
    assert {device.iface.alloc(64 << 20).va_addr for _ in range(2)} == {first.va_addr, second.va_addr}


def test_large_pages_begin_at_large_pages_whatever_was_there_before(device: Device, driver: Driver) -> None:
    """A buffer of a few bytes less than 8 MiB has small pages, which make 8 MiB."""
    device.iface.alloc(SMALL_PAGE + PART_BYTES)
    small = device.iface.alloc(LARGE_FROM - 1)
    assert small.size == LARGE_FROM
    assert small.va_addr % LARGE_PAGE
    device.iface.free(small)
    assert device.iface.alloc(LARGE_FROM).va_addr % LARGE_PAGE == 0
    assert device.iface.alloc(LARGE_FROM - 1).va_addr == small.va_addr


def test_an_address_that_uvm_may_still_know_is_not_used_again(device: Device, driver: Driver) -> None:
    first = device.iface.alloc(64 << 20)
    driver.refuses["UVM_FREE"] = 1
    with pytest.raises(RuntimeError):
        device.iface.free(first)
    driver.refuses.clear()
    assert device.iface.alloc(64 << 20).va_addr != first.va_addr
