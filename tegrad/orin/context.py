"""The GR context of a TSG: where its image lies, how its work may be preempted, what of the L2 it may keep.

Source: L4T r36.4.3 nvgpu, common/gr/gr_setup.c, ctx.c and obj_ctx.c, hal/ltc/ltc_ga10b_fusa.c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tegrad.orin.files import require
from tegrad.uapi import constants as k

if TYPE_CHECKING:
    from tegrad.orin.address_space import AddressSpace
    from tegrad.orin.driver import Driver

ADDRESS_BITS = 40
CONTEXT_IMAGE, CONTEXT_BUFFERS = 1 << 20, 4 << 20  # bytes; orders of magnitude, the real sizes are firmware's
L2_WAYS = 16
"""Ways of one L2 set (proj_scal_litter_num_ltc_lts_ways)."""
ZCULL_SEPARATE_BUFFER = 2
"""The zcull mode that needs a buffer of the caller's (NVGPU_CTXSW_PROG zcull mode, separate buffer)."""

GRAPHICS_MODES = k.NVGPU_GRAPHICS_PREEMPTION_MODE_WFI | k.NVGPU_GRAPHICS_PREEMPTION_MODE_GFXP
COMPUTE_MODES = (
    k.NVGPU_COMPUTE_PREEMPTION_MODE_WFI | k.NVGPU_COMPUTE_PREEMPTION_MODE_CTA | k.NVGPU_COMPUTE_PREEMPTION_MODE_CILP
)


class GraphicsContext:
    """Made by the first ALLOC_OBJ_CTX of a TSG, in that channel's driver range.

    Its image is what the engine loads, by 40 bits of address: where the range leaves no room for it below 2^40, the
    context is not valid. The larger circular buffers only draw a warning there.
    """

    def __init__(self, driver: Driver, vm: AddressSpace) -> None:
        self.graphics_mode = k.NVGPU_GRAPHICS_PREEMPTION_MODE_WFI
        self.compute_mode = k.NVGPU_COMPUTE_PREEMPTION_MODE_WFI
        self.grids_give_way = self.compute_mode
        """The compute mode that the context's image holds: 1 WFI, 2 CTA, 4 CILP."""
        self.l2_ways = L2_WAYS
        self.zcull_va = 0
        self.vm = vm
        self.places = [vm.take_kernel(CONTEXT_IMAGE), vm.take_kernel(CONTEXT_BUFFERS)]
        self.valid = self.places[0] + CONTEXT_IMAGE <= 1 << ADDRESS_BITS
        if self.places[1] + CONTEXT_BUFFERS > 1 << ADDRESS_BITS:
            driver.log.write("WARNING: tu104_gr_init_commit_rtv_cb: address above 40 bits")

    def set_preemption(self, graphics: int, compute: int, *, computes: bool) -> bool:
        """SET_PREEMPTION_MODE's rules; whether anything was set. 0, and a mode that is set already, leave it.

        A mode can only be raised; but where only the graphics mode changes, the driver forgets the compute mode it has
        set, and takes any the next time. `computes` tells whether the channel's object is of a compute or graphics
        class: others have no mode to set.
        """
        graphics = 0 if graphics == self.graphics_mode else graphics
        compute = 0 if compute == self.compute_mode else compute
        if not graphics and not compute:
            return False
        require(not graphics or (graphics & GRAPHICS_MODES and graphics >= self.graphics_mode))
        require(not compute or (compute & COMPUTE_MODES and compute >= self.compute_mode))
        gfxp = graphics == k.NVGPU_GRAPHICS_PREEMPTION_MODE_GFXP
        require(not (gfxp and compute == k.NVGPU_COMPUTE_PREEMPTION_MODE_CILP))
        require(computes)
        if graphics in (k.NVGPU_GRAPHICS_PREEMPTION_MODE_WFI, k.NVGPU_GRAPHICS_PREEMPTION_MODE_GFXP):
            self.graphics_mode = graphics
        self.compute_mode = compute
        self.grids_give_way = compute or self.grids_give_way
        return True

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
