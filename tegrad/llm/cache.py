"""The keys and values of the sequences that a model runs, on its device.

Of each layer there is a buffer for keys and one for values, (slots, kv heads, positions, head dim): in f16, or in int8
with f16 scales of 32 elements each in buffers of their own. Keys are stored rotated. A layer that attends within a
window has no more rows than the window and a chunk of a prompt need, and position p lies in row p % rows.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Self

from tegrad.llm.arch import Config
from tegrad.llm.errors import OutOfMemory, UnsupportedModelError
from tegrad.llm.rings import Rings, rows_of
from tegrad.nv import roles
from tegrad.nv.gpu import Buffer, Gpu
from tegrad.nv.spec import MemorySpec

SPEC: Final = MemorySpec(nolru=True, role=roles.KV_CACHE)
BLOCK: Final = 32
"""Elements that share a scale."""
AHEAD: Final = 512
"""Positions that are written at most before what is read with the first of them: a chunk's."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's buffers; of an f16 cache, the scales are the elements' own buffers, which nobody reads as scales."""

    keys: Buffer
    values: Buffer
    key_scales: Buffer
    value_scales: Buffer
    rows: int
    """Of a sequence's KV head."""


class KvCache:
    """A cache of `positions` for each of `slots` sequences. Close it, or use it in a `with`.

    Up to `ahead` positions may be written at once. UnsupportedModelError for heads that our kernels do not take,
    OutOfMemory.
    """

    def __init__(
        self, device: Gpu, config: Config, positions: int, slots: int = 1, *, q8: bool = False, ahead: int = AHEAD
    ) -> None:
        if config.value_dim != config.head_dim:
            raise UnsupportedModelError(
                f"heads of {config.head_dim} keys and {config.value_dim} values: our kernels need them alike"
            )
        if q8 and config.head_dim % BLOCK:
            raise UnsupportedModelError(
                f"a q8_0 cache has blocks of 32, which heads of {config.head_dim} are not made of"
            )
        self.positions, self.slots, self.q8, self.ahead = positions, slots, q8, ahead
        row = slots * config.kv_heads * config.head_dim
        rows = [rows_of(op, positions, ahead) for op in config.network.attends]
        self.rings = Rings(config.network.attends, rows, positions, slots)
        self._device = device
        self._undo = ExitStack()
        try:
            self.layers = tuple(self._layer(row, each) for each in rows)
        except BaseException as error:
            self.close()
            if isinstance(error, MemoryError):
                elements = row * sum(rows)
                size = 2 * (elements * 17 // 16 if q8 else 2 * elements)
                raise OutOfMemory(
                    f"a cache of {slots} x {positions} positions needs {size / 2**20:,.0f} MiB, more than is free: "
                    "ask for a shorter context"
                ) from error
            raise

    def close(self) -> None:
        """Free the buffers. Closing twice is harmless."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _layer(self, row: int, rows: int) -> LayerCache:
        elements = row * rows
        keys, values = (self._alloc(elements if self.q8 else 2 * elements) for _ in range(2))
        if not self.q8:
            return LayerCache(keys, values, keys, values, rows)
        key_scales, value_scales = (self._alloc(elements // BLOCK * 2) for _ in range(2))
        return LayerCache(keys, values, key_scales, value_scales, rows)

    def _alloc(self, size: int) -> Buffer:
        buffer: Buffer = self._device.allocate(size, SPEC)
        self._undo.callback(self._device.release, buffer, SPEC)
        return buffer
