"""The cost of a kernel in its step is measured for every launch of it, on weights of the model's sizes."""

import pytest
from typer.testing import CliRunner

from tegrad.bench import steps
from tegrad.bench.models import SHAPES, ModelShape
from tegrad.cli.bench import app

pytestmark = pytest.mark.board

TINY = ModelShape("llama", 320, 512, 1024, 2, 8, 4, 64, 4096, 0, eps=1e-5)


def test_every_kernel_of_a_step_is_left_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb:14GiB")
    monkeypatch.setenv("HCQDEV_WAIT_TIMEOUT_MS", "60000")
    monkeypatch.setattr("tegrad.bench.gpu.PASSES", 1)
    monkeypatch.setattr("tegrad.bench.limits.READ_BYTES", 1 << 20)
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    seen: list[int] = []
    plain = steps.gpu_us

    def counting(device: object, launches: list[object], *rest: object) -> float:
        seen.append(len(launches))
        return plain(device, launches, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(steps, "gpu_us", counting)
    ran = CliRunner().invoke(app, ["kernels", "--model", "tiny-q6k"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    whole, twice, *others = seen
    assert whole == 2 + 2 * 5 + 1
    assert twice == 2 * whole
    assert sum(whole - left for left in others) == whole
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("decode of tiny-q6k")
    assert len(lines) == 2 + len(others)
