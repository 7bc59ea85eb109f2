"""Rings hand out memory that no earlier, unfinished submission uses, or say that they cannot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tegrad.nv.rings import Ring, RingError


class Gpu:
    """Finishes submissions only when they are waited for."""

    def __init__(self) -> None:
        self.live: dict[int, list[tuple[int, int]]] = {}
        self.waits = 0

    def wait(self, number: int) -> None:
        self.waits += 1
        for done in [n for n in self.live if n <= number]:
            del self.live[done]


@given(
    st.integers(64, 300).map(lambda n: n * 16),
    st.lists(st.tuples(st.integers(1, 1000), st.sampled_from([1, 8, 16]), st.booleans()), max_size=200),
)
def test_memory_in_flight_is_never_handed_out(size: int, requests: list[tuple[int, int, bool]]) -> None:
    gpu = Gpu()
    ring: Ring[int] = Ring(size, 0x10000, gpu.wait, "memory")
    number, open_parts = 0, []
    for nbytes, alignment, submit in requests:
        try:
            start = ring.alloc(nbytes, alignment)
        except RingError:
            assert open_parts  # only what is not submitted yet is in the way: submitting it makes room
            number += 1
            gpu.live[number] = open_parts
            ring.submitted(number)
            open_parts = []
            start = ring.alloc(nbytes, alignment)
        assert start % alignment == 0
        assert 0x10000 <= start <= 0x10000 + size - nbytes
        taken = [part for parts in gpu.live.values() for part in parts] + open_parts
        assert all(start + nbytes <= begin or end <= start for begin, end in taken)
        open_parts.append((start, start + nbytes))
        if submit:
            number += 1
            gpu.live[number] = open_parts
            ring.submitted(number)
            open_parts = []


def test_a_ring_waits_only_when_it_comes_round() -> None:
    gpu = Gpu()
    ring: Ring[int] = Ring(1024, 0, gpu.wait, "memory")
    for number in range(4):
        ring.alloc(256)
        ring.submitted(number)
    assert gpu.waits == 0
    assert ring.alloc(256) == 0
    assert gpu.waits == 1


def test_a_request_larger_than_the_ring_is_refused() -> None:
    ring: Ring[int] = Ring(1024, 0, lambda tag: None, "kernel arguments")
    with pytest.raises(RingError, match="kernel arguments"):
        ring.alloc(1025)
    assert ring.alloc(1024) == 0


def test_a_recording_larger_than_the_ring_is_refused() -> None:
    ring: Ring[int] = Ring(1024, 0, lambda tag: None, "kernel arguments")
    for _ in range(4):
        ring.alloc(256)
    with pytest.raises(RingError, match="not submitted"):
        ring.alloc(256)
    ring.submitted(1)
    assert ring.alloc(256) == 0


def test_any_request_that_fits_an_idle_ring_is_served() -> None:
    ring: Ring[int] = Ring(1000, 0, lambda tag: None, "memory")
    ring.alloc(900)
    ring.submitted(1)
    assert ring.alloc(950) == 0
