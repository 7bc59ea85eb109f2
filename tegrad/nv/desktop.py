"""Memory of a GPU that has its own, behind NVIDIA's resource manager (RM) and UVM.

tinygrad maps what it allocates twice: with UVM, for the address space that its channels use, and with RM, for the
device's default one, which only the video decoder's channel uses. RM takes the longer the larger the memory is: for
64 MiB 1.3 ms of 2.3 ms, and 0.6 ms more when they are freed (measured on an H200). Here plain memory, which only
kernels and copies see, is mapped with UVM alone, and small buffers lie in slabs (`tegrad.nv.slabs`).

GPU addresses are used again. tinygrad never uses one twice, so that memory which comes and goes lies at ever new
addresses, whose page tables (one for each 512 MiB) UVM makes and drops with it. Where addresses are used again and
other memory stays within the same 512 MiB, the page table stays, too. For 64 MiB that saves 0.03 ms of 0.15 ms
(measured on an H200).
"""

import ctypes
import functools
from collections import deque
from contextlib import suppress
from typing import Any, ClassVar, Final

from tinygrad.helpers import round_up
from tinygrad.runtime import ops_nv
from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.nv import compat
from tegrad.nv.debugger import NOTIFIER_BYTES
from tegrad.nv.faults import FREED_REMEMBERED, Place, describe_address
from tegrad.nv.slabs import PART_BYTES, Part, Slabs, whole

LARGE_PAGE: Final = 2 << 20
LARGE_FROM: Final = 8 << 20
"""From this many bytes on memory has large pages, as in tinygrad."""
SMALL_PAGE: Final = 4 << 10

_Stock: Any = ops_nv.NVKIface


class PlainMemory:
    """A buffer's `meta` for plain memory: the driver's handle of it."""

    __slots__ = ("hMemory", "page", "rm_maps")

    def __init__(self, handle: int, page: int) -> None:
        self.hMemory = handle
        """RM's handle, under the name that tinygrad reads."""
        self.page = page
        """Bytes of its pages."""
        self.rm_maps = False
        """Whether RM has mapped it too (`DesktopMemory.map_with_rm`)."""


class _Calls:
    """Parameters of the driver's calls, with all that is the same for every buffer of a device filled in once.

    To fill in one of tinygrad's structures takes 2 to 6 us, to copy one that is filled in 0.3 us.
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
    """A driver call: its name, its number if tinygrad knows one, and its parameters, filled in to be copied."""

    def __init__(self, name: str, filled: Any) -> None:
        self.name, self.number = name, getattr(ops_nv.nv_gpu, name, None)
        self._type, self._bytes = type(filled), bytes(filled)

    def parameters(self) -> Any:
        """A new copy of the parameters."""
        return self._type.from_buffer_copy(self._bytes)


def _memory(root: int, page: int) -> Any:
    """RM's parameters for memory that only kernels and copies use, as tinygrad sets them, without the size."""
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
    """tinygrad's NVIDIA interface, with plain memory allocated here.

    Memory is plain if the CPU does not see it and it need not be uncached, contiguous or zeroed. tinygrad allocates all
    other memory. Calls come under the device's lock.
    """

    _mapped: ClassVar[dict[int, int]] = {}
    """What all devices have mapped for the CPU: address and size."""

    def alloc(
        self, size: int, host: bool = False, uncached: bool = False, cpu_access: bool = False,
        contiguous: bool = False, map_flags: int = 0, cpu_addr: int | None = None, zero: bool = False, **kwargs: Any,
    ) -> HCQBuffer:  # fmt: skip
        """Memory of at least `size` bytes. MemoryError if the GPU has no more; RuntimeError or OSError if the driver
        refuses for another reason."""
        if uncached and not cpu_access:  # a channel's error memory, of which tinygrad asks for 48 MiB
            size = min(size, NOTIFIER_BYTES)
        if host or uncached or cpu_access or contiguous or zero or kwargs or map_flags or cpu_addr is not None:
            buffer: HCQBuffer = super().alloc(
                size, host, uncached, cpu_access=cpu_access, contiguous=contiguous, map_flags=map_flags,
                cpu_addr=cpu_addr, zero=zero, **kwargs,
            )  # fmt: skip
            if host and cpu_addr is None:
                self._mapped[int(buffer.va_addr)] = buffer.size
        elif size <= PART_BYTES and not self._slabs.busy:
            buffer = self._slabs.alloc(size)
        else:
            buffer = self._make(size)
        self._buffers[int(buffer.va_addr)] = buffer.size
        return buffer

    def take_spare(self, size: int) -> Part | None:
        """Plain memory of at least `size` bytes, if a freed part of just as many pages is at hand (`Slabs.take_spare`);
        else None."""
        part = self._slabs.take_spare(size)
        if part is not None:
            self._buffers[part.va_addr] = part.size
        return part

    def free(self, mem: HCQBuffer) -> None:
        """Give memory back; does nothing for memory that another device owns. RuntimeError, OSError."""
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
            self._mapped.pop(place[0], None)

    def _gpu_map_to_cpu(self, memory_handle: int, size: int, *args: Any, **kwargs: Any) -> int:
        address: int = super()._gpu_map_to_cpu(memory_handle, size, *args, **kwargs)
        self._mapped[address] = size
        return address

    def describe_address(self, address: int) -> str | None:
        """A sentence on which buffer a GPU address lies in, or next to; None for addresses below all buffers, such as a
        null pointer."""
        if address < _Stock.low_uvm_vaddr_allocator.base:
            return None
        return describe_address(address, list(self._buffers.items()), list(self._freed)[::-1])

    def map(self, mem: HCQBuffer) -> HCQBuffer:
        """Map another device's memory for this one; of a part, its whole slab. RuntimeError, OSError."""
        mapped: HCQBuffer = super().map(whole(mem))
        return mapped

    def trim(self) -> None:
        """Give back the slabs in which no buffer lies. RuntimeError, OSError."""
        self._slabs.trim()

    def map_with_rm(self, mem: HCQBuffer) -> None:
        """Have RM map this device's plain memory too, at the same address, unless it has. MemoryError, RuntimeError."""
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
        """The size of each buffer in use, by its GPU address."""
        return {}

    @functools.cached_property
    def _freed(self) -> deque[Place]:
        """Address and size of the buffers that were freed last, to name them in a fault's report."""
        return deque(maxlen=FREED_REMEMBERED)

    @functools.cached_property
    def _addresses(self) -> dict[tuple[int, int], list[int]]:
        """GPU addresses to use again, by size and page of the memory that lay there; the one freed last is the last.

        Memory in small pages can have the size of memory in large ones, but begins anywhere.
        """
        return {}

    @functools.cached_property
    def _slabs(self) -> Slabs:
        return Slabs(self._make, self._release_slab)

    @functools.cached_property
    def _calls(self) -> _Calls:
        return _Calls(self)

    def _make(self, size: int) -> HCQBuffer:
        """Allocate and map memory that is not part of a slab. If a step fails, the steps before it are undone;
        the address is then not used again."""
        page = LARGE_PAGE if size >= LARGE_FROM else SMALL_PAGE
        size = round_up(size, page)
        free = self._addresses.get((size, page))
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
        return HCQBuffer(address, size, meta=PlainMemory(handle, page), owner=self.dev)

    def _allocate(self, size: int, page: int) -> int:
        """Allocate physical memory of `size` bytes in pages of `page` bytes; RM's handle of it."""
        memory, asked = self._calls.memory[page].parameters(), self._calls.alloc.parameters()
        memory.size, memory.limit = size, size - 1
        asked.pAllocParms = ctypes.addressof(memory)
        ops_nv.nv_iowr(self.fd_ctl, ops_nv.nv_gpu.NV_ESC_RM_ALLOC, asked)
        _check(asked.status, "RM_ALLOC", size)
        return int(asked.hObjectNew)

    def _release(self, mem: HCQBuffer) -> None:
        """Free and unmap what `_make` made, and keep its address to be used again."""
        try:
            self._free_memory(mem.meta.hMemory)
        finally:
            self._uvm(self._calls.free_range, mem.va_addr, mem.size)
            self._addresses.setdefault((mem.size, mem.meta.page), []).append(int(mem.va_addr))

    def _release_slab(self, mem: HCQBuffer) -> None:
        """The same for a slab's buffer, which other devices may have mapped."""
        for device, mapped in mem.mappings.items():
            compat.unmap(mapped, device)
        self._release(mem)

    def _free_memory(self, handle: int) -> None:
        asked = self._calls.free.parameters()
        asked.hObjectOld = handle
        ops_nv.nv_iowr(self.fd_ctl, ops_nv.nv_gpu.NV_ESC_RM_FREE, asked)
        _check(asked.status, "RM_FREE")

    def _uvm(self, call: _Call, address: int, size: int, handle: int | None = None) -> None:
        """Make one of UVM's calls for a range of `size` bytes at `address`. MemoryError, RuntimeError."""
        asked = call.parameters()
        asked.base, asked.length = address, size
        if handle is not None:
            asked.hMemory = handle
        ops_nv.nv_iowr(self.fd_uvm, None, asked, cmd=call.number)
        _check(asked.rmStatus, call.name, size)


def _check(status: int, call: str, size: int | None = None) -> None:
    """MemoryError (no memory) or RuntimeError if the driver answered a call with an error status."""
    if status:
        error = MemoryError if status == ops_nv.nv_gpu.NV_ERR_NO_MEMORY else RuntimeError
        about = "" if size is None else f" for {size} bytes"
        raise error(f"{call}{about} returned {ops_nv.get_error_str(status)}")
