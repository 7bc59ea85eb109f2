"""The buddy allocator against what it promises: no overlap, nothing lost, placement as the driver's."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tegrad.orin.buddy import BLOCK, BuddyAllocator

START, END = 0x200000, 0x200000 + 1000 * BLOCK


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "fix", "free"]), st.integers(1, 40), st.integers(0, 999))))
def test_pieces_never_overlap_and_all_come_back(steps: list[tuple[str, int, int]]) -> None:
    buddy = BuddyAllocator(START, END)
    fresh = [BuddyAllocator(START, END).allocate(size * BLOCK) for size in (512, 1)]
    held: dict[int, int] = {}
    for what, blocks, where in steps:
        size = blocks * BLOCK
        if what == "take":
            at = buddy.allocate(size)
            taken = 1 << (blocks - 1).bit_length()
        elif what == "fix":
            at = START + where * BLOCK
            free = all(at + size <= a or a + n <= at for a, n in held.items()) and at + size <= END
            assert buddy.allocate_fixed(at, size) == free
            at, taken = (at if free else None), blocks
        else:
            at = None
            if held:
                gone = sorted(held)[where % len(held)]
                buddy.free(gone)
                del held[gone]
        if at is not None:
            assert at >= START
            assert at + taken * BLOCK <= END
            assert all(at + taken * BLOCK <= a or a + n <= at for a, n in held.items())
            held[at] = taken * BLOCK
    for at in held:
        buddy.free(at)
    assert [buddy.allocate(512 * BLOCK), BuddyAllocator(START, END).allocate(BLOCK)] == fresh


def test_a_request_is_rounded_up_to_a_power_of_two() -> None:
    buddy = BuddyAllocator(0x200000, 0x200000 + 8 * BLOCK)
    assert buddy.allocate(3 * BLOCK) == 0x200000
    assert buddy.allocate(1 * BLOCK) == 0x200000 + 4 * BLOCK


def test_alignment_is_relative_to_the_base() -> None:
    base = 0x5000
    buddy = BuddyAllocator(base, base + 16 * BLOCK)
    buddy.allocate(BLOCK)
    assert buddy.allocate(4 * BLOCK) == base + 4 * BLOCK


def test_outside_and_unaligned_fixed_requests_fail() -> None:
    buddy = BuddyAllocator(START, END)
    for at, size in ((START - BLOCK, BLOCK), (END, BLOCK), (END - BLOCK, 2 * BLOCK), (START + 1, BLOCK), (START, 0)):
        assert not buddy.allocate_fixed(at, size)


def test_what_a_fixed_range_leaves_is_used_in_the_drivers_order() -> None:
    """The pieces of [1, 7) go back last to first, so that the first is the head of its list."""
    buddy = BuddyAllocator(START, START + 16 * BLOCK)
    kept = buddy.allocate(BLOCK)
    assert kept == START
    assert buddy.allocate_fixed(START + BLOCK, 6 * BLOCK)
    assert buddy.allocate(BLOCK) == START + 7 * BLOCK
    buddy.free(START + BLOCK)
    assert [buddy.allocate(BLOCK) for _ in range(3)] == [START + n * BLOCK for n in (1, 6, 2)]
