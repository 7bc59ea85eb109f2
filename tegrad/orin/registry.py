"""What clients have registered about their buffers: an opaque blob each, by buffer. CUDA registers every buffer."""

from __future__ import annotations

from dataclasses import dataclass

MOST_UNHELD_BUFFERS = 4096
"""Buffers whose metadata the board remembers while only fds of clients hold them."""


@dataclass(slots=True)
class Metadata:
    """What is registered for one buffer."""

    blob: bytes = b""
    flags: int = 0


class Registry:
    """Metadata by buffer: of those that somebody holds here, and of the last that nobody does."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[int, int], Metadata] = {}

    def find(self, key: tuple[int, int]) -> Metadata | None:
        """What is registered for a buffer."""
        return self._by_key.get(key)

    def put(self, key: tuple[int, int], metadata: Metadata) -> None:
        """Register; forgets the oldest where too many are kept."""
        self._by_key.pop(key, None)
        self._by_key[key] = metadata
        if len(self._by_key) > MOST_UNHELD_BUFFERS:
            del self._by_key[next(iter(self._by_key))]
