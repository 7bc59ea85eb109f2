"""Pieces of a file to device memory, several on their way at once.

Where the CPU can write to device memory, threads read straight into it. Elsewhere they read into a ring of blocks of
host memory that the GPU sees, as many neighbouring pieces at once as fit, and its copy engine takes each block's from
there while the next ones are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from tegrad.llm.gguf import Gguf
from tegrad.nv import roles
from tegrad.nv.gpu import Buffer, Gpu
from tegrad.nv.spec import MemorySpec

PIECE_BYTES: Final = 4 << 20
"""Bytes of one read: large enough for a disk's and a bus's full speed, and small since a block of host memory takes
0.35 ms a MiB to make."""
READERS: Final = 4
"""Threads: one of them copies from the page cache at about 7 GB/s, less than a bus or a fast disk gives."""
HOST_BLOCKS: Final = 2 * READERS
"""Blocks of host memory: half are read into while the others are copied."""
HOST: Final = MemorySpec(host=True, nolru=True, role=roles.STAGING)


@dataclass(frozen=True, slots=True)
class Piece:
    """`size` bytes of the file from `offset` on, which belong at byte `at` of a buffer; or rows of `row` bytes, which
    take `pitch` there, filled up with zeros."""

    offset: int
    size: int
    buffer: Buffer
    at: int
    row: int = 1
    pitch: int = 1

    @property
    def taken(self) -> int:
        """Bytes in the buffer."""
        return self.size // self.row * self.pitch


@dataclass(slots=True)
class _Block:
    """Host memory for one piece; free when the device's timeline has reached `copied`."""

    buffer: Buffer
    copied: int = 0


class Stream:
    """The way of a file's pieces to a device. Use as a context manager; pieces take at most PIECE_BYTES."""

    def __init__(self, file: Gguf, device: Gpu) -> None:
        self._file, self._device = file, device
        self._undo = ExitStack()
        self._blocks: list[_Block] = []
        self._next = 0
        self._direct = device.lends
        self._lent: dict[int, memoryview] = {}
        """The bytes of buffers that the CPU writes to, by `id`."""

    def __enter__(self) -> Self:
        # Last in, first out: no block goes while a copy or a reader may use it.
        self._undo.callback(self._free)
        self._pool = self._undo.enter_context(ThreadPoolExecutor(READERS, "tegrad-read"))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def run(self, pieces: Iterable[Piece], arrived: Callable[[Piece], None]) -> None:
        """Move all pieces. `arrived` is called in their order, when what is launched next finds the piece in place.

        Only what is launched there may touch their buffers, each when all of its own pieces have arrived.
        """
        pieces = list(pieces)
        if self._direct:  # all at once: what `arrived` launches is not to be waited for
            buffers = {id(piece.buffer): piece.buffer for piece in pieces}
            self._lent = dict(zip(buffers, self._device.lend(buffers.values()), strict=True))
        flying: deque[tuple[list[Piece], _Block | None, Future[None]]] = deque()
        try:
            for group in self._groups(pieces):
                if len(flying) == READERS:
                    self._land(*flying.popleft(), arrived)
                block = self._free_block()
                flying.append((group, block, self._pool.submit(self._read, group, block)))
            while flying:
                self._land(*flying.popleft(), arrived)
        finally:
            for _, _, reading in flying:
                if not reading.cancel():
                    reading.exception()  # waits: its memory is about to go

    def _groups(self, pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
        """Pieces that one read brings: single ones, or with blocks those whose part of the file a block holds."""
        group: list[Piece] = []
        for piece in pieces:
            if group and (
                self._direct
                or not group[0].offset <= piece.offset <= group[0].offset + PIECE_BYTES - piece.size
                or piece.pitch > piece.row
                or group[0].pitch > group[0].row
            ):
                yield group
                group = []
            group.append(piece)
        if group:
            yield group

    def _free_block(self) -> _Block | None:
        """The block that was used longest ago, or a new one: the first ones are read into while others are made."""
        if self._direct:
            return None
        if len(self._blocks) < HOST_BLOCKS:
            self._blocks.append(_Block(self._device.allocate(PIECE_BYTES, HOST)))
            return self._blocks[-1]
        block = self._blocks[self._next]
        self._next = (self._next + 1) % len(self._blocks)
        self._device.wait_for(block.copied)
        return block

    def _free(self) -> None:
        if self._blocks:
            self._device.synchronize()
        for block in self._blocks:
            self._device.release(block.buffer, HOST)

    def _read(self, group: list[Piece], block: _Block | None) -> None:
        """In a thread: the file's bytes into the block, or where they belong."""
        first, end = group[0], max(piece.offset + piece.size for piece in group)
        whole, at = (self._lent[id(first.buffer)], first.at) if block is None else (block.buffer.cpu_view().mv, 0)
        if first.pitch == first.row:
            self._file.read_into(first.offset, whole[at : at + end - first.offset], keep=block is not None)
            return
        raw = bytearray(first.size)
        self._file.read_into(first.offset, memoryview(raw), keep=block is not None)
        rows = np.frombuffer(whole[at : at + first.taken], np.uint8).reshape(-1, first.pitch)
        rows[:, : first.row], rows[:, first.row :] = np.frombuffer(raw, np.uint8).reshape(-1, first.row), 0

    def _land(
        self, group: list[Piece], block: _Block | None, reading: Future[None], arrived: Callable[[Piece], None]
    ) -> None:
        reading.result()
        if block is not None:
            self._copy(group, block)
        for piece in group:
            arrived(piece)

    def _copy(self, group: list[Piece], block: _Block) -> None:
        first = group[0].offset
        block.copied = self._device.copy_parts(
            (piece.buffer.offset(piece.at), block.buffer.offset(piece.offset - first), piece.taken) for piece in group
        )
