"""What a figure is to reach follows from the peer and the limit of its own record."""

import pytest

from tegrad.bench.measures import MEASURES
from tegrad.bench.models import parse
from tegrad.bench.targets import SIDE_BY_SIDE, TARGETS, Goal


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
