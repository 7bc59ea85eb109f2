"""nvgpu's buddy allocator, block for block: where it puts an allocation is visible to clients as GPU addresses.

The range is cut greedily from its base into the largest power-of-two pieces; sizes and alignment are relative to the
base, not to address 0. A request is rounded up to a power of two and takes the head of the smallest order list that
has a piece, halving it as needed: the left half is used, the right half goes to the head of the lower list. A fixed
request is cut into aligned pieces. Freed pieces merge with their buddy and go to the head.
Source: nvgpu common/mm/allocators/buddy_allocator.c (nvgpu-driver.md 4.4).
"""

from __future__ import annotations

BLOCK_SHIFT = 12
BLOCK = 1 << BLOCK_SHIFT


def _zeros(number: int) -> int:
    """How many low bits of a positive number are zero."""
    return (number & -number).bit_length() - 1


class _Piece:
    """A power-of-two piece: free (in an order list), allocated, or split into two."""

    __slots__ = ("buddy", "order", "parent", "start", "state")

    def __init__(self, start: int, order: int, parent: _Piece | None) -> None:
        self.start, self.order, self.parent = start, order, parent
        self.buddy: _Piece | None = None
        self.state = "free"

    @property
    def end(self) -> int:
        return self.start + (BLOCK << self.order)


class BuddyAllocator:
    """Addresses in [start, end), in blocks of 4 KiB."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self._max_order = ((end - start) >> BLOCK_SHIFT).bit_length() - 1
        # A dict keeps insertion order and removes in O(1); its last key is the list's head.
        self._free: list[dict[_Piece, None]] = [{} for _ in range(self._max_order + 1)]
        self._allocated: dict[int, list[_Piece]] = {}
        base = start
        while base < end:
            piece = _Piece(base, self._largest_order(base, end), None)
            self._put(piece)
            base = piece.end

    def allocate(self, size: int) -> int | None:
        """The address of `size` bytes, naturally aligned relative to the base; None for 0 and when it is full."""
        if not size:
            return None
        order = ((size - 1) >> BLOCK_SHIFT).bit_length()
        for have in range(order, self._max_order + 1):
            if self._free[have]:
                piece = next(reversed(self._free[have]))
                break
        else:
            return None
        while piece.order != order:
            piece = self._split(piece)[0]
        self._take(piece)
        self._allocated[piece.start] = [piece]
        return piece.start

    def allocate_fixed(self, base: int, size: int) -> bool:
        """Take exactly [base, base + size); False when it is unaligned, empty, outside or not free."""
        if base % BLOCK or size <= 0 or size % BLOCK or base < self.start or base + size > self.end:
            return False
        if not self._is_free(base, base + size):
            return False
        at, left = base - self.start >> BLOCK_SHIFT, size >> BLOCK_SHIFT  # in blocks
        order = min(_zeros(at), _zeros(left)) if at else _zeros(left)
        pieces: list[_Piece] = []
        while left:
            piece = self._carve(self.start + (at << BLOCK_SHIFT), order)
            self._take(piece)
            pieces.append(piece)
            at, left = at + (1 << order), left - (1 << order)
            order = min(_zeros(at), left.bit_length() - 1)
        self._allocated[base] = pieces
        return True

    def free(self, address: int) -> None:
        """Give back what `allocate` or `allocate_fixed` returned at this address; unknown addresses are ignored.

        The pieces of a fixed allocation go back from the last to the first.
        """
        for piece in reversed(self._allocated.pop(address, [])):
            self._put(piece)
            self._coalesce(piece)

    def _largest_order(self, start: int, end: int) -> int:
        return min(((end - start) >> BLOCK_SHIFT).bit_length() - 1, self._max_order)

    def _put(self, piece: _Piece) -> None:
        piece.state = "free"
        self._free[piece.order][piece] = None

    def _take(self, piece: _Piece) -> None:
        del self._free[piece.order][piece]
        piece.state = "allocated"

    def _split(self, piece: _Piece) -> tuple[_Piece, _Piece]:
        del self._free[piece.order][piece]
        piece.state = "split"
        half = BLOCK << (piece.order - 1)
        left, right = _Piece(piece.start, piece.order - 1, piece), _Piece(piece.start + half, piece.order - 1, piece)
        left.buddy, right.buddy = right, left
        self._put(left)
        self._put(right)
        return left, right

    def _coalesce(self, piece: _Piece) -> None:
        while piece.buddy is not None and piece.buddy.state == "free":
            parent = piece.parent
            assert parent is not None
            del self._free[piece.order][piece], self._free[piece.order][piece.buddy]
            self._put(parent)
            piece = parent

    def _is_free(self, start: int, end: int) -> bool:
        return not any(
            piece.start < end and start < piece.end for pieces in self._allocated.values() for piece in pieces
        )

    def _carve(self, start: int, order: int) -> _Piece:
        """Split the free piece that holds the wanted one down to it."""
        piece = next(p for pieces in self._free for p in pieces if p.start <= start < p.end)
        while piece.start != start or piece.order > order:
            left, right = self._split(piece)
            piece = left if start < right.start else right
        return piece
