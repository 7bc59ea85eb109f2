"""The forms of the dependency between two kernels: what they say they order they do order, and the figures come out."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tinygrad.device import BufferSpec

from tegrad.bench import dependencies
from tegrad.bench.dependencies import ALL_FORMS, HOPPER, ONE_FIELD, Probe
from tegrad.bench.gpu import opened
from tegrad.nv import replay
from tegrad.nv.qmd import QMD
from tegrad.nv.replay import DEPENDENCIES, Launch, Recording, up_to

pytestmark = pytest.mark.board

UNORDERED = ("latch-program",)
"""Forms that leave it to the hardware's latches, which the board has not: right only by chance."""


@pytest.fixture(params=["agx-orin-64gb:14GiB", "gh100"])
def racing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device on a board that races."""
    monkeypatch.setenv("TEGRAD_BOARD", request.param)
    monkeypatch.setenv("TEGRAD_RACE", "9")
    monkeypatch.setenv("DEV", "NV")
    with opened() as device:
        yield device


def test_every_form_that_orders_kernels_computes_what_they_should(racing: Any) -> None:
    probe = Probe(racing, 4, 64)
    for name in dependencies.forms(racing.arch):
        form = ALL_FORMS[name]
        assert name in UNORDERED or probe.right(form, count=8, runs=3), name
        assert name in UNORDERED or probe.sees(form, "gather_constant", count=4, runs=2), name
    probe.close()


@pytest.mark.parametrize("racing", ["agx-orin-64gb:17GiB"], indirect=True)
@pytest.mark.parametrize("kernel", ["shift", "gather", "gather_constant"])
def test_a_launch_that_reads_what_a_cache_kept_is_noticed(
    kernel: str, racing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third launch gets its input as the first one found it, as from an L1 that nobody told to forget."""
    probe = Probe(racing, 4, 64)
    kept = racing.allocator.alloc(probe.size, BufferSpec(cpu_access=True, nolru=True))
    kept.cpu_view()[0 : probe.size] = np.arange(4 * 64, dtype=np.int32).tobytes()
    fresh = probe.launches

    def launches(name: str, count: int) -> list[Launch]:
        made = fresh(name, count)
        made[2] = replace(made[2], buffers=(made[2].buffers[0], kept))
        return made

    assert probe.sees(DEPENDENCIES["chain"], kernel, count=4, runs=1)
    monkeypatch.setattr(probe, "launches", launches)
    assert not probe.sees(DEPENDENCIES["chain"], kernel, count=4, runs=1)
    racing.allocator.free(kept, kept.size, BufferSpec(cpu_access=True, nolru=True))
    probe.close()


@pytest.mark.parametrize("racing", ["gh100"], indirect=True)
def test_a_form_that_orders_nothing_is_tried_with_kernels_that_wait(
    racing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependencies, "RECORDED_LAUNCHES", (2, 4))
    monkeypatch.setattr("tegrad.bench.gpu.PASSES", 2)
    asked: list[bool] = []

    def right(probe: Probe, form: Any) -> bool:
        asked.append(probe.waits)
        return probe.waits

    monkeypatch.setattr(Probe, "right", right)
    found = dependencies.cost(racing, "latch-program", 4, 64)
    assert (found.right, found.waits, asked) == (True, True, [False, True])
    with closing(Probe(racing, 4, 64, waits=True)) as probe:
        assert "griddepcontrol.wait" in probe.programs["shift"].lib.decode("latin1")


@pytest.mark.parametrize("racing", ["gh100"], indirect=True)
def test_a_form_for_the_first_launches_ends_before_the_others(racing: Any) -> None:
    probe = Probe(racing, 4, 64)
    for name in ("chain-latch-program", "latch-program"):
        form = up_to(HOPPER[name], 3)
        with Recording(racing, probe.launches("shift", 5), form) as recording:
            memory, layout = recording._memory, replay._lay_out(recording.launches)
            assert memory is not None
            qmds = [QMD(racing, view=memory.cpu_view().view(at, 384)) for at in layout.qmds]
            read = [
                [
                    qmd.read(field)
                    for field in ("wait_on_latch_valid", "arrive_at_latch_valid", "enable_program_pre_exit")
                ]
                for qmd in qmds
            ]
        assert read == [[0, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert probe.right(up_to(HOPPER["chain-latch-program"], 3), count=8)
    probe.close()


def test_only_hopper_tries_the_fields_that_only_it_has() -> None:
    assert dependencies.forms("sm_87") == [*DEPENDENCIES, *ONE_FIELD]
    assert dependencies.forms("sm_90") == [*DEPENDENCIES, *ONE_FIELD, *HOPPER]


def test_a_form_is_measured_and_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb:14GiB")
    monkeypatch.setenv("DEV", "NV")
    monkeypatch.setattr(dependencies, "SHAPES", ((1, 32),))
    monkeypatch.setattr(dependencies, "RECORDED_LAUNCHES", (2, 4))
    monkeypatch.setattr("tegrad.bench.gpu.PASSES", 2)
    (row,) = dependencies.show(["chain"])
    assert capsys.readouterr().out.splitlines() == [dependencies.line(row)]
    assert (row["form"], row["blocks"], row["threads"], row["right"]) == ("chain", 1, 32, True)
    assert row["constant"]
    assert dependencies.line(row).split()[:3] == ["chain", "1x32", "right"]
    assert "nc WRONG" in dependencies.line({**row, "constant": False})
    assert "right, waits" in dependencies.line({**row, "waits": True})
