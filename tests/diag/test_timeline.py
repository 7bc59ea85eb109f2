"""Spans become a table, which tells only what is known, and a trace in Chrome's form."""

import json
from xml.etree import ElementTree

import pytest

from tegrad.diag.flame import flame
from tegrad.diag.profile import outermost
from tegrad.diag.timeline import Counts, Scale, Span, rows, table, trace

SPANS = (
    Span("GPU", "a", 0.0, 10.0, 2_000_000),
    Span("GPU", "b", 10.0, 30.0),
    Span("GPU", "a", 40.0, 10.0, 4_000_000),
)


def test_spans_of_a_name_are_a_row_and_what_is_not_known_of_one_of_them_is_left_out() -> None:
    a, b = rows(SPANS)
    assert (a.name, a.count, a.us, a.bytes) == ("a", 2, 20.0, 6_000_000)
    assert (b.count, b.us, b.bytes) == (1, 30.0, None)
    (both,) = rows(SPANS, lambda span: span.track)
    assert (both.count, both.us, both.bytes) == (3, 50.0, None)


def test_a_table_has_shares_of_the_time_and_of_what_memory_gives() -> None:
    head, a, b, whole = table(rows(SPANS), "kernel", Scale(times=2, peak=600e9)).splitlines()
    assert head.split() == ["kernel", "count", "us", "each", "share", "MB", "GB/s", "of", "peak"]
    assert a.split() == ["a", "1", "10.0", "10.00", "40.0%", "3.000", "300.0", "50%"]
    assert b.split() == ["b", "0.5", "15.0", "30.00", "60.0%"]
    assert whole.split()[:5] == ["all", "1.5", "25.0", "16.67", "100.0%"]


def test_columns_that_nothing_is_known_of_are_left_out() -> None:
    assert table(rows(SPANS[1:2]), "kernel").splitlines()[0].split() == ["kernel", "count", "us", "each", "share"]
    counted = Span("GPU", "a", 0.0, 1.0, counts=Counts(3_000_000, 2_000_000, 1_000_000))
    head, a, _ = table(rows([counted]), "kernel").splitlines()
    assert head.split()[-7:] == ["Minstr", "of", "all", "MB", "read", "MB", "written"]
    assert a.split()[-4:] == ["3.000", "100.0%", "2.000", "1.000"]


def test_a_trace_has_a_process_and_a_track_for_each_and_every_span() -> None:
    own = Span("host", "wait", 5.0, 1.5, args={"why": "x"}, process="other")
    events = json.loads(json.dumps(trace([*SPANS, own])))["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert named == {(1, 0): "tegrad", (2, 0): "other", (1, 1): "GPU", (2, 2): "host"}
    shown = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in shown] == [
        (1, 1, "a", 0.0, 10.0), (1, 1, "b", 10.0, 30.0), (1, 1, "a", 40.0, 10.0), (2, 2, "wait", 5.0, 1.5)
    ]  # fmt: skip
    assert [e["args"] for e in shown] == [{"bytes": 2_000_000}, {}, {"bytes": 4_000_000}, {"why": "x"}]


def test_what_lies_in_another_span_of_its_track_is_not_counted_twice() -> None:
    outer, inner, other = Span("t", "outer", 0, 10), Span("t", "inner", 0, 5), Span("u", "other", 2, 3)
    after = Span("t", "after", 10, 1)
    assert outermost([inner, Span("t", "deep", 1, 1), outer, other, after]) == [outer, other, after]


def test_a_picture_has_a_bar_for_the_whole_each_outer_name_and_each_part() -> None:
    parts = [(("first",), 10.0), (("layer 0", "a"), 20.0), (("layer 0", "<b>"), 30.0), (("layer 1", "a"), 40.0)]
    root = ElementTree.fromstring(flame(parts, "a & b", "us"))
    space = "{http://www.w3.org/2000/svg}"
    bars = {g.findtext(f"{space}title"): g.find(f"{space}rect") for g in root.findall(f"{space}g")}
    told = ["all: 100.0 us, 100.0%", "first: 10.0 us, 10.0%", "layer 0: 50.0 us, 50.0%", "layer 1: 40.0 us, 40.0%",
            "a: 20.0 us, 20.0%", "<b>: 30.0 us, 30.0%", "a: 40.0 us, 40.0%"]  # fmt: skip
    assert list(bars) == told
    ends = [
        (float(bar.get("x", 0)), float(bar.get("width", 0)), bar.get("y")) for bar in bars.values() if bar is not None
    ]
    (x, width, _), *_ = ends
    assert ends[4][0] == pytest.approx(x + (width + 1) / 10, abs=0.02)
    assert ends[5][1] == pytest.approx((width + 1) * 0.3 - 1, abs=0.02)
    assert len({y for *_, y in ends}) == 3
