"""Repairs of tinygrad's code: views that misalign vector loads, and blocks whose dimensions are joined."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, UOp, dtypes

from tegrad.nv import codegen, compat
from tegrad.nv.program import LaunchError, NVProgram

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import numpy as np
import tegrad
from tinygrad import Tensor
from tegrad.nv import codegen, launch, program

whole = np.arange(4096, dtype=np.float16)
tensor = Tensor(whole).realize()


def attempt(name, offset):
    try:
        got = (tensor[offset : offset + 1024].contiguous() + 1).numpy()
        print(name, "right" if (got == whole[offset : offset + 1024] + 1).all() else "wrong")
    except Exception as error:
        print(name, type(error).__name__, error)


attempt("both remedies:", 1)
codegen.uninstall()
attempt("no copy:", 2)
program.NVProgram.fill_kernargs = program.NVProgram.__mro__[1].fill_kernargs
launch.check_alignment = lambda *given: None
attempt("neither:", 3)
"""


def run_on_board(program: str, **more: str) -> str:
    """The output of a program on a private board, with `more` in its environment."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DEV": "NV", "TEGRAD_BOARD": "agx-orin-64gb", "PARALLEL": "0"}
    environment |= more
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.board
@pytest.mark.klog_errors("sm |GR exception|error notifier set to 13")  # the misaligned accesses without them
def test_an_odd_view_is_right_and_faults_without_the_remedies() -> None:
    """Each remedy alone keeps the GPU alive; without both, the board raises what the hardware raises."""
    both, copy, neither = run_on_board(PROGRAM).splitlines()
    assert both == "both remedies: right"
    assert copy.startswith("no copy: LaunchError argument 1 of E_")
    assert neither.startswith("neither: DeviceFault")
    assert "misaligned" in neither


def arguments(fake_device: Any, make: Any) -> list[int]:
    """GPU addresses that the kernels of a computation were given."""
    seen: list[int] = []
    original = NVProgram.__call__

    def called(self: Any, *bufs: Any, **how: Any) -> Any:
        seen.extend(b.va_addr for b in bufs)
        return original(self, *bufs, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NVProgram, "__call__", called)
        make().realize()
    assert seen
    return seen


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int32])
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 6, 8, 16])
def test_no_kernel_gets_a_view_at_an_odd_offset(fake_device: Any, dtype: Any, offset: int) -> None:
    tensor = Tensor(np.zeros(4096, dtype)).realize()
    seen = arguments(fake_device, lambda: tensor[offset : offset + 1024].contiguous() + 1)
    assert all(va % codegen.VIEW_ALIGN == 0 for va in seen)


def test_an_aligned_view_stays_zero_copy(fake_device: Any) -> None:
    tensor = Tensor(np.zeros(4096, np.float32)).realize()
    base = tensor.uop.base.buffer._buf.va_addr
    assert base + 16 * 4 in arguments(fake_device, lambda: tensor[16:1040].contiguous() + 1)


def test_without_the_patch_the_view_would_be_passed_on(fake_device: Any) -> None:
    tensor = Tensor(np.zeros(4096, np.float16)).realize()
    codegen.uninstall()
    try:
        with pytest.raises(LaunchError, match=r"its accesses need multiples of 8"):
            (tensor[1:1025].contiguous() + 1).realize()
    finally:
        codegen.install()


def test_a_bitcast_piece_at_an_odd_offset_is_copied(fake_device: Any) -> None:
    tensor = Tensor(np.zeros(4096, np.uint8)).realize()
    seen = arguments(fake_device, lambda: tensor[2:514].bitcast(dtypes.half).contiguous() + 1)
    assert all(va % codegen.VIEW_ALIGN == 0 for va in seen)


def test_other_devices_keep_their_views() -> None:
    piece = Tensor.empty(64, dtype=dtypes.half, device="NULL").realize()[1:33]
    view = piece.uop.contiguous_view()
    assert view is not None
    assert view[1] == 1


def test_installing_twice_is_installing_once() -> None:
    from tinygrad.uop.ops import UOp

    codegen.install()
    once = UOp.contiguous_view
    codegen.install()
    assert UOp.contiguous_view is once


SEARCHED = """
import numpy as np
import tegrad
from tinygrad import Tensor
from tinygrad.codegen.opt import Opt, OptOps, heuristic

FOUND = [  # by BEAM=2 on an H200, for a product of 1,024 in halves
    (OptOps.TC, 0, (-1, 2, 1)), (OptOps.UPCAST, 1, 4), (OptOps.UPCAST, 0, 2), (OptOps.UNROLL, 0, 4),
    (OptOps.LOCAL, 1, 2), (OptOps.LOCAL, 1, 2), (OptOps.LOCAL, 0, 2), (OptOps.SWAP, 0, 1),
]


def as_found(kernel):
    for opt in FOUND:
        kernel.apply_opt(Opt(*opt))
    return kernel


a, b = (np.random.default_rng(seed).standard_normal((256, 256), dtype=np.float32).astype(np.float16) for seed in (0, 1))
tensors = Tensor(a).realize(), Tensor(b).realize()
heuristic.hand_coded_optimizations = as_found
got = (tensors[0] @ tensors[1]).numpy().astype(np.float32)
print(float(np.abs(got - a.astype(np.float32) @ b.astype(np.float32)).max()))
"""


@pytest.mark.board
@pytest.mark.parametrize("renderer", ["CUDA", "PTX"])
def test_a_searched_product_whose_block_has_four_dimensions_keeps_its_warps(renderer: str) -> None:
    """tinygrad joined the warp's dimension with the next: nearly every value was wrong."""
    assert float(run_on_board(SEARCHED, DEV=f"NV:{renderer}")) < 0.05


def test_only_a_blocks_first_dimension_of_a_warp_is_left_alone() -> None:
    block, grid = (1024, 1024, 64), (0x7FFFFFFF, 0xFFFF, 0xFFFF)
    group = codegen._whole_warps(compat.published(codegen.GROUPING))
    stock = compat.published(codegen.GROUPING)
    assert stock((32, 2, 2, 2), block) == (64, 2, 2)
    assert group((32, 2, 2, 2), block) == (32, 4, 2)
    assert group((32, 2, 2, 2, 2), block) == (32, 8, 2)
    for dims, limits in (((32, 2, 2), block), ((16, 2, 2, 2), block), ((32, 2, 2, 2), grid), ((2, 2, 2), (4, 2))):
        assert group(dims, limits) == stock(dims, limits)


@pytest.mark.parametrize("limits", [(1024, 1024, 64), (0x7FFFFFFF, 0xFFFF, 0xFFFF)], ids=["block", "grid"])
def test_a_dimension_that_is_a_symbol_is_no_warp(limits: tuple[int, ...]) -> None:
    """Whether it is 32 is not known: to ask was an error of tinygrad's."""
    group = codegen._whole_warps(compat.published(codegen.GROUPING))
    dims = (UOp.variable("position", 1, 64) + 16, 2, 2, 2)
    assert group(dims, limits) == compat.published(codegen.GROUPING)(dims, limits)
