"""What a figure is to reach follows from the peer and the limit of its own record."""

import json
import sys
from pathlib import Path

import pytest

from tegrad.bench.figures import SIDE_BY_SIDE, TARGETS, Goal, published
from tegrad.bench.measures import MEASURES
from tegrad.bench.models import parse

HARDWARE = Path(__file__).parents[1] / "hardware"
FIGURES = json.loads((HARDWARE.parents[1] / "results" / "figures.json").read_text())


def test_the_smaller_of_a_multiple_of_the_peer_and_a_share_of_the_limit_is_to_be_reached() -> None:
    goal = Goal(times=3, share=0.65)
    assert goal.level(800, 2000) == pytest.approx(1300)
    assert goal.level(400, 2000) == pytest.approx(1200)


def test_of_times_the_longer_is_to_be_reached() -> None:
    assert Goal(times=1).level(4.0, larger=False) == 4.0
    assert Goal(value=15, times=2).level(40.0, larger=False) == 20.0


def test_a_value_needs_nothing_else_and_a_multiple_needs_its_base() -> None:
    assert Goal(value=2800).level() == 2800
    assert Goal(times=2.5, share=0.65).level(700, None) is None
    assert Goal().level(1, 1) is None


def test_every_figure_can_be_taken_and_names_a_model() -> None:
    assert set(TARGETS) <= set(MEASURES)
    for id, target in TARGETS.items():
        parse(target.model)
        assert MEASURES[id].needs_gpu
        assert target.model in target.what
    assert "load-to-first-token" not in SIDE_BY_SIDE


def test_each_model_whose_speed_is_published_has_a_case_at_every_depth_on_hardware() -> None:
    sys.path.append(str(HARDWARE))
    import nv_cases

    models = {TARGETS[row["id"]].model for row in FIGURES if row["id"] in TARGETS}
    assert {"1b-q6k", "3b-q6k", "8b-q6k", "qwen3-0.6b-q8_0"} <= models
    assert "gemma3-4b-q4km" in models
    for model in models:
        name = f"steps_in_one_launch[{model}]"
        case, _ = nv_cases.CASES[name]
        assert case.args == (model,)
        assert nv_cases.TIME_LIMITS_S[name] > nv_cases.TIME_LIMIT_S
    assert {name for name in nv_cases.CASES if name.startswith("steps_in_one_launch")} == {
        f"steps_in_one_launch[{model}]" for model in models
    }


def test_a_new_row_brings_its_model_and_an_unknown_one_is_an_error() -> None:
    rows = [row for row in FIGURES if row["id"] != "decode-3b-q6k"]
    assert "3b-q6k" not in published(rows)
    assert set(published(FIGURES)) == {*published(rows), "3b-q6k"}
    with pytest.raises(LookupError, match="of which model is decode-9b-q2k"):
        published([*FIGURES, {"id": "decode-9b-q2k"}])
