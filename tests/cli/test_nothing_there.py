"""What needs a GPU where there is none, and what a log without errors means."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tegrad.bench import gpu
from tegrad.cli.klog import _nothing_wrong
from tegrad.diag.klog import KernelLog

SMALL = str(Path(__file__).parents[2] / "tegrad" / "models" / "small.gguf")


def tegrad(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in ("DEV", "TEGRAD_BOARD")}
    return subprocess.run(
        [sys.executable, "-m", "tegrad", *words], env={**own, **variables}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.skipif(any(map(os.path.exists, (gpu.CTRL_NODE, gpu.DESKTOP_NODE))), reason="a GPU is here")
@pytest.mark.parametrize(
    "bench",
    [
        "attention 1b", "dependencies chain", "products 1b-q6k", "prefill 1b-q6k", "sampling", f"step {SMALL}", "loop",
        "persistent", "kernels", f"loading {SMALL}", "decode decode-1b-q6k-d0", "take decode-1b-q6k-d0",
    ],
)  # fmt: skip
def test_a_bench_without_a_gpu_says_so(bench: str) -> None:
    done = tegrad("bench", *bench.split())
    assert "this measures a GPU, and none is found here" in done.stdout + done.stderr
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_bench_on_a_board_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    gpu._say_emulated.cache_clear()  # once a process
    gpu.check_gpu()
    assert "these times are the emulation's" in capsys.readouterr().err


def test_a_bench_on_a_gpu_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("TEGRAD_BOARD", raising=False)
    monkeypatch.setattr(gpu, "CTRL_NODE", str(tmp_path))
    gpu.check_gpu()
    assert capsys.readouterr().err == ""


def test_no_models_to_fit_says_what_to_do(tmp_path: Path) -> None:
    done = tegrad("models", "--fit", HF_HUB_CACHE=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"no models in {tmp_path}: tegrad pull OWNER/REPO:QUANT fetches one; "
        "tegrad models --fit model.gguf tells of a file elsewhere\n"
    )


@pytest.mark.board
def test_a_log_of_a_board_that_did_nothing_is_nothing_to_judge() -> None:
    done = tegrad("klog", TEGRAD_BOARD="agx-orin-64gb")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "tegrad: nothing to judge: the kernel log is empty\n"


class _Kernel:
    """A kernel whose driver is there or not."""

    def __init__(self, driver: bool) -> None:
        self.driver = driver

    def exists(self, path: str) -> bool:
        return self.driver


@pytest.mark.parametrize(
    ("driver", "records", "lines", "said"),
    [
        (False, 900, 0, "nothing to judge: no GPU's driver is loaded here"),
        (True, 0, 0, "nothing to judge: the kernel log is empty"),
        (True, 900, 0, "clean: no error among the 0 lines of the GPU's drivers, of 900 in the kernel log"),
        (True, 900, 7, "clean: no error among the 7 lines of the GPU's drivers, of 900 in the kernel log"),
    ],
)
def test_nothing_there_is_not_clean(driver: bool, records: int, lines: int, said: str) -> None:
    log = KernelLog(_Kernel(driver))  # type: ignore[arg-type]
    log.records, log.lines = records, lines
    assert _nothing_wrong(log).startswith(said)


CASES = Path(__file__).parents[1] / "hardware" / "test_h200.py"


def test_the_hardware_cases_are_listed() -> None:
    done = subprocess.run([sys.executable, CASES, "--help"], capture_output=True, text=True, check=True)
    assert {"cases:", "attention_by_depth", "opened_by_our_device"} <= {
        line.strip() for line in done.stdout.splitlines()
    }


def test_an_unknown_hardware_case_is_a_usage_error() -> None:
    done = subprocess.run([sys.executable, CASES, "nosuch"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("there is no case nosuch; --help lists them")
