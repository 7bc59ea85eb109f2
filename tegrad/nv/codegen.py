"""What tinygrad's code generator gets wrong for this device, put right.

- A contiguous piece of a buffer becomes a zero-copy view at any byte offset, and a later kernel then reads it with
  8- or 16-byte vector loads that fault where the offset is not a multiple of that. Here only views at 16-byte offsets
  stay zero-copy on NV devices; others are copied.
- PTX has no approximate double-precision exp2 and log2: they become tinygrad's own polynomials.
- A product of a matrix and one vector gets a warp to a row (`tegrad.nv.matvec`).
- A block of more than three dimensions is launched with three. Joining the first two splits the lanes that a tensor
  core instruction takes together over two warps: here the warp's dimension stays alone.

`TEGRAD_REPAIRS_OFF` names repairs that are left out (`views,matvec`), to see what each is for.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from tinygrad.codegen.decomp.transcendental import xexp2, xlog2
from tinygrad.codegen.opt import heuristic
from tinygrad.dtype import dtypes
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat

from tegrad.errors import SettingError
from tegrad.nv import compat, matvec

VIEWS: Final = "tinygrad.uop.ops.UOp.contiguous_view"
OPTIMIZATIONS: Final = "tinygrad.codegen.opt.heuristic.hand_coded_optimizations"
GROUPING: Final = "tinygrad.codegen.gpudims._group_dims"
REVISION = 6
"""Part of the keys of tinygrad's kernel search: raise it whenever a patch changes what is generated. Compiled kernels
are kept by their source, which shows it."""

REPAIRS = ("views", "double", "matvec")
SWITCH = "TEGRAD_REPAIRS_OFF"
"""Environment variable: the repairs to leave out, with commas between them."""

WARP_THREADS: Final = 32
VIEW_ALIGN = 16
"""Bytes: the widest vector access that tinygrad emits (float4), so the alignment that a view must keep."""

double_transcendentals = PatternMatcher(
    [
        (UPat(op, dtype=dtypes.double, src=(UPat.var("d"),)), polynomial)
        for op, polynomial in ((Ops.EXP2, xexp2), (Ops.LOG2, xlog2))
    ]
)


def active(repair: str) -> bool:
    """Whether a repair is to be made; SettingError where the environment names one that does not exist."""
    off = [name for name in os.environ.get(SWITCH, "").split(",") if name]
    if unknown := [name for name in off if name not in REPAIRS]:
        raise SettingError(f"{SWITCH} names {', '.join(unknown)}: the repairs are {', '.join(REPAIRS)}")
    return repair not in off


def made_by() -> str:
    """What tells kernels that are generated now from others: the revision, and the repairs that are left out."""
    return "-".join([str(REVISION), *(repair for repair in REPAIRS if not active(repair))])


_View = tuple[UOp, int] | None


def _is_nv(device: str | Sequence[str] | None) -> bool:
    names = (device,) if isinstance(device, str) else device or ()
    return any(map(compat.is_nv, names))


def _aligned_views(original: Callable[[UOp], _View]) -> Callable[[UOp], _View]:
    def contiguous_view(self: UOp) -> _View:
        view = original(self)
        if view is not None and _is_nv(self.device) and view[1] * view[0].element_size() % VIEW_ALIGN:
            return None
        return view

    contiguous_view.__wrapped__ = original  # type: ignore[attr-defined]
    return contiguous_view


_Dims = tuple[Any, ...]


def _whole_warps(original: Callable[[_Dims, _Dims], _Dims | None]) -> Callable[[_Dims, _Dims], _Dims | None]:
    """Join a block's later dimensions rather than the first, where that is a warp: lanes are numbered along x."""

    def group(dims: _Dims, limits: _Dims) -> _Dims | None:
        block = limits == CUDARenderer.local_max  # else a grid
        if not block or len(dims) <= len(limits) or not isinstance(dims[0], int) or dims[0] != WARP_THREADS:
            return original(dims, limits)
        rest = original(dims[1:], limits[1:])
        return None if rest is None else (dims[0], *rest)

    return group


def install() -> None:
    """Apply the patches to tinygrad in this process; once, however often it is called."""
    compat.replace(GROUPING, _whole_warps(compat.published(GROUPING)))
    if active("views") and not hasattr(UOp.contiguous_view, "__wrapped__"):
        compat.replace(VIEWS, _aligned_views(compat.published(VIEWS)))
    if active("matvec") and not hasattr(heuristic.hand_coded_optimizations, "__wrapped__"):
        compat.replace(OPTIMIZATIONS, matvec.choose(compat.published(OPTIMIZATIONS)))


def uninstall() -> None:
    """Take the patches back, for tests that show what they are for."""
    for path in (VIEWS, OPTIMIZATIONS, GROUPING):
        compat.restore(path)
