"""Small buffers as parts of large ones (slabs): the driver of a GPU with its own memory takes long for every
allocation, however small."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.nv import compat

PART_BYTES = 1 << 20
"""The largest buffer that is carved out of a slab."""
SLAB_BYTES: Sequence[int] = (32 << 20, 2 << 20)
"""Bytes of a slab, and of a smaller one for when there is no memory for that; each must hold the largest part."""
PAGE = 4096
"""Parts begin and end at multiples of this many bytes, as separate buffers do."""

SPARES = 8
"""How many freed parts, each of another size, are kept as they are for the next allocation of that size."""

_PAGE_BITS = PAGE.bit_length() - 1
_LARGE = (PART_BYTES >> _PAGE_BITS) + 1
"""The bin of free ranges that hold more than any part."""


class Slab:
    """A buffer that parts are carved out of, and its free ranges, by GPU address and in bytes."""

    __slots__ = ("buffer", "ends", "starts", "used")

    def __init__(self, buffer: HCQBuffer) -> None:
        start, size = int(buffer.va_addr), int(buffer.size)
        self.buffer = buffer
        self.used = 0
        """How many parts are in use."""
        self.starts = {start: size}
        """The size of each free range by its start. No two of them touch."""
        self.ends = {start + size: start}
        """The start of each free range by its end."""


class Part(HCQBuffer):  # type: ignore[misc]
    """A buffer that lies in a slab. To tinygrad it is a buffer of its own, no view; other devices map and unmap the
    whole slab."""

    def __init__(self, address: int, size: int, slab: Slab) -> None:
        buffer = slab.buffer  # tinygrad's constructor takes twice as long, and makes a list and a dict to be dropped
        self.va_addr, self.size, self.meta, self.view = address, size, buffer.meta, None
        self.owner, self.slab = buffer.owner, slab
        compat.share_mappings(self, buffer)


def whole(buffer: HCQBuffer) -> HCQBuffer:
    """The buffer that the driver allocated: the slab's for a part or a view of one, else the buffer's base."""
    base: HCQBuffer = buffer.base
    return base.slab.buffer if isinstance(base, Part) else base


class Slabs:
    """An allocator of parts, which makes slabs and gives them back as needed; one empty slab is kept. Not thread-safe.

    `alloc` takes the best fit among the free ranges, and neighbouring ranges are joined as they come free. Ranges are
    in bins by their number of pages (the last bin has all that hold any part), so that no search depends on how many
    there are. Whoever frees a part sees to it that the GPU is done with it.

    `make` allocates a slab of a size in bytes (MemoryError, RuntimeError), `give_back` frees it. Python's garbage
    collector may free buffers in the middle of a change here: these wait until it is done.
    """

    def __init__(self, make: Callable[[int], HCQBuffer], give_back: Callable[[HCQBuffer], None]) -> None:
        self._make, self._give_back = make, give_back
        self._bins: list[dict[int, Slab]] = [{} for _ in range(_LARGE + 1)]
        self._filled = 0
        """A bit for each bin that is not empty."""
        self._empty: list[Slab] = []
        self._freed: list[Part] = []
        self._spares: dict[int, Part] = {}
        """Freed parts by their number of pages, not yet joined with the free ranges, which takes longest."""
        self.busy = False
        """Whether a change is under way. `alloc` must not be called then; a finalizer may call `free`."""

    def alloc(self, size: int) -> Part:
        """A part of `size` bytes (at most PART_BYTES), rounded up to pages. MemoryError or RuntimeError from `make`."""
        spare = self.take_spare(size)
        if spare is not None:
            return spare
        pages = (size + PAGE - 1) >> _PAGE_BITS
        grown = None if self._filled >> pages else self._grow()
        self.busy = True
        try:
            if grown is not None:
                self._empty.append(grown)
                self._enter(int(grown.buffer.va_addr), int(grown.buffer.size), grown)
            return self._take(pages)
        finally:
            self.busy = False
            if self._freed:
                self._settle(keep=len(self._empty) + len(self._freed))  # gives none back, so that nothing is refused

    def take_spare(self, size: int) -> Part | None:
        """A freed part of `size` bytes, rounded up to pages, that can be used as it is; None if there is none."""
        return self._spares.pop((size + PAGE - 1) >> _PAGE_BITS, None)

    def free(self, part: Part) -> None:
        """Take a part back; raises what `give_back` of an empty slab raises."""
        if self._spares.setdefault(part.size >> _PAGE_BITS, part) is not part:
            self._freed.append(part)
        elif len(self._spares) > SPARES:
            self._retire()
        else:
            return
        if not self.busy:
            self._settle()

    def trim(self) -> None:
        """Give back all slabs in which no part is in use; raises what `give_back` raises."""
        self._retire()
        self._settle(keep=0)

    def _retire(self) -> None:
        """Have all spare parts put back into the free ranges at the next `_settle`."""
        while self._spares:
            self._freed.append(self._spares.popitem()[1])

    def _grow(self) -> Slab:
        """A new slab, a small one if there is no memory for a large one. MemoryError, RuntimeError."""
        *larger, smallest = SLAB_BYTES
        for size in larger:
            with suppress(MemoryError, RuntimeError):
                return Slab(self._make(size))
        return Slab(self._make(smallest))

    def _take(self, pages: int) -> Part:
        """Carve a part out of the shortest free range that holds it."""
        fits = self._filled >> pages
        assert fits, "a slab was made where no range is long enough"
        index = pages + (fits & -fits).bit_length() - 1
        ranges = self._bins[index]
        start, slab = ranges.popitem()
        if not ranges:
            self._filled &= ~(1 << index)
        length, size = slab.starts.pop(start), pages << _PAGE_BITS
        if length > size:
            rest = start + size
            slab.starts[rest], slab.ends[start + length] = length - size, rest
            self._enter(rest, length - size, slab)
        else:
            del slab.ends[start + length]
        if not slab.used:
            self._empty.remove(slab)
        slab.used += 1
        return Part(start, size, slab)

    def _settle(self, keep: int = 1) -> None:
        """Put freed parts back into the free ranges, then give back the empty slabs except for `keep` of them."""
        surplus: list[Slab] = []
        self.busy = True
        try:
            while self._freed:
                slab = self._put(self._freed.pop())
                if not slab.used:
                    self._empty.append(slab)
            while len(self._empty) > keep:
                surplus.append(self._withdraw(self._empty.pop(0)))
        finally:
            self.busy = False
        failed: Exception | None = None
        for slab in surplus:  # all of them, whichever is refused
            try:
                self._give_back(slab.buffer)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _put(self, part: Part) -> Slab:
        """Make a part's bytes a free range, joined with the free ranges on both sides; its slab."""
        slab: Slab = part.slab
        start, end = part.va_addr, part.va_addr + part.size
        starts, ends = slab.starts, slab.ends
        before, after = ends.pop(start, None), starts.pop(end, None)
        if before is not None:
            self._leave(before, starts[before])
            start = before
        if after is not None:
            self._leave(end, after)
            end += after
        starts[start], ends[end] = end - start, start
        self._enter(start, end - start, slab)
        slab.used -= 1
        return slab

    def _withdraw(self, slab: Slab) -> Slab:
        """Take an empty slab's range out of its bin, so that no part is carved out of it; the slab."""
        self._leave(int(slab.buffer.va_addr), int(slab.buffer.size))
        return slab

    def _enter(self, start: int, length: int, slab: Slab) -> None:
        """Put a free range into its bin."""
        index = min(length >> _PAGE_BITS, _LARGE)
        self._bins[index][start] = slab
        self._filled |= 1 << index

    def _leave(self, start: int, length: int) -> None:
        """Take a free range out of its bin."""
        index = min(length >> _PAGE_BITS, _LARGE)
        ranges = self._bins[index]
        del ranges[start]
        if not ranges:
            self._filled &= ~(1 << index)
