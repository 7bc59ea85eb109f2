"""Results as one HTML page that needs nothing else: bars against peers, decoding's roofline, latencies, a table.

    tegrad bench report -o report.html                     the figures in results/
    tegrad bench report rows.json -o report.html           rows of `tegrad bench model -o json`, of llama-bench, or of
                                                           `tegrad bench tinygrad --record`; several files on one page

Plots are matplotlib's (extra `bench`), as SVG in the page.
"""

from __future__ import annotations

import io
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2

from tegrad.bench.columns import LOAD, parsed, test_of
from tegrad.bench.record import Record, RecordError, now
from tegrad.errors import TegradError
from tegrad.installed import pip_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY: Final = 100
"""Samples from which on a figure has a histogram."""
LIMIT: Final = re.compile(r"(\d+) bytes of the file a token, read at (\d+) GB/s")
"""A decode figure's limit, as bench/limits.py notes it."""
OURS: Final = "#2a6f97"
PEER: Final = "#c08552"
PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
figure { margin: 1.5rem 0; overflow-x: auto; }
figcaption { color: #555; }
svg { max-width: 100%; height: auto; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left; }
</style></head><body>
<h1>{{ page.title }}</h1>
<p>Made {{ made }}. {{ page.about }}</p>
{% for plot in page.plots %}
<figure>{{ plot.svg|safe }}<figcaption>{{ plot.caption }}</figcaption></figure>
{% endfor %}
<div><table><thead><tr>{% for name in page.head %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in page.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
</body></html>
"""


class NoPlots(TegradError):
    """matplotlib is not installed."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture and what it shows."""

    svg: str
    caption: str


@dataclass(slots=True)
class Page:
    """What the page says."""

    title: str
    about: str
    head: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)

    def html(self) -> str:
        """The page, with every text escaped."""
        return jinja2.Environment(autoescape=True).from_string(PAGE).render(page=self, made=now())


def of_results(folder: Path) -> Page:
    """The page of a results folder: its figures.json and samples. RecordError where they are missing."""
    try:
        figures = json.loads((folder / "figures.json").read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{folder / 'figures.json'} cannot be read ({error}): name a results folder") from error
    page = Page(
        "tegrad: figures", "A ratio above 1 says how many times better ours is than the peer in the same run.",
        ("figure", "what", "ours", "peer", "unit", "ratio", "of the limit", "machine", "day"),
    )  # fmt: skip
    for row in figures:
        share = "" if row["limit_share"] is None else f"{row['limit_share']:.0%}"
        numbers = [_short(row[name]) for name in ("ours", "peer", "ratio")]
        on, day = row["machine"], row["date"][:10]
        page.rows.append((row["id"], row["what"], *numbers[:2], row["unit"], numbers[2], share, on, day))
    records = {row["id"]: Record.load(folder / row["samples"]) for row in figures}
    page.plots = [*_against_peers(figures), *_roofline(records), *_histograms(records)]
    return page


def of_rows(paths: Sequence[Path]) -> Page:
    """The page of rows of `tegrad bench model`, of llama-bench, and of records of `tegrad bench tinygrad`.

    RecordError for other files.
    """
    found = [parsed(path) for path in paths]
    records = [one for one in found if isinstance(one, dict) and {"peer", "rows"} <= one.keys()]
    rows: list[Mapping[str, Any]] = [row for one in found if isinstance(one, list) for row in one]
    known = len(records) + sum(isinstance(one, list) for one in found) == len(found) > 0
    if not known or not all(isinstance(row, dict) and "avg_ts" in row for row in rows) or not rows + records:
        raise RecordError("these are no rows: take some by `tegrad bench model MODEL -o json`")
    on = (rows + records)[0].get("machine") or {}
    about = ", ".join(f"{name} {value}" for name, value in on.items() if value and not isinstance(value, dict))
    about += ". ppN is a prompt of N tokens, tgN an answer of N; @ dN: after N others; x N: in N sequences at once."
    page = Page("tegrad: one run", about, ("what", "by", "test", "result", "deviation, or range"))
    for row in rows:
        load, unit = test_of(row) == LOAD, "ns" if test_of(row) == LOAD else "ts"
        scale, name = (1e-9, "s") if load else (1.0, "tok/s")
        values = [_short(scale * row[f"{kind}_{unit}"]) for kind in ("avg", "stddev")]
        page.rows.append((_model(row), row["backends"], test_of(row), f"{values[0]} {name}", values[1]))
    page.plots = list(_speeds([row for row in rows if test_of(row) != LOAD]))
    for record in records:
        for row in record["rows"]:
            for side, name in (("ours", "tinygrad, NV"), ("peer", record["peer"])):
                rounds = row[side]["median"]
                cells = (
                    f"{_short(statistics.median(rounds))} {row['unit']}",
                    f"{_short(min(rounds))} to {_short(max(rounds))}",
                )
                page.rows.append(("operation", name, row["row"], *cells))
        page.plots += _ratios(record)
    return page


def _model(row: Mapping[str, Any]) -> str:
    """A row's model: its file, since tools describe one differently; or else what it says."""
    return Path(row.get("model_filename") or row["model_type"]).name


def _short(value: float | None) -> str:
    """Four digits, or all in front of the point."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


# ---- plots


def _figure(height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPlots(f"the page's plots need matplotlib: {pip_install('bench')}") from error
    return Figure(figsize=(9, height), layout="constrained")


def _plot(figure: Figure, caption: str) -> Plot:
    import matplotlib

    told = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": caption}):
        figure.savefig(told, format="svg", metadata={"Date": None})
    return Plot(told.getvalue()[told.getvalue().index("<svg") :], caption)


def _ratios(record: Mapping[str, Any]) -> Iterator[Plot]:
    """A bar for each row of a record of `tegrad bench tinygrad`."""
    shown = []
    for row in record["rows"]:
        ours, peer = (statistics.median(row[side]["median"]) for side in ("ours", "peer"))
        shown.append({"id": row["row"], "peer_name": record["peer"], "ratio": peer / ours})
    yield from _against_peers(shown)


def _against_peers(figures: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    """A bar for each figure that is held against a peer."""
    rows = sorted((row for row in figures if row["ratio"]), key=lambda row: float(row["ratio"]))
    if not rows:
        return
    figure = _figure(0.8 + 0.24 * len(rows))
    axes = figure.subplots()
    bars = axes.barh([f"{row['id']} ({row['peer_name']})" for row in rows], [row["ratio"] for row in rows], color=OURS)
    axes.bar_label(bars, [f"{row['ratio']:.2f}" for row in rows], padding=3)
    axes.axvline(1, color=PEER)
    axes.set_xscale("log")
    axes.margins(x=0.15, y=0.01)
    axes.set_xlabel("times as good as the peer")
    yield _plot(figure, "How many times better ours is than the peer, side by side in one run; the line is the peer.")


def _roofline(records: Mapping[str, Record]) -> Iterator[Plot]:
    """Decoding: tokens per second over bytes that each must read, below what the memory's bandwidth allows."""
    points = [(record, LIMIT.search(record.limit_note)) for record in records.values()]
    known = [(record, int(found[1]) / 1e9, float(found[2])) for record, found in points if found]
    if not known:
        return
    figure = _figure(6)
    axes = figure.subplots()
    bandwidth = max(speed for *_, speed in known)
    ends = [min(size for _, size, _ in known) / 1.3, 1.3 * max(size for _, size, _ in known)]
    axes.plot(ends, [bandwidth / size for size in ends], color="#555555", label=f"{bandwidth:.0f} GB/s, measured")
    axes.scatter([size for _, size, _ in known], [one.ours.median for one, *_ in known], color=OURS, label="tegrad")
    peers = [(size, one.peer.median) for one, size, _ in known if one.peer]
    if peers:
        axes.scatter(*zip(*peers, strict=True), color=PEER, marker="x", label="llama.cpp")
    for record, size, _ in known:
        name = record.id.removeprefix("decode-")
        axes.annotate(name, (size, record.ours.median), textcoords="offset points", xytext=(5, 3), fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="GB that a token reads", ylabel="tokens per second")
    axes.legend()
    yield _plot(figure, "Decoding below its roof: a token cannot come before its weights are read once.")


def _histograms(records: Mapping[str, Record]) -> Iterator[Plot]:
    """How latencies spread, where a figure keeps every one."""
    for record in records.values():
        samples = sorted(record.ours.samples)
        if len(samples) < MANY or record.unit != "us":
            continue
        figure = _figure(3)
        axes = figure.subplots()
        axes.hist(samples, bins=80, range=(samples[0], samples[int(0.999 * (len(samples) - 1))]), color=OURS)
        for share in (0.5, 0.99):
            axes.axvline(samples[int(share * (len(samples) - 1))], color=PEER)
        axes.set(xlabel=record.unit, ylabel="samples", yscale="log")
        yield _plot(
            figure, f"{record.id}: {record.what}. {len(samples)} samples; lines at the median and the 99th percentile."
        )


def _speeds(rows: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    """A group of bars for each model: its tests, by backend; prompts apart, which are many times as fast as answers."""
    for model in dict.fromkeys(map(_model, rows)):
        for kind in ("prompts", "answers"):
            own = [row for row in rows if _model(row) == model and test_of(row).startswith("pp") == (kind == "prompts")]
            if own:
                yield _plot(_bars(own), f"{model}: tokens per second of {kind}.")


def _bars(own: Sequence[Mapping[str, Any]]) -> Figure:
    tests, backends = (list(dict.fromkeys(map(key, own))) for key in (test_of, lambda row: row["backends"]))
    figure = _figure(0.8 + 0.35 * len(tests) * len(backends))
    axes = figure.subplots()
    height = 0.8 / len(backends)
    for at, (backend, color) in enumerate(zip(backends, (OURS, PEER, "#7f9172", "#a44a3f") * len(backends))):  # noqa: B905
        there = [row for row in own if row["backends"] == backend]
        places = [tests.index(test_of(row)) + (at - (len(backends) - 1) / 2) * height for row in there]
        speeds, spread = ([row[name] for row in there] for name in ("avg_ts", "stddev_ts"))
        bars = axes.barh(places, speeds, height, xerr=spread, color=color, label=backend)
        axes.bar_label(bars, [_short(speed) for speed in speeds], padding=4)
    axes.set_yticks(range(len(tests)), tests)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("tokens per second")
    axes.legend()
    return figure
