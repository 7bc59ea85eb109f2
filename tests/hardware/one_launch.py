"""The step in one launch on models of full size: as many launches compute it, at any depth, the same bits every time.

A board shows the step's arithmetic and its hand-overs. What only silicon has is the order of bulk copies and packets
between 132 SMs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tegrad.bench.models import provide
from tegrad.llm.cache import KvCache
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.reference import Reference
from tegrad.llm.state import State, States
from tegrad.nv.replay import Recording

PLACES = ((128, 0), (4096, 0), (4096, 2100), (4232, 4096), (16520, 16384))
"""Positions of the cache, which decide the form of attention, and the step's first."""
TOKENS = (1, 4711, 17)
TIMES = 100


@dataclass(frozen=True)
class Found:
    """How far the logits of the step in one launch are off, in their standard deviations."""

    place: str
    many: float
    """From those of many launches, root mean square."""
    exact: float | None
    """From those of the float reference."""
    same: int
    """Steps of TIMES that gave the bits of the first."""


def compare(device: Any, name: str) -> Iterator[Found]:
    """A model with random weights at every place, with caches of halves and of q8_0."""
    path = provide(name)
    exact = Reference(path).logits(TOKENS)
    with PackedModel.load(path, "NV") as model:
        states = States(device)
        for positions, depth in PLACES:
            for q8 in (False, True):
                with KvCache(device, model.config, positions, q8=q8) as cache:
                    fill(device, cache, depth)
                    many, _ = logits(device, DecodePlan(model, states, cache), states, positions, depth, 1)
                    one, same = logits(device, PersistentPlan(model, states, cache), states, positions, depth, TIMES)
                place = f"{name}, {depth} of {positions}, {'q8_0' if q8 else 'f16'}"
                yield Found(place, off(one, many), off(one, exact) if depth == 0 and not q8 else None, same)
        states.close()


def fill(device: Any, cache: KvCache, depth: int) -> None:
    """Random keys and values of each layer up to a depth, as they lie in the cache."""
    rng = np.random.default_rng(8)
    for layer in cache.layers if depth else ():
        for buffer in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            if buffer is None:
                continue
            count = 1 << 16
            if buffer in (layer.key_scales, layer.value_scales):
                some = rng.uniform(0.01, 0.02, count).astype(np.float16)
            elif cache.q8:
                some = rng.integers(-127, 128, count).astype(np.int8)
            else:
                some = rng.standard_normal(count).astype(np.float16)
            data = np.resize(some.view(np.uint8), buffer.size)
            device.allocator._copyin(buffer, memoryview(bytearray(data)))


def logits(
    device: Any, plan: Any, states: States, positions: int, depth: int, times: int
) -> tuple[NDArray[np.float32], int]:
    """Logits (tokens, vocab) of a step for each of TOKENS, and how often of `times` the last one gave the same bits."""
    with plan, Recording(device, plan.launches) as step:
        found = [run(device, plan, states, step, positions, depth, at) for at in range(len(TOKENS))]
        last = (run(device, plan, states, step, positions, depth, len(TOKENS) - 1) for _ in range(times))
        same = sum(np.array_equal(again, found[-1]) for again in last)
    return np.array(found), same


def run(
    device: Any, plan: Any, states: States, step: Recording, positions: int, depth: int, at: int
) -> NDArray[np.float32]:
    """The logits of the step of one of TOKENS."""
    states.write(0, State(position=depth + at, token=TOKENS[at], limit=positions, active=1))
    step.wait(step.run())
    out = bytearray(4 * plan.config.vocab)
    device.allocator._copyout(memoryview(out), plan.logits)
    return np.frombuffer(out, np.float32)


def off(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """The root mean square of the difference over the standard deviation."""
    return float(np.sqrt(((found - wanted) ** 2).mean()) / wanted.std())
