"""Pieces of a file to device memory, several on their way at once.

Where the CPU can write to device memory, threads read straight into it. Elsewhere they read into a ring of blocks of
host memory that the GPU sees, and its copy engine takes each block from there while the next ones are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Self

from tinygrad.device import BufferSpec
from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.llm.gguf import Gguf

PIECE: Final = 8 << 20
"""Bytes of one read: large enough for a disk's and a bus's full speed."""
READERS: Final = 4
"""Threads: one of them copies from the page cache at about 6 GB/s, less than a bus or a fast disk gives."""
BLOCKS: Final = 2 * READERS
"""Blocks of host memory: half are read into while the others are copied."""
HOST: Final = BufferSpec(host=True, nolru=True)


@dataclass(frozen=True, slots=True)
class Piece:
    """`size` bytes of the file from `offset` on, which belong at byte `at` of a buffer."""

    offset: int
    size: int
    buffer: HCQBuffer
    at: int


@dataclass(slots=True)
class _Block:
    """Host memory for one piece; free when the device's timeline has reached `copied`."""

    buffer: HCQBuffer
    copied: int = 0


class Stream:
    """The way of a file's pieces to a device. Use as a context manager; pieces are at most PIECE bytes."""

    def __init__(self, file: Gguf, device: Any) -> None:
        self._file, self._device = file, device
        self._undo = ExitStack()
        self._blocks: list[_Block] = []
        self._next = 0
        self._direct = hasattr(device.allocator, "_as_buffer")

    def __enter__(self) -> Self:
        with self._undo:
            self._pool = self._undo.enter_context(ThreadPoolExecutor(READERS, "tegrad-read"))
            if not self._direct:
                # Last in, first out: no block goes while a copy or a reader may use it.
                for _ in range(BLOCKS):
                    self._blocks.append(_Block(self._device.allocator.alloc(PIECE, HOST)))
                    self._undo.callback(self._device.allocator.free, self._blocks[-1].buffer, PIECE, HOST)
                self._undo.callback(self._device.synchronize)
            self._undo = self._undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def run(self, pieces: Iterable[Piece], arrived: Callable[[Piece], None]) -> None:
        """Move all pieces. `arrived` is called in their order, when what is launched next finds the piece in place."""
        flying: deque[tuple[Piece, _Block | None, Future[None]]] = deque()
        try:
            for piece in pieces:
                if len(flying) == READERS:
                    self._land(*flying.popleft(), arrived)
                block = self._free_block()
                flying.append((piece, block, self._pool.submit(self._read, piece, block)))
            while flying:
                self._land(*flying.popleft(), arrived)
        finally:
            for _, _, reading in flying:
                if not reading.cancel():
                    reading.exception()  # waits: its memory is about to go

    def _free_block(self) -> _Block | None:
        if self._direct:
            return None
        block = self._blocks[self._next]
        self._next = (self._next + 1) % len(self._blocks)
        self._device.timeline_signal.wait(block.copied)
        return block

    def _read(self, piece: Piece, block: _Block | None) -> None:
        """In a thread: the file's bytes into the block, or where they belong."""
        buffer, at = (piece.buffer, piece.at) if block is None else (block.buffer, 0)
        memory = buffer.cpu_view().view(at, piece.size, "B").mv
        self._file.read_into(piece.offset, memory, keep=block is not None)

    def _land(
        self, piece: Piece, block: _Block | None, reading: Future[None], arrived: Callable[[Piece], None]
    ) -> None:
        reading.result()
        if block is not None:
            self._copy(piece, block)
        arrived(piece)

    def _copy(self, piece: Piece, block: _Block) -> None:
        device = self._device
        with device.lock:
            device.check_usable()
            queue = device.hw_copy_queue_t().wait(device.timeline_signal, device.timeline_value - 1)
            queue.copy(piece.buffer.offset(piece.at), block.buffer, piece.size)
            block.copied = device.next_timeline()
            queue.signal(device.timeline_signal, block.copied).submit(device)
