"""The benches of attention and sampling: they measure what the plan launches, at every depth and kind."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tegrad.bench import products
from tegrad.bench.models import SHAPES, ModelShape
from tegrad.cli.bench import app

pytestmark = pytest.mark.board

TINY = ModelShape("qwen3", 320, 512, 1024, 2, 8, 4, 64, 1024, 0, eps=1e-5)


@pytest.fixture(autouse=True)
def small_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb:14GiB")
    monkeypatch.setenv("DEV", "NV")
    monkeypatch.setenv("HCQDEV_WAIT_TIMEOUT_MS", "60000")
    monkeypatch.setattr("tegrad.bench.gpu.PASSES", 1)


def measured(*command: str) -> Any:
    """The rows of a command."""
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    return json.loads(done.output.splitlines()[-1])


def test_attention_is_measured_at_every_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROTATION_BYTES", 1 << 21)
    monkeypatch.setattr(products, "LEAST_LAUNCHES", 1)
    monkeypatch.setattr("tegrad.bench.limits.READ_BYTES", 1 << 20)
    monkeypatch.setattr(products, "CUTS", {"warps": (2,), "loads": (2,), "ctas": (1, 2), "rows": (0,)})
    monkeypatch.setitem(SHAPES, "tiny", TINY)  # type: ignore[arg-type]
    command = ["attention", "tiny", "--depths", "0", "--depths", "300", "--json"]
    rows = measured(*command)
    assert [row["depth"] for row in rows] == [0, 300]
    assert [row["bytes"] for row in rows] == [0, 300 * 2 * 4 * 64 * 2]
    assert all(row["us"] == pytest.approx(row["bytes"] / row["gb_s"] / 1e3) for row in rows[1:])
    rows = measured(*command, "--cache", "q8_0", "--sequences", "2", "--sweep", "1")
    assert [(row["depth"], row["warps"]) for row in rows] == [(0, 2), (300, 2)]
    assert rows[1]["bytes"] == 2 * 300 * 2 * 4 * 68  # with two scales of two bytes


def test_every_kind_of_sampling_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SAMPLING_STEPS", (1, 2))
    rows = measured("sampling", "2603", "--json")
    assert [row["launches"] for row in rows] == [1, 1, 2, 1, 1, 2, 5, 8]
