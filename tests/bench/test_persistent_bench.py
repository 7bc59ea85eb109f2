"""The persistent step's benchmark: its sweep stays within what the kernel takes, and a board can be measured by it."""

from dataclasses import replace

import pytest

from tegrad.bench import models, steps
from tegrad.bench.gpu import opened
from tegrad.llm.persistent import Tuning

SMALL = Tuning(consumers=4, per_tile=1, epilogue=2, pipeline_stages=3, attention_warps=4)


def test_every_variant_is_one_that_the_kernel_takes() -> None:
    for start in (Tuning(), replace(Tuning(), consumers=12)):
        for axis in steps.AXES:
            for tuning in steps.variants(start, axis):
                assert tuning.attention_warps <= tuning.consumers
                assert tuning.threads <= 1024
                assert tuning != start


def test_a_kind_of_stage_tells_its_bytes_and_its_share_of_the_bandwidth() -> None:
    part = steps.Part("GATE", 2, wait=1.0, work=6.0, finish=1.0, nbytes=12_000_000)
    told = "GATE       2 stages of   4.00 us: waits    1.0, works    6.0, finishes    1.0"
    assert part.line(2e12) == f"{told};    12.00 MB,  75% of the bandwidth"
    assert replace(part, op="ATTEND", nbytes=0).line(2e12).endswith("finishes    1.0")


def test_a_step_is_what_more_of_them_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = object.__new__(steps.Rig)
    rig.device, rig.dependency = None, None  # type: ignore[assignment]
    monkeypatch.setattr(steps.Rig, "begin", lambda self: None)
    monkeypatch.setattr(steps, "gpu_us", lambda device, launches, dependency: 100.0 + 7.0 * len(launches))
    assert rig.us([object()]) == 7.0  # type: ignore[list-item]


@pytest.mark.board
@pytest.mark.long
@pytest.mark.parametrize("board", ["agx-orin-64gb", "gh100"])
def test_a_step_and_its_stages_are_measured(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = models.ModelShape("llama", 264, 256, 512, 1, 4, 2, 64, 128, 200)
    monkeypatch.setitem(models.SHAPES, "tiny", shape)
    for name, value in (("TEGRAD_BOARD", board), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)
    with opened() as device:
        rig = steps.Rig(device, "tiny-q6k")
        assert steps.measure_tuning(rig, SMALL) > 0
        found = steps.parts(rig, SMALL)
        read = rig.nbytes
        rig.close()
    stages = {part.op: part.stages for part in found}
    assert stages == {"EMBED": 1, "PROJECT": 1, "ATTEND": 1, "ADD": 2, "GATE": 1, "LOGITS": 1}
    assert {part.op for part in found if not part.nbytes} == {"EMBED", "ATTEND"}
    assert sum(part.nbytes for part in found) == read
