"""The keys and values of the sequences that a model runs, on its device.

Of each layer there is a buffer for keys and one for values, (slots, kv heads, positions, head dim): in f16, or in int8
with f16 scales of 32 elements each in buffers of their own. Keys are stored rotated. A layer that attends within a
window has no more rows than the window and a chunk of a prompt need, and position p lies in row p % rows. So it is
with a layer that convolves, which has one buffer (slots, rows, elements) of float32. A delta net's state is as long for
any number of positions. Heads may differ from layer to layer, and a layer that attends to an earlier one's keys and
values has that layer's buffers.

In a cache made of `blocks`, layers that keep all positions are pools (blocks, kv heads, BLOCK_POSITIONS, head dim), and
position p of a slot lies in block `table[slot][p // BLOCK_POSITIONS]`, the same one in each of these layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tegrad.llm.closing import Closing
from tegrad.llm.config import Config
from tegrad.llm.errors import OutOfMemory, UnsupportedModelError
from tegrad.llm.network import Attend, Delta, Mixer
from tegrad.llm.rings import Rings, rows_of
from tegrad.llm.workspace import Workspace
from tegrad.nv import roles
from tegrad.nv.gpu import Buffer, Gpu
from tegrad.nv.spec import MemorySpec

SPEC: Final = MemorySpec(nolru=True, role=roles.KV_CACHE)
BLOCK: Final = 32
"""Elements that share a scale."""
AHEAD: Final = 512
"""Positions that are written at most before what is read with the first of them: a chunk's."""
BLOCK_POSITIONS: Final = 64
"""Positions of a block: whole tiles of both kinds of attention."""
TABLE_SPEC: Final = MemorySpec(cpu_access=True, nolru=True, role=roles.STATE)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's buffers; of an f16 cache, the scales are the elements' own buffers, which nobody reads as scales.

    Of a layer that convolves all are the one of its ring."""

    keys: Buffer
    values: Buffer
    key_scales: Buffer
    value_scales: Buffer
    rows: int
    """Of a sequence's KV head, or of a sequence."""
    table: Buffer | None = None
    """int32 (slots, `table_blocks`), where the layer is a pool of blocks."""
    table_blocks: int | None = None
    state: Buffer | None = None
    """Of a delta net (kernels/delta.cuh)."""

    @property
    def tables(self) -> tuple[Buffer, ...]:
        """What such kernels take beside its buffers."""
        return () if self.table is None else (self.table,)


def pool_macros(table_blocks: int | None) -> dict[str, int]:
    """Macros of kernels that read a pool of blocks; none where there is none."""
    return {} if table_blocks is None else {"BLOCK_POSITIONS": BLOCK_POSITIONS, "TABLE_BLOCKS": table_blocks}


def pooled(op: Mixer, positions: int) -> bool:
    """Whether a layer of a cache that is made of blocks is a pool of them: it keeps all positions."""
    return op.window_within(positions) is None


def held(op: Mixer, positions: int, ahead: int, slots: int = 1, blocks: int | None = None) -> int:
    """Positions that a layer keeps, those of all sequences together."""
    if blocks is not None and pooled(op, positions):
        return blocks * BLOCK_POSITIONS
    return slots * rows_of(op, positions, ahead)


def bytes_of(config: Config, op: Mixer, rows: int, q8: bool) -> int:
    """Bytes that a layer's keys and values of so many positions take, or what it keeps of them to convolve; `config` is
    the layer's (`Config.at`)."""
    if not isinstance(op, Attend):
        return 4 * config.convolved(op) * rows
    elements = config.kv_heads * config.head_dim * rows
    return 2 * (elements * 17 // 16 if q8 else 2 * elements)


def state_bytes(op: Mixer) -> int:
    """Bytes of what runs along with a sequence, before a position and after it."""
    return 2 * 4 * op.heads * op.width**2 if isinstance(op, Delta) else 0


class KvCache(Closing):
    """A cache of `positions` for each of `slots` sequences. Close it, or use it in a `with`.

    Up to `ahead` positions may be written at once. With `blocks` so many are there for all sequences, and `put` says
    whose they are. UnsupportedModelError for heads that our kernels do not take, OutOfMemory.
    """

    def __init__(
        self, device: Gpu, config: Config, positions: int, slots: int = 1, *, q8: bool = False, ahead: int = AHEAD,
        blocks: int | None = None,
    ) -> None:  # fmt: skip
        if config.value_dim != config.head_dim:
            raise UnsupportedModelError(
                f"heads of {config.head_dim} keys and {config.value_dim} values: our kernels need them alike"
            )
        if q8 and (odd := [size for at in range(config.layers) if (size := config.at(at).head_dim) % BLOCK]):
            raise UnsupportedModelError(f"a q8_0 cache has blocks of 32, which heads of {odd[0]} are not made of")
        self.positions, self.slots, self.q8, self.ahead = positions, slots, q8, ahead
        net = config.network
        mixers = tuple(net.keeping.values())
        rows = [rows_of(op, positions, ahead) for op in mixers]
        self.rings = Rings(mixers, rows, positions, slots)
        pools = [blocks is not None and pooled(op, positions) for op in mixers]
        self.shareable = all(pools)
        """Whether all that a sequence leaves lies in blocks."""
        sizes = [
            bytes_of(config.at(at), op, held(op, positions, ahead, slots, blocks), q8) for at, op in net.keeping.items()
        ]
        self._workspace = Workspace(device, SPEC)
        self._table_blocks = -(-positions // BLOCK_POSITIONS)
        try:
            self._table = None if blocks is None else self._workspace.take(4 * slots * self._table_blocks, TABLE_SPEC)
            kept = {
                at: self._layer(op, size, each, pool)
                for (at, op), size, each, pool in zip(net.keeping.items(), sizes, rows, pools, strict=True)
            }
            self.layers = tuple(kept[net.kept_by(at)] for at in range(net.layers))
        except BaseException as error:
            self.close()
            if isinstance(error, MemoryError):
                size = sum(sizes) + slots * sum(map(state_bytes, mixers))
                many = f"{slots} x {positions}" if blocks is None else f"{blocks * BLOCK_POSITIONS}"
                raise OutOfMemory(
                    f"a cache of {many} positions needs {size / 2**20:,.0f} MiB, more than is free: "
                    "ask for a shorter context"
                ) from error
            raise
        for slot in range(slots if blocks else 0):
            self.put(slot, [0] * self._table_blocks)

    def put(self, slot: int, blocks: Sequence[int], first: int = 0) -> None:
        """Say which blocks a slot has, from its block `first` on. Not while a launch in flight reads these."""
        assert self._table is not None, "a cache without blocks"
        at = 4 * (slot * self._table_blocks + first)
        self._table.cpu_view()[at : at + 4 * len(blocks)] = np.asarray(blocks, np.int32).tobytes()

    def close(self) -> None:
        """Free the buffers. Closing twice is harmless."""
        self._workspace.close()

    def _layer(self, op: Mixer, size: int, rows: int, pool: bool) -> LayerCache:
        table, take = (self._table, self._table_blocks) if pool else (None, None), self._workspace.take
        if not isinstance(op, Attend):
            kept, size = take(size), self.slots * state_bytes(op)
            return LayerCache(kept, kept, kept, kept, rows, state=take(size) if size else None)
        elements = size // 2 * 16 // 17 if self.q8 else size // 4
        keys, values = (take(elements if self.q8 else 2 * elements) for _ in range(2))
        if not self.q8:
            return LayerCache(keys, values, keys, values, rows, *table)
        key_scales, value_scales = (take(elements // BLOCK * 2) for _ in range(2))
        return LayerCache(keys, values, key_scales, value_scales, rows, *table)
