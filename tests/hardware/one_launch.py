"""Decode steps on models of full size at any depth: in one launch, in many, and exactly; what lies between, and why.

A board shows a step's arithmetic and its hand-overs. What only silicon has is the order of bulk copies and packets
between 132 SMs. So a model with random weights decodes three tokens after random keys and values, at several depths,
with caches of halves and of q8_0, by either plan on the device and in float64 on the host (tests/llm/exact.py):

- `measured`: how far the logits are from each other and from exact ones;
- `modelled`: how far they would be if the device did nothing but round activations to int8, as either plan does, and
  all else were exact; `shares`, which products' inputs it comes from;
- `stages` (stages.py): each vector that crosses between stages, against what the device itself had before it; of
  models with norms after blocks, or with layer norms, only in one launch.

Root mean squares over the standard deviation of the exact logits.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import stages
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from exact import ROLES, Cached, Parts, Weights, by_sets, by_units, chain, not_at_all, only, together

from tegrad.llm.cache import AHEAD, KvCache, LayerCache
from tegrad.llm.config import Config
from tegrad.llm.gguf import Gguf
from tegrad.llm.network import Attend, Convolve, Convolving, Delta
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.rings import rows_of
from tegrad.llm.state import State, States
from tegrad.nv.replay import Recording

TOKENS = (1, 4711, 17)
TIMES = 100
"""Repetitions of a step that have to give the same bits."""


@dataclass(frozen=True)
class Place:
    """Positions of the cache, which decide the form of attention; the first token's; and the kind of cache."""

    positions: int
    depth: int
    q8: bool
    stepped: bool = False
    """Also stage by stage."""
    shared: bool = False
    """Also with the input of each product rounded alone."""

    @property
    def stored(self) -> Any:
        """The kind as the reference names it."""
        return "Q8_0" if self.q8 else "F16"

    def __str__(self) -> str:
        return f"{self.depth} of {self.positions}, {self.stored.lower()}"


PLACES = tuple(
    Place(positions, depth, q8, stepped=depth in (2100, 16384), shared=depth == 2100)
    for positions, depth in ((128, 0), (4096, 0), (4096, 2100), (4232, 4096), (16520, 16384))
    for q8 in (False, True)
)


class Filling:
    """Random keys and values of each layer that has a cache of its own, as a device's holds them and as the reference
    reads them."""

    COUNT = 1 << 16
    """Elements, again and again."""

    def __init__(self, config: Config, q8: bool) -> None:
        rng = np.random.default_rng(8)
        self._config, self._q8 = config, q8
        normed = config.arch.score_scale is not None  # keys' norms are in the place of what scores are multiplied by
        self._layers = {}
        for at, op in config.network.keeping.items():
            if isinstance(op, Convolve):
                sides, scales = [rng.standard_normal(self.COUNT).astype(np.float32)], []
            elif isinstance(op, Delta):
                sides = [by * rng.standard_normal(self.COUNT).astype(np.float32) for by in (1, np.float32(0.1))]
                scales = []
            elif q8:
                sides = [rng.integers(-127, 128, self.COUNT).astype(np.int8) for _ in range(2)]
                scales = [rng.uniform(0.01, 0.02, self.COUNT).astype(np.float16) for _ in range(2)]
            else:
                sides = [rng.standard_normal(self.COUNT).astype(np.float16) for _ in range(2)]
                scales = []
            if normed and isinstance(op, Attend):
                keys = scales if q8 else sides
                keys[0] = keys[0] * np.float16(config.at(at).head_dim ** -0.25)
            self._layers[at] = sides, scales

    def store(self, device: Any, cache: KvCache) -> None:
        """Fill a cache, beyond the depth too, and look whether the last layers have what the reference reads."""
        for at, (sides, scales) in self._layers.items():
            layer = cache.layers[at]
            second = layer.values if layer.state is None else layer.state
            buffers = (layer.keys, second, layer.key_scales, layer.value_scales)
            for buffer, some in zip(buffers, (*sides, *scales), strict=False):
                data = np.resize(some.view(np.uint8), buffer.size)
                device.allocator._copyin(buffer, memoryview(bytearray(data)))
        attends = [at for at, op in self._config.network.keeping.items() if isinstance(op, Attend)]
        lasts = {(self.heads(at), self._config.at(at).head_dim): at for at in attends}
        for at in lasts.values():
            self._check(device, at, cache.layers[at])

    def _check(self, device: Any, at: int, layer: LayerCache) -> None:
        length = layer.rows * self.heads(at) * self._config.at(at).head_dim  # a buffer may be longer
        for side, (buffer, scale) in enumerate(((layer.keys, layer.key_scales), (layer.values, layer.value_scales))):
            wanted = [self.head(at, side, head, layer.rows) for head in range(self.heads(at))]
            if self._q8:
                found = stages.get(device, buffer, length, np.int8).astype(np.float64)
                found *= np.repeat(stages.get(device, scale, length // 16, np.float16).astype(np.float64), 32)
            else:
                found = stages.get(device, buffer, 2 * length, np.float16).astype(np.float64)
            assert np.array_equal(found, np.concatenate(wanted).reshape(-1)), "the cache holds something else"

    def cached(self, positions: int, depth: int) -> Cached:
        """The first `depth` positions of a cache of `positions`; what a ring has lost is what took its place."""
        mixers = self._config.network.mixers

        def layer(at: int) -> tuple[Any, Any]:
            rows = rows_of(mixers[at], positions, AHEAD)
            op = mixers[at]
            if isinstance(op, Convolving):
                kept = self._laid(self._layers[at][0][0], 0, rows, self._config.convolved(op))
                states = self.states(at, depth) if isinstance(op, Delta) and depth else ()
                return [kept[np.arange(depth) % rows]], states
            return _Side(self, at, 0, rows, depth), _Side(self, at, 1, rows, depth)

        return layer

    def heads(self, layer: int) -> int:
        """A layer's heads of keys."""
        return self._config.at(layer).kv_heads

    def head(self, layer: int, side: int, head: int, positions: int) -> NDArray[Any]:
        """A head's rows of keys (side 0) or values (positions, width)."""
        sides, scales = self._layers[layer]
        width = self._config.at(layer).head_dim
        made = self._laid(sides[side], head, positions, width)
        if not self._q8:
            return made
        scale = self._laid(scales[side], head, positions, width // 32)
        return made * np.repeat(scale.astype(np.float64), 32, axis=1)

    def states(self, layer: int, position: int) -> NDArray[Any]:
        """A delta net's matrices (heads, keys, values) before a position: there are two, by whether that is odd."""
        op = self._config.network.mixers[layer]
        assert isinstance(op, Delta)
        both: NDArray[Any] = np.resize(self._layers[layer][0][1], (2, op.heads, op.width, op.width))
        return both[position % 2]

    @staticmethod
    def _laid(some: NDArray[Any], head: int, positions: int, width: int) -> NDArray[Any]:
        size = positions * width
        return np.resize(np.roll(some, -(head * size % len(some))), size).reshape(positions, width)


@dataclass(frozen=True)
class _Side(Sequence[NDArray[Any]]):
    """A layer's keys (side 0) or values, a head at a time: all of them would be gigabytes."""

    filling: Filling
    layer: int
    side: int
    rows: int
    depth: int

    def __len__(self) -> int:
        return self.filling.heads(self.layer)

    def __getitem__(self, head: Any) -> Any:
        if head >= len(self):
            raise IndexError(head)
        rows = self.filling.head(self.layer, self.side, head, self.rows)
        return rows[: self.depth] if self.depth <= self.rows else rows[np.arange(self.depth) % self.rows]


def fillings(config: Config) -> dict[bool, Filling]:
    """Of both kinds of cache, by whether it is packed."""
    whole = all(config.at(at).head_dim % 32 == 0 for at in range(config.layers))
    return {q8: Filling(config, q8) for q8 in (False, True) if not q8 or whole}


class Steps:
    """A model on a device, and its steps by either plan."""

    def __init__(self, device: Any, model: PackedModel, tokens: Sequence[int], times: int, one: Any) -> None:
        self.device, self.model, self.config, self.tokens, self.times = device, model, model.config, tokens, times
        self._one, self._fillings = one, fillings(model.config)
        self.states = States(device)
        self.ctas = 0

    def at(self, place: Place) -> "Taken":
        """Both plans' steps at a place."""
        stepped: dict[str, stages.Step] = {}
        with KvCache(self.device, self.config, place.positions, q8=place.q8) as cache:

            def fill() -> None:
                if place.depth:
                    self._fillings[place.q8].store(self.device, cache)

            def begin_anew() -> None:
                if self.config.network.runs_along:  # what was before the first token is gone
                    fill()

            fill()
            with DecodePlan(self.model, self.states, cache) as plan:
                many, _ = self._logits(plan, place, 1)
                # CTAs join for themselves after norms of blocks, and a layer norm is a launch.
                if place.stepped and not self.config.network.sets_apart:
                    begin_anew()
                    stepped["many"] = stages.many(self, plan, place)
            begin_anew()
            with self._one(self.model, self.states, cache) as plan:
                self.ctas = plan.kernel.program.ctas
                one, same = self._logits(plan, place, self.times)
                if place.stepped:
                    begin_anew()
                    stepped["one"] = stages.one(self, plan, place)
        return Taken(place, one, many, same, stepped)

    def _logits(self, plan: Any, place: Place, times: int) -> tuple[NDArray[np.float32], int]:
        """Logits (tokens, vocab) of a step for each token, and how often of `times` the last gave the same bits."""
        last = len(self.tokens) - 1
        with Recording(self.device, plan.launches) as step:
            found = [self._run(plan, step, place, at) for at in range(len(self.tokens))]
            again = (self._run(plan, step, place, last) for _ in range(times))
            same = sum(np.array_equal(one, found[-1]) for one in again)
        return np.array(found), same

    def _run(self, plan: Any, step: Recording, place: Place, at: int) -> NDArray[np.float32]:
        self.begin(place, at)
        step.wait(step.run())
        return stages.get(self.device, plan.logits, 4 * self.config.vocab, np.float32)

    def begin(self, place: Place, at: int = 0) -> None:
        """The state before the step of a token."""
        state = State(position=place.depth + at, token=self.tokens[at], limit=place.positions, active=1)
        self.states.write(0, state)


@dataclass(frozen=True)
class Taken:
    """What the device computed at a place."""

    place: Place
    one: NDArray[np.float32]
    many: NDArray[np.float32]
    same: int
    """Steps in one launch, of TIMES, that gave the bits of the first."""
    stepped: Mapping[str, stages.Step]
    """By plan, where the place is `stepped`."""


@dataclass(frozen=True)
class Distances:
    """Root mean squares of differences of logits, in standard deviations of the exact ones."""

    one_exact: float
    many_exact: float
    one_many: float

    @classmethod
    def of(cls, one: NDArray[Any], many: NDArray[Any], exact: NDArray[Any]) -> "Distances":
        return cls(off(one, exact, exact), off(many, exact, exact), off(one, many, exact))


@dataclass(frozen=True)
class Found:
    """What came out at a place."""

    place: Place
    measured: Distances
    modelled: Distances
    same: int
    shares: Mapping[str, Mapping[str, float]]
    """By plan and role of the product whose input is rounded alone."""
    stages: Mapping[str, Mapping[str, Sequence[stages.Off]]]
    """By plan and vector, each layer's."""


@dataclass(frozen=True)
class Model:
    """What roundings alone would make at a place."""

    place: Place
    distances: Distances
    shares: Mapping[str, Mapping[str, float]]
    exact: NDArray[Any]


class Host:
    """The steps of some tokens in float64, exact and with what either plan rounds; in one launch on so many CTAs."""

    def __init__(self, weights: Weights, tokens: Sequence[int], ctas: int) -> None:
        self._parts = cache(partial(Parts, weights))  # by positions of a cache: rope may depend on them
        self._tokens, self._fillings = tokens, fillings(weights.config)
        plans = {"one": by_units(weights.config, ctas), "many": by_sets}
        self._few = [not_at_all, *plans.values()]
        self._alone = {plan: [only(rounding, role) for role in ROLES] for plan, rounding in plans.items()}

    def cached(self, place: Place) -> Cached:
        """Keys and values before the tokens."""
        return self._fillings[place.q8].cached(place.positions, place.depth)

    def way(self, place: Place) -> Any:
        """Logits of everything that `model` needs."""
        more = [rounding for alone in self._alone.values() for rounding in alone] if place.shared else []
        cached = self.cached(place)
        return chain(self._parts(place.positions), self._tokens, [*self._few, *more], cached, place.depth, place.stored)

    def follow(self, place: Place, step: stages.Step) -> Any:
        """How far each stage of a device's step was off."""
        return stages.follow(self._parts(place.positions), step, self._tokens[0], self.cached(place), place)

    def model(self, place: Place, logits: NDArray[Any]) -> Model:
        """What came of `way`."""
        exact, one, many, *rest = logits
        alone = iter(rest)
        shares = {plan: {role: off(next(alone), exact, exact) for role in ROLES} for plan in self._alone if rest}
        return Model(place, Distances.of(one, many, exact), shares, exact)


def compare(
    device: Any, path: Path, places: Sequence[Place] = PLACES, tokens: Sequence[int] = TOKENS, times: int = TIMES,
    one: Callable[..., Any] = PersistentPlan, threads: int = 16,
) -> list[Found]:  # fmt: skip
    """A model at every place. `one` plans the step in one launch."""
    with ExitStack() as undo:
        model = undo.enter_context(PackedModel.load(path, device.device))
        steps = Steps(device, model, tokens, times, one)
        undo.callback(steps.states.close)
        taken = [steps.at(place) for place in places]
    with Gguf.open(path) as file, Weights(file, threads) as weights:
        host = Host(weights, tokens, steps.ctas)
        ways = []
        for each in taken:
            ways += [host.way(each.place), *(host.follow(each.place, step) for step in each.stepped.values())]
        came = iter(together(weights, ways))  # one pass over the weights for everything
        return [_found(each, host, came) for each in taken]


def _found(taken: Taken, host: Host, came: Iterator[Any]) -> Found:
    modelled = host.model(taken.place, next(came))
    measured = Distances.of(taken.one, taken.many, modelled.exact)
    followed = {plan: next(came) for plan in taken.stepped}
    return Found(taken.place, measured, modelled.distances, taken.same, modelled.shares, followed)


def modelled(
    path: Path, ctas: int, places: Sequence[Place] = PLACES, tokens: Sequence[int] = TOKENS, threads: int = 16
) -> list[Model]:
    """What roundings alone would make of a model's logits at every place: no device is needed."""
    with Gguf.open(path) as file, Weights(file, threads) as weights:
        host = Host(weights, tokens, ctas)
        came = together(weights, [host.way(place) for place in places])
        return [host.model(place, logits) for place, logits in zip(places, came, strict=True)]


def off(found: NDArray[Any], wanted: NDArray[Any], exact: NDArray[Any]) -> float:
    """The root mean square of a difference over a standard deviation."""
    return float(np.sqrt(((found - wanted) ** 2).mean()) / exact.std())
