"""An engine says what its step is, and does not run another one where the one that it should run is wrong."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_llama import SHAPES, TYPE, Shape, write

from tegrad.bench.gpu import opened
from tegrad.llm import engine as module
from tegrad.llm.engine import Engine
from tegrad.llm.gguf import Gguf
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.schedule import ScheduleError

LLAMA = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1, context=64)
GEMMA = replace(SHAPES["gemma3"], layers=1)
GPT2 = Shape(arch="gpt2", dim=256, ffn=512, heads=4, kv_heads=4, vocab=301, layers=1, context=64)


@pytest.mark.board
@pytest.mark.parametrize(
    ("board", "shape", "kind", "name"),
    [
        ("gh100", LLAMA, TYPE.F16, "one launch"),
        ("gh100", GEMMA, TYPE.F16, "one launch"),
        ("gh100", LLAMA, TYPE.IQ2_S, "overlapped launches"),
        ("gh100", GPT2, TYPE.F16, "overlapped launches"),
        ("agx-orin-64gb:42GiB", LLAMA, TYPE.F16, "many launches"),
    ],
)
def test_the_plan_that_runs_is_named(
    board: str, shape: Shape, kind: TYPE, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", board)
    monkeypatch.setenv("DEV", "NV")
    path = write(tmp_path / "model.gguf", shape, kind)
    with opened(), Gguf.open(path) as file, Engine(file) as engine:
        assert engine.plan_name == name


def test_a_wrong_schedule_is_an_error_and_no_slower_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> PersistentPlan:
        raise ScheduleError("a stage waits for itself")

    monkeypatch.setattr(module, "PersistentPlan", wrong)
    monkeypatch.setattr(module, "DecodePlan", lambda *_, **__: "launches")
    hopper: Any = SimpleNamespace(_overlapped=None, _near=False, device=SimpleNamespace(arch="sm_90"))
    config = SimpleNamespace(network=SimpleNamespace(attends=[]))
    given: Any = (SimpleNamespace(quicker_in_launches=False, config=config), None, None)
    with pytest.raises(ScheduleError, match="waits for itself"):
        Engine._quickest(hopper, *given)
