"""The QMD class that tinygrad's queues and programs use, over the layouts of `tegrad.hw.qmd`.

tinygrad names fields as QMD version 3 does, and where it asks for `ver` below 4, as version 5 does. This class takes
both spellings and writes the layout of the device's compute class: version 3 on Ampere and Ada, version 4 on Hopper.
Other classes keep tinygrad's own.
"""

import re
from typing import Any

from tinygrad.runtime import ops_nv

from tegrad.hw import qmd as hw

_AMPERE, _HOPPER, _BLACKWELL = 0xC6C0, 0xCBC0, 0xCDC0

_V4_FIXED = {"qmd_major_version": 4, "qmd_minor_version": 0, "qmd_type": hw.V4.enums["qmd_type"]["GRID_CTA"]}
_V4_NAMES = {
    "register_count_v": "register_count",
    "cta_raster_width": "grid_width",
    "cta_raster_height": "grid_height",
    "cta_raster_depth": "grid_depth",
    "sm_global_caching_enable": "",  # global loads are always cached in L1
}
# Releases are four words, payload and timestamp. Measured on an H200 (version 4): with four words the upper half of the
# payload is stored when payload64b is set and zero otherwise, whatever the membar type; one word stores 32 bits; one
# word with payload64b, and two words, store nothing at all.
_V4_INDEXED = (
    (re.compile(r"dependent_qmd(\d)_(enable|action|prefetch)"), r"dependent_qmd_\2_\1"),
    (re.compile(r"release(\d)_address_(lower|upper)"), r"release_semaphore\1_addr_\2"),
    (re.compile(r"release(\d)_payload_(lower|upper)"), r"release_semaphore\1_payload_\2"),
    (re.compile(r"release(\d)_(\w+)"), r"release_\2_\1"),
)


def layout_of(compute_class: int) -> hw.QmdLayout | None:
    """The layout that a compute class reads, or None for one that we have no table of."""
    if compute_class == _HOPPER:
        return hw.V4
    return hw.V3 if _AMPERE <= compute_class < _HOPPER else None


def v4_name(name: str) -> str:
    """The name in version 4 of a field as tinygrad calls it; empty for one that version 4 has no use for."""
    if name in _V4_NAMES:
        return _V4_NAMES[name]
    for pattern, replacement in _V4_INDEXED:
        if pattern.fullmatch(name):
            return pattern.sub(replacement, name)
    return name


class QMD(ops_nv.QMD):  # type: ignore[misc]
    """A launch descriptor in memory of its own, or in place in `view`.

    Beside `write`, `read`, `field_offset` and `set_constant_buf_addr` as tinygrad has them: `constant_buffer_size_*`
    takes bytes (tinygrad passes bytes for a field that counts 16), and enabling a release on version 4 also asks for
    its 64-bit payload.
    """

    def __init__(self, dev: Any, view: Any = None, **fields: int) -> None:
        self.layout = layout_of(dev.iface.compute_class)
        if self.layout is None:
            super().__init__(dev, view, **fields)
            return
        self.ver, self.sz = self.layout.major, self.layout.size // 4
        self.mv: Any = memoryview(bytearray(self.layout.size)) if view is None else view
        # A slice of a byte view of memory is that memory; the view itself need not be a memoryview.
        self._qmd = hw.Qmd(self.layout, memoryview(self.mv[0 : self.layout.size]))
        if view is None and self.layout is hw.V4:
            self._qmd.write(**_V4_FIXED)
        if fields:
            self.write(**fields)

    def _name(self, name: str) -> str:
        return v4_name(name.lower()) if self.layout is hw.V4 else name.lower()

    def write(self, **fields: int) -> None:
        """Set fields; OverflowError where a value does not fit, KeyError for a name that no version knows."""
        if self.layout is None:
            super().write(**fields)
            return
        for key, value in fields.items():
            if not (name := self._name(key)):
                continue
            if name.startswith("constant_buffer_size_shifted4"):
                value = (value + 15) >> 4
            if self.layout is hw.V4 and name in _V4_FIXED:
                value = _V4_FIXED[name]
            if self.layout is hw.V4 and name.startswith("release_enable_"):
                self._qmd.write(**{name.replace("enable", "payload64b"): value})
            self._qmd.write(**{name: value})

    def read(self, name: str, val: int = 0) -> int:
        """The value of one field."""
        if self.layout is None:
            return int(super().read(name, val))
        return self._qmd.read(self._name(name))

    def field_offset(self, name: str) -> int:
        """Byte offset of a field, for values that are written at submit time."""
        if self.layout is None:
            return int(super().field_offset(name))
        return self.layout.bits[self._name(name)][1] // 8

    def set_constant_buf_addr(self, i: int, addr: int) -> None:
        """Point constant bank `i` at a GPU address, a multiple of 64 on version 4."""
        if self.layout is None:
            super().set_constant_buf_addr(i, addr)
            return
        shift, suffix = (6, "_shifted6") if self.layout is hw.V4 else (0, "")
        lower, upper = addr >> shift & 0xFFFFFFFF, addr >> shift >> 32
        fields = {f"constant_buffer_addr_lower{suffix}_{i}": lower, f"constant_buffer_addr_upper{suffix}_{i}": upper}
        self._qmd.write(**fields)
