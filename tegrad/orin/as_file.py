"""The AS fd, and the checks of ALLOC_AS, which makes one. Source: L4T r36.4.3 nvgpu, common/mm/as.c."""

from __future__ import annotations

import errno

from tegrad.orin.address_space import KERNEL_SIZE, PAGE_TABLE_BITS, PDE_ALIGN, AddressSpace
from tegrad.orin.files import File
from tegrad.orin.state import DriverState
from tegrad.orin.steps import Process, require


class AsFile(File):
    """An address-space fd. Its VM outlives it while channels are bound."""

    kind = "as"

    def __init__(self, driver: DriverState, process: Process, vm: AddressSpace) -> None:
        super().__init__(driver, process)
        self.vm = vm

    def release(self) -> None:
        """Drop the VM."""
        self.vm.drop()


def alloc_as(driver: DriverState, big_page_size: int, start: int, end: int, split: int) -> AddressSpace:
    """The checks of ALLOC_AS, in order, and the VM."""
    require(big_page_size == 0)
    require(start and start % PDE_ALIGN == 0 and end and end % PDE_ALIGN == 0 and start < end)
    require(split == 0)
    require(end + KERNEL_SIZE <= 1 << PAGE_TABLE_BITS, errno.ENOMEM)
    return AddressSpace(driver, start, end)
