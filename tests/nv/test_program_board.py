"""Programs on the emulated boards: the cases that the H200 runs, one process a chip, each chip with one renderer."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels import program, words

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hardware"))
from nv_cases import ROOT, run_case

pytestmark = pytest.mark.board

RAW = (
    "signal_after_kernel_qmd",
    "chained_kernels",
    "large_shared_memory",
    "module_variables",
    "local_memory",
    "misaligned_argument_is_refused",
    "named_barriers",
)
RENDERED = ("double_precision", "odd_views", "shared_pool", "jit", "jit_in_flight")


@pytest.mark.parametrize(("chip", "renderer"), [("agx-orin-64gb", "PTX"), ("gh100", "CUDA")])
def test_programs_run_as_they_do_on_hardware(chip: str, renderer: str) -> None:
    names = [f"{name}[{renderer}]" for name in RENDERED]
    code, said, errors = run_case(*names, *RAW, limit=240, TEGRAD_BOARD=chip, CCACHE="1")
    assert code == 0, f"{said}\n{errors[-4000:]}"
    assert errors.count("done ") == len(RENDERED) + len(RAW)


OLD_CODE = """
import numpy as np
import nv_opened
import tegrad
from tegrad.nv import program
from tinygrad import Device
if {off}:
    import tinygrad.runtime.ops_nv
    program.NVProgram._forget_old_code = lambda self: None


def launch(name, value):
    source = f'extern "C" __global__ void {{name}}(int *out) {{{{ out[0] = {{value}}; }}}}'
    made = nv_opened.raw(source, name, 1)
    dev, out = made.dev, nv_opened.buffer(np.zeros(1, np.int32))
    queue = dev.hw_compute_queue_t().exec(made, made.fill_kernargs((out._buf,)), (1, 1, 1), (1, 1, 1))
    queue.signal(dev.timeline_signal, dev.next_timeline()).submit(dev)
    return out.numpy()[0], made.lib_gpu.va_addr


first, at = launch("first", 11)
nv_opened.device().iface.give_back()
second, again = launch("second", 22)
print(at == again, first, second)
"""


@pytest.mark.parametrize(("off", "second"), [(False, 22), (True, 11)])
def test_a_program_where_another_one_was_runs_its_own_code(off: bool, second: int) -> None:
    """Queues that launch without a barrier: with the remedy off, the board runs what its instruction cache holds."""
    environment = {**os.environ, "DEV": "NV", "TEGRAD_BOARD": "agx-orin-64gb", "PARALLEL": "0"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests/hardware")))
    command = [sys.executable, "-c", OLD_CODE.format(off=off)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.split() == ["True", "11", str(second)], done.stderr[-2000:]


def test_a_shorter_program_where_a_longer_one_was_is_no_fault(board: str) -> None:
    """The instruction cache compares with what it holds of the longer one, which may reach past the shorter buffer."""
    from tinygrad import Device

    device = Device["NV"]
    buffer = device.allocator.alloc(4096)
    longer = program(device, "stride")
    longer(buffer, global_size=(1, 1, 1), local_size=(32, 1, 1), vals=(32,))
    at, size = longer.lib_gpu.va_addr, longer.lib_gpu.size
    del longer
    gc.collect()
    device.iface.give_back()
    shorter = []
    while not shorter or shorter[-1].lib_gpu.va_addr != at:
        assert len(shorter) < 64, "no program came to lie there"
        shorter.append(program(device, "store"))
    assert shorter[-1].lib_gpu.size < size
    shorter[-1](buffer, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(7,))
    device.synchronize()
    assert words(buffer) == [7]
