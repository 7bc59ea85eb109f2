"""Rounds through our server on the board and through its engine alone, and the figures that rounds give."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tegrad.bench import peers, serve
from tegrad.bench.figures import SERVED, TARGETS
from tegrad.bench.load import Request, Round, Seen
from tegrad.bench.record import RecordError

sys.path.append(str(Path(__file__).parents[1] / "llm"))

from tiny_llama import TYPE, Shape, write

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1, context=256)
CLIENTS, REQUESTS, TOKENS = 3, 4, 6


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serve.Load]:
    """Little of a small model, for a server and an engine that run on a board each."""
    path = write(tmp_path_factory.mktemp("models") / "model.gguf", SHAPE, TYPE.Q8_0)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("TEGRAD_BOARD", "agx-orin-64gb"), ("DEV", "NV")):
            patch.setenv(name, value)
        yield serve.Load("small", path, (CLIENTS,), 1, REQUESTS, 4, lengths=(100, 140), tokens=TOKENS)
        from tegrad.nv import device

        gc.collect()  # buffers go before their device
        if (opened := device._opened.get("NV")) is not None:
            opened.close()


@pytest.mark.board
def test_the_same_round_goes_through_the_server_and_through_its_engine_alone(load: serve.Load) -> None:
    through, alone = serve.compared(load, alone=True, engine=True)
    assert (through.server, alone.server) == (serve.OURS, serve.ENGINE)
    for row in (through, alone):
        assert (row.model, row.clients, row.requests) == ("small", CLIENTS, CLIENTS * REQUESTS)
        assert CLIENTS * REQUESTS <= row.tokens <= CLIENTS * REQUESTS * TOKENS  # some end by themselves
        assert row.tok_s == pytest.approx(row.tokens / row.seconds)
        assert row.first_ms > 0
        assert row.cached > 0  # a block of the common beginning
    assert through.command.split()[:3] == ["tegrad", "serve", "model.gguf"]
    (percent,) = serve.overhead([through, alone], "small", CLIENTS)
    assert percent == pytest.approx(100 * (through.seconds - alone.seconds) / alone.seconds)


@pytest.mark.board
def test_a_server_that_is_told_so_gives_the_same_answers_alone_and_under_load(
    load: serve.Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "SAME_BLOCK", 6)
    assert list(serve.alike(load, 10)) == [(6, 0), (10, 0)]


def test_an_answer_that_differs_is_counted_and_leaves_the_figure_at_0(
    load: serve.Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def ours(load: serve.Load, *, same: bool) -> Iterator[serve.Server]:
        assert same
        yield serve.Server("", "")

    def drive(url: str, asked: Sequence[Request], clients: int) -> Round:
        texts = ["other" if one.seed == 4 and clients > 1 else str(one.seed) for one in asked]
        return Round([Seen(0.0, [1.0], text, 1, 1, 0) for text in texts], 1.0)

    monkeypatch.setattr(serve, "ours", ours)
    monkeypatch.setattr(serve, "drive", drive)
    assert list(serve.alike(load, 8)) == [(8, 1)]
    figured = replace(load, model=TARGETS[serve.SAME].model)
    for differed, value in ((1, 0.0), (0, 1000.0)):
        record = serve.same_record(figured, 1000, differed)
        assert record is not None
        assert record.ours.samples == [value]
    assert serve.same_record(load, 1000, 0) is None


def test_two_gpus_are_measured_against_one_round_by_round(load: serve.Load, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    @contextmanager
    def ours(load: serve.Load, *, replicas: int) -> Iterator[serve.Server]:
        yield serve.Server(str(replicas), f"x{replicas}")

    def drive(url: str, requests: Sequence[Request], clients: int) -> Round:
        asked.append((url, hash(tuple(tuple(one.tokens) for one in requests))))
        return Round([Seen(0.0, (0.1, 0.2), "a", 10, 5, 0)] * 8, 1.0 / (0.95 * int(url) if url == "2" else 1))

    monkeypatch.setattr(serve, "ours", ours)
    monkeypatch.setattr(serve, "drive", drive)
    rows = list(serve.scaled(replace(load, rounds=2)))
    assert [(row.server, row.round) for row in rows] == [
        (f"tegrad x{at}", number) for number in (0, 1) for at in (2, 1)
    ]
    assert [url for url, _ in asked[1::2]] == ["2", "1", "2", "1"]
    assert asked[1][1] == asked[3][1] != asked[5][1] == asked[7][1]  # the same requests for both, others a round later
    assert serve.scaling(rows) == pytest.approx([1.9, 1.9])
    assert serve.scaling_record(load, rows) is None
    target = TARGETS[serve.SCALING]
    record = serve.scaling_record(replace(load, model=target.model, clients=(target.amount,)), rows)
    assert record is not None
    assert (record.id, record.unit, record.ours.samples) == (serve.SCALING, "of one", pytest.approx([1.9, 1.9]))


def test_two_gpus_that_cannot_be_had_are_refused_before_one_is_measured(
    load: serve.Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def ours(load: serve.Load, *, replicas: int) -> Iterator[serve.Server]:
        assert replicas == serve.REPLICAS
        raise RecordError("replicas need Ray Serve")
        yield

    monkeypatch.setattr(serve, "ours", ours)
    with pytest.raises(RecordError, match="need Ray Serve"):
        next(serve.scaled(load))


def row(server: str, command: str, number: int = 0, **values: float) -> serve.Row:
    rest = {"tok_s": 1.0, "first_ms": 1.0, "gap_ms": 1.0, **values}
    return serve.Row("1b-q6k", 32, server, command, number, 96, 96 * 128, 1.0, cached=0.1, **rest)


def test_a_figure_stands_beside_the_setting_of_the_peer_that_is_best_at_it() -> None:
    rows = [
        row(serve.OURS, "tegrad serve", tok_s=900, first_ms=20),
        row(peers.LLAMA, "llama-server -a", tok_s=400, first_ms=50),
        row(peers.LLAMA, "llama-server -b", tok_s=300, first_ms=30),
        row(peers.LLAMA, "llama-server -a", 1, tok_s=420, first_ms=54),
        row(serve.OURS, "tegrad serve", 1, tok_s=1100, first_ms=22),
    ]
    found = {record.id: record for record in serve.records(rows)}
    assert found.keys() == {"serve-32-clients-tok-s", "serve-ttft-p50-ms", "serve-itl-p99-ms"}
    rate, first = found["serve-32-clients-tok-s"], found["serve-ttft-p50-ms"]
    assert (rate.ours.samples, first.ours.samples) == ([900, 1100], [20, 22])
    assert rate.peer is not None
    assert (rate.peer.command, rate.peer.samples) == ("llama-server -a", [400, 420])
    assert first.peer is not None
    assert first.peer.command == "llama-server -b"
    assert not first.larger_is_better
    assert list(serve.records(rows[:1])) == []


def test_a_figure_of_overhead_holds_each_pair_of_rounds() -> None:
    pairs = [("8b-q4km", serve.OURS, 0, 2.1), ("8b-q4km", serve.ENGINE, 0, 2.0), ("8b-q4km", serve.OURS, 1, 2.0)]
    rows = [
        replace(row(server, ""), model=model, round=number, seconds=seconds) for model, server, number, seconds in pairs
    ]
    (record,) = serve.records(rows)
    assert record.id == "serve-overhead-percent"
    assert record.ours.samples == pytest.approx([5.0])
    assert list(serve.records(rows[:1])) == []


def test_rounds_are_kept_in_the_place_of_earlier_ones(tmp_path: Path) -> None:
    serve.keep(tmp_path, [row(serve.OURS, "a", tok_s=1)])
    serve.keep(tmp_path, [row(serve.OURS, "a", tok_s=2), row(serve.OURS, "a", 1, tok_s=3)])
    text = (tmp_path / serve.TABLE).read_text()
    assert text.count('"model"') == 2
    assert '"tok_s": 1' not in text


def test_each_setting_is_tried_where_a_figure_is_and_the_best_of_them_elsewhere(
    load: serve.Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []

    @contextmanager
    def theirs(load: serve.Load, clients: int, setting: Sequence[str]) -> Iterator[serve.Server]:
        begun.append((clients, serve.SETTINGS.index(tuple(setting))))
        yield serve.Server(str(begun[-1][1]), "")

    def drive(url: str, asked: Sequence[Request], clients: int) -> Round:
        return Round([Seen(0.0, [1.0], "", 1, 1, 0)] * len(asked), 1.0 if url == "2" else 2.0)

    monkeypatch.setattr(serve, "theirs", theirs)
    monkeypatch.setattr(serve, "drive", drive)
    rows = list(serve._peers(replace(load, model="1b-q6k", clients=(8, 32), rounds=2)))
    assert begun == [*((32, at) for at in range(4)), (32, 2), (8, 2)]
    assert [each.round for each in rows] == [0, 0, 0, 0, 1, 0]


def test_a_server_that_does_not_begin_says_why(load: serve.Load) -> None:
    with (
        pytest.raises(RecordError, match=r"not ready to serve: no such model"),
        serve._running([sys.executable, "-c", "print('no such model')"], {}, lambda said: None),
    ):
        pass


def test_every_figure_of_a_server_has_its_program_or_is_of_ours_alone() -> None:
    kinds = {target.kind for id, target in TARGETS.items() if id.startswith("serve-")}
    assert kinds == set(SERVED)
    assert {*serve.VALUES, "serve-overhead", "serve-same", "serve-scaling"} == kinds
