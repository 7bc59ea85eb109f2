"""How a TSG's grids may be made to give way: the modes that objects ask for, and those that SET_PREEMPTION_MODE sets.

Source: L4T r36.4.2 nvgpu, common/gr/gr_setup.c, obj_ctx.c and ctx.c, common/fifo/tsg.c; executed, see
tests/orin/nvgpu_oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tegrad.hw.chips import Chip
from tegrad.orin import engine_classes
from tegrad.orin.channel import DriverChannel
from tegrad.orin.steps import require
from tegrad.uapi import constants as k

GRAPHICS_WFI, GFXP = k.NVGPU_GRAPHICS_PREEMPTION_MODE_WFI, k.NVGPU_GRAPHICS_PREEMPTION_MODE_GFXP
COMPUTE_WFI, CTA = k.NVGPU_COMPUTE_PREEMPTION_MODE_WFI, k.NVGPU_COMPUTE_PREEMPTION_MODE_CTA
CILP = k.NVGPU_COMPUTE_PREEMPTION_MODE_CILP
GRAPHICS_MODES = GRAPHICS_WFI | GFXP
COMPUTE_MODES = COMPUTE_WFI | CTA | CILP


def _any(channels: Iterable[DriverChannel], is_class: Callable[[Chip, int], bool], *, veid_0: bool) -> bool:
    """Whether a channel at veid 0 and host queue 0, or off both, has an object of such a class."""
    return any(
        is_class(one.driver.chip, one.last_class) and (one.bound_veid == 0) is (one.queue == 0) is veid_0
        for one in channels
    )


def object_allowed(channel: DriverChannel, group: Iterable[DriverChannel]) -> bool:
    """Whether a channel's class may share the group: graphics belongs to veid 0 and host queue 0, beside no compute off
    them (nvgpu_tsg_validate_class_veid_pbdma)."""
    chip, members = channel.driver.chip, [*group]
    draws = engine_classes.draws(chip, channel.last_class)
    computes = engine_classes.computes(chip, channel.last_class)
    if draws and (channel.queue or channel.veid):
        return False
    if (
        computes
        and (channel.veid == 0) is not (channel.queue == 0)
        and _any(members, engine_classes.draws, veid_0=True)
    ):
        return False
    return not draws or not any(
        engine_classes.computes(chip, one.last_class) and (one.bound_veid == 0) is not (one.queue == 0)
        for one in members
    )


@dataclass(slots=True)
class Modes:
    """The modes of a TSG's context: 0 before an object of the graphics engine was made, and of the compute mode also
    after only the graphics mode was raised: then any may be set again."""

    graphics: int = 0
    compute: int = 0
    started: bool = False
    """Whether the TSG has a context; the first object's modes are WFI unless it asks for others."""
    image: int = COMPUTE_WFI
    """The compute mode that the context's image holds, which is how grids give way."""

    def begin(self, channel: DriverChannel, group: Iterable[DriverChannel], *, gfxp: bool, cilp: bool) -> None:
        """An object is made that asks for modes; Errno(EINVAL) where it cannot have them. Copy objects ask in vain."""
        if _runs(channel):
            graphics, compute = GFXP * gfxp, CILP * cilp
            if not self.started:
                self._set(channel, group, graphics or GRAPHICS_WFI, compute or COMPUTE_WFI)
            else:
                graphics, compute = self._new(graphics, compute)
                if graphics or compute:
                    self._set(channel, group, graphics, compute)
        self.show()

    def change(self, channel: DriverChannel, group: Iterable[DriverChannel], graphics: int, compute: int) -> bool:
        """SET_PREEMPTION_MODE: whether there was anything to set; 0, and a mode that is set already, leave it.

        Errno(EINVAL) for what cannot be; of a copy object's wish the graphics mode is set all the same.
        """
        graphics, compute = self._new(graphics, compute)
        if not graphics and not compute:
            return False
        self._set(channel, group, graphics, compute)
        return True

    def leave(self, veid: int) -> None:
        """A subcontext with a part of the context has lost its last channel: with veid 0 goes GFXP, and its buffers."""
        if veid == 0 and self.graphics == GFXP:
            self.graphics = GRAPHICS_WFI

    def show(self) -> None:
        """Store the compute mode in the context's image; WFI, and none, leave what it holds."""
        if self.compute in (CTA, CILP):
            self.image = self.compute

    def _new(self, graphics: int, compute: int) -> tuple[int, int]:
        return (0 if graphics == self.graphics else graphics), (0 if compute == self.compute else compute)

    def _set(self, channel: DriverChannel, group: Iterable[DriverChannel], graphics: int, compute: int) -> None:
        require(not graphics or (graphics & GRAPHICS_MODES and graphics >= self.graphics))
        require(not compute or (compute & COMPUTE_MODES and compute >= self.compute))
        require(not (graphics == GFXP and compute == CILP))
        self._check_cilp(channel, [*group], wanted=compute == CILP)
        if graphics in (GRAPHICS_WFI, GFXP):
            self.graphics = graphics
        require(_runs(channel))
        self.compute = compute

    def _check_cilp(self, channel: DriverChannel, group: list[DriverChannel], *, wanted: bool) -> None:
        """Compute off veid 0 beside graphics rules CILP out (nvgpu_tsg_validate_cilp_config)."""
        chip = channel.driver.chip
        if engine_classes.computes(chip, channel.last_class) and wanted:
            beside = channel.veid or _any(group, engine_classes.computes, veid_0=False)
            require(not (beside and _any(group, engine_classes.draws, veid_0=True)))
        if engine_classes.draws(chip, channel.last_class) and self.compute == CILP:
            require(not _any(group, engine_classes.computes, veid_0=False))


def _runs(channel: DriverChannel) -> bool:
    """Whether a channel's object is of a compute or graphics class: others have no mode."""
    chip = channel.driver.chip
    return engine_classes.computes(chip, channel.last_class) or engine_classes.draws(chip, channel.last_class)
