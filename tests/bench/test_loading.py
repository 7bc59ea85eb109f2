"""A load is measured with the readers and pieces that were asked for, to its last byte."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from tiny_llama import TYPE, Shape, write

from tegrad.bench import model
from tegrad.cli.bench import app
from tegrad.llm import stream
from tegrad.llm.errors import GgufError

pytestmark = pytest.mark.board


def test_loads_of_every_cut_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb:14GiB")
    monkeypatch.setenv("HCQDEV_WAIT_TIMEOUT_MS", "60000")
    path = write(tmp_path / "model.gguf", Shape(dim=64, ffn=64, heads=1, kv_heads=1, layers=1), TYPE.Q8_0)
    before = stream.READERS, stream.HOST_BLOCKS, stream.PIECE_BYTES
    seen = []
    plain = stream.Stream.run

    def run(self: stream.Stream, pieces: object, arrived: object) -> None:
        seen.append((stream.READERS, stream.PIECE_BYTES))
        plain(self, pieces, arrived)  # type: ignore[arg-type]

    monkeypatch.setattr(stream.Stream, "run", run)
    command = ["loading", str(path), "--readers", "1", "--readers", "3", "--mib", "2", "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    rows = json.loads(done.output.splitlines()[-1])
    assert seen == [(1, 2 << 20)] * 3 + [(3, 2 << 20)] * 3
    assert [(row["readers"], row["mib"]) for row in rows] == [(1, 2)] * 3 + [(3, 2)] * 3
    assert all(0 < row["first"] <= row["seconds"] for row in rows)
    assert before == (stream.READERS, stream.HOST_BLOCKS, stream.PIECE_BYTES)


def test_the_clock_of_a_load_starts_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"\0" * 6000)
    ticks = iter((1000.0, 1002.0, 1006.0))
    monkeypatch.setattr(model.time, "perf_counter", lambda: next(ticks))

    @contextmanager
    def load(path: Path, device: object, progress: Callable[[int, int], None]) -> Iterator[None]:
        progress(1, 6000)
        progress(2, 6000)
        yield

    monkeypatch.setattr(model.PackedModel, "load", load)
    found = model.load(path, SimpleNamespace(device="NV"), readers=1, mib=2)
    assert (found.first, found.seconds, found.gb_s) == (2.0, 6.0, 1e-6)


def test_a_load_needs_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    done = CliRunner().invoke(app, ["loading", "/nowhere/model.gguf"])
    assert isinstance(done.exception, GgufError)
    assert "/nowhere/model.gguf" in str(done.exception)
