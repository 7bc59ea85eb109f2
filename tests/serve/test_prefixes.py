"""Which replica a prompt goes to: one that knows its beginning, within bounds."""

from __future__ import annotations

import numpy as np

from tegrad.llm.cache import BLOCK_POSITIONS
from tegrad.serve.prefixes import Prefixes

FREE = {"a": 0, "b": 0, "c": 0}


def prompt(seed: int, blocks: float) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, int(blocks * BLOCK_POSITIONS)).tolist()


def test_a_replica_that_met_the_longest_beginning_is_the_first() -> None:
    prefixes, long = Prefixes(), prompt(0, 4)
    prefixes.met(long[: 2 * BLOCK_POSITIONS], "b")
    prefixes.met(long[: 3 * BLOCK_POSITIONS], "c")
    assert prefixes.order(long, FREE, 1) == ["c", "b", "a"]
    assert prefixes.order([*long[: 2 * BLOCK_POSITIONS], *prompt(1, 2)], FREE, 1)[0] in "bc"
    assert prefixes.order(prompt(1, 4), {"a": 1, "b": 0, "c": 2}, 2) == ["b", "a", "c"]


def test_a_block_counts_only_behind_all_of_its_beginning_and_when_it_is_whole() -> None:
    prefixes, long = Prefixes(), prompt(0, 3)
    prefixes.met(long, "c")
    assert prefixes.order([*prompt(1, 1), *long[BLOCK_POSITIONS:]], FREE, 1) == ["a", "b", "c"]
    prefixes.met(prompt(2, 0.9), "b")
    assert prefixes.order(prompt(2, 0.9), FREE, 1) == ["a", "b", "c"]


def test_a_favourite_gets_no_more_than_the_margin() -> None:
    prefixes, same, loads = Prefixes(), prompt(0, 2), dict(FREE)
    for _ in range(30):
        name = prefixes.order(same, loads, 3)[0]
        prefixes.met(same, name)
        loads[name] += 1
        assert max(loads.values()) - min(loads.values()) <= 4
    assert sum(loads.values()) == 30
    assert prefixes.order(same, {"a": 9, "b": 4, "c": 5}, 3) == ["b", "c", "a"]


def test_what_is_old_or_was_a_lost_replicas_is_forgotten() -> None:
    prefixes = Prefixes(kept=4)
    old, new = prompt(0, 3), prompt(1, 3)
    prefixes.met(old, "c")
    assert prefixes.order(old, FREE, 1)[0] == "c"
    prefixes.met(new, "b")
    assert prefixes.order(old, FREE, 1)[0] == "a"
    assert prefixes.order(new, FREE, 1)[0] == "b"
    prefixes.forget("b")
    assert prefixes.order(new, FREE, 1)[0] == "a"
