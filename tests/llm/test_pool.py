"""Blocks for sequences, without a device: who has which, what is found again, and what never happens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tegrad.llm.cache import BLOCK_POSITIONS as B
from tegrad.llm.errors import NoRoom
from tegrad.llm.pool import Lease, Pool


def prompt(*blocks: int, more: int = 0) -> list[int]:
    """Whole blocks of a token each, and some positions of another."""
    return [block for block in blocks for _ in range(B)] + [99] * more


def run(pool: Pool, positions: int, tokens: list[int]) -> Lease:
    """A sequence whose prompt has been submitted."""
    lease = pool.take(positions, tokens)
    pool.fill(lease, len(tokens))
    return lease


def test_a_prompts_whole_blocks_are_found_by_who_begins_alike() -> None:
    pool = Pool(12)
    first = run(pool, 4 * B, prompt(1, 2, 3, more=5))
    assert pool.take(4 * B, prompt(1, 2, 3, more=60)).filled == 3 * B
    other = pool.take(4 * B, prompt(1, 2, 4))
    assert (other.blocks[:2], other.filled) == (first.blocks[:2], 2 * B)
    assert pool.take(B, prompt(2)).filled == 0  # the same tokens after others are something else


def test_what_was_not_submitted_is_not_found() -> None:
    pool = Pool(9)
    first = pool.take(3 * B, prompt(1, 2, 3))
    pool.fill(first, 2 * B - 1)
    assert pool.take(3 * B, prompt(1, 2, 3)).filled == B


def test_a_sequence_that_waits_finds_what_another_has_filled_meanwhile() -> None:
    pool = Pool(8)
    first, second = pool.take(4 * B, prompt(1, 2, 3)), pool.take(4 * B, prompt(1, 2, 4))
    assert pool.free == 0
    pool.fill(first, 3 * B)
    assert (pool.find(second), second.filled) == (2, 2 * B)
    assert second.blocks[:2] == first.blocks[:2]
    assert pool.free == 2
    pool.fill(second, 2 * B + 7)
    assert pool.find(second) == 0  # in the middle of a block that is its own


def test_of_what_nobody_has_the_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    pool = Pool(4)
    old = run(pool, 2 * B, prompt(1, 2))
    new = run(pool, 2 * B, prompt(3, 4))
    for lease in (old, new, new):
        pool.give(lease)
    assert pool.free == 4
    pool.give(pool.take(B, prompt(1)))  # used again
    pool.take(2 * B)
    assert {pool.take(B, prompt(1)).filled, pool.take(B, prompt(3)).filled} == {B}
    with pytest.raises(NoRoom, match="1 blocks of 64 positions are needed, 0 are free"):
        pool.take(1)


def test_a_sequence_that_is_refused_takes_nothing() -> None:
    pool = Pool(3)
    pool.give(run(pool, 2 * B, prompt(1, 2)))
    with pytest.raises(NoRoom):
        pool.take(4 * B, prompt(1, 2))
    assert pool.free == 3
    assert pool.take(3 * B, prompt(1, 2)).filled == 2 * B


class Sequences(RuleBasedStateMachine):
    """A pool in any order of use, beside what each block was filled with by whom."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.count = Pool(7), 7
        self.held: dict[int, tuple[Lease, list[int]]] = {}
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(
        target=leases,
        blocks=st.lists(st.integers(0, 1), max_size=4),
        more=st.integers(0, B - 1),
        answer=st.integers(0, 2 * B),
    )
    def take(self, blocks: list[int], more: int, answer: int) -> Lease:
        tokens = prompt(*blocks, more=more)
        free = self.pool.free
        try:
            lease = self.pool.take(len(tokens) + answer + 1, tokens)
        except NoRoom:
            assert self.pool.free == free
            return Lease([], [])
        self.held[id(lease)] = lease, tokens
        self.same(lease)
        return lease

    @rule(lease=leases, count=st.integers(1, 3 * B))
    def fill(self, lease: Lease, count: int) -> None:
        if id(lease) not in self.held:
            return
        _, tokens = self.held[id(lease)]
        self.pool.find(lease)
        self.same(lease)
        end = min(len(tokens), lease.filled + count)
        for at in range(lease.filled // B, -(-end // B)):
            block = lease.blocks[at]
            users = [other for other, _ in self.held.values() if block in other.blocks]
            assert users == [lease], "what is written is somebody else's too"
            self.content[block] = tuple(tokens[: (at + 1) * B])
        self.pool.fill(lease, end)

    @rule(lease=consumes(leases))
    def give(self, lease: Lease) -> None:
        self.held.pop(id(lease), None)
        self.pool.give(lease)
        self.pool.give(lease)

    def same(self, lease: Lease) -> None:
        """What counts as filled is what the prompt says, after what the prompt says."""
        _, tokens = self.held[id(lease)]
        for at in range(lease.filled // B):
            assert self.content[lease.blocks[at]] == tuple(tokens[: (at + 1) * B])

    @invariant()
    def nothing_is_lost_or_had_twice(self) -> None:
        held = {block for lease, _ in self.held.values() for block in lease.blocks}
        assert self.pool.free == self.count - len(held)
        for lease, tokens in self.held.values():
            assert len(set(lease.blocks)) == len(lease.blocks) >= -(-(len(tokens) + 1) // B)


Sequences.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestSequences = Sequences.TestCase


def test_keys_tell_tokens_that_differ_anywhere_before() -> None:
    pool = Pool(40)
    tokens = np.random.default_rng(1).integers(0, 1 << 17, 4 * B).tolist()
    run(pool, 4 * B, tokens)
    for at in (0, B - 1, B, 4 * B - 1):
        changed = [*tokens]
        changed[at] ^= 1
        assert pool.take(4 * B, changed).filled == at // B * B
