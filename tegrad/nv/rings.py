"""Rings of memory that the GPU reads: kernel arguments and commands. They wait before they reuse.

Memory handed out belongs to the next submission; that submission tags it, and before the ring comes round to it again
it waits for the tag. What is handed out but not yet submitted is never reused: a recording larger than the ring is an
error, as is a single request larger than the ring.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from tegrad.errors import TegradError

Tag = TypeVar("Tag")


class RingError(TegradError, RuntimeError):
    """A request that the ring can never serve."""


class Ring(Generic[Tag]):
    """A bump allocator over `size` bytes from `base` that starts over at the end, after waiting.

    `wait(tag)` returns when the submission that carries the tag is done with its memory. Positions count up for ever;
    the place in memory is the position modulo `size`.
    """

    def __init__(self, size: int, base: int, wait: Callable[[Tag], object], name: str) -> None:
        self.size = size
        self.base = base
        self._wait = wait
        self._name = name
        self._head = 0
        self._tail = 0
        self._tagged = 0
        self._in_flight: deque[tuple[int, Tag]] = deque()

    @property
    def turns(self) -> int:
        """How often it has started over."""
        return self._head // self.size

    def alloc(self, size: int, alignment: int = 1) -> int:
        """Address of `size` free bytes, waiting for earlier submissions if need be. RingError if they cannot be had."""
        if size > self.size:
            raise RingError(f"{size} bytes of {self._name} were asked for, but the ring holds {self.size}")
        start = -(-self._head // alignment) * alignment
        if start % self.size + size > self.size:
            start = -(-start // self.size) * self.size
        while start + size - self._tail > self.size:
            self._retire(start)
        self._head = start + size
        return self.base + start % self.size

    def submitted(self, tag: Tag) -> None:
        """Everything handed out since the last call went out with the submission that `tag` names."""
        if self._head != self._tagged:
            self._in_flight.append((self._head, tag))
            self._tagged = self._head

    def _retire(self, start: int) -> None:
        """Free the oldest memory: wait for its submission."""
        if self._in_flight:
            end, tag = self._in_flight[0]
            self._wait(tag)
            self._in_flight.popleft()
            self._tail = end
        elif self._tagged == self._head:
            self._tail = start
        else:
            raise RingError(
                f"more than {self.size} bytes of {self._name} are recorded and not submitted: submit in smaller parts"
            )
