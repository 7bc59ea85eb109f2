"""Figures for Prometheus, with llama-server's names behind `tegrad:` where it has the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from tegrad import machine
from tegrad.llm.footprint import machine_room
from tegrad.llm.service import Counts
from tegrad.serve.catalogue import Catalogue, Place
from tegrad.serve.remote import FIRST_TOKEN, Remote
from tegrad.serve.replicas import Replicated
from tegrad.serve.wire import EngineError

MEDIA: Final = "text/plain; version=0.0.4; charset=utf-8"
WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Upper ends of the buckets of sequences in a step."""


async def text(models: Catalogue) -> bytes:
    """All figures, in Prometheus' text format."""
    rows, labels = [], ["model"] if models.home is None else ["model", "replica"]
    for place in models.places:
        for name, remote in (place.here.replicas if place.here is not None else {}).items():
            with suppress(EngineError):  # it has just ended
                rows.append(Row([place.about.name, name][: len(labels)], remote, await remote.counts()))
    registry = CollectorRegistry()
    found = [*of_engines(rows, labels), *of_places(models.places), *FIRST_TOKEN.collect(), *of_machine(machine.ROOT)]
    registry.register(_Found(found))
    return generate_latest(registry)


@dataclass(frozen=True, slots=True)
class Row:
    """An engine, the values of its labels, and what it counts."""

    labels: Sequence[str]
    remote: Remote
    counts: Counts


class _Found(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


Sample: TypeAlias = tuple[Sequence[str], float]
"""The values of its labels, and its own."""


def family(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, labels: Sequence[str],
    samples: Iterable[Sample],
) -> Metric:  # fmt: skip
    """A figure of one name."""
    made = kind(f"tegrad:{name}", text, labels=labels)
    for values, value in samples:
        made.add_metric(values, value)
    return made


_counter, _gauge = partial(family, CounterMetricFamily), partial(family, GaugeMetricFamily)

ENGINES: Final[Mapping[str, tuple[partial[Metric], str, Callable[[Row], int]]]] = {
    "prompt_tokens": (_counter, "Tokens of prompts that were answered", lambda row: row.counts.prompt_tokens),
    "cached_tokens": (
        _counter, "Those of prompts' tokens that were found in the cache", lambda row: row.counts.cached_tokens
    ),
    "tokens_predicted": (_counter, "Tokens that were generated", lambda row: row.counts.completion_tokens),
    "n_decode": (_counter, "Steps that gave tokens", lambda row: row.counts.widths.total()),
    "device_reopened": (
        _counter, "Times that the device failed and was opened again", lambda row: row.counts.reopened
    ),
    "requests_processing": (_gauge, "Requests that have a slot", lambda row: row.counts.running),
    "requests_deferred": (_gauge, "Requests that wait for one", lambda row: row.counts.waiting),
    "requests_refused": (_counter, "Requests that found the queue full", lambda row: row.remote.refused),
    "model_bytes": (_gauge, "Memory that a loaded model is counted with", lambda row: row.remote.plan.bytes),
    "slots": (_gauge, "Sequences that may decode together", lambda row: row.remote.plan.slots),
}  # fmt: skip
"""What an engine counts, and what the server knows of it."""


def of_engines(rows: Sequence[Row], names: Sequence[str]) -> Iterator[Metric]:
    """Of each engine, with the names of its labels."""
    for name, (kind, text, of) in ENGINES.items():
        yield kind(name, text, names, [(row.labels, of(row)) for row in rows])
    widths = HistogramMetricFamily("tegrad:step_sequences", "Sequences that a step gave a token", labels=names)
    for row in rows:
        steps = row.counts.widths
        below = [(str(end), sum(count for width, count in steps.items() if width <= end)) for end in WIDTHS]
        total = sum(width * count for width, count in steps.items())
        widths.add_metric(row.labels, [*below, ("+Inf", steps.total())], total)
    yield widths
    ended = [([*row.labels, reason], count) for row in rows for reason, count in row.counts.ended.items()]
    yield _counter("requests", "Requests that ended, by how", [*names, "reason"], ended)


def of_places(places: Sequence[Place]) -> Iterator[Metric]:
    """Of each model that was asked for."""
    failures = [([place.about.name], place.failures) for place in places]
    yield _counter("load_failures", "Times that a model could not be loaded", ["model"], failures)
    shared = [([place.about.name], place.here) for place in places if isinstance(place.here, Replicated)]
    replicas = [(name, len(model.replicas)) for name, model in shared]
    yield _gauge("replicas", "Replicas that can be asked", ["model"], replicas)
    retried = [(name, model.retried) for name, model in shared]
    yield _counter("requests_retried", "Times that another replica took over", ["model"], retried)


def of_machine(root: Path) -> Iterator[Metric]:
    """What the system tells of memory, temperatures, clocks and throttling; a Jetson tells all of it."""
    yield _gauge("memory_room_bytes", "Memory of the system that is left for models", (), [((), machine_room())])
    heat = [([zone], degrees) for zone, degrees in machine.temperatures(root)]
    yield _gauge("temperature_celsius", "Of a thermal zone", ["zone"], heat)
    cooling = [([device], state) for device, state in machine.cooling(root)]
    yield _gauge("cooling_state", "Of a cooling device; above 0 it throttles", ["device"], cooling)
    clocks = [
        ([gpu.name, which], hertz)
        for gpu in machine.gpu_clocks(root) for which, hertz in (("now", gpu.now), ("most", gpu.most)) if hertz
    ]  # fmt: skip
    yield _gauge("gpu_clock_hertz", "Of the GPU, now and at most", ["gpu", "which"], clocks)
    events = [([alarm], count) for alarm, count in machine.over_currents(root).items()]
    yield _counter("over_currents", "Times that the power supply's limit throttled", ["alarm"], events)
