"""A plan's buffers are given back together, the last first, each with the size and kind that it was taken with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tegrad.llm.state import STATE_SPEC
from tegrad.llm.workspace import ALIGN, SPEC, Workspace


@dataclass(eq=False)
class Buffer:
    """Memory of a device."""

    size: int
    spec: Any
    held: bytearray

    def offset(self, start: int, size: int) -> Buffer:
        assert 0 <= start <= start + size <= self.size
        return self


@dataclass
class Memory:
    """A device's memory, which keeps books."""

    freed: list[Any] = field(default_factory=list)

    def allocate(self, size: int, spec: Any) -> Buffer:
        return Buffer(size, spec, bytearray(size))

    def release(self, buffer: Buffer, spec: Any) -> None:
        assert buffer.spec == spec
        self.freed.append(buffer)

    def upload(self, buffer: Buffer, data: bytes) -> None:
        buffer.held[: len(data)] = data


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def workspace(memory: Memory) -> Workspace:
    return Workspace(memory)


def test_it_gives_back_all_that_it_took_the_last_first_and_once(workspace: Workspace, memory: Memory) -> None:
    other = Workspace(Memory())
    first = workspace.take(16)
    workspace.callback(lambda: memory.freed.append("between"))
    second, third = workspace.take(512, STATE_SPEC), workspace.put(b"held")
    other.take(1)
    assert memory.freed == []
    workspace.close()
    workspace.close()
    assert memory.freed == [third, second, "between", first]


def test_buffers_have_the_size_and_the_kind_that_was_asked_for(workspace: Workspace) -> None:
    small, large = workspace.take(1), workspace.take(1000, STATE_SPEC)
    assert (small.size, small.spec) == (ALIGN, SPEC)
    assert (large.size, large.spec) == (1000, STATE_SPEC)


def test_arrays_are_put_as_their_bytes_in_order(workspace: Workspace) -> None:
    turned = np.arange(6, dtype=np.uint8).reshape(2, 3).T
    assert bytes(workspace.put(turned).held[:6]) == bytes([0, 3, 1, 4, 2, 5])
    assert bytes(workspace.put(b"word").held[:4]) == b"word"
    assert workspace.put(b"").size == ALIGN
