"""The CPU's share of a launch is measured on a device that loses nothing by it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tegrad.bench import mlp

sys.path.insert(0, str(Path(__file__).parents[1] / "nv"))
from boards import use_board

pytestmark = pytest.mark.board


@pytest.fixture
def board() -> Iterator[None]:
    """A board that races."""
    with use_board("agx-orin-64gb:24GiB", race=20):
        yield


def test_what_is_submitted_is_done_at_once_and_never_runs(board: None) -> None:
    from tinygrad import Device, Tensor, TinyJit

    state = Tensor([0], device="NV").realize()
    device = Device["NV"]
    count = TinyJit(lambda: state.assign(state + 1).realize())
    for _ in range(4):
        count()
    assert state.tolist() == [4]
    ring = device.compute_gpfifo.entries_count
    with mlp.done_at_once(device):
        for _ in range(2 * ring):
            count()
        device.synchronize()
    for _ in range(3):
        count()
        state.assign(state * 2).realize()
    assert state.tolist() == [((4 + 1) * 2 + 1) * 2 * 2 + 2]
    assert (Tensor(np.arange(5), device="NV") + 1).tolist() == [1, 2, 3, 4, 5]


def test_it_prints_a_line_for_each(board: None, capsys: pytest.CaptureFixture[str]) -> None:
    mlp.show_host(2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" best")[0].rstrip() for line in lines] == list(mlp.calls())
    assert all(float(line.split()[-2]) > 0 for line in lines)
