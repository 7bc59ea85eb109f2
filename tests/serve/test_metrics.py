"""Figures for Prometheus, as its own parser reads them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tegrad.llm.service import Counts
from tegrad.serve import metrics


def samples(found: Any) -> dict[tuple[str, ...], float]:
    """Every sample by its name and its labels' values."""
    registry = metrics.CollectorRegistry()
    registry.register(metrics._Found(found))
    text = metrics.generate_latest(registry).decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples
    }  # fmt: skip


def test_what_engines_count_is_told_of_each_model() -> None:
    counts = Counts(
        running=3, waiting=2, prompt_tokens=70, cached_tokens=64, completion_tokens=50, reopened=1,
        widths=Counter({1: 4, 3: 10, 40: 2}), ended=Counter(stop=5, error=1),
    )  # fmt: skip
    remote = SimpleNamespace(refused=7, plan=SimpleNamespace(bytes=1000, slots=8))
    there: Any = SimpleNamespace(about=SimpleNamespace(name="a"), here=remote, failures=0)
    row: Any = metrics.Row(["a"], remote, counts)  # type: ignore[arg-type]
    gone: Any = SimpleNamespace(about=SimpleNamespace(name='b"'), here=None, failures=2)
    found = samples([*metrics.of_engines([row], ["model"]), *metrics.of_places([there, gone])])
    for row, value in {
        ("tegrad:prompt_tokens_total", "a"): 70, ("tegrad:cached_tokens_total", "a"): 64,
        ("tegrad:tokens_predicted_total", "a"): 50, ("tegrad:n_decode_total", "a"): 16,
        ("tegrad:device_reopened_total", "a"): 1, ("tegrad:requests_processing", "a"): 3,
        ("tegrad:requests_deferred", "a"): 2, ("tegrad:requests_refused_total", "a"): 7,
        ("tegrad:requests_total", "a", "stop"): 5, ("tegrad:requests_total", "a", "error"): 1,
        ("tegrad:step_sequences_bucket", "2", "a"): 4, ("tegrad:step_sequences_bucket", "4", "a"): 14,
        ("tegrad:step_sequences_bucket", "+Inf", "a"): 16, ("tegrad:step_sequences_sum", "a"): 114,
        ("tegrad:model_bytes", "a"): 1000, ("tegrad:slots", "a"): 8,
        ("tegrad:load_failures_total", "a"): 0, ("tegrad:load_failures_total", 'b"'): 2,
    }.items():  # fmt: skip
        assert found[row] == value, row
    assert ("tegrad:slots", 'b"') not in found


def test_what_a_jetson_tells_is_told(tmp_path: Path) -> None:
    rows = {
        "thermal/thermal_zone0/type": "GPU-therm", "thermal/thermal_zone0/temp": "51500",
        "thermal/thermal_zone1/type": "odd-therm", "thermal/thermal_zone1/temp": "",
        "thermal/cooling_device2/type": "gpu-throttle-alert", "thermal/cooling_device2/cur_state": "1",
        "devfreq/17000000.gpu/cur_freq": "306000000", "devfreq/17000000.gpu/max_freq": "1300500000",
        "devfreq/15340000.vic/cur_freq": "1", "hwmon/hwmon3/oc3_event_cnt": "7",
    }  # fmt: skip
    for name, text in rows.items():
        (tmp_path / "sys/class" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/class" / name).write_text(f"{text}\n")
    found = samples(metrics.of_machine(tmp_path))
    assert found.pop(("tegrad:memory_room_bytes",)) > 0
    assert found == {
        ("tegrad:temperature_celsius", "GPU-therm"): 51.5,
        ("tegrad:cooling_state", "gpu-throttle-alert:2"): 1,
        ("tegrad:gpu_clock_hertz", "17000000.gpu", "now"): 306e6,
        ("tegrad:gpu_clock_hertz", "17000000.gpu", "most"): 1300.5e6,
        ("tegrad:over_currents_total", "oc3"): 7,
    }
    assert list(samples(metrics.of_machine(tmp_path / "none"))) == [("tegrad:memory_room_bytes",)]
