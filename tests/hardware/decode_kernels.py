"""Attention and sampling against their references on a device of any kind: cases of test_h200."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
import sampling_reference as reference
from attention_rig import PUBLISHED, Bench
from operands import Operands
from sampling_rig import NARROW, VOCAB, WIDE, Rig, random_logits

from tegrad.llm.sampling import Logprobs, Settings


class Anywhere(Operands):
    """Operands in memory of any allocator: what lies beyond their pages may be mapped."""

    def _lonely(self, size: int, cpu_access: bool) -> Any:
        return self._alloc(size, cpu_access)


def attention(device: Any, name: str, repeats: int = 20) -> None:
    """A published model's attention at depths of one part and of all, many times: parts come in another order each."""
    at, operands = PUBLISHED[name], Anywhere(device)
    try:
        bench = Bench(at, at.load(device), operands)
        for position in (0, 1, 100, at.positions // 2, *[at.positions - 1] * repeats):
            bench.run([position])
        operands.check()
    finally:
        operands.free()


def sampling(device: Any, steps: int = 20) -> None:
    """All filters together, and the largest vocabulary with and without equal logits."""
    operands = Anywhere(device)
    settings = [*NARROW, *WIDE] * 2
    wide = [Settings(1.0, top_k=128), Settings(1.0, top_p=0.9), Settings(0.5)]
    try:
        for chosen, vocab, rounds in ((settings, VOCAB, False), (wide, 151_936, False), (wide, 151_936, True)):
            rig = Rig(operands, chosen, random_logits(len(chosen), vocab))
            try:
                for slot in range(len(chosen)):
                    rig.begin(slot, seed=slot)
                for step in range(steps):
                    logits = random_logits(len(chosen), vocab, step)
                    logits = logits.round() if rounds else logits
                    rig.step(logits)
                    expected = [reference.draw(logits[s], chosen[s], s, step) for s in range(len(chosen))]
                    assert rig.tokens() == expected, (vocab, rounds, step)
            finally:
                rig.close()
        operands.check()
    finally:
        operands.free()


def served(device: Any, steps: int = 20, vocab: int = 151_936) -> int:
    """Sequences with biases, log-probabilities and masks, which come while the step runs: how many steps masks missed.

    Each token is the reference's, after as many steps as it takes.
    """
    rng, operands = np.random.default_rng(2), Anywhere(device)
    biases = tuple((int(token), float(rng.normal(0, 4))) for token in rng.choice(vocab, 300, replace=False))
    kinds = [Settings(), Settings(repeat=1.2), NARROW[1], WIDE[0], WIDE[4]]
    settings = [replace(one, masked=at % 2 == 0, biases=biases, logprobs=20) for at, one in enumerate(kinds * 2)]
    rig, missed = Rig(operands, settings, random_logits(len(settings), vocab)), 0
    texts = [[0] for _ in settings]
    try:
        for slot in range(len(settings)):
            rig.begin(slot, seed=slot)
        for step in range(1, steps + 1):
            logits = random_logits(len(settings), vocab, step)
            allowed = [rng.random(vocab) < 0.01 if one.masked else None for one in settings]
            late = threading.Timer(0.0005 * (step % 4), _give, (rig, step, allowed))
            late.start()
            rig.step(logits)
            while min(rig.states.read(slot).written for slot in range(len(settings))) < step:
                missed += 1
                for slot, one in enumerate(settings):  # those that have their token wait for the others here
                    if not one.masked and rig.states.read(slot).written == step:
                        rig.states.write(slot, _paused(rig.states.read(slot), True))
                rig.step()
            late.join()
            for slot, one in enumerate(settings):
                rig.states.write(slot, _paused(rig.states.read(slot), False))
                row = reference.adjusted(logits[slot], one, texts[slot], allowed[slot])
                texts[slot].append(reference.draw(row, one, slot, step - 1))
                found = rig.sampling.logprobs(slot, step)
                expected = Logprobs.of(logits[slot], texts[slot][-1], 20)
                assert abs(found.taken - expected.taken) < 1e-4, (slot, step)
                assert [token for token, _ in found.likeliest] == [token for token, _ in expected.likeliest]
            assert rig.tokens() == [text[-1] for text in texts], step
        operands.check()
    finally:
        rig.close()
        operands.free()
    return missed


def _give(rig: Rig, number: int, allowed: Sequence[Any]) -> None:
    for slot, mask in enumerate(allowed):
        if mask is not None:
            rig.mask(slot, number, mask)


def _paused(state: Any, paused: bool) -> Any:
    state.active = int(not paused)
    return state
