"""The forms of the boundary between two kernels: what they say they order they do order, and the figures come out."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tegrad.bench import boundaries
from tegrad.bench.boundaries import FORMS, HOPPER, Probe

pytestmark = pytest.mark.board

CHANGING_HANDS = ("none", "latch", "latch-program", "latch-alone")
"""Forms that leave it to the hardware's latches, which the board has not, or to nobody."""


@pytest.fixture(params=["agx-orin-64gb:15GiB", "gh100"])
def racing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device on a board that races."""
    monkeypatch.setenv("TEGRAD_BOARD", request.param)
    monkeypatch.setenv("TEGRAD_RACE", "9")
    monkeypatch.setenv("DEV", "NV")
    with boundaries.opened() as device:
        yield device


def test_every_form_that_orders_kernels_computes_what_they_should(racing: Any) -> None:
    probe = Probe(racing, 4, 64)
    for name in boundaries.forms(racing.arch):
        assert probe.right({**FORMS, **HOPPER}[name], count=8, runs=3) == (name not in CHANGING_HANDS), name
    probe.close()


def test_only_hopper_tries_the_fields_that_only_it_has() -> None:
    assert boundaries.forms("sm_87") == list(FORMS)
    assert boundaries.forms("sm_90") == [*FORMS, *HOPPER]


def test_a_form_is_measured_and_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb:15GiB")
    monkeypatch.setenv("DEV", "NV")
    monkeypatch.setattr(boundaries, "SHAPES", ((1, 32),))
    monkeypatch.setattr(boundaries, "LENGTHS", (2, 4))
    monkeypatch.setattr(boundaries, "PASSES", 2)
    boundaries.main(["chain", "--json"])
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["form"], row["blocks"], row["threads"], row["right"]) == ("chain", 1, 32, True)
    assert "chain" in boundaries.line(row)
    assert boundaries.line({"form": "latch", "error": "did not end in 60 s"}).endswith("did not end in 60 s")
