"""Small buffers as parts of large ones: where they lie, when slabs come and go, and what happens without memory."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.nv.queues import as_mapped
from tegrad.nv.slabs import PAGE, PART_BYTES, SLAB_BYTES, SPARES, Part, Slabs, whole

LARGE, SMALL = SLAB_BYTES


class Driver:
    """Gives memory at addresses that touch each other, up to `limit` bytes."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit, self._next = limit, 1 << 32
        self.held: dict[int, int] = {}
        self.slabs = Slabs(self.make, self.give_back)

    def make(self, size: int) -> HCQBuffer:
        if sum(self.held.values()) + size > self.limit:
            raise MemoryError("RM_ALLOC returned 81")
        address, self._next = self._next, self._next + size
        self.held[address] = size
        return HCQBuffer(address, size, meta="handle", owner="GPU")

    def give_back(self, buffer: HCQBuffer) -> None:
        assert self.held.pop(buffer.va_addr) == buffer.size

    def holds(self, part: Part) -> bool:
        return any(start <= part.va_addr and part.va_addr + part.size <= start + n for start, n in self.held.items())


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_a_part_is_whole_pages_of_a_slab(driver: Driver) -> None:
    parts = [driver.slabs.alloc(size) for size in (1, PAGE, PAGE + 1, PART_BYTES)]
    assert [part.size for part in parts] == [PAGE, PAGE, 2 * PAGE, PART_BYTES]
    assert all(part.va_addr % PAGE == 0 and driver.holds(part) for part in parts)
    assert list(driver.held.values()) == [LARGE]


def test_what_is_freed_last_is_used_first(driver: Driver) -> None:
    part = driver.slabs.alloc(PART_BYTES)
    assert driver.slabs.take_spare(PART_BYTES) is None
    driver.slabs.free(part)
    assert driver.slabs.take_spare(PART_BYTES - PAGE) is None
    assert driver.slabs.take_spare(PART_BYTES - 1) is part
    driver.slabs.free(part)
    assert driver.slabs.alloc(PART_BYTES) is part


def test_one_empty_slab_is_kept_until_it_is_asked_for(driver: Driver) -> None:
    parts = [driver.slabs.alloc(PART_BYTES) for _ in range(3 * LARGE // PART_BYTES)]
    assert len(driver.held) == 3
    for part in parts:
        driver.slabs.free(part)
    driver.slabs.free(driver.slabs.alloc(PAGE))
    assert len(driver.held) <= 2  # of which one has the spares
    driver.slabs.trim()
    assert driver.held == {}
    driver.slabs.trim()


def test_spares_of_many_sizes_hold_no_slab_for_good(driver: Driver) -> None:
    parts = [driver.slabs.alloc(pages * PAGE) for pages in range(1, SPARES + 2)]
    for part in parts[:-1]:
        driver.slabs.free(part)
    spares = [driver.slabs.take_spare(part.size) for part in parts]
    assert spares == [*parts[:-1], None]
    for part in parts:
        driver.slabs.free(part)
    assert [driver.slabs.take_spare(part.size) for part in parts] == [None] * len(parts)


def test_what_is_free_side_by_side_is_joined(driver: Driver) -> None:
    """Else a slab that held small buffers could never hold large ones."""
    parts = [driver.slabs.alloc(PAGE) for _ in range(LARGE // PAGE)]
    random.Random(1).shuffle(parts)
    for part in parts:
        driver.slabs.free(part)
    large = [driver.slabs.alloc(PART_BYTES) for _ in range(LARGE // PART_BYTES - 1)]
    assert len(driver.held) == 1
    assert all(driver.holds(part) for part in large)


def test_without_memory_for_a_large_slab_there_is_a_small_one() -> None:
    driver = Driver(limit=LARGE + SMALL)
    count = (LARGE + SMALL) // PART_BYTES
    parts = [driver.slabs.alloc(PART_BYTES) for _ in range(count)]
    assert sorted(driver.held.values()) == [SMALL, LARGE]
    with pytest.raises(MemoryError, match="RM_ALLOC"):
        driver.slabs.alloc(PAGE)
    driver.slabs.free(parts[0])
    assert driver.holds(driver.slabs.alloc(PART_BYTES))
    with pytest.raises(MemoryError):
        driver.slabs.alloc(PAGE)


def test_slabs_that_lie_side_by_side_stay_two(driver: Driver) -> None:
    """A part that reached from one into the other would lose its memory with the first that is given back."""
    parts = [driver.slabs.alloc(PART_BYTES) for _ in range(2 * LARGE // PART_BYTES)]
    for part in parts:
        driver.slabs.free(part)
    start = min(part.va_addr for part in parts)
    for _ in range(2 * LARGE // (PART_BYTES - PAGE) - 2):
        part = driver.slabs.alloc(PART_BYTES - PAGE)
        assert (part.va_addr - start) // LARGE == (part.va_addr + part.size - 1 - start) // LARGE


@pytest.mark.parametrize("seed", range(4))
def test_parts_never_overlap_and_all_slabs_go_in_the_end(seed: int) -> None:
    """Against a model that knows the pages in use."""
    driver, choice = Driver(limit=3 * LARGE), random.Random(seed)
    taken: set[int] = set()
    parts: list[Part] = []
    for _ in range(6000):
        if parts and choice.random() < (0.4 if len(parts) < 300 else 0.6):
            part = parts.pop(choice.randrange(len(parts)))
            taken.difference_update(pages(part))
            driver.slabs.free(part)
            continue
        size = choice.choice((choice.randint(1, PART_BYTES), choice.randint(1, 16) * PAGE))
        try:
            part = driver.slabs.alloc(size)
        except MemoryError:
            assert sum(driver.held.values()) + SMALL > driver.limit
            continue
        assert part.size == -(-size // PAGE) * PAGE
        assert driver.holds(part)
        assert taken.isdisjoint(pages(part))
        taken.update(pages(part))
        parts.append(part)
    for part in parts:
        driver.slabs.free(part)
    driver.slabs.trim()
    assert driver.held == {}


def pages(part: Part) -> Iterator[int]:
    return iter(range(part.va_addr // PAGE, (part.va_addr + part.size) // PAGE))


def test_what_python_frees_in_the_middle_of_a_change_waits(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer may run wherever Python allocates an object, in the thread that is at work here."""
    others = [driver.slabs.alloc(PAGE) for _ in range(4)]
    driver.slabs.free(others.pop())
    enter, seen = driver.slabs._enter, []

    def entering(*args: Any) -> None:
        assert driver.slabs.busy
        if others:
            driver.slabs.free(others.pop())
            seen.append(list(driver.slabs._freed))
        enter(*args)

    monkeypatch.setattr(driver.slabs, "_enter", entering)
    part = driver.slabs.alloc(2 * PAGE)
    assert len(seen[0]) == 1
    assert not driver.slabs._freed
    monkeypatch.undo()
    for other in [part, *others]:
        driver.slabs.free(other)
    driver.slabs.trim()
    assert driver.held == {}


def test_an_error_of_giving_back_loses_no_more_than_that_slab(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    part = driver.slabs.alloc(PAGE)
    driver.slabs.free(part)
    with monkeypatch.context() as patch:
        patch.setattr(driver.slabs, "_give_back", lambda buffer: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.slabs.trim()
    part = driver.slabs.alloc(PAGE)
    driver.slabs.free(part)
    driver.slabs.trim()
    assert list(driver.held.values()) == [LARGE]  # the one that was lost


# ---- parts and other devices


class Device:
    def __init__(self, name: str) -> None:
        self.device = name


def test_a_part_is_its_own_base_and_mapped_with_its_slab(driver: Driver) -> None:
    first, second = driver.slabs.alloc(PAGE), driver.slabs.alloc(PAGE)
    view = second.offset(64, 128)
    slab = whole(first)
    assert whole(view) is whole(second) is slab
    assert (slab.size, first.base, view.base, second.meta) == (LARGE, first, second, "handle")
    other = Device("NV:1")
    view.mappings[other] = slab
    view.mapped_devs.append(other)
    assert first.mappings == {other: slab}
    assert first.mapped_devs == ["GPU", other]
    alone = HCQBuffer(0, 4096)
    assert whole(alone.offset(8)) is alone


def test_a_gpus_memory_is_mapped_for_another_where_its_own_sees_it() -> None:
    own, other = Device("NV"), Device("NV:1")
    slab = HCQBuffer(1 << 32, LARGE, owner=own)
    slabs = Slabs(lambda size: slab, lambda buffer: None)
    slabs.alloc(PAGE)
    part = slabs.alloc(PAGE)
    part.mappings[other] = HCQBuffer(slab.va_addr, slab.size, owner=own)
    view = part.offset(64)
    assert as_mapped(part) is part
    assert as_mapped(view) is view


def test_a_slab_that_is_not_taken_back_keeps_no_other_from_it(driver: Driver) -> None:
    """The slabs after it were lost until the device was closed."""
    parts = [driver.slabs.alloc(PART_BYTES) for _ in range(3 * LARGE // PART_BYTES)]
    held, refused, give_back = dict(driver.held), [], driver.give_back

    def once(buffer: HCQBuffer) -> None:
        if not refused:
            refused.append(buffer)
            raise RuntimeError("RM_FREE returned 1")
        give_back(buffer)

    driver.slabs._give_back = once
    driver.slabs.busy = True  # as if Python freed them in the middle of a change
    for part in parts:
        driver.slabs.free(part)
    driver.slabs.busy = False
    with pytest.raises(RuntimeError, match="RM_FREE"):
        driver.slabs.trim()
    assert len(held) == 3
    assert list(driver.held) == [refused[0].va_addr]


def test_an_allocation_gives_no_slab_back_which_could_be_refused(driver: Driver) -> None:
    """Its own part would be lost with the error of another's end."""
    parts = [driver.slabs.alloc(PART_BYTES) for _ in range(3 * LARGE // PART_BYTES)]
    driver.slabs.busy = True
    for part in parts[: -LARGE // PART_BYTES]:
        driver.slabs.free(part)
    driver.slabs.busy = False
    driver.slabs._give_back = lambda buffer: pytest.fail("gave a slab back")
    driver.slabs._retire()
    assert driver.holds(driver.slabs.alloc(PAGE))
