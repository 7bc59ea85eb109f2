"""What the driver tells the GPU of an address space, against a page table that is kept by hand."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from tegrad.orin.address_space import READ_ONLY, AddressSpace, Piece
from tegrad.orin.steps import Errno
from tegrad.uapi.constants import NVGPU_AS_MAP_BUFFER_FLAGS_FIXED_OFFSET as FIXED
from tegrad.uapi.constants import NVGPU_AS_MAP_BUFFER_FLAGS_UNMAPPED_PTE as UNMAPPED

PAGE = 4096
START, PAGES = 0x200000, 512
Pages = dict[int, tuple[object, ...]]
ZERO = ("zero",)


class PageTable:
    """A driver that keeps what it is told, page by page: (buffer, page of it, writable), or zeros."""

    def __init__(self) -> None:
        self.vms: dict[int, AddressSpace] = {}
        self.pages: Pages = {}

    def new_vm_id(self) -> int:
        return 1

    def tell_gpu(self, method: str, vm: int, va: int = 0, size: int = 0, *rest: Any, fd: Any = None) -> None:
        for i in range(size // PAGE):
            page = va // PAGE + i
            if method == "map":
                self.pages[page] = (fd, rest[0] // PAGE + i, rest[1])
            elif method == "sparse":
                self.pages[page] = ZERO
            else:
                assert method == "unmap"
                self.pages.pop(page, None)


class Buffer:
    """A buffer that counts who holds it; its fd is itself."""

    def __init__(self, number: int, pages: int) -> None:
        self.key, self.length, self.holders = (0, number), pages * PAGE, 0
        self.fd, self.allocated, self.read_only, self.label = number, True, False, ""

    def hold(self) -> Buffer:
        self.holders += 1
        return self

    def drop(self) -> None:
        self.holders -= 1
        assert self.holders >= 0


class World:
    """An address space, and what must be behind its pages."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.table = PageTable()
        self.vm = AddressSpace(self.table, START, START + PAGES * PAGE)  # type: ignore[arg-type]
        self.buffers = [Buffer(i, pages) for i, pages in enumerate((1, 1, 2, 3, 8))]
        self.expected: Pages = {}
        self.areas: list[tuple[int, int, bool]] = []  # first page, pages, sparse

    def step(self) -> None:
        name = self.draw.choice(("map", "fixed", "fixed", "unmap", "reserve", "free", "remap", "remap"))
        with contextlib.suppress(Errno):
            getattr(self, name)()
        assert self.table.pages == self.expected, name

    def put(self, first: int, pages: int, what: Any) -> None:
        for i in range(pages):
            self.expected[first + i] = what(i)

    def any_area(self) -> tuple[int, int, bool]:
        return self.draw.choice(self.areas) if self.areas else (0, 1, False)

    def map(self) -> None:
        buffer, flags = self.draw.choice(self.buffers), self.draw.choice((0, READ_ONLY))
        known = len(self.vm.mappings)
        va = self.vm.map(buffer, flags, 0)  # type: ignore[arg-type]
        assert va % PAGE == 0
        if len(self.vm.mappings) > known:
            there = range(va // PAGE, (va + buffer.length) // PAGE)
            assert all(self.expected.get(page, ZERO) == ZERO for page in there)  # zeros: a sparse area was freed
        self.put(va // PAGE, buffer.length // PAGE, lambda i: (buffer.fd, i, flags != READ_ONLY))

    def fixed(self) -> None:
        first, pages, _ = self.any_area()
        buffer, at = self.draw.choice(self.buffers), first + self.draw.randrange(-1, pages + 1)
        offset = self.draw.randrange(buffer.length // PAGE)
        count = self.draw.randrange(1, buffer.length // PAGE - offset + 1)
        again = at * PAGE in self.vm.mappings
        self.vm.map_fixed(buffer, FIXED, 0, at * PAGE, offset * PAGE, count * PAGE)  # type: ignore[arg-type]
        if not again:
            self.put(at, count, lambda i: (buffer.fd, offset + i, True))

    def unmap(self) -> None:
        if not self.vm.mappings:
            return
        mapping = self.vm.mappings[self.draw.choice(list(self.vm.mappings))]
        self.vm.unmap(mapping)
        if mapping.count == 0:
            self.clear(mapping.va // PAGE, mapping.size // PAGE)

    def clear(self, first: int, pages: int) -> None:
        """Nothing is mapped there any more: zeros in a sparse area."""
        sparse = any(at <= first < at + count and zeros for at, count, zeros in self.areas)
        for page in range(first, first + pages):
            self.expected.pop(page, None)
            if sparse:
                self.expected[page] = ZERO

    def reserve(self) -> None:
        pages, sparse = self.draw.randrange(1, 24), self.draw.random() < 0.6
        at = None if self.draw.random() < 0.5 else START + self.draw.randrange(PAGES) * PAGE
        first = self.vm.reserve(pages * PAGE, at, sparse=sparse) // PAGE
        self.areas.append((first, pages, sparse))
        if sparse:
            self.put(first, pages, lambda i: ZERO)

    def free(self) -> None:
        first, pages, sparse = area = self.any_area()
        self.vm.release((first + self.draw.randrange(pages)) * PAGE + 5)
        if area in self.areas:
            self.areas.remove(area)
        counted = {m.va // PAGE + i for m in self.vm.mappings.values() for i in range(m.size // PAGE)}
        for page in range(first, first + pages):
            if sparse:
                self.expected[page] = ZERO
            elif page not in counted and self.expected.get(page) != ZERO:
                self.expected.pop(page, None)

    def remap(self) -> None:
        first, pages, sparse = self.any_area()
        if not sparse:
            return
        area = self.vm.areas[first * PAGE]
        at = first + self.draw.randrange(pages)
        buffer = self.draw.choice(self.buffers)
        offset = self.draw.randrange(buffer.length // PAGE)
        count = min(self.draw.randrange(1, buffer.length // PAGE - offset + 1), first + pages - at)
        if self.draw.random() < 0.3:
            count = self.draw.randrange(1, first + pages - at + 1)
            self.vm.put_behind(area, None, at, count)
            self.put(at, count, lambda i: ZERO)
        else:
            self.vm.put_behind(area, Piece(at, count, buffer, offset, True), at, count)  # type: ignore[arg-type]
            self.put(at, count, lambda i: (buffer.fd, offset + i, True))


@pytest.mark.parametrize("seed", range(40))
def test_the_gpu_is_told_what_lies_behind_each_page(seed: int) -> None:
    world = World(seed)
    for _ in range(150):
        world.step()
    world.table.pages = {}
    world.vm.replay()  # a new GPU; of remaps and maps on top of each other it may see another one
    assert world.table.pages.keys() == world.expected.keys()
    world.vm.drop()
    assert [buffer.holders for buffer in world.buffers] == [0] * len(world.buffers)


@pytest.mark.parametrize("freed", [False, True])
def test_a_mapping_without_entries_replaces_the_zeros_of_a_sparse_area(freed: bool) -> None:
    """Also those that an area has left behind: a page that the GPU then reads is a fault."""
    world = World(1)
    first = world.vm.reserve(4 * PAGE, START, sparse=True) // PAGE
    if freed:
        world.vm.release(first * PAGE)
        world.vm.reserve(4 * PAGE, START, sparse=False)
    zeros: Pages = {first + i: ZERO for i in range(4)}
    assert world.table.pages == zeros
    flags, buffer = FIXED | UNMAPPED, world.buffers[2]
    world.vm.map_fixed(buffer, flags, 0, (first + 1) * PAGE, 0, 0)  # type: ignore[arg-type]
    assert world.table.pages == {page: zeros[page] for page in (first, first + 3)}


def test_pieces_of_a_remap_are_cut() -> None:
    world = World(1)
    first = world.vm.reserve(16 * PAGE, None, sparse=True) // PAGE
    area = world.vm.areas[first * PAGE]
    for at, count in ((0, 8), (2, 2), (3, 3), (0, 1)):
        made: Any = Piece(first + at, count, world.buffers[4], 0, True)  # type: ignore[arg-type]
        world.vm.put_behind(area, made, first + at, count)
    assert sorted((p.first - first, p.pages, p.offset) for p in area.pieces) == [
        (0, 1, 0),
        (1, 1, 1),
        (2, 1, 0),
        (3, 3, 0),
        (6, 2, 6),
    ]
