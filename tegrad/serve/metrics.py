"""Figures for Prometheus, with llama-server's names behind `tegrad:` where it has the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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


_Figure: TypeAlias = tuple[str, Callable[[Counts], int]]
COUNTERS: Final[Mapping[str, _Figure]] = {
    "prompt_tokens": ("Tokens of prompts that were answered", lambda counts: counts.prompt_tokens),
    "cached_tokens": ("Those of prompts' tokens that were found in the cache", lambda counts: counts.cached_tokens),
    "tokens_predicted": ("Tokens that were generated", lambda counts: counts.completion_tokens),
    "n_decode": ("Steps that gave tokens", lambda counts: counts.widths.total()),
    "device_reopened": ("Times that the device failed and was opened again", lambda counts: counts.reopened),
}
GAUGES: Final[Mapping[str, _Figure]] = {
    "requests_processing": ("Requests that have a slot", lambda counts: counts.running),
    "requests_deferred": ("Requests that wait for one", lambda counts: counts.waiting),
}


def of_engines(rows: Sequence[Row], names: Sequence[str]) -> Iterator[Metric]:
    """Of each engine: what it counts, and what the server knows of it."""
    for name, (help_text, of) in COUNTERS.items():
        counter = CounterMetricFamily(f"tegrad:{name}", help_text, labels=names)
        for row in rows:
            counter.add_metric(row.labels, of(row.counts))
        yield counter
    for name, (help_text, of) in GAUGES.items():
        gauge = GaugeMetricFamily(f"tegrad:{name}", help_text, labels=names)
        for row in rows:
            gauge.add_metric(row.labels, of(row.counts))
        yield gauge
    widths = HistogramMetricFamily("tegrad:step_sequences", "Sequences that a step gave a token", labels=names)
    ended = CounterMetricFamily("tegrad:requests", "Requests that ended, by how", labels=[*names, "reason"])
    for row in rows:
        steps = row.counts.widths
        below = [(str(end), sum(count for width, count in steps.items() if width <= end)) for end in WIDTHS]
        total = sum(width * count for width, count in steps.items())
        widths.add_metric(row.labels, [*below, ("+Inf", steps.total())], total)
        for reason, number in row.counts.ended.items():
            ended.add_metric([*row.labels, reason], number)
    yield from (widths, ended)
    refused = CounterMetricFamily("tegrad:requests_refused", "Requests that found the queue full", labels=names)
    memory = GaugeMetricFamily("tegrad:model_bytes", "Memory that a loaded model is counted with", labels=names)
    slots = GaugeMetricFamily("tegrad:slots", "Sequences that may decode together", labels=names)
    for row in rows:
        refused.add_metric(row.labels, row.remote.refused)
        memory.add_metric(row.labels, row.remote.plan.bytes)
        slots.add_metric(row.labels, row.remote.plan.slots)
    yield from (refused, memory, slots)


def of_places(places: Iterable[Place]) -> Iterator[Metric]:
    """Of each model that was asked for."""
    failures = CounterMetricFamily("tegrad:load_failures", "Times that a model could not be loaded", labels=["model"])
    replicas = GaugeMetricFamily("tegrad:replicas", "Replicas that can be asked", labels=["model"])
    retried = CounterMetricFamily("tegrad:requests_retried", "Times that another replica took over", labels=["model"])
    for place in places:
        failures.add_metric([place.about.name], place.failures)
        if isinstance(place.here, Replicated):
            replicas.add_metric([place.about.name], len(place.here.replicas))
            retried.add_metric([place.about.name], place.here.retried)
    yield from (failures, replicas, retried)


def of_machine(root: Path) -> Iterator[Metric]:
    """What the system tells of memory, temperatures, clocks and throttling; a Jetson tells all of it."""
    free = GaugeMetricFamily("tegrad:memory_room_bytes", "Memory of the system that is left for models")
    free.add_metric([], machine_room())
    yield free
    heat = GaugeMetricFamily("tegrad:temperature_celsius", "Of a thermal zone", labels=["zone"])
    for zone, degrees in machine.temperatures(root):
        heat.add_metric([zone], degrees)
    yield heat
    cooling = GaugeMetricFamily("tegrad:cooling_state", "Of a cooling device; above 0 it throttles", labels=["device"])
    for device, state in machine.cooling(root):
        cooling.add_metric([device], state)
    yield cooling
    clock = GaugeMetricFamily("tegrad:gpu_clock_hertz", "Of the GPU, now and at most", labels=["gpu", "which"])
    for gpu in machine.gpu_clocks(root):
        for which, hertz in (("now", gpu.now), ("most", gpu.most)):
            if hertz:
                clock.add_metric([gpu.name, which], hertz)
    yield clock
    events = CounterMetricFamily(
        "tegrad:over_currents", "Times that the power supply's limit throttled", labels=["alarm"]
    )
    for alarm, count in machine.over_currents(root).items():
        events.add_metric([alarm], count)
    yield events
