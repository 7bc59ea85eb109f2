"""Small buffers as parts of large ones, for a GPU whose driver takes long to allocate, whatever the size."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.nv import compat

PART_BYTES = 1 << 20
"""The largest buffer that is carved out of a slab."""
SLAB_BYTES: Sequence[int] = (32 << 20, 2 << 20)
"""What a slab takes, and what it takes when there is no memory for that: it must hold the largest part."""
PAGE = 4096
"""Parts begin and end at multiples of it, as buffers of their own do."""

SPARES = 8
"""Of how many sizes the part that was freed last is left as it is, for the next one of its size."""

_PAGE_BITS = PAGE.bit_length() - 1
_LARGE = (PART_BYTES >> _PAGE_BITS) + 1
"""The bin of free ranges that hold more than any part."""


class Slab:
    """A buffer that parts are carved out of, and which of its bytes are free."""

    __slots__ = ("buffer", "ends", "starts", "used")

    def __init__(self, buffer: HCQBuffer) -> None:
        start, size = int(buffer.va_addr), int(buffer.size)
        self.buffer = buffer
        self.used = 0
        """How many parts are in use."""
        self.starts = {start: size}
        """The free ranges: size by start. No two of them touch."""
        self.ends = {start + size: start}
        """Their starts by their ends."""


class Part(HCQBuffer):  # type: ignore[misc]
    """A buffer that lies in a slab. Its own base; mapped for other devices, and unmapped, with its slab as a whole."""

    def __init__(self, address: int, size: int, slab: Slab) -> None:
        buffer = slab.buffer  # tinygrad's constructor takes twice as long, and makes a list and a dict to be dropped
        self.va_addr, self.size, self.meta, self.view = address, size, buffer.meta, None
        self.owner, self.slab = buffer.owner, slab
        compat.share_mappings(self, buffer)


def whole(buffer: HCQBuffer) -> HCQBuffer:
    """What the driver knows a buffer as: the slab's buffer for a part or a view of one, else the buffer's base."""
    base: HCQBuffer = buffer.base
    return base.slab.buffer if isinstance(base, Part) else base


class Slabs:
    """Parts of slabs, made and given back as needed; one that is empty is kept. For one thread at a time.

    The best fit among the free ranges, which are joined as they come free: in bins by their number of pages, all that
    hold any part in the last one, so that no search depends on how many there are. Whoever frees a part sees to it
    that the GPU is done with it.

    `make` allocates a slab of a size in bytes (MemoryError, RuntimeError), `give_back` frees it. Python may free
    buffers that nothing refers to any more in the middle of a change here: these wait until it is done.
    """

    def __init__(self, make: Callable[[int], HCQBuffer], give_back: Callable[[HCQBuffer], None]) -> None:
        self._make, self._give_back = make, give_back
        self._bins: list[dict[int, Slab]] = [{} for _ in range(_LARGE + 1)]
        self._filled = 0
        """Which bins hold something, a bit each."""
        self._empty: list[Slab] = []
        self._freed: list[Part] = []
        self._spares: dict[int, Part] = {}
        """Parts by their pages that were freed, and that no range takes in yet: joining takes longer than the rest."""
        self.busy = False
        """Whether a change is under way, so that `alloc` cannot be called."""

    def alloc(self, size: int) -> Part:
        """A part of at least `size` bytes, at most PART_BYTES. MemoryError or RuntimeError of a slab's allocation."""
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
        """A part for `size` bytes that was freed and is ready to be used again; None where there is none."""
        return self._spares.pop((size + PAGE - 1) >> _PAGE_BITS, None)

    def free(self, part: Part) -> None:
        """Take a part back. What giving an empty slab back raises."""
        if self._spares.setdefault(part.size >> _PAGE_BITS, part) is not part:
            self._freed.append(part)
        elif len(self._spares) > SPARES:
            self._retire()
        else:
            return
        if not self.busy:
            self._settle()

    def trim(self) -> None:
        """Give back all that no part lies in."""
        self._retire()
        self._settle(keep=0)

    def _retire(self) -> None:
        """Leave no spare."""
        while self._spares:
            self._freed.append(self._spares.popitem()[1])

    def _grow(self) -> Slab:
        """A new slab, a small one if there is no memory for a large one."""
        *larger, smallest = SLAB_BYTES
        for size in larger:
            with suppress(MemoryError, RuntimeError):
                return Slab(self._make(size))
        return Slab(self._make(smallest))

    def _take(self, pages: int) -> Part:
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
        """Put back the parts that were freed, then give back the slabs that are empty, but for the last `keep`."""
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
        """Make a part's bytes free, joined with what is free beside them."""
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
        """Take nothing more from a slab that is empty."""
        self._leave(int(slab.buffer.va_addr), int(slab.buffer.size))
        return slab

    def _enter(self, start: int, length: int, slab: Slab) -> None:
        index = min(length >> _PAGE_BITS, _LARGE)
        self._bins[index][start] = slab
        self._filled |= 1 << index

    def _leave(self, start: int, length: int) -> None:
        index = min(length >> _PAGE_BITS, _LARGE)
        ranges = self._bins[index]
        del ranges[start]
        if not ranges:
            self._filled &= ~(1 << index)
