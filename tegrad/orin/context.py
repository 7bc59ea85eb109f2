"""The GR context of a TSG: where its image lies, what of the L2 it may keep.

Source: L4T r36.4.3 nvgpu, common/gr/gr_setup.c and ctx.c, hal/ltc/ltc_ga10b_fusa.c.
"""

from __future__ import annotations

from tegrad.orin.address_space import AddressSpace
from tegrad.orin.keeper import Keeper
from tegrad.orin.steps import require

ADDRESS_BITS = 40
CONTEXT_IMAGE, CONTEXT_BUFFERS = 1 << 20, 4 << 20  # bytes; orders of magnitude, the real sizes are firmware's
L2_WAYS = 16
"""Ways of one L2 set (proj_scal_litter_num_ltc_lts_ways)."""
ZCULL_SEPARATE_BUFFER = 2
"""The zcull mode that needs a buffer of the caller's (NVGPU_CTXSW_PROG zcull mode, separate buffer)."""


class GraphicsContext:
    """Made by the first ALLOC_OBJ_CTX of a TSG, in that channel's driver range.

    Its image is what the engine loads, by 40 bits of address: where the range leaves no room for it below 2^40, the
    context is not valid. The larger circular buffers only draw a warning there.
    """

    def __init__(self, driver: Keeper, vm: AddressSpace) -> None:
        self.l2_ways = L2_WAYS
        self.zcull_va = 0
        self.vm = vm
        self.places = [vm.take_kernel(CONTEXT_IMAGE), vm.take_kernel(CONTEXT_BUFFERS)]
        self.valid = self.places[0] + CONTEXT_IMAGE <= 1 << ADDRESS_BITS
        if self.places[1] + CONTEXT_BUFFERS > 1 << ADDRESS_BITS:
            driver.log.write("WARNING: tu104_gr_init_commit_rtv_cb: address above 40 bits")

    def bind_zcull(self, va: int, mode: int) -> None:
        """ZCULL_BIND: a second buffer is ignored; the mode with a buffer of its own needs one."""
        if self.zcull_va:
            return
        require(va or mode != ZCULL_SEPARATE_BUFFER)
        self.zcull_va = va

    def release(self) -> None:
        """Give the addresses back."""
        for va in self.places:
            self.vm.give_kernel(va)
