"""Which plan a step takes by chip and by the record of a first boot. No device: the plans are stand-ins."""

from types import SimpleNamespace
from typing import Any

import pytest

from tegrad.llm import engine
from tegrad.llm.errors import UnsupportedModelError
from tegrad.nv import roles
from tegrad.nv.replay import AHEAD, Dependency


def one(*_: object, **how: Any) -> Any:
    return "one launch"


def refused(*_: object, **how: Any) -> Any:
    raise UnsupportedModelError("its norm differs")


def many(*_: object, overlap: bool = False) -> Any:
    return "overlapped launches" if overlap else "many launches"


@pytest.mark.parametrize(
    ("arch", "recorded", "runs", "norms", "overlapped", "plan"),
    [
        ("sm_87", None, one, "none", None, "many launches"),  # no record, or not measured
        ("sm_87", False, one, "none", None, "many launches"),  # packets are wrong, or slower than launches
        ("sm_87", True, one, "none", None, "one launch"),
        ("sm_87", True, one, "head", None, "one launch"),
        ("sm_87", True, one, "whole", None, "one launch"),
        ("sm_87", True, refused, "none", None, "many launches"),
        ("sm_87", True, one, "none", AHEAD, "overlapped launches"),  # as asked for
        ("sm_90", None, one, "none", None, "one launch"),
        ("sm_90", False, one, "none", None, "one launch"),  # a Jetson's record says nothing of it
        ("sm_90", None, one, "whole", None, "one launch"),
        ("sm_90", None, refused, "none", None, "overlapped launches"),
    ],
)
def test_the_plan_by_chip_and_record(
    arch: str,
    recorded: bool | None,
    runs: Any,
    norms: str,
    overlapped: Dependency | None,
    plan: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "PersistentPlan", runs)
    monkeypatch.setattr(engine, "DecodePlan", many)
    monkeypatch.setattr(roles, "one_launch", lambda: recorded is True)
    made = engine.Engine.__new__(engine.Engine)
    made.device, made._overlapped, made._near = SimpleNamespace(arch=arch), overlapped, False
    config = SimpleNamespace(network=SimpleNamespace(attends=[SimpleNamespace(norms=norms)]))
    assert made._quickest(SimpleNamespace(quicker_in_launches=False, config=config), None, None) == plan  # type: ignore[arg-type]
    assert made._overlapped is (AHEAD if plan == "overlapped launches" else None)
