"""Memory of a GPU that has its own, behind NVIDIA's resource manager (RM) and UVM.

tinygrad maps what it allocates twice: with UVM, for the address space that its channels use, and with RM, for the
device's default one, which only the video decoder's channel uses. RM takes the longer the larger the memory is: for
64 MiB 1.3 ms of 2.3 ms, and 0.6 ms more when they are freed (measured on an H200). Here plain memory, which only
kernels and copies see, is mapped with UVM alone, and what is small lies in slabs (`tegrad.nv.slabs`).

Addresses are used again. tinygrad only counts upwards, so that memory which comes and goes has ever new page tables,
which UVM makes and drops with it; beside memory that stays, within 512 MiB, they stay, too. For 64 MiB that is 0.03 ms
of 0.15 ms (measured on an H200).
"""

import ctypes
import functools
from collections import deque
from contextlib import suppress
from typing import Any, Final

from tinygrad.helpers import round_up
from tinygrad.runtime import ops_nv
from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.nv import compat
from tegrad.nv.faults import FREED_REMEMBERED, Place, describe_address
from tegrad.nv.slabs import PART_BYTES, Part, Slabs, whole

LARGE_PAGE: Final = 2 << 20
LARGE_FROM: Final = 8 << 20
"""Bytes from which on memory has large pages, as tinygrad has it."""
SMALL_PAGE: Final = 4 << 10

_Stock: Any = ops_nv.NVKIface


class PlainMemory:
    """What the driver knows plain memory by, as a buffer's `meta`."""

    __slots__ = ("hMemory", "rm_maps")

    def __init__(self, handle: int) -> None:
        self.hMemory = handle
        """RM's handle, by the name that tinygrad looks for."""
        self.rm_maps = False
        """Whether RM has mapped it too."""


class _Calls:
    """Parameters of the driver's calls, filled in as far as they are the same for all memory of a device.

    tinygrad's structures take 2 to 6 us each to fill in; a copy of one that is filled in takes 0.3 us.
    """

    def __init__(self, iface: Any) -> None:
        nv = ops_nv.nv_gpu
        handles = {"hRoot": iface.root, "hObjectParent": iface.dev.nvdevice}
        self.alloc = _Call("RM_ALLOC", nv.NVOS21_PARAMETERS(**handles, hClass=nv.NV1_MEMORY_USER))
        self.memory = {page: _Call("", _memory(iface.root, page)) for page in (SMALL_PAGE, LARGE_PAGE)}
        self.free = _Call("RM_FREE", nv.NVOS00_PARAMETERS(**handles))
        self.create_range = _Call("UVM_CREATE_EXTERNAL_RANGE", nv.UVM_CREATE_EXTERNAL_RANGE_PARAMS())
        attributes = (nv.UvmGpuMappingAttributes * 256)()
        attributes[0] = nv.UvmGpuMappingAttributes(gpuUuid=iface.gpu_uuid, gpuMappingType=1)
        self.map_range = _Call(
            "UVM_MAP_EXTERNAL_ALLOCATION",
            nv.UVM_MAP_EXTERNAL_ALLOCATION_PARAMS(
                rmCtrlFd=iface.fd_ctl.fd, hClient=iface.root, gpuAttributesCount=1, perGpuAttributes=attributes
            ),
        )
        self.free_range = _Call("UVM_FREE", nv.UVM_FREE_PARAMS())


class _Call:
    """A call's name, its number where tinygrad has one for it, and a structure to be copied for its parameters."""

    def __init__(self, name: str, filled: Any) -> None:
        self.name, self.number = name, getattr(ops_nv.nv_gpu, name, None)
        self._type, self._bytes = type(filled), bytes(filled)

    def parameters(self) -> Any:
        return self._type.from_buffer_copy(self._bytes)


def _memory(root: int, page: int) -> Any:
    """What tinygrad asks RM for when memory is for kernels alone, without its size."""
    nv = ops_nv.nv_gpu
    attr = nv.NVOS32_ATTR_PHYSICALITY_ALLOW_NONCONTIGUOUS << 27
    attr2 = nv.NVOS32_ATTR2_GPU_CACHEABLE_YES << 2 | nv.NVOS32_ATTR2_ZBC_PREFER_NO_ZBC
    if page == LARGE_PAGE:
        attr |= nv.NVOS32_ATTR_PAGE_SIZE_HUGE << 23
        attr2 |= nv.NVOS32_ATTR2_PAGE_SIZE_HUGE_2MB << 20
    flags = nv.NVOS32_ALLOC_FLAGS_MAP_NOT_REQUIRED | nv.NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED
    flags |= nv.NVOS32_ALLOC_FLAGS_ALIGNMENT_FORCE | nv.NVOS32_ALLOC_FLAGS_IGNORE_BANK_PLACEMENT
    flags |= nv.NVOS32_ALLOC_FLAGS_PERSISTENT_VIDMEM
    return nv.NV_MEMORY_ALLOCATION_PARAMS(
        owner=root, alignment=page, format=6, type=nv.NVOS32_TYPE_IMAGE, attr=attr, attr2=attr2, flags=flags
    )


class DesktopMemory(_Stock):  # type: ignore[misc]
    """tinygrad's interface with our plain memory: neither the CPU's too, nor uncached, contiguous or zeroed.

    Everything else is tinygrad's. Calls come one at a time, under the device's lock.
    """

    def alloc(
        self, size: int, host: bool = False, uncached: bool = False, cpu_access: bool = False,
        contiguous: bool = False, map_flags: int = 0, cpu_addr: int | None = None, zero: bool = False, **kwargs: Any,
    ) -> HCQBuffer:  # fmt: skip
        """Memory of `size` bytes. MemoryError when the GPU has no more of it, RuntimeError, OSError."""
        if host or uncached or cpu_access or contiguous or zero or kwargs or map_flags or cpu_addr is not None:
            buffer: HCQBuffer = super().alloc(
                size, host, uncached, cpu_access=cpu_access, contiguous=contiguous, map_flags=map_flags,
                cpu_addr=cpu_addr, zero=zero, **kwargs,
            )  # fmt: skip
        elif size <= PART_BYTES and not self._slabs.busy:
            buffer = self._slabs.alloc(size)
        else:
            buffer = self._make(size)
        self._buffers[int(buffer.va_addr)] = buffer.size
        return buffer

    def take_spare(self, size: int) -> Part | None:
        """Plain memory of `size` bytes, if a part of exactly that many pages was freed last."""
        part = self._slabs.take_spare(size)
        if part is not None:
            self._buffers[part.va_addr] = part.size
        return part

    def free(self, mem: HCQBuffer) -> None:
        """Give memory back; what another device owns stays. RuntimeError, OSError."""
        if mem.owner is not self.dev:
            return
        place = (int(mem.va_addr), mem.size)
        self._buffers.pop(place[0], None)
        self._freed.append(place)
        if isinstance(mem, Part):
            self._slabs.free(mem)
        elif isinstance(mem.meta, PlainMemory):
            self._release(mem)
        else:
            super().free(mem)

    def describe_address(self, address: int) -> str | None:
        """Which buffer an address lies in, or next to; None below every buffer's range, where null pointers point."""
        if address < _Stock.low_uvm_vaddr_allocator.base:
            return None
        return describe_address(address, list(self._buffers.items()), list(self._freed)[::-1])

    def map(self, mem: HCQBuffer) -> HCQBuffer:
        """Map memory of another device's; a part of a slab with all of its slab. RuntimeError, OSError."""
        mapped: HCQBuffer = super().map(whole(mem))
        return mapped

    def trim(self) -> None:
        """Give back what is kept for small buffers and holds none. RuntimeError, OSError."""
        self._slabs.trim()

    def map_with_rm(self, mem: HCQBuffer) -> None:
        """Have RM map memory of this device's too, where it has not, at the same address. MemoryError, RuntimeError."""
        mem = whole(mem)
        if not isinstance(mem.meta, PlainMemory) or mem.owner is not self.dev or mem.meta.rm_maps:
            return
        nv = ops_nv.nv_gpu
        flags = nv.NVOS46_FLAGS_PAGE_SIZE_4KB << 8 | nv.NVOS46_FLAGS_CACHE_SNOOP_ENABLE << 4
        flags |= nv.NVOS46_FLAGS_DMA_OFFSET_FIXED_TRUE << 15
        asked = nv.NVOS46_PARAMETERS(
            hClient=self.root, hDevice=self.dev.nvdevice, hDma=self.dev.virtmem, hMemory=mem.meta.hMemory,
            length=mem.size, flags=flags, dmaOffset=mem.va_addr,
        )  # fmt: skip
        ops_nv.nv_iowr(self.fd_ctl, nv.NV_ESC_RM_MAP_MEMORY_DMA, asked)
        _check(asked.status, "RM_MAP_MEMORY_DMA", mem.size)
        mem.meta.rm_maps = True

    # ---- plain memory

    @functools.cached_property
    def _buffers(self) -> dict[int, int]:
        """Size by address of what is in use."""
        return {}

    @functools.cached_property
    def _freed(self) -> deque[Place]:
        return deque(maxlen=FREED_REMEMBERED)

    @functools.cached_property
    def _addresses(self) -> dict[int, list[int]]:
        """By size, where memory was that UVM knows no more, the last one last."""
        return {}

    @functools.cached_property
    def _slabs(self) -> Slabs:
        return Slabs(self._make, self._release_slab)

    @functools.cached_property
    def _calls(self) -> _Calls:
        return _Calls(self)

    def _make(self, size: int) -> HCQBuffer:
        """Memory of its own, mapped. When a step fails, those before it are undone."""
        page = LARGE_PAGE if size >= LARGE_FROM else SMALL_PAGE
        size = round_up(size, page)
        free = self._addresses.get(size)
        address = free.pop() if free else self._alloc_gpu_vaddr(size, alignment=page)
        handle, ranged = self._allocate(size, page), False
        try:
            self._uvm(self._calls.create_range, address, size)
            ranged = True
            self._uvm(self._calls.map_range, address, size, handle)
        except BaseException:  # the first error is the one to tell
            with suppress(RuntimeError, MemoryError, OSError):
                self._free_memory(handle)
            if ranged:
                with suppress(RuntimeError, MemoryError, OSError):
                    self._uvm(self._calls.free_range, address, size)
            raise
        return HCQBuffer(address, size, meta=PlainMemory(handle), owner=self.dev)

    def _allocate(self, size: int, page: int) -> int:
        """Physical memory: RM's handle."""
        memory, asked = self._calls.memory[page].parameters(), self._calls.alloc.parameters()
        memory.size, memory.limit = size, size - 1
        asked.pAllocParms = ctypes.addressof(memory)
        ops_nv.nv_iowr(self.fd_ctl, ops_nv.nv_gpu.NV_ESC_RM_ALLOC, asked)
        _check(asked.status, "RM_ALLOC", size)
        return int(asked.hObjectNew)

    def _release(self, mem: HCQBuffer) -> None:
        try:
            self._free_memory(mem.meta.hMemory)
        finally:
            self._uvm(self._calls.free_range, mem.va_addr, mem.size)
            self._addresses.setdefault(mem.size, []).append(int(mem.va_addr))

    def _release_slab(self, mem: HCQBuffer) -> None:
        for device, mapped in mem.mappings.items():
            compat.unmap(mapped, device)
        self._release(mem)

    def _free_memory(self, handle: int) -> None:
        asked = self._calls.free.parameters()
        asked.hObjectOld = handle
        ops_nv.nv_iowr(self.fd_ctl, ops_nv.nv_gpu.NV_ESC_RM_FREE, asked)
        _check(asked.status, "RM_FREE")

    def _uvm(self, call: _Call, address: int, size: int, handle: int | None = None) -> None:
        """A call of UVM's about a range of addresses."""
        asked = call.parameters()
        asked.base, asked.length = address, size
        if handle is not None:
            asked.hMemory = handle
        ops_nv.nv_iowr(self.fd_uvm, None, asked, cmd=call.number)
        _check(asked.rmStatus, call.name, size)


def _check(status: int, call: str, size: int | None = None) -> None:
    """MemoryError or RuntimeError for a call that the driver refused."""
    if status:
        error = MemoryError if status == ops_nv.nv_gpu.NV_ERR_NO_MEMORY else RuntimeError
        about = "" if size is None else f" for {size} bytes"
        raise error(f"{call}{about} returned {ops_nv.get_error_str(status)}")
