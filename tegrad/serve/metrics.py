"""Figures for Prometheus, with llama-server's names behind `tegrad:` where it has the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from tegrad.llm.footprint import machine_room
from tegrad.llm.service import Counts
from tegrad.serve.catalogue import Catalogue, Place
from tegrad.serve.remote import FIRST_TOKEN
from tegrad.serve.wire import EngineError

MEDIA: Final = "text/plain; version=0.0.4; charset=utf-8"
SYS: Final = Path("/sys")
WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Upper ends of the buckets of sequences in a step."""


async def text(models: Catalogue) -> bytes:
    """All figures, in Prometheus' text format."""
    rows = []
    for place in models.places:
        counts = None
        if (remote := place.here) is not None:
            try:
                counts = await remote.counts()
            except EngineError:  # it has just ended
                counts = None
        rows.append((place, counts))
    registry = CollectorRegistry()
    registry.register(_Found([*of_models(rows), *FIRST_TOKEN.collect(), *of_machine(SYS)]))
    return generate_latest(registry)


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


def of_models(rows: Iterable[tuple[Place, Counts | None]]) -> Iterator[Metric]:
    """Of each model that was asked for: what its engine counts, if it is loaded, and what the server knows."""
    rows = list(rows)
    names: Sequence[str] = ["model"]
    counted = [(place.about.name, counts) for place, counts in rows if counts is not None]
    for name, (help_text, of) in COUNTERS.items():
        counter = CounterMetricFamily(f"tegrad:{name}", help_text, labels=names)
        for model, counts in counted:
            counter.add_metric([model], of(counts))
        yield counter
    for name, (help_text, of) in GAUGES.items():
        gauge = GaugeMetricFamily(f"tegrad:{name}", help_text, labels=names)
        for model, counts in counted:
            gauge.add_metric([model], of(counts))
        yield gauge
    widths = HistogramMetricFamily("tegrad:step_sequences", "Sequences that a step gave a token", labels=names)
    ended = CounterMetricFamily("tegrad:requests", "Requests that ended, by how", labels=["model", "reason"])
    for model, counts in counted:
        steps = counts.widths
        below = [(str(end), sum(count for width, count in steps.items() if width <= end)) for end in WIDTHS]
        total = sum(width * count for width, count in steps.items())
        widths.add_metric([model], [*below, ("+Inf", steps.total())], total)
        for reason, number in counts.ended.items():
            ended.add_metric([model, reason], number)
    yield from (widths, ended)
    refused = CounterMetricFamily("tegrad:requests_refused", "Requests that found the queue full", labels=names)
    failures = CounterMetricFamily("tegrad:load_failures", "Times that a model could not be loaded", labels=names)
    memory = GaugeMetricFamily("tegrad:model_bytes", "Memory that a loaded model is counted with", labels=names)
    slots = GaugeMetricFamily("tegrad:slots", "Sequences that may decode together", labels=names)
    for place, _ in rows:
        labels, remote = [place.about.name], place.here
        failures.add_metric(labels, place.failures)
        if remote is not None:
            refused.add_metric(labels, remote.refused)
            memory.add_metric(labels, remote.plan.bytes)
            slots.add_metric(labels, remote.plan.slots)
    yield from (refused, failures, memory, slots)


def of_machine(sys: Path) -> Iterator[Metric]:
    """What the system tells of memory, temperatures, clocks and throttling; a Jetson tells all of it."""
    free = GaugeMetricFamily("tegrad:memory_room_bytes", "Memory of the system that is left for models")
    free.add_metric([], machine_room())
    yield free
    heat = GaugeMetricFamily("tegrad:temperature_celsius", "Of a thermal zone", labels=["zone"])
    for zone in sorted(sys.glob("class/thermal/thermal_zone*")):
        if (degrees := _number(zone / "temp")) is not None:
            heat.add_metric([_word(zone / "type") or zone.name], degrees / 1000)
    yield heat
    cooling = GaugeMetricFamily("tegrad:cooling_state", "Of a cooling device; above 0 it throttles", labels=["device"])
    for device in sorted(sys.glob("class/thermal/cooling_device*")):
        if (state := _number(device / "cur_state")) is not None:
            cooling.add_metric([f"{_word(device / 'type')}:{device.name.removeprefix('cooling_device')}"], state)
    yield cooling
    clock = GaugeMetricFamily("tegrad:gpu_clock_hertz", "Of the GPU, now and at most", labels=["gpu", "which"])
    for gpu in sorted(sys.glob("class/devfreq/*.g[pa]*")):
        for which, file in (("now", "cur_freq"), ("most", "max_freq")):
            if (hertz := _number(gpu / file)) is not None:
                clock.add_metric([gpu.name, which], hertz)
    yield clock


def _word(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    word = _word(file)
    return int(word) if word.lstrip("-").isdecimal() else None
